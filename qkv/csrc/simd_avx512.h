// AVX-512 (F, BW, DQ, VL, VNNI) lanes. The operations are defined in words in simd_portable.h.

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
static inline vf vf_up_23(vf a) { return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_castps_si512(a), 23)); }
static inline void vf_store_i16(int16_t* p, vf a) {
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm512_cvtsepi32_epi16(_mm512_cvtps_epi32(a)));
}
static inline void vf_store_i16(int16_t* p, vf a, vf b) {
  // Adding 1.5 * 2^23 leaves the whole number, rounded, in the lowest bits.
  const __m512i low = _mm512_castps_si512(_mm512_add_ps(a, _mm512_set1_ps(12582912.0f)));
  const __m512i high = _mm512_castps_si512(_mm512_add_ps(b, _mm512_set1_ps(12582912.0f)));
  alignas(64) static constexpr int16_t even[32] = {0,  2,  4,  6,  8,  10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30,
                                                   32, 34, 36, 38, 40, 42, 44, 46, 48, 50, 52, 54, 56, 58, 60, 62};
  _mm512_storeu_si512(p, _mm512_permutex2var_epi16(low, _mm512_load_si512(even), high));
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
// The larger of |a| and `top`, a magnitude; what is not a number is larger than any number.
static inline vf vf_most(vf a, vf top) {
  return _mm512_castsi512_ps(_mm512_max_epi32(_mm512_castps_si512(vf_abs(a)), _mm512_castps_si512(top)));
}
static inline float vf_hmost(vf top) {
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_cvtsi32_si128(_mm512_reduce_max_epi32(_mm512_castps_si512(top)))));
}
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
  using Acc = __m512i;
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 1;
  static constexpr int kAccs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 4; }
  static inline Acc zero() { return _mm512_setzero_si512(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    v[0] = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
  }
  // Written out: around the intrinsic GCC copies accumulators.
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    int32_t both;
    std::memcpy(&both, m, 4);
    __asm__("vpdpwssd %2, %1, %0" : "+v"(*a) : "v"(*v), "v"(_mm512_set1_epi32(both)));
  }
  static inline void keep(Acc*) {}
  static inline void finish(const Acc* a, float* out) { _mm512_storeu_ps(out, _mm512_cvtepi32_ps(*a)); }
};

template <int kBits>
struct IntCodec : Int8Codec {
  static constexpr int kBytes = 4 * kBits;
  static inline void load(const uint8_t* p, Vec* v, const float*) { v[0] = _mm512_cvtepu8_epi16(load_codes<kBits>(p)); }
};

// First and second codes of pairs are taken apart: each vector meets one number, and all products go to one accumulator.
template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  using Vec = __m512;
  using Acc = __m512;
  static constexpr float kUnit = kFloat8Unit<kShift>;
  static constexpr int kVecs = 2;
  static constexpr int kAccs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows < 4 ? 8 : 4; }
  static inline Acc zero() { return _mm512_setzero_ps(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    const __m512i w = _mm512_cvtepi8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    const __m512i mask = _mm512_set1_epi32(kFloat8Bits<kShift>);
    v[0] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(w, 16 + kShift), mask));
    v[1] = _mm512_castsi512_ps(_mm512_and_si512(_mm512_slli_epi32(w, kShift), mask));
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    *a = _mm512_fmadd_ps(v[0], _mm512_set1_ps(m[0]), *a);
    *a = _mm512_fmadd_ps(v[1], _mm512_set1_ps(m[1]), *a);
  }
  static inline void keep(Acc* a) { __asm__("" : "+v"(*a)); }
  static inline void finish(const Acc* a, float* out) { _mm512_storeu_ps(out, *a); }
};

struct Lut4Codec : Fp8Codec<5> {
  static constexpr int kBytes = 16;
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    // The low halves of the bytes are the first 8 pairs, the high ones the others. Only the last 4 bits of an index count.
    const __m512i both = _mm512_broadcast_i64x4(w);
    const __m512 values = _mm512_loadu_ps(table);
    v[0] = _mm512_permutexvar_ps(_mm512_srlv_epi64(both, _mm512_setr_epi64(0, 0, 0, 0, 4, 4, 4, 4)), values);
    v[1] = _mm512_permutexvar_ps(_mm512_srlv_epi64(both, _mm512_setr_epi64(16, 16, 16, 16, 20, 20, 20, 20)), values);
  }
};

struct Lut8Codec : Fp8Codec<5> {
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    const __m512i w = _mm512_cvtepu8_epi16(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
    v[0] = _mm512_i32gather_ps(_mm512_and_si512(w, _mm512_set1_epi32(255)), table, 4);
    v[1] = _mm512_i32gather_ps(_mm512_srli_epi32(w, 16), table, 4);
  }
};
