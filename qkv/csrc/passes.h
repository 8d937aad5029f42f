// The passes over keys and values that attention is made of, and the exponential of its softmax. Included once per
// instruction set, inside a namespace, after a simd_*.h.

constexpr int kBlock = 256;
// What the queries and results of the heads that are worked on together may take: a part of a second-level cache.
constexpr int64_t kBandFloats = 24 * 1024;
constexpr float kMinusInf = -__builtin_inff();

static inline int round_up(int64_t x, int m) { return static_cast<int>((x + m - 1) / m * m); }

constexpr float kLog2e = 1.44269504f;

// 2^x for x <= 0; 0 for x below about -127; not-a-number stays. The polynomial is a least-maximum fit of 2^r for
// |r| <= 1/2 with the constant held at 1; its relative error is 1.1e-7.
static inline vf vf_exp2(vf x) {
  const vf clamped = vf_max(vf_set1(-127.0f), x);  // x where x is not a number
  // 1.5 * 2^23 + 127 + n has the nearest whole number n, as the exponent of a float32 is stored, in its lowest bits: 0,
  // which stands for the number 0, where n is -127.
  const vf base = vf_set1(12583039.0f), shifted = vf_add(clamped, base);
  const vf r = vf_sub(clamped, vf_sub(shifted, base));
  vf p = vf_set1(1.32647273e-3f);
  p = vf_fma(p, r, vf_set1(9.67151299e-3f));
  p = vf_fma(p, r, vf_set1(5.55073358e-2f));
  p = vf_fma(p, r, vf_set1(0.240222424f));
  p = vf_fma(p, r, vf_set1(0.693147004f));
  p = vf_fma(p, r, vf_set1(1.0f));
  return vf_mul(p, vf_up_23(shifted));
}

static inline float exp2_of(float x) {
  float lanes[kLanes];
  vf_store(lanes, vf_exp2(vf_set1(x)));
  return lanes[0];
}

static inline bool is_packed(int32_t format) { return format >= QKV_INT8; }
static inline bool is_finite(float x) { return std::fabs(x) <= 3.4028235e38f; }

// Whether a codec multiplies whole numbers of 16 bits.
template <class C>
static constexpr bool whole_numbers() {
  return sizeof(typename C::Mult) == 2;
}

// Calls `work` with the codec of a quantized format, an empty structure.
template <class F>
static inline void with_codec(int32_t format, F work) {
  switch (format) {
    case QKV_INT8: return work(Int8Codec());
    case QKV_E4M3: return work(Fp8Codec<4>());
    case QKV_E5M2: return work(Fp8Codec<5>());
    case QKV_INT2: return work(IntCodec<2>());
    case QKV_INT3: return work(IntCodec<3>());
    case QKV_INT4: return work(IntCodec<4>());
    case QKV_INT5: return work(IntCodec<5>());
    case QKV_INT6: return work(IntCodec<6>());
    case QKV_LUT4: return work(Lut4Codec());
    case QKV_LUT8: return work(Lut8Codec());
    default: return;
  }
}

// Loops over registers are laid out before a compiler decides what is in memory: left to itself GCC keeps accumulators
// there, or copies them at every step.
#ifdef __clang__
#define QKV_UNROLL _Pragma("unroll")
#else
#define QKV_UNROLL _Pragma("GCC unroll 64")
#endif

// out[r][g * 16 + j] = sum over i < n of the pair j of group g at base + i * step, times the pair i of mult row r.
// Meanwhile as many bytes from `ahead` on as are read here come closer: what the next pass is going to read.
template <class C, int NR, int G>
static inline void dot_pairs(const uint8_t* base, int64_t group_stride, int64_t step, int n, const uint8_t* ahead,
                             const float* table, const typename C::Mult* mult, int64_t mult_stride, float* out,
                             int64_t out_stride) {
  constexpr int N = C::kAccs;
  typename C::Acc acc[NR * G * N];
  QKV_UNROLL for (int k = 0; k < NR * G * N; ++k) acc[k] = C::zero();
  for (int i = 0; i < n; ++i) {
    QKV_UNROLL for (int at = 0; at < C::kBytes * G; at += 64) prefetch(ahead + at);
    ahead += C::kBytes * G;
    QKV_UNROLL for (int g = 0; g < G; ++g) {
      typename C::Vec v[C::kVecs];
      C::load(base + g * group_stride, v, table);
      QKV_UNROLL for (int r = 0; r < NR; ++r) C::mac(acc + (r * G + g) * N, v, mult + r * mult_stride);
    }
    QKV_UNROLL for (int k = 0; k < NR * G; ++k) C::keep(acc + k * N);
    base += step;
    mult += 2;
  }
  QKV_UNROLL for (int r = 0; r < NR; ++r)
    QKV_UNROLL for (int g = 0; g < G; ++g) C::finish(acc + (r * G + g) * N, out + r * out_stride + g * 16);
}

// One pass over codes: `groups` groups, `group_stride` bytes apart, of n steps, `step` bytes apart.
struct Pass {
  const uint8_t* base;
  int64_t group_stride, step;
  int groups, n;
  const uint8_t* ahead;
  const float* table;
};

