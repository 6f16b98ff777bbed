// Runs every kernel table it is linked with on the same random and extreme inputs and compares the outputs
// with those of the scalar table, byte for byte. Prints one line a table and "differences: N". No torch, no
// package: kernels.h only.
//
//   compare            every table this CPU has (linked with dispatch.cpp)
//   compare --all      every table, the CPU is not asked: for builds over model.h
//   compare --all NAME       only this table against scalar
//   compare --all NAME stop  and no further than the first difference
#include <cstdio>
#include <cstring>
#include <vector>

#include "decoder.h"

using namespace lowbit::cpu;

namespace {

uint64_t state = 88172645463325252u;
uint32_t next() {  // xorshift64
  state ^= state << 13, state ^= state >> 7, state ^= state << 17;
  return static_cast<uint32_t>(state >> 16);
}
int below(int n) { return static_cast<int>(next() % static_cast<uint32_t>(n)); }
float uniform() { return static_cast<float>(next() & 0xffffff) / 8388608.f - 1.f; }

enum Fill { kRandom, kLow, kHigh, kSpread, kBroken, kFills };
enum Weight { kW4, kW8, kF16, kWeights };

struct Case {
  Weight weight;
  Granularity granularity;
  Dtype dtype;
  Fill fill;
  int64_t m, n, k, group;
  bool wide, perm, smooth, bias, hadamard;
  int64_t rank;  // 0: no low rank
  bool wide_factors;
};

uint16_t bits16(Dtype dtype, float f) {
  uint32_t u;
  std::memcpy(&u, &f, 4);
  if (dtype == Dtype::kBfloat16) return static_cast<uint16_t>(u >> 16);
  const uint32_t exponent = u >> 23 & 255;
  const uint16_t sign = static_cast<uint16_t>(u >> 16 & 0x8000);
  if (exponent == 255) return sign | 0x7c00 | (u & 0x7fffff ? 0x200 : 0);
  if (exponent > 142) return sign | 0x7bff;
  if (exponent < 113) return sign | static_cast<uint16_t>(u & 0x3ff);  // any subnormal will do
  return static_cast<uint16_t>(sign | (exponent - 112) << 10 | (u >> 13 & 0x3ff));
}

struct Problem {
  Case c;
  int64_t groups, padded, panels, group_bytes;
  std::vector<uint8_t> x, weight;
  std::vector<int32_t> perm;
  std::vector<float> smooth, bias;
  std::vector<uint8_t> down, up;  // panels of a low rank

  explicit Problem(const Case& wanted) : c(wanted) {
    groups = c.weight == kF16 ? 1 : (c.k + c.group - 1) / c.group;
    if (c.weight == kF16) c.group = c.k;
    padded = round_up(c.group, kStep);
    panels = (c.n + kPanel - 1) / kPanel;
    const int64_t code_bytes = c.weight == kW4 ? padded * 8 : c.weight == kW8 ? padded * 16 : padded * 32;
    group_bytes = code_bytes + (c.weight == kF16 ? 0 : round_up((c.wide ? 64 : 32) + 16, 64));
    make_x();
    weight.resize(static_cast<size_t>(panels * groups * group_bytes));
    for (int64_t i = 0; i < panels * groups; ++i) make_group(weight.data() + i * group_bytes, code_bytes);
    perm.resize(static_cast<size_t>(c.k)), smooth.resize(perm.size()), bias.resize(static_cast<size_t>(c.n));
    for (size_t j = 0; j < perm.size(); ++j) {
      const size_t other = j ? next() % (j + 1) : 0;
      perm[j] = perm[other], perm[other] = static_cast<int32_t>(j);
      smooth[j] = 1.25f + uniform();
    }
    for (float& b : bias) b = uniform();
    const int64_t columns = round_up(c.rank, 4);
    down = factor(round_up(c.rank, kPanel) * round_up(c.k, 4));
    up = factor(panels * kPanel * columns);
  }

  std::vector<uint8_t> factor(int64_t count) const {
    std::vector<uint8_t> bytes(static_cast<size_t>(count) * (c.wide_factors ? 4 : 2));
    for (size_t i = 0; i < static_cast<size_t>(count); ++i) {
      const float f = uniform();
      const uint16_t h = bits16(Dtype::kFloat16, f);
      if (c.wide_factors)
        std::memcpy(&bytes[4 * i], &f, 4);
      else
        std::memcpy(&bytes[2 * i], &h, 2);
    }
    return bytes;
  }

