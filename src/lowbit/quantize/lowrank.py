"""Low-rank factors: the best rank-r piece of a matrix, plain or seen through a Hessian, and how they are stored.

Plain: Eckart and Young, 1936. Through a Hessian (the error of the outputs instead of that of the weight): Zhang et al.,
"QERA: an Analytical Framework for Quantization Error Reconstruction", 2024, section 4.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from ..types import FormatError, LowRank

EXACT = 1024  # up to this smaller dimension the factors are exact; above it, by iteration on a subspace
_OVERSAMPLE, _ITERATIONS = 16, 6


class Factors(NamedTuple):
    """L = up @ downᵀ."""

    down: Tensor  # [K, r]
    up: Tensor  # [N, r]

    def product(self) -> Tensor:
        """L [N, K] float32."""
        return self.up.float() @ self.down.float().T


def truncated(matrix: Tensor, rank: int, *, rough: bool = False) -> Factors:
    """The best rank-``rank`` approximation of a matrix [N, K], float32; rank min(rank, N, K) where that is less.

    Exact (an eigendecomposition of the smaller Gram matrix in float64) unless ``rough`` or both dimensions exceed
    1024: then by subspace iteration from a fixed start, whose error is a fraction of a percent of the optimum's.
    ``up`` has orthogonal columns times the singular values, ``down`` orthonormal ones. FormatError on NaN or Inf.
    """
    if not bool(torch.isfinite(matrix).all()):
        raise FormatError("low rank: found NaN or Inf in the matrix, accepted are finite values")
    n, k = matrix.shape
    rank = min(rank, n, k)
    if rank == 0:
        return Factors(matrix.new_zeros(k, 0).float(), matrix.new_zeros(n, 0).float())
    wide = rank + _OVERSAMPLE
    if min(n, k) > max(wide, 0 if rough else EXACT):
        m = matrix.float()
        start = torch.randn(k, wide, generator=torch.Generator().manual_seed(0)).to(m.device)
        basis = torch.linalg.qr(m @ start)[0]
        for _ in range(2 if rough else _ITERATIONS):
            basis = torch.linalg.qr(m @ torch.linalg.qr(m.T @ basis)[0])[0]
        inside = _exact(basis.T @ m, rank)
        return Factors(inside.down, basis @ inside.up)
    return _exact(matrix, rank)


def _exact(matrix: Tensor, rank: int) -> Factors:
    m = matrix.double()
    tall = m.shape[0] > m.shape[1]
    gram = m.T @ m if tall else m @ m.T
    vectors = _eigenvectors(gram)[:, -rank:].flip(1)
    if tall:
        return Factors(vectors.float(), (m @ vectors).float())
    down = m.T @ vectors  # columns of length σ, orthogonal
    size = down.norm(dim=0)
    safe = torch.where(size > 0, size, torch.ones_like(size))
    return Factors((down / safe).float(), (vectors * size).float())


def _eigenvectors(gram: Tensor) -> Tensor:
    try:
        vectors: Tensor = torch.linalg.eigh(gram)[1]
    except RuntimeError:  # a device's solver may give up where LAPACK does not
        vectors = torch.linalg.eigh(gram.cpu())[1].to(gram.device)
    return vectors


def metric(hessian: Tensor, damp: float = 0.01) -> Tensor:
    """C [K, K] float64 lower with C Cᵀ = H + damp·mean(diag H)·I, more damping where that does not factorise.

    ||E C||² is then the (damped) squared error of the outputs of an error E of the weight. The identity for H = 0.
    """
    h = hessian.double()
    mean = float(h.diagonal().mean()) if h.shape[0] else 0.0
    if not mean > 0:
        return torch.eye(h.shape[0], dtype=torch.float64, device=h.device)
    while True:
        damped = h.clone()
        damped.diagonal().add_(damp * mean)
        lower, failed = torch.linalg.cholesky_ex(damped)
        if not int(failed) and bool((lower.diagonal() > 0).all()):
            factor: Tensor = lower
            return factor
        damp = max(damp * 10, 1e-4)


def refit(residual: Tensor, rank: int, through: Tensor) -> Factors:
    """The rank-``rank`` L that minimises ||(residual - L) C||, C = ``through`` of ``metric``: [SVD_r(residual C)] C⁻¹."""
    found = truncated(residual.double() @ through, rank)
    down = torch.linalg.solve_triangular(through.T, found.down.double(), upper=True)  # Cᵀ down = V
    return Factors(down.float(), found.up)


def stored(factors: Factors, rank: int) -> LowRank:
    """As the checkpoint has them: float16, each pair of columns of equal length, zero columns up to ``rank``.

    float32 where float16 would overflow or lose a factor to its subnormal range.
    """
    down, up = factors.down.double(), factors.up.double()
    a, b = down.norm(dim=0), up.norm(dim=0)
    live = (a > 0) & (b > 0)
    ratio = torch.where(live, (b / a.clamp_min(1e-300)).sqrt(), torch.zeros_like(a))
    inverse = torch.where(live, 1 / ratio.clamp_min(1e-300), torch.zeros_like(a))
    pad = rank - down.shape[1]
    both = [torch.nn.functional.pad(t, (0, pad)).float() for t in (down * ratio, up * inverse)]
    sizes = [t.norm(dim=0)[: down.shape[1]][live] / max(t.shape[0], 1) ** 0.5 for t in both]
    fits = all(bool((t.abs() < 65504).all()) for t in both) and all(bool((s > 2.0**-12).all()) for s in sizes)
    half = [t.half() if fits else t for t in both]
    return LowRank(half[0], half[1])
