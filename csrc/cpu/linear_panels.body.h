// y = A(x) w^T with integer dot products on the aarch64 panels, for 4- and 8-bit codes. Written once; F, I
// and the tiles come from isa/<name>.simd.h. Per output, whatever the tile, the tier or the thread, as in
// linear_int.body.h:
//   d = sum over the group of code * a - zero * sum(a)             exact, int32
//   acc = fma(float(d), scale [* scale of the x group], acc)       groups in order of k
//   y = acc [* scale of the x row] [+ bias]
//
// W4 and W8 name three tiles each, and the tier says from how many rows of x on (kExpandFrom) codes are
// expanded:
//   One        one row of x, codes unpacked in registers
//   Few<MB>    MB rows of x, likewise: one load of w serves them all
//   Many<MB>   MB rows of x, a panel expanded to int8 before: nothing to unpack, often no zero point either
// A tile is kRows rows of w by kM rows of x; its sums and totals are kA x kB vectors, and which rows lie in
// which lane is its own business: `scales`, `zeros` and `of_x` answer in that order, `rows` brings the totals
// into ours.

// `small`: every |d| is below 2^22. kFolds: a group has more than T::kFold columns, whose sums have to widen
// in between.
template <class T, bool kPerGroup, bool kFolds>
static inline __attribute__((always_inline)) void int_tile(const LinearArgs& a, const uint8_t* w,
                                                           const uint8_t* tail, const int8_t* x,
                                                           int64_t first_row, int part, bool small,
                                                           float* out) {
  const Rows& r = *a.rows;
  const int32_t* sums = r.sums + first_row * r.groups;
  const float* x_scale = kPerGroup ? r.scales + first_row * r.groups : r.scales + first_row;
  const int64_t gap = T::kExpanded ? 0 : a.group_bytes - r.padded * T::kColumnBytes;
  const uint8_t* scale = tail + part * T::kRows * (a.wide_scales ? 4 : 2);
  const uint8_t* zero = tail + kPanel * (a.wide_scales ? 4 : 2) + part * T::kRows;
  // Large tiles keep their totals in L1, out of the registers: the compiler must not see through `t`.
  constexpr bool kInL1 = T::kA * T::kB > 4;
  alignas(64) F total[T::kA * T::kB];
  F* t = total;
  if constexpr (kInL1) __asm__("" : "+r"(t) : : "memory");
#pragma GCC unroll 16
  for (int i = 0; i < T::kA * T::kB; ++i) t[i] = splat(0.f);

  const auto dot = [&](int64_t columns, I(&d)[T::kA][T::kB]) __attribute__((always_inline)) {
    typename T::Acc acc;
    T::start(acc, small);
    for (int64_t left = columns; left > 0; left -= kStep) {
      T::dot(acc, w, x);
      T::keep(acc);
      T::dot(acc, w + T::kStepBytes, x + T::kXBytes);
      w += 2 * T::kStepBytes, x += 2 * T::kXBytes;
    }
    T::total(acc, d);
  };
  for (int64_t g = 0; g < r.groups; ++g, w += gap, scale += a.group_bytes, zero += a.group_bytes) {
    if constexpr (kInL1) __asm__ volatile("" : : : "memory");
    I d[T::kA][T::kB];
    if constexpr (!kFolds) {
      dot(r.padded, d);
    } else {
      dot(T::kFold, d);
      for (int64_t left = r.padded - T::kFold; left > 0; left -= T::kFold) {
        I more[T::kA][T::kB];
        dot(left < T::kFold ? left : T::kFold, more);
        for (int i = 0; i < T::kA; ++i)
          for (int b = 0; b < T::kB; ++b) d[i][b] = add_i(d[i][b], more[i][b]);
      }
    }
    F s[T::kB];
    T::scales(scale, a.wide_scales, s);
    if constexpr (T::kCorrect) {
      I z[T::kB];
      T::zeros(zero, z);
#pragma GCC unroll 8
      for (int i = 0; i < T::kA; ++i) {
        const I sum = T::of_x(sums + g * T::kM, i);
#pragma GCC unroll 16
        for (int b = 0; b < T::kB; ++b) d[i][b] = mul_sub(d[i][b], sum, z[b]);
      }
    }
    const auto add = [&](auto convert) __attribute__((always_inline)) {
#pragma GCC unroll 8
      for (int i = 0; i < T::kA; ++i) {
        const F xs = kPerGroup ? T::of_x(x_scale + g * T::kM, i) : splat(1.f);
        F row[T::kB];  // loaded together, stored together: ldp and stp
#pragma GCC unroll 16
        for (int b = 0; b < T::kB; ++b) row[b] = t[i * T::kB + b];
#pragma GCC unroll 16
        for (int b = 0; b < T::kB; ++b)
          row[b] = fma(convert(d[i][b]), kPerGroup ? mul(s[b], xs) : s[b], row[b]);
#pragma GCC unroll 16
        for (int b = 0; b < T::kB; ++b) t[i * T::kB + b] = row[b];
      }
    };
    if (T::kBiased && small)
      add([](I v) __attribute__((always_inline)) { return to_float_biased(v); });
    else
      add([](I v) __attribute__((always_inline)) { return to_float(v); });
  }
  T::rows(t, out);
}

