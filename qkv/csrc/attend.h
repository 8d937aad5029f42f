// Decoding attention over stored codes: one softmax over all regions of a cache, for a few queries.
// Included once per instruction set, inside a namespace, after a simd_*.h.
//
// The unit of work is a block of up to kBlock tokens of one batch row and kv head. For every block the scores of all
// query rows (the grouped query heads times q_len) are computed from one pass over the codes of the keys, then a running
// softmax, then one pass over the codes of the values. Quantization scales never touch the codes: those of the keys
// multiply the scores, those of the values the probabilities.
//
// With a scale per group of channels a pass goes group by group; with one per channel and group of tokens, the query is
// multiplied by the scales for each group of tokens. Offsets add their product with the query's sum, and with the sum of
// the probabilities. Keys that were equalized or rotated meet a query that was treated alike, once per call; sums of
// rotated values are kept apart and rotated back at the end.
//
// For whole-number codes both passes are integer multiply-adds. The query, and the probabilities of a block times the value
// scales, are rounded to 16 bits relative to their largest magnitude; that error is 1/256 of the rounding of the codes.

// Everything a thread needs: what a block leaves behind, one for all, and a set for each kv head of a band: its queries,
// and what its blocks have come to so far. `turn_to` says which head's set the pointers are of. The memory is kept
// between calls, one buffer a thread. The structure itself is a local variable: were it thread-local, inner loops would
// look its address up again and again.
struct Workspace {
  // Of the head at hand.
  float *query, *packed, *group_sum, *group_unit, *q_unit, *bias, *m, *l, *bad, *acc, *turned;
  int16_t* q16;
  // Of the block at hand.
  float *scores, *prob, *tile, *part, *key_scale, *key_offset, *value_scale, *value_offset, *folded, *unit, *factor,
      *value_shift;
  int16_t *p16, *folded16;
  int rows, key_stride, value_stride;
  bool odd_values;  // whether a value scale of the current block is not finite
  // The planes that tell how keys and values are transformed; null: not at all.
  const QkvPlane *key_plane, *value_plane;

  Workspace(const QkvAttend& a, int64_t heads) {
    static thread_local Buffer<float> memory;
    rows = rows_of(a);
    key_stride = round_up(a.key_dim, 16);
    value_stride = round_up(a.value_dim, 16);
    key_plane = value_plane = nullptr;
    for (int64_t k = 0; k < a.n_regions; ++k) {
      if (!key_plane && is_packed(a.regions[k].key.format)) key_plane = &a.regions[k].key;
      if (!value_plane && is_packed(a.regions[k].value.format) && a.regions[k].value.signs)
        value_plane = &a.regions[k].value;
    }
    const int64_t r = rows, wide = most(most(key_stride, value_stride), kBlock);
    next_ = memory.at_least(heads * head_floats(a) + r * (3 * kBlock + kBlock / 2 + value_stride + 3 + wide + wide / 2) +
                            4 * wide + 16 * 14);
    sets_ = next_;
    set_ = head_floats(a);
    next_ += heads * set_;
    turn_to(0);
    scores = take(r * kBlock);
    prob = take(r * kBlock);
    part = take(r * kBlock);
    p16 = reinterpret_cast<int16_t*>(take(r * kBlock / 2));
    tile = take(r * value_stride);
    folded = take(r * wide);
    folded16 = reinterpret_cast<int16_t*>(take(r * wide / 2));
    key_scale = take(wide);
    key_offset = take(wide);
    value_scale = take(wide);
    value_offset = take(wide);
    unit = take(r);
    factor = take(r);
    value_shift = take(r);
  }

  static int rows_of(const QkvAttend& a) { return static_cast<int>(a.group * a.q_len); }

  // Floats of one head's set.
  static int64_t head_floats(const QkvAttend& a) {
    const int64_t r = rows_of(a), key = round_up(a.key_dim, 16), value = round_up(a.value_dim, 16);
    return 2 * whole(r * key) + whole(r * key / 2) + 2 * whole(r * key / 16) + 5 * whole(r) + 2 * whole(r * value);
  }

  void turn_to(int64_t head) {
    float* const kept = next_;
    const int64_t r = rows;
    next_ = sets_ + head * set_;
    query = take(r * key_stride);
    packed = take(r * key_stride);
    q16 = reinterpret_cast<int16_t*>(take(r * key_stride / 2));
    group_sum = take(r * key_stride / 16);
    group_unit = take(r * key_stride / 16);
    q_unit = take(r);
    bias = take(r);
    m = take(r);
    l = take(r);
    bad = take(r);
    acc = take(r * value_stride);
    turned = take(r * value_stride);
    next_ = kept;
  }

 private:
  float *next_, *sets_;
  int64_t set_;

  static int64_t whole(int64_t n) { return (n + 15) / 16 * 16; }
  float* take(int64_t n) {  // every part begins on a cache line
    float* start = next_;
    next_ += whole(n);
    return start;
  }
};

static const uint8_t* plane_codes(const QkvPlane& plane, int64_t b, int64_t h) {
  return static_cast<const uint8_t*>(plane.codes) + b * plane.codes_stride[0] + h * plane.codes_stride[1];
}

// Scales per token or head of n tokens from `offset` on, times `unit`, padded with 0 to whole lanes. Returns whether all
// are finite.
static bool load_scales(const QkvPlane& plane, int64_t b, int64_t h, int64_t offset, int n, float unit, float* out) {
  const int64_t start = scale_start(plane, b, h);
  const int padded = round_up(n, 16);
  if (plane.scale_kind == QKV_SCALE_TOKEN) {
    const uint16_t* p = static_cast<const uint16_t*>(plane.scale) + start + offset;
    const vf wide = vf_set1(unit);
    vf sum = vf_set1(0);
    int t = 0;
    for (; t + kLanes <= n; t += kLanes) {
      const vf v = vf_mul(vf_load_bf16(p + t), wide);
      sum = vf_fma(v, vf_set1(0), sum);  // 0 * v is 0 unless v is not finite
      vf_store(out + t, v);
    }
    float rest = vf_hsum(sum);
    for (; t < n; ++t) {
      out[t] = bf16_value(p[t]) * unit;
      rest += 0.0f * out[t];
    }
    for (; t < padded; ++t) out[t] = 0.0f;
    return rest == 0.0f;
  }
  const float s = plane.scale_kind == QKV_SCALE_HEAD ? static_cast<const float*>(plane.scale)[start] : 1.0f;
  for (int t = 0; t < padded; ++t) out[t] = t < n ? s * unit : 0.0f;
  return std::fabs(s) <= 3.4028235e38f;
}

