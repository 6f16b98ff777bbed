// What follows the codes of a group, and what follows the last group. No intrinsics here.

struct Tail {
  F scale[kVecs], zero_f[kVecs];
  I zero[kVecs];
};
static inline Tail load_tail(const uint8_t* p, bool wide) {
  Tail t;
  for (int v = 0; v < kVecs; ++v)
    t.scale[v] = wide ? load(reinterpret_cast<const float*>(p) + v * kLanes)
                      : load_half(reinterpret_cast<const uint16_t*>(p) + v * kLanes);
  p += wide ? 64 : 32;
  for (int v = 0; v < kVecs; ++v) {
    t.zero[v] = load_u8(p + v * kLanes);
    t.zero_f[v] = to_float(t.zero[v]);
  }
  return t;
}

// The scale of the row of x and the bias go in, then what the low rank gives (`more`, or null), then y is
// rounded once to its type; the columns that exist are stored.
static inline void finish_row(const LinearArgs& a, int64_t row, int64_t panel, float* total, float x_scale,
                              const float* more) {
  const int64_t n = panel * kPanel, columns = a.n - n < kPanel ? a.n - n : kPanel;
  const Dtype dtype = a.rows->dtype;
  char* y = static_cast<char*>(a.y) + (row * a.n + n) * (dtype == Dtype::kFloat32 ? 4 : 2);
  if (columns == kPanel) {
    const F scale = splat(x_scale);
    for (int v = 0; v < kVecs; ++v) {
      F t = load(total + v * kLanes);
      t = a.bias ? fma(t, scale, load(a.bias + n + v * kLanes)) : mul(t, scale);
      store(total + v * kLanes, more ? add_f(t, load(more + v * kLanes)) : t);
    }
    store_row16(y, dtype, total);
    return;
  }
  for (int64_t j = 0; j < columns; ++j) {
    float t = a.bias ? __builtin_fmaf(total[j], x_scale, a.bias[n + j]) : total[j] * x_scale;
    if (more) t += more[j];
    store_one(y, dtype, j, t);
  }
}

// Never inlined: the loops around it keep their registers.
static __attribute__((noinline)) void finish_with_branch(const LinearArgs& a, int64_t first, int64_t rows,
                                                         int64_t panel, float* total, int64_t stride,
                                                         const float* x_scale) {
  alignas(64) float more[kBranchRows * kPanel];
  for (int64_t m = 0; m < rows; m += kBranchRows) {
    const int64_t count = rows - m < kBranchRows ? rows - m : kBranchRows;
    branch_rows(a, first + m, count, panel, more);
    for (int64_t i = m; i < m + count; ++i)
      finish_row(a, first + i, panel, total + i * stride, x_scale ? x_scale[i] : 1.f,
                 more + (i - m) * kPanel);
  }
}

// Totals of rows [first, first + rows) of one panel, `stride` floats apart. x_scale: of these rows, or null.
static inline __attribute__((always_inline)) void finish_rows(const LinearArgs& a, int64_t first,
                                                              int64_t rows, int64_t panel, float* total,
                                                              int64_t stride, const float* x_scale) {
  if (a.up) return finish_with_branch(a, first, rows, panel, total, stride, x_scale);
  for (int64_t m = 0; m < rows; ++m)
    finish_row(a, first + m, panel, total + m * stride, x_scale ? x_scale[m] : 1.f, nullptr);
}
