"""Layers for `kernelize`: a forward over the attributes of the module that adopts it. Inference only."""

import torch
from torch import nn

from .._lowbit import functional


class W4A8Linear(nn.Module):
    """`w4a8_linear` over what `pack_w4`, `from_gptq` or `from_awq` gave: the module has these attributes."""

    can_torch_compile: bool = True
    has_backward: bool = False
    packed: torch.Tensor
    scales: torch.Tensor
    zeros: torch.Tensor
    group_size: int
    perm: torch.Tensor | None
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `w4a8_linear`."""
        return functional.w4a8_linear(x, self.packed, self.scales, self.zeros, self.group_size, self.perm, self.bias)


class W8A8Linear(nn.Module):
    """`w8a8_linear` over `w_int8` [N, K], `scale_wt` [N] and `bias`. Packs on every call: `QuantLinear` does not."""

    can_torch_compile: bool = True
    has_backward: bool = False
    w_int8: torch.Tensor
    scale_wt: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `w8a8_linear`."""
        return functional.w8a8_linear(x, self.w_int8, self.scale_wt, self.bias)


class Fp16Linear(nn.Module):
    """`fp16_gemv` over an `nn.Linear` in float16: its `weight` [N, K] and `bias`. Packs on every call."""

    can_torch_compile: bool = True
    has_backward: bool = False
    weight: torch.Tensor
    bias: torch.Tensor | None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """y [..., N] of x [..., K] float, in its dtype. FormatError and RuntimeError as `fp16_gemv`."""
        return functional.fp16_gemv(x, self.weight, self.bias)


__all__ = ["Fp16Linear", "W4A8Linear", "W8A8Linear"]
