"""What the linears of a block see while it runs over the calibration inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from ..quantize import InputStats, NonFinite
from ..types import FormatError
from .calibration_inputs import Batch
from .walk import Trace


class _Enough(Exception):
    """Ends a pass over a block whose rest is not needed."""


def collect(
    block: nn.Module,
    linears: Mapping[str, nn.Linear],
    traces: Sequence[Trace],
    step: int,
    *,
    hessian: bool,
    seed: int,
    advance: bool = False,
) -> list[tuple[list[str], InputStats]]:
    """Run a block over all batches and measure the inputs of its linears: (names that share an input, statistics).

    Linears share statistics where they were called with one and the same tensor. Every linear is in the answer; one
    that was not called has counted 0 tokens. ``advance`` keeps what the block gives as what the next one gets;
    otherwise a pass ends at the last linear.
    """
    collector = _Collector(linears, hessian, seed, whole=advance)
    handles = [m.register_forward_pre_hook(collector.hook(n), with_kwargs=True) for n, m in linears.items()]
    try:
        for trace in traces:
            collector.start(trace.batch)
            try:
                out = trace.run(block, step)
                if advance:
                    trace.keep(step, out)
            except _Enough:
                pass
            collector.finish()
    finally:
        for handle in handles:
            handle.remove()
    groups: dict[str, list[str]] = {}
    for name in linears:
        groups.setdefault(collector.leader.get(name, name), []).append(name)
    return [(names, collector.statistics(leader)) for leader, names in groups.items()]


class _Collector:
    def __init__(self, linears: Mapping[str, nn.Linear], hessian: bool, seed: int, whole: bool) -> None:
        self.linears, self.hessian, self.seed, self.whole = linears, hessian, seed, whole
        self.stats: dict[str, InputStats] = {}  # by leader
        self.leader: dict[str, str] = {}
        self.calls: Counter[str] = Counter()  # in this batch
        self.total: Counter[str] = Counter()
        self.inputs: dict[str, tuple[Tensor, int]] = {}  # in this batch: the last input of a leader, and its version
        self.once: bool | None = None  # every linear was called exactly once in the first batch
        self.batch: Batch

    def statistics(self, name: str) -> InputStats:
        if name not in self.stats:
            self.stats[name] = InputStats(self.linears[name].in_features, hessian=self.hessian, seed=self.seed)
        return self.stats[name]

    def start(self, batch: Batch) -> None:
        self.batch = batch
        self.calls.clear()
        self.inputs.clear()

    def finish(self) -> None:
        once = all(self.calls[name] == 1 for name in self.linears)
        self.once = once if self.once is None else self.once and once

    def hook(self, name: str) -> Any:
        def before(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            self.see(name, args[0] if args else kwargs["input"])

        return before

    def see(self, name: str, x: Tensor) -> None:
        self.calls[name] += 1
        self.total[name] += 1
        if name not in self.leader:
            self.leader[name] = next((n for n in self.inputs if self.same(n, x) and self.total[n] == 1), name)
        leader = self.leader[name]
        if leader == name:
            self.inputs[name] = (x, x._version)
            try:
                self.statistics(name).add(x, self.mask(x))
            except NonFinite as error:
                raise FormatError(f"{name}: {self.sample(x, error)}: {error}") from error
        elif not (leader in self.inputs and self.same(leader, x) and self.calls[leader] == self.calls[name]):
            raise FormatError(f"{name}: found an input of its own in one pass, after it shared that of {leader}")
        if self.once and not self.whole and len(self.calls) == len(self.linears):
            raise _Enough

    def same(self, leader: str, x: Tensor) -> bool:
        seen, version = self.inputs[leader]
        return seen is x and version == x._version

    def mask(self, x: Tensor) -> Tensor | None:
        """The padding masks of which x [B, T, K] or [B·T, K] has one row a position; routed rows are never padding of ours."""
        return self.batch.mask_of(x[..., 0].numel())

    def sample(self, x: Tensor, error: NonFinite) -> str:
        rows = x[..., 0].numel()
        if rows % self.batch.samples:
            return f"samples {self.batch.first} .. {self.batch.first + self.batch.samples - 1}"
        return f"sample {self.batch.first + error.row // (rows // self.batch.samples)}"
