// What stands between the linears of a decoder, in float32: RMSNorm, rotation, cache, attention, SiLU. No
// intrinsics here: F, I, kLanes and the verbs come from isa/<name>.simd.h. All sums go through 16 lanes and
// one fixed tree, so every tier gives the same bits, and a row of many gives the same bits as that row alone.

// exp for |x| <= 88 in nine fused steps: e^x = 2^n e^r, the series of e^r to r^7 (5e-9 relative). Below -88
// it is 0.
static inline F exp_f(F x) {
  x = max_f(splat(-88.f), x);  // this order keeps NaN
  const I n = to_int(mul(x, splat(1.44269504f)));
  const F whole = to_float(n);
  F r = fma(whole, splat(-0.693147182f), x);
  r = fma(whole, splat(1.90465430e-9f), r);
  F y = splat(1.f / 5040);
  y = fma(y, r, splat(1.f / 720));
  y = fma(y, r, splat(1.f / 120));
  y = fma(y, r, splat(1.f / 24));
  y = fma(y, r, splat(1.f / 6));
  y = fma(y, r, splat(0.5f));
  y = fma(y, r, splat(1.f));
  y = fma(y, r, splat(1.f));
  return mul(y, power_of_two(n));
}
static inline float exp_one(float x) {
  alignas(64) float lanes[kLanes];
  store(lanes, exp_f(splat(x)));
  return lanes[0];
}

static inline float sum16(const F* s) {
  alignas(64) float t[kPanel];
  for (int v = 0; v < kVecs; ++v) store(t + v * kLanes, s[v]);
  for (int w = kPanel / 2; w; w /= 2)
    for (int i = 0; i < w; ++i) t[i] += t[i + w];
  return t[0];
}
static inline float max16(const F* s) {
  alignas(64) float t[kPanel];
  for (int v = 0; v < kVecs; ++v) store(t + v * kLanes, s[v]);
  float top = t[0];
  for (int i = 1; i < kPanel; ++i) top = t[i] > top ? t[i] : top;
  return top;
}

static inline float inverse_rms(const float* x, int64_t n, float eps) {
  F s[kVecs];
  for (F& f : s) f = splat(0.f);
  for (int64_t j = 0; j < n; j += kPanel)
    for (int v = 0; v < kVecs; ++v) {
      const F f = load(x + j + v * kLanes);
      s[v] = fma(f, f, s[v]);
    }
  return 1.f / __builtin_sqrtf(sum16(s) / static_cast<float>(n) + eps);
}
static inline void scale_row(const float* x, int64_t n, float by, const float* weight, float* y) {
  for (int64_t j = 0; j < n; j += kLanes) store(y + j, mul(mul(load(x + j), splat(by)), load(weight + j)));
}

static void add_norm(const NormArgs& a, int64_t row_begin, int64_t row_end) {
  for (int64_t m = row_begin; m < row_end; ++m) {
    float* x = a.x + m * a.n;
    if (a.add)
      for (int64_t j = 0; j < a.n; j += kLanes) store(x + j, add_f(load(x + j), load(a.add + m * a.n + j)));
    scale_row(x, a.n, inverse_rms(x, a.n, a.eps), a.weight, a.y + m * a.n);
  }
}

// gate = gate / (1 + exp(-gate)) * up
static void silu_mul(float* gate, const float* up, int64_t rows, int64_t stride, int64_t columns) {
  for (int64_t m = 0; m < rows; ++m, gate += stride, up += stride)
    for (int64_t j = 0; j < columns; j += kLanes) {
      const F g = load(gate + j), e = exp_f(mul(max_f(splat(-88.f), g), splat(-1.f)));  // at most e^88
      store(gate + j, mul(div_f(g, add_f(splat(1.f), e)), load(up + j)));
    }
}

// One head: RMSNorm where `weight` is given, then pairs (i, i + d / 2) turned by the angles of a position.
static inline void turn(float* x, int64_t d, const float* weight, float eps, const float* c, const float* s) {
  if (weight) scale_row(x, d, inverse_rms(x, d, eps), weight, x);
  const int64_t h = d / 2;
  int64_t j = 0;
  for (; j + kLanes <= h; j += kLanes) {
    const F a = load(x + j), b = load(x + h + j), cosine = load(c + j), sine = load(s + j);
    store(x + j, fma(b, mul(sine, splat(-1.f)), mul(a, cosine)));
    store(x + h + j, fma(a, sine, mul(b, cosine)));
  }
  for (; j < h; ++j) {
    const float a = x[j], b = x[h + j];
    x[j] = __builtin_fmaf(b, -s[j], a * c[j]);
    x[h + j] = __builtin_fmaf(a, s[j], b * c[j]);
  }
}

