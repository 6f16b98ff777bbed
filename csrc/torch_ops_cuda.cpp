// The CUDA operators for torch, and nothing else: check, allocate, call. The schemas are in torch_ops.cpp.
#include <torch/csrc/stable/accelerator.h>
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/Exception.h>

#include <algorithm>
#include <optional>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/dequantize.h"
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
static bool on_gpu(const Tensor& t) { return t.is_cpu(); }
static cuda::Stream current_stream(int32_t) { return nullptr; }
#else
#define LOWBIT_KEY CUDA
using torch::stable::accelerator::DeviceGuard;
static bool on_gpu(const Tensor& t) { return t.is_cuda(); }
static cuda::Stream current_stream(int32_t device) {
  void* stream = nullptr;
  TORCH_ERROR_CODE_CHECK(aoti_torch_get_current_cuda_stream(device, &stream));
  return static_cast<cuda::Stream>(stream);
}
#endif

static cuda::Device device_of(const Tensor& t) {
  cuda::Device d{};
  const char* wrong = cuda::query_device(t.get_device_index(), &d);
  STD_TORCH_CHECK(!wrong, "device: ", wrong);
  STD_TORCH_CHECK(d.capability >= 80, "device: found compute capability ", d.capability / 10, ".",
                  d.capability % 10, ", accepted are 8.0 and newer (Ampere, Ada, Hopper)");
  return d;
}

static const char* name_of(ScalarType type) { return torch::headeronly::toString(type); }

