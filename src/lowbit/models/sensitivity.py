"""What each input of a model loses at 4-bit activations, measured: one at a time, everything else at 8 bits.

The measure is KL(all at 8 bits || this one at 4) over calibration text. Both runs have the same weights, so it is zero
without rounding, positive with it, and free of the noise that the labels of the text would add. A run for an input of
block b starts at b from kept hidden states, so that a sweep costs half a pass an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ..nn import QuantLinear
from ..quantize.budget import Candidate, average, choose
from ..reference import divergence
from ..types import Activation, FormatError, Scheme
from .calibration_inputs import Batch
from .recipes import blocks_of, recipe_for

TOKENS, WINDOW = 512, 128  # of the calibration text that a sweep runs over


class Choice(NamedTuple):
    """One input and what was decided for the linears that read it."""

    names: tuple[str, ...]
    weights: int
    sensitivity: float | None  # KL a token in nats; None where an override had decided
    bits: int


class Budget(NamedTuple):
    """What was chosen. The two last are KL a token against 8 bits everywhere."""

    asked: float
    average: float
    tokens: int
    choices: list[Choice]
    everything_at_4: float  # less what is overridden
    as_chosen: float

    def to_dict(self) -> dict[str, Any]:
        """As JSON and the checkpoint's metadata have it."""
        return {**self._asdict(), "choices": [c._asdict() for c in self.choices]}


def refuse(
    weights: Mapping[str, int], scheme: Scheme, calibration: object, budget: float, fixed: Mapping[str, Activation]
) -> None:
    """FormatError where a budget cannot be met, before any work: ``weights`` {linear: how many}, overrides ``fixed``."""
    if scheme.activation.bits != 4:
        raise FormatError(
            f"budget: found {budget:g} with scheme {scheme.name}, accepted is a scheme of 4-bit activations"
        )
    if calibration is None:
        raise FormatError(f"budget: found {budget:g} without calibration, accepted is text or inputs to measure on")
    choose([Candidate((n,), w, 0.0, fixed[n].bits if n in fixed else None) for n, w in weights.items()], budget)


def spend(
    model: nn.Module, batches: Sequence[Batch], budget: float, fixed: Sequence[str] = (), progress: bool = False
) -> Budget:
    """Choose the activations of a model whose linears are QuantLinear with 4-bit ones declared; set 8 bits where chosen.

    ``budget`` bits are an average over the weights (``quantize.budget.choose`` has the rule and what is refused), ``fixed``
    names linears that an override decided: not measured, not changed, but counted. What gets 8 bits gets the 8 bits that
    it was measured with: per token behind a Hadamard, else per group.
    """
    groups = _inputs(model)
    free = [tuple(name for name in names if name not in fixed) for names in groups]
    candidates = [
        Candidate((name,), _weights(model, [name]), 0.0, _layer(model, name).declares().bits)
        for names in groups
        for name in names
        if name in fixed
    ]
    free = [names for names in free if names]
    sweep = _Sweep(model, batches)
    found = [sweep.loss(names) for names in tqdm(free, desc="sensitivity", unit="input", disable=not progress)]
    every = sweep.loss([name for names in free for name in names])
    candidates += [Candidate(n, _weights(model, n), loss) for n, loss in zip(free, found, strict=True)]
    bits = choose(candidates, budget)
    chosen = [n for c, b in zip(candidates, bits, strict=True) if c.bits is None and b == 4 for n in c.names]
    after = sweep.loss(chosen)
    for c, b in zip(candidates, bits, strict=True):
        if c.bits is None and b == 8:
            for layer in (_layer(model, name) for name in c.names):
                layer.activation = layer.activation  # forgets the 4 bits that it declared
    choices = [
        Choice(c.names, c.weights, c.gain if c.bits is None else None, b) for c, b in zip(candidates, bits, strict=True)
    ]
    return Budget(budget, average(candidates, bits), sweep.tokens, choices, every, after)


