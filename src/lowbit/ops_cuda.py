"""The operators of the CUDA library, typed, and nothing else. What they give for torch.compile is in ops_cuda_shapes.py.

The schemas are in _C (csrc/torch_ops.cpp), so that every build of torch can trace them; the kernels are in _cuda13, which
is loaded where torch was built with CUDA 13.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import native, ops
from . import ops_cuda_shapes as ops_cuda_shapes  # registers
from .types import FormatError

_OPS = getattr(torch.ops, ops.NAMESPACE)
_quantize = _OPS.cuda_quantize.default
_linear = _OPS.cuda_linear.default


NO_COMPILER = "this installation of lowbit has no compiled kernels"


def _load_cuda() -> str:
    """Load the second library; the reason why it was not, or ""."""
    version = torch.version.cuda
    if version is None:
        return "this torch has no CUDA"
    if not version.startswith("13."):
        return f"torch was built with CUDA {version}, accepted is 13.x"
    if not native.CUDA_LIBRARY.exists():
        return "this build of lowbit has no CUDA kernels (nvcc 13 was not found)" if native.COMPILED else NO_COMPILER
    try:
        torch.ops.load_library(str(native.CUDA_LIBRARY))  # type: ignore[no-untyped-call]
    except OSError as error:
        return native.unloadable(native.CUDA_LIBRARY, str(error))
    return ""


_NO_CUDA = _load_cuda()


def refuses(device: torch.device | str | int) -> str | None:
    """Why the CUDA kernels do not run on that device, or None: the build of torch, or the chip."""
    if _NO_CUDA:
        return _NO_CUDA
    if not torch.cuda.is_available():
        return "torch sees no CUDA device (accepted: a visible one, with a driver for CUDA 13, that is 580 or newer)"
    major, minor = torch.cuda.get_device_capability(device)
    if major < 8:
        name = torch.cuda.get_device_name(device)
        return f"{name} has compute capability {major}.{minor}, accepted are 8.0 and newer (Ampere, Ada, Hopper)"
    return None


def device_there(name: torch.device | str | int, argument: str = "device") -> torch.device:
    """The device of that name. FormatError for a word that is none, and for a CUDA device that torch does not have:
    what is missing. ``argument`` is what the caller calls it."""
    try:
        found = torch.device(name)
    except RuntimeError:
        raise FormatError(f"{argument}: found {name!r}, accepted are cpu, cuda, cuda:1 and so on") from None
    if found.type != "cuda":
        return found
    if not torch.cuda.is_available():
        why = (
            f"torch for CUDA {torch.version.cuda} sees no GPU: no driver of 580 or newer, or none visible"
            if torch.version.cuda
            else "this torch is built without CUDA"
        )
        raise FormatError(f"{argument}: found {name}, but {why}; accepted here is cpu (`lowbit doctor` says more)")
    if (found.index or 0) >= torch.cuda.device_count():
        raise FormatError(f"{argument}: found {name}, accepted are cuda:0 to cuda:{torch.cuda.device_count() - 1}")
    return found


def _on_gpu(name: str, t: Tensor) -> None:
    """The operators exist for CUDA devices and, for tracing, on meta and as fakes: everything else is named here."""
    if t.is_meta or (t.is_cuda and not (_NO_CUDA and type(t) is Tensor)):
        return
    raise FormatError(f"{name}: found on {t.device}, accepted is a CUDA device" + f" ({_NO_CUDA})" * bool(_NO_CUDA))


def _out(dtype: torch.dtype) -> int:
    if dtype not in ops.DTYPES:
        raise FormatError(f"dtype: found {dtype}, accepted are float32, bfloat16, float16")
    return ops.DTYPES.index(dtype)


def _rank_of(down: Tensor | None) -> int:
    if down is None:
        return 0
    if down.dim() != 4:
        raise FormatError(f"down: found shape {list(down.shape)}, accepted is [R / 16, K / 16, 32, 8]")
    return down.shape[0] * 16


def guided_score(
    logits: Tensor,
    guidance: Tensor,
    penalty: Tensor,
    temperature: Tensor,
    noise: Tensor,
    valid: Tensor,
    tokens: Tensor,
    mask_id: int,
) -> tuple[Tensor, Tensor]:
    """(token int64, score float32) [B, C, T] of logits [2, B, T, C, V], conditional and unconditional, in one launch.

    z = c + guidance (c - u); the token is argmax z below ``mask_id``, the score max z - logsumexp z, less ``penalty`` [C],
    over ``temperature``, plus ``noise`` [B, C, T]; -inf where the frame is not ``valid`` bool [B, T] or ``tokens`` int64
    [B, C, T] is not mask_id. guidance and temperature are float32 tensors of one element.
    """
    pred, score = _OPS.cuda_guided_score.default(logits, guidance, penalty, temperature, noise, valid, tokens, mask_id)
    return pred, score


def attention(q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float) -> Tensor:
    """[M, H, 128] = softmax(scale q kᵀ) v inside each segment ``bounds`` int32 [S + 1] of the M rows, both ways; q [M, H, 128],
    k and v [M, G, 128] float16 or bfloat16, views of rows whose heads lie side by side. Lengths are read on the device."""
    y: Tensor = _OPS.cuda_attention.default(q, k, v, bounds, scale)
    return y


def attention_quantize(
    q: Tensor, k: Tensor, v: Tensor, bounds: Tensor, scale: float, tile_order: bool = True
) -> tuple[Tensor, Tensor]:
    """Codes int8 [M, KP] and scales float32 [M] that ``quantize`` makes of the rows [M, H * 128] of ``attention``, bit for
    bit: one launch where ``joins``, two elsewhere. ``tile_order`` as there."""
    _on_gpu("q", q)
    codes, scales = _OPS.cuda_attention_quantize.default(q, k, v, bounds, scale, tile_order)
    return codes, scales


def reveal(tokens: Tensor, pred: Tensor, score: Tensor, k: Tensor) -> None:
    """In place: tokens int64 [B, S] = pred at the ``k`` int64 [B] slots of largest score of each row, of equal ones the first;
    never where the score is -inf. k is read on the device."""
    _OPS.cuda_reveal.default(tokens, pred, score, k)


def dequantize(
    codes: Tensor, scales: Tensor, zeros: Tensor | None, k: int, group_size: int, bits: int, dtype: torch.dtype
) -> Tensor:
    """w [N, K] = scales * (codes - zeros) in ``dtype``: codes uint8 [N, K / 2] (4 bits, element 2j in the low nibble) or
    [N, K], unsigned with ``zeros`` uint8 [N, G], two's complement without; scales float32 [N, G]."""
    _on_gpu("codes", codes)
    w: Tensor = _OPS.cuda_dequantize.default(codes, scales, zeros, k, group_size, bits, _out(dtype))
    return w


