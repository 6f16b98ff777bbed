"""QuantLinear: where a packed weight meets an operator. No formats, no algorithms, no instruction sets in here."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch, layouts, ops, reference
from .formats.tensors import from_awq_tensors, from_gptq_tensors
from .layouts import panels
from .quantize import rtn
from .types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme

DEFAULT = "default"


class QuantLinear(torch.nn.Module):
    """A linear layer over a packed weight: y [..., N] = w · A(x [..., K]) + bias, in the dtype of x.

    ``activation``: ``"group"`` (one int8 scale per weight group of a row), ``"token"`` (one per row), or None
    (float32 arithmetic). Made by the ``from_*`` functions. Inference only for the weight; x gets its gradient, with the
    activation quantizer passed straight through.
    """

    packed: Tensor
    bias: Tensor | None
    perm: Tensor | None
    smooth: Tensor | None

    def __init__(
        self,
        packed: Tensor,
        out_features: int,
        in_features: int,
        *,
        bits: int,
        group_size: int,
        symmetric: bool,
        activation: str | None,
        bias: Tensor | None = None,
        perm: Tensor | None = None,
        smooth: Tensor | None = None,
        plain: QuantizedWeight | None = None,
        choice: dispatch.Choice | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        self.activation = activation
        self.plain, self.choice = plain, choice  # `plain` is kept only where the reference runs
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32).clone())
        self.register_buffer("perm", None if perm is None else perm.detach().to(torch.int32).clone())
        self.register_buffer("smooth", None if smooth is None else smooth.detach().to(torch.float32).clone())

    @property
    def activation(self) -> str | None:
        return self._activation

    @activation.setter
    def activation(self, value: str | None) -> None:
        if value not in ops.ACTIVATIONS:
            raise FormatError(f"activation: found {value!r}, accepted are 'token', 'group', None")
        if self.bits == 16 and value is not None:
            raise FormatError(f"activation: found {value!r}, accepted with float16 storage is None")
        self._activation = value
        self._activation_code = ops.ACTIVATIONS[value]

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def from_quantized(cls, q: QuantizedWeight, activation: str | None = DEFAULT) -> QuantLinear:
        """Pack ``q``. ``activation`` "default" obeys what the checkpoint declares and is "group" where it declares none."""
        if activation == DEFAULT:
            declared = q.activation or Activation()
            activation = None if declared.granularity == "none" else declared.granularity
        q.check_values()
        choice = dispatch.choose(q, q.codes.device.type)
        with torch.inference_mode(False), torch.no_grad():
            runs_reference = choice.kernel.name == "reference"
            return cls(
                torch.empty(0, dtype=torch.uint8) if runs_reference else layouts.pack(q),
                q.n,
                q.k,
                bits=q.bits,
                group_size=q.group_size,
                symmetric=q.symmetric,
                activation=activation,
                bias=q.bias,
                perm=q.perm,
                smooth=q.smooth,
                plain=q if runs_reference else None,
                choice=choice,
            )

    @classmethod
    def from_linear(cls, linear: torch.nn.Linear, scheme: str | Scheme) -> QuantLinear:
        """Round ``linear`` to nearest under ``scheme`` ("w4a8", "w8a8", "w4a16", "fp16" or a Scheme)."""
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
        """float16 storage, float32 arithmetic. weight [N, K]; FormatError where float16 cannot hold its range."""
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
        """GPTQ tensors (qweight int32 [K * bits / 32, N]); ``zero_offset`` 1 for v1 checkpoints, 0 for gptq_v2."""
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
        """AutoAWQ GEMM tensors (qweight int32 [K, N / 8])."""
        return cls.from_quantized(from_awq_tensors(qweight, qzeros, scales).with_(bias=bias), activation)

    # -- using it ---------------------------------------------------------------------------------------------------

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_grad_enabled() and x.requires_grad:
            y: Tensor = _StraightThrough.apply(x, self)  # type: ignore[no-untyped-call]
            return y
        return self.compute(x)

    def compute(self, x: Tensor) -> Tensor:
        if x.shape[-1:] != (self.in_features,):
            raise FormatError(f"x: found shape {list(x.shape)}, accepted is [..., {self.in_features}]")
        if x.dtype not in ops.DTYPES:
            raise FormatError(f"x: found {x.dtype}, accepted are float32, bfloat16, float16")
        if self.plain is not None:
            granularity: Any = self.activation or "none"
            activation = (self.plain.activation or Activation())._replace(granularity=granularity)
            return reference.linear(x, self.plain, activation).to(x.dtype)
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
        )

    def to_quantized(self) -> QuantizedWeight:
        """The plain value again: bit-equal codes, scales and zeros. TypeError for float16 storage."""
        if self.plain is not None:
            return self.plain
        if self.bits == 16:
            raise TypeError("float16 storage holds no codes; use dequantize()")
        codes, scales, zeros = layouts.unpack(
            self.packed, self.out_features, self.in_features, self.group_size, self.bits, symmetric=self.symmetric
        )
        granularity: Any = self.activation or "none"
        declared = Activation(8 if self.activation else 16, granularity)
        return QuantizedWeight(
            codes, scales, self.group_size, self.bits, zeros, self.perm, None, self.smooth, 0, declared, self.bias
        )

    def dequantize(self) -> Tensor:
        """W [N, K] float32 in the order of x, smoothing folded in: what a float layer would hold."""
        if self.bits == 16:
            return panels.unpack_half(self.packed, self.out_features, self.in_features).float()
        w = reference.dequantize(self.to_quantized())
        return w if self.smooth is None else w / self.smooth

    def packed_bytes(self) -> int:
        """Bytes that a forward reads: the packed weight and its side tensors."""
        kept = (self.packed, self.bias, self.perm, self.smooth)
        plain = () if self.plain is None else (self.plain.codes, self.plain.scales, self.plain.zeros)
        return sum(t.numel() * t.element_size() for t in (*kept, *plain) if t is not None)

    def explain(self) -> dict[str, Any]:
        """Which kernel runs and why the faster ones do not."""
        kernel = "cpu_linear_f16" if self.choice is None else self.choice.kernel.name
        passed = [] if self.choice is None else list(self.choice.passed_over)
        return {
            "kernel": kernel,
            "tier": None if kernel == "reference" else ops.cpu_isa(),
            "activation": self.activation or "float",
            "bits": self.bits,
            "group_size": self.group_size,
            "bytes": self.packed_bytes(),
            "passed_over": passed + [(n, why) for n, why in dispatch.tiers() if why not in ("runs", "slower")],
        }

    def extra_repr(self) -> str:
        zeros = "" if self.symmetric else ", zeros"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}{zeros}, activation={self.activation}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Device moves only: half(), bfloat16() and the like must not round what the kernel reads as it is."""
        for name, buffer in self._buffers.items():
            if buffer is not None:
                self._buffers[name] = fn(buffer.view(torch.uint8)).view(buffer.dtype)
        return self


class _StraightThrough(torch.autograd.Function):
    """The gradient of x through a layer whose weight is fixed: grad_y @ W, the quantizer of x taken as identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantLinear) -> Tensor:
        ctx.layer = layer
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.float() @ ctx.layer.dequantize()).to(grad.dtype), None