def _inputs(model: nn.Module) -> list[list[str]]:
    """The quantized linears of every block, those that read one input together."""
    recipe = recipe_for(model)
    found = []
    for prefix, _ in blocks_of(model, recipe):
        for group in recipe.groups:
            names = [f"{prefix}.{local}" for local in group]
            present = [name for name in names if isinstance(_get(model, name), QuantLinear)]
            if present:
                found.append(present)
    return found


def _get(model: nn.Module, name: str) -> nn.Module | None:
    try:
        return model.get_submodule(name)
    except AttributeError:
        return None


def _layer(model: nn.Module, name: str) -> QuantLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, QuantLinear)
    return layer


def _weights(model: nn.Module, names: Sequence[str]) -> int:
    return sum(layer.in_features * layer.out_features for layer in (_layer(model, name) for name in names))


class _Sweep:
    """The run at 8 bits, kept: its logits, and the hidden states in front of every block."""

    def __init__(self, model: nn.Module, batches: Sequence[Batch]) -> None:
        self.model, self.batches = model, batches
        self.tokens = sum(batch.tokens for batch in batches)
        recipe = recipe_for(model)
        named = blocks_of(model, recipe)
        self.prefixes, self.blocks = [name for name, _ in named], [block for _, block in named]
        parameters = inspect.signature(model.forward).parameters
        self.extras = {"use_cache": False} if "use_cache" in parameters else {}
        self.hidden: list[list[Tensor]] = []  # [batch][block]
        self.logits: list[Tensor] = []
        self.tuples = False  # whether a block answers with a tuple
        for batch in batches:
            with self._kept() as hidden:
                self.logits.append(self._run(batch))
            # Blocks that are called in another order, or twice, have no start of their own: run from the beginning.
            self.hidden.append([x for _, x in hidden] if [i for i, _ in hidden] == list(range(len(named))) else [])

    def loss(self, names: Sequence[str]) -> float:
        """KL a token of the logits with these linears at 4 bits, against none."""
        if not names:
            return 0.0
        layers = [_layer(self.model, name) for name in names]
        first = min(next(i for i, p in enumerate(self.prefixes) if name.startswith(f"{p}.")) for name in names)
        total = 0.0
        try:
            for layer in layers:
                layer.activation_bits = 4
            for batch, hidden, want in zip(self.batches, self.hidden, self.logits, strict=True):
                with self._starting(first, hidden[first] if hidden else None):
                    total += float(divergence(want, self._run(batch)).sum())
        finally:
            for layer in layers:
                layer.activation_bits = 8
        return total / max(self.tokens, 1)

    def _run(self, batch: Batch) -> Tensor:
        """Logits [tokens, V] of a batch, less those of padding."""
        device = next(self.model.parameters()).device
        inputs = {k: v.to(device) if isinstance(v, Tensor) else v for k, v in batch.inputs.items()}
        with torch.inference_mode():
            logits: Tensor = self.model(**{**self.extras, **inputs}).logits
        flat = logits.reshape(-1, logits.shape[-1])
        return flat if batch.mask is None else flat[batch.mask.reshape(-1).to(flat.device)]

    @contextmanager
    def _kept(self) -> Iterator[list[tuple[int, Tensor]]]:
        """(block, what it is called with) of one run."""
        found: list[tuple[int, Tensor]] = []

        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found.append((index, args[0] if args else kwargs["hidden_states"]))

            return hook

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self.tuples = isinstance(out, tuple)

        handles = [b.register_forward_pre_hook(before(i), with_kwargs=True) for i, b in enumerate(self.blocks)]
        handles += [b.register_forward_hook(after) for b in self.blocks]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _starting(self, first: int, hidden: Tensor | None) -> Iterator[None]:
        """The model with the blocks in front of ``first`` left out, and it called with ``hidden``."""
        if hidden is None:
            yield
            return

        def passing(x: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
            out = x if x is not None else hidden_states
            return (out,) if self.tuples else out

        real = self.blocks[first].forward

        def beginning(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("hidden_states", None)
            return real(hidden, *args[1:], **kwargs)

        try:
            for block in self.blocks[:first]:
                block.__dict__["forward"] = passing
            self.blocks[first].__dict__["forward"] = beginning
            yield
        finally:
            for block in self.blocks[: first + 1]:
                block.__dict__.pop("forward", None)
