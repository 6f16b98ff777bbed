// y = A(x) w^T with integer dot products, for 4- and 8-bit codes. Written once; F, I, and the code verbs W4,
// W8 and W4Stream come from isa/<name>.simd.h. Per output, whatever the tile, the tier or the thread:
//   d = sum over the group of code * a - zero * sum(a)             exact, int32
//   acc = fma(float(d), scale [* scale of the x group], acc)       groups in order of k
//   y = acc [* scale of the x row] [+ bias]

// MB rows of x against P panels of w. `fits`: code * 127 * group < 2^24, so that float arithmetic on d is
// exact too. Never inlined: gcc then shares its registers with the loops around it (0.8 of the speed, AVX2).
template <class W, int MB, int P, bool kPerGroup>
__attribute__((noinline)) static void int_tile(const LinearArgs& a, int64_t first_row, int64_t panel,
                                               bool fits) {
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
          const F d = fits ? fnma(to_float(splat_i(sum)), tail.zero_f[v], to_float(dot))
                           : to_float(mul_sub(dot, splat_i(sum), tail.zero[v]));
          const F s = kPerGroup ? mul(tail.scale[v], splat(x_scale[g * MB + m])) : tail.scale[v];
          float* t = total[m] + p * kPanel + v * kLanes;
          store(t, fma(d, s, load(t)));
        }
      }
    }
  }

  for (int p = 0; p < P; ++p)
    finish_rows(a, first_row, MB, panel + p, total[0] + p * kPanel, P * kPanel,
                kPerGroup ? nullptr : x_scale);
}

// One block of rows against panels [begin, end), widest tile that fits the registers first.
template <class W, int MB, bool kPerGroup>
static void int_rows(const LinearArgs& a, int64_t first_row, int64_t begin, int64_t end, bool fits) {
  by_panels<int_panels<MB>()>(begin, end, [&](auto p, int64_t panel) {
    int_tile<W, MB, decltype(p)::value, kPerGroup>(a, first_row, panel, fits);
  });
}

// Many rows and 4-bit codes: a group of P panels becomes bytes once for all of them, kChunk columns at a
// time, and the totals of every row wait in memory between groups.
//
//   bytes   [kChunk / 4][P][64]     8 KB a panel pair, stays in L1: lines as of 8-bit codes
//   total   [rows][P * 16] float    dots: the same as int32, where a group is longer than kChunk
//   per row block: load nothing, kChunk / 4 lines of dot products, add to totals
constexpr int64_t kChunk = 256;

template <class W, int P>
static inline void to_bytes(const uint8_t* w, int64_t panel_bytes, int64_t columns, uint8_t* bytes) {
  for (int64_t k = 0; k < columns; k += 8, w += 64, bytes += 2 * P * 64)
    for (int p = 0; p < P; ++p) {
      if constexpr (kPrefetch > 0) __builtin_prefetch(w + p * panel_bytes + kPrefetch);
      for (int v = 0; v < kVecs; ++v) {
        const typename W::Line line = W::load(w + p * panel_bytes + v * kLanes * 4);
        for (int h = 0; h < 2; ++h) store_i(bytes + (h * P + p) * 64 + v * kLanes * 4, line.half[h]);
      }
    }
}

struct Group {
  bool starts, ends;  // this chunk begins, ends it
  int64_t columns;    // of the chunk
};
// kPlain: the chunk is a whole group whose d fits a float, as nearly always.
template <class B, int MB, int P, bool kPerGroup, bool kPlain>
static inline void int_steps(const Group& g, const int8_t* x, const uint8_t* bytes, const Tail* tail,
                             const int32_t* sums, const float* x_scale, int32_t* dots, float* total) {
  typename B::Acc acc[MB][P][kVecs];
  for (int m = 0; m < MB; ++m)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v) acc[m][p][v] = B::zero();
  for (int64_t k = 0; k < g.columns; k += kStep) {
#pragma GCC unroll 8
    for (int l = 0; l < B::kLines; ++l, bytes += P * 64, x += MB * 4) {
      typename B::Line code[P][kVecs];
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) code[p][v] = B::load(bytes + p * 64 + v * kLanes * 4);
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) {
        const typename B::Act broadcast = B::act(x + m * 4);
        for (int p = 0; p < P; ++p)
          for (int v = 0; v < kVecs; ++v) B::dot(acc[m][p][v], code[p][v], 0, broadcast, l);
      }
    }
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) B::fold(acc[m][p][v]);
  }
