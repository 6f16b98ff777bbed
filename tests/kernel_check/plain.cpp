// y by the rules at the top of csrc/cpu/linear_int.body.h and linear_float.body.h, one output at a time from
// the plain values. Shares no code with the kernels: sums are int64 (and once more double), conversions are
// arithmetic.
#include "plain.h"

#include <algorithm>
#include <cmath>
#include <limits>

namespace {

float widen(const uint8_t* p, int64_t dtype, int64_t i) {
  uint32_t u = 0;
  if (dtype == 0) {
    std::memcpy(&u, p + 4 * i, 4);
  } else {
    uint16_t h;
    std::memcpy(&h, p + 2 * i, 2);
    if (dtype == 2) {
      const int exponent = h >> 10 & 31, mantissa = h & 1023;
      const double size = exponent == 31 ? (mantissa ? std::nan("") : std::numeric_limits<double>::infinity())
                          : exponent == 0 ? std::ldexp(mantissa, -24)
                                          : std::ldexp(1024 + mantissa, exponent - 25);
      return static_cast<float>(h >> 15 ? -size : size);
    }
    u = static_cast<uint32_t>(h) << 16;
  }
  float f;
  std::memcpy(&f, &u, 4);
  return f;
}

// The number nearest to v that has `bits` of significand and no exponent below `lowest`, halves to even.
double nearest(double v, int bits, int lowest) {
  int exponent;
  std::frexp(v, &exponent);
  const int step = exponent - bits > lowest ? exponent - bits : lowest;
  return std::ldexp(std::nearbyint(std::ldexp(v, -step)), step);
}

void narrow(float v, int64_t dtype, uint8_t* y, int64_t i) {
  uint32_t u = 0;
  if (dtype == 0) {
    if (v != v)
      u = 0x7fc00000;
    else
      std::memcpy(&u, &v, 4);
    std::memcpy(y + 4 * i, &u, 4);
    return;
  }
  uint16_t h;
  const bool half = dtype == 2;
  if (v != v) {
    h = half ? 0x7e00 : 0x7fc0;
  } else {
    const double r = std::isinf(v) || v == 0.f ? v : half ? nearest(v, 11, -24) : nearest(v, 8, -133);
    const double size = std::fabs(r);
    if (half) {
      int e = 0;
      std::frexp(size, &e);
      h = size >= 65536. ? 0x7c00
          : size < 0x1p-14
              ? static_cast<uint16_t>(std::ldexp(size, 24))
              : static_cast<uint16_t>((e + 14) << 10 | (static_cast<int>(std::ldexp(size, 11 - e)) & 1023));
    } else {
      const float f = static_cast<float>(size);  // beyond the range: infinity
      std::memcpy(&u, &f, 4);
      h = static_cast<uint16_t>(u >> 16);
    }
    if (std::signbit(v)) h |= 0x8000;
  }
  std::memcpy(y + 2 * i, &h, 2);
}

struct Quantized {
  std::vector<int64_t> q;
  std::vector<float> scale;  // of each column
};

// Columns [from, to) of one row with one scale.
void quantize(const std::vector<float>& x, int64_t from, int64_t to, Quantized& out) {
  float amax = 0.f;
  bool nan = false;
  for (int64_t j = from; j < to; ++j) {
    nan = nan || x[j] != x[j];
    if (std::fabs(x[j]) > amax) amax = std::fabs(x[j]);
  }
  float scale = amax / 127.f, factor = 0.f;
  if (nan)
    scale = std::nanf("");
  else if (std::isinf(amax))
    scale = amax;
  else if (amax < 0x1p-100f)
    scale = 0.f;
  else
    factor = 127.f / amax;
  for (int64_t j = from; j < to; ++j) {
    const float product = x[j] * factor;
    out.q[j] = factor == 0.f ? 0 : static_cast<int64_t>(std::nearbyint(static_cast<double>(product)));
    out.scale[j] = scale;
  }
}

}  // namespace

