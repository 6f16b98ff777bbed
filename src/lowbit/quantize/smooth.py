"""Smoothing for 4-bit activations: one scale per input channel, judged by what the whole layer will compute.

The idea is SmoothQuant's (Xiao et al., 2022, section 4); a low-rank branch inside the search is SVDQuant's (Li et al.,
2024, section 4.1). Here the Hadamard is inside as well, and so is the rounding of the activations: a candidate is
judged by ||X Wᵀ - (A(X') R(W' - L)ᵀ + X' Lᵀ)||² on sample rows, with X' = (X / s) H, W' = W diag(s) H, L the plain
low rank of W', R round-to-nearest and A the scheme's activation rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from ..reference import GROUP_4, dequantize, transform
from ..types import Activation, QuantizedWeight, Scheme
from .channel import ChannelScales, fake_quantize, floored, normalise
from .hadamard import rotate
from .lowrank import truncated
from .scales import Grid, decode, encode, fit, groups_of

CLIPS = (1.0, 0.95, 0.9, 0.85, 0.8)  # of amax, 4-bit activations
RMS_POWERS = (0.25, 0.5, 0.75)  # s = rms^a
RANGE_POWERS = (0.35, 0.5, 0.65, 0.8)  # s = amax^a / wmax^(1-a)


def smoothing(
    weights: Sequence[Tensor],
    sample: Tensor,
    rms: Tensor,
    absmax: Tensor,
    scheme: Scheme,
    *,
    rank: int = 16,
    hadamard: int = 64,
) -> ChannelScales:
    """Search s [K] for weights [N_i, K] that read one input, each with a low rank of its own, on sample rows [R, K].

    ``rms`` and ``absmax`` [K] are of the input, all of it float. Every candidate is rounded to fp16 first. FormatError where a
    Hadamard does not fit K. Source: Xiao et al., "SmoothQuant", 2022, section 4; Li et al., "SVDQuant", 2024, section 4.1.
    """
    x = sample.float().to(weights[0].device)
    parts = [w.detach().float() for w in weights]
    targets = [x @ w.T for w in parts]
    size = sum(float(t.square().sum()) for t in targets)

    def loss(s: Tensor | None) -> float:
        seen = x if s is None else x / s
        seen = rotate(seen, hadamard) if hadamard else seen
        rounded_x = fake_quantize(seen, scheme, scheme.group_of(x.shape[1]))
        total = 0.0
        for w, target in zip(parts, targets, strict=True):
            scaled = w if s is None else w * s
            scaled = rotate(scaled, hadamard) if hadamard else scaled
            low = truncated(scaled, rank, rough=True)
            rounded = _round(scaled - low.product(), scheme)
            got = torch.addmm(target, rounded_x, rounded.T, beta=-1)
            total += float(got.add_((seen @ low.down) @ low.up.T).square_().sum())
        return total

    plain = best = loss(None)
    chosen: tuple[Tensor | None, str] = (None, "none")
    rms, absmax = rms.to(x.device), absmax.to(x.device)
    largest = floored(torch.stack([w.abs().amax(0) for w in parts]).amax(0))
    candidates = [(f"range^{a:g}", floored(absmax) ** a / largest ** (1 - a)) for a in RANGE_POWERS]
    candidates += [(f"rms^{a:g}", floored(rms) ** a) for a in RMS_POWERS]
    for rule, raw in candidates:
        s = normalise(raw)
        found = loss(s.float())
        if found < best:
            best, chosen = found, (s, rule)
    scale = 1 / size if size > 0 else 0.0
    return ChannelScales(*chosen, best * scale, plain * scale)


def activation_clip(weights: Sequence[Tensor], solved: Sequence[QuantizedWeight], sample: Tensor) -> float:
    """The part of amax that becomes the largest 4-bit step, one for all weights [N_i, K] that read ``sample`` [R, K].

    Of a few, that of least ||X Wᵀ - Y||², Y of the quantized weights: fewer steps are lost on the largest entry of each
    64, which is rounded worse. The weights must share smoothing and Hadamard.
    """
    x = sample.float().to(weights[0].device)
    inside = transform(x, solved[0])
    scheme = Scheme("clip", 4, solved[0].group_size, True)
    pairs = []  # (what the integer product has to give, Q)
    for w, q in zip(weights, solved, strict=True):
        want = x @ w.float().T
        if q.low_rank is not None:
            down, up = (t.float().to(x.device) for t in q.low_rank)
            want = want - (inside @ down) @ up.T
        pairs.append((want, dequantize(q).to(x.device)))
    best, chosen = float("inf"), 1.0
    for clip in CLIPS:
        seen = fake_quantize(inside, replace(scheme, activation=Activation(4, "group", clip)), GROUP_4)
        loss = sum(float((want - seen @ q.T).square().sum()) for want, q in pairs)
        if loss < best:
            best, chosen = loss, clip
    return chosen


def _round(w: Tensor, scheme: Scheme) -> Tensor:
    """A weight [N, K] rounded to nearest, as values."""
    grid = Grid(scheme.bits, scheme.symmetric, torch.float32)
    transposed = w.T.contiguous()
    rounded = torch.empty_like(transposed)
    for columns in groups_of(w.shape[1], scheme.group_of(w.shape[1])):
        f = fit(transposed[columns], grid)
        rounded[columns] = decode(encode(transposed[columns], f, grid), f)
    return rounded.T