// All groups from g on for NR rows, in sets of G, what is left in halves of them.
template <class C, int NR, int G>
static inline void dot_groups(const Pass& p, int g, const typename C::Mult* mult, int64_t mult_stride, float* out,
                              int64_t out_stride) {
  for (; g + G <= p.groups; g += G)
    dot_pairs<C, NR, G>(p.base + g * p.group_stride, p.group_stride, p.step, p.n, p.ahead + g * C::kBytes * p.n,
                        p.table, mult, mult_stride, out + g * 16, out_stride);
  if (G > 1 && g < p.groups) dot_groups<C, NR, (G + 1) / 2>(p, g, mult, mult_stride, out, out_stride);
}

template <class C>
static void dot_rows(const Pass& p, int rows, const typename C::Mult* mult, int64_t mult_stride, float* out,
                     int64_t out_stride) {
  while (rows > 0) {
    const int now = C::rows_at_once(rows);
    if (now == 4) dot_groups<C, 4, C::groups(4)>(p, 0, mult, mult_stride, out, out_stride);
    else if (now == 3) dot_groups<C, 3, C::groups(3)>(p, 0, mult, mult_stride, out, out_stride);
    else if (now == 2) dot_groups<C, 2, C::groups(2)>(p, 0, mult, mult_stride, out, out_stride);
    else dot_groups<C, 1, C::groups(1)>(p, 0, mult, mult_stride, out, out_stride);
    rows -= now;
    mult += now * mult_stride;
    out += now * out_stride;
  }
}

template <int F>
struct FloatRow;
template <>
struct FloatRow<QKV_F32> {
  using T = float;
  static inline vf load(const T* p) { return vf_load(p); }
  static inline float one(T x) { return x; }
};
template <>
struct FloatRow<QKV_BF16> {
  using T = uint16_t;
  static inline vf load(const T* p) { return vf_load_bf16(p); }
  static inline float one(T x) {
    const uint32_t bits = static_cast<uint32_t>(x) << 16;
    float f;
    std::memcpy(&f, &bits, 4);
    return f;
  }
};
template <>
struct FloatRow<QKV_F16> {
  using T = uint16_t;
  static inline vf load(const T* p) { return vf_load_f16(p); }
  static inline float one(T x) { return f16_to_f32(x); }
};

static void load_row(float* out, const void* base, int64_t offset, int64_t dim, int32_t dtype) {
  if (dtype == QKV_F32) {
    std::memcpy(out, static_cast<const float*>(base) + offset, dim * sizeof(float));
  } else if (dtype == QKV_BF16) {
    const uint16_t* p = static_cast<const uint16_t*>(base) + offset;
    for (int64_t i = 0; i < dim; ++i) out[i] = FloatRow<QKV_BF16>::one(p[i]);
  } else {
    const uint16_t* p = static_cast<const uint16_t*>(base) + offset;
    for (int64_t i = 0; i < dim; ++i) out[i] = f16_to_f32(p[i]);
  }
}

// Scores of unquantized keys, token by token: out[r][t] = q[r] . key[t].
template <int F>
static void scores_float(const void* codes, int n, int dim, const float* q, int64_t q_stride, int rows, float* out,
                         int64_t out_stride) {
  using Row = FloatRow<F>;
  const typename Row::T* key = static_cast<const typename Row::T*>(codes);
  const int whole = dim / kLanes * kLanes;
  for (int t = 0; t < n; ++t, key += dim) {
    for (int r = 0; r < rows; ++r) {
      const float* qr = q + r * q_stride;
      vf a = vf_set1(0), b = vf_set1(0);
      int d = 0;
      for (; d + 2 * kLanes <= whole; d += 2 * kLanes) {
        a = vf_fma(Row::load(key + d), vf_load(qr + d), a);
        b = vf_fma(Row::load(key + d + kLanes), vf_load(qr + d + kLanes), b);
      }
      for (; d < whole; d += kLanes) a = vf_fma(Row::load(key + d), vf_load(qr + d), a);
      float s = vf_hsum(vf_add(a, b));
      for (; d < dim; ++d) s += Row::one(key[d]) * qr[d];
      out[r * out_stride + t] = s;
    }
  }
}

// acc[r] += sum over t of p[r][t] * value[t]. A token that a row does not attend to is left out, whatever it holds.
template <int F>
static void values_float(const void* codes, int n, int dim, const float* p, int64_t p_stride, int rows, float* acc,
                         int64_t acc_stride) {
  using Row = FloatRow<F>;
  const typename Row::T* value = static_cast<const typename Row::T*>(codes);
  const int whole = dim / kLanes * kLanes;
  for (int t = 0; t < n; ++t, value += dim) {
    for (int r = 0; r < rows; ++r) {
      const float w = p[r * p_stride + t];
      if (w == 0.0f) continue;
      float* a = acc + r * acc_stride;
      const vf wide = vf_set1(w);
      int d = 0;
      for (; d < whole; d += kLanes) vf_store(a + d, vf_fma(Row::load(value + d), wide, vf_load(a + d)));
      for (; d < dim; ++d) a[d] += w * Row::one(value[d]);
    }
  }
}
