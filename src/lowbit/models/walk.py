"""Running a model one block at a time: what each block is called with, and what its linears see.

The calls of a model's blocks fall into *runs*: in a run each block reads what the one before gave, as it is. A decoder
has one run; an encoder-decoder has two, since a norm stands between them, and the second is looked at when the first is
done, so that its cross-attention reads what the quantized encoder gives. Wherever a model computes something of its own
between two blocks a new run begins. What a model keeps of a block for later (the skips of a U-net) is seen by its being
alive still two calls on, and is kept too.
"""

from __future__ import annotations

import inspect
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..types import FormatError
from .calibration_inputs import Batch

Present = Callable[[nn.Module], AbstractContextManager[Any]]  # inside, the weights of a block are in memory


class Link(NamedTuple):
    """In the arguments of a call: what an earlier call of the run gave, in place ``slot``."""

    call: int
    slot: int


class Call(NamedTuple):
    """One call of a block; Links stand for what is not known before."""

    block: int
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    shapes: tuple[Any, ...]  # of what the stand-in gave


@dataclass
class Trace:
    """One batch on its way through a run: the calls to come, and what earlier ones gave that is still read."""

    batch: Batch
    calls: list[Call | None]  # None: done, its arguments are let go
    held: set[int] = field(default_factory=set)  # calls whose outputs the model itself reads again after the run
    outputs: dict[int, Any] = field(default_factory=dict)
    last_use: dict[int, int] = field(default_factory=dict)
    diverged: bool = False  # a block gave other shapes than its stand-in: the calls to come have to be looked at again

    def __post_init__(self) -> None:
        for step, call in enumerate(self.calls):
            for value in () if call is None else (*call.args, *call.kwargs.values()):
                if isinstance(value, Link):
                    self.last_use[value.call] = step

    def run(self, block: nn.Module, step: int) -> Any:
        """What the block answers to its call."""
        call = self.calls[step]
        assert call is not None

        def known(value: Any) -> Any:
            return _slots(self.outputs[value.call])[value.slot] if isinstance(value, Link) else value

        return block(*map(known, call.args), **{k: known(v) for k, v in call.kwargs.items()})

    def keep(self, step: int, out: Any) -> None:
        """Go on with what the block gave."""
        call = self.calls[step]
        assert call is not None
        self.outputs[step], self.calls[step] = out, None
        for done in [c for c in self.outputs if c not in (step, *self.held) and self.last_use.get(c, -1) <= step]:
            del self.outputs[done]
        self.diverged |= call.shapes != _shapes(out)

    def advance(self, block: nn.Module, step: int) -> None:
        """Run one block for real."""
        self.keep(step, self.run(block, step))


class Run(NamedTuple):
    """Calls that follow one upon the other. ``more``: the model calls further blocks after them."""

    order: list[int]  # blocks, call by call
    traces: list[Trace]
    more: bool


class _Stop(Exception):
    """Ends a forward pass whose rest is not needed."""


class Walk:
    """The runs of a model, one after the other: ``next_run``, advance every trace through it, ``close`` it."""

    def __init__(
        self, model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch], present: Present = nullcontext
    ) -> None:
        self.model, self.blocks, self.batches, self.present = model, blocks, batches, present
        self.start = 0  # calls that lie behind
        self.done = not batches
        self.kinds: dict[type, tuple[bool, int]] = {}  # in this run, type of block -> (gives a tuple, tensors in it)
        self.forms: dict[int, Any] = {}  # what each call gave in the first batch, tensors left out
        self.given: list[dict[int, Any]] = [
            {} for _ in batches
        ]  # of earlier runs: what their last calls and held ones gave
        parameters = inspect.signature(model.forward).parameters
        # No cache, and no logits but the last: neither is looked at. Only where the model says that it knows the words.
        self.extras = {k: v for k, v in (("use_cache", False), ("logits_to_keep", 1)) if k in parameters}

    def next_run(self) -> Run | None:
        """Call the model with every batch, the blocks to come passing their input through: cheap, and tells their
        arguments. Masks and position embeddings are recorded per call, since they may differ."""
        if self.done:
            return None
        device = next((p.device for p in self.model.parameters() if not p.is_meta), torch.device("cpu"))
        self.kinds.clear()
        order: list[int] = []
        traces: list[Trace] = []
        more = False
        for number, batch in enumerate(self.batches):
            recorder = _Recorder(self, self.given[number], len(order) if traces else None)
            with recorder.standing_in():
                try:
                    self.model(**{**self.extras, **batch.on(device)})
                except _Stop:
                    pass
            found = [call.block for call in recorder.calls]
            if not found:
                name = type(self.model).__name__
                raise FormatError(f"{name}: found no call of a block in a forward pass; name another list of blocks")
            if traces and found != order:
                raise FormatError(
                    "blocks: found another order of calls in one batch than in the first; accepted is one order"
                )
            if not traces:
                order, more = found, recorder.more
            traces.append(Trace(batch, list(recorder.calls), traces[0].held if traces else recorder.held))
        return Run(order, traces, more)

    def close(self, run: Run, length: int) -> None:
        """A run ended after ``length`` calls; what the last of them gave is what the model goes on with."""
        self.done = not run.more and length == len(run.order)
        if not self.done:
            for given, trace in zip(self.given, run.traces, strict=True):
                given |= {self.start + c: trace.outputs[c] for c in {*trace.held, length - 1} if c < length}
        self.start += length


