// AVX-512 with VNNI: a panel line is one register, the four activations of a step come as a memory broadcast.
// 32 registers: 8 rows of x by 2 panels are 16 accumulators, 4 weight vectors, 1 broadcast.
using F = __m512;
using I = __m512i;
constexpr int kLanes = 16, kVecs = kPanel / kLanes, kRowBlock = 8;
constexpr int kPrefetch = 2048;  // bytes ahead, measured: 0.83 -> 0.58 ms with four panels, docs/kernels.md
template <int MB>
constexpr int int_panels() {
  return MB <= 4 ? 4 : 2;
}
template <int MB>
constexpr int float_panels() {
  return MB <= 4 ? 4 : 2;
}

static inline F load(const float* p) { return _mm512_loadu_ps(p); }
static inline void store(float* p, F v) { _mm512_storeu_ps(p, v); }
static inline F splat(float s) { return _mm512_set1_ps(s); }
static inline F mul(F a, F b) { return _mm512_mul_ps(a, b); }
static inline F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }
static inline F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }
static inline F to_float(I v) { return _mm512_cvtepi32_ps(v); }
static inline F load_half(const uint16_t* p) {
  return _mm512_cvtph_ps(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(p)));
}
static inline I load_i(const void* p) { return _mm512_loadu_si512(p); }
static inline I splat_i(int32_t s) { return _mm512_set1_epi32(s); }
static inline I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
static inline I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
static inline I mul_sub(I d, I a, I b) { return _mm512_sub_epi32(d, _mm512_mullo_epi32(a, b)); }
static inline I load_u8(const uint8_t* p) {
  return _mm512_cvtepu8_epi32(_mm_loadu_si128(reinterpret_cast<const __m128i*>(p)));
}
static inline I abs_bits(const float* p) { return _mm512_and_si512(load_i(p), splat_i(0x7fffffff)); }
static inline int32_t reduce_max(I v) { return _mm512_reduce_max_epi32(v); }
static inline int32_t reduce_add(I v) { return _mm512_reduce_add_epi32(v); }
static inline I round_mul(const float* p, F inverse) { return _mm512_cvtps_epi32(mul(load(p), inverse)); }
static inline void store_codes16(int8_t* q, const I* v) {
  _mm_storeu_si128(reinterpret_cast<__m128i*>(q), _mm512_cvtepi32_epi8(v[0]));
}
static inline void load_row16(const void* row, Dtype dtype, int64_t i, float* out) {
  if (dtype == Dtype::kFloat32) {
    store(out, load(static_cast<const float*>(row) + i));
  } else if (dtype == Dtype::kFloat16) {
    store(out, load_half(static_cast<const uint16_t*>(row) + i));
  } else {
    const __m256i b =
        _mm256_loadu_si256(reinterpret_cast<const __m256i*>(static_cast<const uint16_t*>(row) + i));
    store(out, _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(b), 16)));
  }
}
static inline void store_row16(void* y, Dtype dtype, const float* x) {
  F f = load(x);
  f = _mm512_mask_blend_ps(_mm512_cmp_ps_mask(f, f, _CMP_UNORD_Q), f,
                           _mm512_castsi512_ps(splat_i(0x7fc00000)));
  if (dtype == Dtype::kFloat32) {
    store(static_cast<float*>(y), f);
    return;
  }
  __m256i h;
  if (dtype == Dtype::kFloat16) {
    h = _mm512_cvtps_ph(f, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
  } else {  // half to even on the upper 16 bits; the quiet NaN stays itself
    const I u = _mm512_castps_si512(f);
    const I odd = _mm512_and_si512(_mm512_srli_epi32(u, 16), splat_i(1));
    h = _mm512_cvtepi32_epi16(_mm512_srli_epi32(add_i(u, add_i(odd, splat_i(0x7fff))), 16));
  }
  _mm256_storeu_si256(static_cast<__m256i*>(y), h);
}

struct W4 {
  static constexpr int kLines = 4, kDwords = 2, kMaxCode = 15;
  struct Line {
    I half[2];
  };
  using Acc = I;
  using Act = I;
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p), low = _mm512_set1_epi8(15);
    return {{_mm512_and_si512(raw, low), _mm512_and_si512(_mm512_srli_epi16(raw, 4), low)}};
  }
  static inline Acc zero() { return splat_i(0); }
  static inline Act act(const int8_t* x) {
    int32_t four;
    __builtin_memcpy(&four, x, 4);
    return splat_i(four);
  }
  static inline void dot(Acc& acc, const Line& w, int half, Act x, int) {
    acc = _mm512_dpbusd_epi32(acc, w.half[half], x);
  }
  static inline void fold(Acc&) {}
  static inline I total(Acc acc) { return acc; }
};

// One row of x: the high nibble stays where it is, 16 times its value, in an accumulator of its own (no shift
// a line); two of each hide the latency of the dot product. 2.5 instructions per 64 products.
struct W4Stream : W4 {
  struct Acc {
    I low[2], high[2];
  };
  static inline Line load(const uint8_t* p) {
    const I raw = load_i(p), low = _mm512_set1_epi8(15);
    return {{_mm512_and_si512(raw, low), _mm512_andnot_si512(low, raw)}};
  }
  static inline Acc zero() { return {{splat_i(0), splat_i(0)}, {splat_i(0), splat_i(0)}}; }
  static inline void dot(Acc& acc, const Line& w, int half, Act x, int line) {
    I& sum = half ? acc.high[line & 1] : acc.low[line & 1];
    sum = _mm512_dpbusd_epi32(sum, w.half[half], x);
  }
  static inline void fold(Acc&) {}
  static inline I total(const Acc& acc) {
    return add_i(add_i(acc.low[0], acc.low[1]), _mm512_srai_epi32(add_i(acc.high[0], acc.high[1]), 4));
  }
};

struct W8 : W4 {
  static constexpr int kLines = 8, kDwords = 1, kMaxCode = 255;
  using Line = I;
  static inline Line load(const uint8_t* p) { return load_i(p); }
  static inline void dot(Acc& acc, Line w, int, Act x, int) { acc = _mm512_dpbusd_epi32(acc, w, x); }
};

// Codes as floats: each 32-bit lane of a line holds 4 (8-bit) or 8 (4-bit) columns of one row.
struct FloatW4 {
  static constexpr int kColumns = 8, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int, int column, I zero) {
    const I code = _mm512_srli_epi32(load_i(line), 8 * (column % 4) + 4 * (column / 4));
    return to_float(_mm512_sub_epi32(_mm512_and_si512(code, splat_i(15)), zero));
  }
};
struct FloatW8 {
  static constexpr int kColumns = 4, kBytes = 64;
  static constexpr bool kScaled = true;
  static inline F value(const uint8_t* line, int, int column, I zero) {
    const I code = _mm512_srli_epi32(load_i(line), 8 * column);
    return to_float(_mm512_sub_epi32(_mm512_and_si512(code, splat_i(255)), zero));
  }
};
struct FloatF16 {
  static constexpr int kColumns = 4, kBytes = 128;
  static constexpr bool kScaled = false;
  static inline F value(const uint8_t* line, int, int column, I) {
    return load_half(reinterpret_cast<const uint16_t*>(line) + column * kPanel);
  }
};
