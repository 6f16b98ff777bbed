// AVX2 dot products. 4 bit: vpmaddubsw of unsigned code and signed activation gives at most 2 * 15 * 127 =
// 3810, so the eight of a 32-column block fit in int16 (30 480) before one vpmaddwd widens them. 8 bit: even
// and odd bytes as int16, vpmaddwd each; vpmaddubsw would saturate at 2 * 255 * 127.
#include "ymm.simd.h"

struct W4 {
  static constexpr int kLines = 4, kDwords = 2, kMaxCode = 15;
  struct Line {
    I half[2];
  };
  struct Acc {
    I pairs, sum;
  };
  using Act = I;
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p), low = _mm256_set1_epi8(15);
    return {{_mm256_and_si256(raw, low), _mm256_and_si256(_mm256_srli_epi16(raw, 4), low)}};
  }
  static inline Acc zero() { return {splat_i(0), splat_i(0)}; }
  static inline Act act(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return splat_i(four);
  }
  static inline void dot(Acc& acc, const Line& w, int half, Act x, int) {
    acc.pairs = _mm256_add_epi16(acc.pairs, _mm256_maddubs_epi16(w.half[half], x));
    // Keeps the addition here: gcc otherwise delays all of a block's to its end and spills every product
    // (2.2x slower).
    __asm__("" : "+x"(acc.pairs));
  }
  static inline void fold(Acc& acc) {
    acc.sum = add_i(acc.sum, _mm256_madd_epi16(acc.pairs, _mm256_set1_epi16(1)));
    acc.pairs = splat_i(0);
  }
  static inline I total(const Acc& acc) { return acc.sum; }
};
using W4Stream = W4;

using W4Bytes = W4;  // unpacking costs nothing here: the ports of the products are not those of the shifts

struct W8 {
  static constexpr int kLines = 8, kDwords = 1, kMaxCode = 255;
  struct Line {
    I even, odd;
  };
  using Acc = I;
  using Act = Line;
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p);
    return {_mm256_and_si256(raw, _mm256_set1_epi16(255)), _mm256_srli_epi16(raw, 8)};
  }
  static inline Acc zero() { return splat_i(0); }
  static inline Act act(const int8_t* x) {
    const I four = W4::act(x);
    return {_mm256_srai_epi16(_mm256_slli_epi16(four, 8), 8), _mm256_srai_epi16(four, 8)};
  }
  static inline void dot(Acc& acc, const Line& w, int, const Act& x, int) {
    acc = add_i(acc, add_i(_mm256_madd_epi16(w.even, x.even), _mm256_madd_epi16(w.odd, x.odd)));
    __asm__("" : "+x"(acc));
  }
  static inline void fold(Acc&) {}
  static inline I total(Acc acc) { return acc; }
};
