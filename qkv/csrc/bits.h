// Codes of a few bits, one at a time, see qkv/formats/layout.py: a unit of 32 codes in parts of 4, 2 and 1 bits. Included
// once per instruction set, inside a namespace.

// Bits of the first part; what is left makes the second.
constexpr int first_part(int bits) { return bits >= 4 ? 4 : 2; }

static inline int get_part(const uint8_t* p, int width, int i) {
  return p[i % (4 * width)] >> (i / (4 * width) * width) & ((1 << width) - 1);
}

static inline void put_part(uint8_t* p, int width, int i, int code) {
  uint8_t* const at = p + i % (4 * width);
  const int shift = i / (4 * width) * width, mask = (1 << width) - 1;
  *at = static_cast<uint8_t>((*at & ~(mask << shift)) | (code & mask) << shift);
}

template <int kBits>
static inline int get_code(const uint8_t* unit, int i) {
  constexpr int low = first_part(kBits), high = kBits - low;
  int code = get_part(unit, low, i);
  if (high) code |= get_part(unit + 4 * low, most(high, 1), i) << low;
  return code;
}

template <int kBits>
static inline void put_code(uint8_t* unit, int i, int code) {
  constexpr int low = first_part(kBits), high = kBits - low;
  put_part(unit, low, i, code);
  if (high) put_part(unit + 4 * low, most(high, 1), i, code >> low);
}

// Bits of a code of a quantized format.
static inline int code_bits(int32_t format) {
  switch (format) {
    case QKV_INT2: return 2;
    case QKV_INT3: return 3;
    case QKV_INT4: case QKV_LUT4: return 4;
    case QKV_INT5: return 5;
    case QKV_INT6: return 6;
    default: return 8;
  }
}

// Float8 as float32: its exponent and mantissa, 7 bits, moved up by kShift + 16 lie where those of a float32 lie, the sign
// on top. 4: e4m3, 5: e5m2. The exponents' biases differ, so what comes out is the value divided by kFloat8Unit.
template <int kShift>
constexpr int32_t kFloat8Bits = static_cast<int32_t>(0x80000000u | (0x7fu << (16 + kShift)));
template <int kShift>
constexpr float kFloat8Unit = kShift == 4 ? 0x1p120f : 0x1p112f;