  void make_x() {
    x.resize(static_cast<size_t>(c.m * c.k * (c.dtype == Dtype::kFloat32 ? 4 : 2)));
    for (int64_t m = 0; m < c.m; ++m) {
      float size = 1.f;
      for (int e = below(40) - 20; e; e += e < 0 ? 1 : -1) size *= e < 0 ? .5f : 2.f;
      for (int64_t k = 0; k < c.k; ++k) {
        float v = c.fill == kLow      ? -3.f
                  : c.fill == kHigh   ? 3.f
                  : c.fill == kSpread ? ((m + k) % 2 ? 3.f : -3.f)
                                      : uniform() * size;
        if (c.fill == kBroken) {
          const uint32_t special[] = {0x7fc00000, 0x7f800000, 0xff800000, 0x7f7fffff,
                                      1,          0x80000000, 0x0d7fffff, 0x0d800000};
          if (m % 3 == 0 && k % 5 == 0) std::memcpy(&v, &special[below(8)], 4);
          if (m % 3 == 1) std::memcpy(&v, &special[4 + m / 3 % 4], 4);
        }
        if (c.dtype == Dtype::kFloat32)
          std::memcpy(&x[static_cast<size_t>(m * c.k + k) * 4], &v, 4);
        else {
          const uint16_t h = bits16(c.dtype, v);
          std::memcpy(&x[static_cast<size_t>(m * c.k + k) * 2], &h, 2);
        }
      }
    }
  }

  void make_group(uint8_t* p, int64_t code_bytes) {
    const bool flip = below(2);
    if (c.weight == kF16) {
      for (int64_t i = 0; i < code_bytes / 2; ++i) {
        const uint16_t h = c.fill == kHigh ? 0x7bff : c.fill == kLow ? 1 : bits16(Dtype::kFloat16, uniform());
        std::memcpy(p + 2 * i, &h, 2);
      }
      return;
    }
    for (int64_t i = 0; i < code_bytes; ++i)
      p[i] = c.fill == kLow      ? 0
             : c.fill == kHigh   ? 255
             : c.fill == kSpread ? (i % 2 ? 255 : 0)
                                 : static_cast<uint8_t>(next());
    p += code_bytes;
    for (int i = 0; i < kPanel; ++i) {
      const float s = uniform() / 64;
      const uint16_t h = bits16(Dtype::kFloat16, s);
      if (c.wide)
        std::memcpy(p + 4 * i, &s, 4);
      else
        std::memcpy(p + 2 * i, &h, 2);
    }
    p += c.wide ? 64 : 32;
    const int top = c.weight == kW4 ? 16 : 256;
    for (int i = 0; i < kPanel; ++i)
      p[i] = static_cast<uint8_t>(c.fill == kRandom || c.fill == kBroken ? below(top) : flip ? top - 1 : 0);
  }

