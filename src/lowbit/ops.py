"""The compiled operators, their shapes for torch.compile, and nothing else. Nothing here decides anything."""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor

NAMESPACE = "lowbit"
_LIBRARY = Path(__file__).with_name("_C.so")
torch.ops.load_library(str(_LIBRARY))  # type: ignore[no-untyped-call]
_OPS = getattr(torch.ops, NAMESPACE)
_linear = _OPS.linear.default
_quantize_rows = _OPS.quantize_rows.default
_cuda_quantize = _OPS.cuda_quantize.default
_cuda_linear = _OPS.cuda_linear.default

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
) -> Tensor:
    return x.new_empty(*x.shape[:-1], n)


@torch.library.register_fake(f"{NAMESPACE}::quantize_rows")  # type: ignore[untyped-decorator]
def _(x: Tensor, group_size: int = 0, isa: str = "") -> tuple[Tensor, Tensor]:
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
) -> Tensor:
    """y [..., n] in the dtype of x [..., K] (float32, bfloat16, float16).

    ``weight``: what layouts.panels packs. ``activation``: a value of ACTIVATIONS. ``bias`` [n] and ``smooth`` [K]
    float32, ``perm`` [K] int32. ``isa`` forces a tier by name. RuntimeError names the argument that does not fit.
    """
    y: Tensor = _linear(x, weight, n, group_size, bits, activation, bias, perm, smooth, isa)
    return y


def quantize_rows(x: Tensor, group_size: int = 0, isa: str = "") -> tuple[Tensor, Tensor]:
    """x [M, K] -> int8 [M, K] and float32 scales [M] (or [M, G] for groups of ``group_size``)."""
    codes, scales = _quantize_rows(x, group_size, isa)
    return codes, scales


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


# -- CUDA: the schemas are in _C, the kernels in _cuda13, which is loaded where torch was built with CUDA 13 ---------------


def _load_cuda() -> str:
    """Load the second library; the reason why it was not, or ""."""
    library = _LIBRARY.with_name("_cuda13.so")
    version = torch.version.cuda
    if version is None:
        return "this torch has no CUDA"
    if not version.startswith("13."):
        return f"torch was built with CUDA {version}, accepted is 13.x"
    if not library.exists():
        return "this build of lowbit has no CUDA kernels (nvcc 13 was not found)"
    try:
        torch.ops.load_library(str(library))  # type: ignore[no-untyped-call]
    except OSError as error:
        return f"_cuda13.so cannot be loaded: {error}"
    return ""


_NO_CUDA = _load_cuda()


def cuda_refuses(device: torch.device | str | int) -> str | None:
    """Why the CUDA kernels do not run on that device, or None: the build of torch, or the chip."""
    if _NO_CUDA:
        return _NO_CUDA
    if not torch.cuda.is_available():
        return "torch sees no CUDA device"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}, accepted are 8.0 and newer (Ampere, Ada, Hopper)"
    return None


@torch.library.register_fake(f"{NAMESPACE}::cuda_quantize")  # type: ignore[untyped-decorator]
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
    m, k = x.numel() // x.shape[-1], x.shape[-1] // (2 if silu else 1)
    codes = x.new_empty(m, -(-k // 256) * 256, dtype=torch.int8)
    low = x.new_empty(rank // 16, (m + 7) // 8, 128, dtype=torch.float16)
    return codes, x.new_empty(m, dtype=torch.float32), low


@torch.library.register_fake(f"{NAMESPACE}::cuda_linear")  # type: ignore[untyped-decorator]
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
) -> Tensor:
    return codes.new_empty(codes.shape[0], n, dtype=DTYPES[out])


def cuda_quantize(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    smooth: Tensor | None = None,
    down: Tensor | None = None,
    hadamard: bool = False,
    silu: bool = False,
    tile_order: bool = True,
) -> tuple[Tensor, Tensor, Tensor]:
    """x [..., K] on a CUDA device -> codes int8 [M, KP], scales float32 [M], low float16 [R / 16, ceil(M / 8), 128].

    In this order: silu(gate) * up of x [..., 2K]; x += ``residual`` [..., K], rounded and kept in it; RMS norm with
    ``norm`` float32 [K] and ``eps``; / ``smooth`` float32 [K]; Hadamard over 64; 8 bits per row (reference.quantize_rows);
    ``down`` (mma_tiles.Branch) times the same values in units of the row's scale. ``tile_order`` for cuda_linear's
    GEMM, without it for its GEMV. RuntimeError names the argument that does not fit.
    """
    rank = 0 if down is None else down.shape[0] * 16
    codes, scales, low = _cuda_quantize(x, residual, norm, eps, smooth, down, rank, hadamard, silu, tile_order)
    return codes, scales, low


GEMV = -2  # of cuda_linear's row


def cuda_linear(
    codes: Tensor,
    scales: Tensor,
    low: Tensor | None,
    weight: Tensor,
    channel: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    n: int,
    mode: int,
    dtype: torch.dtype,
    row: int = -1,
) -> Tensor:
    """y [M, n] = scales * (channel * (codes . weight) + up . low) + bias, from what cuda_quantize and mma_tiles give.

    ``row``: GEMV (M <= 16, codes in plain order), -1 the GEMM by its table, else that row of tiles.
    """
    y: Tensor = _cuda_linear(codes, scales, low, weight, channel, bias, up, n, mode, DTYPES.index(dtype), row)
    return y


cpu_isa()  # a wrong QM_CPU_ISA is an error at import, not at the first layer
