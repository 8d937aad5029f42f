// Plain C++ lanes: the meaning of every operation, and what serves a processor without AVX2. The loops have a fixed
// trip count of kLanes so that a compiler can use whatever vector registers its target has.

constexpr int kLanes = 8;

struct vf {
  float x[kLanes];
};

#define QKV_LANES for (int i = 0; i < kLanes; ++i)
static inline vf vf_load(const float* p) {
  vf r;
  std::memcpy(r.x, p, sizeof r.x);
  return r;
}
static inline void vf_store(float* p, vf a) { std::memcpy(p, a.x, sizeof a.x); }
static inline vf vf_set1(float v) {
  vf r;
  QKV_LANES r.x[i] = v;
  return r;
}
static inline vf vf_add(vf a, vf b) {
  QKV_LANES a.x[i] += b.x[i];
  return a;
}
static inline vf vf_sub(vf a, vf b) {
  QKV_LANES a.x[i] -= b.x[i];
  return a;
}
static inline vf vf_div(vf a, vf b) {
  QKV_LANES a.x[i] /= b.x[i];
  return a;
}
static inline vf vf_mul(vf a, vf b) {
  QKV_LANES a.x[i] *= b.x[i];
  return a;
}
static inline vf vf_fma(vf a, vf b, vf c) {
  QKV_LANES c.x[i] += a.x[i] * b.x[i];
  return c;
}
// Takes b when either is not a number, as the x86 instruction does.
static inline vf vf_max(vf a, vf b) {
  QKV_LANES b.x[i] = a.x[i] > b.x[i] ? a.x[i] : b.x[i];
  return b;
}
static inline float vf_hmax(vf a) {
  float m = a.x[0];
  for (int i = 1; i < kLanes; ++i) m = a.x[i] > m ? a.x[i] : m;
  return m;
}
static inline float vf_hsum(vf a) {
  float s = 0;
  QKV_LANES s += a.x[i];
  return s;
}
static inline vf vf_round(vf a) {
  QKV_LANES a.x[i] = std::nearbyint(a.x[i]);
  return a;
}
// The bits of every number, 23 places up.
static inline vf vf_up_23(vf a) {
  QKV_LANES {
    uint32_t bits;
    std::memcpy(&bits, a.x + i, 4);
    bits <<= 23;
    std::memcpy(a.x + i, &bits, 4);
  }
  return a;
}
// round(a) to int16, |a| <= 32767.
static inline void vf_store_i16(int16_t* p, vf a) {
  QKV_LANES {
    const float v = std::nearbyint(a.x[i]);
    p[i] = v == v ? static_cast<int16_t>(v) : 0;
  }
}
static inline void vf_store_i16(int16_t* p, vf a, vf b) {
  vf_store_i16(p, a);
  vf_store_i16(p + kLanes, b);
}
static inline vf vf_load_bf16(const uint16_t* p) {
  vf r;
  QKV_LANES {
    const uint32_t bits = static_cast<uint32_t>(p[i]) << 16;
    std::memcpy(&r.x[i], &bits, 4);
  }
  return r;
}
// Stored scales: the 8-bit ue5m3 (not-a-number: all ones), and signed bytes.
static inline vf vf_load_ue5m3(const uint8_t* p) {
  vf r;
  QKV_LANES {
    const uint32_t bits = p[i] == 255 ? 0x7fc00000u : (p[i] + (107u << 3)) << 20;
    std::memcpy(&r.x[i], &bits, 4);
  }
  return r;
}
static inline vf vf_load_i8(const int8_t* p) {
  vf r;
  QKV_LANES r.x[i] = static_cast<float>(p[i]);
  return r;
}
static inline vf vf_abs(vf a) {
  QKV_LANES a.x[i] = std::fabs(a.x[i]);
  return a;
}
// The larger of |a| and `top`, a magnitude; what is not a number is larger than any number.
static inline float larger_magnitude(float a, float top) {
  a = std::fabs(a);
  return a >= top || a != a ? a : top;
}
static inline vf vf_most(vf a, vf top) {
  QKV_LANES a.x[i] = larger_magnitude(a.x[i], top.x[i]);
  return a;
}
static inline float vf_hmost(vf top) {
  float m = 0;
  QKV_LANES m = larger_magnitude(top.x[i], m);
  return m;
}
static inline float f16_to_f32(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = (h >> 10) & 31, mantissa = h & 1023;
  float magnitude;
  if (exponent == 31) {
    const uint32_t bits = 0x7f800000u | (mantissa << 13);
    std::memcpy(&magnitude, &bits, 4);
  } else if (exponent == 0) {
    magnitude = std::ldexp(static_cast<float>(mantissa), -24);
  } else {
    const uint32_t bits = ((exponent + 112) << 23) | (mantissa << 13);
    std::memcpy(&magnitude, &bits, 4);
  }
  uint32_t bits;
  std::memcpy(&bits, &magnitude, 4);
  bits |= sign;
  std::memcpy(&magnitude, &bits, 4);
  return magnitude;
}
static inline vf vf_load_f16(const uint16_t* p) {
  vf r;
  QKV_LANES r.x[i] = f16_to_f32(p[i]);
  return r;
}
// Brings a cache line into the second-level cache: more of them can be under way than into the first.
static inline void prefetch(const void*) {}