// Keys and values of rows [begin, end) of x into the cache.
static void append_rows(const AttentionArgs& a, int64_t row_begin, int64_t row_end) {
  const int64_t d = a.head_dim;
  const Dtype dtype = a.half ? Dtype::kFloat16 : Dtype::kFloat32;
  const int64_t item = a.half ? 2 : 4, row = a.row ? a.row : a.kv_heads * d;
  for (int64_t m = row_begin; m < row_end; ++m) {
    const int64_t t = a.position + m;
    for (int64_t h = 0; h < a.kv_heads; ++h) {
      float* k = a.k + m * row + h * d;
      const float* v = a.v + m * row + h * d;
      turn(k, d, a.k_norm, a.eps, a.cosines + t * (d / 2), a.sines + t * (d / 2));
      char* keys = static_cast<char*>(a.keys) + (h * a.capacity + t / kPanel * kPanel) * d * item;
      for (int64_t j = 0; j < d; ++j) store_one(keys, dtype, j * kPanel + t % kPanel, k[j]);
      char* values = static_cast<char*>(a.values) + (h * a.capacity + t) * d * item;
      for (int64_t j = 0; j < d; j += kPanel) store_row16(values + j * item, dtype, v + j);
    }
  }
}

static inline F load_cached(const float* p) { return load(p); }
static inline F load_cached(const uint16_t* p) { return load_half(p); }

// out [R rows, P * 16] = a [R rows, depth] b, where b is P panels of 16 columns; one chain over depth an
// output.
template <int R, int P, class T>
static inline void tile(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t panel_stride,
                        int64_t depth, float* out, int64_t out_stride) {
  F acc[R][P][kVecs];
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v) acc[r][p][v] = splat(0.f);
  for (int64_t k = 0; k < depth; ++k, b += b_stride) {
    F w[P][kVecs];
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v) w[p][v] = load_cached(b + p * panel_stride + v * kLanes);
#pragma GCC unroll 8
    for (int r = 0; r < R; ++r) {
      const F x = splat(a[r * a_stride + k]);
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) acc[r][p][v] = fma(x, w[p][v], acc[r][p][v]);
    }
  }
  for (int r = 0; r < R; ++r)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v) store(out + r * out_stride + p * kPanel + v * kLanes, acc[r][p][v]);
}
// Panels at once: enough chains to hide the latency of fma, few enough for the registers.
template <int R>
constexpr int chain_panels() {
  if (kVecs == 1) return R == 1 ? 8 : R <= 3 ? 4 : 2;
  if (kVecs == 2) return R == 1 ? 4 : R == 2 ? 2 : 1;
  return kVecs == 4 && R == 1 ? 2 : 1;
}
template <int R, class T>
static inline void tiles(const float* a, int64_t a_stride, const T* b, int64_t b_stride, int64_t panel_stride,
                         int64_t panels, int64_t depth, float* out, int64_t out_stride) {
  constexpr int P = chain_panels<R>();
  int64_t p = 0;
  for (; p + P <= panels; p += P)
    tile<R, P, T>(a, a_stride, b + p * panel_stride, b_stride, panel_stride, depth, out + p * kPanel,
                  out_stride);
  if constexpr (P > 1)
    for (; p < panels; ++p)
      tile<R, 1, T>(a, a_stride, b + p * panel_stride, b_stride, panel_stride, depth, out + p * kPanel,
                    out_stride);
}
constexpr int kAttentionRows = kLanes == 1 ? 1 : kLanes == 4 ? 4 : kLanes == 8 ? 6 : 8;
template <class T>
static inline void product(int64_t rows, const float* a, int64_t a_stride, const T* b, int64_t b_stride,
                           int64_t panel_stride, int64_t panels, int64_t depth, float* out,
                           int64_t out_stride) {
  with_number<kAttentionRows>(rows, [&](auto n) {
    tiles<decltype(n)::value, T>(a, a_stride, b, b_stride, panel_stride, panels, depth, out, out_stride);
  });
}

// scores [valid] -> exp(scores - max), zeros up to `width`; the maximum and the sum. Nothing valid: -inf and
// 0.
static inline float soften(float* s, int64_t valid, int64_t width, float& total) {
  const float lowest = -__builtin_inff();
  const int64_t whole = round_up(valid, kPanel);
  for (int64_t j = valid; j < whole; ++j) s[j] = lowest;
  F top[kVecs], sum[kVecs];
  for (int v = 0; v < kVecs; ++v) top[v] = splat(lowest), sum[v] = splat(0.f);
  for (int64_t j = 0; j < whole; j += kPanel)
    for (int v = 0; v < kVecs; ++v) top[v] = max_f(top[v], load(s + j + v * kLanes));
  const float most = max16(top);
  for (int64_t j = 0; j < whole; j += kPanel)
    for (int v = 0; v < kVecs; ++v) {
      const F e = exp_f(add_f(load(s + j + v * kLanes), splat(-most)));
      store(s + j + v * kLanes, e);
      sum[v] = add_f(sum[v], e);
    }
  for (int64_t j = whole; j < width; ++j) s[j] = 0.f;
  total = sum16(sum);
  return most;
}

