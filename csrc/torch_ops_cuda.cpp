// The CUDA operators for torch around a linear layer and attention, and nothing else: check, allocate, call.
// The schemas are in torch_ops.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cuda_host.h"

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

// out: float32, bfloat16, float16 as 0, 1, 2. row: -3 the portable GEMM, -2 the GEMV, -1 by the table, else
// that row of tiles. gated: [M, n / 2], silu(gate) * up.
static Tensor cuda_linear(const Tensor& codes, const Tensor& scales, std::optional<Tensor> low,
                          const Tensor& weight, const Tensor& channel, std::optional<Tensor> bias,
                          std::optional<Tensor> up, int64_t n, int64_t mode, int64_t out, int64_t row,
                          bool gated) {
  STD_TORCH_CHECK(on_gpu(codes) && codes.dim() == 2, "codes: found ", codes.dim(),
                  " dimensions, accepted is a CUDA tensor [M, Kp]");
  const DeviceGuard guard(codes.get_device_index());
  const cuda::Device device = device_of(codes);
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
  STD_TORCH_CHECK(!gated || (hopper && row >= -1), "gated: found with row=", row, " on compute capability ",
                  device.capability / 10, ".", device.capability % 10, ", accepted are rows of tiles on 9.0");
  STD_TORCH_CHECK(!gated || n % 16 == 0, "n: found ", n, ", accepted with gated are multiples of 16");
  a.mode = static_cast<cuda::Mode>(mode), a.dtype = static_cast<cuda::Dtype>(out), a.gated = gated;
  a.rank = rank_of(up, low, np);
  static const int64_t kBytes[] = {8192, 4096, 4224, 4352};  // tile_bytes of tile.cuh
  a.codes = static_cast<const int8_t*>(data_of(codes, "codes", codes, ScalarType::Char, m * kp));
  a.scales = static_cast<const float*>(data_of(scales, "scales", codes, ScalarType::Float, m, 4));
  a.weight = static_cast<const uint8_t*>(
      data_of(weight, "weight", codes, ScalarType::Byte, np / 64 * (kp / 128) * kBytes[mode]));
  a.channel = static_cast<const float*>(data_of(channel, "channel", codes, ScalarType::Float, np));
  a.bias = optional_data<float>(bias, "bias", codes, ScalarType::Float, np);
  a.up = optional_data<void>(up, "up", codes, ScalarType::Half, np * a.rank);
  if (a.rank) a.low = data_of(*low, "low", codes, ScalarType::Half, (m + 7) / 8 * 8 * a.rank);
  Tensor y = torch::stable::new_empty(codes, {m, gated ? n / 2 : n}, kOutputs[out]);
  if (m == 0) return y;
  a.y = y.mutable_data_ptr();
  const cuda::Stream stream = current_stream(codes.get_device_index());
  const char* wrong = nullptr;
  if (row == -2)
    wrong = cuda::launch_gemv(a, device, stream);
  else if (row == -3 || !hopper)
    wrong = cuda::launch_gemm_mma(a, device, stream);
  else
    wrong = cuda::launch_gemm_sm90(a, static_cast<int>(row), device, stream);
  STD_TORCH_CHECK(!wrong, "cuda_linear: ", wrong, " (M=", m, " N=", n, " K=", kp, " row=", row, ")");
  return y;
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

// The same, its rows [M, H * 128] rounded at once: codes int8 [M, Kp], scales float32 [M]. One launch where
// the chip has it and the heads fit, else the two; the same bits.
static std::tuple<Tensor, Tensor> cuda_attention_quantize(const Tensor& q, const Tensor& k, const Tensor& v,
                                                          const Tensor& bounds, double scale,
                                                          bool tile_order) {
  check_queries(q);
  const DeviceGuard guard(q.get_device_index());
  const cuda::Device device = device_of(q);
  const cuda::AttentionArgs a = attention_args(q, k, v, bounds, scale);
  const std::optional<Tensor> none;
  cuda::QuantizeArgs r = rounding_args({none, none, none, none, 0, 0, false, false, tile_order, false, 1},
                                       "q", q, a.dtype, a.m, int64_t{a.heads} * 128);
  const Quantized rows = rounding_outputs(r, q);
  if (a.m == 0) return {rows.codes, rows.scales};
  const cuda::Stream stream = current_stream(q.get_device_index());
  const char* wrong = nullptr;
  const bool joined = cuda::launch_attention_quantize(a, r, device, stream, &wrong);
  STD_TORCH_CHECK(!wrong, "cuda_attention_quantize: ", wrong, " (M=", a.m, " heads=", a.heads, ")");
  if (!joined) {
    const Tensor y = attend(a, q, device, stream);
    r.x = y.const_data_ptr();
    round_rows(r, device, stream);
  }
  return {rows.codes, rows.scales};
}

#define LOWBIT_LIBRARY_IMPL(NAME, KEY, M) STABLE_TORCH_LIBRARY_IMPL(NAME, KEY, M)
LOWBIT_LIBRARY_IMPL(LOWBIT_OPS, LOWBIT_KEY, m) {
  m.impl("cuda_quantize", TORCH_BOX(&cuda_quantize));
  m.impl("cuda_linear", TORCH_BOX(&cuda_linear));
  m.impl("cuda_quantize4", TORCH_BOX(&cuda_quantize4));
  m.impl("cuda_linear4", TORCH_BOX(&cuda_linear4));
  m.impl("cuda_attention", TORCH_BOX(&cuda_attention));
  m.impl("cuda_attention_quantize", TORCH_BOX(&cuda_attention_quantize));
}
