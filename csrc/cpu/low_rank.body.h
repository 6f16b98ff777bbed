// The low rank beside a weight, in float32: hidden = downᵀ x' once a row, then up · hidden into every output.
// Both factors stand in panels of 16: down [k][16 of R], up [R][16 of N]. No intrinsics here. The order of
// the sums is defined, whatever the tile, the tier or the thread:
//   hidden[r] = 0 + c_0 + c_1 + …   c_b: an fma chain from 0 over columns 64 b .. 64 b + 63 of x'
//   branch[n] = 0 + c_0 + c_1 + …   c_b: an fma chain from 0 over r = 16 b .. 16 b + 15
// Chains of one output are independent, so that a single row does not wait for the latency of each fma.
constexpr int kBranchRows = kRowBlock < (kVecs == 1 ? 8 : 4) ? kRowBlock : (kVecs == 1 ? 8 : 4);

template <bool kWide>
static inline F factor(const uint8_t* panel, int64_t i) {
  if constexpr (kWide)
    return load(reinterpret_cast<const float*>(panel) + i);
  else
    return load_half(reinterpret_cast<const uint16_t*>(panel) + i);
}

// Columns [from, from + steps) of B blocks, 64 apart, of MB rows of x' by P panels of down.
template <bool kWide, int B, int MB, int P>
static inline __attribute__((always_inline)) void hidden_blocks(const float* const* x,
                                                                const uint8_t* const* down, int64_t from,
                                                                int64_t steps, F (&total)[MB][P][kVecs]) {
  F chain[B][MB][P][kVecs];
  for (int b = 0; b < B; ++b)
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) chain[b][m][p][v] = splat(0.f);
  for (int64_t k = from; k < from + steps; ++k)
#pragma GCC unroll 4
    for (int b = 0; b < B; ++b) {
      const int64_t at = k + b * kMixed;
#pragma GCC unroll 4
      for (int p = 0; p < P; ++p) {
        F w[kVecs];
        for (int v = 0; v < kVecs; ++v) w[v] = factor<kWide>(down[p], at * kPanel + v * kLanes);
#pragma GCC unroll 8
        for (int m = 0; m < MB; ++m) {
          const F one = splat(x[m][at]);
          for (int v = 0; v < kVecs; ++v) chain[b][m][p][v] = fma(one, w[v], chain[b][m][p][v]);
        }
      }
    }
  for (int b = 0; b < B; ++b)
    for (int m = 0; m < MB; ++m)
      for (int p = 0; p < P; ++p)
        for (int v = 0; v < kVecs; ++v) total[m][p][v] = add_f(total[m][p][v], chain[b][m][p][v]);
}

template <bool kWide, int MB, int P>
static __attribute__((noinline)) void hidden_tile(const Rows& r, int64_t row, const float* const* rows,
                                                  int64_t panel) {
  constexpr int B = MB > 1 || P > 2 ? 1 : 4 / P;
  const float* x[MB];
  const uint8_t* down[P];
  for (int m = 0; m < MB; ++m) x[m] = rows[m];
  for (int p = 0; p < P; ++p) down[p] = r.down[panel + p];
  F total[MB][P][kVecs];
  for (int m = 0; m < MB; ++m)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v) total[m][p][v] = splat(0.f);
  int64_t k = 0;
  for (; k + B * kMixed <= r.k; k += B * kMixed) hidden_blocks<kWide, B>(x, down, k, kMixed, total);
  for (; k < r.k; k += kMixed)
    hidden_blocks<kWide, 1>(x, down, k, r.k - k < kMixed ? r.k - k : kMixed, total);
  for (int m = 0; m < MB; ++m)
    for (int p = 0; p < P; ++p)
      for (int v = 0; v < kVecs; ++v)
        store(r.hidden + (row + m) * r.down_panels * kPanel + (panel + p) * kPanel + v * kLanes,
              total[m][p][v]);
}

// Rows [row, row + count) of hidden; x: where x' of each lies.
template <bool kWide>
static void hidden_rows(const Rows& r, int64_t row, int64_t count, const float* const* x) {
  if (count == 1) {
    for (int64_t panel = 0; panel < r.down_panels; panel += 4)
      with_number<4>(r.down_panels - panel < 4 ? r.down_panels - panel : 4,
                     [&](auto p) { hidden_tile<kWide, 1, decltype(p)::value>(r, row, x, panel); });
    return;
  }
  for (int64_t m = 0; m < count; m += kBranchRows)
    with_number<kBranchRows>(count - m < kBranchRows ? count - m : kBranchRows, [&](auto n) {
      for (int64_t panel = 0; panel < r.down_panels; ++panel)
        hidden_tile<kWide, decltype(n)::value, 1>(r, row + m, x + m, panel);
    });
}
static inline void hidden_rows(const Rows& r, int64_t row, int64_t count, const float* const* x) {
  if (r.wide_down)
    hidden_rows<true>(r, row, count, x);
  else
    hidden_rows<false>(r, row, count, x);
}

// up · hidden of MB rows of x and one panel of outputs: [MB][16].
template <bool kWide, int MB>
static inline __attribute__((always_inline)) void branch_tile(const LinearArgs& a, int64_t row, int64_t panel,
                                                              float* out) {
  const int64_t stride = a.rows->down_panels * kPanel;
  const float* hidden = a.hidden + row * stride;
  const uint8_t* up = a.up + panel * a.rank * kPanel * (kWide ? 4 : 2);
  F total[MB][kVecs];
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < kVecs; ++v) total[m][v] = splat(0.f);
  for (int64_t from = 0; from < a.rank; from += kPanel) {
    const int64_t to = a.rank - from < kPanel ? a.rank : from + kPanel;
    F chain[MB][kVecs];
    for (int m = 0; m < MB; ++m)
      for (int v = 0; v < kVecs; ++v) chain[m][v] = splat(0.f);
    for (int64_t i = from; i < to; ++i) {
      F w[kVecs];
      for (int v = 0; v < kVecs; ++v) w[v] = factor<kWide>(up, i * kPanel + v * kLanes);
#pragma GCC unroll 8
      for (int m = 0; m < MB; ++m) {
        const F one = splat(hidden[m * stride + i]);
        for (int v = 0; v < kVecs; ++v) chain[m][v] = fma(one, w[v], chain[m][v]);
      }
    }
    for (int m = 0; m < MB; ++m)
      for (int v = 0; v < kVecs; ++v) total[m][v] = add_f(total[m][v], chain[m][v]);
  }
  for (int m = 0; m < MB; ++m)
    for (int v = 0; v < kVecs; ++v) store(out + m * kPanel + v * kLanes, total[m][v]);
}

// At most kBranchRows rows.
static inline void branch_rows(const LinearArgs& a, int64_t row, int64_t count, int64_t panel, float* out) {
  with_number<kBranchRows>(count, [&](auto n) {
    if (a.wide_up)
      branch_tile<true, decltype(n)::value>(a, row, panel, out);
    else
      branch_tile<false, decltype(n)::value>(a, row, panel, out);
  });
}
