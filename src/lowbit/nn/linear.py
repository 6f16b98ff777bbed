"""QuantLinear: where a packed weight meets an operator. No formats, no algorithms, no instruction sets in here."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from .. import dispatch, layouts, ops, ops_cuda, reference
from ..cuda import DeviceLinear, FloatLinear
from ..formats.tensors import from_awq_tensors, from_gptq_tensors
from ..layouts import panels
from ..quantize import rtn
from ..types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme
from .held import Held

DEFAULT = "default"


class QuantLinear(Held):
    """A linear layer over a packed weight: y [..., N] = w · A(x') + up · (downᵀ · x') + bias, in the dtype of x [..., K].

    x' is x, divided by ``smooth`` and rotated by the Hadamard where the weight asks for them.
    ``activation``: ``"group"`` (one int8 scale per weight group of a row), ``"token"`` (one per row), or None
    (float32 arithmetic). A weight that declares 4-bit activations runs with 8-bit ones, per token behind a Hadamard and
    per group otherwise; ``activation_bits = 4`` simulates what an INT4 tensor core computes, slowly. Made by the
    ``from_*`` functions. Inference only for the weight; x gets its gradient, with the activation quantizer passed
    straight through.
    """

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def from_quantized(cls, q: QuantizedWeight, activation: str | None = DEFAULT) -> QuantLinear:
        """Pack ``q``. ``activation`` "default" obeys what the checkpoint declares and is "group" where it declares none;
        declared 4-bit activations run in 8 bits, "token" behind a Hadamard, else "group". On the device of ``q``. FormatError for
        values that cannot be (codes out of range, scales that are not finite, a perm that is none), and other activations."""
        four: Activation | None = None
        if activation == DEFAULT:
            declared = q.activation or Activation()
            activation = None if declared.granularity == "none" else declared.granularity
            if declared.bits == 4 and activation is not None:
                four, activation = declared, "token" if q.hadamard else "group"
        q.check_values()
        device = q.codes.device
        choice = dispatch.choose(q, str(device))
        with torch.inference_mode(False), torch.no_grad():
            runs_reference, on_cuda = choice.kernel.name == "reference", choice.kernel.name == "cuda_tiles"
            on_float = choice.kernel.name == "cuda_float"
            empty = torch.empty(0, dtype=torch.uint8, device=device)
            layer = cls(
                empty if runs_reference or on_cuda or on_float else layouts.pack(q),
                q.n,
                q.k,
                bits=q.bits,
                group_size=q.group_size,
                symmetric=q.symmetric,
                activation=activation,
                bias=q.bias,
                perm=q.perm,
                smooth=q.smooth,
                hadamard=q.hadamard,
                low_rank=q.low_rank,
                declared=four,
                plain=q if runs_reference else None,
                choice=choice,
                on_device=DeviceLinear(q) if on_cuda else None,
                on_float=FloatLinear(q) if on_float else None,
            )
            if on_cuda and four is not None and q.bits == 4 and ops_cuda.has_int4(device):
                layer.activation_bits = 4
            return layer

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, scheme: str | Scheme) -> QuantLinear:
        """Round ``linear`` (weight [N, K] float) to nearest under ``scheme`` ("w4a8", "w8a8", "w4a16", "fp16" or a Scheme).

        FormatError for another scheme, and for NaN or Inf. Source: as ``lowbit.quantize.rtn``."""
        if isinstance(scheme, str):
            if scheme not in SCHEMES:
                raise FormatError(f"scheme: found {scheme!r}, accepted are {', '.join(SCHEMES)}")
            scheme = SCHEMES[scheme]
        weight, bias = linear.weight.detach(), None if linear.bias is None else linear.bias.detach()
        if scheme.bits == 16:
            return cls.from_half(weight, bias)
        return cls.from_quantized(rtn(weight, scheme).with_(bias=bias, activation=scheme.activation))

    @classmethod
    def from_half(cls, weight: Tensor, bias: Tensor | None = None) -> QuantLinear:
        """float16 storage, float32 arithmetic. weight [N, K], bias [N], float; FormatError where float16 cannot hold its range."""
        half = weight.to(torch.float16)
        if not bool(torch.isfinite(half).all()):
            raise FormatError(
                f"weight: found {float(weight.abs().max())}, accepted with float16 storage is at most 65504"
            )
        n, k = weight.shape
        with torch.inference_mode(False), torch.no_grad():
            packed = panels.pack_half(half)
            return cls(packed, n, k, bits=16, group_size=k, symmetric=True, activation=None, bias=bias)

    @classmethod
    def from_gptq_tensors(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        g_idx: Tensor | None = None,
        bias: Tensor | None = None,
        zero_offset: int = 1,
        activation: str | None = "group",
    ) -> QuantLinear:
        """GPTQ tensors: qweight int32 [K * bits / 32, N], qzeros int32 [G, N * bits / 32], scales [G, N] float, g_idx int32 [K], bias
        [N] float. ``zero_offset`` 1 for v1 checkpoints, 0 for gptq_v2; bits (4 or 8) follow from the shapes, the group size from
        g_idx where it is given. FormatError names the tensor that does not fit."""
        q = from_gptq_tensors(qweight, qzeros, scales, g_idx, zero_offset=zero_offset)
        return cls.from_quantized(q.with_(bias=bias), activation)

    @classmethod
    def from_awq_tensors(
        cls,
        qweight: Tensor,
        qzeros: Tensor,
        scales: Tensor,
        bias: Tensor | None = None,
        activation: str | None = "group",
    ) -> QuantLinear:
        """AutoAWQ GEMM tensors: qweight int32 [K, N / 8], qzeros int32 [G, N / 8], scales [G, N] float, bias [N] float. FormatError
        names the tensor that does not fit."""
        return cls.from_quantized(from_awq_tensors(qweight, qzeros, scales).with_(bias=bias), activation)

    def packed_anew(self, q: QuantizedWeight) -> QuantLinear:
        return QuantLinear.from_quantized(q, self.activation)

    def half_anew(self, weight: Tensor, bias: Tensor | None) -> QuantLinear:
        return QuantLinear.from_half(weight, bias)

    # -- using it ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        """y [..., N] of x [..., K] (float32, bfloat16 or float16, on the layer's device), in the dtype of x; M = 0 too. FormatError
        for another K, dtype or device."""
        if self.link is not None:
            y: Tensor = self.link(self.alone, x)
            return y
        return self.alone(x)

    def alone(self, x: Tensor) -> Tensor:
        """y of the weight that is held here, which may be a part of a layer."""
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _StraightThrough.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        """``forward`` without a gradient."""
        if x.shape[-1:] != (self.in_features,):
            raise FormatError(f"x: found shape {list(x.shape)}, accepted is [..., {self.in_features}]")
        if x.dtype not in ops.DTYPES:
            raise FormatError(f"x: found {x.dtype}, accepted are float32, bfloat16, float16")
        if x.is_cuda != self.packed.is_cuda or (x.is_cuda and x.device != self.packed.device):
            raise FormatError(f"x: found on {x.device}, accepted is {self.packed.device}, where the layer is")
        y: Tensor
        if self.on_device is not None and self.activation == "token" and self._activation_bits == 8:
            y = self.on_device(x)
            return y
        if self.on_int4 is not None and self.activation is not None and self._activation_bits == 4:
            y = self.on_int4(x)
            return y
        if self.on_float is not None and self._activation_bits == 8:
            y = self.on_float(x)
            return y
        if self.plain is not None or self.on_device is not None or self.on_float is not None:
            granularity: Any = self.activation or "none"
            activation = self._four() if self.activation_bits == 4 else Activation(8, granularity)
            return reference.linear(x, self.to_quantized(), activation).to(x.dtype)
        if x.is_cuda:  # float16 storage: no kernel of its own there
            w = panels.unpack_half(self.packed, self.out_features, self.in_features).float()
            return torch.nn.functional.linear(x.float(), w, self.bias).to(x.dtype)
        if self._activation_bits == 4:
            return self._in_four_bits(x)
        return ops.linear(
            x,
            self.packed,
            self.out_features,
            self.group_size,
            self.bits,
            self._activation_code,
            self.bias,
            self.perm,
            self.smooth,
            hadamard=self.hadamard,
            down=self.down,
            up=self.up,
        )

    def _in_four_bits(self, x: Tensor) -> Tensor:
        """What an INT4 tensor core computes: smoothing, Hadamard and rounding here, the product in the kernel, the low
        rank beside it. Every step works on one row at a time in one order, so that a row of a batch gives the same
        bits alone (with float32 factors, but for the last bit of the low rank)."""
        inside = reference.inside(x, self.smooth, self.hadamard)
        n, none = self.out_features, ops.ACTIVATIONS[None]
        y = ops.linear(self._rounded(inside), self.packed, n, self.group_size, self.bits, none, self.bias)
        if self.down is not None and self.up is not None:
            if self.down.dtype == torch.float16:
                hidden = ops.linear(inside, self.down, self.rank, self.in_features, 16, none)
                y = y + ops.linear(hidden, self.up, n, self.rank, 16, none)
            else:
                down, up = self._factors(self.down, self.up)
                y = y + ((inside.double() @ down.double()) @ up.double().T).float()
        return y.to(x.dtype)

    def _rounded(self, x: Tensor) -> Tensor:
        """x' [..., K] -> its 4-bit codes times their scales, permuted as the weight is."""
        flat = x.reshape(-1, self.in_features)
        columns = flat if self.perm is None else flat[:, self.perm.long()]
        return reference.rounded(columns, self.group_size, self._four()).reshape(x.shape)

    def explain(self) -> dict[str, Any]:
        """Which kernel runs and why the faster ones do not."""
        kernel = "cpu_linear_f16" if self.choice is None else self.choice.kernel.name
        passed = [] if self.choice is None else list(self.choice.passed_over)
        return {
            "kernel": kernel,
            "tier": ops.cpu_isa() if kernel.startswith("cpu") else None,
            "activation": self.activation or "float",
            "declared_activation_bits": self.declares().bits,
            "hadamard": self.hadamard,
            "rank": self.rank,
            "bits": self.bits,
            "group_size": self.group_size,
            "bytes": self.packed_bytes(),
            "passed_over": passed + [(n, why) for n, why in dispatch.tiers() if why not in ("runs", "slower")],
        }


class _StraightThrough(torch.autograd.Function):
    """The gradient of x through a layer whose weight is fixed: grad_y @ W, the quantizer of x taken as identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantLinear) -> Tensor:
        ctx.layer = layer
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.float() @ ctx.layer.dequantize()).to(grad.dtype), None
