// The reference instruction set on the aarch64 panels: 2 rows x 8 columns a 16 bytes.
constexpr int64_t kExpandFrom = INT64_MAX, kBlockBytes = 0, kManyRows = 1;

template <int BITS>
struct ScalarTile {
  static constexpr int kM = 1, kRows = 16, kA = 1, kB = 16, kXBytes = 16, kFold = 0;
  static constexpr int kColumnBytes = 2 * BITS, kStepBytes = 16 * kColumnBytes;
  static constexpr bool kExpanded = false, kCorrect = true, kBiased = false;
  struct Acc {
    int32_t row[16];
  };
  static inline void start(Acc& acc, bool) {
    for (int32_t& sum : acc.row) sum = 0;
  }
  static inline void keep(Acc&) {}
  static inline void dot(Acc& acc, const uint8_t* w, const int8_t* x) {
    for (int n = 0; n < 16; ++n)
      for (int j = 0; j < 16; ++j) {
        const uint8_t* byte = w + 8 * n + j % 8;
        acc.row[n] += (BITS == 4 ? *byte >> j / 8 * 4 & 15 : byte[j / 8 * 128]) * x[j];
      }
  }
  static inline void total(const Acc& acc, I (&d)[1][16]) {
    __builtin_memcpy(d[0], acc.row, sizeof(acc.row));
  }
  static inline void scales(const uint8_t* p, bool wide, F (&s)[16]) {
    for (int n = 0; n < 16; ++n)
      s[n] = wide ? load(reinterpret_cast<const float*>(p) + n)
                  : load_half(reinterpret_cast<const uint16_t*>(p) + n);
  }
  static inline void zeros(const uint8_t* p, I (&z)[16]) {
    for (int n = 0; n < 16; ++n) z[n] = p[n];
  }
  static inline I of_x(const int32_t* p, int) { return *p; }
  static inline F of_x(const float* p, int) { return *p; }
  static inline void rows(const F* total, float* out) { __builtin_memcpy(out, total, 16 * sizeof(float)); }
};
static inline F to_float_biased(I v) { return to_float(v); }  // never called: kBiased is false
static inline void repeat8(const int8_t*, int64_t, int8_t*) {}

struct W4 {
  static constexpr int kMaxCode = 15;
  using One = ScalarTile<4>;
  template <int>
  using Few = One;
};
using W4Stream = W4;
struct W8 {
  static constexpr int kMaxCode = 255;
  using One = ScalarTile<8>;
  template <int>
  using Few = One;
};

struct FloatW4 {
  static constexpr int kColumns = 16, kBytes = 128;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    return to_float((line[8 * v + column % 8] >> column / 8 * 4 & 15) - zero);
  }
};
struct FloatW8 {
  static constexpr int kColumns = 8, kBytes = 128;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    return to_float(line[8 * v + column] - zero);
  }
};
