// The reference instruction set: one lane of plain C++.
using F = float;
using I = int32_t;
constexpr int kLanes = 1, kVecs = kPanel / kLanes, kRowBlock = 1;
constexpr int kPrefetch = 0;
// Blocks of one row have nothing to unpack once for many.
constexpr int64_t kBytesFrom = kNever, kFloatsFrom = kNever, kHalvesFrom = kNever;
template <int MB>
constexpr int int_panels() {
  return 1;
}
template <int MB>
constexpr int float_panels() {
  return 1;
}

static inline F load(const float* p) { return *p; }
static inline void store(float* p, F v) { *p = v; }
static inline F splat(float s) { return s; }
static inline F mul(F a, F b) { return a * b; }
static inline F fma(F a, F b, F c) { return __builtin_fmaf(a, b, c); }
static inline F fnma(F a, F b, F c) { return __builtin_fmaf(-a, b, c); }
static inline F to_float(I v) { return static_cast<float>(v); }
static inline F add_f(F a, F b) { return a + b; }
static inline F sub_f(F a, F b) { return a - b; }
static inline F max_f(F a, F b) { return a > b ? a : b; }  // b where one is NaN
static inline F div_f(F a, F b) { return a / b; }
static inline I to_int(F v) {  // half to even, |v| < 2^22
  volatile float shifted = v + 12582912.f;
  return static_cast<int32_t>(shifted - 12582912.f);
}
// Lane i takes what lane i ^ kStride has, kStride < kLanes; here there is none.
template <int kStride>
static inline F swap_lanes(F v) {
  return v;
}
static inline F power_of_two(I n) { return float_of(static_cast<uint32_t>(n + 127) << 23); }  // 0 for -127
static inline F load_half(const uint16_t* p) { return half_to_float(*p); }
static inline I load_i(const void* p) { return *static_cast<const int32_t*>(p); }
static inline void store_i(void* p, I v) { *static_cast<int32_t*>(p) = v; }
static inline I splat_i(int32_t s) { return s; }
static inline I add_i(I a, I b) { return a + b; }
static inline I max_i(I a, I b) { return a > b ? a : b; }
static inline I mul_sub(I d, I a, I b) { return d - a * b; }
static inline I load_u8(const uint8_t* p) { return *p; }
static inline I abs_bits(const float* p) { return static_cast<int32_t>(bits_of(*p) & 0x7fffffff); }
static inline int32_t reduce_max(I v) { return v; }
static inline int32_t reduce_add(I v) { return v; }
// |x * inverse| < 2^22, so adding and removing 1.5 * 2^23 rounds half to even.
static inline I round_mul(const float* p, F inverse) {
  volatile float shifted = *p * inverse + 12582912.f;
  return static_cast<int32_t>(shifted - 12582912.f);
}
static inline void store_codes16(int8_t* q, const I* v) {
  for (int i = 0; i < kPanel; ++i) q[i] = static_cast<int8_t>(v[i]);
}
static inline void load_row16(const void* row, Dtype dtype, int64_t i, float* out) {
  for (int j = 0; j < kPanel; ++j) out[j] = load_one(row, dtype, i + j);
}
static inline void store_row16(void* y, Dtype dtype, const float* v) {
  for (int j = 0; j < kPanel; ++j) store_one(y, dtype, j, v[j]);
}

struct W4 {
  static constexpr int kLines = 4, kDwords = 2, kMaxCode = 15;
  using Line = uint32_t;
  using Acc = int32_t;
  using Act = const int8_t*;
  static inline Line load(const uint8_t* p) {
    Line v;
    __builtin_memcpy(&v, p, 4);
    return v;
  }
  static inline Acc zero() { return 0; }
  static inline Act act(const int8_t* x) { return x; }
  static inline void dot(Acc& acc, Line w, int half, Act x, int) {
    for (int j = 0; j < 4; ++j) acc += static_cast<int32_t>(w >> (8 * j + 4 * half) & 15) * x[j];
  }
  static inline void fold(Acc&) {}
  static inline I total(Acc acc) { return acc; }
};
using W4Stream = W4;
using W4Bytes = W4;  // one row at a time: nothing to unpack for others

struct W8 : W4 {
  static constexpr int kLines = 8, kDwords = 1, kMaxCode = 255;
  static inline void dot(Acc& acc, Line w, int, Act x, int) {
    for (int j = 0; j < 4; ++j) acc += static_cast<int32_t>(w >> 8 * j & 255) * x[j];
  }
};

struct FloatW4 {
  static constexpr int kColumns = 8, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    return to_float((line[4 * v + column % 4] >> 4 * (column / 4) & 15) - zero);
  }
};
struct FloatW8 {
  static constexpr int kColumns = 4, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int v, int column, I zero) {
    return to_float(line[4 * v + column] - zero);
  }
};
struct FloatF16 {
  static constexpr int kColumns = 4, kBytes = 128;
  static constexpr bool kScaled = false;
  static inline F value(const uint8_t* line, int v, int column, I) {
    return load_half(reinterpret_cast<const uint16_t*>(line) + column * kPanel + v);
  }
};
