"""GPTQ: round one input column at a time and let the columns still to come absorb its error.

Method: Frantar et al., "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained Transformers", 2022.
With H = Σ x xᵀ / tokens and H⁻¹ = Uᵀ U (U upper triangular), the column order fixed:
``e_j = (w_j - q_j) / U_jj`` and ``w_k -= U_jk e_j`` for every later k. Here the updates inside a block are taken when a
column is reached (one matrix-vector product), and those of later blocks in one matrix product.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..reference import dequantize, hadamard
from ..types import FormatError, QuantizedWeight, Scheme
from .rtn import build, rtn, take
from .scales import Fit, Grid, Scales, decode, encode, fit, grid_for, groups_of, scheme_for, share_channel

_BLOCK = 128  # columns
_FIRST_DAMP, _LAST_DAMP = 1e-4, 10.0


class Outcome(NamedTuple):
    """What GPTQ did to one weight."""

    weight: QuantizedWeight
    damping: float | None  # of mean(diag H); None where no factorisation was had and everything is rounded to nearest
    tried: tuple[float, ...]  # every damping tried, in order
    error: Tensor  # float32 [N]: ||x (w - wq)||² / tokens of each row, or more where damping adds to it
    kept: Tensor  # bool [N]: rows kept at round-to-nearest, because GPTQ was worse there in ||X (W - Wq)||


class Prepared(NamedTuple):
    """What GPTQ needs of a Hessian, computed once for all weights and rounds that share it."""

    order: Tensor  # [K] elimination order
    factor: Tensor | None  # [K, K] float32, U over that order; None where no factorisation was had
    damping: float | None
    tried: tuple[float, ...]


def prepare(hessian: Tensor, *, act_order: bool = True, damp: float = 0.01) -> Prepared:
    """Order and factor of a Hessian [K, K]. FormatError on NaN or Inf."""
    if not bool(torch.isfinite(hessian).all()):
        raise FormatError("hessian: found NaN or Inf, accepted are finite values")
    h = hessian.detach().float()
    k = h.shape[0]
    largest_first = torch.argsort(h.diagonal(), descending=True, stable=True)
    order = largest_first if act_order else torch.arange(k, device=h.device)
    factor, damping, tried = factorise(h[order][:, order], damp)
    return Prepared(order, None if factor is None else factor.float(), damping, tried)


def gptq(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    act_order: bool = True,
    clip: bool = True,
    damp: float = 0.01,
    scales: Scales = "group",
) -> QuantizedWeight:
    """Quantize a weight [N, K] against the ``hessian`` [K, K] of its inputs (float); ``notes`` say where it fell back.

    ``act_order`` rounds the columns of largest H_jj first, with *static* groups: the scale of each contiguous group is
    fitted beforehand on the columns as they are, so no permutation is left behind. Without it, columns go in
    their own order and a group's scale is fitted when its first column is reached. ``clip`` searches each scale, a
    column's squared error weighted by 1/U_jj². ``damp`` times mean(diag H) is added to the diagonal, ten times more
    until H factorises. A row is never worse than round-to-nearest in ||X (W - Wq)||. ``scales``: "group" one scale a
    group, "two-level" an integer 1 .. 15 times one scale a row (static groups, symmetric 4-bit codes), "channel" one
    scale a row. FormatError on NaN or Inf, and on a Hessian of another shape. Source: Frantar et al., "GPTQ: Accurate Post-Training
    Quantization for Generative Pre-trained Transformers", 2022, section 3; docs/accuracy.md.
    """
    return solve(weight, hessian, scheme, act_order=act_order, clip=clip, damp=damp, scales=scales).weight


def solve(
    weight: Tensor,
    hessian: Tensor,
    scheme: Scheme,
    *,
    act_order: bool = True,
    clip: bool = True,
    damp: float = 0.01,
    scales: Scales = "group",
    prepared: Prepared | None = None,
) -> Outcome:
    """As ``gptq``, and says what was done. ``prepared`` is that of the same Hessian, order and damping."""
    scheme = scheme_for(scheme, scales)
    w = weight.detach().float()
    n, k = w.shape
    if tuple(hessian.shape) != (k, k):
        raise FormatError(f"hessian: found shape {list(hessian.shape)}, accepted is [{k}, {k}]")
    prepared = prepared or prepare(hessian, act_order=act_order, damp=damp)
    plain = rtn(w, scheme, scales)
    h = hessian.detach().float()
    order, factor, damping, tried = prepared
    if factor is None:
        return Outcome(
            plain.with_(notes=(_unsolved(tried),)),
            None,
            tried,
            output_error(w, plain, h),
            torch.ones(n, dtype=torch.bool, device=w.device),
        )
    group_size = scheme.group_of(k)
    grid = grid_for(w, scheme, group_size)
    static = act_order or scales == "two-level"
    codes, fits, loss = eliminate(
        w.T, factor, order, grid, group_size, static=static, clip=clip, shared=scales == "two-level"
    )
    solved = build(codes, fits, grid, group_size, scheme)

    # The loss is the error under the damped Hessian, so never below the error under H: most rows need no second look.
    plain_error = output_error(w, plain, h)
    doubtful = (loss * (1 + 1e-3) >= plain_error).nonzero()[:, 0]
    worse = torch.zeros(n, dtype=torch.bool, device=w.device)
    found = output_error(w[doubtful], take(solved, doubtful), h)
    worse[doubtful] = found > plain_error[doubtful]
    if rows := int(worse.sum()):
        pick = worse[:, None]
        solved = solved.with_(
            codes=torch.where(pick, plain.codes, solved.codes),
            scales=torch.where(pick, plain.scales, solved.scales),
            zeros=None if solved.zeros is None or plain.zeros is None else torch.where(pick, plain.zeros, solved.zeros),
            notes=(f"{rows} of {n} rows kept at round-to-nearest, where GPTQ was worse",),
        )
    return Outcome(solved, damping, tried, torch.minimum(loss, plain_error), worse)


def factorise(h: Tensor, damp: float) -> tuple[Tensor | None, float | None, tuple[float, ...]]:
    """U [K, K] float64 with (H + damping·mean(diag H)·I)⁻¹ = Uᵀ U; the damping used; every damping tried.

    The damping grows tenfold until the factorisation succeeds; (None, None, tried) where it never does, and for H = 0.
    """
    h = h.double()
    mean = float(h.diagonal().mean())
    tried: list[float] = []
    if h.shape[0] == 0 or not mean > 0:
        return None, None, ()
    while True:
        tried.append(damp)
        # R upper with H = R Rᵀ is the Cholesky factor of H read backwards; then U = R⁻¹.
        damped = h.flip(0, 1)
        damped.diagonal().add_(damp * mean)
        backwards, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed):
            upper = invert_upper(backwards.flip(0, 1))
            if bool(torch.isfinite(upper.float()).all()) and bool((upper.diagonal().float() > 0).all()):
                return upper, damp, tuple(tried)
        if damp >= _LAST_DAMP:
            return None, None, tuple(tried)
        damp = max(damp * 10, _FIRST_DAMP)


def invert_upper(r: Tensor) -> Tensor:
    """The inverse of an upper triangular matrix, by halves: a third of the work of a solve against the identity."""
    k = r.shape[0]
    if k <= _BLOCK:
        identity = torch.eye(k, dtype=r.dtype, device=r.device)
        leaf: Tensor = torch.linalg.solve_triangular(r, identity, upper=True)
        return leaf
    m = k // 2
    result = torch.zeros_like(r)
    result[:m, :m], result[m:, m:] = invert_upper(r[:m, :m]), invert_upper(r[m:, m:])
    result[:m, m:] = -(result[:m, :m] @ r[:m, m:]) @ result[m:, m:]
    return result


def eliminate(
    w: Tensor,
    factor: Tensor,
    order: Tensor,
    grid: Grid,
    group_size: int,
    *,
    static: bool,
    clip: bool,
    shared: bool = False,
) -> tuple[Tensor, list[Fit], Tensor]:
    """Codes [K, N] (w's dtype, columns in their own order), one fit a group, and the loss Σ e² [N], from w [K, N].

    ``factor`` U and ``order`` belong together: row and column j of U stand for input column order[j]. ``shared`` makes
    the scales of a row multiples of one (static groups alone).
    """
    k = w.shape[0]
    importance = factor.diagonal().reciprocal().square()  # in elimination order
    importance = importance / importance.max()
    fits: list[Fit] = []
    if static:
        original = torch.empty_like(importance)
        original[order] = importance
        fits = [fit(w[c], grid, original[c] if clip else None) for c in groups_of(k, group_size)]
        if shared:
            fits = share_channel(fits, w, grid, group_size, original if clip else None)
    group = (order // group_size).tolist()
    work = w[order]  # a copy
    errors = torch.empty(_BLOCK, w.shape[1], dtype=w.dtype, device=w.device)
    codes = torch.empty_like(work)
    loss = torch.zeros_like(work[0])
    inverse_diagonal = factor.diagonal().reciprocal().tolist()
    for begin, end in _spans(k, k if static else group_size):
        if not static and begin % group_size == 0:
            columns = slice(begin, min(begin + group_size, k))
            fits.append(fit(work[columns], grid, importance[columns] if clip else None))
        inner = factor[begin:end, begin:end].T.contiguous()  # row i: what column i takes from those before it
        for i in range(end - begin):
            f = fits[group[begin + i]]
            value = work[begin + i]
            if i:
                value = torch.addmv(value, errors[:i].T, inner[i, :i], alpha=-1)
            code = encode(value, f, grid)
            codes[begin + i] = code
            torch.mul(value - decode(code, f), inverse_diagonal[begin + i], out=errors[i])
        loss += errors[: end - begin].square().sum(0)
        if end < k:
            work[end:].addmm_(factor[begin:end, end:].T, errors[: end - begin], alpha=-1)
    result = torch.empty_like(codes)
    result[order] = codes
    return result, fits, loss


def effective(q: QuantizedWeight) -> Tensor:
    """The matrix [N, K] float32 that a plain linear needs to compute the same with float activations.

    (values + up downᵀ) Hᵀ / smooth.
    """
    w = dequantize(q)
    if q.low_rank is not None:
        w = w + q.low_rank.up.float() @ q.low_rank.down.float().T
    if q.hadamard:
        w = hadamard(w, q.hadamard)
    return w if q.smooth is None else w / q.smooth.float()


def output_error(weight: Tensor, q: QuantizedWeight, hessian: Tensor) -> Tensor:
    """Σ (x · (w - q))² / tokens of each row, float32 [N]: the square of ||X (W - Wq)||, row by row."""
    difference = weight - effective(q).to(weight.device)
    return ((difference @ hessian) * difference).sum(1).clamp_min(0)


def _spans(k: int, period: int) -> list[tuple[int, int]]:
    """Blocks of at most _BLOCK columns, none of which crosses a multiple of ``period``."""
    spans = []
    for start in range(0, k, period):
        stop = min(start + period, k)
        spans += [(i, min(i + _BLOCK, stop)) for i in range(start, stop, _BLOCK)]
    return spans


def _unsolved(tried: tuple[float, ...]) -> str:
    if not tried:
        return "rounded to nearest: the Hessian is zero"
    return f"rounded to nearest: the Hessian has no factorisation with damping {', '.join(f'{d:g}' for d in tried)}"
