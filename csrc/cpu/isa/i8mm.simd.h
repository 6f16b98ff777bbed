// Armv8.6 int8 matrix products (Neoverse V1 and V2, Apple M2): SMMLA multiplies 8 columns of 2 rows of x by 8
// columns of 2 rows of w, and 16 B of the packed codes are just that. 8 rows by 8 rows are 16 sums [x0w0 x0w1
// x1w0 x1w1].
#include "asimd.simd.h"
constexpr int kRowBlock = 8, kUnit = 8;  // x: [k / 8][rows][8]
constexpr int64_t kExpandFrom = 8, kManyRows = 8;
#include "sdot.simd.h"

template <int MB, int OFFSET>
struct SmmlaTile {
  static constexpr int kM = MB, kRows = 8, kA = (MB + 1) / 2, kB = 4, kXBytes = 16 * MB, kFold = 0;
  static constexpr bool kExpanded = false, kCorrect = true, kBiased = true;
  struct Acc {
    I sum[kA][kB];
  };
  LOWBIT_INLINE void keep(Acc& acc) {
#pragma GCC unroll 4
    for (int i = 0; i < kA; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < kB; ++b) __asm__("" : "+w"(acc.sum[i][b]));
  }
  LOWBIT_INLINE void start(Acc& acc, bool small) {
    const I first = splat_i(small ? kBias : 0);
#pragma GCC unroll 4
    for (int i = 0; i < kA; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < kB; ++b) acc.sum[i][b] = first;
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[kA][kB]) {
#pragma GCC unroll 4
    for (int i = 0; i < kA; ++i)
#pragma GCC unroll 4
      for (int b = 0; b < kB; ++b) d[i][b] = acc.sum[i][b];
  }
  // 8 columns. The last row of an odd number stands for both of its pair.
  LOWBIT_INLINE void eight(Acc& acc, int8x16_t w0, int8x16_t w1, int8x16_t w2, int8x16_t w3,
                           const int8_t* x) {
    int8x16_t two[kA];
#pragma GCC unroll 4
    for (int i = 0; i < kA; ++i)
      two[i] = 2 * i + 1 < MB ? vld1q_s8(x + 16 * i) : vcombine_s8(vld1_s8(x + 16 * i), vld1_s8(x + 16 * i));
#pragma GCC unroll 4
    for (int i = 0; i < kA; ++i) {
      acc.sum[i][0] = vmmlaq_s32(acc.sum[i][0], two[i], w0);
      acc.sum[i][1] = vmmlaq_s32(acc.sum[i][1], two[i], w1);
      acc.sum[i][2] = vmmlaq_s32(acc.sum[i][2], two[i], w2);
      acc.sum[i][3] = vmmlaq_s32(acc.sum[i][3], two[i], w3);
    }
  }
  // What belongs to rows n, n + 1 of w: [n n+1 n n+1]
  LOWBIT_INLINE void scales(const uint8_t* p, bool wide, F (&s)[kB]) {
    if (wide) {
#pragma GCC unroll 2
      for (int b = 0; b < kB; b += 2) {
        const float64x2_t v = vreinterpretq_f64_f32(load(reinterpret_cast<const float*>(p) + 2 * b));
        s[b] = vreinterpretq_f32_f64(vdupq_laneq_f64(v, 0));
        s[b + 1] = vreinterpretq_f32_f64(vdupq_laneq_f64(v, 1));
      }
      return;
    }
    const uint32x4_t v = vreinterpretq_u32_u16(vld1q_u16(reinterpret_cast<const uint16_t*>(p)));
    const float16x8_t low = vreinterpretq_f16_u32(vzip1q_u32(v, v));
    const float16x8_t high = vreinterpretq_f16_u32(vzip2q_u32(v, v));
    s[0] = vcvt_f32_f16(vget_low_f16(low)), s[1] = vcvt_high_f32_f16(low);
    s[2] = vcvt_f32_f16(vget_low_f16(high)), s[3] = vcvt_high_f32_f16(high);
  }
  LOWBIT_INLINE void zeros(const uint8_t* p, I (&z)[kB]) {
    const uint16x4_t v = vreinterpret_u16_u8(vld1_u8(p));
    const uint8x16_t pairs = vreinterpretq_u8_u16(vcombine_u16(vzip1_u16(v, v), vzip2_u16(v, v)));
    const int16x8_t offset = vdupq_n_s16(OFFSET);
    const int16x8_t low = vsubq_s16(vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(pairs))), offset);
    const int16x8_t high = vsubq_s16(vreinterpretq_s16_u16(vmovl_high_u8(pairs)), offset);
    z[0] = vmovl_s16(vget_low_s16(low)), z[1] = vmovl_high_s16(low);
    z[2] = vmovl_s16(vget_low_s16(high)), z[3] = vmovl_high_s16(high);
  }
  // What belongs to rows m, m + 1 of x: [m m m+1 m+1]
  LOWBIT_INLINE I of_x(const int32_t* p, int i) {
    if (2 * i + 1 == MB) return splat_i(p[2 * i]);
    const int32x2_t v = vld1_s32(p + 2 * i);
    return vcombine_s32(vdup_lane_s32(v, 0), vdup_lane_s32(v, 1));
  }
  LOWBIT_INLINE F of_x(const float* p, int i) {
    return vreinterpretq_f32_s32(of_x(reinterpret_cast<const int32_t*>(p), i));
  }
  LOWBIT_INLINE void rows(const F* total, float* out) {
    for (int i = 0; i < kA; ++i)
      for (int b = 0; b < kB; b += 2) {
        const float64x2_t v = vreinterpretq_f64_f32(total[i * kB + b]);
        const float64x2_t w = vreinterpretq_f64_f32(total[i * kB + b + 1]);
        float* row = out + 2 * i * kPanel + 2 * b;
        store(row, vreinterpretq_f32_f64(vzip1q_f64(v, w)));
        if (2 * i + 1 < MB) store(row + kPanel, vreinterpretq_f32_f64(vzip2q_f64(v, w)));
      }
  }
};

