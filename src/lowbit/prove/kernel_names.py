"""What kind of work a kernel or an operator does, by its name: one table, read from the top."""

from __future__ import annotations

import re
from functools import cache

CATEGORIES = ("GEMM", "elementwise", "attention", "copy", "reduce", "other")

# (category, pattern of the lower-case name) of GPU kernels: ours, cuBLAS, cuDNN, CUTLASS, torch, Triton. First match.
_KERNELS = (
    ("attention", r"lowbit::cuda::\(anonymous namespace\)::attention"),  # whose arguments may be a quantizer's
    ("elementwise", r"lowbit::cuda::(quantize|norm_rope|dequantize)"),
    ("reduce", r"lowbit::cuda::(inverse_rms|guided_score|reveal)"),
    ("other", r"nccl|topk|sort"),
    ("attention", r"flash_(fwd|bwd|attn)|flash_fprop|fmha|sdpa|attention|mha_|varlen"),
    (
        "copy",
        r"memcpy|memset|catarray|copy_kernel|copy_device|indexselect|index_(elementwise|select|copy|put)"
        r"|scatter|gather|embedding",
    ),
    ("reduce", r"^triton_(red|per)_"),
    ("elementwise", r"^triton_poi_"),
    (
        "GEMM",
        r"gemm|gemv|gemmk1|nvjet|xmma|s\d+gemm|splitk|tinygemm|dot_kernel|conv(?!ert)|winograd|fprop|triton_(tem|mm)",
    ),
    ("reduce", r"reduce|softmax|norm(?!al)|argmax|argmin|scan|cumsum"),
    ("elementwise", r"elementwise|silu|gelu|rope|rotary|act_and_mul|triton_"),
    ("GEMM", r"^void cutlass|^cutlass"),
)

# The same of operators on the CPU. A trailing underscore (in place) is taken off first.
_OPERATORS = (
    (
        "attention",
        r"scaled_dot_product|_flash_attention|_efficient_attention|flex_attention|varlen_attn|^lowbit::(cuda|packed)_attention",
    ),
    (
        "GEMM",
        r"::_?(addmm|mm|bmm|baddbmm|addmv|addbmm|matmul|linear|linear4|int_mm|scaled_mm|weight_int\w+_mm|einsum|dot|mv)$"
        r"|conv(?!ert)|mkldnn(_|::_?)linear|^lowbit::(cuda_)?(linear|decoder)",
    ),
    (
        "copy",
        r"::_?(copy|to_copy|to|clone|contiguous|cat|stack|index|index_select|index_put|gather|scatter\w*|embedding|repeat"
        r"|repeat_interleave|constant_pad_nd|pad|flip|roll|masked_select|index_copy|im2col|unfold_copy)$",
    ),
    (
        "reduce",
        r"::_?(sum|mean|max|min|amax|amin|argmax|argmin|softmax|log_softmax|logsumexp|norm|linalg_vector_norm|var|std|prod"
        r"|any|all|cumsum|\w*layer_norm|\w*rms_norm|\w*group_norm|\w*batch_norm|aminmax)$",
    ),
    ("other", r"topk|sort|multinomial|nonzero"),
    (
        "elementwise",
        r"::_?(add|sub|rsub|mul|div|neg|pow|sqrt|rsqrt|reciprocal|exp|log|cos|sin|tanh|sigmoid|silu|gelu|relu|elu|where"
        r"|masked_fill|fill|zero|clamp\w*|abs|sign|round|floor|ceil|eq|ne|lt|le|gt|ge|isfinite|isnan|isinf|logical_\w+"
        r"|bitwise_\w+|maximum|minimum|lerp|addcmul|addcdiv|remainder|fmod|floor_divide|rand|randn|uniform|normal|arange"
        r"|square|erf|sinc|snake|leaky_relu|triu|tril|rand_like|__\w+__)$|^lowbit::(cuda_)?(quantize|norm_rope|dequantize|add_norm|silu_mul)",
    ),
)


@cache
def of_kernel(name: str) -> str:
    """The category of a kernel, a copy or a fill on a GPU, by the name that a trace gives it."""
    return _first(_KERNELS, name.lower())


@cache
def of_operator(name: str) -> str:
    """The category of an operator on the CPU (``aten::add_``)."""
    name = name.lower()
    return _first(_OPERATORS, name if name.endswith("__") else name.rstrip("_"))


def _first(rules: tuple[tuple[str, str], ...], name: str) -> str:
    return next((category for category, pattern in rules if re.search(pattern, name)), "other")
