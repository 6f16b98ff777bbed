// Every operator that lowbit gives to torch on the CPU, and nothing else: check, allocate, pick, call.
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
#include <vector>

#include "host.h"

using lowbit::parallel, lowbit::table_of;
using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace cpu = lowbit::cpu;

static std::string cpu_isas() {
  std::string names;
  for (int i = 0; i < cpu::count(); ++i)
    if (cpu::supported(*cpu::at(i))) names += std::string(names.empty() ? "" : ",") + cpu::at(i)->name;
  return names;
}

// The table that runs when nobody names one: the best, or what QM_CPU_ISA lowers it to.
static const cpu::KernelTable* default_table() {
  const char* word = std::getenv("QM_CPU_ISA");
  const cpu::KernelTable* table = cpu::pick(word ? word : "");
  STD_TORCH_CHECK(table, "QM_CPU_ISA: found '", word ? word : "", "', this CPU has ", cpu_isas());
  return table;
}
const cpu::KernelTable* lowbit::table_of(const std::string& isa) {
  static const cpu::KernelTable* const chosen = default_table();
  if (isa.empty()) return chosen;
  const cpu::KernelTable* table = cpu::pick(isa.c_str());
  STD_TORCH_CHECK(table, "isa: found '", isa, "', this CPU has ", cpu_isas());
  return table;
}
static std::string cpu_isa() { return table_of("")->name; }

static cpu::Dtype dtype_of(const Tensor& x) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return cpu::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return cpu::Dtype::kBfloat16;
    case ScalarType::Half:
      return cpu::Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, "x: found dtype ", static_cast<int>(x.scalar_type()),
                      " (c10 number), accepted are float32, bfloat16, float16");
  }
}

