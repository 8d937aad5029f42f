// AVX2, FMA and F16C lanes. The operations are defined in words in simd_portable.h.

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
static inline vf vf_up_23(vf a) { return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_castps_si256(a), 23)); }
static inline void vf_store_i16(int16_t* p, vf a) {
  const __m256i v = _mm256_cvtps_epi32(a);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(p),
                   _mm_packs_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1)));
}
static inline void vf_store_i16(int16_t* p, vf a, vf b) {
  const __m256i v = _mm256_packs_epi32(_mm256_cvtps_epi32(a), _mm256_cvtps_epi32(b));  // within 128-bit halves
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(p), _mm256_permute4x64_epi64(v, 0xd8));
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
// The larger of |a| and `top`, a magnitude; what is not a number is larger than any number.
static inline vf vf_most(vf a, vf top) {
  return _mm256_castsi256_ps(_mm256_max_epi32(_mm256_castps_si256(vf_abs(a)), _mm256_castps_si256(top)));
}
static inline float vf_hmost(vf top) {
  const __m256i u = _mm256_castps_si256(top);
  __m128i m = _mm_max_epi32(_mm256_castsi256_si128(u), _mm256_extracti128_si256(u, 1));
  m = _mm_max_epi32(m, _mm_shuffle_epi32(m, 0x4e));
  return _mm_cvtss_f32(_mm_castsi128_ps(_mm_max_epi32(m, _mm_shuffle_epi32(m, 0xb1))));
}
static inline vf vf_load_f16(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline float f16_to_f32(uint16_t h) { return _cvtsh_ss(h); }
static inline void prefetch(const void* p) { _mm_prefetch(static_cast<const char*>(p), _MM_HINT_T1); }

#include "unpack_avx2.h"

struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  using Vec = __m256i;
  using Acc = __m256i;
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 2;
  static constexpr int kAccs = 2;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows < 3 ? 2 : 1; }
  static inline Acc zero() { return _mm256_setzero_si256(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    v[0] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    v[1] = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16)));
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    int32_t both;
    std::memcpy(&both, m, 4);
    const __m256i pair = _mm256_set1_epi32(both);
    a[0] = _mm256_add_epi32(a[0], _mm256_madd_epi16(v[0], pair));
    a[1] = _mm256_add_epi32(a[1], _mm256_madd_epi16(v[1], pair));
  }
  static inline void keep(Acc* a) { __asm__("" : "+x"(a[0]), "+x"(a[1])); }
  static inline void finish(const Acc* a, float* out) {
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

// First and second codes of pairs are taken apart: each vector meets one number, and all products of a pair go to one
// accumulator.
template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  using Vec = __m256;
  using Acc = __m256;
  static constexpr float kUnit = kFloat8Unit<kShift>;
  static constexpr int kVecs = 4;  // of 8 pairs the first codes and the second ones, then the same of the others
  static constexpr int kAccs = 2;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows < 3 ? 2 : 1; }
  static inline Acc zero() { return _mm256_setzero_ps(); }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    const __m256i mask = _mm256_set1_epi32(kFloat8Bits<kShift>);
    for (int k = 0; k < 2; ++k) {
      const __m256i w = _mm256_cvtepi8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * k)));
      v[2 * k] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(w, 16 + kShift), mask));
      v[2 * k + 1] = _mm256_castsi256_ps(_mm256_and_si256(_mm256_slli_epi32(w, kShift), mask));
    }
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    const __m256 first = _mm256_broadcast_ss(m), second = _mm256_broadcast_ss(m + 1);
    a[0] = _mm256_fmadd_ps(v[1], second, _mm256_fmadd_ps(v[0], first, a[0]));
    a[1] = _mm256_fmadd_ps(v[3], second, _mm256_fmadd_ps(v[2], first, a[1]));
  }
  static inline void keep(Acc* a) { __asm__("" : "+x"(a[0]), "+x"(a[1])); }
  static inline void finish(const Acc* a, float* out) {
    _mm256_storeu_ps(out, a[0]);
    _mm256_storeu_ps(out + 8, a[1]);
  }
};

struct Lut4Codec : Fp8Codec<5> {
  static constexpr int kBytes = 16;
  static constexpr float kUnit = 1.0f;
  // The number of a code in the lowest 4 bits. Bit 3, in the sign's place, says in which half of the table it is.
  static inline __m256 look_up(__m256i code, __m256 low, __m256 high) {
    return _mm256_blendv_ps(_mm256_permutevar8x32_ps(low, code), _mm256_permutevar8x32_ps(high, code),
                            _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
  }
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    // The low halves of the bytes are the first 8 pairs, the high ones the others.
    const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
    const __m256 low = _mm256_loadu_ps(table), high = _mm256_loadu_ps(table + 8);
    v[0] = look_up(w, low, high);
    v[1] = look_up(_mm256_srli_epi32(w, 16), low, high);
    v[2] = look_up(_mm256_srli_epi32(w, 4), low, high);
    v[3] = look_up(_mm256_srli_epi32(w, 20), low, high);
  }
};

struct Lut8Codec : Fp8Codec<5> {
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int k = 0; k < 2; ++k) {
      const __m256i w = _mm256_cvtepu8_epi16(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p + 16 * k)));
      v[2 * k] = _mm256_i32gather_ps(table, _mm256_and_si256(w, _mm256_set1_epi32(255)), 4);
      v[2 * k + 1] = _mm256_i32gather_ps(table, _mm256_srli_epi32(w, 16), 4);
    }
  }
};