static float code_unit(int32_t format) { return format == QKV_E4M3 ? Fp8Codec<7>::kUnit : 1.0f; }

// Rounds rows of n numbers to 16 bits, at most `limit`; unit[r * step] is worth one step of row r, NaN where a row is not
// finite. Works in whole sets of 16: behind the n numbers there are zeros, and become zeros.
static void round_rows(const float* x, int64_t stride, int rows, int n, float limit, int16_t* out, float* unit,
                       int64_t step = 1) {
  const vf zero = vf_set1(0);
  const int padded = round_up(n, 16);
  for (int r = 0; r < rows; ++r, x += stride, out += stride) {
    vf top = zero, odd = zero;
    for (int d = 0; d < padded; d += kLanes) {
      const vf v = vf_load(x + d);
      top = vf_max(vf_max(v, vf_sub(zero, v)), top);
      odd = vf_fma(v, zero, odd);  // 0 unless v is not finite
    }
    const bool finite = vf_hsum(odd) == 0.0f;
    const float largest = vf_hmax(top);
    // Below this the reciprocal would overflow; such a row makes no score worth the name.
    const bool usable = finite && largest > 1e-34f;
    unit[r * step] = finite ? largest / limit : __builtin_nanf("");
    if (!usable) {
      std::memset(out, 0, padded * sizeof(int16_t));
      continue;
    }
    const vf inverse = vf_set1(limit / largest);
    for (int d = 0; d < padded; d += kLanes) vf_store_i16(out + d, vf_mul(vf_load(x + d), inverse));
  }
}

