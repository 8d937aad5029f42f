// AVX2, FMA and F16C lanes. The operations are defined in words in simd_portable.h.

// 2^kLeastExponent is 0 for vf_scale_pow2.
constexpr float kLeastExponent = -127.0f;
constexpr int kLanes = 8;
using vf = __m256;

static inline vf vf_load(const float* p) { return _mm256_loadu_ps(p); }
static inline void vf_store(float* p, vf a) { _mm256_storeu_ps(p, a); }
static inline vf vf_set1(float v) { return _mm256_set1_ps(v); }
static inline vf vf_add(vf a, vf b) { return _mm256_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm256_sub_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm256_div_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm256_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm256_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm256_max_ps(a, b); }
static inline float vf_hmax(vf a) {
  __m128 m = _mm_max_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  m = _mm_max_ps(m, _mm_movehl_ps(m, m));
  return _mm_cvtss_f32(_mm_max_ss(m, _mm_movehdup_ps(m)));
}
static inline float vf_hsum(vf a) {
  __m128 s = _mm_add_ps(_mm256_castps256_ps128(a), _mm256_extractf128_ps(a, 1));
  s = _mm_add_ps(s, _mm_movehl_ps(s, s));
  return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}
static inline vf vf_round(vf a) { return _mm256_round_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_scale_pow2(vf a, vf n) {
  const __m256i bits = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
  return _mm256_mul_ps(a, _mm256_castsi256_ps(bits));
}
static inline void vf_store_i16(int16_t* p, vf a) {
  const __m256i v = _mm256_cvtps_epi32(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline vf vf_load_bf16(const uint16_t* p) {
  const __m128i v = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p));
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(v), 16));
}
// Stored scales: the 8-bit ue5m3 (not-a-number: all ones), and signed bytes.
static inline vf vf_load_ue5m3(const uint8_t* p) {
  const __m256i u = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
  const __m256i v = _mm256_slli_epi32(_mm256_add_epi32(u, _mm256_set1_epi32(107 << 3)), 20);
  return _mm256_castsi256_ps(_mm256_or_si256(v, _mm256_cmpeq_epi32(u, _mm256_set1_epi32(255))));
}
static inline vf vf_load_i8(const int8_t* p) {
  return _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p))));
}
static inline vf vf_abs(vf a) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0f), a); }
static inline vf vf_load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#include "unpack_avx2.h"

struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  using Vec = __m256i;  // of codes, widened to int16, and of accumulators, int32
  using Pair = __m256i;
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 2;  // vectors for 16 pairs
  // With four rows a compiler runs out of its 16 registers.
  static constexpr int rows_at_once(int rows) { return rows == 4 ? 2 : rows < 3 ? rows : 3; }
  static constexpr int groups(int rows) { return rows == 1 ? 2 : 1; }
  static inline Vec zero() { return _mm256_setzero_si256(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    v[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    v[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  }
  static inline Pair pair(const Mult* m) {
    int32_t v;
    std::memcpy(&v, m, 4);
    return _mm256_set1_epi32(v);
  }
  static inline Vec mac(Vec a, Vec v, Pair m) { return _mm256_add_epi32(a, _mm256_madd_epi16(v, m)); }
  static inline void finish(const Vec* a, float* out) {
    _mm256_storeu_ps(out, _mm256_cvtepi32_ps(a[0]));
    _mm256_storeu_ps(out + 8, _mm256_cvtepi32_ps(a[1]));
  }
};

template <int kBits>
struct IntCodec : Int8Codec {
  static constexpr int kBytes = 4 * kBits;
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    if (kBits == 4) {  // the bytes widened: low halves are the first codes, high halves the others
      const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
      v[0] = _mm256_and_si256(w, _mm256_set1_epi16(15));
      v[1] = _mm256_srli_epi16(w, 4);
      return;
    }
    const __m256i codes = load_codes<kBits>(p);
    v[0] = _mm256_cvtepu8_epi16(_mm256_castsi256_si128(codes));
    v[1] = _mm256_cvtepu8_epi16(_mm256_extracti128_si256(codes, 1));
  }
};

template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  using Vec = __m256;
  using Pair = __m256;
  static constexpr float kUnit = kShift == 7 ? 256.0f : 1.0f;
  static constexpr int kVecs = 4;
  // Four accumulators a row: more rows would not fit the 16 registers.
  static constexpr int rows_at_once(int rows) { return rows == 4 ? 2 : rows < 3 ? rows : 3; }
  static constexpr int groups(int) { return 1; }
  static inline Vec zero() { return _mm256_setzero_ps(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int k = 0; k < 2; ++k) {
      __m256i h = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * k)));
      h = _mm256_slli_epi16(h, kShift);
      // The sign was extended into the top exponent bit; e4m3 never uses that bit.
      if (kShift == 7) h = _mm256_and_si256(h, _mm256_set1_epi16(static_cast<int16_t>(0xbfff)));
      v[2 * k] = _mm256_cvtph_ps(_mm256_castsi256_si128(h));
      v[2 * k + 1] = _mm256_cvtph_ps(_mm256_extracti128_si256(h, 1));
    }
  }
  static inline Pair pair(const Mult* m) {
    double v;
    std::memcpy(&v, m, 8);
    return _mm256_castpd_ps(_mm256_set1_pd(v));
  }
  static inline Vec mac(Vec a, Vec v, Pair m) { return _mm256_fmadd_ps(v, m, a); }
  static inline void finish(const Vec* a, float* out) {
    for (int k = 0; k < 4; k += 2) {
      // hadd works within 128-bit halves: its result is in the order 0 1 4 5 2 3 6 7 of the pairs.
      const __m256d h = _mm256_castps_pd(_mm256_hadd_ps(a[k], a[k + 1]));
      _mm256_storeu_ps(out + 4 * k, _mm256_castpd_ps(_mm256_permute4x64_pd(h, 0xd8)));
    }
  }
};

struct Lut4Codec : Fp8Codec<8> {
  static constexpr int kBytes = 16;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    alignas(32) uint8_t codes[32];
    _mm256_store_si256(reinterpret_cast<__m256i*>(codes), load_codes<4>(p));
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    for (int k = 0; k < 4; ++k) {
      const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * k)));
      // Bit 3 of the code, in the sign's place, says which half.
      v[k] = _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, i), _mm256_permutevar8x32_ps(high, i),
                              _mm256_castsi256_ps(_mm256_slli_epi32(i, 28)));
    }
  }
};

struct Lut8Codec : Fp8Codec<8> {
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int k = 0; k < 4; ++k) {
      const __m256i i = _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p + 8 * k)));
      v[k] = _mm256_i32gather_ps(table, i, 4);
    }
  }
};
