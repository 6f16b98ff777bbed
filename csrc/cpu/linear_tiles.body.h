// y = A(x) w^T where an instruction multiplies whole tiles: 16 rows of x by the 16 rows of a panel, 64
// columns deep. The verbs on tiles, TileW4 and TileW8 come from isa/amx.simd.h. The arithmetic is that of
// linear_int.body.h:
//   d = sum over the group of code * a - zero * sum(a)             exact, int32
//   acc = fma(float(d), scale [* scale of the x group], acc)       groups in order of k
//   y = acc [* scale of the x row] [+ bias]
//
// Two panels meet a span of rows, one or two groups (a step) at a time. The codes of a step are unpacked
// once, then all rows pass over them, 32 (an item) at a time:
//
//                    panel p    panel p + 1
//   x rows  0..15    sum 0      sum 1           64 columns: 4 loads and 4 products of tiles
//   x rows 16..31    sum 2      sum 3
//
// At the end of a group the int32 of an item are stored, and added to the float totals while the tiles of the
// next item are being multiplied: the two use different parts of a core.
static_assert(kVecs == 1, "a panel is one register wide");

constexpr int64_t kFewRows = 4;           // up to here the loops without tiles are as fast
constexpr int64_t kTileHeight = 16;       // rows of x in a tile, and in a block of r.codes, r.sums, r.scales
constexpr int64_t kItemRows = 32;         // two tiles of x
constexpr int64_t kSpanRows = 144;        // rows of a span: their totals are 18 KB
constexpr int64_t kBlockRows = 128;       // rows that pass over all panels, where they fit into
constexpr int64_t kBlockBytes = 3 << 19;  // a part of L2
constexpr int64_t kPairColumns = 128;     // groups up to this long are taken by two
constexpr int64_t kStepColumns = 512;     // longer groups are cut, and their sums kept as int32
constexpr int64_t kTileSums = kTileHeight * kPanel;  // int32 of a tile
constexpr int64_t kItemSums = 4 * kTileSums;         // [tile of x][panel]

struct TileScratch {
  alignas(64) float total[kSpanRows][2 * kPanel];
  // two buffers of two groups of one item, taking turns, or of cut groups one for every item
  alignas(64) int32_t sums[(kSpanRows + kItemRows - 1) / kItemRows * kItemSums];
  alignas(64) uint8_t codes[2 * kStepColumns * kPanel];
};

// Columns of a row of x that lie together: a row of a tile. Groups end at multiples of 32.
static inline int unit_of(const Rows& r) { return r.padded % 64 ? 32 : 64; }

template <class W, int P, bool kPerGroup>
struct Span {  // rows [begin, end) against P panels
  const LinearArgs& a;
  const Rows& r;
  const int64_t panel, begin, end;
  const bool fits;  // code * 127 * group < 2^24: float arithmetic on d is exact too
  TileScratch& s;

  struct Step {
    int64_t group, first, columns;  // columns [first, first + columns) of `slots` groups
    int slots;
    bool starts, ends;  // their groups
  };
  struct Waiting {  // an item whose int32 are ready
    int64_t group, row;
    int slots;  // 0: none
    const int32_t* sums;
  };

  const uint8_t* codes_of(int64_t group, int p) const {
    return a.weight + ((panel + p) * r.groups + group) * a.group_bytes;
  }
  const uint8_t* tail_of(int64_t group, int p) const {
    return codes_of(group, p) + r.padded * W::kColumnBytes;
  }

