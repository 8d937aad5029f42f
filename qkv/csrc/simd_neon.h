// NEON lanes of AArch64, two registers of four. The operations are defined in words in simd_portable.h.

constexpr int kLanes = 8;

struct vf {
  float32x4_t lo, hi;
};

static inline vf vf_load(const float* p) { return {vld1q_f32(p), vld1q_f32(p + 4)}; }
static inline void vf_store(float* p, vf a) {
  vst1q_f32(p, a.lo);
  vst1q_f32(p + 4, a.hi);
}
static inline vf vf_set1(float v) { return {vdupq_n_f32(v), vdupq_n_f32(v)}; }
static inline vf vf_add(vf a, vf b) { return {vaddq_f32(a.lo, b.lo), vaddq_f32(a.hi, b.hi)}; }
static inline vf vf_sub(vf a, vf b) { return {vsubq_f32(a.lo, b.lo), vsubq_f32(a.hi, b.hi)}; }
static inline vf vf_div(vf a, vf b) { return {vdivq_f32(a.lo, b.lo), vdivq_f32(a.hi, b.hi)}; }
static inline vf vf_mul(vf a, vf b) { return {vmulq_f32(a.lo, b.lo), vmulq_f32(a.hi, b.hi)}; }
static inline vf vf_fma(vf a, vf b, vf c) { return {vfmaq_f32(c.lo, a.lo, b.lo), vfmaq_f32(c.hi, a.hi, b.hi)}; }
// NEON's own maximum gives not-a-number where either is one.
static inline float32x4_t larger(float32x4_t a, float32x4_t b) { return vbslq_f32(vcgtq_f32(a, b), a, b); }
static inline vf vf_max(vf a, vf b) { return {larger(a.lo, b.lo), larger(a.hi, b.hi)}; }
static inline float vf_hmax(vf a) { return vmaxnmvq_f32(vmaxnmq_f32(a.lo, a.hi)); }
static inline float vf_hsum(vf a) { return vaddvq_f32(vaddq_f32(a.lo, a.hi)); }
static inline vf vf_round(vf a) { return {vrndnq_f32(a.lo), vrndnq_f32(a.hi)}; }
static inline float32x4_t up_23(float32x4_t a) { return vreinterpretq_f32_u32(vshlq_n_u32(vreinterpretq_u32_f32(a), 23)); }
static inline vf vf_up_23(vf a) { return {up_23(a.lo), up_23(a.hi)}; }
static inline void vf_store_i16(int16_t* p, vf a) {
  vst1q_s16(p, vqmovn_high_s32(vqmovn_s32(vcvtnq_s32_f32(a.lo)), vcvtnq_s32_f32(a.hi)));
}
static inline void vf_store_i16(int16_t* p, vf a, vf b) {
  vf_store_i16(p, a);
  vf_store_i16(p + kLanes, b);
}
static inline vf vf_load_bf16(const uint16_t* p) {
  const uint16x8_t v = vld1q_u16(p);
  return {vreinterpretq_f32_u32(vshlq_n_u32(vmovl_u16(vget_low_u16(v)), 16)),
          vreinterpretq_f32_u32(vshlq_n_u32(vmovl_high_u16(v), 16))};
}
// Stored scales: the 8-bit ue5m3 (not-a-number: all ones), and signed bytes.
static inline float32x4_t from_ue5m3(uint32x4_t u) {
  const uint32x4_t v = vshlq_n_u32(vaddq_u32(u, vdupq_n_u32(107 << 3)), 20);
  return vreinterpretq_f32_u32(vorrq_u32(v, vceqq_u32(u, vdupq_n_u32(255))));
}
static inline vf vf_load_ue5m3(const uint8_t* p) {
  const uint16x8_t u = vmovl_u8(vld1_u8(p));
  return {from_ue5m3(vmovl_u16(vget_low_u16(u))), from_ue5m3(vmovl_high_u16(u))};
}
static inline vf vf_load_i8(const int8_t* p) {
  const int16x8_t v = vmovl_s8(vld1_s8(p));
  return {vcvtq_f32_s32(vmovl_s16(vget_low_s16(v))), vcvtq_f32_s32(vmovl_high_s16(v))};
}
static inline vf vf_abs(vf a) { return {vabsq_f32(a.lo), vabsq_f32(a.hi)}; }
// The larger of |a| and `top`, a magnitude; what is not a number is larger than any number.
static inline float32x4_t most_of(float32x4_t a, float32x4_t top) {
  return vreinterpretq_f32_s32(vmaxq_s32(vreinterpretq_s32_f32(vabsq_f32(a)), vreinterpretq_s32_f32(top)));
}
static inline vf vf_most(vf a, vf top) { return {most_of(a.lo, top.lo), most_of(a.hi, top.hi)}; }
static inline float vf_hmost(vf top) {
  const int32_t bits = vmaxvq_s32(vreinterpretq_s32_f32(most_of(top.lo, top.hi)));
  float most;
  std::memcpy(&most, &bits, 4);
  return most;
}
static inline vf from_f16(uint16x8_t h) {
  const float16x8_t v = vreinterpretq_f16_u16(h);
  return {vcvt_f32_f16(vget_low_f16(v)), vcvt_high_f32_f16(v)};
}
static inline vf vf_load_f16(const uint16_t* p) { return from_f16(vld1q_u16(p)); }
static inline float f16_to_f32(uint16_t h) { return vgetq_lane_f32(from_f16(vdupq_n_u16(h)).lo, 0); }
static inline void prefetch(const void* p) { __builtin_prefetch(p, 0, 2); }

