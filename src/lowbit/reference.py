"""The truth in plain torch: what every kernel, layout and format is held to. Slow on purpose, free of tricks."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
from torch import Tensor

from .types import Activation, FormatError, QuantizedWeight

TINY = 2.0**-100  # rows (or groups) whose amax is below quantize to zero
GROUP_4 = 64  # columns that share a 4-bit activation scale, whatever the weight's groups are
MOST_STEPS = 15  # |code| * 15 <= 120: a signed 4-bit code times a two-level multiplier fits int8


def hadamard(x: Tensor, block: int) -> Tensor:
    """Hᵀ x along the last dimension, float32; H = blockdiag(H_block) / sqrt(block), Sylvester order.

    ``block`` is a power of two that divides the width. Butterflies of stride 1, 2, 4, ... in this order, then one
    product: the order of the float32 sums is part of the definition, so that a kernel can give the same bits. H is
    symmetric and its own inverse.
    """
    if x.shape[-1] % block or block & (block - 1):
        raise FormatError(
            f"hadamard: found block {block} with width {x.shape[-1]}, accepted is a power of two dividing it"
        )
    y = x.float()
    stride = 1
    while stride < block:
        pairs = y.reshape(y.numel() // (2 * stride), 2, stride)
        y = torch.stack([pairs[:, 0] + pairs[:, 1], pairs[:, 0] - pairs[:, 1]], 1)
        stride *= 2
    return (y * (1 / math.sqrt(block))).reshape(x.shape)


def expand(per_group: Tensor, group_size: int, k: int) -> Tensor:
    """[..., G] -> [..., K]: the value of its group for every column."""
    return per_group.repeat_interleave(group_size, dim=-1)[..., :k]


def dequantize_codes(q: QuantizedWeight) -> Tensor:
    """w [N, K] float32 over permuted columns: ``scales * (codes - zeros)``."""
    codes = q.codes.to(torch.float32)
    if q.zeros is not None:
        codes = codes - expand(q.zeros.to(torch.float32), q.group_size, q.k)
    return codes * expand(q.scales.to(torch.float32), q.group_size, q.k)


def dequantize(q: QuantizedWeight) -> Tensor:
    """W [N, K] float32 in the original column order. Smoothing, Hadamard and low rank stay outside."""
    w = dequantize_codes(q)
    if q.perm is None:
        return w
    out = torch.empty_like(w)
    out[:, q.perm.long()] = w
    return out


def quantize_rows(
    x: Tensor, group_size: int | None = None, activation: Activation | None = None
) -> tuple[Tensor, Tensor]:
    """x [M, K] -> codes int8 [M, K] and float32 scales [M, G] (G = 1 per token). design.md section 2, activation side.

    8 bits: ``sa = amax / 127``, ``q = rint(x * (127 / amax))``; amax < 2⁻¹⁰⁰ gives 0; NaN or Inf goes into sa, q is 0.
    4 bits: ``sa = clip * amax / 7``, ``q = clamp(rint(x / sa), -8, 7)``.
    """
    activation = activation or Activation()
    x = x.float()
    m, k = x.shape
    size = group_size or k
    groups = -(-k // size)
    blocks = torch.nn.functional.pad(x, (0, groups * size - k)).reshape(m, groups, size)
    amax = blocks.abs().amax(-1)
    usable = torch.isfinite(amax) & (amax >= TINY)
    safe = torch.where(usable, amax, torch.ones_like(amax)).unsqueeze(-1)
    if activation.bits == 8:
        top = torch.full_like(safe, 127)  # a tensor: a Python number's quotient is taken by way of its reciprocal
        scales = amax / top[..., 0]
        codes = torch.round(blocks * (top / safe))
    elif activation.bits == 4:
        seven = torch.full_like(safe, 7)
        scales = (activation.clip * amax / seven[..., 0]).float()
        codes = torch.round(blocks / (activation.clip * safe / seven).float()).clamp(-8, 7)
    else:
        raise ValueError(f"activation bits: found {activation.bits}, accepted are 8 and 4")
    codes = torch.where(usable.unsqueeze(-1), codes, torch.zeros_like(codes))
    scales = torch.where(amax < TINY, torch.zeros_like(scales), scales)
    return codes.reshape(m, groups * size)[:, :k].to(torch.int8), scales


def inside(x: Tensor, smooth: Tensor | None, block: int) -> Tensor:
    """x' = Hᵀ(x / smooth) in float32, columns not yet permuted; ``block`` is that of the Hadamard, 0 for none."""
    x = x.float()
    if smooth is not None:
        x = x / smooth.float().to(x.device)
    return hadamard(x, block) if block else x


def transform(x: Tensor, q: QuantizedWeight) -> Tensor:
    """``inside`` as a weight asks for it."""
    return inside(x, q.smooth, q.hadamard)


def scale_columns(activation: Activation, group_size: int, k: int) -> int:
    """Columns of a row of x that share one scale, before weights with groups of ``group_size``."""
    if activation.granularity != "group":
        return k
    return GROUP_4 if activation.bits == 4 else group_size


def rounded(columns: Tensor, group_size: int, activation: Activation) -> Tensor:
    """Columns [M, K] float32 as an integer product sees them: codes times their scale; as they are for float activations."""
    if activation.granularity == "none":
        return columns
    k = columns.shape[-1]
    size = scale_columns(activation, group_size, k)
    codes, scales = quantize_rows(columns, size, activation)
    return codes.float() * expand(scales, size, k)


