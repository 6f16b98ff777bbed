// AVX-VNNI: 256-bit registers, the dot product in one instruction.
#include "ymm.simd.h"

static inline I splat8(char s) { return _mm256_set1_epi8(s); }
static inline I and_i(I a, I b) { return _mm256_and_si256(a, b); }
static inline I andnot_i(I a, I b) { return _mm256_andnot_si256(a, b); }
static inline I srli16(I v, int bits) { return _mm256_srli_epi16(v, bits); }
static inline I srai(I v, int bits) { return _mm256_srai_epi32(v, bits); }
static inline I dpbusd(I acc, I u, I s) { return _mm256_dpbusd_avx_epi32(acc, u, s); }
#include "vnni.dots.h"
