// Plain C++ lanes: the meaning of every operation, and what serves a processor without AVX2. The loops have a fixed
// trip count of kLanes so that a compiler can use whatever vector registers its target has.

// 2^kLeastExponent is 0 for vf_scale_pow2.
constexpr float kLeastExponent = -127.0f;
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
// a * 2^n for whole n in [kLeastExponent, 0]; 0 for kLeastExponent. Where n is not a number, so is a.
static inline vf vf_scale_pow2(vf a, vf n) {
  QKV_LANES {
    // 1.5 * 2^23 + 127 + n has 127 + n in its lowest bits. A conversion to int would be undefined for not-a-number.
    const float shifted = n.x[i] + 12583039.0f;
    uint32_t bits;
    std::memcpy(&bits, &shifted, 4);
    bits <<= 23;
    float p;
    std::memcpy(&p, &bits, 4);
    a.x[i] *= p;
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
// acc[j] += code[2j] * m[0] + code[2j + 1] * m[1], j = 0..15. kVecs vectors hold the codes, widened, of 16 pairs, and as
// many their accumulators; `finish` turns those into 16 floats. A stored code is worth kUnit times what the codec makes
// of it. A unit of 32 codes is kBytes bytes; code books have a table.
struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  struct Vec {
    int32_t x[32];  // codes; an accumulator uses the first 16
  };
  struct Pair {
    int32_t a, b;
  };
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 1; }
  static inline Vec zero() { return Vec{}; }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int i = 0; i < 32; ++i) v->x[i] = static_cast<int8_t>(p[i]);
  }
  static inline Pair pair(const Mult* m) { return {m[0], m[1]}; }
  static inline Vec mac(Vec a, const Vec& v, Pair m) {
    for (int j = 0; j < 16; ++j) a.x[j] += v.x[2 * j] * m.a + v.x[2 * j + 1] * m.b;
    return a;
  }
  static inline void finish(const Vec* a, float* out) {
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

// Float8: kShift places the byte into a half-precision number whose value is the code's divided by kUnit.
template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  struct Vec {
    float x[32];
  };
  struct Pair {
    float a, b;
  };
  struct Table {
    float value[256];
    Table() {
      for (int c = 0; c < 256; ++c)
        value[c] = f16_to_f32(static_cast<uint16_t>(((c & 0x80) << 8) | ((c & 0x7f) << kShift)));
    }
  };
  static constexpr float kUnit = kShift == 7 ? 256.0f : 1.0f;
  static constexpr int kVecs = 1;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int) { return 1; }
  static inline Vec zero() { return Vec{}; }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    static const Table table;
    for (int i = 0; i < 32; ++i) v->x[i] = table.value[p[i]];
  }
  static inline Pair pair(const Mult* m) { return {m[0], m[1]}; }
  static inline Vec mac(Vec a, const Vec& v, Pair m) {
    for (int j = 0; j < 16; ++j) a.x[j] += v.x[2 * j] * m.a + v.x[2 * j + 1] * m.b;
    return a;
  }
  static inline void finish(const Vec* a, float* out) { std::memcpy(out, a->x, 16 * sizeof(float)); }
};

struct Lut4Codec : Fp8Codec<8> {
  static constexpr int kBytes = 16;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int i = 0; i < 32; ++i) v->x[i] = table[get_code<4>(p, i)];
  }
};

struct Lut8Codec : Fp8Codec<8> {
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int i = 0; i < 32; ++i) v->x[i] = table[p[i]];
  }
};
#undef QKV_LANES
