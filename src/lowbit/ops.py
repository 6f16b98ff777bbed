"""The compiled operators, their shapes for torch.compile, and nothing else. Nothing here decides anything."""

from __future__ import annotations

import torch
from torch import Tensor

from . import native

NAMESPACE = native.OPS
native.load()
_OPS = getattr(torch.ops, NAMESPACE)
_linear = _OPS.linear.default
_quantize_rows = _OPS.quantize_rows.default

DTYPES = (torch.float32, torch.bfloat16, torch.float16)  # of x and y
ACTIVATIONS = {"token": 0, "group": 1, None: 2}


@torch.library.register_fake(f"{NAMESPACE}::linear")  # type: ignore[untyped-decorator]
def _(
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
    return x.new_empty(*x.shape[:-1], n)


@torch.library.register_fake(f"{NAMESPACE}::quantize_rows")  # type: ignore[untyped-decorator]
def _(
    x: Tensor,
    group_size: int = 0,
    isa: str = "",
    *,
    perm: Tensor | None = None,
    smooth: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[Tensor, Tensor]:
    codes = x.new_empty(x.shape, dtype=torch.int8)
    if group_size:
        return codes, x.new_empty(x.shape[0], -(-x.shape[1] // group_size), dtype=torch.float32)
    return codes, x.new_empty(x.shape[0], dtype=torch.float32)


def cpu_isas() -> list[str]:
    """The instruction-set tiers that this CPU can run, best first."""
    names: str = _OPS.cpu_isas()
    return names.split(",")


def cpu_isa() -> str:
    """The tier that runs: the best, or what QM_CPU_ISA lowers it to. RuntimeError where QM_CPU_ISA names none of them."""
    name: str = _OPS.cpu_isa()
    return name


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
    """y [..., n] in the dtype of x [..., K] (float32, bfloat16, float16).

    ``weight``: what layouts.panels packs. ``activation``: a value of ACTIVATIONS. ``bias`` [n] and ``smooth`` [K]
    float32, ``perm`` [K] int32, ``hadamard`` 0 or 64, in the order smooth, hadamard, perm. ``down`` and ``up``: the low
    rank as layouts.panels packs factors [R, K] and [n, R], float16 or float32; it reads x behind the Hadamard and is
    added in float32 before y is rounded. ``isa`` forces a tier by name. RuntimeError names the argument that does not
    fit.
    """
    y: Tensor = _linear(
        x, weight, n, group_size, bits, activation, bias, perm, smooth, isa, hadamard=hadamard, down=down, up=up
    )
    return y


def quantize_rows(
    x: Tensor,
    group_size: int = 0,
    isa: str = "",
    *,
    perm: Tensor | None = None,
    smooth: Tensor | None = None,
    hadamard: int = 0,
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> int8 [M, K] and float32 scales [M] (or [M, G] for groups of ``group_size``), behind ``smooth`` [K]
    float32, ``hadamard`` 0 or 64 and ``perm`` [K] int32, in this order."""
    codes, scales = _quantize_rows(x, group_size, isa, perm=perm, smooth=smooth, hadamard=hadamard)
    return codes, scales


@torch.library.register_fake(f"{NAMESPACE}::add_norm")  # type: ignore[untyped-decorator]
def _(x: Tensor, add: Tensor | None, weight: Tensor, eps: float, isa: str = "") -> Tensor:
    return torch.empty_like(x)


@torch.library.register_fake(f"{NAMESPACE}::silu_mul")  # type: ignore[untyped-decorator]
def _(x: Tensor, isa: str = "") -> Tensor:
    return x.new_empty(x.shape[0], x.shape[1] // 2)


@torch.library.register_fake(f"{NAMESPACE}::packed_attention")  # type: ignore[untyped-decorator]
def _(
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
    return qkv.new_empty(qkv.shape[0], qkv.shape[1] // (heads + 2 * kv_heads) * heads)


def add_norm(x: Tensor, add: Tensor | None, weight: Tensor, eps: float, isa: str = "") -> Tensor:
    """x += add in place, where there is one; the RMS norm of x. Contiguous float32 on a CPU: x and add [M, N], weight [N],
    N a multiple of 16."""
    y: Tensor = _OPS.add_norm.default(x, add, weight, eps, isa)
    return y


def silu_mul(x: Tensor, isa: str = "") -> Tensor:
    """silu(gate) * up [M, N] of x [M, 2 N], gates before ups. Contiguous float32 on a CPU, N a multiple of 16."""
    y: Tensor = _OPS.silu_mul.default(x, isa)
    return y


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
    """Attention [M, H D] of qkv [M, (H + 2 G) D]: queries and keys normed by head (weights [D] or None), turned by the angles
    of their row (cosines, sines [M, D / 2]), everyone sees everyone of its segment. ``bounds`` int32 [S + 1], 0 .. M.

    Contiguous float32 on a CPU, D a multiple of 16. qkv is scratch afterwards: keys are turned in place.
    """
    y: Tensor = _OPS.packed_attention.default(
        qkv, q_norm, k_norm, cosines, sines, bounds, heads, kv_heads, eps, scale, isa
    )
    return y


@torch.library.register_fake(f"{NAMESPACE}::decoder_step")  # type: ignore[untyped-decorator]
def _(
    decoder: int,
    ids: Tensor,
    position: int,
    keys: Tensor,
    values: Tensor,
    cosines: Tensor,
    sines: Tensor,
    scratch: Tensor,
    out: Tensor,
    isa: str = "",
) -> None:
    return None


def decoder_new(tensors: list[Tensor], sizes: list[int], eps: float, scale: float) -> int:
    """The number of a decoder over these tensors, in the order of csrc/decoder_ops.cpp; it keeps them alive."""
    number: int = _OPS.decoder_new.default(tensors, sizes, eps, scale)
    return number


def decoder_free(decoder: int) -> None:
    """Let a decoder go. A number that is none is no error."""
    _OPS.decoder_free.default(decoder)


def decoder_scratch(decoder: int, rows: int) -> int:
    """Bytes of scratch that a step of ``rows`` tokens takes on the threads torch has now."""
    size: int = _OPS.decoder_scratch.default(decoder, rows)
    return size


decoder_step = _OPS.decoder_step.default  # no wrapper: once a token


if native.COMPILED:
    cpu_isa()  # a wrong QM_CPU_ISA is an error at import, not at the first layer
