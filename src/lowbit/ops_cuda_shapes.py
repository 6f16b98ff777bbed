"""What the operators of the CUDA library give, in shapes and dtypes, for torch.compile and for tensors on meta."""

from __future__ import annotations

import torch
from torch import Tensor

from . import ops
from .types import FormatError


def _rows_of(x: Tensor, rank: int, silu: bool) -> tuple[int, int, Tensor]:
    """Of what the two quantizers give: rows, columns padded, the low rank's half."""
    if not x.dim() or not x.shape[-1]:
        raise FormatError(f"x: found shape {list(x.shape)}, accepted is [..., K]")
    m, k = x.numel() // x.shape[-1], x.shape[-1] // (2 if silu else 1)
    return m, -(-k // 256) * 256, x.new_empty(rank // 16, (m + 7) // 8, 128, dtype=torch.float16)


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_quantize")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    smooth: Tensor | None,
    down: Tensor | None,
    rank: int,
    hadamard: bool,
    silu: bool,
    tile_order: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    m, kp, low = _rows_of(x, rank, silu)
    return x.new_empty(m, kp, dtype=torch.int8), x.new_empty(m, dtype=torch.float32), low


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_linear")  # type: ignore[untyped-decorator]
def _(
    codes: Tensor,
    scales: Tensor,
    low: Tensor | None,
    weight: Tensor,
    channel: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    n: int,
    mode: int,
    out: int,
    row: int = -1,
    gated: bool = False,
) -> Tensor:
    return codes.new_empty(codes.shape[0], n // 2 if gated else n, dtype=ops.DTYPES[out])


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_norm_rope")  # type: ignore[untyped-decorator]
def _(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosines: Tensor,
    sines: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
) -> None:
    return None


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_inverse_rms")  # type: ignore[untyped-decorator]
def _(x: Tensor, eps: float) -> Tensor:
    return x.new_empty(x.shape[0], dtype=torch.float32)


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_dequantize")  # type: ignore[untyped-decorator]
def _(codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, group_size: int, bits: int, out: int) -> Tensor:
    return codes.new_empty(codes.shape[0], k, dtype=ops.DTYPES[out])


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_guided_score")  # type: ignore[untyped-decorator]
def _(
    logits: Tensor,
    guidance: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    noise: Tensor,
    valid: Tensor,
    tokens: Tensor,
    mask_id: int,
) -> tuple[Tensor, Tensor]:
    _, b, t, c, _ = logits.shape
    return logits.new_empty(b, c, t, dtype=torch.int64), logits.new_empty(b, c, t, dtype=torch.float32)


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_attention")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
    return q.new_empty(q.shape)


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_attention_quantize")  # type: ignore[untyped-decorator]
def _(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, tile_order: bool) -> tuple[Tensor, Tensor]:
    m, columns = q.shape[0], -(-q.shape[1] * 128 // 256) * 256
    return q.new_empty(m, columns, dtype=torch.int8), q.new_empty(m, dtype=torch.float32)


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_reveal")  # type: ignore[untyped-decorator]
def _(tokens: Tensor, pred: Tensor, score: Tensor, k: Tensor) -> None:
    return None


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_quantize4")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    residual: Tensor | None,
    norm: Tensor | None,
    eps: float,
    smooth: Tensor | None,
    down: Tensor | None,
    rank: int,
    hadamard: bool,
    silu: bool,
    clip: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    m, kp, low = _rows_of(x, rank, silu)
    groups = x.new_empty(kp // 64, (m + 127) // 128 * 128, dtype=torch.float32)
    return x.new_empty(m, kp // 2, dtype=torch.uint8), groups, x.new_empty(m, dtype=torch.float32), low


@torch.library.register_fake(f"{ops.NAMESPACE}::cuda_linear4")  # type: ignore[untyped-decorator]
def _(
    codes: Tensor,
    group_scales: Tensor,
    scales: Tensor,
    low: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    n: int,
    out: int,
) -> Tensor:
    return codes.new_empty(codes.shape[0], n, dtype=ops.DTYPES[out])
