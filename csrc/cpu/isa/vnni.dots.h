// The dot products of avxvnni and avx512vnni, which differ in the width of a register only: dpbusd multiplies
// four unsigned codes by four signed activations a lane and adds them to int32, exactly.

struct W4 {
  static constexpr int kLines = 4, kDwords = 2, kMaxCode = 15;
  struct Line {
    I half[2];
  };
  using Acc = I;
  using Act = I;
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p), low = splat8(15);
    return {{and_i(raw, low), and_i(srli16(raw, 4), low)}};
  }
  static inline Acc zero() { return splat_i(0); }
  static inline Act act(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return splat_i(four);
  }
  static inline void dot(Acc& acc, const Line& w, int half, Act x, int) {
    acc = dpbusd(acc, w.half[half], x);
  }
  static inline void fold(Acc&) {}
  static inline I total(Acc acc) { return acc; }
};

// One row of x: the high nibble stays where it is, 16 times its value, in an accumulator of its own (no shift
// a line); two of each hide the latency of the dot product.
struct W4Stream : W4 {
  struct Acc {
    I low[2], high[2];
  };
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p), low = splat8(15);
    return {{and_i(raw, low), andnot_i(low, raw)}};
  }
  static inline Acc zero() { return {{splat_i(0), splat_i(0)}, {splat_i(0), splat_i(0)}}; }
  static inline void dot(Acc& acc, const Line& w, int half, Act x, int line) {
    I& sum = half ? acc.high[line & 1] : acc.low[line & 1];
    sum = dpbusd(sum, w.half[half], x);
  }
  static inline void fold(Acc&) {}
  static inline I total(const Acc& acc) {
    return add_i(add_i(acc.low[0], acc.low[1]), srai(add_i(acc.high[0], acc.high[1]), 4));
  }
};

struct W8 : W4 {
  static constexpr int kLines = 8, kDwords = 1, kMaxCode = 255;
  using Line = I;
  static inline Line load(const uint8_t* p) { return load_i(p); }
  static inline void dot(Acc& acc, Line w, int, Act x, int) { acc = dpbusd(acc, w, x); }
};
using W4Bytes = W8;  // codes that stand a byte each
