// y = A(x) w^T with integer dot products, for 4- and 8-bit codes. Written once; F, I, and the code verbs W4,
// W8 and W4Stream come from isa/<name>.simd.h. Per output, whatever the tile, the tier or the thread:
//   d = sum over the group of code * a - zero * sum(a)             exact, int32
//   acc = fma(float(d), scale [* scale of the x group], acc)       groups in order of k
//   y = acc [* scale of the x row] [+ bias]

// MB rows of x against P panels of w. `fits`: code * 127 * group < 2^24, so that float arithmetic on d is
// exact too.
template <class W, int MB, int P, bool kPerGroup>
static inline void int_tile(const LinearArgs& a, int64_t first_row, int64_t panel, bool fits) {
  const Rows& r = *a.rows;
  const int8_t* x = r.codes + first_row * r.groups * r.padded;
  const int32_t* sums = r.sums + first_row * r.groups;
  const float* x_scale = kPerGroup ? r.scales + first_row * r.groups : r.scales + first_row;
  const int64_t panel_bytes = r.groups * a.group_bytes;
  const uint8_t* w = a.weight + panel * panel_bytes;
  alignas(64) float total[MB][P * kPanel];
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < P * kVecs; ++v) store(total[m] + v * kLanes, splat(0.f));

  for (int64_t g = 0; g < r.groups; ++g, w += a.group_bytes) {
    typename W::Acc acc[MB][P][kVecs];
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) acc[m][p][v] = W::zero();
    const uint8_t* line = w;
    for (int64_t k = 0; k < r.padded; k += kStep) {
#pragma GCC unroll 8
      for (int l = 0; l < W::kLines; ++l, line += 64, x += MB * W::kDwords * 4) {
        if constexpr (MB <= 4 && kPrefetch > 0)
          for (int p = 0; p < P; ++p) __builtin_prefetch(line + p * panel_bytes + kPrefetch);
        typename W::Line code[P][kVecs];
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kVecs; ++v) code[p][v] = W::load(line + p * panel_bytes + v * kLanes * 4);
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m)
#pragma GCC unroll 2
          for (int h = 0; h < W::kDwords; ++h) {
            const typename W::Act broadcast = W::act(x + (h * MB + m) * 4);
            for (int p = 0; p < P; ++p)
              for (int v = 0; v < kVecs; ++v) W::dot(acc[m][p][v], code[p][v], h, broadcast, l);
          }
      }
      for (int m = 0; m < MB; ++m)
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kVecs; ++v) W::fold(acc[m][p][v]);
    }
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p) {
      const Tail tail = load_tail(line + p * panel_bytes, a.wide_scales);
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) {
        const int32_t sum = sums[g * MB + m];
        for (int v = 0; v < kVecs; ++v) {
          const I dot = W::total(acc[m][p][v]);
          const F d = fits ? fnma(splat(static_cast<float>(sum)), tail.zero_f[v], to_float(dot))
                           : to_float(mul_sub(dot, splat_i(sum), tail.zero[v]));
          const F s = kPerGroup ? mul(tail.scale[v], splat(x_scale[g * MB + m])) : tail.scale[v];
          float* t = total[m] + p * kPanel + v * kLanes;
          store(t, fma(d, s, load(t)));
        }
      }
    }
  }

  for (int m = 0; m < MB; ++m)
    for (int p = 0; p < P; ++p) {
      if (!kPerGroup)
        for (int v = 0; v < kVecs; ++v) {
          float* t = total[m] + p * kPanel + v * kLanes;
          if (!a.bias) store(t, mul(load(t), splat(x_scale[m])));
        }
      finish_row(a, first_row + m, panel + p, total[m] + p * kPanel, kPerGroup ? 1.f : x_scale[m]);
    }
}

// One block of rows against panels [begin, end), widest tile that fits the registers first.
template <class W, int MB, bool kPerGroup>
static void int_rows(const LinearArgs& a, int64_t first_row, int64_t begin, int64_t end, bool fits) {
  constexpr int P = int_panels<MB>();
  for (; begin + P <= end; begin += P) int_tile<W, MB, P, kPerGroup>(a, first_row, begin, fits);
  if constexpr (P > 1)
    for (; begin < end; ++begin) int_tile<W, MB, 1, kPerGroup>(a, first_row, begin, fits);
}

template <class W, class Stream>
static void linear_int(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  const bool fits = W::kMaxCode * 127 * r.group < (1 << 24);
  for (int64_t strip = panel_begin; strip < panel_end; strip += kStripPanels) {
    const int64_t end = strip + kStripPanels < panel_end ? strip + kStripPanels : panel_end;
    for (int64_t row = 0; row < r.m; row += kRowBlock) {
      const int mb = static_cast<int>(r.m - row < kRowBlock ? r.m - row : kRowBlock);
      const bool per_group = r.granularity == Granularity::kGroup;
#define LOWBIT_ROWS(MB, CODES)                                \
  case MB:                                                    \
    if constexpr (MB <= kRowBlock) {                          \
      if (per_group)                                          \
        int_rows<CODES, MB, true>(a, row, strip, end, fits);  \
      else                                                    \
        int_rows<CODES, MB, false>(a, row, strip, end, fits); \
    }                                                         \
    break
      switch (mb) {
        LOWBIT_ROWS(1, Stream);
        LOWBIT_ROWS(2, W);
        LOWBIT_ROWS(3, W);
        LOWBIT_ROWS(4, W);
        LOWBIT_ROWS(5, W);
        LOWBIT_ROWS(6, W);
        LOWBIT_ROWS(7, W);
        LOWBIT_ROWS(8, W);
      }
#undef LOWBIT_ROWS
    }
  }
}
