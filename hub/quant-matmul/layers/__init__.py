"""Layers for `kernelize`: a forward over the attributes of the module that adopts it. Inference only."""

import torch
from torch import nn

from .._lowbit import functional


class W4A8Linear(nn.Module):
    """`w4a8_linear` over what `pack_w4`, `from_gptq` or `from_awq` gave: the module has these attributes."""

    can_torch_compile: bool = True  # kernelize asks
    has_backward: bool = False  # kernelize asks
    packed: torch.Tensor  # uint8 [N / 16, G, bytes]
    scales: torch.Tensor  # [N, G] float
    zeros: torch.Tensor  # [N, G] integers 0..15
    group_size: int  # columns that share a scale
    perm: torch.Tensor | None  # [K] integers
    bias: torch.Tensor | None  # [N] float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `w4a8_linear`."""
        return functional.w4a8_linear(x, self.packed, self.scales, self.zeros, self.group_size, self.perm, self.bias)


class W8A8Linear(nn.Module):
    """`w8a8_linear` over `w_int8` [N, K], `scale_wt` [N] and `bias`. Packs on every call: `QuantLinear` does not."""

    can_torch_compile: bool = True  # kernelize asks
    has_backward: bool = False  # kernelize asks
    w_int8: torch.Tensor  # [N, K] int8
    scale_wt: torch.Tensor  # [N] float
    bias: torch.Tensor | None  # [N] float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `w8a8_linear`."""
        return functional.w8a8_linear(x, self.w_int8, self.scale_wt, self.bias)


class Fp16Linear(nn.Module):
    """`fp16_gemv` over an `nn.Linear` in float16: its `weight` [N, K] and `bias`. Packs on every call."""

    can_torch_compile: bool = True  # kernelize asks
    has_backward: bool = False  # kernelize asks
    weight: torch.Tensor  # [N, K] float16
    bias: torch.Tensor | None  # [N] float

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `fp16_gemv`."""
        return functional.fp16_gemv(x, self.weight, self.bias)


__all__ = ["Fp16Linear", "W4A8Linear", "W8A8Linear"]
