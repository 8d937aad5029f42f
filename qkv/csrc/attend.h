// Decoding attention over stored codes: one softmax over all regions of a cache, for a few queries.
// Included once per instruction set, inside a namespace, after a simd_*.h.
//
// The unit of work is a block of up to kBlock tokens of one batch row and kv head. For every block the scores of all
// query rows (the grouped query heads times q_len) are computed from one pass over the codes of the keys, then a running
// softmax, then one pass over the codes of the values. Quantization scales never touch the codes: those of the keys
// multiply the scores, those of the values the probabilities.
//
// For int8 codes both passes are integer multiply-adds. The query, and the probabilities of a block times the value
// scales, are rounded to 16 bits relative to their largest magnitude; that error is 1/256 of the rounding of the codes.

// Everything a thread needs for one batch row and kv head. The memory is kept between calls, one buffer a thread. The
// structure itself is a local variable: were it thread-local, inner loops would look its address up again and again.
struct Workspace {
  float *query, *packed, *scores, *prob, *acc, *tile, *key_scale, *value_scale, *m, *l, *q_unit, *bad, *factor;
  int16_t *q16, *p16;
  int rows, key_stride, value_stride;
  bool odd_values;  // whether a value scale of the current block is not finite

  explicit Workspace(const QkvAttend& a) {
    static thread_local Buffer<float> memory;
    rows = static_cast<int>(a.group * a.q_len);
    key_stride = round_up(a.key_dim, 16);
    value_stride = round_up(a.value_dim, 16);
    const int64_t r = rows;
    const int64_t need = r * (2 * key_stride + key_stride / 2 + 2 * kBlock + kBlock / 2 + 2 * value_stride + 5) +
                         2 * kBlock + 16 * 16;
    float* p = memory.at_least(need);
    const auto take = [&p](int64_t n) {
      float* start = p;
      p += (n + 15) / 16 * 16;  // every part begins on a cache line
      return start;
    };
    query = take(r * key_stride);
    packed = take(r * key_stride);
    scores = take(r * kBlock);
    prob = take(r * kBlock);
    acc = take(r * value_stride);
    tile = take(r * value_stride);
    key_scale = take(kBlock);
    value_scale = take(kBlock);
    q16 = reinterpret_cast<int16_t*>(take(r * key_stride / 2));
    p16 = reinterpret_cast<int16_t*>(take(r * kBlock / 2));
    m = take(r);
    l = take(r);
    q_unit = take(r);
    bad = take(r);
    factor = take(r);
  }
};

static const uint8_t* plane_codes(const QkvPlane& plane, int64_t b, int64_t h) {
  return static_cast<const uint8_t*>(plane.codes) + b * plane.codes_stride[0] + h * plane.codes_stride[1];
}

// Scales of n tokens from `offset` on, times `unit`, as float32, padded with 0 to whole lanes. Returns whether all are
// finite.
static bool load_scales(const QkvPlane& plane, int64_t b, int64_t h, int64_t offset, int n, float unit, float* out) {
  const char* base = static_cast<const char*>(plane.scale) + b * plane.scale_stride[0] + h * plane.scale_stride[1];
  const int padded = round_up(n, 16);
  if (plane.scale_kind == QKV_SCALE_TOKEN) {
    const uint16_t* p = reinterpret_cast<const uint16_t*>(base) + offset;
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
      out[t] = FloatRow<QKV_BF16>::one(p[t]) * unit;
      rest += 0.0f * out[t];
    }
    for (; t < padded; ++t) out[t] = 0.0f;
    return rest == 0.0f;
  }
  float s = 1.0f;
  if (plane.scale_kind == QKV_SCALE_HEAD) std::memcpy(&s, base, 4);
  for (int t = 0; t < padded; ++t) out[t] = t < n ? s * unit : 0.0f;
  return std::fabs(s) <= 3.4028235e38f;
}

static float code_unit(int32_t format) { return format == QKV_E4M3 ? Fp8Codec<7>::kUnit : 1.0f; }

