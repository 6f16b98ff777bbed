// y = x w^T with float32 arithmetic: for 4- and 8-bit codes whose activations are not quantized, and for
// float16 weights. Each output is one fma chain over k within its group, in order, whatever the tile:
//   part = fma(x, float(code - zero), part);  total = fma(part, scale, total)   (float16 weights: one group,
//   scale 1)

template <class W, int MB, int P>
__attribute__((noinline)) static void float_tile(const LinearArgs& a, int64_t first_row, int64_t panel) {
  const Rows& r = *a.rows;
  const float* x = r.floats + first_row * r.groups * r.padded;
  const int64_t panel_bytes = r.groups * a.group_bytes;
  const uint8_t* w = a.weight + panel * panel_bytes;
  alignas(64) float total[MB][P * kPanel];
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < P * kVecs; ++v) store(total[m] + v * kLanes, splat(0.f));

  for (int64_t g = 0; g < r.groups; ++g, w += a.group_bytes) {
    F part[MB][P][kVecs];
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) part[m][p][v] = splat(0.f);
    const uint8_t* codes_end = w + r.padded / W::kColumns * W::kBytes;
    Tail tail[P];
    if (W::kScaled)
      for (int p = 0; p < P; ++p) tail[p] = load_tail(codes_end + p * panel_bytes, a.wide_scales);
    const uint8_t* line = w;
    for (int64_t k = 0; k < r.padded; k += W::kColumns, line += W::kBytes) {
      if constexpr (MB <= 4 && kPrefetch > 0)
        for (int p = 0; p < P; ++p)
          for (int b = 0; b < W::kBytes; b += 64) __builtin_prefetch(line + p * panel_bytes + kPrefetch + b);
#pragma GCC unroll 8
      for (int j = 0; j < W::kColumns; ++j, x += MB) {
        F weight[P][kVecs];
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kVecs; ++v)
            weight[p][v] = W::value(line + p * panel_bytes, v, j, W::kScaled ? tail[p].zero[v] : splat_i(0));
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) {
          const F broadcast = splat(x[m]);
          for (int p = 0; p < P; ++p)
            for (int v = 0; v < kVecs; ++v) part[m][p][v] = fma(broadcast, weight[p][v], part[m][p][v]);
        }
      }
    }
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) {
          float* t = total[m] + p * kPanel + v * kLanes;
          store(t, W::kScaled ? fma(part[m][p][v], tail[p].scale[v], load(t)) : part[m][p][v]);
        }
  }
  for (int p = 0; p < P; ++p)
    finish_rows(a, first_row, MB, panel + p, total[0] + p * kPanel, P * kPanel, nullptr);
}

template <class W, int MB>
static void float_rows(const LinearArgs& a, int64_t first_row, int64_t begin, int64_t end) {
  by_panels<float_panels<MB>()>(
      begin, end, [&](auto p, int64_t panel) { float_tile<W, MB, decltype(p)::value>(a, first_row, panel); });
}

// Many rows: columns of w become floats once for all of them, kBlock at a time, and the chains of every row
// wait in memory between blocks.
//
//   weight  [block, P * 16]   16 KB, stays in L1        part, total  [rows, P * 16] each
//   per row block of kRowBlock rows: load its parts, `block` fma steps, store them
constexpr int64_t kBlock = 128;

template <class W, int P>
static inline void to_floats(const uint8_t* w, int64_t panel_bytes, int64_t from, int64_t to,
                             const Tail* tail, float* out) {
  for (int64_t k = from; k < to; k += W::kColumns)
    for (int p = 0; p < P; ++p) {
      const uint8_t* line = w + p * panel_bytes + k / W::kColumns * W::kBytes;
      if constexpr (kPrefetch > 0)
        for (int b = 0; b < W::kBytes; b += 64) __builtin_prefetch(line + kPrefetch + b);
#pragma GCC unroll 8
      for (int j = 0; j < W::kColumns; ++j)
        for (int v = 0; v < kVecs; ++v)
          store(out + ((k - from + j) * P + p) * kPanel + v * kLanes,
                W::value(line, v, j, W::kScaled ? tail[p].zero[v] : splat_i(0)));
    }
}

