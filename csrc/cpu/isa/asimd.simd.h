// 128-bit verbs that neon, dotprod and i8mm share: everything but the dot products.
#define LOWBIT_INLINE static inline __attribute__((always_inline))
using F = float32x4_t;
using I = int32x4_t;
constexpr int kLanes = 4, kVecs = kPanel / kLanes;
constexpr int64_t kBlockBytes = 256 << 10;  // of x beside one panel: half of the 512 KB L2 of a Cortex-A76

LOWBIT_INLINE F load(const float* p) { return vld1q_f32(p); }
LOWBIT_INLINE void store(float* p, F v) { vst1q_f32(p, v); }
LOWBIT_INLINE F splat(float s) { return vdupq_n_f32(s); }
LOWBIT_INLINE F mul(F a, F b) { return vmulq_f32(a, b); }
LOWBIT_INLINE F fma(F a, F b, F c) { return vfmaq_f32(c, a, b); }
LOWBIT_INLINE F to_float(I v) { return vcvtq_f32_s32(v); }
LOWBIT_INLINE F add_f(F a, F b) { return vaddq_f32(a, b); }
LOWBIT_INLINE F sub_f(F a, F b) { return vsubq_f32(a, b); }
LOWBIT_INLINE F max_f(F a, F b) { return vmaxq_f32(a, b); }  // NaN where one is NaN
LOWBIT_INLINE F div_f(F a, F b) { return vdivq_f32(a, b); }
LOWBIT_INLINE I to_int(F v) { return vcvtnq_s32_f32(v); }
template <int kStride>  // lane i takes what lane i ^ kStride has
LOWBIT_INLINE F swap_lanes(F v) {
  return kStride == 1 ? vrev64q_f32(v) : vextq_f32(v, v, 2);
}
LOWBIT_INLINE F power_of_two(I n) {  // 0 for -127
  return vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(n, vdupq_n_s32(127)), 23));
}
LOWBIT_INLINE F load_half(const uint16_t* p) { return vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(p))); }
LOWBIT_INLINE I splat_i(int32_t s) { return vdupq_n_s32(s); }
LOWBIT_INLINE I add_i(I a, I b) { return vaddq_s32(a, b); }
LOWBIT_INLINE I max_i(I a, I b) { return vmaxq_s32(a, b); }
LOWBIT_INLINE I mul_sub(I d, I a, I b) { return vmlsq_s32(d, a, b); }
LOWBIT_INLINE I load_u8(const uint8_t* p) {
  uint32_t four;
  __builtin_memcpy(&four, p, 4);
  const uint16x8_t words = vmovl_u8(vreinterpret_u8_u32(vdup_n_u32(four)));
  return vreinterpretq_s32_u32(vmovl_u16(vget_low_u16(words)));
}
LOWBIT_INLINE I abs_bits(const float* p) {
  return vandq_s32(vreinterpretq_s32_f32(load(p)), splat_i(0x7fffffff));
}
LOWBIT_INLINE int32_t reduce_max(I v) { return vmaxvq_s32(v); }
LOWBIT_INLINE int32_t reduce_add(I v) { return vaddvq_s32(v); }
LOWBIT_INLINE I round_mul(const float* p, F inverse) { return vcvtnq_s32_f32(mul(load(p), inverse)); }
LOWBIT_INLINE void store_codes16(int8_t* q, const I* v) {
  const int16x8_t low = vuzp1q_s16(vreinterpretq_s16_s32(v[0]), vreinterpretq_s16_s32(v[1]));
  const int16x8_t high = vuzp1q_s16(vreinterpretq_s16_s32(v[2]), vreinterpretq_s16_s32(v[3]));
  vst1q_s8(q, vuzp1q_s8(vreinterpretq_s8_s16(low), vreinterpretq_s8_s16(high)));
}
LOWBIT_INLINE void load_row16(const void* row, Dtype dtype, int64_t i, float* out) {
  for (int v = 0; v < kVecs; ++v, i += kLanes, out += kLanes) {
    if (dtype == Dtype::kFloat32)
      store(out, load(static_cast<const float*>(row) + i));
    else if (dtype == Dtype::kFloat16)
      store(out, load_half(static_cast<const uint16_t*>(row) + i));
    else
      store(out, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(static_cast<const uint16_t*>(row) + i), 16)));
  }
}
LOWBIT_INLINE void store_row16(void* y, Dtype dtype, const float* x) {
  for (int v = 0; v < kVecs; ++v) {
    F f = load(x + v * kLanes);
    f = vbslq_f32(vceqq_f32(f, f), f, vreinterpretq_f32_s32(splat_i(0x7fc00000)));
    if (dtype == Dtype::kFloat32) {
      store(static_cast<float*>(y) + v * kLanes, f);
      continue;
    }
    uint16x4_t h;
    if (dtype == Dtype::kFloat16) {
      h = vreinterpret_u16_f16(vcvt_f16_f32(f));
    } else {  // half to even on the upper 16 bits; the quiet NaN stays itself
      const uint32x4_t u = vreinterpretq_u32_f32(f);
      const uint32x4_t odd = vandq_u32(vshrq_n_u32(u, 16), vdupq_n_u32(1));
      h = vshrn_n_u32(vaddq_u32(u, vaddq_u32(odd, vdupq_n_u32(0x7fff))), 16);
    }
    vst1_u16(static_cast<uint16_t*>(y) + v * kLanes, h);
  }
}

