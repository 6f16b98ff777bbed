// The operators of the native decoder step: check, keep what the step reads alive, call cpu/decoder.cpp.
//
// A decoder is made once from the tensors of a model and known by a number. It holds references, so nothing
// that a step reads can go away before decoder_free.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "cpu/decoder.h"
#include "cpu/team.h"
#include "host.h"

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace cpu = lowbit::cpu;

namespace {

struct Held {
  cpu::Decoder decoder;
  std::vector<Tensor> tensors;
};
std::mutex guard;
int64_t next_number = 1;
// Never destroyed: at the end of the process torch may be gone before this file's statics.
std::map<int64_t, std::shared_ptr<const Held>>& decoders() {
  static auto* const all = new std::map<int64_t, std::shared_ptr<const Held>>();
  return *all;
}
std::shared_ptr<const Held> find(int64_t number) {
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = decoders().find(number);
  STD_TORCH_CHECK(found != decoders().end(), "decoder: found number ", number,
                  ", which is none or was freed");
  return found->second;
}

// Reads the flat lists in the order that src/lowbit/engines/llama.py writes them. An empty tensor is none.
class Reader {
 public:
  Reader(const std::vector<Tensor>& tensors, const std::vector<int64_t>& sizes)
      : tensors_(tensors), sizes_(sizes) {}
  int64_t size(const char* name) {
    STD_TORCH_CHECK(at_size_ < sizes_.size(), "sizes: found ", sizes_.size(), " values, ", name,
                    " is missing");
    return sizes_[at_size_++];
  }
  const Tensor& tensor(const char* name) {
    STD_TORCH_CHECK(at_tensor_ < tensors_.size(), "tensors: found ", tensors_.size(), ", ", name,
                    " is missing");
    return tensors_[at_tensor_++];
  }
  template <class T>
  const T* vector(const char* name, int64_t n, ScalarType dtype, bool optional) {
    const Tensor& t = tensor(name);
    if (optional && !t.numel()) return nullptr;
    STD_TORCH_CHECK(t.numel() == n && t.scalar_type() == dtype && t.is_contiguous(), name, ": accepted are ",
                    n, " contiguous values of c10 dtype ", static_cast<int>(dtype), ", found ", t.numel(),
                    " of dtype ", static_cast<int>(t.scalar_type()));
    return static_cast<const T*>(t.const_data_ptr());
  }
  cpu::PackedLinear linear(const char* name, int64_t n, int64_t k) {
    cpu::PackedLinear l{};
    l.n = n;
    l.k = k;
    l.group = size(name);
    l.bits = static_cast<int>(size(name));
    const int64_t activation = size(name);
    const Tensor& w = tensor(name);
    STD_TORCH_CHECK(l.bits == 4 || l.bits == 8 || l.bits == 16, name, ": found bits ", l.bits,
                    ", accepted are 4, 8, 16");
    STD_TORCH_CHECK(activation >= 0 && activation <= 2 && (l.bits != 16 || activation == 2), name,
                    ": found activation ", activation, ", accepted are 0 (token), 1 (group), 2 (none)");
    STD_TORCH_CHECK(l.group > 0 && (l.bits != 8 || activation == 2 || l.group <= 66310), name,
                    ": found group ", l.group);
    l.granularity = static_cast<cpu::Granularity>(activation);
    const int64_t panels = (n + cpu::kPanel - 1) / cpu::kPanel;
    if (l.bits == 16) l.group = k;
    l.groups = (k + l.group - 1) / l.group;
    l.padded = cpu::round_up(l.group, l.bits == 16 ? 4 : cpu::kStep);
    const int64_t code_bytes = l.padded * cpu::kPanel * l.bits / 8;
    const bool plain = w.dim() == 3 && w.is_contiguous() && w.size(0) == panels;
    if (l.bits == 16) {
      STD_TORCH_CHECK(
          plain && w.scalar_type() == ScalarType::Half && w.size(1) == l.padded && w.size(2) == cpu::kPanel,
          name, ": accepted is a float16 weight of ", panels, " panels for K=", k);
      l.group_bytes = code_bytes;
    } else {
      STD_TORCH_CHECK(plain && w.scalar_type() == ScalarType::Byte && w.size(1) == l.groups &&
                          (w.size(2) == code_bytes + 64 || w.size(2) == code_bytes + 128),
                      name, ": accepted is a packed weight of ", panels, " panels and ", l.groups,
                      " groups for K=", k);
      l.group_bytes = w.size(2);
      l.wide_scales = l.group_bytes == code_bytes + 128;
      uint32_t columns = 0;
      std::memcpy(&columns, static_cast<const uint8_t*>(w.const_data_ptr()) + l.groups * l.group_bytes - 4,
                  4);
      STD_TORCH_CHECK((l.groups - 1) * l.group + columns == k, name, ": found ", k, " columns, packed were ",
                      (l.groups - 1) * l.group + columns);
    }
    l.weight = static_cast<const uint8_t*>(w.const_data_ptr());
    l.bias = vector<float>(name, n, ScalarType::Float, true);
    l.perm = vector<int32_t>(name, k, ScalarType::Int, true);
    l.smooth = vector<float>(name, k, ScalarType::Float, true);
    if (l.perm)
      for (int64_t j = 0; j < k; ++j)
        STD_TORCH_CHECK(l.perm[j] >= 0 && l.perm[j] < k, name, ": found perm ", l.perm[j], " at ", j);
    const int64_t hadamard = size(name);
    STD_TORCH_CHECK(hadamard == 0 || (hadamard == cpu::kMixed && k % cpu::kMixed == 0), name,
                    ": found hadamard ", hadamard, " with K=", k);
    l.hadamard = hadamard != 0;
    const Tensor &down = tensor(name), &up = tensor(name);
    if (!up.numel()) return l;
    l.rank = up.dim() == 3 ? up.size(1) : 0;
    l.down_panels = (l.rank + cpu::kPanel - 1) / cpu::kPanel;
    l.down = factor(name, down, l.down_panels, cpu::round_up(k, 4), l.wide_down);
    l.up = factor(name, up, panels, cpu::round_up(l.rank, 4), l.wide_up);
    return l;
  }
  // One factor of a low rank, in panels of 16 columns.
  const uint8_t* factor(const char* name, const Tensor& t, int64_t panels, int64_t columns, bool& wide) {
    wide = t.scalar_type() == ScalarType::Float;
    STD_TORCH_CHECK(t.dim() == 3 && t.is_contiguous() && (wide || t.scalar_type() == ScalarType::Half) &&
                        panels > 0 && t.size(0) == panels && t.size(1) == columns && t.size(2) == cpu::kPanel,
                    name, ": accepted is a low-rank factor float16 or float32 [", panels, ", ", columns,
                    ", 16]");
    return static_cast<const uint8_t*>(t.const_data_ptr());
  }
  bool done() const { return at_size_ == sizes_.size() && at_tensor_ == tensors_.size(); }

