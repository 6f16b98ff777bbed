"""The truth in plain torch: what every kernel, layout and format is held to. Slow on purpose, free of tricks."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from .types import Activation, QuantizedWeight

TINY = 2.0**-100  # rows (or groups) whose amax is below quantize to zero


def hadamard(x: Tensor, block: int) -> Tensor:
    """Hᵀ x along the last dimension; H = blockdiag(H_block) / sqrt(block), Sylvester order. ``block`` a power of two."""
    h = torch.ones(1, 1, dtype=torch.float32, device=x.device)
    while h.shape[0] < block:
        h = torch.cat([torch.cat([h, h], 1), torch.cat([h, -h], 1)])
    h = h / math.sqrt(block)
    return (x.float().reshape(-1, block) @ h).reshape(x.shape)


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
    padded = torch.zeros(m, groups * size).copy_(torch.nn.functional.pad(x, (0, groups * size - k)))
    blocks = padded.reshape(m, groups, size)
    amax = blocks.abs().amax(-1)
    usable = torch.isfinite(amax) & (amax >= TINY)
    safe = torch.where(usable, amax, torch.ones_like(amax)).unsqueeze(-1)
    if activation.bits == 8:
        scales = amax / 127
        codes = torch.round(blocks * (127 / safe))
    elif activation.bits == 4:
        scales = (activation.clip * amax / 7).float()
        codes = torch.round(blocks / (activation.clip * safe / 7).float()).clamp(-8, 7)
    else:
        raise ValueError(f"activation bits: found {activation.bits}, accepted are 8 and 4")
    codes = torch.where(usable.unsqueeze(-1), codes, torch.zeros_like(codes))
    scales = torch.where(amax < TINY, torch.zeros_like(scales), scales)
    return codes.reshape(m, -1)[:, :k].to(torch.int8), scales


def transform(x: Tensor, q: QuantizedWeight) -> Tensor:
    """x' = Hᵀ(x / smooth) in float32, columns not yet permuted."""
    x = x.float()
    if q.smooth is not None:
        x = x / q.smooth.float()
    return hadamard(x, q.hadamard) if q.hadamard else x


def linear(x: Tensor, q: QuantizedWeight, activation: Activation | None = None) -> Tensor:
    """y [..., N] float32 of x [..., K], with ``activation`` (default: the weight's own, else float activations)."""
    activation = activation or q.activation or Activation(16, "none")
    flat = transform(x.reshape(-1, x.shape[-1]), q)
    columns = flat if q.perm is None else flat[:, q.perm.long()]
    w = dequantize_codes(q).double()
    if activation.granularity == "none":
        y = columns.double() @ w.T
    else:
        size = q.group_size if activation.granularity == "group" else None
        codes, scales = quantize_rows(columns, size, activation)
        y = (codes.double() * expand(scales.double(), size or q.k, q.k)) @ w.T
    if q.low_rank is not None:
        y = y + (flat.double() @ q.low_rank.down.double()) @ q.low_rank.up.double().T
    if q.bias is not None:
        y = y + q.bias.double()
    return y.float().reshape(*x.shape[:-1], q.n)


def error(got: Tensor, want: Tensor) -> float:
    """Relative Frobenius distance: the one number that tests and benches both quote."""
    distance = torch.linalg.vector_norm(got.double() - want.double())
    return float(distance / torch.linalg.vector_norm(want.double()).clamp_min(1e-30))
