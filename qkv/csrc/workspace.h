// What a thread of attention works on: queries as stored keys want them, and room for scores, weights and results.
// Included once per instruction set, inside a namespace, after a simd_*.h.

// Everything a thread needs: what a block leaves behind, one for all, and a set for each kv head of a band: its queries,
// and what its blocks have come to so far. `turn_to` says which head's set the pointers are of. The memory is kept
// between calls, one buffer a thread. The structure itself is a local variable: were it thread-local, inner loops would
// look its address up again and again.
struct Workspace {
  // Of the head at hand.
  float *query, *packed, *group_sum, *group_unit, *q_unit, *bias, *m, *l, *bad, *acc, *turned;
  void* q_mult;  // the queries as multipliers, of whichever type the keys' codec takes
  // Of the block at hand.
  float *scores, *prob, *tile, *part, *key_scale, *key_offset, *value_scale, *value_offset, *unit, *peak,
      *largest, *shift;
  void *p_mult, *folded_mult;
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
    next_ = memory.at_least(heads * head_floats(a) + r * (4 * kBlock + value_stride + 4 + wide) + 4 * wide + 16 * 16);
    sets_ = next_;
    set_ = head_floats(a);
    next_ += heads * set_;
    turn_to(0);
    scores = take(r * kBlock);
    prob = take(r * kBlock);
    part = take(r * kBlock);
    p_mult = take(r * kBlock);
    tile = take(r * value_stride);
    folded_mult = take(r * wide);
    key_scale = take(wide);
    key_offset = take(wide);
    value_scale = take(wide);
    value_offset = take(wide);
    unit = take(r);
    peak = take(r);
    largest = take(r);
    shift = take(r);
  }

  static int rows_of(const QkvAttend& a) { return static_cast<int>(a.group * a.q_len); }

  // Floats of one head's set.
  static int64_t head_floats(const QkvAttend& a) {
    const int64_t r = rows_of(a), key = round_up(a.key_dim, 16), value = round_up(a.value_dim, 16);
    return 3 * whole(r * key) + 2 * whole(r * key / 16) + 5 * whole(r) + 2 * whole(r * value);
  }

  void turn_to(int64_t head) {
    float* const kept = next_;
    const int64_t r = rows;
    next_ = sets_ + head * set_;
    query = take(r * key_stride);
    packed = take(r * key_stride);
    q_mult = take(r * key_stride);
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

// Scales per token or head of n tokens from `offset` on, padded with 0 to whole lanes. Returns whether all are finite.
static bool load_scales(const QkvPlane& plane, int64_t b, int64_t h, int64_t offset, int n, float* out) {
  const int64_t start = scale_start(plane, b, h);
  const int padded = round_up(n, 16);
  if (plane.scale_kind == QKV_SCALE_TOKEN) {
    const uint16_t* p = static_cast<const uint16_t*>(plane.scale) + start + offset;
    vf top = vf_set1(0);
    int t = 0;
    for (; t + kLanes <= n; t += kLanes) {
      const vf v = vf_load_bf16(p + t);
      top = vf_most(v, top);
      vf_store(out + t, v);
    }
    float rest = 0.0f * vf_hmost(top);  // 0 unless one is not finite
    for (; t < n; ++t) {
      out[t] = bf16_value(p[t]);
      rest += 0.0f * out[t];
    }
    for (; t < padded; ++t) out[t] = 0.0f;
    return rest == 0.0f;
  }
  const float s = plane.scale_kind == QKV_SCALE_HEAD ? static_cast<const float*>(plane.scale)[start] : 1.0f;
  for (int t = 0; t < padded; ++t) out[t] = t < n ? s : 0.0f;
  return is_finite(s);
}

// What numbers have to be multiplied by to become multipliers of a codec, and what a step of a multiplier is worth then.
// Whole numbers of 16 bits reach up to `limit`; float32 are scaled by a power of two. Either way nothing overflows, however
// large or small the numbers are.
struct Fit {
  float inverse, unit;
};
static inline Fit fit(const int16_t*, float largest, float limit) { return {limit / largest, largest / limit}; }
static inline Fit fit(const float*, float largest, float) {
  const float unit = least(float_of(bits_of(largest) & 0x7f800000u), 0x1p126f);  // its reciprocal is a normal number too
  return {1.0f / unit, unit};
}
static inline void store_multipliers(int16_t* out, vf v, float) { vf_store_i16(out, v); }
static inline void store_multipliers(float* out, vf v, float unit) { vf_store(out, vf_mul(v, vf_set1(unit))); }
static inline void store_multipliers(int16_t* out, vf v, vf w, float) { vf_store_i16(out, v, w); }
static inline void store_multipliers(float* out, vf v, vf w, float unit) {
  store_multipliers(out, v, unit);
  store_multipliers(out + kLanes, w, unit);
}

// n numbers, in whole sets of 16, as multipliers for codec C: themselves or, if kScaled, their products with scales, of
// which `largest` is the largest magnitude. Returns what one step of a multiplier is worth; not-a-number, and
// multipliers of 0, where a number is not finite.
template <class C, bool kScaled>
static inline float make_multipliers(const float* x, const float* scale, int n, float largest, float limit,
                                     typename C::Mult* out) {
  // Below this the reciprocal would overflow; such numbers add nothing.
  constexpr float usable = whole_numbers<C>() ? 1e-34f : 1.17549435e-38f;
  if (!(largest >= usable && is_finite(largest))) {
    std::memset(out, 0, n * sizeof(*out));
    return is_finite(largest) ? 0.0f : __builtin_nanf("");
  }
  const Fit f = fit(out, largest, limit);
  const vf inverse = vf_set1(f.inverse);
  const auto at = [&](int d) {
    const vf v = vf_load(x + d);
    return vf_mul(kScaled ? vf_mul(v, vf_load(scale + d)) : v, inverse);
  };
  int d = 0;
  for (; d + 2 * kLanes <= n; d += 2 * kLanes) store_multipliers(out + d, at(d), at(d + kLanes), C::kUnit);
  if (d < n) store_multipliers(out + d, at(d), C::kUnit);
  return f.unit;
}

// The same for rows of n numbers, with zeros behind them up to whole sets of 16; unit[r * step] is of row r.
template <class C>
static void multipliers_of_rows(const float* x, int64_t stride, int rows, int n, float limit, typename C::Mult* out,
                                float* unit, int64_t step = 1) {
  const int padded = round_up(n, 16);
  for (int r = 0; r < rows; ++r, x += stride, out += stride) {
    vf top = vf_set1(0);
    for (int d = 0; d < padded; d += kLanes) top = vf_most(vf_load(x + d), top);
    unit[r * step] = make_multipliers<C, false>(x, nullptr, padded, vf_hmost(top), limit, out);
  }
}

// The same for NR rows of n numbers (in whole sets of 16, zeros behind them) times scales; sum[r] gets the product of row r
// with the offsets. Where it is not finite, the row's unit is not-a-number.
template <class C, int NR>
static inline void fold_some(const float* x, int64_t stride, const float* scale, const float* offset, int n, float limit,
                             typename C::Mult* out, float* unit, float* sum) {
  vf top[NR], total[NR];
  QKV_UNROLL for (int r = 0; r < NR; ++r) top[r] = total[r] = vf_set1(0);
  for (int d = 0; d < n; d += kLanes) {
    const vf s = vf_load(scale + d), o = vf_load(offset + d);
    QKV_UNROLL for (int r = 0; r < NR; ++r) {
      const vf v = vf_load(x + r * stride + d);
      top[r] = vf_most(vf_mul(v, s), top[r]);
      total[r] = vf_fma(v, o, total[r]);
    }
  }
  QKV_UNROLL for (int r = 0; r < NR; ++r) {
    sum[r] = vf_hsum(total[r]);
    unit[r] = is_finite(sum[r]) ? vf_hmost(top[r]) : __builtin_nanf("");
  }
  for (int r = 0; r < NR; ++r)
    unit[r] = make_multipliers<C, true>(x + r * stride, scale, n, unit[r], limit, out + r * stride);
}

template <class C>
static void fold_rows(const float* x, int64_t stride, int rows, const float* scale, const float* offset, int n,
                      float limit, typename C::Mult* out, float* unit, float* sum) {
  for (int r = 0; r < rows;) {
    const int64_t at = r * stride;
    switch (rows - r) {
      case 1: fold_some<C, 1>(x + at, stride, scale, offset, n, limit, out + at, unit + r, sum + r), r += 1; break;
      case 2: fold_some<C, 2>(x + at, stride, scale, offset, n, limit, out + at, unit + r, sum + r), r += 2; break;
      case 3: fold_some<C, 3>(x + at, stride, scale, offset, n, limit, out + at, unit + r, sum + r), r += 3; break;
      default: fold_some<C, 4>(x + at, stride, scale, offset, n, limit, out + at, unit + r, sum + r), r += 4; break;
    }
  }
}

// The largest whole number as a multiplier with which no sum of products over the channels leaves int32.
static float query_limit(int64_t key_dim) {
  return least(32767.0f, std::floor(2147483520.0f / (127.0f * static_cast<float>(key_dim))));
}

// The queries as multipliers.
template <class C>
static void query_multipliers(Workspace& w, const QkvPlane& key, int dim) {
  auto* out = static_cast<typename C::Mult*>(w.q_mult);
  if (key.scale_kind != QKV_SCALE_GROUP)
    return multipliers_of_rows<C>(w.packed, w.key_stride, w.rows, dim, query_limit(dim), out, w.q_unit);
  // Group by group: where keys of a group are large the query is small, and must not be rounded as elsewhere.
  const int groups = w.key_stride / 16;
  for (int g = 0, at = 0; at < dim; ++g, at += key.group) {
    const int n = least(key.group, dim - at);
    multipliers_of_rows<C>(w.packed + at, w.key_stride, w.rows, n, query_limit(dim), out + at, w.group_unit + g, groups);
    for (int r = 0; r < w.rows; ++r) {
      const float* k = w.packed + r * w.key_stride + at;
      float sum = 0;
      for (int d = 0; d < n; ++d) sum += k[d];
      w.group_sum[r * groups + g] = sum;
    }
  }
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
  if (plane) with_codec(plane->format, [&](auto codec) { query_multipliers<decltype(codec)>(w, *plane, dim); });
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
