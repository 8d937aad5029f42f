// AVX-512 (F, BW, DQ, VL, VNNI) lanes. The operations are defined in words in simd_portable.h.

// 2^kLeastExponent is 0 for vf_scale_pow2.
constexpr float kLeastExponent = -200.0f;
constexpr int kLanes = 16;
using vf = __m512;

static inline vf vf_load(const float* p) { return _mm512_loadu_ps(p); }
static inline void vf_store(float* p, vf a) { _mm512_storeu_ps(p, a); }
static inline vf vf_set1(float v) { return _mm512_set1_ps(v); }
static inline vf vf_add(vf a, vf b) { return _mm512_add_ps(a, b); }
static inline vf vf_sub(vf a, vf b) { return _mm512_sub_ps(a, b); }
static inline vf vf_div(vf a, vf b) { return _mm512_div_ps(a, b); }
static inline vf vf_mul(vf a, vf b) { return _mm512_mul_ps(a, b); }
static inline vf vf_fma(vf a, vf b, vf c) { return _mm512_fmadd_ps(a, b, c); }
static inline vf vf_max(vf a, vf b) { return _mm512_max_ps(a, b); }
static inline float vf_hmax(vf a) { return _mm512_reduce_max_ps(a); }
static inline float vf_hsum(vf a) { return _mm512_reduce_add_ps(a); }
static inline vf vf_round(vf a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
static inline vf vf_scale_pow2(vf a, vf n) { return _mm512_scalef_ps(a, n); }
static inline void vf_store_i16(int16_t* p, vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
static inline vf vf_load_bf16(const uint16_t* p) {
  const __m256i v = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(p));
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(v), 16));
}
// Stored scales: the 8-bit ue5m3 (not-a-number: all ones), and signed bytes.
static inline vf vf_load_ue5m3(const uint8_t* p) {
  const __m512i u = _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  const __m512 v = _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(u, _mm512_set1_epi32(107 << 3)), 20));
  return _mm512_mask_blend_ps(_mm512_cmpeq_epi32_mask(u, _mm512_set1_epi32(255)), v, _mm512_set1_ps(__builtin_nanf("")));
}
static inline vf vf_load_i8(const int8_t* p) {
  return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p))));
}
static inline vf vf_abs(vf a) { return _mm512_abs_ps(a); }
static inline vf vf_load_f16(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline float f16_to_f32(uint16_t h) {
  return _mm_cvtss_f32(_mm_cvtph_ps(_mm_cvtsi32_si128(h)));
}
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#include "unpack_avx2.h"

struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  using Vec = __m512i;
  using Pair = __m512i;
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows <= 3 ? 4 : 2; }
  static inline Vec zero() { return _mm512_setzero_si512(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    v[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  static inline Pair pair(const Mult* m) {
    int32_t v;
    std::memcpy(&v, m, 4);
    return _mm512_set1_epi32(v);
  }
  // Written out: around the intrinsic GCC copies every accumulator twice.
  static inline Vec mac(Vec a, Vec v, Pair m) {
    __asm__("vpdpwssd %2, %1, %0" : "+v"(a) : "v"(v), "v"(m));
    return a;
  }
  static inline void finish(const Vec* a, float* out) { _mm512_storeu_ps(out, _mm512_cvtepi32_ps(a[0])); }
};

template <int kBits>
struct IntCodec : Int8Codec {
  static constexpr int kBytes = 4 * kBits;
  static inline void load(const uint8_t* p, Vec* v, const float*) { v[0] = _mm512_cvtepu8_epi16(load_codes<kBits>(p)); }
};

template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  using Vec = __m512;
  using Pair = __m512;
  static constexpr float kUnit = kShift == 7 ? 256.0f : 1.0f;
  static constexpr int kVecs = 2;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 2; }
  static inline Vec zero() { return _mm512_setzero_ps(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    __m512i h = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    h = _mm512_slli_epi16(h, kShift);
    // The sign was extended into the top exponent bit; e4m3 never uses that bit.
    if (kShift == 7) h = _mm512_and_si512(h, _mm512_set1_epi16(static_cast<int16_t>(0xbfff)));
    v[0] = _mm512_cvtph_ps(_mm512_castsi512_si256(h));
    v[1] = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(h, 1));
  }
  static inline Pair pair(const Mult* m) {
    double v;
    std::memcpy(&v, m, 8);
    return _mm512_castpd_ps(_mm512_set1_pd(v));
  }
  static inline Vec mac(Vec a, Vec v, Pair m) { return _mm512_fmadd_ps(v, m, a); }
  static inline void finish(const Vec* a, float* out) {
    const __m512i even = _mm512_setr_epi32(0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
    const __m512i odd = _mm512_setr_epi32(1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31);
    _mm512_storeu_ps(out,
                     _mm512_add_ps(_mm512_permutex2var_ps(a[0], even, a[1]), _mm512_permutex2var_ps(a[0], odd, a[1])));
  }
};

struct Lut4Codec : Fp8Codec<8> {
  static constexpr int kBytes = 16;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    const __m256i codes = load_codes<4>(p);
    const __m512 values = _mm512_loadu_ps(table);
    v[0] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_castsi256_si128(codes)), values);
    v[1] = _mm512_permutexvar_ps(_mm512_cvtepu8_epi32(_mm256_extracti128_si256(codes, 1)), values);
  }
};

struct Lut8Codec : Fp8Codec<8> {
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int k = 0; k < 2; ++k) {
      const __m128i codes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * k));
      v[k] = _mm512_i32gather_ps(_mm512_cvtepu8_epi32(codes), table, 4);
    }
  }
};