// Multiplies n numbers (in whole sets of 16, zeros behind them) by scales, rounds the products to 16 bits, at most
// `limit`, and gives in `sum` the numbers' product with the offsets. Returns what one step of the rounded products is
// worth; NaN where the sum is not finite, and then they are zeros. `products` has room for what is rounded.
static float fold_row(const float* x, const float* scale, const float* offset, int n, float limit, float* products,
                      int16_t* out, float* sum) {
  vf top = vf_set1(0), total = vf_set1(0);
  for (int d = 0; d < n; d += kLanes) {
    const vf v = vf_load(x + d), product = vf_mul(v, vf_load(scale + d));
    vf_store(products + d, product);
    top = vf_max(vf_abs(product), top);
    total = vf_fma(v, vf_load(offset + d), vf_fma(product, vf_set1(0), total));  // not a number if the product is none
  }
  *sum = vf_hsum(total);
  const float largest = vf_hmax(top);
  const bool finite = std::fabs(*sum) <= 3.4028235e38f && largest <= 3.4028235e38f;
  // Below this the reciprocal would overflow; such a row makes no score worth the name.
  const bool usable = finite && largest > 1e-34f;
  if (!usable) {
    std::memset(out, 0, n * sizeof(int16_t));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const vf inverse = vf_set1(limit / largest);
  for (int d = 0; d < n; d += kLanes) vf_store_i16(out + d, vf_mul(vf_load(products + d), inverse));
  return largest / limit;
}

// The largest multiplier with which no sum of products over the channels leaves int32.
static float query_limit(int64_t key_dim) {
  return least(32767.0f, std::floor(2147483520.0f / (127.0f * static_cast<float>(key_dim))));
}

// The query as quantized keys want it: multiplied where they were divided, rotated as they were.
static void fold_query(const QkvAttend& a, Workspace& w, int64_t h) {
  const int dim = static_cast<int>(a.key_dim);
  const QkvPlane* plane = w.key_plane;
  for (int r = 0; r < w.rows; ++r) {
    const float* q = w.query + r * w.key_stride;
    float* k = w.packed + r * w.key_stride;
    std::memcpy(k, q, w.key_stride * sizeof(float));
    w.bias[r] = 0;
    if (!plane) continue;
    if (plane->centre)
      for (int d = 0; d < dim; ++d) w.bias[r] += q[d] * plane->centre[h * dim + d];
    if (plane->multiplier)
      for (int d = 0; d < dim; ++d) k[d] *= plane->multiplier[h * dim + d];
    if (plane->signs) {
      for (int d = 0; d < dim; ++d) k[d] *= plane->signs[d];
      hadamard(k, dim, plane->rotation);
    }
  }
  if (!plane || plane->scale_kind != QKV_SCALE_GROUP)
    return round_rows(w.packed, w.key_stride, w.rows, dim, query_limit(dim), w.q16, w.q_unit);
  // Group by group: where keys of a group are large the query is small, and must not be rounded as elsewhere.
  const int groups = w.key_stride / 16;
  for (int g = 0, at = 0; at < dim; ++g, at += plane->group) {
    const int n = least(plane->group, dim - at);
    round_rows(w.packed + at, w.key_stride, w.rows, n, query_limit(dim), w.q16 + at, w.group_unit + g, groups);
    for (int r = 0; r < w.rows; ++r) {
      const float* k = w.packed + r * w.key_stride + at;
      float sum = 0;
      for (int d = 0; d < n; ++d) sum += k[d];
      w.group_sum[r * groups + g] = sum;
    }
  }
}

static void begin(const QkvAttend& a, Workspace& w, int64_t b, int64_t h) {
  for (int64_t g = 0; g < a.group; ++g) {
    for (int64_t i = 0; i < a.q_len; ++i) {
      const int64_t r = g * a.q_len + i, head = h * a.group + g;
      float* q = w.query + r * w.key_stride;
      std::memset(q, 0, w.key_stride * sizeof(float));
      load_row(q, a.query, b * a.query_stride[0] + head * a.query_stride[1] + i * a.query_stride[2], a.key_dim,
               a.query_dtype);
      w.m[r] = kMinusInf;
      w.l[r] = 0;
      w.bad[r] = 0;
    }
  }
  const size_t size = static_cast<size_t>(w.rows) * w.value_stride * sizeof(float);
  std::memset(w.acc, 0, size);
  if (w.value_plane) std::memset(w.turned, 0, size);
  fold_query(a, w, h);
}

// Bytes of a tile of keys (16 tokens) and of values (2 tokens).
static int64_t key_tile(const QkvPlane& key, int64_t dim) { return (dim + 1) / 2 * 4 * code_bits(key.format); }
static int64_t value_tile(const QkvPlane& value, int64_t dim) {
  const int bits = code_bits(value.format);
  return bits == 8 ? 2 * dim : (dim + 15) / 16 * 4 * bits;
}

// Where a block of tokens begins, of quantized planes; for rows, near enough to be fetched early.
static const uint8_t* key_block(const QkvAttend& a, const QkvPlane& key, const uint8_t* codes, int64_t offset) {
  return codes + offset / 16 * key_tile(key, a.key_dim);
}
static const uint8_t* value_block(const QkvAttend& a, const QkvPlane& value, const uint8_t* codes, int64_t offset) {
  return codes + offset / 2 * value_tile(value, a.value_dim);
}

// Which multipliers a codec takes: of 16 bits, or float32.
static inline const int16_t* multipliers(const int16_t* rounded, const float*, const int16_t*) { return rounded; }
static inline const float* multipliers(const int16_t*, const float* exact, const float*) { return exact; }
template <class C>
static inline const typename C::Mult* chosen(const int16_t* rounded, const float* exact) {
  return multipliers(rounded, exact, static_cast<const typename C::Mult*>(nullptr));
}
template <class C>
static constexpr bool whole_numbers() {
  return sizeof(typename C::Mult) == 2;
}

// Products of all rows with n quantized keys. With a scale per token or head, without it; else finished scores.
template <class C>
static void key_products(const QkvAttend& a, Workspace& w, const QkvPlane& key, const uint8_t* codes, int64_t b,
                         int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  const int dim = static_cast<int>(a.key_dim), pairs = (dim + 1) / 2, tiles = (n + 15) / 16;
  const int64_t tile = pairs * C::kBytes;
  const uint8_t* base = codes + offset / 16 * tile;
  if (key.scale_kind == QKV_SCALE_GROUP) {
    for (int g = 0, at = 0; at < dim; ++g, at += key.group) {
      const int count = (least(key.group, dim - at) + 1) / 2, skip = at / 2 * C::kBytes;
      const Pass pass{base + skip, tile, C::kBytes, tiles, count, ahead + skip * tiles, key.table};
      dot_rows<C>(pass, w.rows, chosen<C>(w.q16, w.packed) + at, w.key_stride, w.part, kBlock);
      const int64_t start = scale_start(key, b, h) + g * key.group_stride + offset;
      load_vectors(key, start, n, round_up(n, 16), C::kUnit, w.key_scale, w.key_offset);
      for (int r = 0; r < w.rows; ++r) {
        const int64_t own = r * (w.key_stride / 16) + g;
        const vf unit = vf_set1(whole_numbers<C>() ? w.group_unit[own] : 1.0f), sum = vf_set1(w.group_sum[own]);
        const float* part = w.part + r * kBlock;
        float* s = w.scores + r * kBlock;
        for (int t = 0; t < n; t += kLanes) {
          vf v = vf_mul(vf_load(w.key_offset + t), sum);
          if (g) v = vf_add(v, vf_load(s + t));
          vf_store(s + t, vf_fma(vf_mul(vf_load(part + t), unit), vf_load(w.key_scale + t), v));
        }
      }
    }
    return;
  }
  if (key.scale_kind == QKV_SCALE_CHANNEL) {
    const float limit = query_limit(dim);
    for (int t = 0, count; t < n; t += count) {
      const int64_t group = (offset + t) / key.group;
      count = static_cast<int>(least<int64_t>(n - t, (group + 1) * key.group - offset - t));
      load_vectors(key, scale_start(key, b, h) + group * key.group_stride, dim, w.key_stride, C::kUnit, w.key_scale,
                   w.key_offset);
      for (int r = 0; r < w.rows; ++r) {
        const float* q = w.packed + r * w.key_stride;
        float* f = w.folded + r * w.key_stride;
        if (whole_numbers<C>()) {
          w.unit[r] = fold_row(q, w.key_scale, w.key_offset, w.key_stride, limit, f, w.folded16 + r * w.key_stride,
                               w.factor + r);
          continue;
        }
        vf sum = vf_set1(0);
        for (int d = 0; d < w.key_stride; d += kLanes) {
          const vf v = vf_load(q + d);
          vf_store(f + d, vf_mul(v, vf_load(w.key_scale + d)));
          sum = vf_fma(v, vf_load(w.key_offset + d), sum);
        }
        w.factor[r] = vf_hsum(sum);
      }
      const int64_t skip = t / 16 * tile;
      const Pass pass{base + skip, tile, C::kBytes, (count + 15) / 16, pairs, ahead + skip, key.table};
      dot_rows<C>(pass, w.rows, chosen<C>(w.folded16, w.folded), w.key_stride, w.scores + t, kBlock);
      for (int r = 0; r < w.rows; ++r) {
        const vf unit = vf_set1(whole_numbers<C>() ? w.unit[r] : 1.0f), shift = vf_set1(w.factor[r]);
        float* s = w.scores + r * kBlock + t;
        for (int i = 0; i < count; i += kLanes) vf_store(s + i, vf_fma(vf_load(s + i), unit, shift));
      }
    }
    return;
  }
  const Pass pass{base, tile, C::kBytes, tiles, pairs, ahead, key.table};
  dot_rows<C>(pass, w.rows, chosen<C>(w.q16, w.packed), w.key_stride, w.scores, kBlock);
}

static void raw_scores(const QkvAttend& a, Workspace& w, const QkvPlane& key, const uint8_t* codes, int64_t b,
                       int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  switch (key.format) {
    case QKV_INT8: return key_products<Int8Codec>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_E4M3: return key_products<Fp8Codec<7>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_E5M2: return key_products<Fp8Codec<8>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_INT2: return key_products<IntCodec<2>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_INT3: return key_products<IntCodec<3>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_INT4: return key_products<IntCodec<4>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_INT5: return key_products<IntCodec<5>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_INT6: return key_products<IntCodec<6>>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_LUT4: return key_products<Lut4Codec>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_LUT8: return key_products<Lut8Codec>(a, w, key, codes, b, h, offset, n, ahead);
    case QKV_F32:
      return scores_float<QKV_F32>(codes + offset * a.key_dim * 4, n, a.key_dim, w.query, w.key_stride, w.rows,
                                   w.scores, kBlock);
    case QKV_BF16:
      return scores_float<QKV_BF16>(codes + offset * a.key_dim * 2, n, a.key_dim, w.query, w.key_stride, w.rows,
                                    w.scores, kBlock);
    default:
      return scores_float<QKV_F16>(codes + offset * a.key_dim * 2, n, a.key_dim, w.query, w.key_stride, w.rows,
                                   w.scores, kBlock);
  }
}

static bool whole_number_format(int32_t format) { return format == QKV_INT8 || (format >= QKV_INT2 && format <= QKV_INT6); }

// Whether scales are applied to whole scores, and to probabilities, by the softmax: those per token and head.
static bool scaled_outside(const QkvPlane& plane) {
  return is_packed(plane.format) && plane.scale_kind != QKV_SCALE_GROUP && plane.scale_kind != QKV_SCALE_CHANNEL;
}

// A block: the tokens offset .. offset + n of a region's planes. The first `hidden` of them are not to be seen; they are
// there because a tile of keys is read whole. `column` is the mask's column of the block's first token.
struct Span {
  int64_t offset, column, kv_len;
  int n, hidden;
};

static int64_t first_token(const QkvRegion& region) { return region.skip / 16 * 16; }

static int64_t block_count(const QkvRegion& region) {
  return region.length ? (region.skip + region.length - first_token(region) + kBlock - 1) / kBlock : 0;
}

// Block j of a region whose first visible token has mask column `column`.
static Span block_span(const QkvRegion& region, int64_t j, int64_t column, int64_t kv_len) {
  const int64_t offset = first_token(region) + j * kBlock;
  const int64_t n = least<int64_t>(kBlock, region.skip + region.length - offset);
  const int64_t hidden = most<int64_t>(0, region.skip - offset);
  return {offset, column + offset - region.skip, kv_len, static_cast<int>(n), static_cast<int>(hidden)};
}

// Softcap and mask of one row of scores, which are in units of log2.
static void bend_scores(const QkvAttend& a, float* s, int64_t b, int64_t head, int64_t i, const Span& span) {
  const int n = span.n;
  if (a.softcap > 0) {
    const float cap = a.softcap * kLog2e;
    for (int t = 0; t < n; ++t) s[t] = cap * std::tanh(s[t] / cap);
  }
  if (a.mask_kind != QKV_MASK_NONE) {
    const int64_t at = b * a.mask_stride[0] + head * a.mask_stride[1] + i * a.mask_stride[2];
    const int64_t step = a.mask_stride[3];
    if (a.mask_kind == QKV_MASK_BOOL) {
      const uint8_t* mask = static_cast<const uint8_t*>(a.mask) + at + span.column * step;
      for (int t = span.hidden; t < n; ++t) s[t] = mask[t * step] ? s[t] : kMinusInf;
    } else {
      const float* mask = static_cast<const float*>(a.mask) + at + span.column * step;
      // Not a plain sum: a score that is not a number stays hidden where the mask hides it.
      for (int t = span.hidden; t < n; ++t) {
        const float m = mask[t * step];
        s[t] = m == kMinusInf ? kMinusInf : s[t] + m * kLog2e;
      }
    }
  }
  if (a.causal) {
    const int64_t visible = span.kv_len - a.q_len + i + 1 - span.column;
    for (int64_t t = visible > 0 ? visible : 0; t < n; ++t) s[t] = kMinusInf;
  }
  for (int t = 0; t < span.hidden; ++t) s[t] = kMinusInf;
}

// Turns the products of row r into scores in units of log2, padded with -inf to whole lanes; returns the largest.
static float scale_scores(const QkvAttend& a, Workspace& w, int r, bool scaled, float unit, float bias, int64_t b,
                          int64_t head, int64_t i, const Span& span) {
  const int n = span.n, padded = round_up(n, 16);
  float* s = w.scores + r * kBlock;
  const vf wide = vf_set1(unit), shift = vf_set1(bias);
  vf top = vf_set1(kMinusInf);
  const bool bent = a.softcap > 0 || a.mask_kind != QKV_MASK_NONE || a.causal || span.hidden > 0;
  const int whole = bent ? 0 : n / 16 * 16;
  int t = 0;
  for (; t < whole; t += kLanes) {
    vf v = vf_mul(vf_load(s + t), wide);
    v = scaled ? vf_fma(v, vf_load(w.key_scale + t), shift) : vf_add(v, shift);
    vf_store(s + t, v);
    top = vf_max(top, v);
  }
  for (; t < padded; t += kLanes) {
    vf v = vf_mul(vf_load(s + t), wide);
    v = scaled ? vf_fma(v, vf_load(w.key_scale + t), shift) : vf_add(v, shift);
    vf_store(s + t, v);
  }
  if (bent) bend_scores(a, s, b, head, i, span);
  for (t = n; t < padded; ++t) s[t] = kMinusInf;
  for (t = whole; t < padded; t += kLanes) top = vf_max(top, vf_load(s + t));
  return vf_hmax(top);
}

// A value whose scale is not finite makes the rows that attend to it not-a-number, and no others. Rare, so apart.
static void mark_odd_values(Workspace& w, int r, int n) {
  float* p = w.prob + r * kBlock;
  const float* s = w.scores + r * kBlock;
  for (int t = 0; t < n; ++t) {
    if (std::fabs(w.value_scale[t]) <= 3.4028235e38f) continue;
    if (s[t] > kMinusInf) w.bad[r] = 1;
    p[t] = 0;
  }
}

static void shrink_row(float* x, int n, float factor) {
  const vf wide = vf_set1(factor);
  for (int d = 0; d < n; d += kLanes) vf_store(x + d, vf_mul(vf_load(x + d), wide));
}

// Running softmax of one row over the block, whose largest score is `peak`. Leaves in `prob` (and `p16`) the weights of
// the values.
static void weigh(Workspace& w, int r, int n, float peak, bool rounded, bool scaled) {
  const int padded = round_up(n, 16);
  const float* s = w.scores + r * kBlock;
  float* p = w.prob + r * kBlock;
  int16_t* p16 = w.p16 + r * kBlock;
  peak = w.m[r] > peak ? w.m[r] : peak;
  w.factor[r] = 0;
  if (peak == kMinusInf) {  // nothing is visible yet
    // A score that is not a number can hide behind a maximum of -inf; it must not be lost.
    for (int t = 0; t < n; ++t)
      if (s[t] != s[t]) w.bad[r] = 1;
    std::memset(p, 0, padded * sizeof(float));
    std::memset(p16, 0, padded * sizeof(int16_t));
    return;
  }
  if (w.m[r] != peak) {
    const float shrink = w.m[r] == kMinusInf ? 0.0f : exp2_of(w.m[r] - peak);
    w.l[r] *= shrink;
    shrink_row(w.acc + r * w.value_stride, w.value_stride, shrink);
    if (w.value_plane) shrink_row(w.turned + r * w.value_stride, w.value_stride, shrink);
    w.m[r] = peak;
  }
  const vf centre = vf_set1(peak);
  vf sum = vf_set1(0), top = vf_set1(0);
  for (int t = 0; t < padded; t += kLanes) {
    vf e = vf_exp2(vf_sub(vf_load(s + t), centre));
    sum = vf_add(sum, e);
    if (scaled) e = vf_mul(e, vf_load(w.value_scale + t));
    top = vf_max(e, top);
    vf_store(p + t, e);
  }
  w.l[r] += vf_hsum(sum);
  if (w.odd_values) {
    mark_odd_values(w, r, n);
    top = vf_set1(0);
    for (int t = 0; t < padded; t += kLanes) top = vf_max(vf_load(p + t), top);
  }
  w.factor[r] = 1.0f;
  if (!rounded) return;
  const float largest = vf_hmax(top);
  // Below this the reciprocal would overflow; such weights add nothing.
  const bool usable = largest > 1e-34f && largest <= 3.4028235e38f;
  const vf inverse = vf_set1(usable ? 32767.0f / largest : 0.0f);
  for (int t = 0; t < padded; t += kLanes) vf_store_i16(p16 + t, vf_mul(vf_load(p + t), inverse));
  w.factor[r] = usable ? largest / 32767.0f : 0.0f;
}

// x[d] += add[d] * unit + shift for n channels, in whole lanes.
static inline void add_row(float* x, const float* add, int n, float unit, float shift) {
  const vf wide = vf_set1(unit), up = vf_set1(shift);
  for (int d = 0; d < n; d += kLanes) vf_store(x + d, vf_add(vf_fma(vf_load(add + d), wide, vf_load(x + d)), up));
}

// Adds n quantized values with a scale per group of channels, weighed by `prob`.
template <class C>
static void add_grouped(const QkvAttend& a, Workspace& w, const QkvPlane& value, const Pass& whole, int64_t b,
                        int64_t h, int64_t offset, int n, float* sums) {
  const int dim = static_cast<int>(a.value_dim), padded = round_up(n, 16);
  for (int g = 0, at = 0; at < dim; ++g, at += value.group) {
    const int width = least(value.group, dim - at), units = (width + 15) / 16;
    const int64_t start = scale_start(value, b, h) + g * value.group_stride + offset;
    const bool finite = load_vectors(value, start, n, padded, C::kUnit, w.value_scale, w.value_offset);
    const bool rounds = whole_numbers<C>() && finite;
    for (int r = 0; r < w.rows; ++r) {
      const float* p = w.prob + r * kBlock;
      float* f = w.folded + r * kBlock;
      if (rounds) {
        w.unit[r] = fold_row(p, w.value_scale, w.value_offset, padded, 32767.0f, f, w.folded16 + r * kBlock,
                             w.value_shift + r);
        continue;
      }
      vf shift = vf_set1(0);
      for (int t = 0; t < padded; t += kLanes) {
        const vf v = vf_load(p + t);
        vf_store(f + t, vf_mul(v, vf_load(w.value_scale + t)));
        shift = vf_fma(v, vf_load(w.value_offset + t), shift);
      }
      w.value_shift[r] = vf_hsum(shift);
      if (finite) continue;
      // A value that is not finite makes the channels of its group not-a-number, in the rows that attend to it.
      float sum = 0;
      bool odd = false;
      for (int t = 0; t < n; ++t) {
        if (std::fabs(w.value_scale[t]) <= 3.4028235e38f) sum += p[t] * w.value_offset[t];
        else f[t] = 0, odd = odd || w.scores[r * kBlock + t] > kMinusInf;
      }
      w.value_shift[r] = odd ? __builtin_nanf("") : sum;
    }
    if (whole_numbers<C>() && !rounds)
      round_rows(w.folded, kBlock, w.rows, padded, 32767.0f, w.folded16, w.unit);
    const Pass pass{whole.base + at / 16 * C::kBytes, C::kBytes, whole.step, units, whole.n,
                    whole.ahead + at / 16 * C::kBytes * whole.n, whole.table};
    dot_rows<C>(pass, w.rows, chosen<C>(w.folded16, w.folded), kBlock, w.tile, w.value_stride);
    for (int r = 0; r < w.rows; ++r)
      add_row(sums + r * w.value_stride + at, w.tile + r * w.value_stride, units * 16,
              whole_numbers<C>() ? w.unit[r] : 1.0f, w.value_shift[r]);
  }
}

// Adds n quantized values with a scale per channel over groups of tokens, weighed by `prob`, which is rounded group by
// group: where values of a group are large their weights may be small.
template <class C>
static void add_by_channel(const QkvAttend& a, Workspace& w, const QkvPlane& value, const Pass& whole, int64_t b,
                           int64_t h, int64_t offset, int n, float* sums) {
  const int dim = static_cast<int>(a.value_dim);
  for (int t = 0, count; t < n; t += count) {
    const int64_t group = (offset + t) / value.group;
    count = static_cast<int>(least<int64_t>(n - t, (group + 1) * value.group - offset - t));
    load_vectors(value, scale_start(value, b, h) + group * value.group_stride, dim, w.value_stride, C::kUnit,
                 w.value_scale, w.value_offset);
    const Pass pass{whole.base + t / 2 * whole.step, C::kBytes, whole.step, whole.groups, (count + 1) / 2,
                    whole.ahead + t / 2 * whole.step, whole.table};
    if (whole_numbers<C>())
      round_rows(w.prob + t, kBlock, w.rows, count, 32767.0f, w.p16 + t, w.unit);
    dot_rows<C>(pass, w.rows, chosen<C>(w.p16, w.prob) + t, kBlock, w.tile, w.value_stride);
    const bool steps_of_scale = whole_numbers<C>() && value.offset_type == QKV_ZERO_POINT;
    if (steps_of_scale) {
      const int8_t* zero = static_cast<const int8_t*>(value.offset) + scale_start(value, b, h) + group * value.group_stride;
      for (int d = 0; d < dim; ++d) w.value_offset[d] = static_cast<float>(zero[d]);
    }
    for (int r = 0; r < w.rows; ++r) {
      const float* p = w.prob + r * kBlock + t;
      float total = 0;
      for (int i = 0; i < count; ++i) total += p[i];
      if (total == 0.0f) continue;  // whatever the scales are
      const vf unit = vf_set1(whole_numbers<C>() ? w.unit[r] : 1.0f);
      const float* add = w.tile + r * w.value_stride;
      float* x = sums + r * w.value_stride;
      if (steps_of_scale) {
        // Codes that their zero points cancel leave nothing: both sums are the same whole number, rounded the same way.
        int steps = 0;
        for (int i = 0; i < count; ++i) steps += w.p16[r * kBlock + t + i];
        const vf mass = vf_set1(static_cast<float>(steps));
        for (int d = 0; d < w.value_stride; d += kLanes) {
          const vf v = vf_add(vf_load(add + d), vf_mul(vf_load(w.value_offset + d), mass));
          vf_store(x + d, vf_fma(vf_mul(v, unit), vf_load(w.value_scale + d), vf_load(x + d)));
        }
        continue;
      }
      const vf mass = vf_set1(total);
      for (int d = 0; d < w.value_stride; d += kLanes) {
        const vf v = vf_fma(vf_load(w.value_offset + d), mass, vf_load(x + d));
        vf_store(x + d, vf_fma(vf_mul(vf_load(add + d), unit), vf_load(w.value_scale + d), v));
      }
    }
  }
}

template <class C>
static void add_codes(const QkvAttend& a, Workspace& w, const QkvPlane& value, const uint8_t* codes, int64_t b,
                      int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  float* sums = value.signs ? w.turned : w.acc;
  const Pass pass{value_block(a, value, codes, offset),  C::kBytes,   value_tile(value, a.value_dim),
                  round_up(a.value_dim, 16) / 16, (n + 1) / 2, ahead, value.table};
  if (value.scale_kind == QKV_SCALE_GROUP) return add_grouped<C>(a, w, value, pass, b, h, offset, n, sums);
  if (value.scale_kind == QKV_SCALE_CHANNEL) return add_by_channel<C>(a, w, value, pass, b, h, offset, n, sums);
  dot_rows<C>(pass, w.rows, chosen<C>(w.p16, w.prob), kBlock, w.tile, w.value_stride);
  for (int r = 0; r < w.rows; ++r)
    add_row(sums + r * w.value_stride, w.tile + r * w.value_stride, w.value_stride, w.factor[r], 0.0f);
}

static void add_values(const QkvAttend& a, Workspace& w, const QkvPlane& value, const uint8_t* codes, int64_t b,
                       int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  const int64_t row = offset * a.value_dim;
  switch (value.format) {
    case QKV_INT8: return add_codes<Int8Codec>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_E4M3: return add_codes<Fp8Codec<7>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_E5M2: return add_codes<Fp8Codec<8>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_INT2: return add_codes<IntCodec<2>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_INT3: return add_codes<IntCodec<3>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_INT4: return add_codes<IntCodec<4>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_INT5: return add_codes<IntCodec<5>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_INT6: return add_codes<IntCodec<6>>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_LUT4: return add_codes<Lut4Codec>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_LUT8: return add_codes<Lut8Codec>(a, w, value, codes, b, h, offset, n, ahead);
    case QKV_F32:
      return values_float<QKV_F32>(codes + row * 4, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    case QKV_BF16:
      return values_float<QKV_BF16>(codes + row * 2, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    default:
      return values_float<QKV_F16>(codes + row * 2, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
  }
}

// `ahead`: the keys of the block that comes next, to be fetched while this one's values are read.
static void block(const QkvAttend& a, Workspace& w, const QkvRegion& region, int64_t b, int64_t h, const Span& span,
                  const uint8_t* ahead) {
  const int64_t offset = span.offset;
  const int n = span.n;
  const bool key_scaled = scaled_outside(region.key), value_scaled = scaled_outside(region.value);
  const bool packed = is_packed(region.key.format);
  const uint8_t* value_codes = plane_codes(region.value, b, h);
  raw_scores(a, w, region.key, plane_codes(region.key, b, h), b, h, offset, n,
             value_block(a, region.value, value_codes, offset));
  if (key_scaled) load_scales(region.key, b, h, offset, n, code_unit(region.key.format), w.key_scale);
  w.odd_values = value_scaled &&
                 !load_scales(region.value, b, h, offset, n, code_unit(region.value.format), w.value_scale);
  const bool rounded = whole_number_format(region.value.format) && value_scaled;
  for (int64_t g = 0; g < a.group; ++g) {
    for (int64_t i = 0; i < a.q_len; ++i) {
      const int r = static_cast<int>(g * a.q_len + i);
      const int64_t head = h * a.group + g;
      const float scale = a.softmax_scale * kLog2e;
      const float unit = scale * (key_scaled && whole_number_format(region.key.format) ? w.q_unit[r] : 1.0f);
      const float peak = scale_scores(a, w, r, key_scaled, unit, packed ? scale * w.bias[r] : 0.0f, b, head, i, span);
      weigh(w, r, n, peak, rounded, value_scaled);
    }
  }
  add_values(a, w, region.value, value_codes, b, h, offset, n, ahead);
}

// The state of all rows of one batch row and kv head after some of its blocks, to be merged with that of the others:
// m, l and bad of each row, then the accumulators.
struct Partial {
  const float *m, *l, *bad;
  float* acc;

  Partial(float* at, int rows) : m(at), l(at + rows), bad(at + 2 * rows), acc(at + 3 * rows) {}
  static int64_t floats(int rows, int stride) { return static_cast<int64_t>(rows) * (3 + stride); }
};

static void finish_row(const QkvAttend& a, int64_t b, int64_t h, int r, float m, float l, float bad,
                       const float* acc) {
  const int64_t g = r / a.q_len, i = r % a.q_len, head = h * a.group + g, heads = a.kv_heads * a.group;
  float grow = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head] * kLog2e;
    if (sink > m) {
      grow = m == kMinusInf ? 0.0f : exp2_of(m - sink);
      l = l * grow + 1.0f;
    } else if (m > kMinusInf) {
      l += exp2_of(sink - m);
    }
  }
  float inverse = l == 0 ? 0.0f : grow / l;  // a row that sees nothing gives zeros
  if (bad != 0) inverse = __builtin_nanf("");
  const int64_t at = ((b * a.q_len + i) * heads + head) * a.value_dim;
  if (a.query_dtype == QKV_F32) {
    float* out = static_cast<float*>(a.out) + at;
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] = acc[d] * inverse;
  } else {
    uint16_t* out = static_cast<uint16_t*>(a.out) + at;
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] = to_bf16(acc[d] * inverse);
  }
}

