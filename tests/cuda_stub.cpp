// Kernels that do nothing but say which of them was reached: with LOWBIT_CUDA_STUB, csrc/torch_ops_cuda.cpp
// runs its checks on CPU tensors (tests/test_cases_cuda.py).
#include <string>

#include "cuda/dequantize.h"
#include "cuda/kernels.h"

static int capability = 90, launches = 0;
static bool joins = true;
static const char* reached = "";
static const char* said = nullptr;
static std::string order;

extern "C" void stub_set(int chip, const char* error) { capability = chip, said = error, order.clear(); }
extern "C" void stub_join(bool can) { joins = can; }
extern "C" const char* stub_order() { return order.c_str(); }  // everything reached since stub_set
extern "C" int stub_launches() { return launches; }
extern "C" const char* stub_reached() { return reached; }

static const char* reach(const char* name) {
  launches++;
  reached = name;
  order += order.empty() ? "" : " ";
  order += name;
  return said;
}

namespace lowbit::cuda {
// Where the two joined launchers take a case, they look at what they were given as the kernels may.
static bool join(const char* name, const QuantizeArgs& q, int m, int k, bool adds, const char** wrong) {
  if (!joins) return false;
  const bool right = !q.x && q.m == m && q.k == k && q.kp % 256 == 0 && q.codes && q.scales &&
                     (!q.rank || (q.low && q.down)) && !!q.residual == adds && !!q.norm == adds && !q.silu &&
                     !q.four;
  *wrong = reach(right ? name : "arguments of another call");
  return true;
}
bool launch_attention_quantize(const AttentionArgs& a, const QuantizeArgs& q, const Device&, Stream,
                               const char** wrong) {
  return join(a.y ? "y" : "attention_quantize", q, a.m, a.heads * kHead, false, wrong);
}
bool launch_linear_quantize(const LinearArgs& a, const QuantizeArgs& q, int, const Device&, Stream,
                            const char** wrong) {
  return join(a.y || a.dtype != q.dtype ? "y" : "linear_quantize", q, a.m, a.n, true, wrong);
}
const char* query_device(int index, Device* out) {
  *out = {index, 132, capability, 232448};
  return nullptr;
}
const char* launch_quantize(const QuantizeArgs&, const Device&, Stream) { return reach("quantize"); }
const char* launch_gemm_sm90(const LinearArgs&, int, const Device&, Stream) { return reach("gemm_sm90"); }
const char* launch_gemm_mma(const LinearArgs&, const Device&, Stream) { return reach("gemm_mma"); }
const char* launch_gemv(const LinearArgs&, const Device&, Stream) { return reach("gemv"); }
const char* launch_gemm_int4(const Int4Args&, const Device&, Stream) { return reach("gemm_int4"); }
const char* launch_norm_rope(const RopeArgs&, const Device&, Stream) { return reach("norm_rope"); }
const char* launch_inverse_rms(const void*, float*, int, int, float, Dtype, const Device&, Stream) {
  return reach("inverse_rms");
}
const char* launch_attention(const AttentionArgs&, const Device&, Stream) { return reach("attention"); }
const char* launch_guided_score(const ScoreArgs&, const Device&, Stream) { return reach("guided_score"); }
const char* launch_reveal(const RevealArgs&, const Device&, Stream) { return reach("reveal"); }
const char* launch_dequantize(const DequantizeArgs&, const Device&, Stream) { return reach("dequantize"); }
}  // namespace lowbit::cuda
