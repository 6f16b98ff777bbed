"""Tensor-parallel styles for ``torch.distributed.tensor.parallel.parallelize_module`` that know packed layers.

A ``QuantLinear`` is unpacked to the plain value, cut (shards.py) and packed again, in place; what torch's own styles know
(``nn.Linear``, ``nn.Embedding``) goes to them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel

from .. import reference
from ..cuda import Kept
from ..types import FormatError, QuantizedWeight
from . import shards
from .linear import QuantLinear
from .shards import Half

Plain = QuantizedWeight | Half
LAST = Shard(-1)


class Link(Kept):
    """What stands around a shard: x to what this rank reads, and this rank's y to what the next module reads."""

    axis = ""
    columns: Tensor | None

    def __init__(self, mesh: DeviceMesh, given: Placement, wanted: Placement, local_output: bool) -> None:
        super().__init__()
        self.mesh, self.given, self.wanted, self.local_output = mesh, given, wanted, local_output
        self.rank, self.ranks = mesh.get_local_rank(), mesh.size()

    def __deepcopy__(self, memo: dict[int, Any]) -> Link:
        return self  # the processes are the same ones

    def part(self) -> str:
        return f"part {self.rank + 1} of {self.ranks}, {self.axis}-wise"

    def extra_repr(self) -> str:
        return self.part()

    def arrive(self, x: Tensor, reads: Placement) -> Tensor:
        """x, plain or a DTensor, as the plain tensor of the layout that the shard reads."""
        if not isinstance(x, DTensor):
            if self.given == reads and not (torch.is_grad_enabled() and x.requires_grad):
                return x
            x = DTensor.from_local(x, self.mesh, [self.given], run_check=False)
        # every rank's shard gives a part of the gradient of what all of them read
        grad = [Partial()] if isinstance(reads, Replicate) else None
        here: Tensor = x.redistribute(placements=[reads]).to_local(grad_placements=grad)
        return here

    def leave(self, y: Tensor, made: Placement) -> Tensor:
        if self.wanted == made and self.local_output:
            return y
        there = DTensor.from_local(y, self.mesh, [made], run_check=False).redistribute(placements=[self.wanted])
        return there.to_local() if self.local_output else there


