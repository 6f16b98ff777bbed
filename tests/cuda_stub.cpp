// Kernels that do nothing but say which of them was reached: with LOWBIT_CUDA_STUB, csrc/torch_ops_cuda.cpp
// runs its checks on CPU tensors (tests/test_cases_cuda.py).
#include "cuda/dequantize.h"
#include "cuda/kernels.h"

static int capability = 90, launches = 0;
static const char* reached = "";
static const char* said = nullptr;

extern "C" void stub_set(int chip, const char* error) { capability = chip, said = error; }
extern "C" int stub_launches() { return launches; }
extern "C" const char* stub_reached() { return reached; }

static const char* reach(const char* name) {
  launches++;
  reached = name;
  return said;
}

namespace lowbit::cuda {
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
