// One read of x: convert to float32, smooth, permute, quantize, and lay the rows out as the dot products want
// them. No intrinsics here: F, I, kLanes and the verbs come from isa/<name>.simd.h.

// One row as float32, groups padded with zeros: [groups * padded]. Returns x itself where nothing has to
// move.
static inline const float* gather_row(const Rows& r, int64_t m) {
  const int64_t width = r.groups * r.padded;
  const char* row = static_cast<const char*>(r.x) + m * r.k * (r.dtype == Dtype::kFloat32 ? 4 : 2);
  if (r.dtype == Dtype::kFloat32 && !r.perm && !r.smooth && width == r.k)
    return reinterpret_cast<const float*>(row);
  for (int64_t g = 0; g < r.groups; ++g) {
    float* out = r.scratch + g * r.padded;
    const int64_t first = g * r.group, last = first + r.group < r.k ? first + r.group : r.k,
                  width_g = last - first;
    int64_t j = 0;
    if (!r.perm)
      for (; j + kPanel <= width_g; j += kPanel) load_row16(row, r.dtype, first + j, out + j);
    for (; j < width_g; ++j) out[j] = load_one(row, r.dtype, r.perm ? r.perm[first + j] : first + j);
    if (r.smooth)
      for (j = 0; j < width_g; ++j) out[j] /= r.smooth[r.perm ? r.perm[first + j] : first + j];
    for (j = width_g; j < r.padded; ++j) out[j] = 0.f;
  }
  return r.scratch;
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
  for (int64_t m = begin; m < end; ++m) {
    const int64_t first = m / kBlock * kBlock, i = m - first;
    const int mb = static_cast<int>(r.m - first < kBlock ? r.m - first : kBlock);
    const float* x = gather_row(r, m);
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
  }
}

static void keep_floats(const Rows& r, int64_t begin, int64_t end) {
  const int64_t width = r.groups * r.padded;
  for (int64_t m = begin; m < end; ++m) {
    const int64_t first = m / kRowBlock * kRowBlock;
    const int mb = static_cast<int>(r.m - first < kRowBlock ? r.m - first : kRowBlock);
    const float* x = gather_row(r, m);
    float* out = r.floats + first * width + (m - first);
    for (int64_t j = 0; j < width; ++j) out[j * mb] = x[j];
  }
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
