// Kernels that do nothing but say which of them was reached: with LOWBIT_CUDA_STUB, csrc/*_ops_cuda.cpp
// run their checks on CPU tensors (tests/test_cases_cuda.py).
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
// Where it takes a case, it looks at what it was given as the kernel may.
bool launch_attention_quantize(const AttentionArgs& a, const QuantizeArgs& q, const Device&, Stream,
                               const char** wrong) {
  if (!joins) return false;
  const bool right = !a.y && !q.x && q.m == a.m && q.k == a.heads * kHead && q.kp % 256 == 0 && q.codes &&
                     q.scales && !q.residual && !q.norm && !q.smooth && !q.rank && !q.hadamard && !q.silu &&
                     !q.four;
  *wrong = reach(right ? "attention_quantize" : "arguments of another call");
  return true;
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