def linear(x: Tensor, q: QuantizedWeight, activation: Activation | None = None) -> Tensor:
    """y [..., N] float32 of x [..., K], with ``activation`` (default: the weight's own, else float activations).

    ``Activation(4, "group")`` is what an INT4 tensor core computes: 4-bit activations in groups of 64 columns. The low
    rank sees x' as it is, never quantized.
    """
    activation = activation or q.activation or Activation(16, "none")
    flat = transform(x.reshape(-1, x.shape[-1]), q)
    columns = flat if q.perm is None else flat[:, q.perm.long()]
    w = dequantize_codes(q).double()
    if activation.granularity == "none":
        y = columns.double() @ w.T
    else:
        size = scale_columns(activation, q.group_size, q.k)
        codes, scales = quantize_rows(columns, size, activation)
        y = (codes.double() * expand(scales.double(), size, q.k)) @ w.T
    if q.low_rank is not None:
        y = y + (flat.double() @ q.low_rank.down.double()) @ q.low_rank.up.double().T
    if q.bias is not None:
        y = y + q.bias.double()
    return y.float().reshape(*x.shape[:-1], q.n)


class TwoLevel(NamedTuple):
    """Scales as integer multiples of one scale a row: ``scales[n, g] = channel[n] * steps[n, g]``, exactly."""

    channel: Tensor  # [N] float32, > 0
    steps: Tensor  # [N, G] int8, -15 .. 15


def two_level(scales: Tensor) -> TwoLevel | None:
    """Split scales [N, G] into two levels with the smallest multipliers that do it; None where a row has no such split."""
    s = scales.double()
    size = s.abs()
    top = size.amax(1, keepdim=True) if s.shape[1] else size.new_zeros(s.shape[0], 1)
    top = torch.where(top > 0, top, torch.ones_like(top))
    most = torch.zeros_like(top)  # the multiplier of the largest scale of each row, 0 while none is found
    for m in range(MOST_STEPS, 0, -1):
        exact = ((size * m / top).round() * top == size * m).all(1, keepdim=True)
        most = torch.where(exact, float(m), most)
    if bool((most == 0).any()):
        return None
    return TwoLevel((top / most)[:, 0].float(), ((size * most / top).round() * s.sign()).to(torch.int8))


def expand_int8(q: QuantizedWeight) -> tuple[Tensor, Tensor]:
    """A symmetric 4-bit weight with two-level (or channel) scales as int8 [N, K] and one float32 scale a row [N].

    ``w = channel * int8``, exactly: what an INT8 tensor core multiplies. ValueError where the scales are not two-level.
    """
    levels = two_level(q.scales) if q.bits == 4 and q.zeros is None else None
    if levels is None:
        raise ValueError(
            "scales: found none that are integer multiples 1 .. 15 of one scale a row under signed 4-bit codes"
        )
    return (q.codes * expand(levels.steps, q.group_size, q.k)).to(torch.int8), levels.channel


def cuda_linear(
    codes: Tensor,
    scales: Tensor,
    weight: Tensor,
    channel: Tensor,
    low: Tensor | None,
    up: Tensor | None,
    bias: Tensor | None,
) -> Tensor:
    """What the CUDA kernels compute, float64 [M, N]: codes int8 [M, K] with scales [M]; weight float [N, K] without its
    channel scale [N]; low [M, R] in units of the row's scale; up [N, R]. Sums of integers are exact in float64."""
    y = (codes.double() @ weight.double().T) * channel.double()
    if low is not None and up is not None:
        y = y + low.double() @ up.double().T
    y = y * scales.double()[:, None]
    return y if bias is None else y + bias.double()


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x / sqrt(mean x² + eps) * weight in float32, nothing rounded in between."""
    y = x.float()
    return y * torch.rsqrt(y.square().mean(-1, keepdim=True) + eps) * weight.float()


def norm_rope(x: Tensor, weight: Tensor | None, cosines: Tensor, sines: Tensor, eps: float) -> Tensor:
    """Heads x [M, H, 128] -> RMS norm with ``weight`` [128] (None: none), columns i and i + 64 rotated by cosines and
    sines [M, 64]; float32."""
    y = x.float() if weight is None else rms_norm(x, weight, eps)
    a, b = y[..., :64], y[..., 64:]
    c, s = cosines[:, None], sines[:, None]
    return torch.cat([a * c - b * s, b * c + a * s], -1)


def error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius distance: the one number that tests and benches both quote."""
    distance = torch.linalg.vector_norm(got.double() - want.double())
    return float(distance / torch.linalg.vector_norm(want.double()).clamp_min(1e-30))


def divergence(reference: Tensor, logits: Tensor, rows: int = 128) -> Tensor:
    """KL(softmax(reference) || softmax(logits)) of every row of [T, V], float64 [T], nats; ``rows`` at a time in float32."""
    parts = []
    for start in range(0, reference.shape[0], rows):
        p = torch.log_softmax(reference[start : start + rows].float(), -1)
        q = torch.log_softmax(logits[start : start + rows].to(p.device, torch.float32), -1)
        weight = p.exp()
        parts.append(torch.where(weight > 0, weight * (p - q), 0.0).sum(-1, dtype=torch.float64))
    return torch.cat(parts) if parts else torch.zeros(0, dtype=torch.float64)