static void finish(const QkvAttend& a, const Workspace& w, int64_t b, int64_t h) {
  for (int r = 0; r < w.rows; ++r) finish_row(a, b, h, r, w.m[r], w.l[r], w.bad[r], w.acc + r * w.value_stride);
}

static void save(const Workspace& w, float* at) {
  const size_t rows = w.rows * sizeof(float);
  std::memcpy(at, w.m, rows);
  std::memcpy(at + w.rows, w.l, rows);
  std::memcpy(at + 2 * w.rows, w.bad, rows);
  std::memcpy(at + 3 * w.rows, w.acc, rows * w.value_stride);
}

// Merges the partial results that n threads made of one batch row and kv head: `first`, and n - 1 from `rest` on, `step`
// floats apart.
static void merge(const QkvAttend& a, int64_t b, int64_t h, float* first, float* rest, int64_t step, int n) {
  const int rows = Workspace::rows_of(a), stride = round_up(a.value_dim, 16);
  for (int r = 0; r < rows; ++r) {
    const Partial whole(first, rows);
    float m = whole.m[r];
    for (int k = 1; k < n; ++k) m = most(m, Partial(rest + (k - 1) * step, rows).m[r]);
    float l = 0, bad = 0;
    float* acc = whole.acc + static_cast<int64_t>(r) * stride;
    for (int k = 0; k < n; ++k) {
      const Partial p(k == 0 ? first : rest + (k - 1) * step, rows);
      bad += p.bad[r];
      const float f = p.m[r] == kMinusInf ? 0.0f : exp2_of(p.m[r] - m);
      const float* from = p.acc + static_cast<int64_t>(r) * stride;
      l += p.l[r] * f;
      for (int d = 0; d < stride; ++d) acc[d] = k == 0 ? from[d] * f : acc[d] + from[d] * f;
    }
    finish_row(a, b, h, r, m, l, bad, acc);
  }
}

