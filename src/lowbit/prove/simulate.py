"""What a quantized linear computes, in plain float32 torch on any device: `reference.linear` fast enough for whole models.

Needs no compiled library. Codes, scales and the order of the Hadamard's sums are the reference's own; the products are
float32 where the reference takes float64, so the two agree to about 1e-6 (tests hold them to 1e-5).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from torch import Tensor, nn

from lowbit import reference
from lowbit.formats import lowbit
from lowbit.models.replace import replace
from lowbit.types import Activation, QuantizedWeight


class Simulated(nn.Module):
    """y [..., N] of x [..., K], in the dtype of x. ``activation`` may be changed between calls; the weight stays."""

    weight: Tensor  # [N, K] float32 over permuted columns
    smooth: Tensor | None
    perm: Tensor | None
    down: Tensor | None
    up: Tensor | None
    bias: Tensor | None

    def __init__(self, q: QuantizedWeight) -> None:
        super().__init__()
        self.in_features, self.out_features = q.k, q.n
        self.group_size, self.hadamard = q.group_size, q.hadamard
        self.activation = q.activation or Activation(16, "none")
        down, up = (None, None) if q.low_rank is None else (t.float() for t in q.low_rank)
        self.register_buffer("weight", reference.dequantize_codes(q))
        self.register_buffer("smooth", None if q.smooth is None else q.smooth.float())
        self.register_buffer("perm", None if q.perm is None else q.perm.long())
        self.register_buffer("down", down)
        self.register_buffer("up", up)
        self.register_buffer("bias", None if q.bias is None else q.bias.float())

    def forward(self, x: Tensor) -> Tensor:
        inside = reference.inside(x.reshape(-1, self.in_features), self.smooth, self.hadamard)
        columns = inside if self.perm is None else inside[:, self.perm]
        y = reference.rounded(columns, self.group_size, self.activation) @ self.weight.T
        if self.down is not None and self.up is not None:
            y = y + (inside @ self.down) @ self.up.T
        if self.bias is not None:
            y = y + self.bias
        return y.reshape(*x.shape[:-1], self.out_features).to(x.dtype)


def simulate(model: nn.Module, quantized: Mapping[str, QuantizedWeight]) -> dict[str, Simulated]:
    """Put a Simulated where each named linear of the model is, on that linear's device."""
    placed: dict[str, Simulated] = {}
    for name, q in quantized.items():
        device = next(model.get_submodule(name).parameters()).device
        placed[name] = Simulated(q).to(device)
        replace(model, name, placed[name])
    return placed


@contextmanager
def running(layers: Mapping[str, Simulated], activations: Mapping[str, Activation]) -> Iterator[None]:
    """The layers with other activations for a while; those that are not named keep their own."""
    before = {name: layers[name].activation for name in activations}
    try:
        for name, activation in activations.items():
            layers[name].activation = activation
        yield
    finally:
        for name, activation in before.items():
            layers[name].activation = activation


def stored_bits(quantized: Mapping[str, QuantizedWeight]) -> float:
    """Bits a weight of a lowbit checkpoint: codes, scales, zeros, smoothing, permutation, low rank; biases left out."""
    stored = weights = 0
    for name, q in quantized.items():
        stored += sum(t.numel() * t.element_size() for t in lowbit.write(q.with_(bias=None), name).values())
        weights += q.n * q.k
    return 8 * stored / max(weights, 1)
