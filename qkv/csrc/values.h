// The sum of stored values by their weights.
// Included once per instruction set, inside a namespace, after a simd_*.h.

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
