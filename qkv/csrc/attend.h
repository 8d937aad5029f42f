// Decoding attention over stored codes: one softmax over all regions of a cache, for a few queries.
// Included once per instruction set, inside a namespace, after a simd_*.h.
//
// The unit of work is a block of up to kBlock tokens of one batch row and kv head. For every block the scores of all
// query rows (the grouped query heads times q_len) are computed from one pass over the codes of the keys, then a running
// softmax, then one pass over the codes of the values. Quantization scales never touch the codes: those of the keys
// multiply the scores, those of the values the probabilities.
//
// With a scale per group of channels a pass goes group by group; with one per channel and group of tokens, the query is
// multiplied by the scales for each group of tokens. Offsets add their product with the query's sum, and with the sum of
// the probabilities. Keys that were equalized or rotated meet a query that was treated alike, once per call; sums of
// rotated values are kept apart and rotated back at the end.
//
// The query, and the probabilities of a block times the value scales, are made multipliers of the codes. For whole-number
// codes both passes are integer multiply-adds: multipliers are rounded to 16 bits relative to their largest magnitude; that
// error is 1/256 of the rounding of the codes. For others they are float32, moved by a power of two.

// `ahead`: the keys of the block that comes next, to be fetched while this one's values are read.
static void block(const QkvAttend& a, Workspace& w, const QkvRegion& region, int64_t b, int64_t h, const Span& span,
                  const uint8_t* ahead) {
  const int64_t offset = span.offset;
  const int n = span.n;
  const bool key_scaled = scaled_outside(region.key), value_scaled = scaled_outside(region.value);
  const bool packed = is_packed(region.key.format);
  const uint8_t* value_codes = plane_codes(region.value, b, h);
  raw_scores(a, w, region.key, plane_codes(region.key, b, h), b, h, offset, n,
             value_block(a, region.value, value_codes, offset));
  if (key_scaled) load_scales(region.key, b, h, offset, n, w.key_scale);
  const float scale = a.softmax_scale * kLog2e;
  for (int r = 0; r < w.rows; ++r) {
    const float unit = key_scaled ? scale * w.q_unit[r] : scale, bias = packed ? scale * w.bias[r] : 0.0f;
    w.peak[r] = scale_scores(a, w, r, key_scaled, unit, bias, b, h * a.group + r / a.q_len, r % a.q_len, span);
  }
  w.odd_values = value_scaled && !load_scales(region.value, b, h, offset, n, w.value_scale);
  for (int r = 0; r < w.rows; ++r) weigh(w, r, n, value_scaled);
  add_values(a, w, region.value, value_codes, b, h, offset, n, ahead);
}

// The state of all rows of one batch row and kv head after some of its blocks, to be merged with that of the others:
// m, l and bad of each row, then the accumulators.
struct Partial {
  const float *m, *l, *bad;
  float* acc;

  Partial(float* at, int rows) : m(at), l(at + rows), bad(at + 2 * rows), acc(at + 3 * rows) {}
  static int64_t floats(int rows, int stride) { return static_cast<int64_t>(rows) * (3 + stride); }
};

static void finish_row(const QkvAttend& a, int64_t b, int64_t h, int r, float m, float l, float bad,
                       const float* acc) {
  const int64_t g = r / a.q_len, i = r % a.q_len, head = h * a.group + g, heads = a.kv_heads * a.group;
  float grow = 1.0f;
  if (a.sinks) {
    const float sink = a.sinks[head] * kLog2e;
    if (sink > m) {
      grow = m == kMinusInf ? 0.0f : exp2_of(m - sink);
      l = l * grow + 1.0f;
    } else if (m > kMinusInf) {
      l += exp2_of(sink - m);
    }
  }
  float inverse = l == 0 ? 0.0f : grow / l;  // a row that sees nothing gives zeros
  if (bad != 0) inverse = __builtin_nanf("");
  const int64_t at = ((b * a.q_len + i) * heads + head) * a.value_dim;
  if (a.query_dtype == QKV_F32) {
    float* out = static_cast<float*>(a.out) + at;
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] = acc[d] * inverse;
  } else {
    uint16_t* out = static_cast<uint16_t*>(a.out) + at;
    for (int64_t d = 0; d < a.value_dim; ++d) out[d] = to_bf16(acc[d] * inverse);
  }
}

static void finish(const QkvAttend& a, const Workspace& w, int64_t b, int64_t h) {
  for (int r = 0; r < w.rows; ++r) finish_row(a, b, h, r, w.m[r], w.l[r], w.bad[r], w.acc + r * w.value_stride);
}

static void save(const Workspace& w, float* at) {
  const size_t rows = w.rows * sizeof(float);
  std::memcpy(at, w.m, rows);
  std::memcpy(at + w.rows, w.l, rows);
  std::memcpy(at + 2 * w.rows, w.bad, rows);
  std::memcpy(at + 3 * w.rows, w.acc, rows * w.value_stride);
}