 private:
  const std::vector<Tensor>& tensors_;
  const std::vector<int64_t>& sizes_;
  size_t at_tensor_ = 0, at_size_ = 0;
};

int64_t decoder_new(std::vector<Tensor> tensors, std::vector<int64_t> sizes, double eps, double scale) {
  auto held = std::make_shared<Held>();
  cpu::Decoder& d = held->decoder;
  Reader in(tensors, sizes);
  for (const Tensor& t : tensors) STD_TORCH_CHECK(t.is_cpu(), "tensors: found one that is not on the CPU");
  const int64_t layers = in.size("layers");
  d.heads = in.size("heads");
  d.kv_heads = in.size("kv_heads");
  d.head_dim = in.size("head_dim");
  d.intermediate = in.size("intermediate");
  const bool has_head = in.size("head");
  d.eps = static_cast<float>(eps);
  d.scale = static_cast<float>(scale);
  const Tensor& embedding = in.tensor("embedding");
  STD_TORCH_CHECK(embedding.dim() == 2 && embedding.is_contiguous(),
                  "embedding: accepted is a contiguous [vocabulary, hidden]");
  d.vocabulary = embedding.size(0);
  d.hidden = embedding.size(1);
  d.embedding = embedding.const_data_ptr();
  const ScalarType dtype = embedding.scalar_type();
  STD_TORCH_CHECK(dtype == ScalarType::Float || dtype == ScalarType::BFloat16 || dtype == ScalarType::Half,
                  "embedding: found dtype ", static_cast<int>(dtype), " (c10 number)");
  d.embedding_dtype = dtype == ScalarType::Float  ? cpu::Dtype::kFloat32
                      : dtype == ScalarType::Half ? cpu::Dtype::kFloat16
                                                  : cpu::Dtype::kBfloat16;
  STD_TORCH_CHECK(layers > 0 && d.heads > 0 && d.kv_heads > 0 && d.heads % d.kv_heads == 0, "heads: found ",
                  d.heads, " and ", d.kv_heads, " of keys in ", layers, " layers");
  STD_TORCH_CHECK(d.hidden > 0 && d.hidden % 16 == 0 && d.head_dim > 0 && d.head_dim % 16 == 0 &&
                      d.intermediate > 0 && d.intermediate % 16 == 0,
                  "shape: found hidden ", d.hidden, ", head_dim ", d.head_dim, ", intermediate ",
                  d.intermediate, ", accepted are multiples of 16");
  const int64_t queries = d.heads * d.head_dim, keys = d.kv_heads * d.head_dim;
  d.norm = in.vector<float>("norm", d.hidden, ScalarType::Float, false);
  if (has_head) d.head = in.linear("head", d.vocabulary, d.hidden);
  for (int64_t i = 0; i < layers; ++i) {
    cpu::Layer l{};
    l.norm = in.vector<float>("input_layernorm", d.hidden, ScalarType::Float, false);
    l.mlp_norm = in.vector<float>("post_attention_layernorm", d.hidden, ScalarType::Float, false);
    l.q_norm = in.vector<float>("q_norm", d.head_dim, ScalarType::Float, true);
    l.k_norm = in.vector<float>("k_norm", d.head_dim, ScalarType::Float, true);
    l.q = in.linear("q_proj", queries, d.hidden);
    l.k = in.linear("k_proj", keys, d.hidden);
    l.v = in.linear("v_proj", keys, d.hidden);
    l.o = in.linear("o_proj", d.hidden, queries);
    l.gate = in.linear("gate_proj", d.intermediate, d.hidden);
    l.up = in.linear("up_proj", d.intermediate, d.hidden);
    l.down = in.linear("down_proj", d.hidden, d.intermediate);
    cpu::join(l);
    d.layers.push_back(l);
  }
  STD_TORCH_CHECK(in.done(), "decoder: found more tensors or sizes than its layers take");
  held->tensors = std::move(tensors);
  const std::lock_guard<std::mutex> lock(guard);
  decoders()[next_number] = std::move(held);
  return next_number++;
}

void decoder_free(int64_t number) {
  std::shared_ptr<const Held> last;  // its tensors go after the lock
  const std::lock_guard<std::mutex> lock(guard);
  const auto found = decoders().find(number);
  if (found == decoders().end()) return;
  last = std::move(found->second);
  decoders().erase(found);
}

int threads() {
  if (lowbit::forked_child) return 1;
  return std::min(static_cast<int>(torch::stable::get_num_threads()), cpu::team::kMost);
}

// Bytes of scratch for `rows` rows on the threads that torch has now, a cache line to align with included.
int64_t decoder_scratch(int64_t number, int64_t rows) {
  STD_TORCH_CHECK(rows > 0, "rows: found ", rows, ", accepted is at least 1");
  return cpu::scratch_bytes(find(number)->decoder, rows, threads()) + 64;
}

void decoder_step(int64_t number, const Tensor& ids, int64_t position, const Tensor& keys,
                  const Tensor& values, const Tensor& cosines, const Tensor& sines, const Tensor& scratch,
                  const Tensor& out, std::string isa) {
  const cpu::KernelTable& table = *lowbit::table_of(isa);
  const std::shared_ptr<const Held> held = find(number);
  const cpu::Decoder& d = held->decoder;
  const int64_t layers = static_cast<int64_t>(d.layers.size());
  STD_TORCH_CHECK(ids.dim() == 1 && ids.scalar_type() == ScalarType::Long && ids.is_contiguous(),
                  "ids: accepted is a contiguous int64 [M]");
  cpu::Step s{};
  s.m = ids.size(0);
  s.ids = static_cast<const int64_t*>(ids.const_data_ptr());
  for (int64_t i = 0; i < s.m; ++i)
    STD_TORCH_CHECK(s.ids[i] >= 0 && s.ids[i] < d.vocabulary, "ids: found ", s.ids[i], " at ", i,
                    ", accepted is 0 .. ", d.vocabulary - 1);
  s.position = position;
  const ScalarType dtype = keys.scalar_type();
  STD_TORCH_CHECK(dtype == values.scalar_type() && (dtype == ScalarType::Float || dtype == ScalarType::Half),
                  "cache: accepted are keys and values of float32 or float16");
  s.half = dtype == ScalarType::Half;
  STD_TORCH_CHECK(values.dim() == 4 && values.is_contiguous() && values.size(0) == layers &&
                      values.size(1) == d.kv_heads && values.size(3) == d.head_dim,
                  "values: accepted is a contiguous [", layers, ", ", d.kv_heads, ", capacity, ", d.head_dim,
                  "]");
  s.capacity = values.size(2);
  STD_TORCH_CHECK(s.capacity % 16 == 0 && keys.dim() == 5 && keys.is_contiguous() && keys.size(0) == layers &&
                      keys.size(1) == d.kv_heads && keys.size(2) == s.capacity / 16 &&
                      keys.size(3) == d.head_dim && keys.size(4) == 16,
                  "keys: accepted is a contiguous [", layers, ", ", d.kv_heads, ", capacity / 16, ",
                  d.head_dim, ", 16]");
  STD_TORCH_CHECK(position >= 0 && position + s.m <= s.capacity, "position: found ", position, " for ", s.m,
                  " rows, the cache holds ", s.capacity);
  for (const Tensor* t : {&cosines, &sines})
    STD_TORCH_CHECK(t->dim() == 2 && t->is_contiguous() && t->scalar_type() == ScalarType::Float &&
                        t->size(0) >= position + s.m && t->size(1) == d.head_dim / 2,
                    "rotary tables: accepted is a contiguous float32 [>= ", position + s.m, ", ",
                    d.head_dim / 2, "]");
  s.cosines = static_cast<const float*>(cosines.const_data_ptr());
  s.sines = static_cast<const float*>(sines.const_data_ptr());
  const int64_t width = d.head.weight ? d.vocabulary : d.hidden;
  STD_TORCH_CHECK(out.dim() == 2 && out.is_contiguous() && out.scalar_type() == ScalarType::Float &&
                      out.size(0) <= s.m && out.size(1) == width,
                  "out: accepted is a contiguous float32 [0 .. ", s.m, ", ", width, "]");
  if (!s.m) return;
  s.last = out.size(0);
  s.keys = keys.mutable_data_ptr();
  s.values = values.mutable_data_ptr();
  s.out = static_cast<float*>(out.mutable_data_ptr());
  const int team = threads();
  const int64_t need = cpu::scratch_bytes(d, s.m, team) + 64;
  STD_TORCH_CHECK(
      scratch.is_contiguous() && scratch.scalar_type() == ScalarType::Byte && scratch.numel() >= need,
      "scratch: accepted are ", need, " contiguous bytes, found ", scratch.numel());
  const auto start = reinterpret_cast<uintptr_t>(scratch.mutable_data_ptr());
  s.scratch = reinterpret_cast<uint8_t*>((start + 63) / 64 * 64);
  cpu::decode_step(d, s, table, team);
}

}  // namespace

// A macro more, so that LOWBIT_OPS is replaced by the name before it becomes a string.
#define LOWBIT_FRAGMENT(NAME, M) STABLE_TORCH_LIBRARY_FRAGMENT(NAME, M)
#define LOWBIT_LIBRARY_IMPL(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)

LOWBIT_FRAGMENT(LOWBIT_OPS, m) {
  m.def("decoder_new(Tensor[] tensors, int[] sizes, float eps, float scale) -> int");
  m.def("decoder_free(int decoder) -> ()");
  m.def("decoder_scratch(int decoder, int rows) -> int");
  m.def(
      "decoder_step(int decoder, Tensor ids, int position, Tensor(a!) keys, Tensor(b!) values, Tensor "
      "cosines, "
      "Tensor sines, Tensor(c!) scratch, Tensor(d!) out, str isa=\"\") -> ()");
}
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, CompositeExplicitAutograd, m) {
  m.impl("decoder_new", TORCH_BOX(&decoder_new));
  m.impl("decoder_free", TORCH_BOX(&decoder_free));
  m.impl("decoder_scratch", TORCH_BOX(&decoder_scratch));
}
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, CPU, m) { m.impl("decoder_step", TORCH_BOX(&decoder_step)); }