  // The output of rows [first, first + count), in two spans of panels as two threads would take it.
  std::vector<uint8_t> run(const KernelTable& table, int64_t first, int64_t count) const {
    const size_t width = static_cast<size_t>(groups * padded), rows = static_cast<size_t>(count),
                 item = c.dtype == Dtype::kFloat32 ? 4 : 2;
    std::vector<int8_t> codes(rows * width + 64, 99);
    std::vector<int32_t> sums(rows * static_cast<size_t>(groups), 99);
    std::vector<float> scales(rows * static_cast<size_t>(groups) + rows, 99.f), floats(rows * width, 99.f);
    Rows r{x.data() + static_cast<size_t>(first * c.k) * item,
           c.dtype,
           count,
           c.k,
           c.group,
           groups,
           padded,
           c.perm ? perm.data() : nullptr,
           c.smooth ? smooth.data() : nullptr,
           c.hadamard,
           c.granularity,
           codes.data(),
           sums.data(),
           scales.data(),
           floats.data(),
           nullptr,
           nullptr,
           0,
           c.wide_factors,
           nullptr};
    std::vector<const uint8_t*> of_down;
    for (int64_t p = 0; p < round_up(c.rank, kPanel) / kPanel; ++p)
      of_down.push_back(down.data() + p * round_up(c.k, 4) * kPanel * (c.wide_factors ? 4 : 2));
    r.down = of_down.data();
    r.down_panels = static_cast<int64_t>(of_down.size());
    std::vector<float> hidden(rows * of_down.size() * kPanel, 99.f),
        scratch(static_cast<size_t>(scratch_floats(r)), 99.f);
    r.hidden = hidden.data();
    r.scratch = scratch.data();
    const int64_t blocks = (count + table.row_block - 1) / table.row_block;
    table.quantize_rows(r, 0, blocks / 2);
    table.quantize_rows(r, blocks / 2, blocks);
    std::vector<uint8_t> y(rows * static_cast<size_t>(c.n) * item + 32, 0xa5);
    const LinearArgs a{&r,
                       weight.data(),
                       c.n,
                       group_bytes,
                       c.wide,
                       c.bias ? bias.data() : nullptr,
                       y.data(),
                       c.rank ? up.data() : nullptr,
                       round_up(c.rank, 4),
                       c.wide_factors,
                       r.hidden};
    const auto linear = c.weight == kW4   ? table.linear_w4
                        : c.weight == kW8 ? table.linear_w8
                                          : table.linear_f16;
    linear(a, 0, panels / 3);
    linear(a, panels / 3, panels);
    for (size_t i = y.size() - 32; i < y.size(); ++i)
      if (y[i] != 0xa5) std::printf("%s wrote past its output\n", table.name), y[0] ^= 1;
    return y;
  }
};

// What stands between the linears of a decoder: norm, SiLU, cache and attention of `m` rows from `position`
// on.
std::vector<float> between(const KernelTable& table, int64_t m, int64_t position, int64_t head_dim,
                           int64_t share, bool half, bool norms) {
  const int64_t kv_heads = 2, heads = kv_heads * share, n = heads * head_dim,
                capacity = round_up(position + m, kPanel);
  state = 88172645463325252u + static_cast<uint64_t>(m * 1000 + position);
  const auto random = [](int64_t count, float scale) {
    std::vector<float> v(static_cast<size_t>(count));
    for (float& f : v) f = uniform() * scale;
    return v;
  };
  std::vector<float> x = random(m * n, 3.f), add = random(m * n, 3.f), weight = random(n, 2.f),
                     gate = random(m * n, 100.f), y(x.size());
  table.add_norm(NormArgs{x.data(), add.data(), weight.data(), y.data(), n, 1e-5f}, 0, m);
  table.silu_mul(gate.data(), add.data(), m, n, n);
  std::vector<float> k = random((position + m) * kv_heads * head_dim, 2.f),
                     v = random((position + m) * kv_heads * head_dim, 2.f);
  const std::vector<float> c = random((position + m) * head_dim / 2, 1.f),
                           s = random((position + m) * head_dim / 2, 1.f);
  std::vector<uint8_t> keys(static_cast<size_t>(kv_heads * capacity * head_dim * 4)), values(keys.size());
  std::vector<float> out(x.size()),
      scratch(static_cast<size_t>(attention_scratch(m < kTileRows ? m : kTileRows, share, head_dim)));
  AttentionArgs a{y.data(),
                  k.data(),
                  v.data(),
                  position + m,
                  heads,
                  kv_heads,
                  head_dim,
                  0,
                  norms ? weight.data() : nullptr,
                  norms ? weight.data() : nullptr,
                  1e-5f,
                  0.2f,
                  c.data(),
                  s.data(),
                  keys.data(),
                  values.data(),
                  capacity,
                  half,
                  share,
                  out.data()};
  table.append_rows(a, 0, position + m);
  a.m = m, a.position = position;
  table.attend(a, 0, attention_items(a), scratch.data());
  for (const std::vector<float>* more : {&x, &y, &gate, &k})
    out.insert(out.end(), more->begin(), more->end());
  return out;
}

}  // namespace