// One block of rows of x against one panel (`w`: its codes, packed or expanded), part by part; then bias and
// rounding.
template <class T, bool kPerGroup>
static __attribute__((noinline)) void int_block(const LinearArgs& a, const uint8_t* w, const int8_t* x,
                                                int64_t first_row, int64_t panel, bool small) {
  const Rows& r = *a.rows;
  const int64_t part_bytes = T::kExpanded ? r.groups * r.padded * T::kRows : T::kRows * 8;
  const uint8_t* tail = a.weight + panel * r.groups * a.group_bytes + r.padded * T::kColumnBytes;
  alignas(64) float out[T::kM * kPanel];
#pragma GCC unroll 1
  for (int part = 0; part < kPanel / T::kRows; ++part, w += part_bytes) {
    float* const columns = out + part * T::kRows;
    if (T::kFold > 0 && r.padded > T::kFold)
      int_tile<T, kPerGroup, (T::kFold > 0)>(a, w, tail, x, first_row, part, small, columns);
    else
      int_tile<T, kPerGroup, false>(a, w, tail, x, first_row, part, small, columns);
  }
  const float* x_scale = kPerGroup ? nullptr : r.scales + first_row;
  if (a.up) return finish_with_branch(a, first_row, T::kM, panel, out, kPanel, x_scale);
#pragma GCC unroll 1
  for (int m = 0; m < T::kM; ++m)
    finish_row(a, first_row + m, panel, out + m * kPanel, kPerGroup ? 1.f : x_scale[m], nullptr);
}

struct Scratch {  // bytes of the calling thread, on a cache line
  explicit Scratch(int64_t bytes)
      : data(static_cast<int8_t*>(
            ::operator new(static_cast<decltype(sizeof(0))>(bytes), std::align_val_t(64)))) {}
  ~Scratch() { ::operator delete(data, std::align_val_t(64)); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;
  int8_t* const data;
};

template <class W, bool kPerGroup>
static void int_panels(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  const Rows& r = *a.rows;
  const bool small = W::kMaxCode * 127 * r.group < (1 << 22);
  const int64_t width = r.groups * r.padded, panel_bytes = r.groups * a.group_bytes;
  if (r.m == 1) {
    const Scratch twice(W::One::kXBytes == 32 ? 2 * width : 1);
    if constexpr (W::One::kXBytes == 32) repeat8(r.codes, width, twice.data);
    for (int64_t p = panel_begin; p < panel_end; ++p)
      int_block<typename W::One, kPerGroup>(a, a.weight + p * panel_bytes,
                                            W::One::kXBytes == 32 ? twice.data : r.codes, 0, p, small);
  } else if (r.m < kExpandFrom) {
    for (int64_t p = panel_begin; p < panel_end; ++p)
      for (int64_t row = 0; row < r.m; row += kRowBlock)
        with_number<kRowBlock>(r.m - row < kRowBlock ? r.m - row : kRowBlock, [&](auto n) {
          int_block<typename W::template Few<decltype(n)::value>, kPerGroup>(
              a, a.weight + p * panel_bytes, r.codes + row * width, row, p, small);
        });
  } else if constexpr (kExpandFrom < INT64_MAX) {
    // Rows that stay in L2 while all panels pass; each panel is expanded once for them.
    const int64_t fit = kBlockBytes / width / kRowBlock * kRowBlock,
                  block = fit > kRowBlock ? fit : kRowBlock;
    const Scratch panel(kPanel * width);
    const auto* w = reinterpret_cast<const uint8_t*>(panel.data);
    for (int64_t first = 0; first < r.m; first += block) {
      const int64_t last = first + block < r.m ? first + block : r.m;
      for (int64_t p = panel_begin; p < panel_end; ++p) {
        for (int64_t g = 0; g < r.groups; ++g) {
          const uint8_t* codes = a.weight + p * panel_bytes + g * a.group_bytes;
          const uint8_t* zeros = codes + r.padded * W::One::kColumnBytes + kPanel * (a.wide_scales ? 4 : 2);
          W::expand(codes, zeros, r.padded, panel.data + g * r.padded * kManyRows, width * kManyRows);
        }
        for (int64_t row = first; row < last; row += kRowBlock)
          with_number<kRowBlock>(last - row < kRowBlock ? last - row : kRowBlock, [&](auto n) {
            int_block<typename W::template Many<decltype(n)::value>, kPerGroup>(a, w, r.codes + row * width,
                                                                                row, p, small);
          });
      }
    }
  }
}

template <class W, class...>
static void linear_int(const LinearArgs& a, int64_t panel_begin, int64_t panel_end) {
  if (a.rows->granularity == Granularity::kGroup)
    int_panels<W, true>(a, panel_begin, panel_end);
  else
    int_panels<W, false>(a, panel_begin, panel_end);
}
