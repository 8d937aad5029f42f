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
  switch (format) {
    case QKV_INT8: return 127.0f;
    case QKV_E4M3: return 448.0f;
    case QKV_E5M2: return 57344.0f;
    default: return 1.0f;  // of code books
  }
}

// amax / largest code, rounded up to bfloat16 so that no code saturates, at least the smallest normal number. At most
// what keeps the largest code times the scale within bfloat16 (the numerator is the largest one): there codes saturate.
static inline uint16_t token_scale(float amax, float largest) {
  const float s = most(amax / largest, 1.17549435e-38f);
  const uint32_t highest = bits_of(3.38953139e38f / largest) >> 16;
  return static_cast<uint16_t>(least((bits_of(s) + 0xffffu) >> 16, highest));
}

// Scale and offset of a vector of whole numbers, as formats/affine.py chooses them, and its codes. `step` apart lie the
// numbers and the codes.
static void encode_affine(const float* apart, int n, int64_t step, const QkvPlane& plane, int64_t at, uint8_t* out) {
  const float limit = 8.50705917e37f;  // 2^126
  const float levels = largest_integer(plane.format);
  // Together, and the last one repeated to whole lanes.
  static thread_local Buffer<float> together;
  static thread_local Buffer<int16_t> rounded;
  const int padded = round_up(n, 16);
  float* const x = together.at_least(padded);
  int16_t* const codes = rounded.at_least(padded);
  for (int i = 0; i < n; ++i) x[i] = apart[i * step];
  for (int i = n; i < padded; ++i) x[i] = x[n - 1];
  const vf none = vf_set1(0);
  vf most_up = vf_load(x), most_down = vf_sub(none, most_up), odd = none;
  for (int i = 0; i < padded; i += kLanes) {
    const vf v = vf_load(x + i);
    most_up = vf_max(most_up, v);
    most_down = vf_max(most_down, vf_sub(none, v));
    odd = vf_fma(v, none, odd);  // 0 unless v is not finite
  }
  const bool finite = vf_hsum(odd) == 0.0f;
  float high = vf_hmax(most_up), low = 0.0f - vf_hmax(most_down);
  uint8_t* const scale = static_cast<uint8_t*>(plane.scale) + at;
  int8_t* const zero_point = static_cast<int8_t*>(plane.offset) + at;
  if (!finite) {
    *scale = 255;
    *zero_point = 0;
    for (int i = 0; i < n; ++i) out[i * step] = 0;
    return;
  }
  low = most(low, -limit);
  high = least(high, limit);
  low = least(low, limit);
  high = most(high, -limit);
  if (plane.cut != 0.0f) {
    const float cut = (high - low) * plane.cut;
    low += cut;
    high -= cut;
  }
  const float excess = most((high - low) - levels * 3584.0f, 0.0f) * 0.5f;
  low += excess;
  high -= excess;
  const float needed = most((high - low) / levels, std::fabs(low) / 127.0f);
  const float held = least(most(needed, 9.53674316e-7f), 3584.0f);  // 2^-20 .. 2^11 * 1.75
  const uint8_t stored = static_cast<uint8_t>(((bits_of(held) + 0xfffffu) >> 20) - (107u << 3));
  const float s = ue5m3_value(stored);
  const float zero = least(most(std::nearbyint(low / s), -127.0f), 127.0f);
  *scale = stored;
  *zero_point = static_cast<int8_t>(zero);
  const vf wide = vf_set1(s), shift = vf_set1(zero), top = vf_set1(-levels);
  for (int i = 0; i < padded; i += kLanes) {
    const vf code = vf_max(vf_sub(vf_round(vf_div(vf_load(x + i), wide)), shift), none);
    vf_store_i16(codes + i, vf_sub(none, vf_max(vf_sub(none, code), top)));
  }
  for (int i = 0; i < n; ++i) out[i * step] = static_cast<uint8_t>(codes[i]);
}

static void encode_symmetric(const float* x, int n, int64_t step, int32_t format, float scale, uint8_t* out) {
  const float top = largest_code(format);
  for (int i = 0; i < n; ++i) {
    const float y = least(most(x[i * step] / scale, -top), top);
    uint8_t code;
    if (format == QKV_INT8) code = static_cast<uint8_t>(static_cast<int8_t>(std::nearbyint(y)));
    else if (format == QKV_E4M3) code = to_fp8<3, -6>(y);
    else code = to_fp8<2, -14>(y);
    out[i * step] = code;
  }
}

