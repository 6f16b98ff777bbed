"""Loose tensors of one layer, without a checkpoint around them, through the same readers."""

from __future__ import annotations

from torch import Tensor

from ..types import FormatError, QuantizedWeight
from . import awq, gptq

_LAYER = "tensors"


def from_gptq_tensors(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, *, zero_offset: int = 1
) -> QuantizedWeight:
    """GPTQ: qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales [G, N], g_idx [K] or None.

    bits (4 or 8) follow from the shapes, the group size from g_idx where it is given. ``zero_offset`` 1: the stored
    zero points are one too small (format v1), added to the whole word; 0: they are as stored (gptq_v2).
    """
    if zero_offset not in (0, 1):
        raise FormatError(f"zero_offset: found {zero_offset}, accepted are 1 (GPTQ v1) and 0 (gptq_v2)")
    for name, tensor in (("qweight", qweight), ("qzeros", qzeros), ("scales", scales)):
        if tensor.dim() != 2:
            raise FormatError(f"{name}: found shape {list(tensor.shape)}, accepted are two dimensions")
    n = qweight.shape[1]
    bits = 8 if n and qzeros.shape[1] * 32 == 8 * n else 4
    named = {f"{_LAYER}.qweight": qweight, f"{_LAYER}.qzeros": qzeros, f"{_LAYER}.scales": scales}
    if g_idx is not None:
        named[f"{_LAYER}.g_idx"] = g_idx
    return gptq.read(named, _LAYER, {"bits": bits, "checkpoint_format": "gptq" if zero_offset else "gptq_v2"})


def from_awq_tensors(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> QuantizedWeight:
    """AutoAWQ GEMM: qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N]."""
    named = {f"{_LAYER}.qweight": qweight, f"{_LAYER}.qzeros": qzeros, f"{_LAYER}.scales": scales}
    return awq.read(named, _LAYER, {"bits": 4})