// Begins to fetch the scales and offsets of n tokens from `offset` on.
static void fetch_scales(const QkvPlane& plane, int64_t dim, int64_t b, int64_t h, int64_t offset, int64_t n) {
  if (!is_packed(plane.format) || plane.scale_kind == QKV_SCALE_HEAD) return;
  int64_t at = scale_start(plane, b, h), count = n, runs = 1;
  if (plane.scale_kind == QKV_SCALE_CHANNEL) {
    at += offset / plane.group * plane.group_stride;
    count = (n + plane.group - 1) / plane.group * plane.group_stride;
  } else {
    at += offset;
    if (plane.scale_kind == QKV_SCALE_GROUP) runs = (dim + plane.group - 1) / plane.group;
  }
  const int64_t width = plane.scale_type == QKV_BF16_SCALE ? 2 : 1;
  const int64_t offset_width = plane.offset_type == QKV_OFFSET_BF16 ? 2 : 1;
  for (int64_t r = 0; r < runs; ++r, at += plane.group_stride) {
    const char* scale = static_cast<const char*>(plane.scale) + at * width;
    for (int64_t k = 0; k < count * width; k += 64) prefetch(scale + k);
    if (!plane.offset) continue;
    const char* shift = static_cast<const char*>(plane.offset) + at * offset_width;
    for (int64_t k = 0; k < count * offset_width; k += 64) prefetch(shift + k);
  }
}