static void encode_nearest(const float* x, int n, int64_t step, const QkvPlane& plane, float scale, uint8_t* out) {
  for (int i = 0; i < n; ++i) {
    const float y = least(most(x[i * step] / scale, -1.0f), 1.0f);
    const int64_t place = (static_cast<int32_t>(bits_of(y)) >> 16) + 32768;
    out[i * step] = y > plane.bound[place] ? plane.above[place] : plane.below[place];
  }
}

// A vector of n numbers that shares the scale number `at`, which is chosen here.
static void encode_vector(const float* x, int n, int64_t step, const QkvPlane& plane, int64_t at, uint8_t* out) {
  if (plane.format >= QKV_INT2 && plane.format <= QKV_INT6) return encode_affine(x, n, step, plane, at, out);
  uint32_t top = 0;
  for (int i = 0; i < n; ++i) top = most(top, bits_of(x[i * step]) & 0x7fffffffu);
  const bool finite = top < 0x7f800000u;
  // A vector that is not finite is stored as such: its scale says so, and no other one is touched.
  const uint16_t stored = finite ? token_scale(float_of(top), largest_code(plane.format)) : 0x7fc0;
  static_cast<uint16_t*>(plane.scale)[at] = stored;
  if (plane.format < QKV_INT2) {
    if (finite) encode_symmetric(x, n, step, plane.format, bf16_value(stored), out);
    else for (int i = 0; i < n; ++i) out[i * step] = 0;
  } else if (finite) {
    encode_nearest(x, n, step, plane, bf16_value(stored), out);
  } else {  // the code of zero
    for (int i = 0; i < n; ++i) out[i * step] = 0.0f > plane.bound[32768] ? plane.above[32768] : plane.below[32768];
  }
}

template <int kBits>
static void put_key(const uint8_t* row, int dim, uint8_t* tile, int token) {
  for (int d = 0; d < dim; ++d) put_code<kBits>(tile + d / 2 * 4 * kBits, token * 2 + (d & 1), row[d]);
}
template <int kBits>
static void put_value(const uint8_t* row, int dim, uint8_t* tile, int token) {
  for (int d = 0; d < dim; ++d) put_code<kBits>(tile + d / 16 * 4 * kBits, d % 16 * 2 + token, row[d]);
}
template <int kBits>
static void get_key(uint8_t* row, int dim, const uint8_t* tile, int token) {
  for (int d = 0; d < dim; ++d) row[d] = static_cast<uint8_t>(get_code<kBits>(tile + d / 2 * 4 * kBits, token * 2 + (d & 1)));
}
template <int kBits>
static void get_value(uint8_t* row, int dim, const uint8_t* tile, int token) {
  for (int d = 0; d < dim; ++d) row[d] = static_cast<uint8_t>(get_code<kBits>(tile + d / 16 * 4 * kBits, d % 16 * 2 + token));
}

// The codes of one token to their places, one byte each.
static void put_row(const uint8_t* row, int dim, const QkvPlane& plane, bool is_key, uint8_t* codes, int64_t token) {
  const int in_tile = static_cast<int>(is_key ? token % 16 : token % 2);
  uint8_t* tile = codes + (is_key ? token / 16 * key_tile(plane, dim) : token / 2 * value_tile(plane, dim));
  switch (code_bits(plane.format)) {
    case 2: return is_key ? put_key<2>(row, dim, tile, in_tile) : put_value<2>(row, dim, tile, in_tile);
    case 3: return is_key ? put_key<3>(row, dim, tile, in_tile) : put_value<3>(row, dim, tile, in_tile);
    case 4: return is_key ? put_key<4>(row, dim, tile, in_tile) : put_value<4>(row, dim, tile, in_tile);
    case 5: return is_key ? put_key<5>(row, dim, tile, in_tile) : put_value<5>(row, dim, tile, in_tile);
    case 6: return is_key ? put_key<6>(row, dim, tile, in_tile) : put_value<6>(row, dim, tile, in_tile);
    default: break;
  }
  if (is_key) for (int d = 0; d < dim; ++d) tile[(d >> 1) * 32 + in_tile * 2 + (d & 1)] = row[d];
  else for (int d = 0; d < dim; ++d) tile[2 * d + in_tile] = row[d];
}