// A pair of codes is a 16-bit word in memory. The codecs take it apart: first codes meet one multiplier, second codes
// the other, and both products go to one accumulator.
struct Int8Codec {
  static constexpr int kBytes = 32;
  using Mult = int16_t;
  struct Vec {  // of 8 pairs
    int16x8_t first, second;
  };
  struct Acc {
    int32x4_t lo, hi;
  };
  static constexpr float kUnit = 1.0f;
  static constexpr int kVecs = 2;
  static constexpr int kAccs = 2;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows <= 2 ? 2 : 1; }
  static inline Acc zero() { return {vdupq_n_s32(0), vdupq_n_s32(0)}; }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int k = 0; k < 2; ++k) {
      const int16x8_t w = vreinterpretq_s16_u8(vld1q_u8(p + 16 * k));
      v[k] = {vshrq_n_s16(vshlq_n_s16(w, 8), 8), vshrq_n_s16(w, 8)};
    }
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* mult) {
    int32_t both;
    std::memcpy(&both, mult, 4);
    const int16x4_t m = vreinterpret_s16_s32(vdup_n_s32(both));
    for (int k = 0; k < 2; ++k) {
      const int16x8_t first = v[k].first, second = v[k].second;
      a[k] = {vmlal_lane_s16(vmlal_lane_s16(a[k].lo, vget_low_s16(first), m, 0), vget_low_s16(second), m, 1),
              vmlal_high_lane_s16(vmlal_high_lane_s16(a[k].hi, first, m, 0), second, m, 1)};
    }
  }
  static inline void keep(Acc* a) {
    for (int k = 0; k < 2; ++k) __asm__("" : "+w"(a[k].lo), "+w"(a[k].hi));
  }
  static inline void finish(const Acc* a, float* out) {
    for (int k = 0; k < 2; ++k) vf_store(out + 8 * k, {vcvtq_f32_s32(a[k].lo), vcvtq_f32_s32(a[k].hi)});
  }
};

// How far down the codes 0 .. 31 of a part of kWidth bits have to move, see bits.h. A shift to the left by a negative
// number is one to the right.
template <int kWidth>
struct Down {
  int8_t shift[32];
  constexpr Down() : shift() {
    for (int i = 0; i < 32; ++i) shift[i] = static_cast<int8_t>(-(i / (4 * kWidth) * kWidth));
  }
};
template <int kWidth>
static inline uint8x16x2_t load_part(const uint8_t* p) {
  static constexpr Down<kWidth> down;
  uint8x16_t all;  // the 4 kWidth bytes, again and again
  if (kWidth == 4) {
    all = vld1q_u8(p);
  } else if (kWidth == 2) {
    all = vcombine_u8(vld1_u8(p), vld1_u8(p));
  } else {
    uint32_t word;
    std::memcpy(&word, p, 4);
    all = vreinterpretq_u8_u32(vdupq_n_u32(word));
  }
  const uint8x16_t first = vshlq_u8(all, vld1q_s8(down.shift)), second = vshlq_u8(all, vld1q_s8(down.shift + 16));
  const uint8x16_t mask = vdupq_n_u8((1 << kWidth) - 1);
  return {{vandq_u8(first, mask), vandq_u8(second, mask)}};
}
// 32 codes of a few bits, widened to bytes.
template <int kBits>
static inline uint8x16x2_t load_codes(const uint8_t* p) {
  constexpr int low = first_part(kBits), high = kBits - low;
  const uint8x16x2_t a = load_part<low>(p);
  if (high == 0) return a;
  const uint8x16x2_t b = load_part<high ? high : 1>(p + 4 * low);
  return {{vorrq_u8(a.val[0], vshlq_n_u8(b.val[0], low)), vorrq_u8(a.val[1], vshlq_n_u8(b.val[1], low))}};
}

