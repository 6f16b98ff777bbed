"""The operators in plain torch, for an installation without the compiled library: right, and slow.

They read the same packed bytes. Sums are float64 (reference.linear), so the last bits of y differ from the kernels'.
"""

from __future__ import annotations

import os

import torch
from torch import Tensor
from torch.nn import functional

from . import layouts, native, reference
from .layouts import panels
from .types import Activation, FormatError, LowRank, QuantizedWeight

TIER = "reference"
GRANULARITIES = {0: Activation(8, "token"), 1: Activation(8, "group"), 2: Activation(16, "none")}


def tier() -> str:
    """The one tier there is."""
    _known("QM_CPU_ISA", os.environ.get("QM_CPU_ISA", ""))
    return TIER


def _known(name: str, isa: str) -> None:
    if isa not in ("", TIER):
        raise RuntimeError(f"{name}: found '{isa}', this installation has {TIER} (no compiled kernels)")


def linear(
    x: Tensor,
    weight: Tensor,
    n: int,
    group_size: int,
    bits: int,
    activation: int,
    bias: Tensor | None = None,
    perm: Tensor | None = None,
    smooth: Tensor | None = None,
    isa: str = "",
    *,
    hadamard: int = 0,
    down: Tensor | None = None,
    up: Tensor | None = None,
) -> Tensor:
    """As ops.linear."""
    _known("isa", isa)
    if bits not in (4, 8, 16) or activation not in GRANULARITIES or (bits == 16 and activation != 2):
        raise FormatError(
            f"bits, activation: found {bits}, {activation}, accepted are 4 and 8 with 0, 1, 2, and 16 with 2"
        )
    k = x.shape[-1]
    if bits == 16:
        inside = reference.inside(x.reshape(-1, k), smooth, hadamard).double()
        y = (inside if perm is None else inside[:, perm.long()]) @ panels.unpack_half(weight, n, k).double().T
        y = y if bias is None else y + bias.double()
        return y.to(x.dtype).reshape(*x.shape[:-1], n)
    if panels.packed_columns(weight, group_size) != k:
        found = panels.packed_columns(weight, group_size)
        raise FormatError(f"x: found K={k}, accepted is {found}, the columns that were packed")
    low = None
    if down is not None and up is not None and up.numel():
        rank = up.shape[1]
        low = LowRank(panels.unpack_half(down, rank, k).T.contiguous(), panels.unpack_half(up, n, rank))
    codes, scales, zeros = layouts.unpack(weight, n, k, group_size, bits)
    q = QuantizedWeight(codes, scales, group_size, bits, zeros, perm, low, smooth, hadamard, None, bias)
    return reference.linear(x, q, GRANULARITIES[activation]).to(x.dtype)


def quantize_rows(
    x: Tensor,
    group_size: int = 0,
    isa: str = "",
    *,
    perm: Tensor | None = None,
    smooth: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[Tensor, Tensor]:
    """As ops.quantize_rows."""
    _known("isa", isa)
    inside = reference.inside(x, smooth, hadamard)
    codes, scales = reference.quantize_rows(inside if perm is None else inside[:, perm.long()], group_size or None)
    return codes.contiguous(), scales if group_size else scales[:, 0].contiguous()


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float, isa: str = "") -> Tensor:
    """As ops.add_norm."""
    _known("isa", isa)
    return functional.rms_norm(x if add is None else x.add_(add), weight.shape, weight, eps)


def silu_mul(x: Tensor, isa: str = "") -> Tensor:
    """As ops.silu_mul."""
    _known("isa", isa)
    gate, up = x.chunk(2, -1)
    return functional.silu(gate) * up


def packed_attention(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosines: Tensor,
    sines: Tensor,
    bounds: Tensor,
    heads: int,
    kv_heads: int,
    eps: float,
    scale: float,
    isa: str = "",
) -> Tensor:
    """As ops.packed_attention; qkv stays."""
    _known("isa", isa)
    parts = torch.split(qkv.view(len(qkv), heads + 2 * kv_heads, -1), [heads, kv_heads, kv_heads], 1)

    def turned(x: Tensor, weight: Tensor | None) -> Tensor:
        a, b = (x if weight is None else functional.rms_norm(x, weight.shape, weight, eps)).chunk(2, -1)
        c, s = cosines[:, None], sines[:, None]
        return torch.cat([a * c - b * s, b * c + a * s], -1)

    q, k, v = (t.transpose(0, 1) for t in (turned(parts[0], q_norm), turned(parts[1], k_norm), parts[2]))
    out = qkv.new_empty(heads, *q.shape[1:])
    ends = bounds.tolist()
    for a, b in zip(ends, ends[1:]):
        if b > a:
            out[:, a:b] = functional.scaled_dot_product_attention(
                q[:, a:b], k[:, a:b], v[:, a:b], scale=scale, enable_gqa=True
            )
    return out.transpose(0, 1).flatten(1)


def _no_decoder(*_: object) -> int:
    raise FormatError("engine: found native, accepted without compiled kernels is transformers")


if not native.COMPILED:
    for function in (linear, quantize_rows, add_norm, silu_mul, packed_attention):
        native.implement(function.__name__, function, "CPU")
    for name in ("cpu_isa", "cpu_isas"):
        native.implement(name, tier, "CompositeExplicitAutograd")
    for name in ("decoder_new", "decoder_free", "decoder_scratch", "decoder_step"):
        native.implement(name, _no_decoder, "CompositeExplicitAutograd")
