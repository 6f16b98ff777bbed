// Armv8.0 (Cortex-A53, A72). 4 bit: 8-bit products add up in int16 lanes; 16 of them, that is 128 columns,
// stay within 16 * 15 * 127 = 30 480, and then widen to int32. 8 bit: two products fit (2 * 128 * 127 = 32
// 512). 32 registers: 4 rows by 4 rows are 16 sums, 4 of w, 4 of x.
#include "asimd.simd.h"
constexpr int kRowBlock = 4, kUnit = 16;  // x: [k / 16][rows][16]
constexpr int64_t kExpandFrom = 8, kManyRows = 4;

using Short = int16x8_t;
LOWBIT_INLINE Short mul_low(Short acc, int8x16_t a, int8x16_t b) {
  return vmlal_s8(acc, vget_low_s8(a), vget_low_s8(b));
}
LOWBIT_INLINE Short mul_high(Short acc, int8x16_t a, int8x16_t b) { return vmlal_high_s8(acc, a, b); }
LOWBIT_INLINE I add4(I a, I b, I c, I d) { return vpaddq_s32(vpaddq_s32(a, b), vpaddq_s32(c, d)); }
LOWBIT_INLINE I add4(const Short* p) {
  return add4(vpaddlq_s16(p[0]), vpaddlq_s16(p[1]), vpaddlq_s16(p[2]), vpaddlq_s16(p[3]));
}

// One row of x, `twice`: the lower half of a product is the even row of a pair, the upper half the odd one.
struct NeonOne4 : RowTile<1, 16, 0> {
  static constexpr int kXBytes = 32, kColumnBytes = 8, kStepBytes = 128, kFold = 128;
  static constexpr bool kBiased = false;  // scvtf costs no more than fsub here
  struct Acc {
    Short row[16];
  };
  LOWBIT_INLINE void start(Acc& acc, bool) {
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc.row[n] = vdupq_n_s16(0);
  }
  LOWBIT_INLINE void dot(Acc& acc, const uint8_t* w, const int8_t* x) {
    const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p) {
      const uint8x16_t c = vld1q_u8(w + 16 * p);
      const int8x16_t w0 = low_nibbles(c), w1 = high_nibbles(c);
      acc.row[2 * p] = mul_low(acc.row[2 * p], w0, x0);
      acc.row[2 * p + 1] = mul_high(acc.row[2 * p + 1], w0, x0);
      acc.row[2 * p] = mul_low(acc.row[2 * p], w1, x1);
      acc.row[2 * p + 1] = mul_high(acc.row[2 * p + 1], w1, x1);
    }
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[1][4]) {
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) d[0][b] = add4(acc.row + 4 * b);
  }
};
struct NeonOne8 : RowTile<1, 16, 128> {
  static constexpr int kXBytes = 32, kColumnBytes = 16, kStepBytes = 256;
  static constexpr bool kBiased = false;
  struct Acc {
    I row[16];
  };
  LOWBIT_INLINE void start(Acc& acc, bool) {
#pragma GCC unroll 16
    for (int n = 0; n < 16; ++n) acc.row[n] = splat_i(0);
  }
  LOWBIT_INLINE void dot(Acc& acc, const uint8_t* w, const int8_t* x) {
    const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p) {
      const int8x16_t w0 = less128(vld1q_u8(w + 16 * p)), w1 = less128(vld1q_u8(w + 128 + 16 * p));
      const Short even = mul_low(vmull_s8(vget_low_s8(w0), vget_low_s8(x0)), w1, x1);
      const Short odd = mul_high(vmull_high_s8(w0, x0), w1, x1);
      acc.row[2 * p] = vpadalq_s16(acc.row[2 * p], even);
      acc.row[2 * p + 1] = vpadalq_s16(acc.row[2 * p + 1], odd);
    }
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[1][4]) {
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b)
      d[0][b] = add4(acc.row[4 * b], acc.row[4 * b + 1], acc.row[4 * b + 2], acc.row[4 * b + 3]);
  }
};

// Rows of x by 4 rows of w, 16 columns a register on both sides.
template <int MB>
struct NeonTile4 : RowTile<MB, 4, 0> {
  template <class A>
  LOWBIT_INLINE void keep(A& acc) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) __asm__("" : "+w"(acc.sum[m][n]));
  }
  static constexpr int kColumnBytes = 8, kFold = 128;
  static constexpr bool kBiased = false;
  struct Acc {
    Short sum[MB][4];
  };
  LOWBIT_INLINE void start(Acc& acc, bool) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc.sum[m][n] = vdupq_n_s16(0);
  }
  LOWBIT_INLINE void add(Acc& acc, const int8x16_t (&w)[4], const int8_t* x) {
    int8x16_t row[MB];
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) row[m] = vld1q_s8(x + 16 * m);
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) {
      const int8x16_t v = row[m];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc.sum[m][n] = mul_low(acc.sum[m][n], w[n], v);
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc.sum[m][n] = mul_high(acc.sum[m][n], w[n], v);
    }
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[MB][1]) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) d[m][0] = add4(acc.sum[m]);
  }
};
template <int MB>
struct NeonTile8 : RowTile<MB, 4, 128> {
  template <class A>
  LOWBIT_INLINE void keep(A& acc) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) __asm__("" : "+w"(acc.sum[m][n]));
  }
  static constexpr int kColumnBytes = 16;
  static constexpr bool kBiased = false;
  struct Acc {
    I sum[MB][4];
  };
  LOWBIT_INLINE void start(Acc& acc, bool) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m)
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n) acc.sum[m][n] = splat_i(0);
  }
  LOWBIT_INLINE void add(Acc& acc, const int8x16_t (&w)[4], const int8_t* x) {
    int8x16_t row[MB];
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) row[m] = vld1q_s8(x + 16 * m);
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) {
      const int8x16_t v = row[m];
#pragma GCC unroll 4
      for (int n = 0; n < 4; ++n)
        acc.sum[m][n] =
            vpadalq_s16(acc.sum[m][n], mul_high(vmull_s8(vget_low_s8(w[n]), vget_low_s8(v)), w[n], v));
    }
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[MB][1]) {
#pragma GCC unroll 4
    for (int m = 0; m < MB; ++m) d[m][0] = add4(acc.sum[m][0], acc.sum[m][1], acc.sum[m][2], acc.sum[m][3]);
  }
};

