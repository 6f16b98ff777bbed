// One row of x by SDOT, for dotprod and i8mm: 16 B of codes are 2 rows x 8 columns, so one instruction adds 4
// columns to each of two sums a row; `twice` of x stands against it.
struct SdotOne : RowTile<1, 16, 0> {
  static constexpr int kXBytes = 32;
  struct Acc {
    I pair[8];
  };
  LOWBIT_INLINE void start(Acc& acc,
                           bool small) {  // addp at the end adds the halves of a row, so one gets the bias
    const I first = {small ? kBias : 0, 0, small ? kBias : 0, 0};
#pragma GCC unroll 8
    for (int p = 0; p < 8; ++p) acc.pair[p] = first;
  }
  LOWBIT_INLINE void total(const Acc& acc, I (&d)[1][4]) {
#pragma GCC unroll 4
    for (int b = 0; b < 4; ++b) d[0][b] = vpaddq_s32(acc.pair[2 * b], acc.pair[2 * b + 1]);
  }
};
struct SdotOne4 : SdotOne {
  static constexpr int kColumnBytes = 8, kStepBytes = 128;
  LOWBIT_INLINE void dot(Acc& acc, const uint8_t* w, const int8_t* x) {
    const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#pragma GCC unroll 4
    for (int p = 0; p < 8; p += 2) {
      const uint8x16_t c = vld1q_u8(w + 16 * p), d = vld1q_u8(w + 16 * p + 16);
      acc.pair[p] = vdotq_s32(vdotq_s32(acc.pair[p], low_nibbles(c), x0), high_nibbles(c), x1);
      acc.pair[p + 1] = vdotq_s32(vdotq_s32(acc.pair[p + 1], low_nibbles(d), x0), high_nibbles(d), x1);
    }
  }
};
struct SdotOne8 : SdotOne {
  static constexpr int kColumnBytes = 16, kStepBytes = 256;
  LOWBIT_INLINE void zeros(const uint8_t* p, I (&z)[4]) { RowTile<1, 16, 128>::zeros(p, z); }
  LOWBIT_INLINE void dot(Acc& acc, const uint8_t* w, const int8_t* x) {
    const int8x16_t x0 = vld1q_s8(x), x1 = vld1q_s8(x + 16);
#pragma GCC unroll 4
    for (int p = 0; p < 8; p += 2) {
      const uint8x16_t c0 = vld1q_u8(w + 16 * p), d0 = vld1q_u8(w + 16 * p + 16);
      const uint8x16_t c1 = vld1q_u8(w + 128 + 16 * p), d1 = vld1q_u8(w + 144 + 16 * p);
      acc.pair[p] = vdotq_s32(vdotq_s32(acc.pair[p], less128(c0), x0), less128(c1), x1);
      acc.pair[p + 1] = vdotq_s32(vdotq_s32(acc.pair[p + 1], less128(d0), x0), less128(d1), x1);
    }
  }
};