static void get_row(uint8_t* row, int dim, const QkvPlane& plane, bool is_key, const uint8_t* codes, int64_t token) {
  const int in_tile = static_cast<int>(is_key ? token % 16 : token % 2);
  const uint8_t* tile = codes + (is_key ? token / 16 * key_tile(plane, dim) : token / 2 * value_tile(plane, dim));
  switch (code_bits(plane.format)) {
    case 2: return is_key ? get_key<2>(row, dim, tile, in_tile) : get_value<2>(row, dim, tile, in_tile);
    case 3: return is_key ? get_key<3>(row, dim, tile, in_tile) : get_value<3>(row, dim, tile, in_tile);
    case 4: return is_key ? get_key<4>(row, dim, tile, in_tile) : get_value<4>(row, dim, tile, in_tile);
    case 5: return is_key ? get_key<5>(row, dim, tile, in_tile) : get_value<5>(row, dim, tile, in_tile);
    case 6: return is_key ? get_key<6>(row, dim, tile, in_tile) : get_value<6>(row, dim, tile, in_tile);
    default: break;
  }
  if (is_key) for (int d = 0; d < dim; ++d) row[d] = tile[(d >> 1) * 32 + in_tile * 2 + (d & 1)];
  else for (int d = 0; d < dim; ++d) row[d] = tile[2 * d + in_tile];
}

static bool known_float(int32_t dtype) { return dtype >= QKV_F32 && dtype <= QKV_F16; }

static int64_t row_at(const QkvRows& rows, int64_t b, int64_t h, int64_t t) {
  return b * rows.stride[0] + h * rows.stride[1] + t * rows.stride[2];
}

// Tokens that are encoded together.
static int tokens_together(const QkvPlane& plane) { return plane.scale_kind == QKV_SCALE_CHANNEL ? plane.group : 1; }