// Columns 0-7 and 8-15 of two rows to 16 columns of each.
LOWBIT_INLINE void join(int8x16_t first, int8x16_t last, int8x16_t& even, int8x16_t& odd) {
  const int64x2_t a = vreinterpretq_s64_s8(first), b = vreinterpretq_s64_s8(last);
  even = vreinterpretq_s8_s64(vzip1q_s64(a, b));
  odd = vreinterpretq_s8_s64(vzip2q_s64(a, b));
}
template <int MB>
struct NeonFew4 : NeonTile4<MB> {
  static constexpr int kStepBytes = 128;
  LOWBIT_INLINE void dot(typename NeonFew4::Acc& acc, const uint8_t* w, const int8_t* x) {
    const uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + 16);
    int8x16_t row[4];
    join(low_nibbles(a), high_nibbles(a), row[0], row[1]);
    join(low_nibbles(b), high_nibbles(b), row[2], row[3]);
    NeonFew4::add(acc, row, x);
  }
};
template <int MB>
struct NeonFew8 : NeonTile8<MB> {
  static constexpr int kStepBytes = 256;
  LOWBIT_INLINE void dot(typename NeonFew8::Acc& acc, const uint8_t* w, const int8_t* x) {
    int8x16_t row[4];
    join(less128(vld1q_u8(w)), less128(vld1q_u8(w + 128)), row[0], row[1]);
    join(less128(vld1q_u8(w + 16)), less128(vld1q_u8(w + 144)), row[2], row[3]);
    NeonFew8::add(acc, row, x);
  }
};

// An expanded panel is [4 parts][k / 16][4 rows][16].
template <class Tile>
struct NeonMany : Tile {
  static constexpr int kStepBytes = 64;
  static constexpr bool kExpanded = true, kCorrect = Tile::kColumnBytes == 16;
  LOWBIT_INLINE void dot(typename Tile::Acc& acc, const uint8_t* w, const int8_t* x) {
    const auto* v = reinterpret_cast<const int8_t*>(w);
    const int8x16_t row[4] = {vld1q_s8(v), vld1q_s8(v + 16), vld1q_s8(v + 32), vld1q_s8(v + 48)};
    Tile::add(acc, row, x);
  }
};

struct W4 {
  static constexpr int kMaxCode = 15;
  using One = NeonOne4;
  template <int MB>
  using Few = NeonFew4<MB>;
  template <int MB>
  using Many = NeonMany<NeonTile4<MB>>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t* zeros, int64_t columns, int8_t* out,
                            int64_t part) {
    for (int p = 0; p < 8; ++p) {  // pair by pair, whose two zero points then stay in registers
      const int8x16_t zero0 = vdupq_n_s8(static_cast<int8_t>(zeros[2 * p]));
      const int8x16_t zero1 = vdupq_n_s8(static_cast<int8_t>(zeros[2 * p + 1]));
      const uint8_t* from = w + 16 * p;
      int8_t* to = out + p / 2 * part + p % 2 * 32;
      for (int64_t k = 0; k < columns; k += kStep, from += 256, to += 128)
#pragma GCC unroll 2
        for (int h = 0; h < 2; ++h) {
          const uint8x16_t c = vld1q_u8(from + 128 * h);
          int8x16_t even, odd;
          join(low_nibbles(c), high_nibbles(c), even, odd);
          vst1q_s8(to + 64 * h, vsubq_s8(even, zero0));
          vst1q_s8(to + 64 * h + 16, vsubq_s8(odd, zero1));
        }
    }
  }
};
using W4Stream = W4;

struct W8 {
  static constexpr int kMaxCode = 255;
  using One = NeonOne8;
  template <int MB>
  using Few = NeonFew8<MB>;
  template <int MB>
  using Many = NeonMany<NeonTile8<MB>>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t*, int64_t columns, int8_t* out, int64_t part) {
    for (int64_t k = 0; k < columns; k += 16, w += 256, out += 64)
#pragma GCC unroll 8
      for (int p = 0; p < 8; ++p) {
        int8x16_t even, odd;
        join(less128(vld1q_u8(w + 16 * p)), less128(vld1q_u8(w + 128 + 16 * p)), even, odd);
        int8_t* o = out + p / 2 * part + p % 2 * 32;
        vst1q_s8(o, even);
        vst1q_s8(o + 16, odd);
      }
  }
};