// Merges the partial results that n threads made of one batch row and kv head: `first`, and n - 1 from `rest` on, `step`
// floats apart.
static void merge(const QkvAttend& a, int64_t b, int64_t h, float* first, float* rest, int64_t step, int n) {
  const int rows = Workspace::rows_of(a), stride = round_up(a.value_dim, 16);
  for (int r = 0; r < rows; ++r) {
    const Partial whole(first, rows);
    float m = whole.m[r];
    for (int k = 1; k < n; ++k) m = most(m, Partial(rest + (k - 1) * step, rows).m[r]);
    float l = 0, bad = 0;
    float* acc = whole.acc + static_cast<int64_t>(r) * stride;
    for (int k = 0; k < n; ++k) {
      const Partial p(k == 0 ? first : rest + (k - 1) * step, rows);
      bad += p.bad[r];
      const float f = p.m[r] == kMinusInf ? 0.0f : exp2_of(p.m[r] - m);
      const float* from = p.acc + static_cast<int64_t>(r) * stride;
      l += p.l[r] * f;
      for (int d = 0; d < stride; ++d) acc[d] = k == 0 ? from[d] * f : acc[d] + from[d] * f;
    }
    finish_row(a, b, h, r, m, l, bad, acc);
  }
}

// Begins to fetch the scales and offsets of n tokens from `offset` on.
static void fetch_scales(const QkvPlane& plane, int64_t dim, int64_t b, int64_t h, int64_t offset, int64_t n) {
  if (!is_packed(plane.format) || plane.scale_kind == QKV_SCALE_HEAD) return;
  int64_t at = scale_start(plane, b, h), count = n, runs = 1;
  if (plane.scale_kind == QKV_SCALE_CHANNEL) {
    at += offset / plane.group * plane.group_stride;
    count = (n + plane.group - 1) / plane.group * plane.group_stride;
  } else {
    at += offset;
    if (plane.scale_kind == QKV_SCALE_GROUP) runs = (dim + plane.group - 1) / plane.group;
  }
  const int64_t width = plane.scale_type == QKV_BF16_SCALE ? 2 : 1;
  const int64_t offset_width = plane.offset_type == QKV_OFFSET_BF16 ? 2 : 1;
  for (int64_t r = 0; r < runs; ++r, at += plane.group_stride) {
    const char* scale = static_cast<const char*>(plane.scale) + at * width;
    for (int64_t k = 0; k < count * width; k += 64) prefetch(scale + k);
    if (!plane.offset) continue;
    const char* shift = static_cast<const char*>(plane.offset) + at * offset_width;
    for (int64_t k = 0; k < count * offset_width; k += 64) prefetch(shift + k);
  }
}

// Begins to fetch the scales of block j of one head of all batch rows; returns where its keys are.
static const uint8_t* fetch_block(const QkvAttend& a, const QkvRegion& region, int64_t head, int64_t j) {
  const int64_t b = head / a.kv_heads, h = head % a.kv_heads, from = first_token(region) + j * kBlock;
  const int64_t n = least<int64_t>(kBlock, region.skip + region.length - from);
  fetch_scales(region.key, a.key_dim, b, h, from, n);
  fetch_scales(region.value, a.value_dim, b, h, from, n);
  return key_block(a, region.key, plane_codes(region.key, b, h), from);
}

// Heads that are worked on together: `heads` of those of all batch rows, in the order of memory.
struct Band {
  int64_t first, heads;
};

// Units first..last-1 of a band: blocks, region by region, within a region head by head, as they lie in memory. Whoever
// reads a segment from end to end reads faster than who goes from segment to segment for every head.
static void run(const QkvAttend& a, Workspace& w, const Band& band, int64_t first, int64_t last, int64_t kv_len) {
  for (int64_t k = 0; k < band.heads; ++k) {
    w.turn_to(k);
    begin(a, w, (band.first + k) / a.kv_heads, (band.first + k) % a.kv_heads);
  }
  int64_t index = 0, column = 0;
  for (int64_t k = 0; k < a.n_regions && index < last; ++k) {
    const QkvRegion& region = a.regions[k];
    const int64_t blocks = block_count(region), units = band.heads * blocks;
    const int64_t to = least(last - index, units);
    for (int64_t u = most<int64_t>(0, first - index); u < to; ++u) {
      const int64_t head = band.first + u / blocks, b = head / a.kv_heads, h = head % a.kv_heads, j = u % blocks;
      w.turn_to(u / blocks);
      const uint8_t* ahead = plane_codes(region.key, b, h);
      if (u + 1 < units) ahead = fetch_block(a, region, band.first + (u + 1) / blocks, (u + 1) % blocks);
      else if (k + 1 < a.n_regions) ahead = fetch_block(a, a.regions[k + 1], band.first, 0);
      block(a, w, region, b, h, block_span(region, j, column, kv_len), ahead);
    }
    index += units;
    column += region.length;
  }
  if (!w.value_plane) return;
  for (int64_t k = 0; k < band.heads; ++k) {
    w.turn_to(k);
    for (int r = 0; r < w.rows; ++r) {
      float* turned = w.turned + r * w.value_stride;
      restore_row(*w.value_plane, (band.first + k) % a.kv_heads, turned, static_cast<int>(a.value_dim));
      add_row(w.acc + r * w.value_stride, turned, w.value_stride, 1.0f, 0.0f);
    }
  }
}

