// From queries and stored keys to weights: products with the codes, scales, softcap, masks, and the running softmax.
// Included once per instruction set, inside a namespace, after a simd_*.h.

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
