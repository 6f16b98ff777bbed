"""What a layer bench times: the record of a competitor, and the quantizer that they share."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.types import FormatError, QuantizedWeight

Call = Callable[[], Tensor]


class Entry(NamedTuple):
    """Something to time: ``make(x)`` gives a call over a copy of the weights of its own; x is there in every dtype."""

    name: str
    facts: dict[str, Any]
    weight_bytes: int
    make: Callable[[Mapping[str, Tensor]], Call]
    exact: Tensor  # [N, K] float32, what the layer multiplies with


class Peer(NamedTuple):
    """``entry(weight [N, K], group, threads)``; ``needs``: the module that has to be there; ``install``: how to get it."""

    entry: Callable[[Tensor, int, int], Entry]
    needs: str = "torch"
    install: str = "comes with torch"


def quantize(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round to nearest: 4 bits with zero points, 8 bits signed. Scales are what float16 holds, as in a checkpoint."""
    n, k = weight.shape
    if group < 1 or k % group:
        raise FormatError(f"--group: found {group}, accepted here is a divisor of K={k}")
    blocks = weight.reshape(n, k // group, group)
    if bits == 8:
        scales = (blocks.abs().amax(-1) / 127).half()
        codes = (blocks / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight(codes.reshape(n, k), scales, group, bits)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    return QuantizedWeight(codes.reshape(n, k), scales, group, bits, zeros=zeros.to(torch.uint8))


def zero_points(q: QuantizedWeight) -> Tensor:
    assert q.zeros is not None
    return q.zeros


def two_a_byte(codes: Tensor) -> Tensor:
    """Pairs along the last dimension, the first in the low nibble."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4
