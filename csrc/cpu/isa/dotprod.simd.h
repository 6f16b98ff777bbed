// Armv8.2 dot products (Cortex-A76, Neoverse N1, Apple M1): SDOT multiplies 4 columns of 4 rows of w by 4
// columns of one row of x, taken from a lane. 32 registers: 8 rows by 8 rows are 16 sums, 2 of w, 2 of x.
#include "asimd.simd.h"
constexpr int kRowBlock = 8, kUnit = 4;  // x: [k / 4][rows][4]
constexpr int64_t kExpandFrom = 8, kManyRows = 8;
#include "sdot.simd.h"

// Rows of x by 8 rows of w. A step is 4 chunks of 4 columns, its MB * 16 B of x are MB registers: row m of
// chunk c is lane (c * MB + m) % 4 of register (c * MB + m) / 4.
template <int MB, int OFFSET>
struct SdotTile : RowTile<MB, 8, OFFSET> {
  struct Acc {
    I sum[MB][2];
  };
  LOWBIT_INLINE void start(Acc& acc, bool small) {
    const I first = splat_i(small ? kBias : 0);
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m) acc.sum[m][0] = acc.sum[m][1] = first;
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[MB][2]) {
#pragma GCC unroll 8
    for (int m = 0; m < MB; ++m) d[m][0] = acc.sum[m][0], d[m][1] = acc.sum[m][1];
  }
  template <int AT, int END>
  LOWBIT_INLINE void lanes(Acc& acc, int8x16_t w0, int8x16_t w1, const int8x16_t* x) {
    if constexpr (AT < END) {
      acc.sum[AT % MB][0] = vdotq_laneq_s32(acc.sum[AT % MB][0], w0, x[AT / 4], AT % 4);
      acc.sum[AT % MB][1] = vdotq_laneq_s32(acc.sum[AT % MB][1], w1, x[AT / 4], AT % 4);
      lanes<AT + 1, END>(acc, w0, w1, x);
    }
  }
  template <int CHUNK>
  LOWBIT_INLINE void chunk(Acc& acc, int8x16_t w0, int8x16_t w1, const int8_t* x) {
    constexpr int begin = CHUNK * MB, end = begin + MB;
    int8x16_t four[MB];
#pragma GCC unroll 4
    for (int i = begin / 4; i < (end + 3) / 4; ++i) four[i] = vld1q_s8(x + 16 * i);
    lanes<begin, end>(acc, w0, w1, four);
  }
};

struct Quads {  // 8 rows x 8 columns
  uint8x16_t first[2], last[2];
};
LOWBIT_INLINE Quads load_quads(const uint8_t* w) {
  const uint8x16_t a = vld1q_u8(w), b = vld1q_u8(w + 16), c = vld1q_u8(w + 32), d = vld1q_u8(w + 48);
  return {{first4(a, b), first4(c, d)}, {last4(a, b), last4(c, d)}};
}

template <int MB>
struct SdotFew4 : SdotTile<MB, 0> {
  static constexpr int kColumnBytes = 8, kStepBytes = 128;
  LOWBIT_INLINE void dot(typename SdotFew4::Acc& acc, const uint8_t* w, const int8_t* x) {
    const Quads q = load_quads(w);
    SdotFew4::template chunk<0>(acc, low_nibbles(q.first[0]), low_nibbles(q.first[1]), x);
    SdotFew4::template chunk<1>(acc, low_nibbles(q.last[0]), low_nibbles(q.last[1]), x);
    SdotFew4::template chunk<2>(acc, high_nibbles(q.first[0]), high_nibbles(q.first[1]), x);
    SdotFew4::template chunk<3>(acc, high_nibbles(q.last[0]), high_nibbles(q.last[1]), x);
  }
};
template <int MB>
struct SdotFew8 : SdotTile<MB, 128> {
  static constexpr int kColumnBytes = 16, kStepBytes = 256;
  LOWBIT_INLINE void dot(typename SdotFew8::Acc& acc, const uint8_t* w, const int8_t* x) {
    const Quads q = load_quads(w), p = load_quads(w + 128);
    SdotFew8::template chunk<0>(acc, less128(q.first[0]), less128(q.first[1]), x);
    SdotFew8::template chunk<1>(acc, less128(q.last[0]), less128(q.last[1]), x);
    SdotFew8::template chunk<2>(acc, less128(p.first[0]), less128(p.first[1]), x);
    SdotFew8::template chunk<3>(acc, less128(p.last[0]), less128(p.last[1]), x);
  }
};