// Sylvester's H64 / 8 on every 64 columns, value by value: sums of pairs 1, 2, 4, ... apart.
static void rotate(std::vector<float>& x) {
  for (size_t stride = 1; stride < 64; stride *= 2) {
    const std::vector<float> old = x;
    for (size_t j = 0; j < x.size(); ++j)
      x[j] = j / stride % 2 ? old[j - stride] - old[j] : old[j] + old[j + stride];
  }
  for (float& v : x) v = v * 0.125f;
}

// Σ factor[j] * x[j] of `count` values: chains of `length`, and these in order.
template <class F>
static float chained(int64_t count, int64_t length, F term) {
  float total = 0.f;
  for (int64_t from = 0; from < count; from += length) {
    float chain = 0.f;
    for (int64_t j = from; j < std::min(from + length, count); ++j) chain = term(j, chain);
    total = total + chain;
  }
  return total;
}

std::vector<uint8_t> plain(const Case& c) {
  std::vector<uint8_t> y(static_cast<size_t>(c.m * c.n * c.item()));
  const int64_t groups = c.groups();
  std::vector<float> inside(static_cast<size_t>(c.k)), x(inside.size()), hidden(static_cast<size_t>(c.rank));
  Quantized a{std::vector<int64_t>(x.size()), std::vector<float>(x.size())};
  for (int64_t m = 0; m < c.m; ++m) {
    for (int64_t j = 0; j < c.k; ++j) {
      inside[j] = widen(c.x.data(), c.dtype, m * c.k + j);
      if (c.has_smooth) inside[j] /= c.smooth[j];
    }
    if (c.hadamard) rotate(inside);
    for (int64_t j = 0; j < c.k; ++j) x[j] = inside[c.has_perm ? c.perm[j] : j];
    for (int64_t i = 0; i < c.rank; ++i)
      hidden[i] = chained(
          c.k, 64, [&](int64_t j, float sum) { return std::fma(inside[j], c.down[j * c.rank + i], sum); });
    const bool per_token = c.granularity == 0, floats = c.granularity == 2;
    if (per_token) quantize(x, 0, c.k, a);
    for (int64_t g = 0; g < groups && c.granularity == 1; ++g)
      quantize(x, g * c.group, std::min((g + 1) * c.group, c.k), a);
    for (int64_t n = 0; n < c.n; ++n) {
      float acc = 0.f;
      for (int64_t g = 0; g < groups; ++g) {
        const int64_t from = g * c.group, to = std::min(from + c.group, c.k);
        float part = 0.f;
        int64_t d = 0;
        double twice = 0.;
        for (int64_t j = from; j < to; ++j) {
          if (c.bits == 16) {
            part = std::fma(x[j], widen(c.codes.data(), 2, n * c.k + j), part);
            continue;
          }
          const int64_t w = int64_t(c.codes[n * c.k + j]) - c.zeros[n * groups + g];
          if (floats) {
            part = std::fma(x[j], static_cast<float>(w), part);
          } else {
            d += w * a.q[j];
            twice += static_cast<double>(w) * static_cast<double>(a.q[j]);
          }
        }
        if (static_cast<double>(d) != twice) {
          std::fprintf(stderr, "plain: the two sums differ\n");
          std::exit(3);
        }
        const float s = c.bits == 16 ? 1.f : c.scales[n * groups + g];
        if (c.bits == 16)
          acc = part;
        else if (floats)
          acc = std::fma(part, s, acc);
        else
          acc = std::fma(static_cast<float>(d), per_token ? s : s * a.scale[from], acc);
      }
      if (per_token)
        acc = c.has_bias ? std::fma(acc, a.scale[0], c.bias[n]) : acc * a.scale[0];
      else if (c.has_bias)
        acc = acc + c.bias[n];
      if (c.rank)
        acc = acc + chained(c.rank, 16, [&](int64_t i, float sum) {
                return std::fma(hidden[i], c.up[n * c.rank + i], sum);
              });
      narrow(acc, c.dtype, y.data(), m * c.n + n);
    }
  }
  return y;
}
