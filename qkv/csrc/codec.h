// Encoding rows into stored codes, and back. Bit for bit the same as the formats in Python (qkv/formats): the same
// order of the same float32 operations. Included once per instruction set, inside a namespace.

// To the nearest float8 with kMantissa bits of mantissa and a least exponent of kLeast, ties to even. The caller has
// clamped to the largest finite value.
template <int kMantissa, int kLeast>
static inline uint8_t to_fp8(float f) {
  const uint32_t u = bits_of(f), sign = (u >> 24) & 0x80u, magnitude = u & 0x7fffffffu;
  constexpr uint32_t least = static_cast<uint32_t>(127 + kLeast) << 23;  // smallest normal number
  constexpr int drop = 23 - kMantissa;
  if (magnitude < least) {  // subnormal: let the addition of 2^(kLeast + drop) round to whole steps
    constexpr uint32_t magic = static_cast<uint32_t>(127 + kLeast + drop) << 23;
    return static_cast<uint8_t>(sign | (bits_of(float_of(magnitude) + float_of(magic)) - magic));
  }
  const uint32_t rounded = magnitude + ((1u << (drop - 1)) - 1) + ((magnitude >> drop) & 1u);
  return static_cast<uint8_t>(sign | ((rounded - least + (1u << 23)) >> drop));
}

static inline float largest_code(int32_t format) {
  return format == QKV_INT8 ? 127.0f : format == QKV_E4M3 ? 448.0f : 57344.0f;
}

// amax / largest code, rounded up to bfloat16 so that no code saturates, at least the smallest normal number. At most
// what keeps the largest code times the scale within bfloat16 (the numerator is the largest one): there codes saturate.
static inline uint16_t token_scale(float amax, float largest) {
  const float s = most(amax / largest, 1.17549435e-38f);
  const uint32_t highest = bits_of(3.38953139e38f / largest) >> 16;
  return static_cast<uint16_t>(least((bits_of(s) + 0xffffu) >> 16, highest));
}

template <int32_t kFormat>
static inline void encode_row(const float* x, int dim, float scale, uint8_t* out) {
  const float top = largest_code(kFormat);
  for (int d = 0; d < dim; ++d) {
    const float y = least(most(x[d] / scale, -top), top);
    if (kFormat == QKV_INT8) out[d] = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(y)));
    else if (kFormat == QKV_E4M3) out[d] = to_fp8<3, -6>(y);
    else out[d] = to_fp8<2, -14>(y);
  }
}

static void scatter_key(const uint8_t* row, int dim, uint8_t* codes, int64_t token) {
  const int even = round_up(dim, 2);
  uint8_t* at = codes + token / 16 * 16 * even + token % 16 * 2;
  for (int d = 0; d < even; d += 2, at += 32) std::memcpy(at, row + d, 2);
}

static void scatter_value(const uint8_t* row, int dim, uint8_t* codes, int64_t token) {
  uint8_t* at = codes + token / 2 * 2 * dim + token % 2;
  for (int d = 0; d < dim; ++d, at += 2) *at = row[d];
}

static bool known_float(int32_t dtype) { return dtype >= QKV_F32 && dtype <= QKV_F16; }

static void encode_head(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t b, int64_t h, int64_t from,
                        int64_t to, int64_t offset) {
  const int dim = static_cast<int>(rows.dim);
  const int64_t width = rows.dtype == QKV_F32 ? 4 : 2;
  uint8_t* codes = static_cast<uint8_t*>(plane.codes) + b * plane.codes_stride[0] + h * plane.codes_stride[1];
  char* scale = static_cast<char*>(plane.scale) + b * plane.scale_stride[0] + h * plane.scale_stride[1];
  static thread_local Buffer<float> floats;
  static thread_local Buffer<uint8_t> bytes;
  float* const x = floats.at_least(dim);
  uint8_t* const coded = bytes.at_least(dim + 1);
  coded[dim] = 0;  // pads an odd number of channels
  for (int64_t t = from; t < to; ++t) {
    const int64_t at = b * rows.stride[0] + h * rows.stride[1] + t * rows.stride[2];
    if (!is_packed(plane.format)) {  // the model's own dtype: checked by the caller
      std::memcpy(codes + (offset + t) * dim * width, static_cast<const char*>(rows.rows) + at * width, dim * width);
      continue;
    }
    load_row(x, rows.rows, at, dim, rows.dtype);
    float s;
    bool finite = true;
    if (plane.scale_kind == QKV_SCALE_TOKEN) {
      uint32_t top = 0;
      for (int d = 0; d < dim; ++d) top = most(top, bits_of(x[d]) & 0x7fffffffu);
      finite = top < 0x7f800000u;
      // A row that is not finite is stored as such: its scale says so, and no other row is touched.
      const uint16_t coded_scale = finite ? token_scale(float_of(top), largest_code(plane.format)) : 0x7fc0;
      reinterpret_cast<uint16_t*>(scale)[offset + t] = coded_scale;
      s = float_of(static_cast<uint32_t>(coded_scale) << 16);
    } else {
      std::memcpy(&s, scale, 4);
      finite = s == s;
    }
    if (!finite) std::memset(coded, 0, dim);
    else if (plane.format == QKV_INT8) encode_row<QKV_INT8>(x, dim, s, coded);
    else if (plane.format == QKV_E4M3) encode_row<QKV_E4M3>(x, dim, s, coded);
    else encode_row<QKV_E5M2>(x, dim, s, coded);
    if (is_key) scatter_key(coded, dim, codes, offset + t);
    else scatter_value(coded, dim, codes, offset + t);
  }
}

