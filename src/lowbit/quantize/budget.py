"""Which inputs run with 8-bit activations when their average is given: most gain per weight first."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

from ..types import FormatError

LOW, HIGH = 4, 8  # bits of the activations that are chosen between


class Candidate(NamedTuple):
    """Linears that read one input, and so run at one precision. ``bits`` is given where it is not to be chosen."""

    names: tuple[str, ...]
    weights: int
    gain: float  # what 8 bits instead of 4 are worth: the more the better, nats here
    bits: int | None = None


def choose(candidates: Sequence[Candidate], budget: float) -> list[int]:
    """Bits of each candidate, 4 or 8, with at most ``budget`` on average over the weights.

    Greedy by gain per weight, of equals the earlier first; what does not fit any more is passed over, and smaller ones
    after it may still fit. What gains nothing is left at 4 bits unless everything fits. FormatError, naming the value, for
    a budget outside 4 .. 8, for one that the given bits alone exceed, and for a gain that is NaN.
    """
    if not (math.isfinite(budget) and LOW <= budget <= HIGH):
        raise FormatError(f"budget: found {budget:g}, accepted is {LOW} .. {HIGH} bits of activations on average")
    for c in candidates:
        if math.isnan(c.gain):
            raise FormatError(f"budget: found a sensitivity of NaN for {', '.join(c.names)}, accepted are numbers")
    total = sum(c.weights for c in candidates)
    bits = [LOW if c.bits is None else c.bits for c in candidates]
    room = budget * total - sum(b * c.weights for b, c in zip(bits, candidates, strict=True))
    slack = 1e-9 * total  # of the sums above
    if room < -slack:
        raise FormatError(
            f"budget: found {budget:g}, accepted is {average(candidates, bits):g} or more: the overrides take that much"
        )
    free = [i for i, c in enumerate(candidates) if c.bits is None]
    everything = (HIGH - LOW) * sum(candidates[i].weights for i in free)
    if everything <= room + slack:
        return [HIGH if c.bits is None else c.bits for c in candidates]
    for i in sorted(
        free, key=lambda i: -candidates[i].gain / max(candidates[i].weights, 1)
    ):  # stable: ties as they come
        cost = (HIGH - LOW) * candidates[i].weights
        if candidates[i].gain > 0 and cost <= room + slack:
            bits[i] = HIGH
            room -= cost
    return bits


def average(candidates: Sequence[Candidate], bits: Sequence[int]) -> float:
    """Bits of the activations, weighted by the weights that they meet."""
    total = sum(c.weights for c in candidates)
    return sum(b * c.weights for b, c in zip(bits, candidates, strict=True)) / max(total, 1)
