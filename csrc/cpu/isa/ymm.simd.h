// 256-bit verbs that avx2 and avxvnni share: everything but the dot products. 16 registers: a tile is 4 rows
// of x by one panel (8 accumulators, 4 weight vectors, 1 broadcast).
using F = __m256;
using I = __m256i;
constexpr int kLanes = 8, kVecs = kPanel / kLanes, kRowBlock = 4;
constexpr int kPrefetch = 2048;  // bytes ahead; the hardware prefetcher stops at page ends
// Rows of x from which weights are unpacked once for all of them: 4-bit codes to bytes, codes to floats,
// float16 to floats. Measured 2026-11-30, docs/kernels.md.
constexpr int64_t kBytesFrom = kNever, kFloatsFrom = 4 * kRowBlock, kHalvesFrom = kNever;
template <int MB>
constexpr int int_panels() {
  return 1;
}
template <int MB>
constexpr int float_panels() {
  return MB == 1 ? 4 : MB == 2 ? 2 : 1;
}

static inline F load(const float* p) { return _mm256_loadu_ps(p); }
static inline void store(float* p, F v) { _mm256_storeu_ps(p, v); }
static inline F splat(float s) { return _mm256_set1_ps(s); }
static inline F mul(F a, F b) { return _mm256_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm256_fmadd_ps(a, b, c); }
static inline F fnma(F a, F b, F c) { return _mm256_fnmadd_ps(a, b, c); }
static inline F to_float(I v) { return _mm256_cvtepi32_ps(v); }
static inline F add_f(F a, F b) { return _mm256_add_ps(a, b); }
static inline F sub_f(F a, F b) { return _mm256_sub_ps(a, b); }
static inline F max_f(F a, F b) { return _mm256_max_ps(a, b); }  // b where one is NaN
static inline F div_f(F a, F b) { return _mm256_div_ps(a, b); }
static inline I to_int(F v) { return _mm256_cvtps_epi32(v); }
template <int kStride>  // lane i takes what lane i ^ kStride has
static inline F swap_lanes(F v) {
  if constexpr (kStride == 4) return _mm256_permute2f128_ps(v, v, 1);
  return _mm256_permute_ps(v, kStride == 1 ? 0xb1 : 0x4e);
}
static inline F power_of_two(I n) {  // 0 for -127
  return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_add_epi32(n, _mm256_set1_epi32(127)), 23));
}
static inline F load_half(const uint16_t* p) {
  return _mm256_cvtph_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I load_i(const void* p) { return _mm256_loadu_si256(static_cast<const __m256i*>(p)); }
static inline void store_i(void* p, I v) { _mm256_storeu_si256(static_cast<__m256i*>(p), v); }
static inline I splat_i(int32_t s) { return _mm256_set1_epi32(s); }
static inline I add_i(I a, I b) { return _mm256_add_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm256_max_epi32(a, b); }
static inline I mul_sub(I d, I a, I b) { return _mm256_sub_epi32(d, _mm256_mullo_epi32(a, b)); }
static inline I load_u8(const uint8_t* p) {
  return _mm256_cvtepu8_epi32(_mm_loadl_epi64(reinterpret_cast<const __m128i*>(p)));
}
static inline I abs_bits(const float* p) {
  return _mm256_and_si256(load_i(p), _mm256_set1_epi32(0x7fffffff));
}
static inline int32_t reduce_max(I v) {
  __m128i a = _mm_max_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_max_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_max_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
static inline int32_t reduce_add(I v) {
  __m128i a = _mm_add_epi32(_mm256_castsi256_si128(v), _mm256_extracti128_si256(v, 1));
  a = _mm_add_epi32(a, _mm_shuffle_epi32(a, 0x4e));
  return _mm_cvtsi128_si32(_mm_add_epi32(a, _mm_shuffle_epi32(a, 0xb1)));
}
static inline I round_mul(const float* p, F inverse) { return _mm256_cvtps_epi32(mul(load(p), inverse)); }
static inline void store_codes16(int8_t* q, const I* v) {
  const __m256i words = _mm256_permute4x64_epi64(_mm256_packs_epi32(v[0], v[1]), 0xd8);
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q),
                   _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}
static inline void load_row16(const void* row, Dtype dtype, int64_t i, float* out) {
  for (int v = 0; v < kVecs; ++v, i += kLanes, out += kLanes) {
    if (dtype == Dtype::kFloat32) {
      store(out, load(static_cast<const float*>(row) + i));
    } else if (dtype == Dtype::kFloat16) {
      store(out, load_half(static_cast<const uint16_t*>(row) + i));
    } else {
      const __m128i b =
          _mm_loadu_si128(reinterpret_cast<const __m128i*>(static_cast<const uint16_t*>(row) + i));
      store(out, _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(b), 16)));
    }
  }
}
static inline void store_row16(void* y, Dtype dtype, const float* x) {
  for (int v = 0; v < kVecs; ++v) {
    F f = load(x + v * kLanes);
    f = _mm256_blendv_ps(f, _mm256_castsi256_ps(splat_i(0x7fc00000)), _mm256_cmp_ps(f, f, _CMP_UNORD_Q));
    if (dtype == Dtype::kFloat32) {
      store(static_cast<float*>(y) + v * kLanes, f);
      continue;
    }
    __m128i h;
    if (dtype == Dtype::kFloat16) {
      h = _mm256_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    } else {  // half to even on the upper 16 bits; the quiet NaN stays itself
      const I u = _mm256_castps_si256(f);
      const I odd = _mm256_and_si256(_mm256_srli_epi32(u, 16), splat_i(1));
      const I rounded = _mm256_srli_epi32(add_i(u, add_i(odd, splat_i(0x7fff))), 16);
      const __m256i words = _mm256_permute4x64_epi64(_mm256_packus_epi32(rounded, rounded), 0xd8);
      h = _mm256_castsi256_si128(words);
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(static_cast<uint16_t*>(y) + v * kLanes), h);
  }
}

// Codes as floats: each 32-bit lane of a line holds 4 (8-bit) or 8 (4-bit) columns of one row.
struct FloatW4 {
  static constexpr int kColumns = 8, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    const I code = _mm256_srli_epi32(load_i(line + 32 * v), 8 * (column % 4) + 4 * (column / 4));
    return to_float(_mm256_sub_epi32(_mm256_and_si256(code, splat_i(15)), zero));
  }
};
struct FloatW8 {
  static constexpr int kColumns = 4, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    const I code = _mm256_srli_epi32(load_i(line + 32 * v), 8 * column);
    return to_float(_mm256_sub_epi32(_mm256_and_si256(code, splat_i(255)), zero));
  }
};
struct FloatF16 {
  static constexpr int kColumns = 4, kBytes = 128;
  static constexpr bool kScaled = false;
  static inline F value(const uint8_t* line, int v, int column, I) {
    return load_half(reinterpret_cast<const uint16_t*>(line) + column * kPanel + v * kLanes);
  }
};