// Begins to fetch the scales of block j of one head of all batch rows; returns where its keys are.
static const uint8_t* fetch_block(const QkvAttend& a, const QkvRegion& region, int64_t head, int64_t j) {
  const int64_t b = head / a.kv_heads, h = head % a.kv_heads, from = first_token(region) + j * kBlock;
  const int64_t n = least<int64_t>(kBlock, region.skip + region.length - from);
  fetch_scales(region.key, a.key_dim, b, h, from, n);
  fetch_scales(region.value, a.value_dim, b, h, from, n);
  return key_block(a, region.key, plane_codes(region.key, b, h), from);
}

// Heads that are worked on together: `heads` of those of all batch rows, in the order of memory.
struct Band {
  int64_t first, heads;
};

// Units first..last-1 of a band: blocks, region by region, within a region head by head, as they lie in memory. Whoever
// reads a segment from end to end reads faster than who goes from segment to segment for every head.
static void run(const QkvAttend& a, Workspace& w, const Band& band, int64_t first, int64_t last, int64_t kv_len) {
  for (int64_t k = 0; k < band.heads; ++k) {
    w.turn_to(k);
    begin(a, w, (band.first + k) / a.kv_heads, (band.first + k) % a.kv_heads);
  }
  int64_t index = 0, column = 0;
  for (int64_t k = 0; k < a.n_regions && index < last; ++k) {
    const QkvRegion& region = a.regions[k];
    const int64_t blocks = block_count(region), units = band.heads * blocks;
    const int64_t to = least(last - index, units);
    for (int64_t u = most<int64_t>(0, first - index); u < to; ++u) {
      const int64_t head = band.first + u / blocks, b = head / a.kv_heads, h = head % a.kv_heads, j = u % blocks;
      w.turn_to(u / blocks);
      const uint8_t* ahead = plane_codes(region.key, b, h);
      if (u + 1 < units) ahead = fetch_block(a, region, band.first + (u + 1) / blocks, (u + 1) % blocks);
      else if (k + 1 < a.n_regions) ahead = fetch_block(a, a.regions[k + 1], band.first, 0);
      block(a, w, region, b, h, block_span(region, j, column, kv_len), ahead);
    }
    index += units;
    column += region.length;
  }
  if (!w.value_plane) return;
  for (int64_t k = 0; k < band.heads; ++k) {
    w.turn_to(k);
    for (int r = 0; r < w.rows; ++r) {
      float* turned = w.turned + r * w.value_stride;
      restore_row(*w.value_plane, (band.first + k) % a.kv_heads, turned, static_cast<int>(a.value_dim));
      add_row(w.acc + r * w.value_stride, turned, w.value_stride, 1.0f, 0.0f);
    }
  }
}

