"""A model to a directory in the lowbit format, and the files that travel beside the weights."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

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
    "chat_template.json", "generation_config.json", "preprocessor_config.json", "processor_config.json",
    "normalizer.json",
)  # fmt: skip


def save(model: PreTrainedModel, path: str | os.PathLike[str], dtype: torch.dtype | None = None) -> None:
    """Write model.safetensors (or shards), config.json, the generation config and the tokenizer's files.

    Quantized linears are written in the lowbit format, fp16 ones as plain float16. A dense float32 tensor is stored
    in 16 bits where those hold every value exactly, else as it is; ``dtype`` casts dense tensors instead, rounding.
    Tied tensors are written once. Every file is replaced atomically, the weights last. The tokenizer's files are
    copied from the directory that the model was loaded from, where there is one. A model that is none of transformers
    gets a config.json with its quantization alone.
    Raises FormatError for a layer that the format cannot hold, naming it.
    """
    made: Mapping[str, Any] = getattr(model, "lowbit_made", {})
    write_model(model, Path(path), parts_of(model), made, dtype)


class Parts(NamedTuple):
    """Where the tensors of a checkpoint come from, one asked for at a time."""

    layers: Mapping[str, Callable[[], QuantizedWeight]]  # quantized linears
    shells: Mapping[str, QuantizedWeight]  # the same without data
    halves: Mapping[str, Callable[[], tuple[Tensor, Tensor | None]]]  # float16 linears: weight and bias
    read: Callable[[str, Tensor], Tensor]  # (name, what the model has there) -> a dense tensor


def parts_of(model: nn.Module) -> Parts:
    """The packed layers of a model that is in memory. FormatError where it is cut for several devices."""
    layers = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    for name, module in layers.items():
        module.refuse_part(name, "for saving")
    return Parts(
        {name: module.to_quantized for name, module in layers.items() if module.bits != 16},
        {name: _shell(module) for name, module in layers.items() if module.bits != 16},
        {name: _half(module) for name, module in layers.items() if module.bits == 16},
        lambda _, tensor: tensor,
    )


def write_model(model: nn.Module, out: Path, parts: Parts, made: Mapping[str, Any], dtype: torch.dtype | None) -> None:
    """What ``save`` does, of a model whose tensors may lie anywhere. ``made``: method, base_sha256, budget, where known."""
    generation = getattr(model, "generation_config", None)
    if generation is not None and not model.can_generate():  # type: ignore[operator]
        generation = None
    config, metadata = dict(_config(model)), None
    if parts.layers or parts.halves:
        config["quantization_config"], metadata = described(model, parts, made)
    out.mkdir(parents=True, exist_ok=True)
    copy_side_files(_origin(model), out)
    if generation is not None:
        _replace_text(out / "generation_config.json", generation.to_json_string(use_diff=True))
    write_checkpoint(out, _tensors(model, parts, dtype), config, metadata)


def described(model: nn.Module, parts: Parts, made: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """(``quantization_config``, metadata of the file) of a model in the lowbit format."""
    rows = {name: lowbit.describe(shell) for name, shell in parts.shells.items()}
    rank = max((q.low_rank.down.shape[1] for q in parts.shells.values() if q.low_rank is not None), default=0)
    method, base = made.get("method") or "unknown", made.get("base_sha256")
    metadata = lowbit.metadata(rows, method, rank=rank, base_sha256=base)
    if parts.halves:
        metadata["fp16_layers"] = list(parts.halves)
    if made.get("budget"):
        metadata["budget"] = made["budget"]
    config = config_for("lowbit", parts.shells, dense_linears(model, {*parts.layers, *parts.halves}))
    if not parts.layers:
        config |= {"bits": 16, "group_size": -1, "activation": None}
    return config, metadata


def dense_linears(model: nn.Module, done: Collection[str]) -> list[str]:
    """The linears that stay dense, beside those ``done``."""
    return [name for name, module in model.named_modules() if isinstance(module, nn.Linear) and name not in done]


def _config(model: nn.Module) -> Mapping[str, Any]:
    config: Any = getattr(model, "config", None)
    if not hasattr(config, "to_dict"):
        return {}
    left_out = ("quantization_config", "_name_or_path")
    return {key: value for key, value in config.to_dict().items() if key not in left_out}


def _half(module: QuantLinear) -> Callable[[], tuple[Tensor, Tensor | None]]:
    return lambda: (module.dequantize().half(), module.bias)


def _origin(model: nn.Module) -> Path:
    """The directory that the model came from, the cached one for a hub id; a path that is no directory where unknown."""
    name = str(getattr(model, "name_or_path", ""))
    try:
        return local_directory(name)
    except FormatError:
        return Path(name or "unknown")


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
        perm=None if module.perm is None else module.perm.to(meta),
        hadamard=module.hadamard,
        low_rank=None
        if not module.rank
        else LowRank(
            torch.empty(module.in_features, module.rank, device=meta),
            torch.empty(module.out_features, module.rank, device=meta),
        ),
        activation=module.declares(),
    )


def _tensors(model: nn.Module, parts: Parts, dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """(name, tensor) of the whole model, one layer unpacked at a time."""
    done: set[tuple[int, int]] = set()  # (storage, offset): tied tensors come once, under their first name
    for module_name, module in model.named_modules():
        prefix = f"{module_name}." if module_name else ""
        if module_name in parts.layers:
            yield from FORMATS["lowbit"].write(parts.layers[module_name](), module_name).items()
            continue
        if module_name in parts.halves:
            weight, bias = parts.halves[module_name]()
            yield f"{prefix}weight", weight
            if bias is not None:
                yield f"{prefix}bias", bias
            continue
        for key, tensor in [*module._parameters.items(), *module._buffers.items()]:
            if tensor is None or key in module._non_persistent_buffers_set:
                continue
            # a tensor on meta has no storage of its own, but it stays the same object
            place = (
                (tensor.untyped_storage().data_ptr(), tensor.storage_offset())
                if not tensor.is_meta
                else (id(tensor), -1)
            )
            if place in done and tensor.numel():
                continue
            done.add(place)
            yield prefix + key, narrowed(parts.read(prefix + key, tensor).detach(), dtype)


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
