"""A block Hadamard in front of a layer: outliers of one channel are spread over the 64 of their block.

Idea: Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024, section 3; blocks of 64 instead of
the whole width, so that a group of 4-bit activations is exactly one block and no width has to be a power of two.
The layer computes W x = (W H)(Hᵀ x), H = blockdiag(H₆₄) / 8, which is symmetric and its own inverse.
"""

from __future__ import annotations

from torch import Tensor

from ..reference import hadamard
from ..types import FormatError

BLOCK = 64


def rotate(x: Tensor, block: int = BLOCK) -> Tensor:
    """x [..., K] -> x H, float32: of inputs (rows of tokens) and of weights [N, K] alike. FormatError where the block
    does not divide K."""
    if x.shape[-1] % block:
        raise FormatError(f"hadamard: found width {x.shape[-1]}, accepted are multiples of {block}")
    return hadamard(x, block)


def rotate_hessian(hessian: Tensor, block: int = BLOCK) -> Tensor:
    """Hᵀ M H of M = Σ x xᵀ / tokens [K, K]: the same of the rotated inputs."""
    return rotate(rotate(hessian, block).T.contiguous(), block)