int main(int argc, char** argv) {
  const bool all = argc > 1 && !std::strcmp(argv[1], "--all");
  const KernelTable* scalar = nullptr;
  for (int i = 0; i < count(); ++i)
    if (!std::strcmp(at(i)->name, "scalar")) scalar = at(i);
  std::vector<const KernelTable*> tables;
  for (int i = 0; i < count(); ++i)
    if (at(i) != scalar && (all || supported(*at(i))) && (argc < 3 || !std::strcmp(at(i)->name, argv[2])))
      tables.push_back(at(i));

  const int64_t ms[] = {1, 2, 3, 4, 5, 6, 7, 8, 9, 16, 17, 33, 0, 150, 40, 48},
                ns[] = {1, 15, 16, 17, 40, 64, 67, 129};
  const int64_t ranks[] = {0, 0, 3, 16, 20, 64};
  const int64_t ks[] = {1, 7, 32, 33, 64, 96, 100, 320, 512}, gs[] = {1, 8, 16, 20, 32, 64, 128, 1000000};
  std::vector<long> done(tables.size()), wrong(tables.size());
  for (int w = 0; w < kWeights; ++w)
    for (int granularity = 0; granularity < 3; ++granularity)
      for (int dtype = 0; dtype < 3; ++dtype)
        for (int fill = 0; fill < kFills; ++fill)
          for (int round = 0; round < 16; ++round) {
            if (w == kF16 && granularity != 2) continue;
            Case c{static_cast<Weight>(w),
                   static_cast<Granularity>(granularity),
                   static_cast<Dtype>(dtype),
                   static_cast<Fill>(fill),
                   1,
                   ns[below(8)],
                   ks[below(9)],
                   gs[below(8)],
                   below(2) != 0,
                   below(3) == 0,
                   below(3) == 0,
                   below(2) != 0,
                   false,
                   ranks[below(6)],
                   below(3) == 0};
            c.m = ms[round] ? ms[round] : 1 + below(40);  // every height of a tile, and some of several tiles
            if (round == 0)
              c.k = 4096, c.group = 1000000, c.m = 9, c.n = 33;  // long sums: d is no longer exact in float32
            if (c.m == 150) c.k = 96, c.group = 32, c.n = 33;
            if (c.m == 40) c.k = 1000, c.group = 1000;  // groups that are cut, with and without a short end
            if (c.m == 48) c.k = 1100, c.group = 600;
            c.hadamard = c.k % kMixed == 0 && below(4) != 0;
            if (c.group > c.k) c.group = c.k;
            const Problem p(c);
            const std::vector<uint8_t> want = p.run(*scalar, 0, c.m);
            const size_t row = static_cast<size_t>(c.n) * (c.dtype == Dtype::kFloat32 ? 4 : 2);
            for (size_t t = 0; t < tables.size(); ++t) {
              const std::vector<uint8_t> got = p.run(*tables[t], 0, c.m);
              bool same = got == want;
              const int64_t alone = below(static_cast<int>(c.m));  // one row of the batch by itself
              const std::vector<uint8_t> one = p.run(*tables[t], alone, 1);
              same = same && !std::memcmp(one.data(), want.data() + static_cast<size_t>(alone) * row, row);
              done[t] += 2;
              if (same) continue;
              if (!wrong[t]++)
                std::printf(
                    "%s differs: weight %d granularity %d dtype %d fill %d m %ld n %ld k %ld group %ld wide "
                    "%d perm %d smooth %d bias %d hadamard %d rank %ld\n",
                    tables[t]->name, w, granularity, dtype, fill, static_cast<long>(c.m),
                    static_cast<long>(c.n), static_cast<long>(c.k), static_cast<long>(c.group), c.wide,
                    c.perm, c.smooth, c.bias, c.hadamard, static_cast<long>(c.rank));
              if (argc > 3) return 1;
            }
          }
  for (const int64_t m : {1, 5, 16, 37})
    for (const int64_t position : {0, 3, 250, 600})
      for (int kind = 0; kind < 4; ++kind) {
        const int64_t head_dim = kind < 2 ? 64 : 16 * (1 + kind % 2 * 2), share = 1 + kind;
        const std::vector<float> want = between(*scalar, m, position, head_dim, share, kind % 2, kind > 1);
        for (size_t t = 0; t < tables.size(); ++t) {
          const std::vector<float> got =
              between(*tables[t], m, position, head_dim, share, kind % 2, kind > 1);
          ++done[t];
          if (!std::memcmp(got.data(), want.data(), want.size() * sizeof(float))) continue;
          if (!wrong[t]++)
            std::printf("%s differs between linears: m %ld position %ld kind %d\n", tables[t]->name,
                        static_cast<long>(m), static_cast<long>(position), kind);
        }
      }
  long differences = 0;
  for (size_t t = 0; t < tables.size(); ++t) {
    std::printf("%s: %ld outputs compared with scalar, %ld differ\n", tables[t]->name, done[t], wrong[t]);
    differences += wrong[t];
  }
  std::printf("differences: %ld\n", differences);
  return differences != 0 || tables.empty();
}