template <int MB, int P>
static inline void float_steps(const float* x, const float* weight, int64_t steps, float* part) {
  constexpr int V = P * kVecs;
  F acc[MB][V];
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < V; ++v) acc[m][v] = load(part + (m * V + v) * kLanes);
  for (int64_t k = 0; k < steps; ++k, x += MB, weight += V * kLanes) {
    F w[V];
    for (int v = 0; v < V; ++v) w[v] = load(weight + v * kLanes);
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m) {
      const F broadcast = splat(x[m]);
      for (int v = 0; v < V; ++v) acc[m][v] = fma(broadcast, w[v], acc[m][v]);
    }
  }
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < V; ++v) store(part + (m * V + v) * kLanes, acc[m][v]);
}

template <class W, int P>
static void float_many(const LinearArgs& a, int64_t first, int64_t rows, int64_t panel) {
  constexpr int64_t kRow = P * kPanel;
  const Rows& r = *a.rows;
  const int64_t width = r.groups * r.padded, panel_bytes = r.groups * a.group_bytes;
  const uint8_t* w = a.weight + panel * panel_bytes;
  alignas(64) float weight[kBlock * kRow], part[kSharedRows * kRow], total[kSharedRows * kRow];
  for (int64_t i = 0; i < rows * kRow; i += kLanes) store(total + i, splat(0.f)), store(part + i, splat(0.f));
  for (int64_t g = 0; g < r.groups; ++g, w += a.group_bytes) {
    Tail tail[P];
    if (W::kScaled)
      for (int p = 0; p < P; ++p)
        tail[p] = load_tail(w + r.padded / W::kColumns * W::kBytes + p * panel_bytes, a.wide_scales);
    for (int64_t from = 0; from < r.padded; from += kBlock) {
      const int64_t to = from + kBlock < r.padded ? from + kBlock : r.padded;
      to_floats<W, P>(w, panel_bytes, from, to, tail, weight);
      for (int64_t row = 0; row < rows; row += kRowBlock) {
        const int64_t mb = rows - row < kRowBlock ? rows - row : kRowBlock;
        const float* x = r.floats + (first + row) * width + (g * r.padded + from) * mb;
        with_number<kRowBlock>(
            mb, [&](auto n) { float_steps<decltype(n)::value, P>(x, weight, to - from, part + row * kRow); });
      }
    }
    if (!W::kScaled) break;
    for (int64_t i = 0; i < rows * kRow; i += kRow)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) {
          const int64_t at = i + p * kPanel + v * kLanes;
          store(total + at, fma(load(part + at), tail[p].scale[v], load(total + at)));
          store(part + at, splat(0.f));
        }
  }
  float* done = W::kScaled ? total : part;
  for (int p = 0; p < P; ++p) finish_rows(a, first, rows, panel + p, done + p * kPanel, kRow, nullptr);
}

template <class W>
static void linear_float(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  constexpr int64_t kFrom = W::kScaled ? kFloatsFrom : kHalvesFrom;
  if constexpr (kFrom != kNever)
    if (r.m >= kFrom) {
      const int64_t step = rows_at_once(r.groups * r.padded * 4);
      for (int64_t row = 0; row < r.m; row += step) {
        const int64_t rows = r.m - row < step ? r.m - row : step;
        by_panels<float_panels<kRowBlock>()>(panel_begin, panel_end, [&](auto p, int64_t panel) {
          float_many<W, decltype(p)::value>(a, row, rows, panel);
        });
      }
      return;
    }
  for (int64_t strip = panel_begin; strip < panel_end; strip += kStripPanels) {
    const int64_t end = strip + kStripPanels < panel_end ? strip + kStripPanels : panel_end;
    for (int64_t row = 0; row < r.m; row += kRowBlock)
      with_number<kRowBlock>(r.m - row < kRowBlock ? r.m - row : kRowBlock,
                             [&](auto n) { float_rows<W, decltype(n)::value>(a, row, strip, end); });
  }
}

static void linear_w4(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kNone)
    linear_float<FloatW4>(a, panel_begin, panel_end);
  else
    linear_int<W4, W4Stream, W4Bytes>(a, panel_begin, panel_end);
}
static void linear_w8(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kNone)
    linear_float<FloatW8>(a, panel_begin, panel_end);
  else
    linear_int<W8, W8, W8>(a, panel_begin, panel_end);
}
static void linear_f16(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  linear_float<FloatF16>(a, panel_begin, panel_end);
}
