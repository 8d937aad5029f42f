// What a thread of attention works on: queries as stored keys want them, and room for scores, weights and results.
// Included once per instruction set, inside a namespace, after a simd_*.h.

// Everything a thread needs: what a block leaves behind, one for all, and a set for each kv head of a band: its queries,
// and what its blocks have come to so far. `turn_to` says which head's set the pointers are of. The memory is kept
// between calls, one buffer a thread. The structure itself is a local variable: were it thread-local, inner loops would
// look its address up again and again.
struct Workspace {
  // Of the head at hand.
  float *query, *packed, *group_sum, *group_unit, *q_unit, *bias, *m, *l, *bad, *acc, *turned;
  int16_t* q16;
  // Of the block at hand.
  float *scores, *prob, *tile, *part, *key_scale, *key_offset, *value_scale, *value_offset, *folded, *unit, *factor,
      *value_shift;
  int16_t *p16, *folded16;
  int rows, key_stride, value_stride;
  bool odd_values;  // whether a value scale of the current block is not finite
  // The planes that tell how keys and values are transformed; null: not at all.
  const QkvPlane *key_plane, *value_plane;

  Workspace(const QkvAttend& a, int64_t heads) {
    static thread_local Buffer<float> memory;
    rows = rows_of(a);
    key_stride = round_up(a.key_dim, 16);
    value_stride = round_up(a.value_dim, 16);
    key_plane = value_plane = nullptr;
    for (int64_t k = 0; k < a.n_regions; ++k) {
      if (!key_plane && is_packed(a.regions[k].key.format)) key_plane = &a.regions[k].key;
      if (!value_plane && is_packed(a.regions[k].value.format) && a.regions[k].value.signs)
        value_plane = &a.regions[k].value;
    }
    const int64_t r = rows, wide = most(most(key_stride, value_stride), kBlock);
    next_ = memory.at_least(heads * head_floats(a) + r * (3 * kBlock + kBlock / 2 + value_stride + 3 + wide + wide / 2) +
                            4 * wide + 16 * 14);
    sets_ = next_;
    set_ = head_floats(a);
    next_ += heads * set_;
    turn_to(0);
    scores = take(r * kBlock);
    prob = take(r * kBlock);
    part = take(r * kBlock);
    p16 = reinterpret_cast<int16_t*>(take(r * kBlock / 2));
    tile = take(r * value_stride);
    folded = take(r * wide);
    folded16 = reinterpret_cast<int16_t*>(take(r * wide / 2));
    key_scale = take(wide);
    key_offset = take(wide);
    value_scale = take(wide);
    value_offset = take(wide);
    unit = take(r);
    factor = take(r);
    value_shift = take(r);
  }

  static int rows_of(const QkvAttend& a) { return static_cast<int>(a.group * a.q_len); }

  // Floats of one head's set.
  static int64_t head_floats(const QkvAttend& a) {
    const int64_t r = rows_of(a), key = round_up(a.key_dim, 16), value = round_up(a.value_dim, 16);
    return 2 * whole(r * key) + whole(r * key / 2) + 2 * whole(r * key / 16) + 5 * whole(r) + 2 * whole(r * value);
  }

  void turn_to(int64_t head) {
    float* const kept = next_;
    const int64_t r = rows;
    next_ = sets_ + head * set_;
    query = take(r * key_stride);
    packed = take(r * key_stride);
    q16 = reinterpret_cast<int16_t*>(take(r * key_stride / 2));
    group_sum = take(r * key_stride / 16);
    group_unit = take(r * key_stride / 16);
    q_unit = take(r);
    bias = take(r);
    m = take(r);
    l = take(r);
    bad = take(r);
    acc = take(r * value_stride);
    turned = take(r * value_stride);
    next_ = kept;
  }

 private:
  float *next_, *sets_;
  int64_t set_;

  static int64_t whole(int64_t n) { return (n + 15) / 16 * 16; }
  float* take(int64_t n) {  // every part begins on a cache line
    float* start = next_;
    next_ += whole(n);
    return start;
  }
};

static const uint8_t* plane_codes(const QkvPlane& plane, int64_t b, int64_t h) {
  return static_cast<const uint8_t*>(plane.codes) + b * plane.codes_stride[0] + h * plane.codes_stride[1];
}

