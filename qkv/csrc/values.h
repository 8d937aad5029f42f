// The sum of stored values by their weights.
// Included once per instruction set, inside a namespace, after a simd_*.h.

// x[d] += add[d] * unit + shift for n channels, in whole lanes.
static inline void add_row(float* x, const float* add, int n, float unit, float shift) {
  const vf wide = vf_set1(unit), up = vf_set1(shift);
  for (int d = 0; d < n; d += kLanes) vf_store(x + d, vf_add(vf_fma(vf_load(add + d), wide, vf_load(x + d)), up));
}

// A value that is not finite makes the channels of its group not-a-number, in the rows that attend to it: -1 in `largest`.
// Here it counts as 0.
static void find_odd(Workspace& w, int n) {
  for (int r = 0; r < w.rows; ++r) w.largest[r] = 0;
  for (int t = 0; t < n; ++t) {
    if (is_finite(w.value_scale[t])) continue;
    w.value_scale[t] = w.value_offset[t] = 0;
    for (int r = 0; r < w.rows; ++r)
      if (w.scores[r * kBlock + t] > kMinusInf) w.largest[r] = -1;
  }
}

// Adds n quantized values with a scale per group of channels, weighed by `prob`.
template <class C>
static void add_grouped(const QkvAttend& a, Workspace& w, const QkvPlane& value, const Pass& whole, int64_t b,
                        int64_t h, int64_t offset, int n, float* sums) {
  auto* folded = static_cast<typename C::Mult*>(w.folded_mult);
  const int dim = static_cast<int>(a.value_dim), padded = round_up(n, 16);
  for (int g = 0, at = 0; at < dim; ++g, at += value.group) {
    const int units = (least(value.group, dim - at) + 15) / 16;
    const int64_t start = scale_start(value, b, h) + g * value.group_stride + offset;
    const bool finite = load_vectors(value, start, n, padded, w.value_scale, w.value_offset);
    if (!finite) find_odd(w, n);
    fold_rows<C>(w.prob, kBlock, w.rows, w.value_scale, w.value_offset, padded, 32767.0f, folded, w.unit, w.shift);
    for (int r = 0; !finite && r < w.rows; ++r)
      if (w.largest[r] < 0) w.shift[r] = __builtin_nanf("");
    const Pass pass{whole.base + at / 16 * C::kBytes, C::kBytes, whole.step, units, whole.n,
                    whole.ahead + at / 16 * C::kBytes * whole.n, whole.table};
    dot_rows<C>(pass, w.rows, folded, kBlock, w.tile, w.value_stride);
    for (int r = 0; r < w.rows; ++r)
      add_row(sums + r * w.value_stride + at, w.tile + r * w.value_stride, units * 16, w.unit[r], w.shift[r]);
  }
}

// Adds n quantized values with a scale per channel over groups of tokens, weighed by `prob`, which is rounded group by
// group: where values of a group are large their weights may be small.
template <class C>
static void add_by_channel(const QkvAttend& a, Workspace& w, const QkvPlane& value, const Pass& whole, int64_t b,
                           int64_t h, int64_t offset, int n, float* sums) {
  auto* mult = static_cast<typename C::Mult*>(w.p_mult);
  const int dim = static_cast<int>(a.value_dim);
  for (int t = 0, count; t < n; t += count) {
    const int64_t group = (offset + t) / value.group;
    count = static_cast<int>(least<int64_t>(n - t, (group + 1) * value.group - offset - t));
    const int64_t at = scale_start(value, b, h) + group * value.group_stride;
    load_vectors(value, at, dim, w.value_stride, w.value_scale, w.value_offset);
    const Pass pass{whole.base + t / 2 * whole.step, C::kBytes, whole.step, whole.groups, (count + 1) / 2,
                    whole.ahead + t / 2 * whole.step, whole.table};
    multipliers_of_rows<C>(w.prob + t, kBlock, w.rows, count, 32767.0f, mult + t, w.unit);
    dot_rows<C>(pass, w.rows, mult + t, kBlock, w.tile, w.value_stride);
    const bool steps_of_scale = whole_numbers<C>() && value.offset_type == QKV_ZERO_POINT;
    if (steps_of_scale) {
      const int8_t* zero = static_cast<const int8_t*>(value.offset) + at;
      for (int d = 0; d < dim; ++d) w.value_offset[d] = static_cast<float>(zero[d]);
    }
    for (int r = 0; r < w.rows; ++r) {
      const float* p = w.prob + r * kBlock + t;
      float total = 0;
      for (int i = 0; i < count; ++i) total += p[i];
      if (total == 0.0f) continue;  // whatever the scales are
      const vf unit = vf_set1(w.unit[r]);
      const float* add = w.tile + r * w.value_stride;
      float* x = sums + r * w.value_stride;
      if (steps_of_scale) {
        // Codes that their zero points cancel leave nothing: both sums are the same whole number, rounded the same way.
        const auto* row = mult + r * kBlock + t;
        int steps = 0;
        for (int i = 0; i < count; ++i) steps += static_cast<int>(row[i]);
        const vf mass = vf_set1(static_cast<float>(steps));
        for (int d = 0; d < w.value_stride; d += kLanes) {
          const vf v = vf_fma(vf_load(w.value_offset + d), mass, vf_load(add + d));
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
  auto* mult = static_cast<typename C::Mult*>(w.p_mult);
  for (int r = 0; r < w.rows; ++r)
    w.unit[r] = make_multipliers<C, false>(w.prob + r * kBlock, nullptr, round_up(n, 16), w.largest[r], 32767.0f,
                                           mult + r * kBlock);
  dot_rows<C>(pass, w.rows, mult, kBlock, w.tile, w.value_stride);
  for (int r = 0; r < w.rows; ++r)
    add_row(sums + r * w.value_stride, w.tile + r * w.value_stride, w.value_stride, w.unit[r], 0.0f);
}

static void add_values(const QkvAttend& a, Workspace& w, const QkvPlane& value, const uint8_t* codes, int64_t b,
                       int64_t h, int64_t offset, int n, const uint8_t* ahead) {
  const int64_t row = offset * a.value_dim;
  switch (value.format) {
    case QKV_F32:
      return values_float<QKV_F32>(codes + row * 4, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    case QKV_BF16:
      return values_float<QKV_BF16>(codes + row * 2, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    case QKV_F16:
      return values_float<QKV_F16>(codes + row * 2, n, a.value_dim, w.prob, kBlock, w.rows, w.acc, w.value_stride);
    default:
      with_codec(value.format, [&](auto codec) {
        add_codes<decltype(codec)>(a, w, value, codes, b, h, offset, n, ahead);
      });
  }
}
