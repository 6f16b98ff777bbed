"""quant-matmul: 4- and 8-bit linear layers on the CPU's integer instructions and on NVIDIA GPUs, for the `kernels` loader.

The sources are those of the package `lowbit`, in `_lowbit`; what is public is below.
"""

from . import _requires, layers  # noqa: F401  (_requires comes first)
from ._lowbit.functional import (
    QuantLinear,
    dequant_w4,
    fp16_gemv,
    from_awq,
    from_gptq,
    pack_w4,
    quantize_activation,
    w4a8_linear,
    w8a8_linear,
)

__all__ = [
    "QuantLinear",
    "dequant_w4",
    "fp16_gemv",
    "from_awq",
    "from_gptq",
    "layers",
    "pack_w4",
    "quantize_activation",
    "w4a8_linear",
    "w8a8_linear",
]
