// One read of x: convert to float32, smooth, rotate, permute, quantize, and lay the rows out as the dot
// products want them; the low rank takes what it needs while a row is in L1. No intrinsics here: F, I, kLanes
// and the verbs come from isa/<name>.simd.h.
static_assert(kRowBlock <= kMostRows);

template <int kStride>
struct Signs {  // -1 where a lane is the second of its pair
  float lane[kPanel];
  constexpr Signs() : lane{} {
    for (int i = 0; i < kPanel; ++i) lane[i] = i & kStride ? -1.f : 1.f;
  }
};
template <int kStride>
alignas(64) constexpr Signs<kStride> kSigns;

// One step of the Hadamard transform: of every two values kStride apart their sum and their difference.
// Inside a register by one fma with +-1, which rounds as the sum does.
constexpr int kMixedVecs = kMixed / kLanes;
template <int kStride>
static inline __attribute__((always_inline)) void butterflies(F (&x)[kMixedVecs]) {
  if constexpr (kStride < kLanes) {
    const F sign = load(kSigns<kStride>.lane);
#pragma GCC unroll 16
    for (int i = 0; i < kMixedVecs; ++i) x[i] = fma(x[i], sign, swap_lanes<kStride>(x[i]));
  } else {
    constexpr int kApart = kStride / kLanes;
#pragma GCC unroll 16
    for (int i = 0; i < kMixedVecs; ++i)
      if (!(i & kApart)) {
        const F a = x[i], b = x[i + kApart];
        x[i] = add_f(a, b), x[i + kApart] = sub_f(a, b);
      }
  }
}
// The order of strides is that of reference.hadamard, so the bits are.
static inline void mix64(const float* x, const float* smooth, float* out) {
  F v[kMixedVecs];
#pragma GCC unroll 16
  for (int i = 0; i < kMixedVecs; ++i) v[i] = load(x + i * kLanes);
  if (smooth)
#pragma GCC unroll 16
    for (int i = 0; i < kMixedVecs; ++i) v[i] = div_f(v[i], load(smooth + i * kLanes));
  butterflies<1>(v);
  butterflies<2>(v);
  butterflies<4>(v);
  butterflies<8>(v);
  butterflies<16>(v);
  butterflies<32>(v);
  const F eighth = splat(0.125f);
#pragma GCC unroll 16
  for (int i = 0; i < kMixedVecs; ++i) store(out + i * kLanes, mul(v[i], eighth));
}

// x' of one row: float32, smoothed, rotated. x itself where nothing changes it.
static inline const float* inside_row(const Rows& r, int64_t m, float* out) {
  const char* row = static_cast<const char*>(r.x) + m * r.k * (r.dtype == Dtype::kFloat32 ? 4 : 2);
  const auto* floats = reinterpret_cast<const float*>(row);
  const bool wide = r.dtype == Dtype::kFloat32;
  if (wide && !r.smooth && !r.hadamard) return floats;
  int64_t j = 0;
  if (r.hadamard) {
    for (; j < r.k; j += kMixed) {
      if (!wide)
        for (int64_t i = j; i < j + kMixed; i += kPanel) load_row16(row, r.dtype, i, out + i);
      mix64(wide ? floats + j : out + j, r.smooth ? r.smooth + j : nullptr, out + j);
    }
    return out;
  }
  for (; j + kPanel <= r.k; j += kPanel) {
    load_row16(row, r.dtype, j, out + j);
    if (r.smooth)
      for (int64_t i = j; i < j + kPanel; i += kLanes)
        store(out + i, div_f(load(out + i), load(r.smooth + i)));
  }
  for (; j < r.k; ++j) out[j] = load_one(row, r.dtype, j) / (r.smooth ? r.smooth[j] : 1.f);
  return out;
}

// The columns of x' as the weight has them, groups padded with zeros: [groups * padded]. x' itself where
// nothing has to move.
static inline const float* columns_of(const Rows& r, const float* inside, float* out) {
  if (!r.perm && r.groups * r.padded == r.k) return inside;
  for (int64_t g = 0; g < r.groups; ++g) {
    const int64_t first = g * r.group, last = first + r.group < r.k ? first + r.group : r.k;
    float* to = out + g * r.padded;
    if (r.perm)
      for (int64_t j = first; j < last; ++j) *to++ = inside[r.perm[j]];
    else
      for (int64_t j = first; j < last; ++j) *to++ = inside[j];
    while (to < out + (g + 1) * r.padded) *to++ = 0.f;
  }
  return out;
}

// keep(m, columns) for rows [begin, end), and their hidden.
template <class Keep>
static inline void each_row(const Rows& r, int64_t begin, int64_t end, const Keep& keep) {
  float* const inside = r.scratch + r.groups * r.padded;
  const int64_t apart = r.down_panels ? round_up(r.k, kPanel) : 0;
  for (int64_t first = begin; first < end; first += kRowBlock) {
    const int64_t count = end - first < kRowBlock ? end - first : kRowBlock;
    const float* x[kRowBlock];
    for (int64_t i = 0; i < count; ++i) {
      x[i] = inside_row(r, first + i, inside + i * apart);
      keep(first + i, columns_of(r, x[i], r.scratch));
    }
    if (r.down_panels) hidden_rows(r, first, count, x);
  }
}