// Scales per token or head of n tokens from `offset` on, times `unit`, padded with 0 to whole lanes. Returns whether all
// are finite.
static bool load_scales(const QkvPlane& plane, int64_t b, int64_t h, int64_t offset, int n, float unit, float* out) {
  const int64_t start = scale_start(plane, b, h);
  const int padded = round_up(n, 16);
  if (plane.scale_kind == QKV_SCALE_TOKEN) {
    const uint16_t* p = static_cast<const uint16_t*>(plane.scale) + start + offset;
    const vf wide = vf_set1(unit);
    vf sum = vf_set1(0);
    int t = 0;
    for (; t + kLanes <= n; t += kLanes) {
      const vf v = vf_mul(vf_load_bf16(p + t), wide);
      sum = vf_fma(v, vf_set1(0), sum);  // 0 * v is 0 unless v is not finite
      vf_store(out + t, v);
    }
    float rest = vf_hsum(sum);
    for (; t < n; ++t) {
      out[t] = bf16_value(p[t]) * unit;
      rest += 0.0f * out[t];
    }
    for (; t < padded; ++t) out[t] = 0.0f;
    return rest == 0.0f;
  }
  const float s = plane.scale_kind == QKV_SCALE_HEAD ? static_cast<const float*>(plane.scale)[start] : 1.0f;
  for (int t = 0; t < padded; ++t) out[t] = t < n ? s * unit : 0.0f;
  return std::fabs(s) <= 3.4028235e38f;
}

static float code_unit(int32_t format) { return format == QKV_E4M3 ? Fp8Codec<7>::kUnit : 1.0f; }

// Rounds rows of n numbers to 16 bits, at most `limit`; unit[r * step] is worth one step of row r, NaN where a row is not
// finite. Works in whole sets of 16: behind the n numbers there are zeros, and become zeros.
static void round_rows(const float* x, int64_t stride, int rows, int n, float limit, int16_t* out, float* unit,
                       int64_t step = 1) {
  const vf zero = vf_set1(0);
  const int padded = round_up(n, 16);
  for (int r = 0; r < rows; ++r, x += stride, out += stride) {
    vf top = zero, odd = zero;
    for (int d = 0; d < padded; d += kLanes) {
      const vf v = vf_load(x + d);
      top = vf_max(vf_max(v, vf_sub(zero, v)), top);
      odd = vf_fma(v, zero, odd);  // 0 unless v is not finite
    }
    const bool finite = vf_hsum(odd) == 0.0f;
    const float largest = vf_hmax(top);
    // Below this the reciprocal would overflow; such a row makes no score worth the name.
    const bool usable = finite && largest > 1e-34f;
    unit[r * step] = finite ? largest / limit : __builtin_nanf("");
    if (!usable) {
      std::memset(out, 0, padded * sizeof(int16_t));
      continue;
    }
    const vf inverse = vf_set1(limit / largest);
    for (int d = 0; d < padded; d += kLanes) vf_store_i16(out + d, vf_mul(vf_load(x + d), inverse));
  }
}

// Multiplies n numbers (in whole sets of 16, zeros behind them) by scales, rounds the products to 16 bits, at most
// `limit`, and gives in `sum` the numbers' product with the offsets. Returns what one step of the rounded products is
// worth; NaN where the sum is not finite, and then they are zeros. `products` has room for what is rounded.
static float fold_row(const float* x, const float* scale, const float* offset, int n, float limit, float* products,
                      int16_t* out, float* sum) {
  vf top = vf_set1(0), total = vf_set1(0);
  for (int d = 0; d < n; d += kLanes) {
    const vf v = vf_load(x + d), product = vf_mul(v, vf_load(scale + d));
    vf_store(products + d, product);
    top = vf_max(vf_abs(product), top);
    total = vf_fma(v, vf_load(offset + d), vf_fma(product, vf_set1(0), total));  // not a number if the product is none
  }
  *sum = vf_hsum(total);
  const float largest = vf_hmax(top);
  const bool finite = std::fabs(*sum) <= 3.4028235e38f && largest <= 3.4028235e38f;
  // Below this the reciprocal would overflow; such a row makes no score worth the name.
  const bool usable = finite && largest > 1e-34f;
  if (!usable) {
    std::memset(out, 0, n * sizeof(int16_t));
    return finite ? 0.0f : __builtin_nanf("");
  }
  const vf inverse = vf_set1(limit / largest);
  for (int d = 0; d < n; d += kLanes) vf_store_i16(out + d, vf_mul(vf_load(products + d), inverse));
  return largest / limit;
}

