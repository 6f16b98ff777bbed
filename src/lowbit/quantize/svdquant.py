"""A 4-bit weight with a low-rank branch beside it: y = Q A(x') + up (downᵀ x'), x' = Hᵀ (x / smooth).

Two recipes. ``iterative`` is the published one, kept to compare with. ``default`` takes the low rank out *first*, as
SVDQuant does (Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models", 2024,
section 4.2), which shrinks what multiplies the error of the activations too; then it refits the low rank to what GPTQ
left, seen through the Hessian (QERA, Zhang et al., 2024), and goes round once more. docs/accuracy.md has the formulas
and what each part is worth.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..reference import dequantize
from ..types import FormatError, LowRank, QuantizedWeight, Scheme
from .gptq import prepare, solve
from .hadamard import rotate, rotate_hessian
from .lowrank import Factors, metric, refit, stored, truncated
from .rtn import take
from .scales import Scales

Recipe = Literal["default", "iterative"]
RECIPES: tuple[Recipe, ...] = ("default", "iterative")
RANKS = (0, 16, 32, 64)
ITERATIONS = 3  # of the published recipe, at most
REFITS = 2  # of the default one


class Solved(NamedTuple):
    """One weight with its branch."""

    weight: QuantizedWeight
    rank: int  # of the branch before zero columns were added
    errors: tuple[float, ...]  # ||X (W - Q - L)ᵀ||² / tokens after each round; the round of least error was kept
    kept: int  # rows of the last round that stayed at round-to-nearest
    damping: float | None
    tried: tuple[float, ...]


def svdquant(
    weights: Sequence[Tensor],
    hessian: Tensor,
    scheme: Scheme,
    *,
    rank: int = 16,
    recipe: Recipe = "default",
    smooth: Tensor | None = None,
    hadamard: int = 64,
    scales: Scales = "group",
    act_order: bool = True,
    clip: bool = True,
    damp: float = 0.01,
) -> list[Solved]:
    """Quantize weights [N_i, K] that read one input with ``hessian`` [K, K] (float), each with a low rank of its own.

    ``default``: W' = W diag(smooth) H with ``smooth`` [K] (see ``smooth.smoothing``) and the Hadamard of block
    ``hadamard`` (0: none); L = SVD_r(W'), Q = GPTQ(W' - L), and twice: L = [SVD_r((W' - Q) C)] C⁻¹, between them Q once
    more. ``iterative``: at most three rounds of Q = GPTQ(W - L), L = SVD_r(W - Q), from L = 0, ended when the error stops
    falling; natural column order, no clip search, no smoothing, no Hadamard, so ``smooth``, ``hadamard``,
    ``act_order`` and ``clip`` are not looked at. Of all rounds the one of least error is kept.

    ``rank`` is 0, 16, 32 or 64; a weight of fewer rows or columns gets that many and zero columns up to ``rank``.
    FormatError on another rank or recipe, on NaN or Inf. Source: Li et al., "SVDQuant", 2024, section 4.2; Zhang et al., "QERA", 2024,
    for the refit; docs/accuracy.md.
    """
    check(rank, recipe)
    parts = [w.detach().float() for w in weights]
    if recipe == "iterative":
        smooth, hadamard, act_order, clip = None, 0, False, False
    h = hessian.detach().float()
    if smooth is not None:
        s = smooth.float().to(h.device)
        parts, h = [w * s for w in parts], h / (s[:, None] * s[None, :])
    if hadamard:
        parts, h = [rotate(w, hadamard) for w in parts], rotate_hessian(h, hadamard)
    joined = torch.cat(parts)
    ready = prepare(h, act_order=act_order, damp=damp)
    sizes = [w.shape[0] for w in parts]

    def gptq(low: list[Factors]) -> tuple[QuantizedWeight, list[Tensor], Tensor]:
        """One pass over all rows; what is left of each weight, W' - Q."""
        found = solve(
            joined - torch.cat([f.product() for f in low]), h, scheme,
            act_order=act_order, clip=clip, damp=damp, scales=scales, prepared=ready,
        )  # fmt: skip
        return found.weight, list(torch.split(joined - dequantize(found.weight), sizes)), found.kept

    best: list[tuple[float, QuantizedWeight, Factors] | None] = [None] * len(parts)
    errors: list[list[float]] = [[] for _ in parts]

    def judge(q: QuantizedWeight, left: list[Tensor], low: list[Factors]) -> bool:
        """Keep what is better than before; True where anything was."""
        improved, begin = False, 0
        for i, (size, e, f) in enumerate(zip(sizes, left, low, strict=True)):
            rest = e - f.product()
            error = float(((rest @ h) * rest).sum().clamp_min(0))
            errors[i].append(error)
            known = best[i]
            if known is None or error < known[0]:
                best[i] = (error, take(q, slice(begin, begin + size)), f)
                improved = True
            begin += size
        return improved

    nothing = [Factors(w.new_zeros(w.shape[1], 0), w.new_zeros(w.shape[0], 0)) for w in parts]
    if rank == 0:
        q, left, kept = gptq(nothing)
        judge(q, left, nothing)
    elif recipe == "iterative":
        low = nothing
        for _ in range(ITERATIONS):
            q, left, kept = gptq(low)
            low = [_rounded(truncated(e, rank), rank) for e in left]
            if not judge(q, left, low):
                break
    else:
        through = metric(h)
        low = [_rounded(truncated(w, rank), rank) for w in parts]
        for _ in range(REFITS):
            q, left, kept = gptq(low)
            low = [_rounded(refit(e, rank, through), rank) for e in left]
            judge(q, left, low)

    done: list[Solved] = []
    stayed = [int(k.sum()) for k in torch.split(kept, sizes)]
    for w, found, error, rows in zip(parts, best, errors, stayed, strict=True):
        assert found is not None
        _, q, f = found
        branch = LowRank(*(t.half() if _is_half(f) else t for t in f)) if rank else None
        own = None if smooth is None else smooth.detach().clone()  # a file holds no shared tensors
        q = q.with_(smooth=own, hadamard=hadamard, low_rank=branch, activation=scheme.activation)
        done.append(Solved(q, min(rank, *w.shape), tuple(error), rows, ready.damping, ready.tried))
    return done


def check(rank: int, recipe: str) -> None:
    """FormatError for a rank or a recipe that there is not."""
    if rank not in RANKS:
        raise FormatError(f"rank: found {rank}, accepted are {', '.join(map(str, RANKS))}")
    if recipe not in RECIPES:
        raise FormatError(f"recipe: found {recipe!r}, accepted are {', '.join(RECIPES)}")


def _rounded(factors: Factors, rank: int) -> Factors:
    """The factors as stored, so that the next GPTQ pass and the error see what the layer will compute."""
    low = stored(factors, rank)
    return Factors(low.down.float(), low.up.float())


def _is_half(factors: Factors) -> bool:
    return all(torch.equal(t.half().float(), t) for t in factors)
