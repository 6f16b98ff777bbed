"""What each input of a model loses at 4-bit activations, measured: one at a time, everything else at 8 bits.

The measure is KL(all at 8 bits || this one at 4) over calibration text. Both runs have the same weights, so it is zero
without rounding, positive with it, and free of the noise that the labels of the text would add.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from torch import nn
from tqdm import tqdm

from ..nn import QuantLinear
from ..quantize.budget import Candidate, average, choose
from ..types import Activation, FormatError, Scheme
from .calibration_inputs import Batch
from .sweep import Sweep, inputs_of


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
    groups = inputs_of(model, {name for name, module in model.named_modules() if isinstance(module, QuantLinear)})
    free = [tuple(name for name in names if name not in fixed) for names in groups]
    candidates = [
        Candidate((name,), _weights(model, [name]), 0.0, _layer(model, name).declares().bits)
        for names in groups
        for name in names
        if name in fixed
    ]
    free = [names for names in free if names]

    def switch(names: Sequence[str], bits: int) -> None:
        for name in names:
            _layer(model, name).activation_bits = bits

    sweep = Sweep(model, batches, switch)
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


def _layer(model: nn.Module, name: str) -> QuantLinear:
    layer = model.get_submodule(name)
    assert isinstance(layer, QuantLinear)
    return layer


def _weights(model: nn.Module, names: Sequence[str]) -> int:
    return sum(layer.in_features * layer.out_features for layer in (_layer(model, name) for name in names))