static cuda::Dtype dtype_of(const Tensor& x, const char* name) {
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

static std::string strides_of(const Tensor& t) {
  std::string text = "[";
  for (int64_t i = 0; i < t.dim(); ++i) text += (i ? ", " : "") + std::to_string(t.stride(i));
  return text + "]";
}

// A tensor on the device of `beside`, contiguous, of that type and size, its data on `align` bytes.
static const void* data_of(const Tensor& t, const char* name, const Tensor& beside, ScalarType dtype,
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
static const T* optional_data(const std::optional<Tensor>& t, const char* name, const Tensor& beside,
                              ScalarType dtype, int64_t size) {
  return t.has_value() ? static_cast<const T*>(data_of(*t, name, beside, dtype, size)) : nullptr;
}

static int as_int(int64_t value, const char* name) {
  STD_TORCH_CHECK(value >= 0 && value <= 1 << 30, name, ": found ", value, ", accepted is at most 2^30");
  return static_cast<int>(value);
}

static const ScalarType kOutputs[] = {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half};
static void check_out(int64_t out) {
  STD_TORCH_CHECK(out >= 0 && out <= 2, "out: found ", out,
                  ", accepted are 0 (Float), 1 (BFloat16), 2 (Half)");
}
static void check_eps(double eps) {
  STD_TORCH_CHECK(eps >= 0 && eps < 1e30, "eps: found ", eps, ", accepted are finite values from 0 on");
}

// The rank that `up` has beside np channels, and low beside it: both or none.
static int rank_of(const std::optional<Tensor>& up, const std::optional<Tensor>& low, int64_t np) {
  const int64_t rank = up.has_value() ? up->numel() / np : 0;
  STD_TORCH_CHECK(rank % 16 == 0 && rank <= 256 && (!up.has_value() || up->numel() == rank * np),
                  "up: found ", up.has_value() ? up->numel() : 0, " elements for N=", np,
                  " (padded), accepted is a rank that is a multiple of 16 up to 256");
  STD_TORCH_CHECK(rank == 0 || low.has_value(), "low: found none, accepted with an up of rank ", rank,
                  " is what the quantizer gave");
  STD_TORCH_CHECK(rank > 0 || !low.has_value() || low->numel() == 0,
                  "up: found none, accepted with a low of ", low.has_value() ? low->numel() : 0,
                  " elements is the low rank's second half");
  return static_cast<int>(rank);
}

struct Quantized {
  Tensor codes, scales, low, group_scales;
};

// What rows go through before they are integers, as the operators are told.
struct Rounding {
  const std::optional<Tensor>&residual, &norm, &smooth, &down;
  double eps;
  int64_t rank;
  bool hadamard, silu, tile_order, four;
  double clip;
};

// Of m rows of k columns: everything but x and what is written. `name` is the argument that k comes from.
static cuda::QuantizeArgs rounding_args(const Rounding& r, const char* name, const Tensor& beside,
                                        cuda::Dtype dtype, int64_t m, int64_t k) {
  STD_TORCH_CHECK(k > 0 && k % 16 == 0 && k <= 32768, name, ": found K=", k,
                  ", accepted are multiples of 16 up to 32768");
  STD_TORCH_CHECK(!(r.hadamard || r.four) || k % 64 == 0, name, ": found K=", k,
                  ", accepted behind a Hadamard and with 4 bits are multiples of 64");
  STD_TORCH_CHECK(r.rank % 16 == 0 && r.rank >= 0 && r.rank <= 256, "rank: found ", r.rank,
                  ", accepted are multiples of 16 up to 256");
  STD_TORCH_CHECK((r.rank > 0) == r.down.has_value(), "down: found ", r.down.has_value() ? "one" : "none",
                  " with rank ", r.rank);
  STD_TORCH_CHECK(r.clip > 0 && r.clip < 1e30, "clip: found ", r.clip,
                  ", accepted are finite values above 0");
  check_eps(r.eps);
  cuda::QuantizeArgs a{};
  a.dtype = dtype;
  if (r.residual.has_value())
    a.residual =
        const_cast<void*>(data_of(*r.residual, "residual", beside, kOutputs[static_cast<int>(dtype)], m * k));
  a.norm = optional_data<float>(r.norm, "norm", beside, ScalarType::Float, k);
  a.smooth = optional_data<float>(r.smooth, "smooth", beside, ScalarType::Float, 2 * k);
  a.down = optional_data<void>(r.down, "down", beside, ScalarType::Half, r.rank * ((k + 63) / 64 * 64));
  a.m = as_int(m, "M"), a.k = as_int(k, "K"), a.kp = (a.k + 255) / 256 * 256;
  a.rank = static_cast<int>(r.rank), a.eps = static_cast<float>(r.eps);
  a.hadamard = r.hadamard, a.silu = r.silu, a.tile_order = r.tile_order, a.four = r.four,
  a.clip = static_cast<float>(r.clip);
  return a;
}

// What is written, allocated and put into a.
static Quantized rounding_outputs(cuda::QuantizeArgs& a, const Tensor& beside) {
  const int64_t m = a.m, padded = (m + 127) / 128 * 128;
  Quantized out{torch::stable::new_empty(beside, {m, a.four ? a.kp / 2 : a.kp},
                                         a.four ? ScalarType::Byte : ScalarType::Char),
                torch::stable::new_empty(beside, {m}, ScalarType::Float),
                torch::stable::new_empty(beside, {a.rank / 16, (m + 7) / 8, 128}, ScalarType::Half),
                torch::stable::new_empty(beside, {a.four ? a.kp / 64 : 0, padded}, ScalarType::Float)};
  if (m == 0) return out;
  a.codes = static_cast<int8_t*>(out.codes.mutable_data_ptr());
  a.scales = static_cast<float*>(out.scales.mutable_data_ptr());
  a.low = out.low.mutable_data_ptr();
  a.group_scales = static_cast<float*>(out.group_scales.mutable_data_ptr());
  return out;
}

static void round_rows(const cuda::QuantizeArgs& a, const cuda::Device& device, cuda::Stream stream) {
  const char* wrong = cuda::launch_quantize(a, device, stream);
  STD_TORCH_CHECK(!wrong, "cuda_quantize: ", wrong, " (M=", a.m, " K=", a.k, " rank=", a.rank, ")");
}

static Quantized quantize(const Tensor& x_in, const Rounding& r) {
  STD_TORCH_CHECK(on_gpu(x_in), "x: found on no GPU, accepted is a CUDA tensor");
  const DeviceGuard guard(x_in.get_device_index());
  const cuda::Device device = device_of(x_in);
  // x alone may have any strides and address: a slice of a longer sequence is an everyday input.
  Tensor x = x_in.is_contiguous() ? x_in : torch::stable::contiguous(x_in);
  if (reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16) x = torch::stable::clone(x);
  STD_TORCH_CHECK(x.dim() >= 1 && x.size(x.dim() - 1) > 0, "x: found no columns, accepted is [..., K]");
  const int64_t width = x.size(x.dim() - 1), m = x.numel() / width;
  STD_TORCH_CHECK(!r.silu || width % 2 == 0, "x: found ", width,
                  " columns, accepted with silu is gate and up side by side");
  cuda::QuantizeArgs a = rounding_args(r, "x", x, dtype_of(x, "x"), m, r.silu ? width / 2 : width);
  a.x = data_of(x, "x", x, x.scalar_type(), x.numel());
  Quantized out = rounding_outputs(a, x);
  if (m > 0) round_rows(a, device, current_stream(x.get_device_index()));
  return out;
}

// x [..., K] (with silu [..., 2K]) -> codes int8 [M, Kp], scales float32 [M], low fp16 fragments.
static std::tuple<Tensor, Tensor, Tensor> cuda_quantize(const Tensor& x, std::optional<Tensor> residual,
                                                        std::optional<Tensor> norm, double eps,
                                                        std::optional<Tensor> smooth,
                                                        std::optional<Tensor> down, int64_t rank,
                                                        bool hadamard, bool silu, bool tile_order) {
  const Quantized q =
      quantize(x, {residual, norm, smooth, down, eps, rank, hadamard, silu, tile_order, false, 1});
  return {q.codes, q.scales, q.low};
}

// -> codes uint8 [M, Kp / 2], group scales float32 [Kp / 64, M rounded up to 128], scales, low.
static std::tuple<Tensor, Tensor, Tensor, Tensor> cuda_quantize4(const Tensor& x,
                                                                 std::optional<Tensor> residual,
                                                                 std::optional<Tensor> norm, double eps,
                                                                 std::optional<Tensor> smooth,
                                                                 std::optional<Tensor> down, int64_t rank,
                                                                 bool hadamard, bool silu, double clip) {
  const Quantized q =
      quantize(x, {residual, norm, smooth, down, eps, rank, hadamard, silu, false, true, clip});
  return {q.codes, q.group_scales, q.scales, q.low};
}

static void check_padded(int64_t n, int64_t kp) {
  STD_TORCH_CHECK(kp > 0 && kp % 256 == 0, "codes: found Kp=", kp,
                  ", accepted are multiples of 256, above 0");
  STD_TORCH_CHECK(n > 0 && n <= 1 << 30, "n: found ", n, ", accepted are 1 .. 2^30");
}

static void check_codes(const Tensor& codes) {
  STD_TORCH_CHECK(on_gpu(codes) && codes.dim() == 2, "codes: found ", codes.dim(),
                  " dimensions, accepted is a CUDA tensor [M, Kp]");
}

// A product as the operators are told of it. out: float32, bfloat16, float16 as 0, 1, 2. row: -3 the portable
// GEMM, -2 the GEMV, -1 by the table, else that row of tiles. gated: [M, n / 2], silu(gate) * up.
struct Multiplication {
  const Tensor &codes, &scales;
  const std::optional<Tensor>& low;
  const Tensor &weight, &channel;
  const std::optional<Tensor>&bias, &up;
  int64_t n, mode, out, row;
  bool gated;
};

// Everything but y.
static cuda::LinearArgs linear_args(const Multiplication& p, const cuda::Device& device) {
  const Tensor& codes = p.codes;
  const int64_t n = p.n, mode = p.mode, out = p.out, row = p.row;
  STD_TORCH_CHECK(mode >= 0 && mode < cuda::kModes, "mode: found ", mode, ", accepted are 0 .. ",
                  cuda::kModes - 1);
  check_out(out);
  cuda::LinearArgs a{};
  const int64_t m = codes.size(0), kp = codes.size(1);
  check_padded(n, kp);
  const int64_t np = (n + 63) / 64 * 64;
  a.m = as_int(m, "M"), a.n = as_int(n, "N"), a.np = as_int(np, "N"), a.kp = as_int(kp, "K");
  const bool hopper = device.capability == 90;
  STD_TORCH_CHECK(row >= -3 && (row < 0 || hopper), "row: found ", row,
                  ", accepted are -3 (portable GEMM), -2 (GEMV), -1 (by the table)",
                  hopper ? " and rows of tiles" : " (rows of tiles are Hopper's)");
  STD_TORCH_CHECK(row != -2 || (m <= 16 && mode != cuda::kW8), "row: found -2 (GEMV) with M=", m,
                  " mode=", mode, ", accepted are up to 16 rows and 4-bit modes");
  STD_TORCH_CHECK(row < -1 || !hopper || out == 0 || n % 8 == 0, "n: found ", n, " with ",
                  name_of(kOutputs[out]), " output, accepted by Hopper's GEMM are multiples of 8");
  STD_TORCH_CHECK(!p.gated || (hopper && row >= -1), "gated: found with row=", row, " on compute capability ",
                  device.capability / 10, ".", device.capability % 10, ", accepted are rows of tiles on 9.0");
  STD_TORCH_CHECK(!p.gated || n % 16 == 0, "n: found ", n, ", accepted with gated are multiples of 16");
  a.mode = static_cast<cuda::Mode>(mode), a.dtype = static_cast<cuda::Dtype>(out), a.gated = p.gated;
  a.rank = rank_of(p.up, p.low, np);
  static const int64_t kBytes[] = {8192, 4096, 4224, 4352};  // tile_bytes of tile.cuh
  a.codes = static_cast<const int8_t*>(data_of(codes, "codes", codes, ScalarType::Char, m * kp));
  a.scales = static_cast<const float*>(data_of(p.scales, "scales", codes, ScalarType::Float, m, 4));
  a.weight = static_cast<const uint8_t*>(
      data_of(p.weight, "weight", codes, ScalarType::Byte, np / 64 * (kp / 128) * kBytes[mode]));
  a.channel = static_cast<const float*>(data_of(p.channel, "channel", codes, ScalarType::Float, np));
  a.bias = optional_data<float>(p.bias, "bias", codes, ScalarType::Float, np);
  a.up = optional_data<void>(p.up, "up", codes, ScalarType::Half, np * a.rank);
  if (a.rank) a.low = data_of(*p.low, "low", codes, ScalarType::Half, (m + 7) / 8 * 8 * a.rank);
  return a;
}

// Fills y [m, n], or half as wide with gated, and gives it back.
static Tensor multiply(cuda::LinearArgs a, int64_t row, const Tensor& beside, const cuda::Device& device,
                       cuda::Stream stream) {
  Tensor y =
      torch::stable::new_empty(beside, {a.m, a.gated ? a.n / 2 : a.n}, kOutputs[static_cast<int>(a.dtype)]);
  if (a.m == 0) return y;
  a.y = y.mutable_data_ptr();
  const char* wrong = nullptr;
  if (row == -2)
    wrong = cuda::launch_gemv(a, device, stream);
  else if (row == -3 || device.capability != 90)
    wrong = cuda::launch_gemm_mma(a, device, stream);
  else
    wrong = cuda::launch_gemm_sm90(a, static_cast<int>(row), device, stream);
  STD_TORCH_CHECK(!wrong, "cuda_linear: ", wrong, " (M=", a.m, " N=", a.n, " K=", a.kp, " row=", row, ")");
  return y;
}

static Tensor cuda_linear(const Tensor& codes, const Tensor& scales, std::optional<Tensor> low,
                          const Tensor& weight, const Tensor& channel, std::optional<Tensor> bias,
                          std::optional<Tensor> up, int64_t n, int64_t mode, int64_t out, int64_t row,
                          bool gated) {
  check_codes(codes);
  const DeviceGuard guard(codes.get_device_index());
  const cuda::Device device = device_of(codes);
  const cuda::LinearArgs a =
      linear_args({codes, scales, low, weight, channel, bias, up, n, mode, out, row, gated}, device);
  return multiply(a, row, codes, device, current_stream(codes.get_device_index()));
}

// A product whose rows go through the next quantizer: residual [M, n] += y, norm, rounding. One launch where
// the chip has it and the shape fits, else the two; the same bits. row >= 0: of the joined launch's own
// table.
static std::tuple<Tensor, Tensor, Tensor> cuda_linear_quantize(
    const Tensor& codes, const Tensor& scales, std::optional<Tensor> low, const Tensor& weight,
    const Tensor& channel, std::optional<Tensor> bias, std::optional<Tensor> up, int64_t n, int64_t mode,
    int64_t out, Tensor residual, const Tensor& norm, double eps, std::optional<Tensor> smooth,
    std::optional<Tensor> down, int64_t rank, bool hadamard, bool tile_order, int64_t row) {
  check_codes(codes);
  const DeviceGuard guard(codes.get_device_index());
  const cuda::Device device = device_of(codes);
  const cuda::LinearArgs a =
      linear_args({codes, scales, low, weight, channel, bias, up, n, mode, out, row, false}, device);
  STD_TORCH_CHECK(out != 0, "out: found 0 (Float), accepted are 1 (BFloat16), 2 (Half)");
  const std::optional<Tensor> stream_of_layers = residual, weights_of_norm = norm;
  cuda::QuantizeArgs q = rounding_args(
      {stream_of_layers, weights_of_norm, smooth, down, eps, rank, hadamard, false, tile_order, false, 1},
      "n", codes, a.dtype, a.m, n);
  const Quantized rows = rounding_outputs(q, codes);
  if (a.m == 0) return {rows.codes, rows.scales, rows.low};
  const cuda::Stream stream = current_stream(codes.get_device_index());
  const char* wrong = nullptr;
  const bool joined =
      row >= -1 && cuda::launch_linear_quantize(a, q, static_cast<int>(row), device, stream, &wrong);
  if (!joined && row >= 0) wrong = "row: no joined launch takes the shape, accepted is -1";
  STD_TORCH_CHECK(!wrong, "cuda_linear_quantize: ", wrong, " (M=", a.m, " N=", n, " K=", a.kp, " rank=", rank,
                  " row=", row, ")");
  if (!joined) {
    const Tensor y = multiply(a, row, codes, device, stream);
    q.x = y.const_data_ptr();
    round_rows(q, device, stream);
  }
  return {rows.codes, rows.scales, rows.low};
}

// INT4 tensor cores: codes and group scales of cuda_quantize4, weight uint8 [np, Kp / 2] and its scales [Kp /
// 64, np], np = n rounded up to 128.
static Tensor cuda_linear4(const Tensor& codes, const Tensor& group_scales, const Tensor& scales,
                           std::optional<Tensor> low, const Tensor& weight, const Tensor& weight_scales,
                           std::optional<Tensor> bias, std::optional<Tensor> up, int64_t n, int64_t out) {
  STD_TORCH_CHECK(on_gpu(codes) && codes.dim() == 2, "codes: found ", codes.dim(),
                  " dimensions, accepted is a CUDA tensor [M, Kp / 2]");
  const DeviceGuard guard(codes.get_device_index());
  const cuda::Device device = device_of(codes);
  check_out(out);
  STD_TORCH_CHECK(device.capability <= 90, "device: found compute capability ", device.capability / 10, ".",
                  device.capability % 10,
                  ", accepted for 4-bit activations are 8.0 .. 9.0 (8 bits run here)");
  const int64_t m = codes.size(0), kp = codes.size(1) * 2, mp = (m + 127) / 128 * 128;
  check_padded(n, kp);
  const int64_t np = (n + 127) / 128 * 128;
  cuda::Int4Args a{};
  a.m = as_int(m, "M"), a.n = as_int(n, "N"), a.np = as_int(np, "N"), a.kp = as_int(kp, "K"),
  a.mp = as_int(mp, "M");
  a.dtype = static_cast<cuda::Dtype>(out);
  a.rank = rank_of(up, low, np);
  a.codes = static_cast<const uint8_t*>(data_of(codes, "codes", codes, ScalarType::Byte, m * kp / 2));
  a.group_scales = static_cast<const float*>(
      data_of(group_scales, "group_scales", codes, ScalarType::Float, kp / 64 * mp));
  a.scales = static_cast<const float*>(data_of(scales, "scales", codes, ScalarType::Float, m, 4));
  a.weight = static_cast<const uint8_t*>(data_of(weight, "weight", codes, ScalarType::Byte, np * kp / 2));
  a.weight_scales = static_cast<const float*>(
      data_of(weight_scales, "weight_scales", codes, ScalarType::Float, kp / 64 * np));
  a.bias = optional_data<float>(bias, "bias", codes, ScalarType::Float, np);
  a.up = optional_data<void>(up, "up", codes, ScalarType::Half, np * a.rank);
  if (a.rank) a.low = data_of(*low, "low", codes, ScalarType::Half, (m + 7) / 8 * 8 * a.rank);
  Tensor y = torch::stable::new_empty(codes, {m, n}, kOutputs[out]);
  if (m == 0) return y;
  a.y = y.mutable_data_ptr();
  const char* wrong = cuda::launch_gemm_int4(a, device, current_stream(codes.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_linear4: ", wrong, " (M=", m, " N=", n, " K=", kp, ")");
  return y;
}

// In place: queries and keys of qkv [..., (heads + 2 kv_heads) * 128] are normed and rotated.
static void cuda_norm_rope(Tensor qkv, std::optional<Tensor> q_norm, std::optional<Tensor> k_norm,
                           const Tensor& cosines, const Tensor& sines, int64_t heads, int64_t kv_heads,
                           double eps) {
  STD_TORCH_CHECK(on_gpu(qkv) && qkv.dim() >= 1, "qkv: found ", qkv.dim(),
                  " dimensions, accepted is a CUDA tensor [..., (heads + 2 kv_heads) * 128]");
  STD_TORCH_CHECK(kv_heads > 0 && heads > 0 && heads <= 65536 && heads % kv_heads == 0, "heads: found ",
                  heads, " and ", kv_heads, ", accepted are multiples of the key-value heads, above 0");
  check_eps(eps);
  const DeviceGuard guard(qkv.get_device_index());
  const cuda::Device device = device_of(qkv);
  const int64_t width = (heads + 2 * kv_heads) * 128, m = qkv.numel() / width;
  STD_TORCH_CHECK(qkv.size(qkv.dim() - 1) == width, "qkv: found ", qkv.size(qkv.dim() - 1),
                  " columns, accepted are ", width, " (heads of 128)");
  cuda::RopeArgs a{};
  a.dtype = dtype_of(qkv, "qkv");
  a.qkv = const_cast<void*>(data_of(qkv, "qkv", qkv, qkv.scalar_type(), m * width));
  a.q_norm = optional_data<float>(q_norm, "q_norm", qkv, ScalarType::Float, 128);
  a.k_norm = optional_data<float>(k_norm, "k_norm", qkv, ScalarType::Float, 128);
  a.cosines = static_cast<const float*>(data_of(cosines, "cosines", qkv, ScalarType::Float, m * 64));
  a.sines = static_cast<const float*>(data_of(sines, "sines", qkv, ScalarType::Float, m * 64));
  a.m = as_int(m * (heads + kv_heads), "rows") / static_cast<int>(heads + kv_heads);
  a.heads = static_cast<int>(heads), a.kv_heads = static_cast<int>(kv_heads), a.eps = static_cast<float>(eps);
  if (m == 0) return;
  const char* wrong = cuda::launch_norm_rope(a, device, current_stream(qkv.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_norm_rope: ", wrong, " (rows=", m, " heads=", heads, ")");
}

// logits [2, B, T, C, V] -> token int64 and score float32, [B, C, T]; scores are -inf where tokens are not
// mask_id or the frame is not valid.
static std::tuple<Tensor, Tensor> cuda_guided_score(const Tensor& logits, const Tensor& guidance,
                                                    const Tensor& penalty, const Tensor& temperature,
                                                    const Tensor& noise, const Tensor& valid,
                                                    const Tensor& tokens, int64_t mask_id) {
  STD_TORCH_CHECK(on_gpu(logits) && logits.dim() == 5 && logits.size(0) == 2, "logits: found ", logits.dim(),
                  " dimensions, accepted is a CUDA tensor [2, items, frames, books, classes]");
  const DeviceGuard guard(logits.get_device_index());
  const cuda::Device device = device_of(logits);
  cuda::ScoreArgs a{};
  const int64_t items = logits.size(1), frames = logits.size(2), books = logits.size(3);
  const int64_t slots = items * frames * books, classes = logits.size(4);
  STD_TORCH_CHECK(mask_id > 0 && mask_id <= classes, "mask_id: found ", mask_id, ", accepted are 1 .. ",
                  classes, " (the classes)");
  a.items = as_int(items, "items"), a.frames = as_int(frames, "frames"), a.books = as_int(books, "books");
  a.classes = as_int(classes, "classes"), a.mask_id = static_cast<int>(mask_id);
  as_int(slots, "slots");
  a.dtype = dtype_of(logits, "logits");
  a.logits = data_of(logits, "logits", logits, logits.scalar_type(), 2 * slots * classes);
  const auto floats = [&](const Tensor& t, const char* name, int64_t size) {
    return static_cast<const float*>(data_of(t, name, logits, ScalarType::Float, size, 4));
  };
  a.guidance = floats(guidance, "guidance", 1), a.temperature = floats(temperature, "temperature", 1);
  a.penalty = floats(penalty, "penalty", books), a.noise = floats(noise, "noise", slots);
  a.valid = static_cast<const bool*>(data_of(valid, "valid", logits, ScalarType::Bool, items * frames, 1));
  a.tokens = static_cast<const int64_t*>(data_of(tokens, "tokens", logits, ScalarType::Long, slots, 8));
  std::tuple<Tensor, Tensor> out{torch::stable::new_empty(logits, {items, books, frames}, ScalarType::Long),
                                 torch::stable::new_empty(logits, {items, books, frames}, ScalarType::Float)};
  if (slots == 0) return out;
  a.pred = static_cast<int64_t*>(std::get<0>(out).mutable_data_ptr());
  a.score = static_cast<float*>(std::get<1>(out).mutable_data_ptr());
  const char* wrong = cuda::launch_guided_score(a, device, current_stream(logits.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_guided_score: ", wrong, " (slots=", slots, ")");
  return out;
}

static void check_queries(const Tensor& q) {
  STD_TORCH_CHECK(on_gpu(q) && q.dim() == 3 && q.size(2) == 128, "q: found ", q.dim(),
                  " dimensions, accepted is a CUDA tensor [M, heads, 128]");
}

// Everything but y.
static cuda::AttentionArgs attention_args(const Tensor& q, const Tensor& k, const Tensor& v,
                                          const Tensor& bounds, double scale) {
  cuda::AttentionArgs a{};
  const int64_t m = q.size(0), heads = q.size(1);
  a.dtype = dtype_of(q, "q");
  STD_TORCH_CHECK(a.dtype != cuda::Dtype::kFloat32, "q: found Float, accepted are Half, BFloat16");
  STD_TORCH_CHECK(k.dim() == 3 && k.size(1) > 0 && heads % k.size(1) == 0, "k: found ",
                  k.dim() == 3 ? k.size(1) : 0, " heads, accepted are divisors of ", heads);
  const auto view = [&](const Tensor& x, const char* name, int64_t count) {
    STD_TORCH_CHECK(on_gpu(x) && x.get_device_index() == q.get_device_index(), name,
                    ": found on another device than q");
    STD_TORCH_CHECK(x.scalar_type() == q.scalar_type(), name, ": found another dtype than that of q");
    STD_TORCH_CHECK(x.dim() == 3 && x.size(0) == m && x.size(1) == count && x.size(2) == 128, name,
                    ": found another shape than [", m, ", ", count, ", 128]");
    STD_TORCH_CHECK(x.stride(2) == 1 && (count == 1 || x.stride(1) == 128) && x.stride(0) % 8 == 0, name,
                    ": found strides that are not [a multiple of 8, 128, 1]");
    STD_TORCH_CHECK(reinterpret_cast<uintptr_t>(x.const_data_ptr()) % 16 == 0, name,
                    ": found data at an address that is no multiple of 16");
    return x.const_data_ptr();
  };
  a.q = view(q, "q", heads), a.k = view(k, "k", k.size(1)), a.v = view(v, "v", k.size(1));
  a.q_stride = q.stride(0), a.k_stride = k.stride(0), a.v_stride = v.stride(0);
  STD_TORCH_CHECK(scale > 0 && scale < 1e30, "scale: found ", scale, ", accepted are finite numbers above 0");
  STD_TORCH_CHECK(bounds.numel() >= 2, "bounds: found ", bounds.numel(),
                  " elements, accepted are 2 and more");
  a.bounds = static_cast<const int*>(data_of(bounds, "bounds", q, ScalarType::Int, bounds.numel(), 4));
  a.m = as_int(m, "M"), a.heads = as_int(heads, "heads"), a.kv_heads = as_int(k.size(1), "heads");
  a.segments = as_int(bounds.numel() - 1, "segments"), a.scale = static_cast<float>(scale);
  return a;
}

// Fills y [m, heads, 128] and gives it back.
static Tensor attend(cuda::AttentionArgs a, const Tensor& q, const cuda::Device& device,
                     cuda::Stream stream) {
  Tensor y = torch::stable::new_empty(q, {a.m, a.heads, 128});
  if (a.m == 0) return y;
  a.y = y.mutable_data_ptr();
  const char* wrong = cuda::launch_attention(a, device, stream);
  STD_TORCH_CHECK(!wrong, "cuda_attention: ", wrong, " (M=", a.m, " heads=", a.heads, ")");
  return y;
}

// q [M, H, 128], k and v [M, G, 128], views with heads side by side -> [M, H, 128]: attention inside the
// segments bounds [S + 1].
static Tensor cuda_attention(const Tensor& q, const Tensor& k, const Tensor& v, const Tensor& bounds,
                             double scale) {
  check_queries(q);
  const DeviceGuard guard(q.get_device_index());
  const cuda::Device device = device_of(q);
  return attend(attention_args(q, k, v, bounds, scale), q, device, current_stream(q.get_device_index()));
}

// The same, its rows [M, H * 128] through the next quantizer. One launch where the chip has it and the heads
// fit, else the two; the same bits.
static std::tuple<Tensor, Tensor, Tensor> cuda_attention_quantize(const Tensor& q, const Tensor& k,
                                                                  const Tensor& v, const Tensor& bounds,
                                                                  double scale, std::optional<Tensor> smooth,
                                                                  std::optional<Tensor> down, int64_t rank,
                                                                  bool hadamard, bool tile_order) {
  check_queries(q);
  const DeviceGuard guard(q.get_device_index());
  const cuda::Device device = device_of(q);
  const cuda::AttentionArgs a = attention_args(q, k, v, bounds, scale);
  const std::optional<Tensor> none;
  cuda::QuantizeArgs r =
      rounding_args({none, none, smooth, down, 0, rank, hadamard, false, tile_order, false, 1}, "q", q,
                    a.dtype, a.m, int64_t{a.heads} * 128);
  const Quantized rows = rounding_outputs(r, q);
  if (a.m == 0) return {rows.codes, rows.scales, rows.low};
  const cuda::Stream stream = current_stream(q.get_device_index());
  const char* wrong = nullptr;
  const bool joined = cuda::launch_attention_quantize(a, r, device, stream, &wrong);
  STD_TORCH_CHECK(!wrong, "cuda_attention_quantize: ", wrong, " (M=", a.m, " heads=", a.heads, " rank=", rank,
                  ")");
  if (!joined) {
    const Tensor y = attend(a, q, device, stream);
    r.x = y.const_data_ptr();
    round_rows(r, device, stream);
  }
  return {rows.codes, rows.scales, rows.low};
}

// In place: tokens [B, S] = pred at the k [B] slots of largest score of each row.
static void cuda_reveal(Tensor tokens, const Tensor& pred, const Tensor& score, const Tensor& k) {
  STD_TORCH_CHECK(on_gpu(tokens) && tokens.dim() == 2, "tokens: found ", tokens.dim(),
                  " dimensions, accepted is a CUDA tensor [items, slots]");
  const DeviceGuard guard(tokens.get_device_index());
  const cuda::Device device = device_of(tokens);
  cuda::RevealArgs a{};
  const int64_t size = tokens.numel();
  a.items = as_int(tokens.size(0), "items"), a.slots = as_int(tokens.size(1), "slots");
  a.tokens =
      static_cast<int64_t*>(const_cast<void*>(data_of(tokens, "tokens", tokens, ScalarType::Long, size, 8)));
  a.pred = static_cast<const int64_t*>(data_of(pred, "pred", tokens, ScalarType::Long, size, 8));
  a.score = static_cast<const float*>(data_of(score, "score", tokens, ScalarType::Float, size, 4));
  a.k = static_cast<const int64_t*>(data_of(k, "k", tokens, ScalarType::Long, a.items, 8));
  if (size == 0) return;
  const char* wrong = cuda::launch_reveal(a, device, current_stream(tokens.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_reveal: ", wrong, " (items=", a.items, " slots=", a.slots, ")");
}

// codes uint8 [N, K / 2] (4 bits, element 2j low) or [N, K]; scales float32 [N, G], zeros uint8 [N, G] -> [N,
// K].
static Tensor cuda_dequantize(const Tensor& codes, const Tensor& scales, std::optional<Tensor> zeros,
                              int64_t k, int64_t group_size, int64_t bits, int64_t out) {
  STD_TORCH_CHECK(on_gpu(codes) && codes.dim() == 2, "codes: found ", codes.dim(),
                  " dimensions, accepted is a CUDA tensor [N, K / 2] or [N, K]");
  const DeviceGuard guard(codes.get_device_index());
  const cuda::Device device = device_of(codes);
  STD_TORCH_CHECK(bits == 4 || bits == 8, "bits: found ", bits, ", accepted are 4 and 8");
  check_out(out);
  STD_TORCH_CHECK(k > 0 && k <= 1 << 30 && (bits == 8 || k % 2 == 0), "k: found ", k,
                  ", accepted are values above 0, even ones with 4 bits");
  STD_TORCH_CHECK(group_size > 0 && group_size <= 1 << 30, "group_size: found ", group_size,
                  ", accepted are values above 0");
  const int64_t n = codes.size(0), groups = (k + group_size - 1) / group_size;
  cuda::DequantizeArgs a{};
  a.codes =
      static_cast<const uint8_t*>(data_of(codes, "codes", codes, ScalarType::Byte, n * k * bits / 8, 1));
  a.scales = static_cast<const float*>(data_of(scales, "scales", codes, ScalarType::Float, n * groups, 4));
  if (zeros.has_value())
    a.zeros = static_cast<const uint8_t*>(data_of(*zeros, "zeros", codes, ScalarType::Byte, n * groups, 1));
  a.n = as_int(n, "N"), a.k = as_int(k, "K"), a.group = as_int(group_size, "group_size"),
  a.groups = as_int(groups, "G");
  a.bits = static_cast<int>(bits), a.dtype = static_cast<cuda::Dtype>(out);
  Tensor w = torch::stable::new_empty(codes, {n, k}, kOutputs[out]);
  if (n == 0) return w;
  a.w = w.mutable_data_ptr();
  const char* wrong = cuda::launch_dequantize(a, device, current_stream(codes.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_dequantize: ", wrong, " (N=", n, " K=", k, ")");
  return w;
}

// 1 / sqrt(mean x^2 + eps) of every row, float32.
static Tensor cuda_inverse_rms(const Tensor& x, double eps) {
  STD_TORCH_CHECK(on_gpu(x) && x.dim() == 2, "x: found ", x.dim(),
                  " dimensions, accepted is a CUDA tensor [M, K]");
  STD_TORCH_CHECK(x.size(1) > 0 && x.size(1) % 2 == 0, "x: found K=", x.size(1),
                  ", accepted are even ones above 0");
  check_eps(eps);
  const DeviceGuard guard(x.get_device_index());
  const cuda::Device device = device_of(x);
  const void* data = data_of(x, "x", x, x.scalar_type(), x.numel());
  const cuda::Dtype dtype = dtype_of(x, "x");
  const int m = as_int(x.size(0), "M"), k = as_int(x.size(1), "K");
  Tensor out = torch::stable::new_empty(x, {x.size(0)}, ScalarType::Float);
  if (m == 0) return out;
  const char* wrong =
      cuda::launch_inverse_rms(data, static_cast<float*>(out.mutable_data_ptr()), m, k,
                               static_cast<float>(eps), dtype, device, current_stream(x.get_device_index()));
  STD_TORCH_CHECK(!wrong, "cuda_inverse_rms: ", wrong, " (M=", m, " K=", k, ")");
  return out;
}

#define LOWBIT_LIBRARY_IMPL(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, LOWBIT_KEY, m) {
  m.impl("cuda_quantize", TORCH_BOX(&cuda_quantize));
  m.impl("cuda_linear", TORCH_BOX(&cuda_linear));
  m.impl("cuda_quantize4", TORCH_BOX(&cuda_quantize4));
  m.impl("cuda_linear4", TORCH_BOX(&cuda_linear4));
  m.impl("cuda_norm_rope", TORCH_BOX(&cuda_norm_rope));
  m.impl("cuda_dequantize", TORCH_BOX(&cuda_dequantize));
  m.impl("cuda_inverse_rms", TORCH_BOX(&cuda_inverse_rms));
  m.impl("cuda_guided_score", TORCH_BOX(&cuda_guided_score));
  m.impl("cuda_attention", TORCH_BOX(&cuda_attention));
  m.impl("cuda_attention_quantize", TORCH_BOX(&cuda_attention_quantize));
  m.impl("cuda_linear_quantize", TORCH_BOX(&cuda_linear_quantize));
  m.impl("cuda_reveal", TORCH_BOX(&cuda_reveal));
}