  // The waiting int32 of one tile of x into the totals.
  template <int kSlots>
  __attribute__((noinline)) void add_tile(const Waiting& done, int t) const {
    const int64_t first = done.row + t * kTileHeight;
    const int64_t rows = end - first < kTileHeight ? end - first : kTileHeight;
    Tail tail[kSlots][P];
    for (int slot = 0; slot < kSlots; ++slot)
      for (int p = 0; p < P; ++p) tail[slot][p] = load_tail(tail_of(done.group + slot, p), a.wide_scales);
    const int32_t* in = done.sums + t * 2 * kTileSums;
    const int64_t of_group = first * r.groups + done.group * rows;
    const int32_t* sum = r.sums + of_group;
    const float* x_scale = r.scales + of_group;
    float* total = s.total[first - begin];
    for (int64_t m = 0; m < rows; ++m, ++sum, ++x_scale, in += kPanel, total += 2 * kPanel)
      for (int p = 0; p < P; ++p) {
        F v = load(total + p * kPanel);
        for (int slot = 0; slot < kSlots; ++slot) {
          const I dot = load_i(in + slot * kItemSums + p * kTileSums);
          const Tail& of_w = tail[slot][p];
          F d, scale = of_w.scale[0];
          if constexpr (!W::kCorrects)
            d = to_float(dot);
          else if (fits)
            d = fnma(to_float(splat_i(sum[slot * rows])), of_w.zero_f[0], to_float(dot));
          else
            d = to_float(mul_sub(dot, splat_i(sum[slot * rows]), of_w.zero[0]));
          if constexpr (kPerGroup) scale = mul(scale, splat(x_scale[slot * rows]));
          v = fma(d, scale, v);
        }
        store(total + p * kPanel, v);
      }
  }
  void add_item(const Waiting& done, int first_tile, int tiles) const {
    for (int t = first_tile; t < first_tile + tiles; ++t) {
      if (done.row + t * kTileHeight >= end) return;
      if (done.slots == 2)
        add_tile<2>(done, t);
      else
        add_tile<1>(done, t);
    }
  }

  // T tiles of x from `row` on by P panels. While they multiply, what waits is added: one tile of x a group,
  // or both.
  template <int T>
  void multiply(const Step& step, int64_t row, int32_t* sums, Waiting& waiting) const {
    const int unit = unit_of(r);
    const int64_t last = end - row - (T - 1) * kTileHeight, rows = last < kTileHeight ? last : kTileHeight;
    const int64_t column = step.group * r.padded + step.first, width = r.groups * r.padded;
    // blocks [width / unit][rows][unit]; only the last tile of x may have less than 16 rows
    const int64_t rows0 = T == 1 ? rows : kTileHeight;
    const int8_t* x0 = r.codes + row * width + column * rows0;
    const int8_t* x1 = r.codes + (row + kTileHeight) * width + column * rows;
    const int64_t panel_bytes = W::kUnpacks ? step.columns * kPanel : r.groups * a.group_bytes;
    for (int slot = 0; slot < step.slots; ++slot, sums += kItemSums) {
      const uint8_t* w = W::kUnpacks ? s.codes + slot * P * panel_bytes
                                     : codes_of(step.group + slot, 0) + step.first * W::kColumnBytes;
      if (step.starts) {
        each<T>([](auto t, auto p) { zero_sum<t.value, p.value>(); });
      } else {
        memory_is_read();
        each<T>(
            [&](auto t, auto p) { load_sum<t.value, p.value>(sums + (t.value * 2 + p.value) * kTileSums); });
      }
      for (int64_t k = 0; k < step.columns; k += unit, w += unit * kPanel) {
        load_x<0>(x0, unit);
        load_w<0>(w);
        W::template dot<0, 0>();
        if constexpr (P > 1) {
          load_w<1>(w + panel_bytes);
          W::template dot<0, 1>();
        }
        if constexpr (T > 1) {
          load_x<1>(x1, unit);
          W::template dot<1, 0>();
          if constexpr (P > 1) W::template dot<1, 1>();
        }
        x0 += rows0 * unit, x1 += rows * unit;
      }
      if (waiting.slots) add_item(waiting, slot, step.slots == 1 ? 2 : 1);
      each<T>(
          [&](auto t, auto p) { store_sum<t.value, p.value>(sums + (t.value * 2 + p.value) * kTileSums); });
    }
  }
  template <int T, class Do>
  static void each(const Do& f) {
    f(Number<0>(), Number<0>());
    if constexpr (P > 1) f(Number<0>(), Number<1>());
    if constexpr (T > 1) f(Number<1>(), Number<0>());
    if constexpr (T > 1 && P > 1) f(Number<1>(), Number<1>());
  }

  void unpack(const Step& step) const {
    for (int slot = 0; slot < step.slots; ++slot)
      for (int p = 0; p < P; ++p) {
        const int64_t group = step.group + slot;
        W::unpack(codes_of(group, p) + step.first * W::kColumnBytes,
                  tail_of(group, p) + (a.wide_scales ? 64 : 32), step.columns,
                  s.codes + (slot * P + p) * step.columns * kPanel);
      }
    memory_is_read();
  }

