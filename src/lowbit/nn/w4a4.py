"""W4A4Linear: one linear of an SVDQuant checkpoint."""

from __future__ import annotations

import os

from ..checkpoint import open_checkpoint
from ..formats import read_layer
from ..types import FormatError, QuantizedWeight
from .linear import DEFAULT, QuantLinear


class W4A4Linear(QuantLinear):
    """One linear of an SVDQuant checkpoint, in the place of an ``nn.Linear``: signed 4-bit weights behind smoothing and
    Hadamard, a low rank beside them.

    ``activation_bits`` 8 runs the kernels (one scale a row behind a Hadamard, else one a group); 4 is what an INT4 tensor
    core computes, quick only where there is one. None: 4 on such a chip (Ampere, Ada), else 8. Everything else is QuantLinear's.
    Source: Li et al., "SVDQuant: Absorbing Outliers by Low-Rank Components for 4-Bit Diffusion Models", 2024, section 4.
    """

    @classmethod
    def from_quantized(
        cls, q: QuantizedWeight, activation: str | None = DEFAULT, activation_bits: int | None = None
    ) -> W4A4Linear:
        """Pack ``q``; FormatError where its codes are not signed 4-bit ones."""
        if q.bits != 4 or not q.symmetric:
            raise FormatError(f"codes: found {q.bits} bits, symmetric {q.symmetric}, accepted are signed 4-bit codes")
        layer = super().from_quantized(q, activation)
        assert isinstance(layer, W4A4Linear)
        if activation_bits is not None:
            layer.activation_bits = activation_bits
        return layer

    @classmethod
    def from_checkpoint(cls, path: str | os.PathLike[str], name: str, activation_bits: int | None = None) -> W4A4Linear:
        """Linear ``name`` of a directory or ``.safetensors`` file: our own, or of the published form (design.md 5).

        FormatError names the file, the layer and the field that does not fit.
        """
        checkpoint = open_checkpoint(path)
        return cls.from_quantized(read_layer(checkpoint, name, "lowbit", checkpoint.metadata), DEFAULT, activation_bits)
