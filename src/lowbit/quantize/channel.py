"""One scale per input channel, searched in front of the rounding: W diag(s) is rounded, the input is divided by s.

Large channels get finer steps. The idea is AWQ's (Lin et al., 2023) and SmoothQuant's (Xiao et al., 2022); the scales
stay in front of the layer, so they are free per shared input and nothing needs folding.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import GROUP_4
from ..types import Scheme
from .scales import Grid, decode, encode, fit, groups_of

RMS_POWERS = (0.15, 0.3, 0.45, 0.6, 0.75)  # s = rms^a
RANGE_POWERS = (0.35, 0.5, 0.65, 0.8)  # s = amax^a / wmax^(1-a), tried where a whole row shares one activation scale
_LIMIT = 1e3  # s is in 1/_LIMIT .. _LIMIT after normalising: far inside fp16, and so is its reciprocal


class ChannelScales(NamedTuple):
    """The winner of the search; ``smooth`` None where no scales were better than any."""

    smooth: Tensor | None  # [K] float16, > 0
    rule: str  # "none", "rms^0.45", "range^0.5"
    error: float  # ||X Wᵀ - Y||² / ||X Wᵀ||² on the sample, the weight rounded to nearest
    plain: float  # the same without scales


def channel_scales(weight: Tensor, sample: Tensor, rms: Tensor, absmax: Tensor, scheme: Scheme) -> ChannelScales:
    """Search s for a weight [N, K] (the rows of all linears that read one input) on sample rows [R, K].

    ``rms`` and ``absmax`` [K] are of the input, all of it float. Each candidate is rounded to fp16, then judged by the output error of
    round-to-nearest with the scheme's own activation rounding; where none is better than no scales (or nothing is finite), there
    are none. Nothing is refused. Source: Lin et al., "AWQ", 2023, section 3.2; Xiao et al., "SmoothQuant", 2022, section 4.
    """
    w, x = weight.float().T.contiguous(), sample.float().to(weight.device)
    target = x @ w
    size = float(target.square().sum())
    plain = best = _loss(w, x, None, target, scheme)
    chosen: tuple[Tensor | None, str] = (None, "none")
    rms, absmax = rms.to(w.device), absmax.to(w.device)
    candidates = [(f"rms^{a:g}", floored(rms) ** a) for a in RMS_POWERS]
    if scheme.activation.granularity == "token":
        largest = floored(w.abs().amax(1))
        candidates += [(f"range^{a:g}", floored(absmax) ** a / largest ** (1 - a)) for a in RANGE_POWERS]
    for rule, raw in candidates:
        s = normalise(raw)
        loss = _loss(w, x, s.float(), target, scheme)
        if loss < best:
            best, chosen = loss, (s, rule)
    scale = 1 / size if size > 0 else 0.0
    return ChannelScales(*chosen, best * scale, plain * scale)


def normalise(s: Tensor) -> Tensor:
    """s [K] > 0, scaled so that largest · smallest = 1, limited, in the fp16 that is stored."""
    middle = (s.max().double() * s.min().double()).sqrt()
    return (s.double() / middle).clamp(1 / _LIMIT, _LIMIT).half()


def fake_quantize(x: Tensor, scheme: Scheme, group_size: int) -> Tensor:
    """x [R, K] as the layer's integer product sees it: codes times their scale, or x where activations are float.

    8 bits per token or per weight group, 4 bits per token or per 64 columns.
    """
    bits, granularity, clip = scheme.activation
    if bits not in (4, 8) or granularity == "none":
        return x
    low, high, ratio, columns = (-8, 7, clip, GROUP_4) if bits == 4 else (-127, 127, 1.0, group_size)
    width = x.shape[1] if granularity == "token" else columns
    pieces = []
    for group in groups_of(x.shape[1], width):
        part = x[:, group]
        step = part.abs().amax(1, keepdim=True) * ratio / high
        pieces.append((part / step.clamp_min(1e-30)).round_().clamp_(low, high).mul_(step))
    return torch.cat(pieces, 1)


def floored(v: Tensor) -> Tensor:
    """Channels that never fire get the smallest size that any live one has; all dead: ones."""
    live = v > float(v.max()) * 2.0**-40 if v.numel() else v > 0
    if not bool(live.any()):
        return torch.ones_like(v)
    return torch.where(live, v, v[live].min())


def _loss(w: Tensor, x: Tensor, s: Tensor | None, target: Tensor, scheme: Scheme) -> float:
    """||A(X / s) R(diag(s) w) - target||² of w [K, N], A the activation rounding and R round-to-nearest."""
    group_size = scheme.group_of(w.shape[0])
    grid = Grid(scheme.bits, scheme.symmetric, torch.float32)
    rounded = torch.empty_like(w)
    for columns in groups_of(w.shape[0], group_size):
        part = w[columns] if s is None else w[columns] * s[columns, None]
        f = fit(part, grid)
        rounded[columns] = decode(encode(part, f, grid), f)
    seen = fake_quantize(x if s is None else x / s, scheme, group_size)
    return float(torch.addmm(target, seen, rounded, beta=-1).square_().sum())
