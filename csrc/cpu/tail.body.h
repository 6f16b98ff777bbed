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

// The scale of the row of x and the bias go in, then y is rounded once to its type; the columns that exist
// are stored.
static inline void finish_row(const LinearArgs& a, int64_t row, int64_t panel, float* total, float x_scale) {
  const int64_t n = panel * kPanel, columns = a.n - n < kPanel ? a.n - n : kPanel;
  const Dtype dtype = a.rows->dtype;
  char* y = static_cast<char*>(a.y) + (row * a.n + n) * (dtype == Dtype::kFloat32 ? 4 : 2);
  if (columns == kPanel) {
    const F scale = splat(x_scale);
    for (int v = 0; v < kVecs; ++v) {
      const F t = load(total + v * kLanes);
      store(total + v * kLanes, a.bias ? fma(t, scale, load(a.bias + n + v * kLanes)) : mul(t, scale));
    }
    store_row16(y, dtype, total);
    return;
  }
  for (int64_t j = 0; j < columns; ++j)
    store_one(y, dtype, j, a.bias ? __builtin_fmaf(total[j], x_scale, a.bias[n + j]) : total[j] * x_scale);
}