// The largest multiplier with which no sum of products over the channels leaves int32.
static float query_limit(int64_t key_dim) {
  return least(32767.0f, std::floor(2147483520.0f / (127.0f * static_cast<float>(key_dim))));
}

// The query as quantized keys want it: multiplied where they were divided, rotated as they were.
static void fold_query(const QkvAttend& a, Workspace& w, int64_t h) {
  const int dim = static_cast<int>(a.key_dim);
  const QkvPlane* plane = w.key_plane;
  for (int r = 0; r < w.rows; ++r) {
    const float* q = w.query + r * w.key_stride;
    float* k = w.packed + r * w.key_stride;
    std::memcpy(k, q, w.key_stride * sizeof(float));
    w.bias[r] = 0;
    if (!plane) continue;
    if (plane->centre)
      for (int d = 0; d < dim; ++d) w.bias[r] += q[d] * plane->centre[h * dim + d];
    if (plane->multiplier)
      for (int d = 0; d < dim; ++d) k[d] *= plane->multiplier[h * dim + d];
    if (plane->signs) {
      for (int d = 0; d < dim; ++d) k[d] *= plane->signs[d];
      hadamard(k, dim, plane->rotation);
    }
  }
  if (!plane || plane->scale_kind != QKV_SCALE_GROUP)
    return round_rows(w.packed, w.key_stride, w.rows, dim, query_limit(dim), w.q16, w.q_unit);
  // Group by group: where keys of a group are large the query is small, and must not be rounded as elsewhere.
  const int groups = w.key_stride / 16;
  for (int g = 0, at = 0; at < dim; ++g, at += plane->group) {
    const int n = least(plane->group, dim - at);
    round_rows(w.packed + at, w.key_stride, w.rows, n, query_limit(dim), w.q16 + at, w.group_unit + g, groups);
    for (int r = 0; r < w.rows; ++r) {
      const float* k = w.packed + r * w.key_stride + at;
      float sum = 0;
      for (int d = 0; d < n; ++d) sum += k[d];
      w.group_sum[r * groups + g] = sum;
    }
  }
}

static void begin(const QkvAttend& a, Workspace& w, int64_t b, int64_t h) {
  for (int64_t g = 0; g < a.group; ++g) {
    for (int64_t i = 0; i < a.q_len; ++i) {
      const int64_t r = g * a.q_len + i, head = h * a.group + g;
      float* q = w.query + r * w.key_stride;
      std::memset(q, 0, w.key_stride * sizeof(float));
      load_row(q, a.query, b * a.query_stride[0] + head * a.query_stride[1] + i * a.query_stride[2], a.key_dim,
               a.query_dtype);
      w.m[r] = kMinusInf;
      w.l[r] = 0;
      w.bad[r] = 0;
    }
  }
  const size_t size = static_cast<size_t>(w.rows) * w.value_stride * sizeof(float);
  std::memset(w.acc, 0, size);
  if (w.value_plane) std::memset(w.turned, 0, size);
  fold_query(a, w, h);
}

// Bytes of a tile of keys (16 tokens) and of values (2 tokens).
static int64_t key_tile(const QkvPlane& key, int64_t dim) { return (dim + 1) / 2 * 4 * code_bits(key.format); }
static int64_t value_tile(const QkvPlane& value, int64_t dim) {
  const int bits = code_bits(value.format);
  return bits == 8 ? 2 * dim : (dim + 15) / 16 * 4 * bits;
}

// Where a block of tokens begins, of quantized planes; for rows, near enough to be fetched early.
static const uint8_t* key_block(const QkvAttend& a, const QkvPlane& key, const uint8_t* codes, int64_t offset) {
  return codes + offset / 16 * key_tile(key, a.key_dim);
}
static const uint8_t* value_block(const QkvAttend& a, const QkvPlane& value, const uint8_t* codes, int64_t offset) {
  return codes + offset / 2 * value_tile(value, a.value_dim);
}
