"""Quantize a model that stays on disk: of its blocks one is in memory at a time, and of the results none.

The model is built empty. What lies outside its blocks (embeddings, norms, the head) is mapped from the file; a block's
weights are read when it runs or is quantized, and let go. Finished blocks lie in the work directory until the end,
when the checkpoint is written tensor by tensor.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.residency import drop_clean_pages
from lowbit.models.load import build_empty, fill, generation_config, local_directory, tie
from lowbit.models.plan import check_names, listed, make_plan, tied_names
from lowbit.models.recipes import block_lists
from lowbit.ops_cuda import device_there
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class DiskModel:
    """A plain model of a directory, its blocks on meta except inside ``present``."""

    def __init__(
        self,
        path: str | os.PathLike[str],
        blocks: str | Callable[[nn.Module], str],
        *,
        dtype: torch.dtype = torch.float32,
        device: str | torch.device = "cpu",
    ) -> None:
        """``blocks``: see ``quantize_model``, or what finds them. FormatError for quantized weights, and for whatever
        does not fit config.json, before a weight is read."""
        self.device = device_there(device)
        self.checkpoint = open_checkpoint(local_directory(path))
        self.path, self.dtype = self.checkpoint.path, dtype
        self.model: PreTrainedModel = build_empty(self.path, dtype)
        plan = make_plan(self.model, self.checkpoint)
        if plan.format is not None:
            raise FormatError(f"{self.path}: found quantized weights, accepted are plain ones")
        check_names(self.model, plan, self.checkpoint)
        self.blocks = blocks if isinstance(blocks, str) else blocks(self.model)
        inside = {id(m) for _, block in block_lists(self.model, self.blocks) for m in block.modules()}
        self._sources = _sources(self.model, plan.dense)
        self._resident: set[int] = set()  # modules whose tensors are in memory for now
        fill(self.model, plan, self.checkpoint, dtype, inside)
        tie(self.model, plan)
        self._fill_buffers(plan.dense)
        held = [(n, t) for n, m in self.model.named_modules() if id(m) not in inside
                for t in (*m._parameters.values(), *m._buffers.values()) if t is not None and t.is_meta]  # fmt: skip
        if held:
            raise FormatError(
                f"{self.path}: found no data for {listed([n for n, _ in held])}, accepted is a whole model"
            )
        if self.device.type != "cpu":
            self._move()
        self.model.requires_grad_(False)
        self.model.train(False)
        generation_config(self.model, self.path)
        self.model.name_or_path = str(self.path)
        drop_clean_pages(self.path)

    @contextmanager
    def present(self, module: nn.Module) -> Iterator[None]:
        """Inside, the tensors of ``module`` and all below it are in memory, copies that may be written to."""
        empty: list[tuple[nn.Module, str, nn.Parameter]] = []
        mine = [m for m in module.modules() if id(m) not in self._resident]
        filled: dict[int, nn.Parameter] = {}  # a parameter that two modules share stays one
        for part in mine:
            self._resident.add(id(part))
            for key, parameter in part._parameters.items():
                if parameter is None or not parameter.is_meta:
                    continue
                empty.append((part, key, parameter))
                if id(parameter) not in filled:
                    data = self._copy(self._sources[id(parameter)])
                    filled[id(parameter)] = nn.Parameter(data, requires_grad=False)
        for part, key, parameter in empty:
            part._parameters[key] = filled[id(parameter)]
        try:
            yield
        finally:
            for part, key, parameter in empty:
                part._parameters[key] = parameter
            self._resident.difference_update(id(m) for m in mine)
            if empty:
                drop_clean_pages(self.path)

    def read(self, name: str, tensor: Tensor) -> Tensor:
        """A dense tensor of the model by name: as it is, or from the file where it is on meta."""
        if not tensor.is_meta:
            return tensor
        data = self.checkpoint[self._sources[id(tensor)]]
        return data.to(self.dtype) if data.is_floating_point() else data

    def _copy(self, source: str) -> Tensor:
        data = self.checkpoint[source]
        dtype = self.dtype if data.is_floating_point() else data.dtype
        return data.to(self.device, dtype, copy=True)

    def _fill_buffers(self, dense: dict[str, str]) -> None:
        """Stored buffers of blocks: few and small, so they stay."""
        for name, module in self.model.named_modules():
            for key, buffer in list(module._buffers.items()):
                source = dense.get(f"{name}.{key}")
                if buffer is not None and source is not None and key not in module._non_persistent_buffers_set:
                    module._buffers[key] = self._copy(source)

    def _move(self) -> None:
        """What lies outside the blocks to the device, and the computed buffers of the blocks; what is shared stays so."""
        moved: dict[int, nn.Parameter] = {}
        for module in self.model.modules():
            for key, parameter in module._parameters.items():
                if parameter is not None and not parameter.is_meta:
                    if id(parameter) not in moved:
                        moved[id(parameter)] = nn.Parameter(parameter.to(self.device), requires_grad=False)
                    module._parameters[key] = moved[id(parameter)]
            for key, buffer in module._buffers.items():
                if buffer is not None and not buffer.is_meta:
                    module._buffers[key] = buffer.to(self.device)


def _sources(model: PreTrainedModel, dense: dict[str, str]) -> dict[int, str]:
    """id of a parameter or buffer -> its name in the file."""
    found: dict[int, str] = {}
    tied = tied_names(model)
    partners = {**{source: target for target, source in tied.items()}, **tied}
    for module_name, module in model.named_modules(remove_duplicate=False):
        prefix = f"{module_name}." if module_name else ""
        for key, tensor in (*module._parameters.items(), *module._buffers.items()):
            source = dense.get(prefix + key) or dense.get(partners.get(prefix + key, ""))
            if tensor is not None and source is not None:
                found.setdefault(id(tensor), source)
    return found


def weights_of(disk: DiskModel, names: Sequence[str]) -> Iterator[Tensor]:
    """The weights of linears, one after the other, straight from the file."""
    read = 0
    for name in names:
        weight = disk.read(f"{name}.weight", disk.model.get_parameter(f"{name}.weight"))
        read += weight.nbytes
        yield weight
        if read > 2**26:
            drop_clean_pages(disk.path)
            read = 0
