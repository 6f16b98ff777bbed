// What stands between the linears of a packed stack on the CPU, in float32: the verbs of the decoder step, an
// operator each.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <optional>
#include <string>
#include <tuple>

#include "cpu/decoder.h"
#include "host.h"

using lowbit::parallel, lowbit::table_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace cpu = lowbit::cpu;

namespace {

constexpr int64_t kWork = 16384;  // values a thread takes at least

const float* floats(const Tensor& t, const char* name, int64_t rows, int64_t columns) {
  STD_TORCH_CHECK(t.dim() == 2 && t.is_contiguous() && t.scalar_type() == ScalarType::Float &&
                      t.size(0) == rows && t.size(1) == columns,
                  name, ": accepted is a contiguous float32 [", rows, ", ", columns, "], found ", t.numel(),
                  " values");
  return static_cast<const float*>(t.const_data_ptr());
}
const float* vector(const std::optional<Tensor>& t, const char* name, int64_t n) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(
      t->dim() == 1 && t->size(0) == n && t->is_contiguous() && t->scalar_type() == ScalarType::Float, name,
      ": accepted is a contiguous float32 [", n, "], found ", t->numel(), " values");
  return static_cast<const float*>(t->const_data_ptr());
}
// [M, N] of rows that the verbs read 16 columns at a time.
std::tuple<int64_t, int64_t> rows_of(const Tensor& x, const char* name) {
  STD_TORCH_CHECK(x.dim() == 2 && x.size(1) > 0 && x.size(1) % cpu::kPanel == 0, name,
                  ": accepted is [M, N] with N a multiple of 16, found ", x.dim(),
                  " dimensions, the last of ", x.dim() ? x.size(x.dim() - 1) : 0);
  return {x.size(0), x.size(1)};
}

// x += add, in place; the RMS norm of x.
Tensor add_norm(const Tensor& x, const std::optional<Tensor>& add, const Tensor& weight, double eps,
                std::string isa) {
  const cpu::KernelTable& table = *table_of(isa);
  const auto [m, n] = rows_of(x, "x");
  floats(x, "x", m, n);
  Tensor y = torch::stable::new_empty(x, {m, n});
  cpu::NormArgs a{};
  a.x = static_cast<float*>(x.mutable_data_ptr());
  a.add = add.has_value() ? floats(*add, "add", m, n) : nullptr;
  a.weight = vector(weight, "weight", n);
  a.y = static_cast<float*>(y.mutable_data_ptr());
  a.n = n;
  a.eps = static_cast<float>(eps);
  parallel(0, m, 1 + kWork / n, [&](int64_t begin, int64_t end) { table.add_norm(a, begin, end); });
  return y;
}

// [M, 2N], gates before ups -> silu(gate) * up [M, N].
Tensor silu_mul(const Tensor& x, std::string isa) {
  const cpu::KernelTable& table = *table_of(isa);
  const auto [m, both] = rows_of(x, "x");
  const int64_t n = both / 2;
  STD_TORCH_CHECK(n % cpu::kPanel == 0, "x: found ", both, " columns, accepted is a multiple of 32");
  const float* from = floats(x, "x", m, both);
  Tensor y = torch::stable::new_empty(x, {m, n});
  auto* to = static_cast<float*>(y.mutable_data_ptr());
  parallel(0, m, 1 + kWork / n, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      std::memcpy(to + i * n, from + i * both, static_cast<size_t>(n) * sizeof(float));
      table.silu_mul(to + i * n, from + i * both + n, 1, n, n);
    }
  });
  return y;
}

struct Free {
  void operator()(void* p) const { std::free(p); }
};
std::unique_ptr<float, Free> buffer(int64_t count) {
  void* p = std::aligned_alloc(64, static_cast<size_t>(cpu::round_up(count * 4 + 1, 64)));
  STD_TORCH_CHECK(p, "out of memory: ", count, " floats for attention");
  return std::unique_ptr<float, Free>(static_cast<float*>(p));
}