// Rounds the packed query to 16 bits; the largest multiplier is chosen so that no sum of products leaves int32.
static void round_query(Workspace& w, int64_t key_dim) {
  const float limit = least(32767.0f, std::floor(2147483520.0f / (127.0f * static_cast<float>(key_dim))));
  for (int r = 0; r < w.rows; ++r) {
    const float* q = w.packed + r * w.key_stride;
    float top = 0;
    bool finite = true;
    for (int d = 0; d < key_dim; ++d) {
      const float a = std::fabs(q[d]);
      finite = finite && a <= 3.4028235e38f;
      top = a > top ? a : top;
    }
    // Below this the reciprocal would overflow; such a query makes no score worth the name.
    const float inverse = top > 1e-34f && finite ? limit / top : 0.0f;
    int16_t* out = w.q16 + r * w.key_stride;
    for (int d = 0; d < w.key_stride; ++d)
      out[d] = finite && d < key_dim ? static_cast<int16_t>(std::nearbyint(q[d] * inverse)) : 0;
    w.q_unit[r] = finite ? top / limit : __builtin_nanf("");
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
      float* k = w.packed + r * w.key_stride;
      if (a.query_packed) {
        std::memset(k, 0, w.key_stride * sizeof(float));
        load_row(k, a.query_packed, b * a.packed_stride[0] + head * a.packed_stride[1] + i * a.packed_stride[2],
                 a.key_dim, QKV_F32);
      } else {
        std::memcpy(k, q, w.key_stride * sizeof(float));
      }
      w.m[r] = kMinusInf;
      w.l[r] = 0;
      w.bad[r] = 0;
    }
  }
  std::memset(w.acc, 0, static_cast<size_t>(w.rows) * w.value_stride * sizeof(float));
  round_query(w, a.key_dim);
}

static const uint8_t* key_block(const QkvAttend& a, const uint8_t* codes, int64_t offset) {
  return codes + offset / 16 * 16 * round_up(a.key_dim, 2);
}

static const uint8_t* value_block(const QkvAttend& a, const uint8_t* codes, int64_t offset) {
  return codes + offset / 2 * 2 * a.value_dim;
}