#pragma GCC unroll 8
  for (int m = 0; m < MB; ++m) {
    const F sum = to_float(splat_i(sums[m]));
#pragma GCC unroll 4
    for (int p = 0; p < P; ++p)
#pragma GCC unroll 2
      for (int v = 0; v < kVecs; ++v) {
        const int at = (m * P + p) * kPanel + v * kLanes;
        I dot = B::total(acc[m][p][v]);
        F d;
        if constexpr (kPlain) {
          d = fnma(sum, tail[p].zero_f[v], to_float(dot));
        } else {
          if (!g.starts) dot = add_i(dot, load_i(dots + at));
          if (!g.ends) {
            store_i(dots + at, dot);
            continue;
          }
          d = to_float(mul_sub(dot, splat_i(sums[m]), tail[p].zero[v]));
        }
        const F s = kPerGroup ? mul(tail[p].scale[v], splat(x_scale[m])) : tail[p].scale[v];
        store(total + at, fma(d, s, load(total + at)));
      }
  }
}

template <class W, class B, int P, bool kPerGroup>
static void int_many(const LinearArgs& a, int64_t first, int64_t rows, int64_t panel, bool fits) {
  constexpr int64_t kRow = P * kPanel;
  const Rows& r = *a.rows;
  const int64_t width = r.groups * r.padded, panel_bytes = r.groups * a.group_bytes;
  const uint8_t* w = a.weight + panel * panel_bytes;
  alignas(64) uint8_t bytes[kChunk * kRow];
  alignas(64) float total[kSharedRows * kRow];
  alignas(64) int32_t dots[kSharedRows * kRow];
  const bool plain = fits && r.padded <= kChunk;
  for (int64_t i = 0; i < rows * kRow; i += kLanes) store(total + i, splat(0.f));
  for (int64_t g = 0; g < r.groups; ++g, w += a.group_bytes) {
    Tail tail[P];
    for (int p = 0; p < P; ++p)
      tail[p] = load_tail(w + r.padded * kPanel / 2 + p * panel_bytes, a.wide_scales);
    for (int64_t from = 0; from < r.padded; from += kChunk) {
      const int64_t left = r.padded - from, columns = left < kChunk ? left : kChunk;
      const Group group = {from == 0, columns == left, columns};
      to_bytes<W, P>(w + from * kPanel / 2, panel_bytes, columns, bytes);
      for (int64_t row = 0; row < rows; row += kRowBlock) {
        const int64_t mb = rows - row < kRowBlock ? rows - row : kRowBlock, of_block = first + row;
        const int8_t* x = r.codes + of_block * width + (g * r.padded + from) * mb;
        const int32_t* sums = r.sums + of_block * r.groups + g * mb;
        const float* x_scale = kPerGroup ? r.scales + of_block * r.groups + g * mb : nullptr;
        with_number<kRowBlock>(mb, [&](auto n) {
          constexpr int MB = decltype(n)::value;
          (plain ? int_steps<B, MB, P, kPerGroup, true>
                 : int_steps<B, MB, P, kPerGroup, false>)(group, x, bytes, tail, sums, x_scale,
                                                          dots + row * kRow, total + row * kRow);
        });
      }
    }
  }
  for (int p = 0; p < P; ++p)
    finish_rows(a, first, rows, panel + p, total + p * kPanel, kRow, kPerGroup ? nullptr : r.scales + first);
}

template <class W, class B, bool kPerGroup>
static void int_many_rows(const LinearArgs& a, int64_t begin, int64_t end, bool fits) {
  const int64_t m = a.rows->m, step = rows_at_once(a.rows->groups * a.rows->padded);
  for (int64_t row = 0; row < m; row += step) {
    const int64_t rows = m - row < step ? m - row : step;
    by_panels<int_panels<kRowBlock>()>(begin, end, [&](auto p, int64_t panel) {
      int_many<W, B, decltype(p)::value, kPerGroup>(a, row, rows, panel, fits);
    });
  }
}

// `Bytes`: the verbs of 4-bit codes that stand a byte each, or W itself where nothing is to be unpacked.
template <class W, class Stream, class Bytes>
static void linear_int(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  const bool fits = W::kMaxCode * 127 * r.group < (1 << 24);
  if constexpr (!__is_same(W, Bytes) && kBytesFrom != kNever)
    if (r.m >= kBytesFrom) {
      if (r.granularity == Granularity::kGroup)
        int_many_rows<W, Bytes, true>(a, panel_begin, panel_end, fits);
      else
        int_many_rows<W, Bytes, false>(a, panel_begin, panel_end, fits);
      return;
    }
  for (int64_t strip = panel_begin; strip < panel_end; strip += kStripPanels) {
    const int64_t end = strip + kStripPanels < panel_end ? strip + kStripPanels : panel_end;
    for (int64_t row = 0; row < r.m; row += kRowBlock) {
      with_number<kRowBlock>(r.m - row < kRowBlock ? r.m - row : kRowBlock, [&](auto n) {
        constexpr int MB = decltype(n)::value;
        using Codes = std::conditional_t<MB == 1, Stream, W>;
        if (r.granularity == Granularity::kGroup)
          int_rows<Codes, MB, true>(a, row, strip, end, fits);
        else
          int_rows<Codes, MB, false>(a, row, strip, end, fits);
      });
    }
  }
}
