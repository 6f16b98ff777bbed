// The CUDA operators for torch beside the products: norm and rotation, the end of a decoding step, codes to
// floats. As torch_ops_cuda.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include <tuple>

#include "cuda/dequantize.h"
#include "cuda_host.h"

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
  m.impl("cuda_norm_rope", TORCH_BOX(&cuda_norm_rope));
  m.impl("cuda_dequantize", TORCH_BOX(&cuda_dequantize));
  m.impl("cuda_inverse_rms", TORCH_BOX(&cuda_inverse_rms));
  m.impl("cuda_guided_score", TORCH_BOX(&cuda_guided_score));
  m.impl("cuda_reveal", TORCH_BOX(&cuda_reveal));
}