// An int32 sum that started at the bits of 1.5 * 2^23 reads, as a float, 1.5 * 2^23 + sum while |sum| < 2^22:
// one fsub gives float(sum) exactly, where scvtf has a quarter of its rate on Cortex-A76 and half on Neoverse
// V1.
constexpr int32_t kBias = 0x4b400000;
LOWBIT_INLINE F to_float_biased(I v) { return vsubq_f32(vreinterpretq_f32_s32(v), splat(12582912.f)); }

// 8 columns after 8 columns, each stored twice: one row of x meets 2 rows of w in a register.
LOWBIT_INLINE void repeat8(const int8_t* x, int64_t n, int8_t* twice) {
  for (int64_t j = 0; j < n; j += 16) {
    const int64x2_t v = vreinterpretq_s64_s8(vld1q_s8(x + j));
    vst1q_s8(twice + 2 * j, vreinterpretq_s8_s64(vdupq_laneq_s64(v, 0)));
    vst1q_s8(twice + 2 * j + 16, vreinterpretq_s8_s64(vdupq_laneq_s64(v, 1)));
  }
}

LOWBIT_INLINE int8x16_t low_nibbles(uint8x16_t c) { return vreinterpretq_s8_u8(vandq_u8(c, vdupq_n_u8(15))); }
LOWBIT_INLINE int8x16_t high_nibbles(uint8x16_t c) { return vreinterpretq_s8_u8(vshrq_n_u8(c, 4)); }
LOWBIT_INLINE int8x16_t less128(uint8x16_t c) { return vreinterpretq_s8_u8(veorq_u8(c, vdupq_n_u8(128))); }

// What every tile has whose vectors of sums are 4 rows of w by one row of x. kOffset: what the dot product
// saw is the code less this.
template <int MB, int ROWS, int OFFSET>
struct RowTile {
  static constexpr int kM = MB, kRows = ROWS, kA = MB, kB = ROWS / 4, kXBytes = 16 * MB, kFold = 0;
  static constexpr bool kExpanded = false, kCorrect = true, kBiased = true;
  LOWBIT_INLINE void scales(const uint8_t* p, bool wide, F (&s)[kB]) {
    if (wide) {
      for (int b = 0; b < kB; ++b) s[b] = load(reinterpret_cast<const float*>(p) + 4 * b);
    } else if constexpr (kB == 1) {
      s[0] = load_half(reinterpret_cast<const uint16_t*>(p));
    } else {
      for (int b = 0; b < kB; b += 2) {
        const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p) + 4 * b));
        s[b] = vcvt_f32_f16(vget_low_f16(h));
        s[b + 1] = vcvt_high_f32_f16(h);
      }
    }
  }
  LOWBIT_INLINE void zeros(const uint8_t* p, I (&z)[kB]) {
    if constexpr (kB == 1) {
      z[0] = add_i(load_u8(p), splat_i(-OFFSET));
    } else {
      for (int b = 0; b < kB; b += 2) {
        int16x8_t words = vreinterpretq_s16_u16(vmovl_u8(vld1_u8(p + 4 * b)));
        if constexpr (OFFSET != 0) words = vsubq_s16(words, vdupq_n_s16(OFFSET));
        z[b] = vmovl_s16(vget_low_s16(words));
        z[b + 1] = vmovl_high_s16(words);
      }
    }
  }
  template <class A>
  LOWBIT_INLINE void keep(A&) {}
  LOWBIT_INLINE I of_x(const int32_t* p, int m) { return splat_i(p[m]); }
  LOWBIT_INLINE F of_x(const float* p, int m) { return splat(p[m]); }
  LOWBIT_INLINE void rows(const F* total, float* out) {
    for (int m = 0; m < MB; ++m)
      for (int b = 0; b < kB; ++b) store(out + m * kPanel + 4 * b, total[m * kB + b]);
  }
};

