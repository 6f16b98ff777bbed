"""What a quantized layer holds: one weight, packed for where it is, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import dispatch, layouts, ops, ops_cuda
from ..cuda import DeviceLinear, FloatLinear, FourBitLinear, Kept
from ..layouts import panels
from ..quantize import effective
from ..types import Activation, FormatError, LowRank, QuantizedWeight

Self = TypeVar("Self", bound="Held")


class Held(Kept):
    """The tensors of a ``QuantLinear``, how they move between devices, and the plain value again."""

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
        """ "group", "token" or None (float); may be set, to what the storage allows (FormatError else)."""
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

    def packed_anew(self, q: QuantizedWeight) -> Held:
        """A layer of ``q`` with this one's activation, packed for where ``q`` is."""
        raise NotImplementedError

    def _four(self) -> Activation:
        return self.declared or Activation(4, "group")

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

    def extra_repr(self) -> str:
        zeros = "" if self.symmetric else ", zeros"
        return (
            f"in_features={self.in_features}, out_features={self.out_features}, bias={self.bias is not None}, "
            f"bits={self.bits}, group_size={self.group_size}{zeros}, activation={self.activation}"
        )

    def _apply(self: Self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> Self:
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

    def _move(self: Self, target: torch.device) -> Self:
        there = self.packed_anew(self.to_quantized().to(target))
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


def _branch(low_rank: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors as the kernel reads them: panels of float16, or of float32 where one of them would be rounded."""
    if low_rank is None:
        return None, None
    down, up = (t.detach() for t in low_rank)
    exact = all(torch.equal(t.half().to(t.dtype), t) for t in (down, up))
    dtype = torch.float16 if exact else torch.float32
    return panels.pack_half(down.T.contiguous(), dtype), panels.pack_half(up, dtype)