// Scratch that one call owns, on a cache line. Sizes are in bytes.
struct Free {
  void operator()(void* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<void, Free>;
static Buffer allocate(int64_t bytes) {
  void* p = std::aligned_alloc(64, static_cast<size_t>(cpu::round_up(bytes + 1, 64)));
  STD_TORCH_CHECK(p, "out of memory: ", bytes, " bytes for the activations");
  return Buffer(p);
}

template <class T>
static const T* optional_data(const std::optional<Tensor>& t, const char* name, int64_t size,
                              ScalarType dtype) {
  if (!t.has_value()) return nullptr;
  STD_TORCH_CHECK(t->dim() == 1 && t->size(0) == size && t->scalar_type() == dtype && t->is_contiguous(),
                  name, ": accepted is a contiguous tensor [", size, "] of c10 dtype ",
                  static_cast<int>(dtype), ", found ", t->numel(), " elements of dtype ",
                  static_cast<int>(t->scalar_type()));
  return static_cast<const T*>(t->const_data_ptr());
}

// x as the kernels read it; the buffers belong to the call.
struct Prepared {
  cpu::Rows rows;
  Buffer codes, sums, scales, floats, hidden;
};
static void prepare(Prepared& p, const cpu::KernelTable& table) {
  cpu::Rows& r = p.rows;
  const int64_t width = r.groups * r.padded;
  if (r.granularity == cpu::Granularity::kNone) {
    p.floats = allocate(r.m * width * 4);
    r.floats = static_cast<float*>(p.floats.get());
  } else {
    p.codes = allocate(r.m * width);
    p.sums = allocate(r.m * r.groups * 4);
    p.scales = allocate(r.m * (r.granularity == cpu::Granularity::kGroup ? r.groups : 1) * 4);
    r.codes = static_cast<int8_t*>(p.codes.get());
    r.sums = static_cast<int32_t*>(p.sums.get());
    r.scales = static_cast<float*>(p.scales.get());
  }
  if (r.down_panels) {
    p.hidden = allocate(r.m * r.down_panels * cpu::kPanel * 4);
    r.hidden = static_cast<float*>(p.hidden.get());
  }
  const int64_t blocks = (r.m + table.row_block - 1) / table.row_block;
  const int64_t work = width * (1 + r.down_panels);  // of one row
  const auto run = [&](int64_t begin, int64_t end) {
    const Buffer scratch = allocate(cpu::scratch_floats(r) * 4);
    cpu::Rows mine = r;
    mine.scratch = static_cast<float*>(scratch.get());
    table.quantize_rows(mine, begin, end);
  };
  if (r.m * work < 32768)
    run(0, blocks);
  else
    parallel(0, blocks, 1 + 16384 / (table.row_block * work), run);
}

// What stands between x and the codes, for r.k columns.
static void read_transforms(cpu::Rows& r, const std::optional<Tensor>& perm,
                            const std::optional<Tensor>& smooth, int64_t hadamard) {
  r.perm = optional_data<int32_t>(perm, "perm", r.k, ScalarType::Int);
  r.smooth = optional_data<float>(smooth, "smooth", r.k, ScalarType::Float);
  STD_TORCH_CHECK(hadamard == 0 || hadamard == cpu::kMixed, "hadamard: found ", hadamard,
                  ", accepted are 0 and ", cpu::kMixed);
  STD_TORCH_CHECK(!hadamard || r.k % cpu::kMixed == 0, "hadamard: found ", hadamard, " with K=", r.k,
                  ", accepted is a multiple of ", cpu::kMixed);
  r.hadamard = hadamard != 0;
  if (r.perm)
    for (int64_t j = 0; j < r.k; ++j)
      STD_TORCH_CHECK(r.perm[j] >= 0 && r.perm[j] < r.k, "perm: found ", r.perm[j], " at ", j,
                      ", accepted is 0 .. ", r.k - 1);
}

// The panels of one factor of a low rank: [panels, columns rounded up to 4, 16].
static bool is_factor(const Tensor& t, int64_t panels, int64_t columns) {
  return t.dim() == 3 && t.is_contiguous() &&
         (t.scalar_type() == ScalarType::Half || t.scalar_type() == ScalarType::Float) &&
         t.size(0) == panels && t.size(1) == columns && t.size(2) == cpu::kPanel;
}
static void read_low_rank(cpu::Rows& r, cpu::LinearArgs& a, std::vector<const uint8_t*>& panels,
                          const std::optional<Tensor>& down, const std::optional<Tensor>& up) {
  STD_TORCH_CHECK(down.has_value() == up.has_value(),
                  "down, up: found one of them, accepted are both or none");
  if (!up.has_value() || up->numel() == 0) return;
  a.rank = up->dim() == 3 ? up->size(1) : 0;
  r.down_panels = (a.rank + cpu::kPanel - 1) / cpu::kPanel;
  const int64_t k = cpu::round_up(r.k, 4), of_n = (a.n + cpu::kPanel - 1) / cpu::kPanel;
  STD_TORCH_CHECK(a.rank > 0 && a.rank % 4 == 0 && is_factor(*up, of_n, a.rank),
                  "up: accepted is float16 or float32 [", of_n, ", R rounded up to 4, 16] for N=", a.n);
  STD_TORCH_CHECK(is_factor(*down, r.down_panels, k), "down: accepted is float16 or float32 [", r.down_panels,
                  ", ", k, ", 16] for K=", r.k, " and an up of rank ", a.rank);
  r.wide_down = down->scalar_type() == ScalarType::Float;
  a.wide_up = up->scalar_type() == ScalarType::Float;
  a.up = static_cast<const uint8_t*>(up->const_data_ptr());
  const auto* first = static_cast<const uint8_t*>(down->const_data_ptr());
  for (int64_t i = 0; i < r.down_panels; ++i)
    panels.push_back(first + i * k * cpu::kPanel * (r.wide_down ? 4 : 2));
  r.down = panels.data();
}

// weight: bits 4, 8: uint8 [panels, G, group bytes]; bits 16: float16 [panels, K rounded up to 4, 16].
static Tensor linear(const Tensor& x_in, const Tensor& weight, int64_t n, int64_t group_size, int64_t bits,
                     int64_t activation, const std::optional<Tensor>& bias, const std::optional<Tensor>& perm,
                     const std::optional<Tensor>& smooth, std::string isa, int64_t hadamard,
                     const std::optional<Tensor>& down, const std::optional<Tensor>& up) {
  const cpu::KernelTable& table = *table_of(isa);
  STD_TORCH_CHECK(x_in.dim() >= 1, "x: found a scalar, accepted is [..., K]");
  const Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  const int64_t k = x.size(x.dim() - 1), m = k ? x.numel() / k : 0;
  STD_TORCH_CHECK(bits == 4 || bits == 8 || bits == 16, "bits: found ", bits, ", accepted are 4, 8, 16");
  STD_TORCH_CHECK(activation >= 0 && activation <= 2, "activation: found ", activation,
                  ", accepted are 0 (token), 1 (group), 2 (none)");
  STD_TORCH_CHECK(bits != 16 || activation == 2, "activation: found ", activation,
                  ", accepted with float16 weights is 2 (none)");
  STD_TORCH_CHECK(k > 0 && n > 0 && group_size > 0, "shape: found K=", k, " N=", n, " group ", group_size,
                  ", accepted are sizes above 0");
  STD_TORCH_CHECK(bits != 8 || activation == 2 || group_size <= 66310, "group_size: found ", group_size,
                  ", accepted with 8-bit codes is at most 66310 (int32 sums)");

  Prepared p{};
  cpu::Rows& r = p.rows;
  r.dtype = dtype_of(x);
  r.x = x.const_data_ptr();
  r.m = m;
  r.k = k;
  r.group = bits == 16 ? k : group_size;
  r.groups = (k + r.group - 1) / r.group;
  r.padded = cpu::round_up(r.group, bits == 16 ? 4 : cpu::kStep);
  r.granularity = static_cast<cpu::Granularity>(activation);
  read_transforms(r, perm, smooth, hadamard);

  const int64_t panels = (n + cpu::kPanel - 1) / cpu::kPanel;
  cpu::LinearArgs a{};
  STD_TORCH_CHECK(weight.dim() == 3 && weight.is_contiguous() && weight.size(0) == panels,
                  "weight: accepted is ", panels, " contiguous panels for N=", n, ", found ", weight.size(0));
  if (bits == 16) {
    STD_TORCH_CHECK(weight.scalar_type() == ScalarType::Half && weight.size(1) == r.padded &&
                        weight.size(2) == cpu::kPanel,
                    "weight: accepted is float16 [", panels, ", ", r.padded, ", 16] for K=", k, ", found [",
                    weight.size(0), ", ", weight.size(1), ", ", weight.size(2), "]");
    a.group_bytes = r.padded * cpu::kPanel * 2;
  } else {
    a.group_bytes = weight.size(2);
    const int64_t code_bytes = r.padded * cpu::kPanel * bits / 8, tail = a.group_bytes - code_bytes;
    STD_TORCH_CHECK(
        weight.scalar_type() == ScalarType::Byte && weight.size(1) == r.groups && (tail == 64 || tail == 128),
        "weight: accepted is uint8 [", panels, ", ", r.groups, ", ", code_bytes + 64, " or ",
        code_bytes + 128, "] for K=", k, " group ", group_size, " bits ", bits, ", found [", weight.size(0),
        ", ", weight.size(1), ", ", weight.size(2), "]");
    a.wide_scales = tail == 128;
    const auto* first_panel = static_cast<const uint8_t*>(weight.const_data_ptr());
    uint32_t columns = 0;
    std::memcpy(&columns, first_panel + r.groups * a.group_bytes - 4, 4);
    STD_TORCH_CHECK((r.groups - 1) * group_size + columns == k, "x: found K=", k, ", accepted is ",
                    (r.groups - 1) * group_size + columns, ", the columns that were packed");
  }

  std::vector<int64_t> sizes(x.sizes().begin(), x.sizes().end());
  sizes.back() = n;
  Tensor y = torch::stable::new_empty(x, sizes);
  a.n = n;
  std::vector<const uint8_t*> down_panels;
  read_low_rank(r, a, down_panels, down, up);
  if (m == 0) return y;
  prepare(p, table);
  a.rows = &r;
  a.hidden = r.hidden;
  a.weight = static_cast<const uint8_t*>(weight.const_data_ptr());
  a.bias = optional_data<float>(bias, "bias", n, ScalarType::Float);
  a.y = y.mutable_data_ptr();
  const auto kernel = bits == 4 ? table.linear_w4 : bits == 8 ? table.linear_w8 : table.linear_f16;
  const int64_t work =
      r.groups * r.padded * cpu::kPanel * m;  // products of one panel; a chunk gets at least 64 k
  parallel(0, panels, 1 + 65536 / work, [&](int64_t begin, int64_t end) { kernel(a, begin, end); });
  return y;
}

// x [M, K] -> int8 [M, K] and float32 [M], or [M, ceil(K / group_size)] where group_size > 0.
static std::tuple<Tensor, Tensor> quantize_rows(const Tensor& x_in, int64_t group_size, std::string isa,
                                                const std::optional<Tensor>& perm,
                                                const std::optional<Tensor>& smooth, int64_t hadamard) {
  const cpu::KernelTable& table = *table_of(isa);
  STD_TORCH_CHECK(x_in.dim() == 2, "x: found ", x_in.dim(), " dimensions, accepted is [M, K]");
  const Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  cpu::Rows r{};
  r.dtype = dtype_of(x);
  r.m = x.size(0);
  r.k = x.size(1);
  STD_TORCH_CHECK(r.k > 0 && group_size >= 0, "shape: found K=", r.k, " group ", group_size);
  r.group = group_size ? group_size : r.k;
  r.groups = (r.k + r.group - 1) / r.group;
  r.padded = cpu::round_up(r.group, cpu::kStep);
  r.granularity = group_size ? cpu::Granularity::kGroup : cpu::Granularity::kToken;
  read_transforms(r, perm, smooth, hadamard);
  Tensor codes = torch::stable::new_empty(x, {r.m, r.k}, ScalarType::Char);
  Tensor scales = group_size ? torch::stable::new_empty(x, {r.m, r.groups}, ScalarType::Float)
                             : torch::stable::new_empty(x, {r.m}, ScalarType::Float);
  auto* q = static_cast<int8_t*>(codes.mutable_data_ptr());
  auto* s = static_cast<float*>(scales.mutable_data_ptr());
  const int64_t row_bytes = r.k * (r.dtype == cpu::Dtype::kFloat32 ? 4 : 2), width = r.groups * r.padded;
  const auto* base = static_cast<const char*>(x.const_data_ptr());
  parallel(0, r.m, 1 + 16384 / r.k, [&](int64_t begin, int64_t end) {
    const Buffer scratch = allocate(cpu::scratch_floats(r) * 4), padded = allocate(width),
                 sums = allocate(r.groups * 4);
    for (int64_t m = begin; m < end; ++m) {
      cpu::Rows row = r;
      row.x = base + m * row_bytes;
      row.m = 1;
      row.scratch = static_cast<float*>(scratch.get());
      row.codes = static_cast<int8_t*>(padded.get());
      row.sums = static_cast<int32_t*>(sums.get());
      row.scales = s + m * (group_size ? r.groups : 1);
      table.quantize_rows(row, 0, 1);
      for (int64_t g = 0; g < r.groups; ++g) {
        const int64_t first = g * r.group, width_g = r.k - first < r.group ? r.k - first : r.group;
        std::copy_n(row.codes + g * r.padded, width_g, q + m * r.k + first);
      }
    }
  });
  return {codes, scales};
}

#define LOWBIT_LIBRARY(NAME, M) STABLE_TORCH_LIBRARY(NAME, M)
#define LOWBIT_LIBRARY_IMPL(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)

LOWBIT_LIBRARY(LOWBIT_OPS, m) {
  m.def("cpu_isas() -> str");
  m.def("cpu_isa() -> str");
  m.def(
      "quantize_rows(Tensor x, int group_size=0, str isa=\"\", *, Tensor? perm=None, Tensor? smooth=None, "
      "int hadamard=0) -> (Tensor, Tensor)");
  m.def(
      "linear(Tensor x, Tensor weight, int n, int group_size, int bits, int activation, Tensor? bias=None, "
      "Tensor? perm=None, Tensor? smooth=None, str isa=\"\", *, int hadamard=0, Tensor? down=None, Tensor? "
      "up=None) -> Tensor");
  // Schemas of the second library (torch_ops_cuda.cpp, step_ops_cuda.cpp), here so that every build of torch
  // can trace them.
  m.def(
      "cuda_quantize(Tensor x, Tensor(a!)? residual, Tensor? norm, float eps, Tensor? smooth, Tensor? down, "
      " int rank, bool hadamard, bool silu, bool tile_order) -> (Tensor, Tensor, Tensor)");
  m.def(
      "cuda_linear(Tensor codes, Tensor scales, Tensor? low, Tensor weight, Tensor channel, Tensor? bias, "
      "Tensor? up, int n, int mode, int out, int row=-1, bool gated=False) -> Tensor");
  m.def(
      "cuda_quantize4(Tensor x, Tensor(a!)? residual, Tensor? norm, float eps, Tensor? smooth, Tensor? down, "
      "int rank, bool hadamard, bool silu, float clip) -> (Tensor, Tensor, Tensor, Tensor)");
  m.def(
      "cuda_linear4(Tensor codes, Tensor group_scales, Tensor scales, Tensor? low, Tensor weight, "
      "Tensor weight_scales, Tensor? bias, Tensor? up, int n, int out) -> Tensor");
  m.def(
      "cuda_norm_rope(Tensor(a!) qkv, Tensor? q_norm, Tensor? k_norm, Tensor cosines, Tensor sines, int "
      "heads, "
      "int kv_heads, float eps) -> ()");
  m.def(
      "cuda_dequantize(Tensor codes, Tensor scales, Tensor? zeros, int k, int group_size, int bits, int out) "
      "-> Tensor");
  m.def("cuda_inverse_rms(Tensor x, float eps) -> Tensor");
  m.def(
      "cuda_guided_score(Tensor logits, Tensor guidance, Tensor penalty, Tensor temperature, Tensor noise, "
      "Tensor valid, Tensor tokens, int mask_id) -> (Tensor, Tensor)");
  m.def("cuda_attention(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale) -> Tensor");
  m.def(
      "cuda_attention_quantize(Tensor q, Tensor k, Tensor v, Tensor bounds, float scale, bool tile_order) -> "
      "(Tensor, Tensor)");
  m.def("cuda_reveal(Tensor(a!) tokens, Tensor pred, Tensor score, Tensor k) -> ()");
}
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, CompositeExplicitAutograd, m) {
  m.impl("cpu_isas", TORCH_BOX(&cpu_isas));
  m.impl("cpu_isa", TORCH_BOX(&cpu_isa));
}
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, CPU, m) {
  m.impl("quantize_rows", TORCH_BOX(&quantize_rows));
  m.impl("linear", TORCH_BOX(&linear));
}