static int attend(const QkvAttend& a) {
  int64_t blocks = 0, kv_len = 0;
  for (int64_t k = 0; k < a.n_regions; ++k) {
    blocks += block_count(a.regions[k]);
    kv_len += a.regions[k].length;
  }
  const int64_t heads = a.batch * a.kv_heads;
  if (heads == 0) return 0;
  // As many heads at a time as leave room in the second-level cache for what they read.
  const int64_t fit = most<int64_t>(1, kBandFloats / Workspace::head_floats(a));
  const int64_t bands = (heads + fit - 1) / fit, in_band = (heads + bands - 1) / bands;
  const auto finish_band = [&](Workspace& w, const Band& band) {
    for (int64_t k = 0; k < band.heads; ++k) {
      w.turn_to(k);
      finish(a, w, (band.first + k) / a.kv_heads, (band.first + k) % a.kv_heads);
    }
  };
  if (blocks == 0) {
    Workspace w(a, in_band);
    for (int64_t first = 0; first < heads; first += in_band) {
      const Band band{first, least(in_band, heads - first)};
      run(a, w, band, 0, 0, 0);
      finish_band(w, band);
    }
    return 0;
  }
  // All blocks of all bands in one line, cut into equal parts: balanced whatever the batch is. A band that is cut gets
  // partial results, at most two in a part: of its first and its last band.
  const int64_t total = heads * blocks;
  const int64_t work = heads * kv_len * (a.key_dim + a.value_dim);
  const int64_t worth = 1 + work / 32768;  // below this a second thread costs more than it brings
  const int parts = static_cast<int>(most<int64_t>(1, least(least<int64_t>(a.threads, worth), total)));
  const int64_t step = Partial::floats(Workspace::rows_of(a), round_up(a.value_dim, 16)), slot = in_band * step;
  static thread_local Buffer<float> memory;  // kept between calls: a step allocates nothing once warm
  float* const partials = memory.at_least(2 * parts * slot);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
#ifdef _OPENMP
    const int id = omp_get_thread_num(), count = omp_get_num_threads();
#else
    const int id = 0, count = 1;
#endif
    Workspace w(a, in_band);
    // A runtime may give fewer threads than asked for: every part is done by somebody.
    for (int part = id; part < parts; part += count) {
      const int64_t end = total * (part + 1) / parts;
      for (int64_t unit = total * part / parts; unit < end;) {
        const int64_t begun = unit / blocks / in_band * in_band;
        const Band band{begun, least(in_band, heads - begun)};
        const int64_t from = unit - begun * blocks, to = least(band.heads * blocks, end - begun * blocks);
        run(a, w, band, from, to, kv_len);
        unit += to - from;
        if (from == 0 && to == band.heads * blocks) {
          finish_band(w, band);
          continue;
        }
        float* at = partials + (2 * part + (from == 0 ? 1 : 0)) * slot;
        for (int64_t k = 0; k < band.heads; ++k, at += step) {
          w.turn_to(k);
          save(w, at);
        }
      }
    }
  }
  // A band that is cut begins in slot 1 of a part (it is that part's last) and goes on in slot 0 of the parts behind it.
  for (int part = 0; part + 1 < parts; ++part) {
    const int64_t cut = total * (part + 1) / parts;  // the unit at which this part ends
    const int64_t begun = cut / blocks / in_band * in_band;
    const Band band{begun, least(in_band, heads - begun)};
    if (cut == begun * blocks || total * part / parts > begun * blocks) continue;  // not cut, or begun earlier
    int n = 1;
    while (part + n < parts && total * (part + n) / parts < (begun + band.heads) * blocks) ++n;
    for (int64_t k = 0; k < band.heads; ++k)
      merge(a, (begun + k) / a.kv_heads, (begun + k) % a.kv_heads, partials + (2 * part + 1) * slot + k * step,
            partials + 2 * (part + 1) * slot + k * step, 2 * slot, n);
  }
  return 0;
}