class ColumnLink(Link):
    axis = "column"

    def forward(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        return self.leave(layer(self.arrive(x, Replicate())), LAST)


class RowLink(Link):
    axis = "row"

    def __init__(
        self, mesh: DeviceMesh, given: Placement, wanted: Placement, local: bool, inputs: shards.Inputs | None
    ) -> None:
        super().__init__(mesh, given, wanted, local)
        self.hadamard = 0 if inputs is None else inputs.hadamard
        smooth = None if inputs is None or inputs.smooth is None else inputs.smooth.float()
        self.keep(columns=None if inputs is None else inputs.columns, smooth=smooth)

    def forward(self, layer: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        dtype = x.dtype
        if self.columns is None:
            x = self.arrive(x, LAST)
        else:
            x = reference.inside(self.arrive(x, Replicate()), self.smooth, self.hadamard)[..., self.columns]
        # The CPU kernels work in float32 whatever x is: there an addend is not rounded before the sum. On a GPU the
        # dtype of x decides what multiplies, and what travels is half as much.
        y = layer(x.to(dtype) if x.is_cuda else x.float())
        group = self.mesh.get_group()
        if torch.is_grad_enabled() and y.requires_grad:
            total: Tensor = _Sum.apply(y, group, dtype)  # type: ignore[no-untyped-call]
        else:
            total = ordered_sum(y, group, dtype)
        return self.leave(total, Replicate())


def ordered_sum(y: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """The sum of every rank's y in float32, in the order of ranks, rounded to ``dtype`` once: the same bits on every rank,
    and for a row of a batch as for that row alone (an all-reduce picks its order by size)."""
    return _gathered(y, group, dtype) if dist.get_world_size(group) <= 2 else _scattered(y, group, dtype)


def _gathered(y: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """One exchange: every rank sends all of y to all others."""
    parts = [torch.empty_like(y, memory_format=torch.contiguous_format) for _ in range(dist.get_world_size(group))]
    dist.all_gather(parts, y.contiguous(), group=group)
    return _added(parts).to(dtype)


def _scattered(y: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
    """Two exchanges, and past two ranks fewer bytes: each rank adds a slice of y, then the slices are gathered."""
    ranks = dist.get_world_size(group)
    flat = torch.nn.functional.pad(y.reshape(-1), (0, -y.numel() % ranks))
    theirs = torch.empty_like(flat)
    dist.all_to_all_single(theirs, flat, group=group)
    mine = _added(list(theirs.chunk(ranks))).to(dtype)
    slices = [torch.empty_like(mine) for _ in range(ranks)]
    dist.all_gather(slices, mine, group=group)
    return torch.cat(slices)[: y.numel()].reshape(y.shape)


def _added(parts: list[Tensor]) -> Tensor:
    total = parts[0].float()
    for part in parts[1:]:
        total = total + part
    return total


class _Sum(torch.autograd.Function):
    """``ordered_sum``; every addend has the gradient of the sum."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, group: dist.ProcessGroup, dtype: torch.dtype) -> Tensor:
        ctx.dtype = y.dtype
        return ordered_sum(y, group, dtype)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return grad.to(ctx.dtype), None, None


class ColwiseQuant(ColwiseParallel):
    """torch's ``ColwiseParallel`` for ``QuantLinear`` and ``W4A4Linear`` too: a rank has N / ranks out features.

    x is the same on every rank; y is split over its last dimension, with the bits of the whole layer (on the CPU).
    ``input_layouts``, ``output_layouts``, ``use_local_output`` as torch has them. FormatError where N does not divide.
    """

    def check(self, layer: QuantLinear, ranks: int, name: str = "") -> None:
        """Refuse, before anything changes, what cannot be cut."""
        shards.divided("out_features", layer.out_features, ranks, name)

    def cut(self, plain: Plain, mesh: DeviceMesh, name: str = "") -> tuple[Plain, Link]:
        """This rank's part of a plain weight, and what has to stand around its layer."""
        cut = shards.column_half if isinstance(plain, Half) else shards.column_shard
        link = ColumnLink(mesh, self.input_layouts[0], self.output_layouts[0], self.use_local_output)
        part: Plain = cut(plain, link.rank, link.ranks, name)  # type: ignore[arg-type]
        return part, link

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantLinear):
            return super()._apply(module, device_mesh)
        return replace_by_part(module, self, device_mesh)


class RowwiseQuant(RowwiseParallel):
    """torch's ``RowwiseParallel`` for ``QuantLinear`` and ``W4A4Linear`` too: a rank has K / ranks in features.

    x is split over its last dimension; y is the sum over ranks, the same bits on each. Integer activations get their
    scales from this rank's columns alone: with "group" they are those of the whole layer, with "token" at least as fine.
    FormatError where a group of the weight would be cut.
    """

    def check(self, layer: QuantLinear, ranks: int, name: str = "") -> None:
        """Refuse, before anything changes, what cannot be cut."""
        shards.row_columns(layer.in_features, layer.group_size, ranks, layer.perm, layer.hadamard, name)

    def cut(self, plain: Plain, mesh: DeviceMesh, name: str = "") -> tuple[Plain, Link]:
        """This rank's part of a plain weight, and what has to stand around its layer."""
        rank, ranks = mesh.get_local_rank(), mesh.size()
        part: Plain
        if isinstance(plain, Half):
            part, inputs = shards.row_half(plain, rank, ranks, name), None
        else:
            part, inputs = shards.row_shard(plain, rank, ranks, name)
        given, wanted = self.input_layouts[0], self.output_layouts[0]
        return part, RowLink(mesh, given, wanted, self.use_local_output, inputs)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        if not isinstance(module, QuantLinear):
            return super()._apply(module, device_mesh)
        return replace_by_part(module, self, device_mesh)


Style = ColwiseQuant | RowwiseQuant


def replace_by_part(layer: QuantLinear, style: Style, mesh: DeviceMesh, name: str = "") -> QuantLinear:
    """Let ``layer`` hold this rank's part of itself. FormatError where it holds a part already, or cannot be cut."""
    where = f"{name}: " if name else ""
    if mesh.ndim != 1:
        raise FormatError(f"{where}mesh: found {mesh.ndim} dimensions, accepted is 1 (mesh['tp'])")
    if isinstance(layer.link, Link):
        raise FormatError(f"{where}layer: found {layer.link.part()}, accepted is a whole one")
    plain = Half(layer.dequantize().half(), layer.bias) if layer.bits == 16 else layer.to_quantized()
    part, link = style.cut(plain, mesh, name)
    layer.hold(QuantLinear.from_half(*part) if isinstance(part, Half) else layer.packed_anew(part))
    layer.link = link
    return layer