def norm_rope(
    qkv: Tensor,
    q_norm: Tensor | None,
    k_norm: Tensor | None,
    cosines: Tensor,
    sines: Tensor,
    heads: int,
    kv_heads: int,
    eps: float = 1e-6,
) -> None:
    """In place on qkv [..., (heads + 2 * kv_heads) * 128], queries, keys, values side by side: RMS norm of every query and
    key head with ``q_norm``, ``k_norm`` float32 [128] (None: none), then rotation of columns i and i + 64 by ``cosines``,
    ``sines`` float32 [M, 64]; float32 inside, one rounding."""
    _on_gpu("qkv", qkv)
    _OPS.cuda_norm_rope.default(qkv, q_norm, k_norm, cosines, sines, heads, kv_heads, eps)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean x² + eps) of every row of x [M, K], float32 [M]."""
    _on_gpu("x", x)
    y: Tensor = _OPS.cuda_inverse_rms.default(x, eps)
    return y


def quantize(
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
    ``norm`` float32 [K] and ``eps``; / ``smooth`` (mma_tiles.pack_smooth of [K] float16 values); Hadamard over 64; 8 bits per row (reference.quantize_rows);
    ``down`` (mma_tiles.Branch) times the same values in units of the row's scale. ``tile_order`` for linear's GEMM,
    without it for its GEMV. RuntimeError or FormatError names the argument that does not fit, as in all of these.
    """
    _on_gpu("x", x)
    codes, scales, low = _quantize(x, residual, norm, eps, smooth, down, _rank_of(down), hadamard, silu, tile_order)
    return codes, scales, low


