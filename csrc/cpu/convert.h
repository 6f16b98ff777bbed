// float16 and bfloat16 in plain C++, for tails and for the scalar set. Included inside an instruction set's
// own namespace, so that no copy compiled for a newer CPU can stand in for an older one's. Rounding is half
// to even, NaN becomes the one quiet NaN.
static inline uint32_t bits_of(float x) {
  uint32_t u;
  __builtin_memcpy(&u, &x, 4);
  return u;
}
static inline float float_of(uint32_t u) {
  float x;
  __builtin_memcpy(&x, &u, 4);
  return x;
}
static inline float half_to_float(uint16_t h) {
  const uint32_t sign = static_cast<uint32_t>(h & 0x8000) << 16;
  const uint32_t exponent = h >> 10 & 31, mantissa = h & 1023;
  if (exponent == 31) return float_of(sign | 0x7f800000 | mantissa << 13);
  if (exponent) return float_of(sign | (exponent + 112) << 23 | mantissa << 13);
  // A subnormal is mantissa * 2^-24, built without float arithmetic so that flush-to-zero cannot reach it.
  if (!mantissa) return float_of(sign);
  const int top = 31 - __builtin_clz(mantissa);
  return float_of(sign | static_cast<uint32_t>(top + 103) << 23 | (mantissa << (23 - top) & 0x7fffff));
}
static inline uint16_t float_to_half(float x) {
  const uint32_t u = bits_of(x), magnitude = u & 0x7fffffff;
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  if (magnitude > 0x7f800000) return 0x7e00;
  if (magnitude >= 0x47800000) return sign | 0x7c00;  // 65536 and above; 65520..65535 round up to it below
  uint32_t kept, shift;
  if (magnitude >= 0x38800000) {  // normal in half
    kept = magnitude - 0x38000000;
    shift = 13;
  } else {
    const uint32_t exponent = magnitude >> 23;
    if (exponent < 102) return sign;
    kept = (magnitude & 0x7fffff) | 0x800000;
    shift = 126 - exponent;
  }
  const uint32_t rest = kept & ((1u << shift) - 1), half = 1u << (shift - 1);
  kept >>= shift;
  kept += rest > half || (rest == half && (kept & 1));
  return static_cast<uint16_t>(sign | kept);
}
static inline float bfloat_to_float(uint16_t b) { return float_of(static_cast<uint32_t>(b) << 16); }
static inline uint16_t float_to_bfloat(float x) {
  const uint32_t u = bits_of(x);
  if ((u & 0x7fffffff) > 0x7f800000) return 0x7fc0;
  return static_cast<uint16_t>((u + 0x7fff + (u >> 16 & 1)) >> 16);
}
static inline float load_one(const void* x, Dtype dtype, int64_t i) {
  if (dtype == Dtype::kFloat32) return static_cast<const float*>(x)[i];
  const uint16_t h = static_cast<const uint16_t*>(x)[i];
  return dtype == Dtype::kBfloat16 ? bfloat_to_float(h) : half_to_float(h);
}
static inline void store_one(void* y, Dtype dtype, int64_t i, float v) {
  if (v != v) v = float_of(0x7fc00000);
  if (dtype == Dtype::kFloat32)
    static_cast<float*>(y)[i] = v;
  else
    static_cast<uint16_t*>(y)[i] = dtype == Dtype::kBfloat16 ? float_to_bfloat(v) : float_to_half(v);
}
