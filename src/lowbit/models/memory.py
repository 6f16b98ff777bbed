"""What a quantization takes of a CUDA device, said before it starts; a run that cannot fit is refused then.

Counted in what is there at once: hidden states of all calibration tokens; of one block its weights, the statistics of
its inputs and the work of solving; not counted what the model has on the device already.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import nn

from ..types import FormatError
from .blocks import Block

# Bytes a value: a Hessian [K, K] while it is made from its float64 sums, factorised and inverted; the weights [N, K] of
# one input, as float32 and float64 copies. Fitted so that they are at least what `bench/quantize_memory.py` saw on an H200
# (2026-11-30), five shapes from 1024x1024 to 16384x4096: 1.03 to 2 times that.
STATISTICS, SOLVING_HESSIAN, SOLVING_WEIGHT = 8, 60, 36
CHUNK = 2048 * 4 * 3  # bytes a column of an input: rows that wait for a sum, once more joined, once more as they come
LIBRARIES = 256 * 2**20  # workspaces of cuBLAS and cuSOLVER


class Need(NamedTuple):
    """Bytes, of the block that needs most. ``solving``: of each input, the largest first."""

    weights: int
    hidden: int
    forward: int  # one batch inside the block
    statistics: int
    solving: tuple[int, ...]

    def total(self, workers: int) -> int:
        """With the linears of so many inputs solved side by side."""
        work = max(self.forward, sum(self.solving[:workers]))
        return self.weights + self.hidden + self.statistics + work + LIBRARIES


def estimate(
    blocks: Sequence[Block],
    groups: Sequence[Sequence[str]],
    tokens: int,
    batch_tokens: int,
    *,
    on_disk: bool = False,
    hessian: bool = True,
) -> Need:
    """The need of quantizing ``blocks``. ``groups``: local names of the linears that read one input (else each its own);
    ``on_disk``: the blocks' weights are not on the device yet; ``hessian`` False for rounding to nearest."""
    needs = []
    for block in blocks:
        inputs = _inputs(block, groups)
        shapes = [(sum(m.out_features for m in mine), mine[0].in_features) for mine in inputs]
        weights = sum(p.numel() * p.element_size() for p in block.module.parameters()) if on_disk else 0
        width = min((k for _, k in shapes), default=0)
        needs.append(
            Need(
                weights,
                hidden=2 * tokens * width * 4,
                forward=2 * batch_tokens * sum(n + k for n, k in shapes) * 4,
                statistics=sum((STATISTICS * k * k if hessian else 0) + CHUNK * k for _, k in shapes),
                solving=tuple(
                    sorted(
                        ((SOLVING_HESSIAN * k * k if hessian else 0) + SOLVING_WEIGHT * n * k for n, k in shapes),
                        reverse=True,
                    )
                ),
            )
        )
    return max(needs, key=lambda need: need.total(1))


def _inputs(block: Block, groups: Sequence[Sequence[str]]) -> list[list[nn.Linear]]:
    """The linears of a block by the input they read."""
    left = dict(block.linears)
    found = []
    for group in groups:
        mine = [left.pop(name) for local in group if (name := f"{block.name}.{local}") in left]
        found += [mine] if mine else []
    return found + [[linear] for linear in left.values()]


def free_on(device: torch.device) -> int:
    """Bytes that torch may still take on a CUDA device: free there, or cached by torch, within the process's share."""
    free, total = torch.cuda.mem_get_info(device)
    allocated, reserved = torch.cuda.memory_allocated(device), torch.cuda.memory_reserved(device)
    share = torch.cuda.get_per_process_memory_fraction(device)
    return min(free + reserved - allocated, int(share * total) - allocated)


def open_solvers(device: torch.device) -> None:
    """Make torch load its CUDA solvers now: the first call must not come from two threads at once ("lazy wrapper should
    be called at most once")."""
    one = torch.eye(2, dtype=torch.float64, device=device)
    torch.linalg.cholesky_ex(one)
    torch.linalg.eigh(one)
    torch.linalg.qr(one)
    torch.linalg.solve_triangular(one, one, upper=True)


def workers_that_fit(need: Need, free: int, workers: int, device: torch.device | str) -> int:
    """The most inputs, up to ``workers``, that are solved side by side in ``free`` bytes. FormatError where one is too much."""
    for count in range(max(workers, 1), 0, -1):
        if need.total(count) <= free:
            return count
    raise FormatError(
        f"device {device}: found {free / 1e9:.2f} GB free, accepted is {need.total(1) / 1e9:.2f} GB or more "
        f"({told(need, 1)}); fewer calibration tokens, or device cpu, need less"
    )


def told(need: Need, workers: int) -> str:
    """The parts, in words."""
    parts = {
        "a block's weights": need.weights,
        "hidden states": need.hidden,
        "statistics": need.statistics,
        "work": need.total(workers) - need.weights - need.hidden - need.statistics,
    }
    return ", ".join(f"{name} {size / 1e9:.2f}" for name, size in parts.items() if size)
