// y = x w^T with float32 arithmetic on the aarch64 panels: the chains of linear_float.body.h, so the same
// bits, in tiles for registers of 4 lanes whose multiply takes its second factor from a lane. Written once;
// the verbs come from isa/asimd.simd.h.
//   part = fma(x, float(code - zero), part);  total = fma(part, scale, total)   (float16 weights: one group,
//   scale 1)

// Columns C .. 3 of four, MB rows of x by VECS vectors of w. x holds [4 columns][MB].
template <class W, int MB, int VECS, int C>
LOWBIT_INLINE void float_columns(F (&part)[MB][VECS], const uint8_t* line, int first, int column,
                                 const I* zero, const F (&x)[MB]) {
  if constexpr (C < 4) {
    F w[VECS];
    W::template values<VECS>(line, first, column + C, zero, w);
    float_lanes<MB, VECS, C * MB, C * MB + MB>(part, w, x);
    float_columns<W, MB, VECS, C + 1>(part, line, first, column, zero, x);
  }
}

// MB rows of x against VECS vectors of a panel, from vector `first` on; totals to out[MB][kPanel].
template <class W, int MB, int VECS>
static __attribute__((noinline)) void float_tile(const LinearArgs& a, int64_t first_row, int64_t panel,
                                                 int first, float* out) {
  const Rows& r = *a.rows;
  const float* x = r.floats + first_row * r.groups * r.padded;
  const uint8_t* line = a.weight + panel * r.groups * a.group_bytes;
  F total[MB][VECS];
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < VECS; ++v) total[m][v] = splat(0.f);
  for (int64_t g = 0; g < r.groups; ++g) {
    const uint8_t* tail = line + r.padded / W::kColumns * W::kBytes;
    I zero[VECS];
    if constexpr (W::kScaled)
      for (int v = 0; v < VECS; ++v) zero[v] = load_u8(tail + (a.wide_scales ? 64 : 32) + 4 * (first + v));
    F part[MB][VECS];
    for (int m = 0; m < MB; ++m)
      for (int v = 0; v < VECS; ++v) part[m][v] = splat(0.f);
    for (; line < tail; line += W::kBytes) {
#pragma GCC unroll 4
      for (int column = 0; column < W::kColumns; column += 4, x += 4 * MB) {
        F four[MB];
        for (int i = 0; i < MB; ++i) four[i] = load(x + 4 * i);
        float_columns<W, MB, VECS, 0>(part, line, first, column, zero, four);
      }
    }
    if constexpr (W::kScaled) {
      line += a.group_bytes - r.padded / W::kColumns * W::kBytes;
      for (int v = 0; v < VECS; ++v) {
        const F scale = a.wide_scales ? load(reinterpret_cast<const float*>(tail) + 4 * (first + v))
                                      : load_half(reinterpret_cast<const uint16_t*>(tail) + 4 * (first + v));
        for (int m = 0; m < MB; ++m) total[m][v] = fma(part[m][v], scale, total[m][v]);
      }
    } else {
      for (int m = 0; m < MB; ++m)
        for (int v = 0; v < VECS; ++v) total[m][v] = part[m][v];
    }
  }
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < VECS; ++v) store(out + m * kPanel + (first + v) * kLanes, total[m][v]);
}

template <class W, int MB>
static void float_block(const LinearArgs& a, int64_t row, int64_t panel) {
  constexpr int kTile = MB <= 4 ? kVecs : kVecs / 2;  // 16 chains in registers
  alignas(64) float out[MB * kPanel];
  for (int first = 0; first < kVecs; first += kTile) float_tile<W, MB, kTile>(a, row, panel, first, out);
  finish_rows(a, row, MB, panel, out, kPanel, nullptr);
}

template <class W>
static void linear_float(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  for (int64_t panel = panel_begin; panel < panel_end; ++panel)
    for (int64_t row = 0; row < r.m; row += kRowBlock)
      with_number<kRowBlock>(r.m - row < kRowBlock ? r.m - row : kRowBlock,
                             [&](auto n) { float_block<W, decltype(n)::value>(a, row, panel); });
}

static void linear_w4(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kNone)
    linear_float<FloatW4>(a, panel_begin, panel_end);
  else
    linear_int<W4, W4>(a, panel_begin, panel_end);
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