static void raw_scores(const QkvAttend& a, Workspace& w, const QkvPlane& key, const uint8_t* codes, int64_t offset,
                       int n, const uint8_t* ahead) {
  const int even = round_up(a.key_dim, 2);
  const Pass pass{key_block(a, codes, offset), 16 * even, 32, (n + 15) / 16, even / 2, ahead};
  switch (key.format) {
    case QKV_INT8:
      dot_rows<Int8Codec>(pass, w.rows, w.q16, w.key_stride, w.scores, kBlock);
      break;
    case QKV_E4M3:
      dot_rows<Fp8Codec<7>>(pass, w.rows, w.packed, w.key_stride, w.scores, kBlock);
      break;
    case QKV_E5M2:
      dot_rows<Fp8Codec<8>>(pass, w.rows, w.packed, w.key_stride, w.scores, kBlock);
      break;
    case QKV_F32:
      scores_float<QKV_F32>(codes + offset * a.key_dim * 4, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores,
                            kBlock);
      break;
    case QKV_BF16:
      scores_float<QKV_BF16>(codes + offset * a.key_dim * 2, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores,
                             kBlock);
      break;
    default:
      scores_float<QKV_F16>(codes + offset * a.key_dim * 2, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores,
                            kBlock);
  }
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
static float scale_scores(const QkvAttend& a, Workspace& w, int r, bool packed, float unit, float bias, int64_t b,
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
    if (packed) v = vf_fma(v, vf_load(w.key_scale + t), shift);
    vf_store(s + t, v);
    top = vf_max(top, v);
  }
  for (; t < padded; t += kLanes) {
    vf v = vf_mul(vf_load(s + t), wide);
    if (packed) v = vf_fma(v, vf_load(w.key_scale + t), shift);
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

// Running softmax of one row over the block, whose largest score is `peak`. Leaves in `prob` (and `p16`) the weights of
// the values.
static void weigh(Workspace& w, int r, int n, float peak, bool int8_values, bool float_values) {
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
    float* acc = w.acc + r * w.value_stride;
    const vf wide = vf_set1(shrink);
    for (int d = 0; d < w.value_stride; d += kLanes) vf_store(acc + d, vf_mul(vf_load(acc + d), wide));
    w.m[r] = peak;
  }
  const vf centre = vf_set1(peak);
  vf sum = vf_set1(0), top = vf_set1(0);
  for (int t = 0; t < padded; t += kLanes) {
    vf e = vf_exp2(vf_sub(vf_load(s + t), centre));
    sum = vf_add(sum, e);
    if (!float_values) e = vf_mul(e, vf_load(w.value_scale + t));
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
  if (!int8_values) return;
  const float largest = vf_hmax(top);
  // Below this the reciprocal would overflow; such weights add nothing.
  const bool usable = largest > 1e-34f && largest <= 3.4028235e38f;
  const vf inverse = vf_set1(usable ? 32767.0f / largest : 0.0f);
  for (int t = 0; t < padded; t += kLanes) vf_store_i16(p16 + t, vf_mul(vf_load(p + t), inverse));
  w.factor[r] = usable ? largest / 32767.0f : 0.0f;
}

static void add_values(const QkvAttend& a, Workspace& w, const QkvPlane& value, const uint8_t* codes, int64_t offset,
                       int n, const uint8_t* ahead) {
  if (!is_packed(value.format)) {
    const int64_t width = value.format == QKV_F32 ? 4 : 2;
    const uint8_t* rows = codes + offset * a.value_dim * width;
    if (value.format == QKV_F32)
      values_float<QKV_F32>(rows, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    else if (value.format == QKV_BF16)
      values_float<QKV_BF16>(rows, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    else
      values_float<QKV_F16>(rows, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    return;
  }
  const Pass pass{value_block(a, codes, offset),    32,          2 * a.value_dim,
                  round_up(a.value_dim, 16) / 16, (n + 1) / 2, ahead};
  if (value.format == QKV_INT8) dot_rows<Int8Codec>(pass, w.rows, w.p16, kBlock, w.tile, w.value_stride);
  else if (value.format == QKV_E4M3) dot_rows<Fp8Codec<7>>(pass, w.rows, w.prob, kBlock, w.tile, w.value_stride);
  else dot_rows<Fp8Codec<8>>(pass, w.rows, w.prob, kBlock, w.tile, w.value_stride);
  for (int r = 0; r < w.rows; ++r) {
    const vf f = vf_set1(w.factor[r]);
    float* acc = w.acc + r * w.value_stride;
    const float* add = w.tile + r * w.value_stride;
    for (int d = 0; d < w.value_stride; d += kLanes) vf_store(acc + d, vf_fma(vf_load(add + d), f, vf_load(acc + d)));
  }
}

// `ahead`: the keys of the block that comes next, to be fetched while this one's values are read.
static void block(const QkvAttend& a, Workspace& w, const QkvRegion& region, int64_t b, int64_t h, const Span& span,
                  const uint8_t* ahead) {
  const int64_t offset = span.offset;
  const int n = span.n;
  const bool packed = is_packed(region.key.format), value_packed = is_packed(region.value.format);
  const uint8_t* value_codes = plane_codes(region.value, b, h);
  raw_scores(a, w, region.key, plane_codes(region.key, b, h), offset, n, value_block(a, value_codes, offset));
  if (packed) load_scales(region.key, b, h, offset, n, code_unit(region.key.format), w.key_scale);
  w.odd_values = value_packed &&
                 !load_scales(region.value, b, h, offset, n, code_unit(region.value.format), w.value_scale);
  for (int64_t g = 0; g < a.group; ++g) {
    for (int64_t i = 0; i < a.q_len; ++i) {
      const int r = static_cast<int>(g * a.q_len + i);
      const int64_t head = h * a.group + g;
      const float scale = a.softmax_scale * kLog2e;
      const float unit = scale * (region.key.format == QKV_INT8 ? w.q_unit[r] : 1.0f);
      const float bias =
          a.packed_bias ? scale * a.packed_bias[(b * a.kv_heads * a.group + head) * a.q_len + i] : 0.0f;
      const float peak = scale_scores(a, w, r, packed, unit, bias, b, head, i, span);
      weigh(w, r, n, peak, region.value.format == QKV_INT8, !value_packed);
    }
  }
  add_values(a, w, region.value, value_codes, offset, n, ahead);
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

// Merges `n` partial results, `step` floats apart, that several threads made of one batch row and kv head.
static void merge(const QkvAttend& a, int64_t b, int64_t h, float* partials, int64_t step, int n) {
  const int rows = static_cast<int>(a.group * a.q_len), stride = round_up(a.value_dim, 16);
  for (int r = 0; r < rows; ++r) {
    float m = kMinusInf;
    for (int k = 0; k < n; ++k) m = most(m, Partial(partials + k * step, rows).m[r]);
    float l = 0, bad = 0;
    float* acc = Partial(partials, rows).acc + static_cast<int64_t>(r) * stride;
    for (int k = 0; k < n; ++k) {
      const Partial p(partials + k * step, rows);
      bad += p.bad[r];
      const float f = p.m[r] == kMinusInf ? 0.0f : exp2_of(p.m[r] - m);
      const float* from = p.acc + static_cast<int64_t>(r) * stride;
      l += p.l[r] * f;
      for (int d = 0; d < stride; ++d) acc[d] = k == 0 ? from[d] * f : acc[d] + from[d] * f;
    }
    finish_row(a, b, h, r, m, l, bad, acc);
  }
}

// Blocks first..last-1 of the concatenated regions, for one batch row and kv head.
static void run(const QkvAttend& a, Workspace& w, int64_t b, int64_t h, int64_t first, int64_t last,
                int64_t kv_len) {
  begin(a, w, b, h);
  int64_t index = 0, column = 0;
  for (int64_t k = 0; k < a.n_regions && index < last; ++k) {
    const QkvRegion& region = a.regions[k];
    const int64_t blocks = block_count(region);
    const int64_t from = first > index ? first - index : 0;
    const int64_t to = last - index < blocks ? last - index : blocks;
    for (int64_t j = from; j < to; ++j) {
      const uint8_t* ahead = plane_codes(region.key, b, h);
      if (j + 1 < blocks) ahead = key_block(a, ahead, first_token(region) + (j + 1) * kBlock);
      else if (k + 1 < a.n_regions) ahead = plane_codes(a.regions[k + 1].key, b, h);
      block(a, w, region, b, h, block_span(region, j, column, kv_len), ahead);
    }
    index += blocks;
    column += region.length;
  }
}

static int attend(const QkvAttend& a) {
  int64_t blocks = 0, kv_len = 0;
  for (int64_t k = 0; k < a.n_regions; ++k) {
    blocks += block_count(a.regions[k]);
    kv_len += a.regions[k].length;
  }
  if (a.batch * a.kv_heads == 0) return 0;
  if (blocks == 0) {
    Workspace w(a);
    for (int64_t b = 0; b < a.batch; ++b)
      for (int64_t h = 0; h < a.kv_heads; ++h) {
        begin(a, w, b, h);
        finish(a, w, b, h);
      }
    return 0;
  }
  // All blocks of all heads in one line, cut into equal parts: balanced whatever the batch is. A head that is cut gets
  // partial results, at most two in a part: its first and its last head.
  const int64_t total = a.batch * a.kv_heads * blocks;
  const int64_t work = a.batch * a.kv_heads * kv_len * (a.key_dim + a.value_dim);
  const int64_t worth = 1 + work / 32768;  // below this a second thread costs more than it brings
  const int parts = static_cast<int>(most<int64_t>(1, least(least<int64_t>(a.threads, worth), total)));
  const int64_t step = Partial::floats(static_cast<int>(a.group * a.q_len), round_up(a.value_dim, 16));
  static thread_local Buffer<float> memory;  // kept between calls: a step allocates nothing once warm
  float* const partials = memory.at_least(2 * parts * step);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
#ifdef _OPENMP
    const int id = omp_get_thread_num(), count = omp_get_num_threads();
#else
    const int id = 0, count = 1;
#endif
    Workspace w(a);
    // A runtime may give fewer threads than asked for: every part is done by somebody.
    for (int part = id; part < parts; part += count) {
      const int64_t begin_unit = total * part / parts, end = total * (part + 1) / parts;
      for (int64_t unit = begin_unit; unit < end;) {
        const int64_t head = unit / blocks, first = unit % blocks;
        const int64_t last = least(blocks, first + end - unit);
        run(a, w, head / a.kv_heads, head % a.kv_heads, first, last, kv_len);
        if (first == 0 && last == blocks) finish(a, w, head / a.kv_heads, head % a.kv_heads);
        else save(w, partials + (2 * part + (first == 0 ? 1 : 0)) * step);
        unit += last - first;
      }
    }
  }
  // A head that is cut begins in slot 1 of a part (its first block is that part's last head) and goes on in slot 0 of
  // the parts behind it: made contiguous here, then merged.
  for (int part = 0; part < parts; ++part) {
    const int64_t cut = total * (part + 1) / parts;  // the unit at which this part ends
    if (part + 1 == parts || cut % blocks == 0) continue;
    const int64_t head = cut / blocks;
    if (total * part / parts > head * blocks) continue;  // begun earlier: merged there
    int n = 1;
    for (int k = part + 1; k < parts && total * k / parts < (head + 1) * blocks; ++k, ++n)
      if (n > 1) std::memcpy(partials + (2 * part + 1 + n) * step, partials + 2 * k * step, step * sizeof(float));
    merge(a, head / a.kv_heads, head % a.kv_heads, partials + (2 * part + 1) * step, step, n);
  }
  return 0;
}