  void take(const Step& step, Waiting& waiting, int& turn) const {
    unpack(step);
    const bool whole = step.starts && step.ends;
    for (int64_t row = begin; row < end; row += kItemRows) {
      turn ^= 1;
      int32_t* sums = s.sums + (whole ? turn * 2 * kItemSums : (row - begin) / kItemRows * kItemSums);
      if (end - row > kTileHeight)
        multiply<2>(step, row, sums, waiting);
      else
        multiply<1>(step, row, sums, waiting);
      waiting = {step.group, row, step.ends ? step.slots : 0, sums};
    }
  }

  void run() const {
    for (int64_t m = 0; m < end - begin; ++m)
      for (int p = 0; p < P; ++p) store(s.total[m] + p * kPanel, splat(0.f));
    Waiting waiting = {0, 0, 0, nullptr};
    int turn = 0;
    if (r.padded <= kPairColumns) {
      for (int64_t g = 0; g < r.groups; g += 2)
        take({g, 0, r.padded, g + 1 < r.groups ? 2 : 1, true, true}, waiting, turn);
    } else {
      for (int64_t g = 0; g < r.groups; ++g)
        for (int64_t k = 0; k < r.padded; k += kStepColumns) {
          const int64_t left = r.padded - k, columns = left < kStepColumns ? left : kStepColumns;
          take({g, k, columns, 1, k == 0, columns == left}, waiting, turn);
        }
    }
    if (waiting.slots) add_item(waiting, 0, 2);
    for (int p = 0; p < P; ++p)
      finish_rows(a, begin, end - begin, panel + p, s.total[0] + p * kPanel, 2 * kPanel,
                  kPerGroup ? nullptr : r.scales + begin);
  }
};

template <class W, bool kPerGroup>
static void linear_tiles(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  const bool fits = W::kMaxCode * 127 * r.group < (1 << 24);
  const int64_t block = kBlockRows * r.groups * r.padded <= kBlockBytes ? kBlockRows : kBlockRows / 2;
  TileScratch scratch;
  int64_t open = -1;  // the height of the tiles as they are configured: a span has one height, or all of 16
  const auto span = [&](int64_t begin, int64_t end, int64_t p, bool full) {
    const int64_t rows = full ? kItemRows : end - begin;
    if (open != rows) {
      const int64_t first = rows < kTileHeight ? rows : kTileHeight;
      open_tiles(static_cast<int>(first), static_cast<int>(rows - first), unit_of(r));
      open = rows;
    }
    if (p + 1 < panel_end)
      Span<W, 2, kPerGroup>{a, r, p, begin, end, fits, scratch}.run();
    else
      Span<W, 1, kPerGroup>{a, r, p, begin, end, fits, scratch}.run();
  };
  for (int64_t row = 0, rows; row < r.m; row += rows) {
    rows = r.m - row < block + kItemRows ? r.m - row : block;
    int64_t full = rows / kItemRows * kItemRows;  // and what is left: less than two whole tiles
    if (rows - full == kTileHeight) full = rows;
    for (int64_t p = panel_begin; p < panel_end; p += 2) {
      if (full) span(row, row + full, p, true);
      if (full < rows) span(row + full, row + rows, p, false);
    }
  }
  if (open >= 0) close_tiles();
}

template <class W>
static void linear_tiles(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kGroup)
    linear_tiles<W, true>(a, panel_begin, panel_end);
  else
    linear_tiles<W, false>(a, panel_begin, panel_end);
}

// Few rows and float activations: the other loops, with rows of x as those want them.
static inline bool with_tiles(const Rows& r) { return r.granularity != Granularity::kNone && r.m > kFewRows; }
static void quantize_tiles(const Rows& r, int64_t block_begin, int64_t block_end) {
  if (!with_tiles(r)) return quantize_rows(r, block_begin, block_end);
  const int64_t begin = block_begin * kRowBlock, rest = block_end * kRowBlock, end = rest < r.m ? rest : r.m;
  if (unit_of(r) == 64)
    quantize_codes<64, kTileHeight>(r, begin, end);
  else
    quantize_codes<32, kTileHeight>(r, begin, end);
}
static void tiles_w4(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (with_tiles(*a.rows))
    linear_tiles<TileW4>(a, panel_begin, panel_end);
  else
    linear_w4(a, panel_begin, panel_end);
}
static void tiles_w8(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (with_tiles(*a.rows))
    linear_tiles<TileW8>(a, panel_begin, panel_end);
  else
    linear_w8(a, panel_begin, panel_end);
}