// One key/value head (or some of the query heads that share it) against kTileRows rows of x. Rows stand in
// the scratch as [row of x, query head], so that what they may see grows along them.
template <class T>
static void attend_item(const AttentionArgs& a, int64_t head, int64_t first, float* scratch) {
  const int64_t d = a.head_dim, share = a.heads_per_item,
                last = first + kTileRows < a.m ? first + kTileRows : a.m;
  const int64_t rows = (last - first) * share, kv = head / (a.heads / a.kv_heads);
  const int64_t row_of_q = a.row ? a.row : a.heads * d;
  float* q = scratch;
  float* scores = q + rows * d;
  float* part = scores + rows * kSegment;
  float* most = part + rows * d;
  float* total = most + rows;
  const T* keys = static_cast<const T*>(a.keys) + kv * a.capacity * d;
  const T* values = static_cast<const T*>(a.values) + kv * a.capacity * d;
  for (int64_t i = 0; i < rows; ++i) {
    const int64_t m = first + i / share, t = a.position + m;
    const float* from = a.q + m * row_of_q + (head + i % share) * d;
    __builtin_memcpy(q + i * d, from, static_cast<size_t>(d) * sizeof(float));
    turn(q + i * d, d, a.q_norm, a.eps, a.cosines + t * (d / 2), a.sines + t * (d / 2));
    for (int64_t j = 0; j < d; j += kLanes) store(q + i * d + j, mul(load(q + i * d + j), splat(a.scale)));
  }
  const int64_t end = a.everyone ? a.m : a.position + last;  // the last row sees positions below this
  for (int64_t begin = 0; begin < end; begin += kSegment) {
    for (int64_t i = 0; i < rows; i += kAttentionRows) {
      const int64_t n = rows - i < kAttentionRows ? rows - i : kAttentionRows;
      const auto seen = [&](int64_t row) {  // of this segment
        const int64_t t = (a.everyone ? a.m : a.position + first + row / share + 1) - begin;
        return t < 0 ? 0 : t < kSegment ? t : kSegment;
      };
      const int64_t depth = seen(i + n - 1);
      if (!depth) continue;
      const int64_t panels = (depth + kPanel - 1) / kPanel;
      product<T>(n, q + i * d, d, keys + begin * d, kPanel, kPanel * d, panels, d, scores + i * kSegment,
                 kSegment);
      float here[kAttentionRows], sum[kAttentionRows];
      for (int64_t r = 0; r < n; ++r)
        here[r] = soften(scores + (i + r) * kSegment, seen(i + r), depth, sum[r]);
      product<T>(n, scores + i * kSegment, kSegment, values + begin * d, d, kPanel, d / kPanel, depth,
                 part + i * d, d);
      for (int64_t r = 0; r < n; ++r) {
        if (!seen(i + r)) continue;
        const int64_t row = i + r;
        float* out = a.out + ((first + row / share) * a.heads + head + row % share) * d;
        const float* p = part + row * d;
        if (begin == 0) {
          most[row] = here[r], total[row] = sum[r];
          __builtin_memcpy(out, p, static_cast<size_t>(d) * sizeof(float));
          continue;
        }
        const float top = here[r] > most[row] ? here[r] : most[row];
        const float old_by = exp_one(most[row] - top), new_by = exp_one(here[r] - top);
        most[row] = top;
        total[row] = __builtin_fmaf(total[row], old_by, sum[r] * new_by);
        for (int64_t j = 0; j < d; j += kLanes)
          store(out + j, fma(load(out + j), splat(old_by), mul(load(p + j), splat(new_by))));
      }
    }
  }
  for (int64_t i = 0; i < rows; ++i) {
    float* out = a.out + ((first + i / share) * a.heads + head + i % share) * d;
    for (int64_t j = 0; j < d; j += kLanes) store(out + j, div_f(load(out + j), splat(total[i])));
  }
}
static void attend(const AttentionArgs& a, int64_t item_begin, int64_t item_end, float* scratch) {
  const int64_t pieces = a.heads / a.heads_per_item, blocks = (a.m + kTileRows - 1) / kTileRows;
  for (int64_t item = item_begin; item < item_end; ++item) {
    // Late rows see more than early ones: taken in turns from both ends, any range of items is a fair share.
    const int64_t turn_of = item / pieces, half = turn_of / 2;
    const int64_t head = item % pieces * a.heads_per_item;
    const int64_t first = (turn_of % 2 ? blocks - 1 - half : half) * kTileRows;
    if (a.half)
      attend_item<uint16_t>(a, head, first, scratch);
    else
      attend_item<float>(a, head, first, scratch);
  }
}