// qkv [M, (H + 2 G) D]: heads are normed, turned by the angles of their row, and see their segment. Keys turn
// in place.
Tensor packed_attention(const Tensor& qkv, const std::optional<Tensor>& q_norm,
                        const std::optional<Tensor>& k_norm, const Tensor& cosines, const Tensor& sines,
                        const Tensor& bounds, int64_t heads, int64_t kv_heads, double eps, double scale,
                        std::string isa) {
  const cpu::KernelTable& table = *table_of(isa);
  const auto [m, width] = rows_of(qkv, "qkv");
  STD_TORCH_CHECK(kv_heads > 0 && heads > 0 && heads % kv_heads == 0, "heads: found ", heads, " and ",
                  kv_heads, " of keys, accepted is a multiple");
  const int64_t d = width / (heads + 2 * kv_heads);
  STD_TORCH_CHECK(d > 0 && d % cpu::kPanel == 0 && d * (heads + 2 * kv_heads) == width, "qkv: found ", width,
                  " columns, accepted are ", heads + 2 * kv_heads, " heads of a multiple of 16");
  floats(qkv, "qkv", m, width);
  auto* rows = static_cast<float*>(qkv.mutable_data_ptr());
  cpu::AttentionArgs a{};
  a.heads = heads;
  a.kv_heads = kv_heads;
  a.head_dim = d;
  a.q_norm = vector(q_norm, "q_norm", d);
  a.k_norm = vector(k_norm, "k_norm", d);
  a.eps = static_cast<float>(eps);
  a.scale = static_cast<float>(scale);
  const float* c = floats(cosines, "cosines", m, d / 2);
  const float* s = floats(sines, "sines", m, d / 2);
  a.heads_per_item = heads / kv_heads;
  a.row = width;
  a.everyone = true;
  STD_TORCH_CHECK(bounds.dim() == 1 && bounds.is_contiguous() && bounds.scalar_type() == ScalarType::Int &&
                      bounds.size(0) > 0,
                  "bounds: accepted is a contiguous int32 [S + 1]");
  const auto* ends = static_cast<const int32_t*>(bounds.const_data_ptr());
  const int64_t segments = bounds.size(0) - 1;
  int64_t longest = 0;
  STD_TORCH_CHECK(ends[0] == 0 && ends[segments] == m, "bounds: found ", ends[0], " .. ", ends[segments],
                  ", accepted is 0 .. ", m);
  for (int64_t i = 0; i < segments; ++i) {
    STD_TORCH_CHECK(ends[i] <= ends[i + 1], "bounds: found ", ends[i + 1], " after ", ends[i],
                    ", accepted are bounds that do not fall");
    longest = std::max<int64_t>(longest, ends[i + 1] - ends[i]);
  }
  Tensor y = torch::stable::new_empty(qkv, {m, heads * d});
  if (!m) return y;
  auto* out = static_cast<float*>(y.mutable_data_ptr());
  a.capacity = cpu::round_up(longest, cpu::kPanel);
  const auto keys = buffer(kv_heads * a.capacity * d), values = buffer(kv_heads * a.capacity * d);
  a.keys = keys.get();
  a.values = values.get();
  for (int64_t i = 0; i < segments; ++i) {
    const int64_t first = ends[i];
    a.m = ends[i + 1] - first;
    if (!a.m) continue;
    a.q = rows + first * width;
    a.k = a.q + heads * d;
    a.v = a.k + kv_heads * d;
    a.cosines = c + first * (d / 2);
    a.sines = s + first * (d / 2);
    a.out = out + first * heads * d;
    parallel(0, a.m, 1 + kWork / (2 * kv_heads * d),
             [&](int64_t begin, int64_t end) { table.append_rows(a, begin, end); });
    const int64_t tall = std::min(a.m, cpu::kTileRows), work = tall * a.heads_per_item * d * a.m;
    parallel(0, cpu::attention_items(a), 1 + kWork / work, [&](int64_t begin, int64_t end) {
      const auto scratch = buffer(cpu::attention_scratch(tall, a.heads_per_item, d));
      table.attend(a, begin, end, scratch.get());
    });
  }
  return y;
}

}  // namespace

// A macro more, so that LOWBIT_OPS is replaced by the name before it becomes a string.
#define LOWBIT_FRAGMENT(NAME, M) STABLE_TORCH_LIBRARY_FRAGMENT(NAME, M)
#define LOWBIT_LIBRARY_IMPL(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)

LOWBIT_FRAGMENT(LOWBIT_OPS, m) {
  m.def("add_norm(Tensor(a!) x, Tensor? add, Tensor weight, float eps, str isa=\"\") -> Tensor");
  m.def("silu_mul(Tensor x, str isa=\"\") -> Tensor");
  m.def(
      "packed_attention(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cosines, Tensor sines, Tensor "
      "bounds, int heads, int kv_heads, float eps, float scale, str isa=\"\") -> Tensor");
}
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, CPU, m) {
  m.impl("add_norm", TORCH_BOX(&add_norm));
  m.impl("silu_mul", TORCH_BOX(&silu_mul));
  m.impl("packed_attention", TORCH_BOX(&packed_attention));
}
