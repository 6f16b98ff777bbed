"""A model to a directory in the lowbit format, and the files that travel beside the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import write_checkpoint
from lowbit.formats import FORMATS, config_for, lowbit
from lowbit.models.load import local_directory
from lowbit.nn import QuantLinear
from lowbit.types import FormatError, LowRank, QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

SIDE_FILES = (
    "tokenizer*", "special_tokens_map.json", "added_tokens.json", "vocab.*", "merges.txt", "*.model", "*.jinja",
    "chat_template.json", "generation_config.json",
)  # fmt: skip


def save(model: PreTrainedModel, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Write model.safetensors (or shards), config.json, the generation config and the tokenizer's files.

    Quantized linears are written in the lowbit format, fp16 ones as plain float16. A dense float32 tensor is stored
    in 16 bits where those hold every value exactly, else as it is; ``dtype`` casts dense tensors instead, rounding.
    Tied tensors are written once. Every file is replaced atomically, the weights last. The tokenizer's files are
    copied from the directory that the model was loaded from, where there is one.
    Raises FormatError for a layer that the format cannot hold, naming it.
    """
    out = Path(path)
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    halves = [name for name, module in layers.items() if module.bits == 16]
    for name in halves:
        del layers[name]
    made = getattr(model, "lowbit_made", {})
    shells = {name: _shell(module) for name, module in layers.items()}
    metadata: dict[str, Any] | None = None
    config = dict(model.config.to_dict())
    config.pop("quantization_config", None)
    config.pop("_name_or_path", None)
    if layers or halves:
        rows = {name: lowbit.describe(shell) for name, shell in shells.items()}
        rank = max((q.low_rank.down.shape[1] for q in shells.values() if q.low_rank is not None), default=0)
        method, base = made.get("method") or "unknown", made.get("base_sha256")
        metadata = lowbit.metadata(rows, method, rank=rank, base_sha256=base)
        if halves:
            metadata["fp16_layers"] = halves
        if made.get("budget"):
            metadata["budget"] = made["budget"]
        ignored = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
        config["quantization_config"] = config_for("lowbit", shells, ignored)
        if not layers:
            config["quantization_config"] |= {"bits": 16, "group_size": -1, "activation": None}
    out.mkdir(parents=True, exist_ok=True)
    copy_side_files(_origin(model), out)
    if getattr(model, "generation_config", None) is not None and model.can_generate():
        _replace_text(out / "generation_config.json", model.generation_config.to_json_string(use_diff=True))
    write_checkpoint(out, _tensors(model, layers, halves, dtype), config, metadata)


def _origin(model: PreTrainedModel) -> Path:
    """The directory that the model came from, the cached one for a hub id; a path that is no directory where unknown."""
    try:
        return local_directory(str(model.name_or_path))
    except FormatError:
        return Path(str(model.name_or_path) or "unknown")


def _shell(module: QuantLinear) -> QuantizedWeight:
    """What the metadata says of a layer, without unpacking its codes."""
    if module.plain is not None:
        return module.plain
    meta = torch.device("meta")
    groups = -(-module.in_features // module.group_size)
    shape = (module.out_features, groups)
    return QuantizedWeight(
        codes=torch.empty(
            module.out_features, module.in_features, dtype=torch.int8 if module.symmetric else torch.uint8, device=meta
        ),
        scales=torch.empty(shape, dtype=torch.float16, device=meta),
        zeros=None if module.symmetric else torch.empty(shape, dtype=torch.uint8, device=meta),
        group_size=module.group_size,
        bits=module.bits,
        hadamard=module.hadamard,
        low_rank=None
        if not module.rank
        else LowRank(
            torch.empty(module.in_features, module.rank, device=meta),
            torch.empty(module.out_features, module.rank, device=meta),
        ),
        activation=module.declares(),
    )


def _tensors(
    model: PreTrainedModel, layers: Mapping[str, QuantLinear], halves: list[str], dtype: torch.dtype | None
) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole model, one layer unpacked at a time."""
    done: set[tuple[int, int]] = set()  # (storage, offset): tied tensors come once, under their first name
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if module_name in layers:
            yield from FORMATS["lowbit"].write(layers[module_name].to_quantized(), module_name).items()
            continue
        if isinstance(module, QuantLinear):
            yield f"{prefix}weight", module.dequantize().half()
            if module.bias is not None:
                yield f"{prefix}bias", module.bias
            continue
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            place = (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
            if place in done and tensor.numel():
                continue
            done.add(place)
            yield prefix + key, narrowed(tensor.detach(), dtype)


def narrowed(tensor: Tensor, dtype: torch.dtype | None = None) -> Tensor:
    """Cast to ``dtype``; without one, float32 that 16 bits hold exactly becomes bfloat16 or float16."""
    if not tensor.is_floating_point():
        return tensor
    if dtype is not None:
        return tensor.to(dtype)
    if tensor.dtype == torch.float32:
        for short in (torch.bfloat16, torch.float16):
            if torch.equal(tensor.to(short).float(), tensor):
                return tensor.to(short)
    return tensor


def copy_side_files(source: Path, out: Path) -> list[str]:
    """Copy tokenizer and generation files of a directory, where it is one; returns their names."""
    names: list[str] = []
    if not source.is_dir() or source.resolve() == out.resolve():
        return names
    for pattern in SIDE_FILES:
        for file in sorted(source.glob(pattern)):
            if file.is_file() and file.name not in names:
                out.mkdir(parents=True, exist_ok=True)
                shutil.copyfile(file, out / file.name)
                names.append(file.name)
    return names


def _replace_text(path: Path, text: str) -> None:
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, "utf-8")
    os.replace(temporary, path)


def model_bytes(model: nn.Module) -> int:
    """Bytes of all parameters and buffers, each storage counted once, packed weights as they lie."""
    seen: set[int] = set()
    total = 0
    for module in model.modules():
        if isinstance(module, QuantLinear):
            total += module.packed_bytes()
            continue
        for tensor in [*module._parameters.values(), *module._buffers.values()]:
            if tensor is not None and tensor.untyped_storage().data_ptr() not in seen:
                seen.add(tensor.untyped_storage().data_ptr())
                total += tensor.numel() * tensor.element_size()
    return total