// A codec multiplies 16 pairs of stored codes by one pair of multipliers and adds them up, pair by pair:
// acc[j] += code[2j] * m[0] + code[2j + 1] * m[1], j = 0..15. kVecs vectors hold the codes, widened, of 16 pairs, kAccs
// their accumulators; `finish` turns those into 16 floats. `keep` holds accumulators in their registers from one step to
// the next. A stored code is worth kUnit times what the codec makes of it. A unit of 32 codes is kBytes bytes; code books
// have a table. `rows_at_once` rows of queries share the codes that were read, of `groups` groups of pairs at a time.
struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  struct Vec {
    int32_t x[32];
  };
  struct Acc {
    int32_t x[16];
  };
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 1;
  static constexpr int kAccs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 1; }
  static inline Acc zero() { return Acc{}; }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int i = 0; i < 32; ++i) v->x[i] = static_cast<int8_t>(p[i]);
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    for (int j = 0; j < 16; ++j) a->x[j] += v->x[2 * j] * m[0] + v->x[2 * j + 1] * m[1];
  }
  static inline void keep(Acc*) {}
  static inline void finish(const Acc* a, float* out) {
    for (int j = 0; j < 16; ++j) out[j] = static_cast<float>(a->x[j]);
  }
};

template <int kBits>
struct IntCodec : Int8Codec {
  static constexpr int kBytes = 4 * kBits;
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int i = 0; i < 32; ++i) v->x[i] = get_code<kBits>(p, i);
  }
};

template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  struct Vec {
    float x[32];
  };
  struct Acc {
    float x[16];
  };
  static constexpr float kUnit = kFloat8Unit<kShift>;
  static constexpr int kVecs = 1;
  static constexpr int kAccs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 1; }
  static inline Acc zero() { return Acc{}; }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int i = 0; i < 32; ++i) {
      const int32_t code = static_cast<int8_t>(p[i]);
      const uint32_t bits = static_cast<uint32_t>(code) << (16 + kShift) & static_cast<uint32_t>(kFloat8Bits<kShift>);
      std::memcpy(v->x + i, &bits, 4);
    }
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* m) {
    for (int j = 0; j < 16; ++j) a->x[j] += v->x[2 * j] * m[0] + v->x[2 * j + 1] * m[1];
  }
  static inline void keep(Acc*) {}
  static inline void finish(const Acc* a, float* out) { std::memcpy(out, a->x, 16 * sizeof(float)); }
};

struct Lut4Codec : Fp8Codec<5> {
  static constexpr int kBytes = 16;
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int i = 0; i < 32; ++i) v->x[i] = table[get_code<4>(p, i)];
  }
};

struct Lut8Codec : Fp8Codec<5> {
  static constexpr float kUnit = 1.0f;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int i = 0; i < 32; ++i) v->x[i] = table[p[i]];
  }
};
#undef QKV_LANES