// Lanes AT .. END - 1 of x ([columns][MB]), of one column, times its VECS vectors of w.
template <int MB, int VECS, int AT, int END>
LOWBIT_INLINE void float_lanes(F (&part)[MB][VECS], const F (&w)[VECS], const F (&x)[MB]) {
  if constexpr (AT < END) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v)
      part[AT % MB][v] = vfmaq_laneq_f32(part[AT % MB][v], w[v], x[AT / 4], AT % 4);
    float_lanes<MB, VECS, AT + 1, END>(part, w, x);
  }
}

// 2 rows x 8 columns of two pairs to 4 rows x 4 columns: the first columns, or the last.
LOWBIT_INLINE uint8x16_t first4(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u32(vuzp1q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}
LOWBIT_INLINE uint8x16_t last4(uint8x16_t a, uint8x16_t b) {
  return vreinterpretq_u8_u32(vuzp2q_u32(vreinterpretq_u32_u8(a), vreinterpretq_u32_u8(b)));
}

// Codes as floats: 4 columns of 4 rows are a 32-bit lane each row, as a line of the x86 panels has them.
LOWBIT_INLINE uint32x4_t four_columns(const uint8_t* two_pairs, bool last) {
  const uint8x16_t a = vld1q_u8(two_pairs), b = vld1q_u8(two_pairs + 16);
  return vreinterpretq_u32_u8(last ? last4(a, b) : first4(a, b));
}
struct FloatW4 {
  static constexpr int kColumns = 16, kBytes = 128;
  static constexpr bool kScaled = true;
  template <int VECS>
  LOWBIT_INLINE void values(const uint8_t* line, int first, int column, const I* zero, F (&w)[VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      const uint32x4_t codes = four_columns(line + 32 * (first + v), column & 4);
      const uint32x4_t code = codes >> (8 * (column % 4) + column / 8 * 4) & vdupq_n_u32(15);
      w[v] = to_float(vsubq_s32(vreinterpretq_s32_u32(code), zero[v]));
    }
  }
};
struct FloatW8 {
  static constexpr int kColumns = 8, kBytes = 128;
  static constexpr bool kScaled = true;
  template <int VECS>
  LOWBIT_INLINE void values(const uint8_t* line, int first, int column, const I* zero, F (&w)[VECS]) {
#pragma GCC unroll 4
    for (int v = 0; v < VECS; ++v) {
      const uint32x4_t codes = four_columns(line + 32 * (first + v), column & 4);
      const uint32x4_t code = codes >> 8 * (column % 4) & vdupq_n_u32(255);
      w[v] = to_float(vsubq_s32(vreinterpretq_s32_u32(code), zero[v]));
    }
  }
};
struct FloatF16 {
  static constexpr int kColumns = 4, kBytes = 128;
  static constexpr bool kScaled = false;
  template <int VECS>
  LOWBIT_INLINE void values(const uint8_t* line, int first, int column, const I*, F (&w)[VECS]) {
#pragma GCC unroll 2
    for (int v = 0; v < VECS; v += 2) {
      const auto* p = reinterpret_cast<const uint16_t*>(line) + column * kPanel + (first + v) * kLanes;
      const float16x8_t h = vreinterpretq_f16_u16(vld1q_u16(p));
      w[v] = vcvt_f32_f16(vget_low_f16(h)), w[v + 1] = vcvt_high_f32_f16(h);
    }
  }
};
