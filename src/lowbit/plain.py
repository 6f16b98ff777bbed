"""The operators in plain torch, for an installation without the compiled library: right, and slow.

They read the same packed bytes. Sums are float64 (reference.linear), so the last bits of y differ from the kernels'.
"""

from __future__ import annotations

import os

from torch import Tensor

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


def _no_decoder(*_: object) -> int:
    raise FormatError("engine: found native, accepted without compiled kernels is transformers")


if not native.COMPILED:
    for name, function in (("linear", linear), ("quantize_rows", quantize_rows)):
        native.implement(name, function, "CPU")
    for name in ("cpu_isa", "cpu_isas"):
        native.implement(name, tier, "CompositeExplicitAutograd")
    for name in ("decoder_new", "decoder_free", "decoder_scratch", "decoder_step"):
        native.implement(name, _no_decoder, "CompositeExplicitAutograd")
