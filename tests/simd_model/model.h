// What AVX-VNNI and AVX-512 do, on a CPU that has AVX2 only. Force-included (-include) in front of an
// isa/<set>.cpp: a 512-bit register is a pair of 256-bit ones, so that fma, conversions and roundings are
// those of real instructions; what AVX2 has no instruction for (vpdpbusd, vpmovdb, vpmovdw, mask blends) is
// written out lane by lane from its definition. A test aid: nothing of it is in the package. LOWBIT_BREAK_*
// put one mistake in, to see that it is noticed.
#pragma once
#include <immintrin.h>

#include <cstdint>
#include <cstring>

namespace model {

struct F512 {
  __m256 half[2];
};
struct I512 {
  __m256i half[2];
};
using Mask16 = uint16_t;

template <class Op>
static inline F512 each_f(Op op) {
  return {{op(0), op(1)}};
}
template <class Op>
static inline I512 each_i(Op op) {
  return {{op(0), op(1)}};
}
template <class T, class V>
static inline void out(T (&lane)[sizeof(V) / sizeof(T)], const V& v) {
  std::memcpy(lane, &v, sizeof v);
}

// acc + a0*b0 + a1*b1 + a2*b2 + a3*b3 a lane; a unsigned bytes, b signed bytes; wraps, does not saturate.
template <class V>
static inline V dpbusd(V acc, V a, V b) {
  int32_t sum[sizeof(V) / 4];
  uint8_t u[sizeof(V)];
  int8_t s[sizeof(V)];
  out<int32_t, V>(sum, acc), out<uint8_t, V>(u, a), out<int8_t, V>(s, b);
  for (unsigned i = 0; i < sizeof(V); ++i)
    sum[i / 4] = static_cast<int32_t>(static_cast<uint32_t>(sum[i / 4]) + static_cast<uint32_t>(u[i] * s[i]));
#if defined(LOWBIT_BREAK_SATURATE)
  for (int32_t& v : sum) v = v > 32767 ? 32767 : v < -32768 ? -32768 : v;
#endif
  std::memcpy(&acc, sum, sizeof acc);
  return acc;
}

template <class To, class V>  // vpmovdb, vpmovdw: the low bits of each lane, no saturation
static inline V truncate(const I512& a) {
  int32_t lane[16];
  out<int32_t, I512>(lane, a);
  To low[16];
  for (int i = 0; i < 16; ++i) low[i] = static_cast<To>(lane[i]);
  V v;
  static_assert(sizeof v == sizeof low, "sixteen lanes");
  std::memcpy(&v, low, sizeof v);
  return v;
}

static inline F512 loadu_ps(const void* p) {
  const float* f = static_cast<const float*>(p);
  return each_f([=](int h) { return _mm256_loadu_ps(f + 8 * h); });
}
static inline I512 loadu_si512(const void* p) {
  const __m256i* v = static_cast<const __m256i*>(p);
  return each_i([=](int h) { return _mm256_loadu_si256(v + h); });
}
static inline void storeu_ps(void* p, const F512& v) {
  for (int h = 0; h < 2; ++h) _mm256_storeu_ps(static_cast<float*>(p) + 8 * h, v.half[h]);
}
static inline void storeu_si512(void* p, const I512& v) {
  for (int h = 0; h < 2; ++h) _mm256_storeu_si256(static_cast<__m256i*>(p) + h, v.half[h]);
}
static inline F512 set1_ps(float s) {
  return each_f([=](int) { return _mm256_set1_ps(s); });
}
static inline I512 set1_epi32(int s) {
  return each_i([=](int) { return _mm256_set1_epi32(s); });
}
static inline I512 set1_epi16(short s) {
  return each_i([=](int) { return _mm256_set1_epi16(s); });
}
static inline I512 set1_epi8(char s) {
  return each_i([=](int) { return _mm256_set1_epi8(s); });
}
static inline F512 castsi512_ps(const I512& a) {
  return each_f([&](int h) { return _mm256_castsi256_ps(a.half[h]); });
}
static inline I512 castps_si512(const F512& a) {
  return each_i([&](int h) { return _mm256_castps_si256(a.half[h]); });
}
static inline F512 mul_ps(const F512& a, const F512& b) {
  return each_f([&](int h) { return _mm256_mul_ps(a.half[h], b.half[h]); });
}
static inline F512 add_ps(const F512& a, const F512& b) {
  return each_f([&](int h) { return _mm256_add_ps(a.half[h], b.half[h]); });
}
static inline F512 sub_ps(const F512& a, const F512& b) {
  return each_f([&](int h) { return _mm256_sub_ps(a.half[h], b.half[h]); });
}
// Lane i of every four lanes takes lane `order` >> 2 i & 3 of these four.
template <int order>
static inline F512 permute_ps(const F512& a) {
  return each_f([&](int h) { return _mm256_permute_ps(a.half[h], order); });
}
// Four lanes at a time: the first two of these blocks come from a, the last two from b.
template <int order>
static inline F512 shuffle_f32x4(const F512& a, const F512& b) {
  float from[2][16], to[16];
  out(from[0], a), out(from[1], b);
  for (int i = 0; i < 4; ++i) std::memcpy(to + 4 * i, from[i / 2] + (order >> 2 * i & 3) * 4, 16);
  return loadu_ps(to);
}
static inline F512 max_ps(const F512& a, const F512& b) {
  return each_f([&](int h) { return _mm256_max_ps(a.half[h], b.half[h]); });
}
static inline F512 div_ps(const F512& a, const F512& b) {
  return each_f([&](int h) { return _mm256_div_ps(a.half[h], b.half[h]); });
}
static inline F512 fmadd_ps(const F512& a, const F512& b, const F512& c) {
#if defined(LOWBIT_BREAK_FMA)
  return add_ps(mul_ps(a, b), c);
#else
  return each_f([&](int h) { return _mm256_fmadd_ps(a.half[h], b.half[h], c.half[h]); });
#endif
}
static inline F512 fnmadd_ps(const F512& a, const F512& b, const F512& c) {
  return each_f([&](int h) { return _mm256_fnmadd_ps(a.half[h], b.half[h], c.half[h]); });
}
static inline F512 cvtepi32_ps(const I512& a) {
  return each_f([&](int h) { return _mm256_cvtepi32_ps(a.half[h]); });
}
static inline I512 cvtps_epi32(const F512& a) {
#if defined(LOWBIT_BREAK_ROUND)
  return each_i([&](int h) { return _mm256_cvttps_epi32(a.half[h]); });
#else
  return each_i([&](int h) { return _mm256_cvtps_epi32(a.half[h]); });
#endif
}
static inline F512 cvtph_ps(__m256i a) {
  return {{_mm256_cvtph_ps(_mm256_castsi256_si128(a)), _mm256_cvtph_ps(_mm256_extracti128_si256(a, 1))}};
}
template <int kRounding>
static inline __m256i cvtps_ph(const F512& a) {
  return _mm256_set_m128i(_mm256_cvtps_ph(a.half[1], kRounding), _mm256_cvtps_ph(a.half[0], kRounding));
}
static inline I512 cvtepu8_epi32(__m128i a) {
  return {{_mm256_cvtepu8_epi32(a), _mm256_cvtepu8_epi32(_mm_srli_si128(a, 8))}};
}
static inline I512 cvtepu16_epi32(__m256i a) {
  return {{_mm256_cvtepu16_epi32(_mm256_castsi256_si128(a)),
           _mm256_cvtepu16_epi32(_mm256_extracti128_si256(a, 1))}};
}
#define LOWBIT_MODEL_INTEGER(NAME, OP)                              \
  static inline I512 NAME(const I512& a, const I512& b) {           \
    return each_i([&](int h) { return OP(a.half[h], b.half[h]); }); \
  }
LOWBIT_MODEL_INTEGER(add_epi32, _mm256_add_epi32)
LOWBIT_MODEL_INTEGER(sub_epi32, _mm256_sub_epi32)
LOWBIT_MODEL_INTEGER(sub_epi8, _mm256_sub_epi8)
LOWBIT_MODEL_INTEGER(mullo_epi32, _mm256_mullo_epi32)
LOWBIT_MODEL_INTEGER(max_epi32, _mm256_max_epi32)
LOWBIT_MODEL_INTEGER(and_si512, _mm256_and_si256)
LOWBIT_MODEL_INTEGER(or_si512, _mm256_or_si256)
LOWBIT_MODEL_INTEGER(xor_si512, _mm256_xor_si256)
LOWBIT_MODEL_INTEGER(andnot_si512, _mm256_andnot_si256)
#undef LOWBIT_MODEL_INTEGER
#define LOWBIT_MODEL_SHIFT(NAME, OP)                            \
  static inline I512 NAME(const I512& a, int count) {           \
    return each_i([&](int h) { return OP(a.half[h], count); }); \
  }
LOWBIT_MODEL_SHIFT(srli_epi32, _mm256_srli_epi32)
LOWBIT_MODEL_SHIFT(slli_epi32, _mm256_slli_epi32)
LOWBIT_MODEL_SHIFT(srai_epi32, _mm256_srai_epi32)
LOWBIT_MODEL_SHIFT(srli_epi16, _mm256_srli_epi16)
#undef LOWBIT_MODEL_SHIFT
static inline int32_t reduce_max_epi32(const I512& a) {
  int32_t lane[16];
  out<int32_t, I512>(lane, a);
  int32_t top = lane[0];
  for (int32_t v : lane) top = v > top ? v : top;
  return top;
}
static inline int32_t reduce_add_epi32(const I512& a) {
  int32_t lane[16];
  out<int32_t, I512>(lane, a);
  uint32_t sum = 0;
  for (int32_t v : lane) sum += static_cast<uint32_t>(v);
  return static_cast<int32_t>(sum);
}
template <int kCompare>
static inline Mask16 cmp_ps_mask(const F512& a, const F512& b) {
  unsigned mask = 0;
  for (int h = 0; h < 2; ++h)
    mask |= static_cast<unsigned>(_mm256_movemask_ps(_mm256_cmp_ps(a.half[h], b.half[h], kCompare))) << 8 * h;
  return static_cast<Mask16>(mask);
}
static inline F512 mask_blend_ps(Mask16 mask, const F512& a, const F512& b) {  // b where the mask is set
  float x[16], y[16];
  out<float, F512>(x, a), out<float, F512>(y, b);
  for (int i = 0; i < 16; ++i)
    if (mask >> i & 1) x[i] = y[i];
#if defined(LOWBIT_BREAK_NAN)
  return a;
#endif
  return loadu_ps(x);
}

}  // namespace model

