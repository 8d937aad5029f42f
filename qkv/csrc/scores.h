// From queries and stored keys to weights: products with the codes, scales, softcap, masks, and the running softmax.
// Included once per instruction set, inside a namespace, after a simd_*.h.

// Products of all rows with n quantized keys. With a scale per token or head, without it; else finished scores.
template <class C>
static void key_products(const QkvAttend& a, Workspace& w, const QkvPlane& key, const uint8_t* codes, int64_t b,
                         int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  const int dim = static_cast<int>(a.key_dim), pairs = (dim + 1) / 2, tiles = (n + 15) / 16;
  const int64_t tile = pairs * C::kBytes;
  const uint8_t* base = codes + offset / 16 * tile;
  using Mult = typename C::Mult;
  const Mult* mult = static_cast<const Mult*>(w.q_mult);
  if (key.scale_kind == QKV_SCALE_GROUP) {
    for (int g = 0, at = 0; at < dim; ++g, at += key.group) {
      const int count = (least(key.group, dim - at) + 1) / 2, skip = at / 2 * C::kBytes;
      const Pass pass{base + skip, tile, C::kBytes, tiles, count, ahead + skip * tiles, key.table};
      dot_rows<C>(pass, w.rows, mult + at, w.key_stride, w.part, kBlock);
      const int64_t start = scale_start(key, b, h) + g * key.group_stride + offset;
      load_vectors(key, start, n, round_up(n, 16), w.key_scale, w.key_offset);
      for (int r = 0; r < w.rows; ++r) {
        const int64_t own = r * (w.key_stride / 16) + g;
        const vf unit = vf_set1(w.group_unit[own]), sum = vf_set1(w.group_sum[own]);
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
    Mult* folded = static_cast<Mult*>(w.folded_mult);
    for (int t = 0, count; t < n; t += count) {
      const int64_t group = (offset + t) / key.group;
      count = static_cast<int>(least<int64_t>(n - t, (group + 1) * key.group - offset - t));
      load_vectors(key, scale_start(key, b, h) + group * key.group_stride, dim, w.key_stride, w.key_scale, w.key_offset);
      fold_rows<C>(w.packed, w.key_stride, w.rows, w.key_scale, w.key_offset, w.key_stride, limit, folded, w.unit, w.shift);
      const int64_t skip = t / 16 * tile;
      const Pass pass{base + skip, tile, C::kBytes, (count + 15) / 16, pairs, ahead + skip, key.table};
      dot_rows<C>(pass, w.rows, folded, w.key_stride, w.scores + t, kBlock);
      for (int r = 0; r < w.rows; ++r) {
        const vf unit = vf_set1(w.unit[r]), shift = vf_set1(w.shift[r]);
        float* s = w.scores + r * kBlock + t;
        for (int i = 0; i < count; i += kLanes) vf_store(s + i, vf_fma(vf_load(s + i), unit, shift));
      }
    }
    return;
  }
  const Pass pass{base, tile, C::kBytes, tiles, pairs, ahead, key.table};
  dot_rows<C>(pass, w.rows, mult, w.key_stride, w.scores, kBlock);
}

static void raw_scores(const QkvAttend& a, Workspace& w, const QkvPlane& key, const uint8_t* codes, int64_t b,
                       int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  const int64_t row = offset * a.key_dim;
  switch (key.format) {
    case QKV_F32:
      return scores_float<QKV_F32>(codes + row * 4, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores, kBlock);
    case QKV_BF16:
      return scores_float<QKV_BF16>(codes + row * 2, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores, kBlock);
    case QKV_F16:
      return scores_float<QKV_F16>(codes + row * 2, n, a.key_dim, w.query, w.key_stride, w.rows, w.scores, kBlock);
    default:
      with_codec(key.format, [&](auto codec) {
        key_products<decltype(codec)>(a, w, key, codes, b, h, offset, n, ahead);
      });
  }
}

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
    if (is_finite(w.value_scale[t])) continue;
    if (s[t] > kMinusInf) w.bad[r] = 1;
    p[t] = 0;
  }
}

static void shrink_row(float* x, int n, float factor) {
  const vf wide = vf_set1(factor);
  for (int d = 0; d < n; d += kLanes) vf_store(x + d, vf_mul(vf_load(x + d), wide));
}

// Running softmax of one row over the block, whose largest score is peak[r]. Leaves in `prob` the weights of the values,
// and in `largest` the largest of them.
static void weigh(Workspace& w, int r, int n, bool scaled) {
  const int padded = round_up(n, 16);
  const float* s = w.scores + r * kBlock;
  float* p = w.prob + r * kBlock;
  const float peak = w.m[r] > w.peak[r] ? w.m[r] : w.peak[r];
  w.largest[r] = 0;
  if (peak == kMinusInf) {  // nothing is visible yet
    // A score that is not a number can hide behind a maximum of -inf; it must not be lost.
    for (int t = 0; t < n; ++t)
      if (s[t] != s[t]) w.bad[r] = 1;
    std::memset(p, 0, padded * sizeof(float));
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
  w.largest[r] = vf_hmax(top);
}