template <int MB>
struct SmmlaFew4 : SmmlaTile<MB, 0> {
  static constexpr int kColumnBytes = 8, kStepBytes = 128;
  LOWBIT_INLINE void dot(typename SmmlaFew4::Acc& acc, const uint8_t* w, const int8_t* x) {
    const uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + 16), c = vld1q_u8(w + 32), d = vld1q_u8(w + 48);
    SmmlaFew4::eight(acc, low_nibbles(a), low_nibbles(b), low_nibbles(c), low_nibbles(d), x);
    SmmlaFew4::eight(acc, high_nibbles(a), high_nibbles(b), high_nibbles(c), high_nibbles(d), x + 8 * MB);
  }
};
template <int MB>
struct SmmlaFew8 : SmmlaTile<MB, 128> {
  static constexpr int kColumnBytes = 16, kStepBytes = 256;
  LOWBIT_INLINE void dot(typename SmmlaFew8::Acc& acc, const uint8_t* w, const int8_t* x) {
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h, w += 128, x += 8 * MB)
      SmmlaFew8::eight(acc, less128(vld1q_u8(w)), less128(vld1q_u8(w + 16)), less128(vld1q_u8(w + 32)),
                       less128(vld1q_u8(w + 48)), x);
  }
};

// An expanded panel is [2 parts][k / 8][8 rows][8].
template <int MB, int BYTES>
struct SmmlaMany : SmmlaTile<MB, 128> {
  static constexpr int kColumnBytes = BYTES, kStepBytes = 128;
  static constexpr bool kExpanded = true, kCorrect = BYTES == 16;
  LOWBIT_INLINE void dot(typename SmmlaMany::Acc& acc, const uint8_t* w, const int8_t* x) {
    const auto* v = reinterpret_cast<const int8_t*>(w);
#pragma GCC unroll 2
    for (int h = 0; h < 2; ++h, v += 64, x += 8 * MB)
      SmmlaMany::eight(acc, vld1q_s8(v), vld1q_s8(v + 16), vld1q_s8(v + 32), vld1q_s8(v + 48), x);
  }
};

struct W4 {
  static constexpr int kMaxCode = 15;
  using One = SdotOne4;
  template <int MB>
  using Few = SmmlaFew4<MB>;
  template <int MB>
  using Many = SmmlaMany<MB, 8>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t* zeros, int64_t columns, int8_t* out,
                            int64_t part) {
    int8x16_t z[8];
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p)
      z[p] = vreinterpretq_s8_u8(vcombine_u8(vdup_n_u8(zeros[2 * p]), vdup_n_u8(zeros[2 * p + 1])));
    for (int64_t k = 0; k < columns; k += 16, w += 128, out += 128)
#pragma GCC unroll 8
      for (int p = 0; p < 8; ++p) {
        const uint8x16_t c = vld1q_u8(w + 16 * p);
        int8_t* o = out + p / 4 * part + p % 4 * 16;
        vst1q_s8(o, vsubq_s8(low_nibbles(c), z[p]));
        vst1q_s8(o + 64, vsubq_s8(high_nibbles(c), z[p]));
      }
  }
};
using W4Stream = W4;

struct W8 {
  static constexpr int kMaxCode = 255;
  using One = SdotOne8;
  template <int MB>
  using Few = SmmlaFew8<MB>;
  template <int MB>
  using Many = SmmlaMany<MB, 16>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t*, int64_t columns, int8_t* out, int64_t part) {
    for (int64_t k = 0; k < columns; k += 8, w += 128, out += 64)
#pragma GCC unroll 8
      for (int p = 0; p < 8; ++p) vst1q_s8(out + p / 4 * part + p % 4 * 16, less128(vld1q_u8(w + 16 * p)));
  }
};
