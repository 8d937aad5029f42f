// Stored scales and offsets as float32, and rotations. Included once per instruction set, inside a namespace, after
// convert.h.

static inline float ue5m3_value(uint8_t u) {
  return u == 255 ? __builtin_nanf("") : float_of((static_cast<uint32_t>(u) + (107u << 3)) << 20);
}
static inline float e8m0_value(uint8_t u) {
  if (u == 255) return __builtin_nanf("");
  return u ? float_of(static_cast<uint32_t>(u) << 23) : 5.87747175e-39f;  // 2^-127
}
static inline float e4m3_value(uint8_t u) {
  if ((u & 0x7f) == 0x7f) return __builtin_nanf("");
  return f16_to_f32(static_cast<uint16_t>(((u & 0x80) << 8) | ((u & 0x7f) << 7))) * 256.0f;
}

static inline float bf16_value(uint16_t u) { return float_of(static_cast<uint32_t>(u) << 16); }

static inline float scale_value(const void* scale, int64_t i, int32_t type) {
  switch (type) {
    case QKV_UE5M3: return ue5m3_value(static_cast<const uint8_t*>(scale)[i]);
    case QKV_E8M0: return e8m0_value(static_cast<const uint8_t*>(scale)[i]);
    case QKV_E4M3_SCALE: return e4m3_value(static_cast<const uint8_t*>(scale)[i]);
    case QKV_F32_SCALE: return static_cast<const float*>(scale)[i];
    default: return bf16_value(static_cast<const uint16_t*>(scale)[i]);
  }
}

static inline float largest_integer(int32_t format) { return static_cast<float>((1 << code_bits(format)) - 1); }

static inline float offset_value(const QkvPlane& p, int64_t i, float scale) {
  switch (p.offset_type) {
    case QKV_ZERO_POINT: return static_cast<float>(static_cast<const int8_t*>(p.offset)[i]) * scale;
    case QKV_OFFSET_BF16: return bf16_value(static_cast<const uint16_t*>(p.offset)[i]);
    case QKV_OFFSET_MIDDLE: return -0.5f * largest_integer(p.format) * scale;
    default: return 0.0f;
  }
}

// n scales from element `at` on, and offsets, padded with 0 up to `padded`. Returns whether all scales are finite.
static bool load_vectors(const QkvPlane& p, int64_t at, int n, int padded, float* scale, float* offset) {
  float sum = 0;
  if (p.scale_type == QKV_UE5M3 && p.offset_type == QKV_ZERO_POINT) {  // the usual ones, without a choice inside
    const uint8_t* s = static_cast<const uint8_t*>(p.scale) + at;
    const int8_t* o = static_cast<const int8_t*>(p.offset) + at;
    vf top = vf_set1(0);
    int i = 0;
    for (; i + kLanes <= n; i += kLanes) {
      const vf v = vf_load_ue5m3(s + i);
      vf_store(scale + i, v);
      vf_store(offset + i, vf_mul(vf_load_i8(o + i), v));
      top = vf_most(v, top);
    }
    sum = 0.0f * vf_hmost(top);
    for (; i < n; ++i) {
      scale[i] = ue5m3_value(s[i]);
      offset[i] = static_cast<float>(o[i]) * scale[i];
      sum += 0.0f * scale[i];
    }
  } else {
    for (int i = 0; i < n; ++i) {
      const float v = scale_value(p.scale, at + i, p.scale_type);
      scale[i] = v;
      offset[i] = offset_value(p, at + i, v);
      sum += 0.0f * v;
    }
  }
  for (int i = n; i < padded; ++i) scale[i] = offset[i] = 0.0f;
  return sum == 0.0f;
}

// Element of scale and offset where batch row b and head h begin.
static inline int64_t scale_start(const QkvPlane& p, int64_t b, int64_t h) {
  return b * p.scale_stride[0] + h * p.scale_stride[1];
}

// Every block of channels times the orthogonal Hadamard matrix, its own inverse. In the order of additions that
// qkv/transform.py has: both give the same bits.
template <int kWidth>
static inline void hadamard_step(float* x, int dim) {
  for (int at = 0; at < dim; at += 2 * kWidth)
    for (int i = at; i < at + kWidth; ++i) {
      const float a = x[i], b = x[i + kWidth];
      x[i] = a + b;
      x[i + kWidth] = a - b;
    }
}

static void hadamard(float* x, int dim, int block) {
  int width = 1;
  if (block >= 16) {  // widths that the compiler knows
    hadamard_step<1>(x, dim);
    hadamard_step<2>(x, dim);
    hadamard_step<4>(x, dim);
    hadamard_step<8>(x, dim);
    width = 16;
  }
  for (; width < block; width *= 2)
    for (int at = 0; at < dim; at += 2 * width)
      for (int i = at; i < at + width; ++i) {
        const float a = x[i], b = x[i + width];
        x[i] = a + b;
        x[i + width] = a - b;
      }
  const float factor = static_cast<float>(1.0 / std::sqrt(static_cast<double>(block)));
  for (int d = 0; d < dim; ++d) x[d] *= factor;
}

// Rows before they are encoded, and back.
static void transform_row(const QkvPlane& p, int64_t h, float* x, int dim) {
  if (p.centre)
    for (int d = 0; d < dim; ++d) x[d] -= p.centre[h * dim + d];
  if (p.multiplier)
    for (int d = 0; d < dim; ++d) x[d] /= p.multiplier[h * dim + d];
  if (!p.signs) return;
  for (int d = 0; d < dim; ++d) x[d] *= p.signs[d];
  hadamard(x, dim, p.rotation);
}

static void restore_row(const QkvPlane& p, int64_t h, float* x, int dim) {
  if (p.signs) {
    hadamard(x, dim, p.rotation);
    for (int d = 0; d < dim; ++d) x[d] *= p.signs[d];
  }
  if (p.multiplier)
    for (int d = 0; d < dim; ++d) x[d] *= p.multiplier[h * dim + d];
  if (p.centre)
    for (int d = 0; d < dim; ++d) x[d] += p.centre[h * dim + d];
}