static int attend(const QkvAttend& a) {
  int64_t blocks = 0, kv_len = 0;
  for (int64_t k = 0; k < a.n_regions; ++k) {
    blocks += block_count(a.regions[k]);
    kv_len += a.regions[k].length;
  }
  const int64_t heads = a.batch * a.kv_heads;
  if (heads == 0) return 0;
  // As many heads at a time as leave room in the second-level cache for what they read.
  const int64_t fit = most<int64_t>(1, kBandFloats / Workspace::head_floats(a));
  const int64_t bands = (heads + fit - 1) / fit, in_band = (heads + bands - 1) / bands;
  const auto finish_band = [&](Workspace& w, const Band& band) {
    for (int64_t k = 0; k < band.heads; ++k) {
      w.turn_to(k);
      finish(a, w, (band.first + k) / a.kv_heads, (band.first + k) % a.kv_heads);
    }
  };
  if (blocks == 0) {
    Workspace w(a, in_band);
    for (int64_t first = 0; first < heads; first += in_band) {
      const Band band{first, least(in_band, heads - first)};
      run(a, w, band, 0, 0, 0);
      finish_band(w, band);
    }
    return 0;
  }
  // All blocks of all bands in one line, cut into equal parts: balanced whatever the batch is. A band that is cut gets
  // partial results, at most two in a part: of its first and its last band.
  const int64_t total = heads * blocks;
  const int64_t work = heads * kv_len * (a.key_dim + a.value_dim);
  const int64_t worth = 1 + work / 32768;  // below this a second thread costs more than it brings
  const int parts = static_cast<int>(most<int64_t>(1, least(least<int64_t>(a.threads, worth), total)));
  const int64_t step = Partial::floats(Workspace::rows_of(a), round_up(a.value_dim, 16)), slot = in_band * step;
  static thread_local Buffer<float> memory;  // kept between calls: a step allocates nothing once warm
  float* const partials = memory.at_least(2 * parts * slot);
#pragma omp parallel num_threads(parts) if (parts > 1)
  {
#ifdef _OPENMP
    const int id = omp_get_thread_num(), count = omp_get_num_threads();
#else
    const int id = 0, count = 1;
#endif
    const Subnormals kept;
    Workspace w(a, in_band);
    // A runtime may give fewer threads than asked for: every part is done by somebody.
    for (int part = id; part < parts; part += count) {
      const int64_t end = total * (part + 1) / parts;
      for (int64_t unit = total * part / parts; unit < end;) {
        const int64_t begun = unit / blocks / in_band * in_band;
        const Band band{begun, least(in_band, heads - begun)};
        const int64_t from = unit - begun * blocks, to = least(band.heads * blocks, end - begun * blocks);
        run(a, w, band, from, to, kv_len);
        unit += to - from;
        if (from == 0 && to == band.heads * blocks) {
          finish_band(w, band);
          continue;
        }
        float* at = partials + (2 * part + (from == 0 ? 1 : 0)) * slot;
        for (int64_t k = 0; k < band.heads; ++k, at += step) {
          w.turn_to(k);
          save(w, at);
        }
      }
    }
  }
  // A band that is cut begins in slot 1 of a part (it is that part's last) and goes on in slot 0 of the parts behind it.
  for (int part = 0; part + 1 < parts; ++part) {
    const int64_t cut = total * (part + 1) / parts;  // the unit at which this part ends
    const int64_t begun = cut / blocks / in_band * in_band;
    const Band band{begun, least(in_band, heads - begun)};
    if (cut == begun * blocks || total * part / parts > begun * blocks) continue;  // not cut, or begun earlier
    int n = 1;
    while (part + n < parts && total * (part + n) / parts < (begun + band.heads) * blocks) ++n;
    for (int64_t k = 0; k < band.heads; ++k)
      merge(a, (begun + k) / a.kv_heads, (begun + k) % a.kv_heads, partials + (2 * part + 1) * slot + k * step,
            partials + 2 * (part + 1) * slot + k * step, 2 * slot, n);
  }
  return 0;
}
