// AVX-512 with VNNI: a panel line is one register, the four activations of a step come as a memory broadcast.
// 32 registers: 8 rows of x by 2 panels are 16 accumulators, 4 weight vectors, 1 broadcast.
using F = __m512;
using I = __m512i;
constexpr int kLanes = 16, kVecs = kPanel / kLanes, kRowBlock = 8;
constexpr int kPrefetch = 2048;  // bytes ahead, measured: 0.83 -> 0.58 ms with four panels, docs/kernels.md
// Rows of x from which weights are unpacked once for all of them: 4-bit codes to bytes, codes to floats,
// float16 to floats. Measured 2026-11-30, docs/kernels.md.
constexpr int64_t kBytesFrom = kRowBlock + 1, kFloatsFrom = 2 * kRowBlock, kHalvesFrom = 4 * kRowBlock;
template <int MB>
constexpr int int_panels() {
  return MB <= 4 ? 4 : 2;
}
template <int MB>
constexpr int float_panels() {
  return MB <= 4 ? 4 : 2;
}

static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
static inline F splat(float s) { return _mm512_set1_ps(s); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
static inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
static inline F add_f(F a, F b) { return _mm512_add_ps(a, b); }
static inline F sub_f(F a, F b) { return _mm512_sub_ps(a, b); }
static inline F max_f(F a, F b) { return _mm512_max_ps(a, b); }  // b where one is NaN
static inline F div_f(F a, F b) { return _mm512_div_ps(a, b); }
static inline I to_int(F v) { return _mm512_cvtps_epi32(v); }
template <int kStride>  // lane i takes what lane i ^ kStride has
static inline F swap_lanes(F v) {
  if constexpr (kStride < 4)
    return _mm512_permute_ps(v, kStride == 1 ? 0xb1 : 0x4e);
  else
    return _mm512_shuffle_f32x4(v, v, kStride == 4 ? 0xb1 : 0x4e);
}
static inline F power_of_two(I n) {  // 0 for -127
  return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_add_epi32(n, _mm512_set1_epi32(127)), 23));
}
static inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
static inline void store_i(void* p, I v) { _mm512_storeu_si512(p, v); }
static inline I splat_i(int32_t s) { return _mm512_set1_epi32(s); }
static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
static inline I mul_sub(I d, I a, I b) { return _mm512_sub_epi32(d, _mm512_mullo_epi32(a, b)); }
static inline I load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I abs_bits(const float* p) { return _mm512_and_si512(load_i(p), splat_i(0x7fffffff)); }
static inline int32_t reduce_max(I v) { return _mm512_reduce_max_epi32(v); }
static inline int32_t reduce_add(I v) { return _mm512_reduce_add_epi32(v); }
static inline I round_mul(const float* p, F inverse) { return _mm512_cvtps_epi32(mul(load(p), inverse)); }
static inline void store_codes16(int8_t* q, const I* v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(v[0]));
}
static inline void load_row16(const void* row, Dtype dtype, int64_t i, float* out) {
  if (dtype == Dtype::kFloat32) {
    store(out, load(static_cast<const float*>(row) + i));
  } else if (dtype == Dtype::kFloat16) {
    store(out, load_half(static_cast<const uint16_t*>(row) + i));
  } else {
    const __m256i b =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(row) + i));
    store(out, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
}
static inline void store_row16(void* y, Dtype dtype, const float* x) {
  F f = load(x);
  f = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), f,
                           _mm512_castsi512_ps(splat_i(0x7fc00000)));
  if (dtype == Dtype::kFloat32) {
    store(static_cast<float*>(y), f);
    return;
  }
  __m256i h;
  if (dtype == Dtype::kFloat16) {
    h = _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {  // half to even on the upper 16 bits; the quiet NaN stays itself
    const I u = _mm512_castps_si512(f);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), splat_i(1));
    h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(add_i(u, add_i(odd, splat_i(0x7fff))), 16));
  }
  _mm256_storeu_si256(static_cast<__m256i*>(y), h);
}

static inline I splat8(char s) { return _mm512_set1_epi8(s); }
static inline I and_i(I a, I b) { return _mm512_and_si512(a, b); }
static inline I andnot_i(I a, I b) { return _mm512_andnot_si512(a, b); }
static inline I srli16(I v, int bits) { return _mm512_srli_epi16(v, bits); }
static inline I srai(I v, int bits) { return _mm512_srai_epi32(v, bits); }
static inline I dpbusd(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
#include "vnni.dots.h"

// Codes as floats: each 32-bit lane of a line holds 4 (8-bit) or 8 (4-bit) columns of one row.
struct FloatW4 {
  static constexpr int kColumns = 8, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int, int column, I zero) {
    const I code = _mm512_srli_epi32(load_i(line), 8 * (column % 4) + 4 * (column / 4));
    return to_float(_mm512_sub_epi32(_mm512_and_si512(code, splat_i(15)), zero));
  }
};
struct FloatW8 {
  static constexpr int kColumns = 4, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int, int column, I zero) {
    const I code = _mm512_srli_epi32(load_i(line), 8 * column);
    return to_float(_mm512_sub_epi32(_mm512_and_si512(code, splat_i(255)), zero));
  }
};
struct FloatF16 {
  static constexpr int kColumns = 4, kBytes = 128;
  static constexpr bool kScaled = false;
  static inline F value(const uint8_t* line, int, int column, I) {
    return load_half(reinterpret_cast<const uint16_t*>(line) + column * kPanel);
  }
};
