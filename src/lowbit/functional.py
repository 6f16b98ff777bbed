"""Tensor-level functions: the `quant-matmul` interface. N = out features, K = in features, G = K / group_size."""

from __future__ import annotations

import torch
from torch import Tensor

from . import layouts, nn, ops, reference
from .formats import tensors
from .layouts import panels
from .types import FormatError, QuantizedWeight

QuantLinear = nn.QuantLinear

__all__ = [
    "QuantLinear",
    "dequant_w4",
    "fp16_gemv",
    "from_awq",
    "from_gptq",
    "pack_w4",
    "quantize_activation",
    "w4a8_linear",
    "w8a8_linear",
]

Imported = tuple[Tensor, Tensor, Tensor, int, Tensor | None]


def pack_w4(intw: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """Codes ``intw`` [N, K] in 0..15, ``scales`` [N, G], ``zeros`` [N, G] in 0..15 -> ``packed``, which holds all three.

    scales may be float16, bfloat16 or float32; float32 is stored where float16 cannot hold it exactly.
    FormatError names the argument that does not fit.
    """
    for name, tensor in (("intw", intw), ("zeros", zeros)):
        if tensor.is_floating_point() and not bool((tensor == tensor.round()).all()):
            raise FormatError(f"{name}: found values that are no integers")
        if tensor.numel() and not (0 <= int(tensor.min()) and int(tensor.max()) <= 15):
            raise FormatError(f"{name}: found {int(tensor.min())} .. {int(tensor.max())}, accepted is 0 .. 15")
    q = QuantizedWeight(intw.to(torch.uint8), scales, group_size, 4, zeros.to(torch.uint8))
    q.check_values()
    packed: Tensor = layouts.pack(q)
    return packed


def _imported(q: QuantizedWeight) -> Imported:
    if q.bits != 4:
        raise FormatError(f"bits: found {q.bits}, accepted is 4 (QuantLinear takes 8 too)")
    if q.zeros is None:
        q = q.with_(codes=(q.codes + 8).to(torch.uint8), zeros=torch.full(q.scales.shape, 8, dtype=torch.uint8))
    assert q.zeros is not None
    q.check_values()
    return layouts.pack(q), q.scales, q.zeros, q.group_size, q.perm


def from_gptq(
    qweight: Tensor, qzeros: Tensor, scales: Tensor, g_idx: Tensor | None = None, zero_offset: int = 1
) -> Imported:
    """GPTQ tensors -> ``(packed, scales [N, G], zeros [N, G], group_size, perm)`` for `w4a8_linear`.

    qweight int32 [K / 8, N], qzeros int32 [G, N / 8], scales [G, N] float, g_idx int32 [K]. ``zero_offset`` 1 (v1 checkpoints) adds 1 to the
    whole stored word, so that borrows between neighbours come out right, and warns on a stored 15; 0 is for gptq_v2.
    ``perm`` [K] int32 where g_idx is a real act-order, else None. FormatError names the tensor that does not fit.
    Source: the files of AutoGPTQ and GPTQModel, docs/formats.md; Frantar et al., "GPTQ", 2022, for how they are made.
    """
    return _imported(tensors.from_gptq_tensors(qweight, qzeros, scales, g_idx, zero_offset=zero_offset))


def from_awq(qweight: Tensor, qzeros: Tensor, scales: Tensor) -> Imported:
    """AutoAWQ GEMM tensors -> the 5-tuple of `from_gptq`; perm is None.

    qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N] float. FormatError names the tensor that does not fit.
    Source: the files of AutoAWQ, docs/formats.md; Lin et al., "AWQ", 2023, for how they are made.
    """
    return _imported(tensors.from_awq_tensors(qweight, qzeros, scales))


def dequant_w4(packed: Tensor, scales: Tensor, zeros: Tensor, group_size: int) -> Tensor:
    """float32 [N, K] of the packed (permuted) columns: the reference of `w4a8_linear`.

    ``scales`` and ``zeros`` [N, G] give N and G alone; what is multiplied with was packed. FormatError where the shapes
    do not fit one another.
    """
    n, _ = _check(packed, scales, zeros)
    k = panels.packed_columns(packed, group_size)
    codes, packed_scales, packed_zeros = layouts.unpack(packed, n, k, group_size, 4)
    return reference.dequantize_codes(QuantizedWeight(codes, packed_scales, group_size, 4, packed_zeros))


def quantize_activation(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [..., K] float -> int8 codes [..., K] and one float32 scale a row [...]: ``amax / 127``, half to even.

    A row below 2⁻¹⁰⁰ gives scale 0 and codes 0; NaN or Inf goes into the scale of its row alone. RuntimeError for other dtypes.
    Source: Yao et al., "ZeroQuant", 2022, section 4.1 (one scale a token, found while running).
    """
    codes, scales = ops.quantize_rows(x.reshape(-1, x.shape[-1]))
    return codes.reshape(x.shape), scales.reshape(x.shape[:-1])


def w4a8_linear(
    x: Tensor,
    packed: Tensor,
    scales: Tensor,
    zeros: Tensor,
    group_size: int,
    perm: Tensor | None = None,
    bias: Tensor | None = None,
) -> Tensor:
    """y [..., N] = sa · Σ_g s·(dot_g − z·asum_g) + bias: 4-bit weights, int8 activations per token, in the dtype of x.

    ``scales`` and ``zeros`` are those that were packed (their shapes are checked). Group dots are exact in int32 and
    added in float32 in order of g: every tier and every batch size gives the same bits. x [..., K] float, ``perm`` [K] integers
    (column j of the codes reads x[perm[j]]), ``bias`` [N] float. FormatError where ``packed`` and ``scales`` do not fit one another,
    RuntimeError for an x, ``perm`` or ``bias`` that does not fit them; both name the argument.
    Source: Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference", 2018,
    section 2.3 (zero points by linearity), by group; docs/kernels.md.
    """
    n, _ = _check(packed, scales, zeros)
    return ops.linear(x, packed, n, group_size, 4, ops.ACTIVATIONS["token"], _float(bias), _int(perm))


def w8a8_linear(x: Tensor, w_int8: Tensor, scale_wt: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [..., N]: int8 weights ``w_int8`` [N, K] with one scale a row ``scale_wt`` [N] (or [N, 1]), int8 activations.

    x [..., K] float, ``bias`` [N] float; y has the dtype of x. Packs on every call; QuantLinear keeps the packed form and gives
    the same bits. FormatError for weights, scales or a K that do not fit, RuntimeError for another dtype of x.
    Source: as `w4a8_linear`, with one group a row and no zero points.
    """
    if w_int8.dim() != 2 or w_int8.dtype != torch.int8:
        raise FormatError(f"w_int8: found {w_int8.dtype} {list(w_int8.shape)}, accepted is int8 [N, K]")
    if x.shape[-1] != w_int8.shape[1]:
        raise FormatError(f"x: found K={x.shape[-1]}, accepted is {w_int8.shape[1]}, the K of w_int8")
    q = QuantizedWeight(w_int8, scale_wt.reshape(-1, 1), w_int8.shape[1], 8)
    return ops.linear(x, layouts.pack(q), q.n, q.group_size, 8, ops.ACTIVATIONS["token"], _float(bias))


def fp16_gemv(x: Tensor, w_f16: Tensor, bias: Tensor | None = None) -> Tensor:
    """y [..., N] = x @ w_f16ᵀ + bias with float16 storage and float32 arithmetic, any number of rows.

    x [..., K] float, ``bias`` [N] float; y has the dtype of x. ``w_f16``: plain float16 [N, K] (packed on every call), or what
    `layouts.panels.pack_half` made of an N that 16 divides. FormatError for another dtype or K of ``w_f16``, RuntimeError for
    another dtype of x.
    """
    if w_f16.dtype != torch.float16 or w_f16.dim() not in (2, 3):
        raise FormatError(f"w_f16: found {w_f16.dtype} {list(w_f16.shape)}, accepted is float16 [N, K]")
    if w_f16.dim() == 2 and w_f16.shape[1] != x.shape[-1]:
        raise FormatError(f"x: found K={x.shape[-1]}, accepted is {w_f16.shape[1]}, the K of w_f16")
    packed = panels.pack_half(w_f16) if w_f16.dim() == 2 else w_f16
    n = w_f16.shape[0] if w_f16.dim() == 2 else w_f16.shape[0] * panels.PANEL
    return ops.linear(x, packed, n, x.shape[-1], 16, ops.ACTIVATIONS[None], _float(bias))


def _check(packed: Tensor, scales: Tensor, zeros: Tensor) -> tuple[int, int]:
    if scales.dim() != 2 or scales.shape != zeros.shape:
        raise FormatError(
            f"scales, zeros: found {list(scales.shape)} and {list(zeros.shape)}, accepted are two equal shapes [N, G]"
        )
    n, groups = scales.shape
    panels_of_n = -(-n // panels.PANEL)
    if packed.dim() != 3 or packed.shape[0] != panels_of_n or packed.shape[1] != groups:
        raise FormatError(
            f"packed: found {list(packed.shape)}, accepted with scales {list(scales.shape)} is [{panels_of_n}, {groups}, …]"
        )
    return n, groups


def _float(bias: Tensor | None) -> Tensor | None:
    return None if bias is None else bias.detach().to(torch.float32).contiguous()


def _int(perm: Tensor | None) -> Tensor | None:
    return None if perm is None else perm.to(torch.int32).contiguous()
