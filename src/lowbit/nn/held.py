"""What a quantized layer holds: one weight, packed for where it is, and what stands beside it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import torch
from torch import Tensor

from .. import dispatch, layouts, ops, ops_cuda
from ..cuda import DeviceLinear, FloatLinear, FourBitLinear, Kept
from ..layouts import panels
from ..quantize import effective
from ..types import Activation, FormatError, LowRank, QuantizedWeight
from . import state

Self = TypeVar("Self", bound="Held")


class Held(Kept):
    """The tensors of a ``QuantLinear``, how they move between devices, and the plain value again.

    What is kept is packed; ``state_dict`` is the canonical form on every device (state.py), made when it is asked for.
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
        self.link: Kept | None = None  # of a part of a layer, cut for several devices (parallel.py)
        factors = (
            _branch(low_rank)
            if self.rank and plain is None and on_device is None and on_float is None
            else (None, None)
        )
        self.keep(
            packed=packed,
            bias=None if bias is None else bias.detach().to(torch.float32).clone(),
            perm=None if perm is None else perm.detach().to(torch.int32).clone(),
            smooth=None if smooth is None else smooth.detach().to(torch.float32).clone(),
            down=factors[0],
            up=factors[1],
        )
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

    def half_anew(self, weight: Tensor, bias: Tensor | None) -> Held:
        """A layer of float16 ``weight`` [N, K]."""
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
        with torch.inference_mode(False), torch.no_grad():  # a layer that is moved inside inference mode trains later
            if target.type != here.type and "meta" not in (target.type, here.type) and self.bits != 16:
                return self._move(target)
            for part in (self.on_device, self.on_int4, self.on_float, self.link):
                if part is not None:
                    part._apply(fn, recurse)
            super()._apply(fn, recurse)
        return self

    def _move(self: Self, target: torch.device) -> Self:
        there = self.packed_anew(self.to_quantized().to(target))
        if self.link is not None:
            self.link.to(target)
        self.hold(there)
        return self

    def hold(self, there: Held) -> None:
        """Hold what ``there`` holds; activations stay as they are here."""
        self._buffers.update(there._buffers)
        self.out_features, self.in_features, self.group_size = there.out_features, there.in_features, there.group_size
        self.hadamard, self.rank = there.hadamard, there.rank
        self._take(there)

    def _take(self, there: Held) -> None:
        self.plain, self.choice = there.plain, there.choice
        self.on_device, self.on_float = there.on_device, there.on_float
        self._prepare()

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        with torch.inference_mode(False), torch.no_grad():
            destination.update({prefix + name: t.detach() for name, t in state.tensors(self).items()})

    def _load_from_state_dict(
        self,
        state_dict: Mapping[str, Any],
        prefix: str,
        local_metadata: Mapping[str, Any],
        strict: bool,
        missing_keys: list[str],
        unexpected_keys: list[str],
        error_msgs: list[str],
    ) -> None:
        """Packs anew, for where the layer is. Buffers that keep their shape keep their place in memory, so that graphs
        and engines that read them go on."""
        found = {key[len(prefix) :]: t for key, t in state_dict.items() if key.startswith(prefix)}
        mine = state.names(self)
        try:
            state.refuse_packed(prefix, found)
            missing = [name for name in mine if name not in found]
            if strict:
                missing_keys += [prefix + name for name in missing]
                unexpected_keys += [prefix + name for name in found if name not in mine]
            given = {name: state.tensor(prefix + name, found[name]) for name in mine if name in found}
            if given:
                with torch.inference_mode(False), torch.no_grad():
                    own = state.tensors(self) if missing else {}
                    self._load({**own, **given}, prefix)
        except FormatError as error:
            error_msgs.append(str(error))

    def _load(self, given: Mapping[str, Tensor], prefix: str) -> None:
        here = next(iter(given.values())).device if self.packed.is_meta else self.packed.device
        there = {name: t.detach().to(here) for name, t in given.items()}
        made = (
            self.half_anew(*state.half(self, there, prefix)).to(here)
            if self.bits == 16
            else self.packed_anew(state.plain(self, there, prefix))
        )
        _keep_places(self, made)
        self._buffers.update(made._buffers)
        before = self.on_device, self.on_float, self.on_int4
        self._take(made)
        for old, new in zip(before, (self.on_device, self.on_float, self.on_int4), strict=True):
            if old is not None and new is not None:
                _keep_places(old, new)

    def refuse_part(self, name: str, use: str) -> None:
        """FormatError where this is a part of a layer, cut for several devices."""
        if self.link is not None:
            raise FormatError(f"{name}: found {self.link.extra_repr()}, accepted {use} is a whole layer")

    @torch.inference_mode(False)
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


def _keep_places(old: torch.nn.Module, new: torch.nn.Module) -> None:
    """Move the values of ``new`` into the memory of ``old`` where a buffer fits, so that ``new`` takes its place."""
    for name, buffer in new._buffers.items():
        before = old._buffers.get(name)
        if before is None or buffer is None:
            continue
        if (before.shape, before.dtype, before.device) == (buffer.shape, buffer.dtype, buffer.device):
            new._buffers[name] = before.copy_(buffer)


def _branch(low_rank: LowRank | None) -> tuple[Tensor | None, Tensor | None]:
    """The factors as the kernel reads them: panels of float16, or of float32 where one of them would be rounded."""
    if low_rank is None:
        return None, None
    down, up = (t.detach() for t in low_rank)
    exact = all(torch.equal(t.half().to(t.dtype), t) for t in (down, up))
    dtype = torch.float16 if exact else torch.float32
    return panels.pack_half(down.T.contiguous(), dtype), panels.pack_half(up, dtype)
