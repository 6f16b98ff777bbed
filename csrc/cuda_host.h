// What the files of CUDA operators share: the checks of their tensors.
#pragma once
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <optional>
#include <string>

#include "cuda/kernels.h"

// shim.h hides this one behind USE_CUDA, whose headers a CPU build of torch lacks.
extern "C" AOTITorchError aoti_torch_get_current_cuda_stream(int32_t device_index, void** ret_stream);

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
namespace cuda = lowbit::cuda;

#ifdef LOWBIT_CUDA_STUB  // tests/test_cases_cuda.py: the checks on CPU tensors, kernels that say they were
                         // reached
#define LOWBIT_KEY CPU
struct DeviceGuard {
  explicit DeviceGuard(int32_t) {}
};
inline bool on_gpu(const Tensor& t) { return t.is_cpu(); }
inline cuda::Stream current_stream(int32_t) { return nullptr; }
#else
#define LOWBIT_KEY CUDA
using torch::stable::accelerator::DeviceGuard;
inline bool on_gpu(const Tensor& t) { return t.is_cuda(); }
inline cuda::Stream current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cuda::Stream>(stream);
}
#endif

inline cuda::Device device_of(const Tensor& t) {
  cuda::Device d{};
  const char* wrong = cuda::query_device(t.get_device_index(), &d);
  STD_TORCH_CHECK(!wrong, "device: ", wrong);
  STD_TORCH_CHECK(d.capability >= 80, "device: found compute capability ", d.capability / 10, ".",
                  d.capability % 10, ", accepted are 8.0 and newer (Ampere, Ada, Hopper)");
  return d;
}

inline const char* name_of(ScalarType type) { return torch::headeronly::toString(type); }

inline cuda::Dtype dtype_of(const Tensor& x, const char* name) {
  switch (x.scalar_type()) {
    case ScalarType::Float:
      return cuda::Dtype::kFloat32;
    case ScalarType::BFloat16:
      return cuda::Dtype::kBfloat16;
    case ScalarType::Half:
      return cuda::Dtype::kFloat16;
    default:
      STD_TORCH_CHECK(false, name, ": found ", name_of(x.scalar_type()),
                      ", accepted are Float, BFloat16, Half");
  }
}

inline std::string strides_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.stride(i));
  return text + "]";
}

// A tensor on the device of `beside`, contiguous, of that type and size, its data on `align` bytes.
inline const void* data_of(const Tensor& t, const char* name, const Tensor& beside, ScalarType dtype,
                           int64_t size, uintptr_t align = 16) {
  STD_TORCH_CHECK(on_gpu(t) && t.get_device_index() == beside.get_device_index(), name,
                  ": found on another device (", on_gpu(t) ? "cuda:" : "no GPU: ", t.get_device_index(),
                  "), accepted is cuda:", beside.get_device_index());
  STD_TORCH_CHECK(t.scalar_type() == dtype, name, ": found ", name_of(t.scalar_type()), ", accepted is ",
                  name_of(dtype));
  STD_TORCH_CHECK(t.is_contiguous(), name, ": found strides ", strides_of(t),
                  ", accepted is a contiguous tensor");
  STD_TORCH_CHECK(t.numel() == size, name, ": found ", t.numel(), " elements, accepted are ", size);
  const void* p = t.const_data_ptr();
  STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(p) % align == 0, name, ": found data ",
                  reinterpret_cast<uintptr_t>(p) % 16,
                  " bytes past a multiple of 16, accepted are multiples of ", align);
  return p;
}
template <class T>
inline const T* optional_data(const std::optional<Tensor>& t, const char* name, const Tensor& beside,
                              ScalarType dtype, int64_t size) {
  return t.has_value() ? static_cast<const T*>(data_of(*t, name, beside, dtype, size)) : nullptr;
}

inline int as_int(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= 1 << 30, name, ": found ", value, ", accepted is at most 2^30");
  return static_cast<int>(value);
}

inline constexpr ScalarType kOutputs[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
inline void check_out(int64_t out) {
  STD_TORCH_CHECK(out >= 0 && out <= 2, "out: found ", out,
                  ", accepted are 0 (Float), 1 (BFloat16), 2 (Half)");
}
inline void check_eps(double eps) {
  STD_TORCH_CHECK(eps >= 0 && eps < 1e30, "eps: found ", eps, ", accepted are finite values from 0 on");
}