static void encode_head(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t b, int64_t h, int64_t from,
                        int64_t to, int64_t offset) {
  const int dim = static_cast<int>(rows.dim), together = tokens_together(plane);
  const int64_t width = rows.dtype == QKV_F32 ? 4 : 2;
  uint8_t* codes = static_cast<uint8_t*>(plane.codes) + b * plane.codes_stride[0] + h * plane.codes_stride[1];
  if (!is_packed(plane.format)) {  // the model's own dtype: checked by the caller
    for (int64_t t = from; t < to; ++t)
      std::memcpy(codes + (offset + t) * dim * width, static_cast<const char*>(rows.rows) + row_at(rows, b, h, t) * width,
                  dim * width);
    return;
  }
  const int64_t start = scale_start(plane, b, h);
  static thread_local Buffer<float> floats;
  static thread_local Buffer<uint8_t> bytes;
  float* const x = floats.at_least(static_cast<int64_t>(together) * dim);
  uint8_t* const coded = bytes.at_least(static_cast<int64_t>(together) * dim);
  for (int64_t t = from; t < to;) {
    // The first group of a plane may have begun with places that hold nothing.
    const int count = together - static_cast<int>((offset + t) % together);
    for (int k = 0; k < count; ++k) {
      load_row(x + k * dim, rows.rows, row_at(rows, b, h, t + k), dim, rows.dtype);
      transform_row(plane, h, x + k * dim, dim);
    }
    const int64_t token = offset + t;
    switch (plane.scale_kind) {
      case QKV_SCALE_TOKEN:
        encode_vector(x, dim, 1, plane, start + token, coded);
        break;
      case QKV_SCALE_GROUP:
        for (int g = 0, at = 0; at < dim; ++g, at += plane.group)
          encode_vector(x + at, least(plane.group, dim - at), 1, plane, start + g * plane.group_stride + token,
                        coded + at);
        break;
      case QKV_SCALE_CHANNEL:
        for (int d = 0; d < dim; ++d)
          encode_vector(x + d, count, dim, plane, start + token / together * plane.group_stride + d, coded + d);
        break;
      default: {
        const float s = static_cast<const float*>(plane.scale)[start];
        if (s == s) encode_symmetric(x, dim, 1, plane.format, s, coded);
        else std::memset(coded, 0, dim);
      }
    }
    for (int k = 0; k < count; ++k) put_row(coded + k * dim, dim, plane, is_key, codes, token + k);
    t += count;
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

// What a code is worth, before scale and offset.
static void fill_table(const QkvPlane& plane, float* table) {
  for (int c = 0; c < 256; ++c) {
    if (plane.table) table[c] = c < (1 << code_bits(plane.format)) ? plane.table[c] : 0.0f;
    else if (plane.format == QKV_INT8) table[c] = static_cast<float>(static_cast<int8_t>(c));
    else if (plane.format == QKV_E4M3) table[c] = e4m3_value(static_cast<uint8_t>(c));
    else if (plane.format == QKV_E5M2) table[c] = f16_to_f32(static_cast<uint16_t>(c << 8));
    else table[c] = static_cast<float>(c);
  }
}

// In the order of the formats' own operations: a zero point is added to the code before it is multiplied.
static inline float decoded(const QkvPlane& plane, float code, int64_t at) {
  const float s = scale_value(plane.scale, at, plane.scale_type);
  switch (plane.offset_type) {
    case QKV_ZERO_POINT: return (code + static_cast<float>(static_cast<const int8_t*>(plane.offset)[at])) * s;
    case QKV_OFFSET_BF16: return code * s + bf16_value(static_cast<const uint16_t*>(plane.offset)[at]);
    case QKV_OFFSET_MIDDLE: return (code - 0.5f * largest_integer(plane.format)) * s;
    default: return code * s;
  }
}

static void decode_head(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t b, int64_t h, int64_t from,
                        int64_t to, int64_t offset) {
  const int dim = static_cast<int>(rows.dim);
  const uint8_t* codes = plane_codes(plane, b, h);
  const int64_t start = scale_start(plane, b, h);
  static thread_local Buffer<float> floats;
  static thread_local Buffer<uint8_t> bytes;
  float* const x = floats.at_least(dim);
  uint8_t* const coded = bytes.at_least(dim);
  float table[256];
  fill_table(plane, table);
  for (int64_t t = from; t < to; ++t) {
    const int64_t token = offset + t;
    get_row(coded, dim, plane, is_key, codes, token);
    if (plane.scale_kind == QKV_SCALE_GROUP) {
      for (int d = 0; d < dim; ++d)
        x[d] = decoded(plane, table[coded[d]], start + d / plane.group * plane.group_stride + token);
    } else if (plane.scale_kind == QKV_SCALE_CHANNEL) {
      const int64_t at = start + token / plane.group * plane.group_stride;
      for (int d = 0; d < dim; ++d) x[d] = decoded(plane, table[coded[d]], at + d);
    } else {
      const float s = scale_value(plane.scale, plane.scale_kind == QKV_SCALE_TOKEN ? start + token : start,
                                  plane.scale_type);
      for (int d = 0; d < dim; ++d) x[d] = table[coded[d]] * s;
    }
    restore_row(plane, h, x, dim);
    store_row(x, rows.rows, row_at(rows, b, h, t), dim, rows.dtype);
  }
}

// Calls `work(b, h, from, to)` for all of n tokens from `offset` on, of every head. Threads share no tile and no group:
// tokens are cut at multiples of `run`, counted from the plane's beginning.
template <class F>
static void over_heads(int64_t batch, int64_t heads, int64_t n, int64_t offset, int64_t run, int64_t dim, int threads,
                       F work) {
  if (n == 0) return;
  const int64_t first = offset / run, runs = (offset + n - 1) / run - first + 1, units = batch * heads * runs;
  const int64_t worth = 1 + batch * heads * n * dim / 16384;
  [[maybe_unused]] const int count = static_cast<int>(most<int64_t>(1, least(least<int64_t>(threads, worth), units)));
#pragma omp parallel for num_threads(count) if (count > 1) schedule(static)
  for (int64_t u = 0; u < units; ++u) {
    const int64_t head = u / runs, begin = (first + u % runs) * run - offset;
    work(head / heads, head % heads, most<int64_t>(0, begin), least(n, begin + run));
  }
}

static int64_t run_length(const QkvPlane& plane) { return most(64, tokens_together(plane)); }

static int encode(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t batch, int64_t heads, int64_t n,
                  int64_t offset, int threads) {
  if (!known_float(rows.dtype)) return -1;
  if (!is_packed(plane.format) && plane.format != rows.dtype) return -2;
  const bool book = plane.format >= QKV_LUT4;
  if (book && !plane.bound) return -3;
  if (plane.format >= QKV_INT2 && !book && (plane.scale_type != QKV_UE5M3 || plane.offset_type != QKV_ZERO_POINT)) return -4;
  if ((book || plane.format < QKV_INT2) && is_packed(plane.format) && plane.scale_kind != QKV_SCALE_HEAD &&
      plane.scale_type != QKV_BF16_SCALE)
    return -4;
  if ((offset + n) % tokens_together(plane)) return -5;
  over_heads(batch, heads, n, offset, run_length(plane), rows.dim, threads, [&](int64_t b, int64_t h, int64_t from, int64_t to) {
    encode_head(rows, plane, is_key, b, h, from, to, offset);
  });
  return 0;
}

static int decode(const QkvRows& rows, const QkvPlane& plane, bool is_key, int64_t batch, int64_t heads, int64_t n,
                  int64_t offset, int threads) {
  if (!known_float(rows.dtype) || !is_packed(plane.format)) return -1;
  over_heads(batch, heads, n, offset, run_length(plane), rows.dim, threads, [&](int64_t b, int64_t h, int64_t from, int64_t to) {
    decode_head(rows, plane, is_key, b, h, from, to, offset);
  });
  return 0;
}