// The scale of `n` values and what they are multiplied with before rounding. Integer maximum over |x| as
// bits: free of order, and NaN > Inf > every number. Tiny rows get scale 0; NaN and Inf go into the scale;
// codes are 0 in both cases.
static inline float scale_of(const float* x, int64_t n, float& inverse) {
  I top[kVecs];
  for (I& t : top) t = splat_i(0);
  for (int64_t j = 0; j < n; j += kPanel)
    for (int v = 0; v < kVecs; ++v) top[v] = max_i(top[v], abs_bits(x + j + v * kLanes));
  for (int v = 1; v < kVecs; ++v) top[0] = max_i(top[0], top[v]);
  const uint32_t bits = static_cast<uint32_t>(reduce_max(top[0]));
  inverse = 0.f;
  if (bits > 0x7f800000) return float_of(0x7fc00000);
  if (bits == 0x7f800000) return float_of(bits);
  if (bits < 0x0d800000) return 0.f;  // 2^-100
  const float amax = float_of(bits);
  inverse = 127.f / amax;
  return amax / 127.f;
}

// 16 values a step to int8; the units of a row (kWide columns) stand `mb` apart. Returns the sum of the
// codes.
template <int kWide>
static inline int32_t quantize_group(const float* x, int64_t n, float inverse, int8_t* codes, int mb) {
  alignas(16) int8_t sixteen[kPanel];
  if (inverse == 0.f) {
    for (int64_t j = 0; j < n / kWide; ++j) __builtin_memset(codes + j * mb * kWide, 0, kWide);
    return 0;
  }
  const F scale = splat(inverse);
  I sum = splat_i(0);
  for (int64_t j = 0; j < n; j += kPanel) {
    I q[kVecs];
    for (int v = 0; v < kVecs; ++v) {
      q[v] = round_mul(x + j + v * kLanes, scale);
      sum = add_i(sum, q[v]);
    }
    if (mb == 1) {
      store_codes16(codes + j, q);
    } else if (kWide >= kPanel) {
      store_codes16(codes + j / kWide * kWide * mb + j % kWide, q);
    } else {
      store_codes16(sixteen, q);
      for (int i = 0; i < kPanel / kWide; ++i)
        __builtin_memcpy(codes + (j / kWide + i) * mb * kWide, sixteen + kWide * i, kWide);
    }
  }
  return reduce_add(sum);
}

// Rows [begin, end) in blocks of kBlock rows and units of kWide columns.
template <int kWide, int kBlock>
static void quantize_codes(const Rows& r, int64_t begin, int64_t end) {
  const int64_t width = r.groups * r.padded;
  each_row(r, begin, end, [&](int64_t m, const float* x) {
    const int64_t first = m / kBlock * kBlock, i = m - first;
    const int mb = static_cast<int>(r.m - first < kBlock ? r.m - first : kBlock);
    int8_t* codes = r.codes + first * width + kWide * i;
    int32_t* sums = r.sums + first * r.groups + i;
    float inverse = 0.f;
    if (r.granularity == Granularity::kToken) r.scales[m] = scale_of(x, width, inverse);
    for (int64_t g = 0; g < r.groups; ++g) {
      if (r.granularity == Granularity::kGroup)
        r.scales[first * r.groups + g * mb + i] = scale_of(x + g * r.padded, r.padded, inverse);
      sums[g * mb] =
          quantize_group<kWide>(x + g * r.padded, r.padded, inverse, codes + g * r.padded * mb, mb);
    }
  });
}

static void keep_floats(const Rows& r, int64_t begin, int64_t end) {
  const int64_t width = r.groups * r.padded;
  each_row(r, begin, end, [&](int64_t m, const float* x) {
    const int64_t first = m / kRowBlock * kRowBlock;
    const int mb = static_cast<int>(r.m - first < kRowBlock ? r.m - first : kRowBlock);
    float* out = r.floats + first * width + (m - first);
    for (int64_t j = 0; j < width; ++j) out[j * mb] = x[j];
  });
}

static void quantize_rows(const Rows& r, int64_t block_begin, int64_t block_end) {
  const int64_t begin = block_begin * kRowBlock, rest = block_end * kRowBlock, end = rest < r.m ? rest : r.m;
  if (r.granularity == Granularity::kNone)
    keep_floats(r, begin, end);
  else
    quantize_codes<kUnit, kRowBlock>(r, begin, end);
}

// Rows that pass over all panels together, where weights are unpacked once for many: their x stays in a part
// of L2, their totals in L1.
constexpr int64_t kSharedRows = 256, kSharedBytes = 768 << 10;
static inline int64_t rows_at_once(int64_t row_bytes) {
  const int64_t rows = kSharedBytes / row_bytes / kRowBlock * kRowBlock, least = 4 * kRowBlock;
  return rows < least ? least : rows < kSharedRows ? rows : kSharedRows;
}
