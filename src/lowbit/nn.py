"""QuantLinear: where a packed weight meets an operator. No formats, no algorithms, no instruction sets in here."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from . import dispatch, layouts, ops, ops_cuda, reference
from .checkpoint import open_checkpoint
from .cuda import DeviceLinear, FloatLinear, FourBitLinear, Kept
from .formats import read_layer
from .formats.tensors import from_awq_tensors, from_gptq_tensors
from .layouts import panels
from .quantize import effective, rtn
from .types import SCHEMES, Activation, FormatError, LowRank, QuantizedWeight, Scheme

DEFAULT = "default"


class QuantLinear(Kept):
    """A linear layer over a packed weight: y [..., N] = w · A(x') + up · (downᵀ · x') + bias, in the dtype of x [..., K].

    x' is x, divided by ``smooth`` and rotated by the Hadamard where the weight asks for them.
    ``activation``: ``"group"`` (one int8 scale per weight group of a row), ``"token"`` (one per row), or None
    (float32 arithmetic). A weight that declares 4-bit activations runs with 8-bit ones, per token behind a Hadamard and
    per group otherwise; ``activation_bits = 4`` simulates what an INT4 tensor core computes, slowly. Made by the
    ``from_*`` functions. Inference only for the weight; x gets its gradient, with the activation quantizer passed
    straight through.
    """

    packed: Tensor
    perm: Tensor | None
    # ``down``, ``up``: panels of downᵀ and of up, float16, or float32 where that would round

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
        hadamard: int = 0,
        low_rank: LowRank | None = None,
        declared: Activation | None = None,
        plain: QuantizedWeight | None = None,
        choice: dispatch.Choice | None = None,
        on_device: DeviceLinear | None = None,
        on_float: FloatLinear | None = None,
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self.bits, self.group_size, self.symmetric = bits, group_size, symmetric
        self.hadamard, self.rank = hadamard, 0 if low_rank is None else low_rank.down.shape[1]
        self._activation_bits = 8
        self.plain, self.choice = plain, choice  # `plain` is kept only where the reference runs
        self.on_device = on_device  # on a CUDA device it holds the weight, and `packed` is empty
        self.on_int4: FourBitLinear | None = None  # beside it, while `activation_bits` is 4
        self.on_float = on_float  # alone where no integer kernel takes the weight; beside it without int8 rows
        self.register_buffer("packed", packed)
        self.register_buffer("bias", None if bias is None else bias.detach().to(torch.float32).clone())
        self.register_buffer("perm", None if perm is None else perm.detach().to(torch.int32).clone())
        self.register_buffer("smooth", None if smooth is None else smooth.detach().to(torch.float32).clone())
        factors = (
            _branch(low_rank)
            if self.rank and plain is None and on_device is None and on_float is None
            else (None, None)
        )
        self.register_buffer("down", factors[0])
        self.register_buffer("up", factors[1])
        self.activation = activation
        self.declared = declared  # what a save writes; None: what runs

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
        self.declared = None
        self._prepare()

    @property
    def activation_bits(self) -> int:
        """Bits of the activations where they are integers: 8, or 4 to simulate an INT4 tensor core."""
        return self._activation_bits

    @activation_bits.setter
    def activation_bits(self, value: int) -> None:
        if value not in (4, 8):
            raise FormatError(f"activation_bits: found {value!r}, accepted are 4 and 8")
        if value == 4 and self.activation is None:
            raise FormatError("activation_bits: found 4, accepted with float activations is 8")
        self._activation_bits = value
        self._prepare()

    # -- making one -------------------------------------------------------------------------------------------------

    @classmethod
    def from_quantized(cls, q: QuantizedWeight, activation: str | None = DEFAULT) -> QuantLinear:
        """Pack ``q``. ``activation`` "default" obeys what the checkpoint declares and is "group" where it declares none;
        declared 4-bit activations run in 8 bits, "token" behind a Hadamard, else "group"."""
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
                on_float=FloatLinear(q, alone=True) if on_float else None,
            )
            if on_cuda and four is not None and q.bits == 4 and ops_cuda.has_int4(device):
                layer.activation_bits = 4
            return layer

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

    def _four(self) -> Activation:
        return self.declared or Activation(4, "group")

    def _rounded(self, x: Tensor) -> Tensor:
        """x' [..., K] -> its 4-bit codes times their scales, permuted as the weight is."""
        flat = x.reshape(-1, self.in_features)
        columns = flat if self.perm is None else flat[:, self.perm.long()]
        return reference.rounded(columns, self.group_size, self._four()).reshape(x.shape)

    def to_quantized(self) -> QuantizedWeight:
        """The plain value again: bit-equal codes, scales and zeros. TypeError for float16 storage."""
        if self.plain is not None:
            return self.plain
        if self.bits == 16:
            raise TypeError("float16 storage holds no codes; use dequantize()")
        there = self.on_device or self.on_float
        if there is not None:
            codes, scales, zeros, low_rank = there.weights()
        else:
            codes, scales, zeros = layouts.unpack(
                self.packed, self.out_features, self.in_features, self.group_size, self.bits, symmetric=self.symmetric
            )
            low_rank = self._low_rank()
        return QuantizedWeight(
            codes, scales, self.group_size, self.bits, zeros, self.perm, low_rank, self.smooth, self.hadamard,
            self.declares(), self.bias,
        )  # fmt: skip

    def declares(self) -> Activation:
        """The activation that a save writes: what the checkpoint declared, else what runs."""
        granularity: Any = self.activation or "none"
        return self.declared or Activation(8 if self.activation else 16, granularity)

    def _low_rank(self) -> LowRank | None:
        return None if self.down is None or self.up is None else self._factors(self.down, self.up)

    def _factors(self, down: Tensor, up: Tensor) -> LowRank:
        plain = panels.unpack_half(down, self.rank, self.in_features).T.contiguous()
        return LowRank(plain, panels.unpack_half(up, self.out_features, self.rank))

    def dequantize(self) -> Tensor:
        """W [N, K] float32 in the order of x, with smoothing, Hadamard and low rank folded in: what a float layer would
        hold."""
        if self.bits == 16:
            return panels.unpack_half(self.packed, self.out_features, self.in_features).float()
        return effective(self.to_quantized())

    def packed_bytes(self) -> int:
        """Bytes that a forward reads: the packed weight and its side tensors."""
        kept = (self.packed, self.bias, self.perm, self.smooth, self.down, self.up)
        plain = () if self.plain is None else (self.plain.codes, self.plain.scales, self.plain.zeros)
        parts = (self.on_device, self.on_int4, self.on_float)
        there = [t for part in parts if part is not None for t in part.buffers()]
        return sum(t.numel() * t.element_size() for t in (*kept, *plain, *there) if t is not None)

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

    def extra_repr(self) -> str:
        zeros = "" if self.symmetric else ", zeros"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}{zeros}, activation={self.activation}"
        )

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantLinear:
        """Device moves only: half(), bfloat16() and the like must not round what the kernel reads as it is. From one kind
        of device to the other the weight is packed anew."""
        here = self.packed.device
        target = fn(torch.empty(0, dtype=torch.uint8, device=here)).device
        if target.type != here.type and "meta" not in (target.type, here.type) and self.bits != 16:
            return self._move(target)
        for part in (self.on_device, self.on_int4, self.on_float):
            if part is not None:
                part._apply(fn, recurse)
        super()._apply(fn, recurse)
        return self

    def _move(self, target: torch.device) -> QuantLinear:
        there = QuantLinear.from_quantized(self.to_quantized().to(target), self.activation)
        for name in ("packed", "bias", "perm", "smooth", "down", "up"):
            self._buffers[name] = there._buffers[name]
        self.plain, self.choice = there.plain, there.choice
        self.on_device, self.on_float = there.on_device, there.on_float
        self._prepare()
        return self

    def _prepare(self) -> None:
        """The second packing that other than int8 rows want on a CUDA device."""
        four = self._four()
        wanted = self.on_device is not None and self._activation_bits == 4 and self.bits == 4
        if (
            wanted
            and ops_cuda.runs_int4(self.packed.device)
            and four.granularity == "group"
            and self.in_features % 64 == 0
        ):
            self.on_int4 = FourBitLinear(self.to_quantized(), four.clip)
        else:
            self.on_int4 = None
        if self.on_device is not None:  # float activations, or one scale a group of x, which no CUDA kernel has
            self.on_float = None if self.activation == "token" else FloatLinear(self.to_quantized())


class W4A4Linear(QuantLinear):
    """One linear of an SVDQuant checkpoint, in the place of an ``nn.Linear``: signed 4-bit weights behind smoothing and
    Hadamard, a low rank beside them.

    ``activation_bits`` 8 runs the kernels (one scale a row behind a Hadamard, else one a group); 4 is what an INT4 tensor
    core computes, quick only where there is one. None: 4 on such a chip (Ampere, Ada), else 8.
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


def _branch(low_rank: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors as the kernel reads them: panels of float16, or of float32 where one of them would be rounded."""
    if low_rank is None:
        return None, None
    down, up = (t.detach() for t in low_rank)
    exact = all(torch.equal(t.half().to(t.dtype), t) for t in (down, up))
    dtype = torch.float16 if exact else torch.float32
    return panels.pack_half(down.T.contiguous(), dtype), panels.pack_half(up, dtype)


class _StraightThrough(torch.autograd.Function):
    """The gradient of x through a layer whose weight is fixed: grad_y @ W, the quantizer of x taken as identity."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, layer: QuantLinear) -> Tensor:
        ctx.layer = layer
        return layer.compute(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return (grad.float() @ ctx.layer.dequantize()).to(grad.dtype), None
