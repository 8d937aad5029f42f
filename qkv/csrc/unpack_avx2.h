// 32 codes of a few bits, widened to bytes, see qkv/formats/layout.py. AVX2; serves the AVX-512 build too.

// A part of kWidth bits: byte j holds the codes j, j + 4 kWidth, and so on, the first in its lowest bits.
template <int kWidth>
static inline __m256i load_part(const uint8_t* p);

template <>
inline __m256i load_part<4>(const uint8_t* p) {
  const __m256i v = _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
  return _mm256_and_si256(_mm256_srlv_epi64(v, _mm256_setr_epi64x(0, 0, 4, 4)), _mm256_set1_epi8(15));
}
template <>
inline __m256i load_part<2>(const uint8_t* p) {
  int64_t word;
  std::memcpy(&word, p, 8);
  const __m256i shifts = _mm256_setr_epi64x(0, 2, 4, 6);
  return _mm256_and_si256(_mm256_srlv_epi64(_mm256_set1_epi64x(word), shifts), _mm256_set1_epi8(3));
}
template <>
inline __m256i load_part<1>(const uint8_t* p) {
  int32_t word;
  std::memcpy(&word, p, 4);
  const __m256i shifts = _mm256_setr_epi32(0, 1, 2, 3, 4, 5, 6, 7);
  return _mm256_and_si256(_mm256_srlv_epi32(_mm256_set1_epi32(word), shifts), _mm256_set1_epi8(1));
}

// The shifts of parts above the first stay within bytes: their codes are small.
template <int kBits>
static inline __m256i load_codes(const uint8_t* p) {
  if (kBits == 2) return load_part<2>(p);
  if (kBits == 3) return _mm256_or_si256(load_part<2>(p), _mm256_slli_epi16(load_part<1>(p + 8), 2));
  if (kBits == 4) return load_part<4>(p);
  if (kBits == 5) return _mm256_or_si256(load_part<4>(p), _mm256_slli_epi16(load_part<1>(p + 16), 4));
  return _mm256_or_si256(load_part<4>(p), _mm256_slli_epi16(load_part<2>(p + 16), 4));
}