// An expanded panel is [2 parts][k / 4][8 rows][4].
template <int MB, int BYTES>
struct SdotMany : SdotTile<MB, 128> {
  static constexpr int kColumnBytes = BYTES, kStepBytes = 128;
  static constexpr bool kExpanded = true, kCorrect = BYTES == 16;
  LOWBIT_INLINE void dot(typename SdotMany::Acc& acc, const uint8_t* w, const int8_t* x) {
    const auto* v = reinterpret_cast<const int8_t*>(w);
    SdotMany::template chunk<0>(acc, vld1q_s8(v), vld1q_s8(v + 16), x);
    SdotMany::template chunk<1>(acc, vld1q_s8(v + 32), vld1q_s8(v + 48), x);
    SdotMany::template chunk<2>(acc, vld1q_s8(v + 64), vld1q_s8(v + 80), x);
    SdotMany::template chunk<3>(acc, vld1q_s8(v + 96), vld1q_s8(v + 112), x);
  }
};

struct W4 {
  static constexpr int kMaxCode = 15;
  using One = SdotOne4;
  template <int MB>
  using Few = SdotFew4<MB>;
  template <int MB>
  using Many = SdotMany<MB, 8>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t* zeros, int64_t columns, int8_t* out,
                            int64_t part) {
    uint8x16_t z[4];  // each zero point 4 times: the rows of a register of codes
#pragma GCC unroll 4
    for (int q = 0; q < 4; ++q) {
      uint32_t four;
      __builtin_memcpy(&four, zeros + 4 * q, 4);
      const uint8x16_t once = vreinterpretq_u8_u32(vdupq_n_u32(four)), twice = vzip1q_u8(once, once);
      z[q] = vreinterpretq_u8_u16(vzip1q_u16(vreinterpretq_u16_u8(twice), vreinterpretq_u16_u8(twice)));
    }
    for (int64_t k = 0; k < columns; k += 16, w += 128, out += 128)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const Quads q = load_quads(w + 64 * h);
        int8_t* o = out + h * part;
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i, o += 16) {
          const int8x16_t zero = vreinterpretq_s8_u8(z[2 * h + i]);
          vst1q_s8(o, vsubq_s8(low_nibbles(q.first[i]), zero));
          vst1q_s8(o + 32, vsubq_s8(low_nibbles(q.last[i]), zero));
          vst1q_s8(o + 64, vsubq_s8(high_nibbles(q.first[i]), zero));
          vst1q_s8(o + 96, vsubq_s8(high_nibbles(q.last[i]), zero));
        }
      }
  }
};
using W4Stream = W4;

struct W8 {
  static constexpr int kMaxCode = 255;
  using One = SdotOne8;
  template <int MB>
  using Few = SdotFew8<MB>;
  template <int MB>
  using Many = SdotMany<MB, 16>;
  LOWBIT_INLINE void expand(const uint8_t* w, const uint8_t*, int64_t columns, int8_t* out, int64_t part) {
    for (int64_t k = 0; k < columns; k += 8, w += 128, out += 64)
#pragma GCC unroll 2
      for (int h = 0; h < 2; ++h) {
        const Quads q = load_quads(w + 64 * h);
#pragma GCC unroll 2
        for (int i = 0; i < 2; ++i) {
          vst1q_s8(out + h * part + 16 * i, less128(q.first[i]));
          vst1q_s8(out + h * part + 16 * i + 32, less128(q.last[i]));
        }
      }
  }
};