def capture(model: nn.Module, blocks: Sequence[nn.Module], batches: Sequence[Batch]) -> Run:
    """The first run of a model."""
    run = Walk(model, blocks, batches).next_run()
    if run is None:
        raise FormatError("calibration: found no batch, accepted is at least 1")
    return run


class _Recorder:
    """What stands in for the blocks during one forward pass."""

    def __init__(self, walk: Walk, given: dict[int, Any], total: int | None) -> None:
        self.walk, self.given, self.total = walk, given, total
        self.count = 0  # of calls in this pass
        self.calls: list[Call] = []
        self.more = False
        self.origin: dict[int, tuple[weakref.ref[Tensor], Link]] = {}  # by id: what stood in for an output
        self.held: set[int] = set()  # calls whose outputs the model still has when two more are behind
        self.template: Any = None  # what the first block of the run gave, where blocks give several tensors

    @contextmanager
    def standing_in(self) -> Iterator[None]:
        unique = {id(block): (i, block) for i, block in reversed(list(enumerate(self.walk.blocks)))}
        own = {key: block.__dict__.get("forward") for key, (_, block) in unique.items()}
        try:
            for index, block in unique.values():
                block.__dict__["forward"] = self.stand_in(index, block)
            yield
        finally:
            for key, (_, block) in unique.items():
                del block.__dict__["forward"]
                if own[key] is not None:
                    block.__dict__["forward"] = own[key]

    def stand_in(self, index: int, block: nn.Module) -> Callable[..., Any]:
        real = block.forward

        def forward(*args: Any, **kwargs: Any) -> Any:
            number, self.count = self.count, self.count + 1
            if number in self.given:
                return self.given[number]
            x = _main(index, args, kwargs)
            if number < self.walk.start:  # before the end of an earlier run: nothing reads it
                form = self.walk.forms[number]
                return tuple(x if v is Tensor else v for v in form) if isinstance(form, tuple) else x
            last = len(self.calls) - 1
            self.held |= {link.call for ref, link in self.origin.values() if link.call < last and ref() is not None}
            before = self.link(x)
            if self.calls and not (isinstance(before, Link) and before.call == last):
                self.more = True
                raise _Stop
            out = self.answer(block, real, x, args, kwargs)
            call = Call(
                index, tuple(map(self.link, args)), {k: self.link(v) for k, v in kwargs.items()}, _shapes(out)
            )  # fmt: skip
            self.calls.append(call)
            self.walk.forms[number] = (
                tuple(Tensor if isinstance(v, Tensor) else v for v in out) if isinstance(out, tuple) else None
            )
            if self.total is not None and len(self.calls) == self.total:
                raise _Stop
            fresh = [t.view_as(t) if isinstance(t, Tensor) else t for t in _slots(out)]
            for slot, value in enumerate(fresh):
                if isinstance(value, Tensor):
                    self.origin[id(value)] = (weakref.ref(value), Link(len(self.calls) - 1, slot))
            return tuple(fresh) if isinstance(out, tuple) else fresh[0]

        return forward

    def answer(self, block: nn.Module, real: Callable[..., Any], x: Tensor, args: Any, kwargs: Any) -> Any:
        """The input itself, in the form that such blocks answer in; of several tensors, those of the run's first block."""
        kind = self.walk.kinds.get(type(block))
        if kind is None or (kind[1] > 1 and self.template is None):
            with self.walk.present(block):
                out = real(*args, **kwargs)
            slots = [t for t in _slots(out) if isinstance(t, Tensor)]
            kind = self.walk.kinds[type(block)] = (isinstance(out, tuple), len(slots))
            self.template = out if kind[1] > 1 else None
        if kind[1] > 1:
            return self.template
        return (x,) if kind[0] else x

    def link(self, value: Any) -> Any:
        known = self.origin.get(id(value)) if isinstance(value, Tensor) else None
        return known[1] if known is not None and known[0]() is value else value


def _main(index: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Tensor:
    """The hidden states that a block is called with."""
    if args and isinstance(args[0], Tensor):
        return args[0]
    named = [kwargs[k] for k in ("hidden_states", "x", "input") if isinstance(kwargs.get(k), Tensor)]
    if args or not named:
        raise FormatError(f"block {index}: found no hidden states among {len(args)} values and {sorted(kwargs)}")
    found: Tensor = named[0]
    return found


def _slots(out: Any) -> tuple[Any, ...]:
    return out if isinstance(out, tuple) else (out,)


def _shapes(out: Any) -> tuple[Any, ...]:
    return tuple(tuple(t.shape) for t in _slots(out) if isinstance(t, Tensor))