#define _mm256_dpbusd_avx_epi32 model::dpbusd<__m256i>
#if defined(LOWBIT_MODEL_AVX512)
#define __m512 model::F512
#define __m512i model::I512
#define __mmask16 model::Mask16
#define _mm512_dpbusd_epi32 model::dpbusd<model::I512>
#define _mm512_cvtepi32_epi8 model::truncate<int8_t, __m128i>
#define _mm512_cvtepi32_epi16 model::truncate<int16_t, __m256i>
#undef _mm512_cvtps_ph
#undef _mm512_permute_ps
#undef _mm512_shuffle_f32x4
#undef _mm512_cmp_ps_mask
#define _mm512_cvtps_ph(a, rounding) model::cvtps_ph<(rounding)>(a)
#define _mm512_cmp_ps_mask(a, b, compare) model::cmp_ps_mask<(compare)>(a, b)
#define _mm512_loadu_ps model::loadu_ps
#define _mm512_loadu_si512 model::loadu_si512
#define _mm512_storeu_ps model::storeu_ps
#define _mm512_storeu_si512 model::storeu_si512
#define _mm512_set1_ps model::set1_ps
#define _mm512_set1_epi32 model::set1_epi32
#define _mm512_set1_epi16 model::set1_epi16
#define _mm512_set1_epi8 model::set1_epi8
#define _mm512_castsi512_ps model::castsi512_ps
#define _mm512_castps_si512 model::castps_si512
#define _mm512_mul_ps model::mul_ps
#define _mm512_add_ps model::add_ps
#define _mm512_sub_ps model::sub_ps
#define _mm512_permute_ps(a, order) model::permute_ps<(order)>(a)
#define _mm512_shuffle_f32x4(a, b, order) model::shuffle_f32x4<(order)>(a, b)
#define _mm512_max_ps model::max_ps
#define _mm512_div_ps model::div_ps
#define _mm512_fmadd_ps model::fmadd_ps
#define _mm512_fnmadd_ps model::fnmadd_ps
#define _mm512_cvtepi32_ps model::cvtepi32_ps
#define _mm512_cvtps_epi32 model::cvtps_epi32
#define _mm512_cvtph_ps model::cvtph_ps
#define _mm512_cvtepu8_epi32 model::cvtepu8_epi32
#define _mm512_cvtepu16_epi32 model::cvtepu16_epi32
#define _mm512_add_epi32 model::add_epi32
#define _mm512_sub_epi32 model::sub_epi32
#define _mm512_sub_epi8 model::sub_epi8
#define _mm512_mullo_epi32 model::mullo_epi32
#define _mm512_max_epi32 model::max_epi32
#define _mm512_and_si512 model::and_si512
#define _mm512_or_si512 model::or_si512
#define _mm512_xor_si512 model::xor_si512
#define _mm512_andnot_si512 model::andnot_si512
#undef _mm512_srli_epi32
#undef _mm512_slli_epi32
#undef _mm512_srai_epi32
#undef _mm512_srli_epi16
#define _mm512_srli_epi32 model::srli_epi32
#define _mm512_slli_epi32 model::slli_epi32
#define _mm512_srai_epi32 model::srai_epi32
#define _mm512_srli_epi16 model::srli_epi16
#define _mm512_reduce_max_epi32 model::reduce_max_epi32
#define _mm512_reduce_add_epi32 model::reduce_add_epi32
#define _mm512_mask_blend_ps model::mask_blend_ps
#endif
