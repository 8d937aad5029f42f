// Float32 to the 16-bit formats, by bit patterns. Included once per instruction set, inside a namespace.

static inline uint32_t bits_of(float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// While it lives this thread's arithmetic knows subnormal numbers, whatever the program has asked for: small codes of float8
// formats pass through them, see bits.h.
struct Subnormals {
#ifdef __SSE__
  const uint32_t saved = __builtin_ia32_stmxcsr();
  Subnormals() { __builtin_ia32_ldmxcsr(saved & ~0x8040u); }  // "denormals are zero", "flush to zero"
  ~Subnormals() { __builtin_ia32_ldmxcsr(saved); }
#else
  Subnormals() {}
#endif
  Subnormals(const Subnormals&) = delete;
  Subnormals& operator=(const Subnormals&) = delete;
};

// To the nearest bfloat16, ties to even; a quiet not-a-number stays one.
static inline uint16_t to_bf16(float f) {
  const uint32_t u = bits_of(f);
  if ((u & 0x7fffffffu) > 0x7f800000u) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}

// To the nearest float16, ties to even; beyond its range its largest number. Not-a-number stays one.
static inline uint16_t to_f16(float f) {
  const uint32_t u = bits_of(f), sign = (u >> 16) & 0x8000u, magnitude = u & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return static_cast<uint16_t>(sign | 0x7e00u);
  if (magnitude >= 0x477fe000u) return static_cast<uint16_t>(sign | 0x7bffu);
  if (magnitude < 0x38800000u) {  // subnormal: adding 0.5 leaves the result, rounded, in the low bits
    const float shifted = float_of(magnitude) + 0.5f;
    return static_cast<uint16_t>(sign | (bits_of(shifted) - 0x3f000000u));
  }
  const uint32_t rounded = magnitude + 0xfffu + ((magnitude >> 13) & 1u);
  return static_cast<uint16_t>(sign | ((rounded - 0x38000000u) >> 13));
}