template <int kBits>
struct IntCodec : Int8Codec {
  static constexpr int kBytes = 4 * kBits;
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    const uint8x16x2_t all = load_codes<kBits>(p);
    for (int k = 0; k < 2; ++k) {
      const uint16x8_t w = vreinterpretq_u16_u8(all.val[k]);
      v[k] = {vreinterpretq_s16_u16(vandq_u16(w, vdupq_n_u16(255))), vreinterpretq_s16_u16(vshrq_n_u16(w, 8))};
    }
  }
};

// Float8 by way of float16, for which there is an instruction.
template <int kShift>
struct Fp8Codec {
  static constexpr int kBytes = 32;
  using Mult = float;
  using Vec = vf;  // of 4 pairs: first codes, and second ones
  using Acc = float32x4_t;
  static constexpr float kUnit = kShift == 4 ? 256.0f : 1.0f;
  static constexpr int kVecs = 4;
  static constexpr int kAccs = 4;
  static constexpr int rows_at_once(int rows) { return rows < 4 ? rows : 4; }
  static constexpr int groups(int rows) { return rows <= 2 ? 2 : 1; }
  static inline Acc zero() { return vdupq_n_f32(0); }
  // A code in the upper half of a word, as float32.
  static inline vf value(uint16x8_t w) {
    if (kShift == 5) return from_f16(w);
    // The shift doubles the sign, into the top exponent bit; e4m3 never uses that bit.
    const int16x8_t h = vandq_s16(vshrq_n_s16(vreinterpretq_s16_u16(w), 1), vdupq_n_s16(static_cast<int16_t>(0xbf80)));
    return from_f16(vreinterpretq_u16_s16(h));
  }
  static inline void load(const uint8_t* p, Vec* v, const float*) {
    for (int k = 0; k < 2; ++k) {
      const uint16x8_t w = vreinterpretq_u16_u8(vld1q_u8(p + 16 * k));
      const vf first = value(vshlq_n_u16(w, 8)), second = value(vandq_u16(w, vdupq_n_u16(0xff00)));
      v[2 * k] = {first.lo, second.lo};
      v[2 * k + 1] = {first.hi, second.hi};
    }
  }
  static inline void mac(Acc* a, const Vec* v, const Mult* mult) {
    const float32x2_t m = vld1_f32(mult);
    for (int k = 0; k < 4; ++k) a[k] = vfmaq_lane_f32(vfmaq_lane_f32(a[k], v[k].lo, m, 0), v[k].hi, m, 1);
  }
  static inline void keep(Acc* a) {
    for (int k = 0; k < 4; ++k) __asm__("" : "+w"(a[k]));
  }
  static inline void finish(const Acc* a, float* out) {
    for (int k = 0; k < 4; ++k) vst1q_f32(out + 4 * k, a[k]);
  }
};

struct Lut4Codec : Fp8Codec<5> {
  static constexpr int kBytes = 16;
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    const uint8x16x2_t all = load_codes<4>(p);
    // A float is looked up byte by byte: every vector of `plane` has one byte of all 16.
    const uint8x16x4_t plane = vld4q_u8(reinterpret_cast<const uint8_t*>(table));
    for (int i = 0; i < 2; ++i) {
      const uint8x16_t c = i ? vuzp2q_u8(all.val[0], all.val[1]) : vuzp1q_u8(all.val[0], all.val[1]);
      const uint8x16x2_t low = vzipq_u8(vqtbl1q_u8(plane.val[0], c), vqtbl1q_u8(plane.val[1], c));
      const uint8x16x2_t high = vzipq_u8(vqtbl1q_u8(plane.val[2], c), vqtbl1q_u8(plane.val[3], c));
      for (int k = 0; k < 4; ++k) {
        const uint16x8_t a = vreinterpretq_u16_u8(low.val[k / 2]), b = vreinterpretq_u16_u8(high.val[k / 2]);
        (i ? v[k].hi : v[k].lo) = vreinterpretq_f32_u16(k % 2 ? vzip2q_u16(a, b) : vzip1q_u16(a, b));
      }
    }
  }
};

struct Lut8Codec : Fp8Codec<5> {
  static inline void load(const uint8_t* p, Vec* v, const float* table) {
    for (int k = 0; k < 4; ++k, p += 8)
      v[k] = {float32x4_t{table[p[0]], table[p[2]], table[p[4]], table[p[6]]},
              float32x4_t{table[p[1]], table[p[3]], table[p[5]], table[p[7]]}};
  }
};