GEMV, PORTABLE = -2, -3  # of linear's row


def linear(
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
    gated: bool = False,
) -> Tensor:
    """y [M, n] = scales * (channel * (codes . weight) + up . low) + bias, from what quantize and mma_tiles give.

    ``row``: GEMV (M <= 16, codes in plain order), PORTABLE (the GEMM for any chip), -1 the chip's best GEMM, else that
    row of Hopper's tiles. ``gated`` (where ``gates``): silu(gate) * up [M, n / 2] in float32, rounded once, of a weight
    whose rows are in the order of mma_tiles.gated_order.
    """
    _on_gpu("codes", codes)
    y: Tensor = _linear(codes, scales, low, weight, channel, bias, up, n, mode, _out(dtype), row, gated)
    return y


def quantize4(
    x: Tensor,
    *,
    residual: Tensor | None = None,
    norm: Tensor | None = None,
    eps: float = 0.0,
    smooth: Tensor | None = None,
    down: Tensor | None = None,
    hadamard: bool = False,
    silu: bool = False,
    clip: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As ``quantize``, but 4 bits in groups of 64 columns: codes uint8 [M, KP / 2] (element 2j low), their scales float32
    [KP / 64, M rounded up to 128] = clip * amax / 7, the row's scale (the unit of ``low``), low."""
    _on_gpu("x", x)
    codes, groups, scales, low = _OPS.cuda_quantize4.default(
        x, residual, norm, eps, smooth, down, _rank_of(down), hadamard, silu, clip
    )
    return codes, groups, scales, low


def linear4(
    codes: Tensor,
    group_scales: Tensor,
    scales: Tensor,
    low: Tensor | None,
    weight: Tensor,
    weight_scales: Tensor,
    bias: Tensor | None,
    up: Tensor | None,
    n: int,
    dtype: torch.dtype,
) -> Tensor:
    """y [M, n] on INT4 tensor cores, from what ``quantize4`` and mma_tiles.pack_rows give."""
    _on_gpu("codes", codes)
    y: Tensor = _OPS.cuda_linear4.default(
        codes, group_scales, scales, low, weight, weight_scales, bias, up, n, _out(dtype)
    )
    return y


def gates(device: torch.device) -> bool:
    """Whether ``linear`` can end with silu(gate) * up there: Hopper's GEMM can."""
    return torch.cuda.get_device_capability(device) == (9, 0)


def joins(device: torch.device, heads: int, kv_heads: int) -> bool:
    """Whether ``attention_quantize`` is one launch there: on Hopper, two query heads on each of 2 to 8 key-value heads, whose
    CTAs are a cluster that sees whole rows."""
    fits = heads == 2 * kv_heads and 2 <= kv_heads <= 8
    return fits and device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0)


def has_int4(device: torch.device | str | int) -> bool:
    """Whether the chip multiplies 4-bit numbers by itself: Ampere and Ada do, Hopper and newer emulate it slowly."""
    return torch.cuda.get_device_capability(device)[0] == 8


def runs_int4(device: torch.device | str | int) -> bool:
    """Whether the kernel for 4-bit activations runs there: emulated on Hopper, not on newer chips."""
    return torch.cuda.get_device_capability(device) <= (9, 0)
