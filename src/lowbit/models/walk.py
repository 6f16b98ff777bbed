"""Running a model one block at a time: what each block is called with, and what its linears see."""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor, nn

from ..quantize import InputStats, NonFinite
from ..types import FormatError
from .calibration_inputs import Batch


class Call(NamedTuple):
    """One call of a block, less its hidden states."""

    block: int
    args: tuple[Any, ...]  # after the hidden states
    kwargs: dict[str, Any]


@dataclass
class Trace:
    """One batch on its way: the hidden states [B, T, D] that the next block gets, and every call that is to come."""

    batch: Batch
    hidden: Tensor
    calls: list[Call]

    def advance(self, block: nn.Module, step: int) -> None:
        """Run one block for real."""
        self.hidden = self.run(block, step)

    def run(self, block: nn.Module, step: int) -> Tensor:
        call = self.calls[step]
        out = block(self.hidden, *call.args, **call.kwargs)
        first: Tensor = out[0] if isinstance(out, tuple) else out
        return first


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


def capture(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch]) -> list[Trace]:
    """Call the model with every batch, its blocks passing their input through: cheap, and tells each block's arguments.

    Masks and position embeddings are recorded per block, since they may differ (sliding and full attention). The first
    batch goes to the end of the model, which tells how many calls there are; the others stop at the last one.
    """
    parameters = inspect.signature(model.forward).parameters
    # No cache, and no logits but the last: neither is looked at. Only where the model says that it knows the words.
    extras = {k: v for k, v in (("use_cache", False), ("logits_to_keep", 1)) if k in parameters}
    device = next(model.parameters()).device
    traces: list[Trace] = []
    for batch in batches:
        total = len(traces[0].calls) if traces else None
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.inputs.items()}
        with _recording(blocks, total) as (calls, hidden):
            try:
                model(**{**extras, **inputs})
            except _Stop:
                pass
        if not calls:
            raise FormatError(
                f"{type(model).__name__}: found no call of a block in a forward pass; name another list of blocks"
            )
        if traces and [c.block for c in calls] != [c.block for c in traces[0].calls]:
            raise FormatError(
                "blocks: found another order of calls in one batch than in the first; accepted is one order"
            )
        traces.append(Trace(batch, hidden[0], calls))
    return traces


@contextmanager
def _recording(blocks: Sequence[nn.Module], total: int | None) -> Iterator[tuple[list[Call], list[Tensor]]]:
    calls: list[Call] = []
    hidden: list[Tensor] = []
    kinds: list[bool] = []  # whether a block answers with a tuple

    def stand_in(index: int, block: nn.Module) -> Any:
        real = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            key = next((k for k in ("hidden_states", "x", "input") if k in kwargs), None)
            if not args and key is None:
                raise FormatError(f"block {index}: found no hidden states among {sorted(kwargs)}")
            x: Tensor = args[0] if args else kwargs[str(key)]
            if not hidden:
                hidden.append(x)
            calls.append(Call(index, args[1:], dict(kwargs) if args else {k: v for k, v in kwargs.items() if k != key}))
            if total is not None and len(calls) == total:
                raise _Stop
            if not kinds:
                kinds.append(isinstance(real(*args, **kwargs), tuple))
            return (x,) if kinds[0] else x

        return forward

    unique = {id(block): (i, block) for i, block in reversed(list(enumerate(blocks)))}
    own = {key: block.__dict__.get("forward") for key, (_, block) in unique.items()}
    try:
        for index, block in unique.values():
            block.__dict__["forward"] = stand_in(index, block)
        yield calls, hidden
    finally:
        for key, (_, block) in unique.items():
            del block.__dict__["forward"]
            if own[key] is not None:
                block.__dict__["forward"] = own[key]


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
                    trace.hidden = out
            except _Stop:
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
            raise _Stop

    def same(self, leader: str, x: Tensor) -> bool:
        seen, version = self.inputs[leader]
        return seen is x and version == x._version

    def mask(self, x: Tensor) -> Tensor | None:
        """The padding mask where x [B, T, K] or [B·T, K] is one row a position; routed rows are never padding of ours."""
        mask = self.batch.mask
        return mask if mask is not None and mask.numel() == x[..., 0].numel() else None

    def sample(self, x: Tensor, error: NonFinite) -> str:
        rows = x[..., 0].numel()
        if rows % self.batch.samples:
            return f"samples {self.batch.first} .. {self.batch.first + self.batch.samples - 1}"
        return f"sample {self.batch.first + error.row // (rows // self.batch.samples)}"
