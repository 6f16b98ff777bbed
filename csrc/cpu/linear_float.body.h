// y = x w^T with float32 arithmetic: for 4- and 8-bit codes whose activations are not quantized, and for
// float16 weights. Each output is one fma chain over k within its group, in order, whatever the tile:
//   part = fma(x, float(code - zero), part);  total = fma(part, scale, total)   (float16 weights: one group,
//   scale 1)

template <class W, int MB, int P>
static inline void float_tile(const LinearArgs& a, int64_t first_row, int64_t panel) {
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
  for (int m = 0; m < MB; ++m)
    for (int p = 0; p < P; ++p) finish_row(a, first_row + m, panel + p, total[m] + p * kPanel, 1.f);
}

template <class W, int MB>
static void float_rows(const LinearArgs& a, int64_t first_row, int64_t begin, int64_t end) {
  constexpr int P = float_panels<MB>();
  for (; begin + P <= end; begin += P) float_tile<W, MB, P>(a, first_row, begin);
  if constexpr (P > 1)
    for (; begin < end; ++begin) float_tile<W, MB, 1>(a, first_row, begin);
}

template <class W>
static void linear_float(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  for (int64_t strip = panel_begin; strip < panel_end; strip += kStripPanels) {
    const int64_t end = strip + kStripPanels < panel_end ? strip + kStripPanels : panel_end;
    for (int64_t row = 0; row < r.m; row += kRowBlock) {
      const int mb = static_cast<int>(r.m - row < kRowBlock ? r.m - row : kRowBlock);
#define LOWBIT_ROWS(MB)                                                   \
  case MB:                                                                \
    if constexpr (MB <= kRowBlock) float_rows<W, MB>(a, row, strip, end); \
    break
      switch (mb) {
        LOWBIT_ROWS(1);
        LOWBIT_ROWS(2);
        LOWBIT_ROWS(3);
        LOWBIT_ROWS(4);
        LOWBIT_ROWS(5);
        LOWBIT_ROWS(6);
        LOWBIT_ROWS(7);
        LOWBIT_ROWS(8);
      }
#undef LOWBIT_ROWS
    }
  }
}

static void linear_w4(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kNone)
    linear_float<FloatW4>(a, panel_begin, panel_end);
  else
    linear_int<W4, W4Stream>(a, panel_begin, panel_end);
}
static void linear_w8(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kNone)
    linear_float<FloatW8>(a, panel_begin, panel_end);
  else
    linear_int<W8, W8>(a, panel_begin, panel_end);
}
static void linear_f16(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  linear_float<FloatF16>(a, panel_begin, panel_end);
}
