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

// 16 values a step to int8; the units of a row (kUnit columns) stand `mb` apart. Returns the sum of the
// codes.
static inline int32_t quantize_group(const float* x, int64_t n, float inverse, int8_t* codes, int mb) {
  alignas(16) int8_t sixteen[kPanel];
  if (inverse == 0.f) {
    for (int64_t j = 0; j < n / kUnit; ++j) __builtin_memset(codes + j * mb * kUnit, 0, kUnit);
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
    } else {
      store_codes16(sixteen, q);
      for (int i = 0; i < kPanel / kUnit; ++i)
        __builtin_memcpy(codes + (j / kUnit + i) * mb * kUnit, sixteen + kUnit * i, kUnit);
    }
  }
  return reduce_add(sum);
}

static void quantize_rows(const Rows& r, int64_t block_begin, int64_t block_end) {
  const int64_t width = r.groups * r.padded;
  for (int64_t b = block_begin; b < block_end; ++b) {
    const int64_t first = b * kRowBlock;
    const int mb = static_cast<int>(r.m - first < kRowBlock ? r.m - first : kRowBlock);
    for (int i = 0; i < mb; ++i) {
      const float* x = gather_row(r, first + i);
      if (r.granularity == Granularity::kNone) {
        float* out = r.floats + first * width + i;
        for (int64_t j = 0; j < width; ++j) out[j * mb] = x[j];
        continue;
      }
      int8_t* codes = r.codes + first * width + kUnit * i;
      int32_t* sums = r.sums + first * r.groups + i;
      float inverse = 0.f;
      if (r.granularity == Granularity::kToken) r.scales[first + i] = scale_of(x, width, inverse);
      for (int64_t g = 0; g < r.groups; ++g) {
        if (r.granularity == Granularity::kGroup)
          r.scales[first * r.groups + g * mb + i] = scale_of(x + g * r.padded, r.padded, inverse);
        sums[g * mb] = quantize_group(x + g * r.padded, r.padded, inverse, codes + g * r.padded * mb, mb);
      }
    }
  }
}