static void store_row(const float* x, void* base, int64_t at, int dim, int32_t dtype) {
  if (dtype == QKV_F32) {
    std::memcpy(static_cast<float*>(base) + at, x, dim * sizeof(float));
  } else if (dtype == QKV_BF16) {
    for (int d = 0; d < dim; ++d) static_cast<uint16_t*>(base)[at + d] = to_bf16(x[d]);
  } else {
    for (int d = 0; d < dim; ++d) static_cast<uint16_t*>(base)[at + d] = to_f16(x[d]);
  }
}

static void decode_head(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t b, int64_t h, int64_t from,
                        int64_t to, int64_t offset) {
  const int dim = static_cast<int>(rows.dim), even = round_up(dim, 2);
  const uint8_t* codes = plane_codes(plane, b, h);
  const char* scale = static_cast<const char*>(plane.scale) + b * plane.scale_stride[0] + h * plane.scale_stride[1];
  static thread_local Buffer<float> floats;
  float* const x = floats.at_least(dim);
  float table[256];  // value of each code before scaling
  for (int c = 0; c < 256; ++c) {
    if (plane.format == QKV_INT8) table[c] = static_cast<float>(static_cast<int8_t>(c));
    else if (plane.format == QKV_E4M3) table[c] = f16_to_f32(static_cast<uint16_t>(((c & 0x80) << 8) | ((c & 0x7f) << 7))) * 256.0f;
    else table[c] = f16_to_f32(static_cast<uint16_t>(c << 8));
  }
  for (int64_t t = from; t < to; ++t) {
    const int64_t token = offset + t;
    float s;
    if (plane.scale_kind == QKV_SCALE_TOKEN) s = FloatRow<QKV_BF16>::one(reinterpret_cast<const uint16_t*>(scale)[token]);
    else std::memcpy(&s, scale, 4);
    if (is_key) {
      const uint8_t* at = codes + token / 16 * 16 * even + token % 16 * 2;
      for (int d = 0; d < dim; ++d) x[d] = table[at[(d >> 1) * 32 + (d & 1)]] * s;
    } else {
      const uint8_t* at = codes + token / 2 * 2 * dim + token % 2;
      for (int d = 0; d < dim; ++d) x[d] = table[at[2 * d]] * s;
    }
    store_row(x, rows.rows, b * rows.stride[0] + h * rows.stride[1] + t * rows.stride[2], dim, rows.dtype);
  }
}

template <class F>
static void over_heads(int64_t batch, int64_t heads, int64_t n, int64_t dim, int threads, F work) {
  const int64_t run = 64;  // tokens in one unit of work
  const int64_t runs = (n + run - 1) / run, units = batch * heads * runs;
  const int64_t worth = 1 + batch * heads * n * dim / 16384;
  const int count = static_cast<int>(most<int64_t>(1, least(least<int64_t>(threads, worth), units)));
#pragma omp parallel for num_threads(count) if (count > 1) schedule(static)
  for (int64_t u = 0; u < units; ++u) {
    const int64_t head = u / runs, from = u % runs * run;
    work(head / heads, head % heads, from, least(n, from + run));
  }
}

static int encode(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t batch, int64_t heads, int64_t n,
                  int64_t offset, int threads) {
  if (!known_float(rows.dtype)) return -1;
  if (!is_packed(plane.format) && plane.format != rows.dtype) return -2;
  over_heads(batch, heads, n, rows.dim, threads, [&](int64_t b, int64_t h, int64_t from, int64_t to) {
    encode_head(rows, plane, is_key, b, h, from, to, offset);
  });
  return 0;
}

static int decode(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t batch, int64_t heads, int64_t n,
                  int64_t offset, int threads) {
  if (!known_float(rows.dtype) || !is_packed(plane.format)) return -1;
  over_heads(batch, heads, n, rows.dim, threads, [&](int64_t b, int64_t h, int64_t from, int64_t to) {
    decode_head(rows, plane, is_key, b, h, from, to, offset);
  });
  return 0;
}
