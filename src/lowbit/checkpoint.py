"""Safetensors checkpoints of strangers and our own: lazy, memory-mapped reading and atomic writing.

Nothing but safetensors and JSON is ever opened. Every name that a file gives of another file is checked before it.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor

from .types import FormatError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SIDE_FILES = ("quantize_config.json", "quantization_config.json", "quant_config.json")
PICKLES = (".bin", ".pt", ".pth", ".ckpt", ".pkl", ".pickle")
METADATA_KEY = "lowbit"
DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16, "I64": torch.int64,
    "I32": torch.int32, "I16": torch.int16, "I8": torch.int8, "U8": torch.uint8, "BOOL": torch.bool,
    "F8_E4M3": torch.float8_e4m3fn, "F8_E5M2": torch.float8_e5m2,
    "U16": torch.uint16, "U32": torch.uint32, "U64": torch.uint64,
}  # fmt: skip
TAGS = {dtype: tag for tag, dtype in DTYPES.items()}


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a directory or file by name, mapped when asked for; shapes and dtypes come from headers."""

    def __init__(self, path: Path, files: Mapping[str, Path], index: Mapping[str, str] | None) -> None:
        self.path = path
        self._handles = {file: _open(target) for file, target in files.items()}
        self._where: dict[str, str] = {}
        if index is None:
            for file, handle in self._handles.items():
                self._where.update((name, file) for name in handle.offset_keys())
        else:
            held = {file: handle.offset_keys() for file, handle in self._handles.items()}
            for file, names in held.items():
                self._where.update((name, file) for name in names if index.get(name) == file)
            missing = [f"{name} ({file})" for name, file in index.items() if self._where.get(name) != file]
            if missing:
                raise _bad(path / INDEX, "weight_map", f"{len(missing)} tensors not in their shard: {missing[0]}",
                           "tensors that the shards hold")  # fmt: skip
        self.config: dict[str, Any] = {}
        self.quantization: dict[str, Any] | None = None
        self.metadata: dict[str, Any] = self._metadata()

    def __getitem__(self, name: str) -> Tensor:
        try:
            tensor: Tensor = self._handles[self._where[name]].get_tensor(name)
        except KeyError:
            raise
        except Exception as error:
            raise _bad(self.path / self._where[name], name, str(error), "a safetensors tensor") from None
        return tensor

    def __iter__(self) -> Iterator[str]:
        return iter(self._where)

    def __len__(self) -> int:
        return len(self._where)

    def __contains__(self, name: object) -> bool:
        return name in self._where

    def shape(self, name: str) -> tuple[int, ...]:
        """The shape of a tensor, from the header."""
        return tuple(self._handles[self._where[name]].get_slice(name).get_shape())

    def dtype(self, name: str) -> torch.dtype:
        """The dtype of a tensor, from the header."""
        tag = self._handles[self._where[name]].get_slice(name).get_dtype()
        if tag not in DTYPES:
            raise _bad(self.path / self._where[name], f"{name}.dtype", tag, ", ".join(DTYPES))
        return DTYPES[tag]

    def nbytes(self, name: str) -> int:
        """The size of a tensor in the file, in bytes."""
        count = self.dtype(name).itemsize
        for size in self.shape(name):
            count *= size
        return count

    def file(self, name: str) -> str:
        """The file name of the shard that holds a tensor."""
        return self._where[name]

    def _metadata(self) -> dict[str, Any]:
        for file, handle in self._handles.items():
            text = (handle.metadata() or {}).get(METADATA_KEY)
            if text is not None:
                return _parse(self.path / file, f"metadata {METADATA_KEY}", text)
        return {}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a directory (single or sharded safetensors, config.json) or one ``.safetensors`` file.

    Raises FormatError for pickle files (with the command that converts one), for a malformed header, index or
    configuration, for an index that leaves the directory, and for configuration files that contradict each other.
    """
    path = Path(path)
    if path.is_dir():
        files, index = _locate(path)
        checkpoint = Checkpoint(path, files, index)
        checkpoint.config = _json_file(path, "config.json") or {}
        checkpoint.quantization = _quantization(path, checkpoint.config)
        return checkpoint
    if path.suffix in PICKLES:
        raise _pickle(path)
    if not path.is_file():
        raise _bad(path, "path", "nothing there", "a directory, or a .safetensors file")
    return Checkpoint(path.parent, {path.name: path}, None)


def _locate(root: Path) -> tuple[dict[str, Path], dict[str, str] | None]:
    """The files of a directory by name, checked, and the index where there is one."""
    present = sorted(entry.name for entry in root.iterdir())
    if SINGLE in present:
        return {SINGLE: _inside(root, SINGLE, SINGLE)}, None
    if INDEX in present:
        index = _index(root)
        return {file: _inside(root, file, INDEX) for file in dict.fromkeys(index.values())}, index
    lone = [name for name in present if name.endswith(".safetensors")]
    if len(lone) == 1:
        return {lone[0]: _inside(root, lone[0], lone[0])}, None
    if lone:
        raise _bad(root, "files", f"{len(lone)} .safetensors files without {INDEX}", f"{SINGLE}, or an index")
    pickles = [name for name in present if name.endswith(PICKLES)]
    if pickles:
        raise _pickle(root / pickles[0])
    raise _bad(root, "files", ", ".join(present[:6]) or "nothing", f"{SINGLE}, or {INDEX} with its shards")


def _index(root: Path) -> dict[str, str]:
    weight_map = (_json_file(root, INDEX) or {}).get("weight_map")
    if not isinstance(weight_map, dict):
        raise _bad(root / INDEX, "weight_map", repr(weight_map)[:60], "an object of tensor name to file name")
    for name, file in weight_map.items():
        plain(file, root / INDEX, f"weight_map[{name!r}]")
        if not file.endswith(".safetensors"):
            if file.endswith(PICKLES):
                raise _pickle(root / file)
            raise _bad(root / INDEX, f"weight_map[{name!r}]", repr(file), "a name that ends in .safetensors")
    return weight_map


def plain(name: object, where: Path, field: str) -> str:
    """A file name without any directory in it, or a refusal."""
    bad = not isinstance(name, str) or name in ("", ".", "..") or any(sign in name for sign in "/\\:\0")
    if bad or not isinstance(name, str):
        raise _bad(where, field, repr(name), "a plain file name in the same directory")
    return name


def _inside(root: Path, name: str, where: str) -> Path:
    """The file's real path, if it stays in the directory (or in the blobs of a hub cache, which links there)."""
    target = (root / name).resolve()
    real = root.resolve()
    homes = [real]
    if real.parent.name == "snapshots":
        homes.append(real.parent.parent / "blobs")
    if not any(target.is_relative_to(home) for home in homes):
        raise _bad(root / where, name, f"a link to {target}", "a file in the directory")
    if not target.is_file():
        raise _bad(root / where, name, "no such file", "a file in the directory")
    return target


def _open(target: Path) -> Any:
    try:
        return safe_open(str(target), framework="pt")
    except Exception as error:
        with target.open("rb") as file:
            start = file.read(4)
        if start[:2] == b"PK" or start[:1] == b"\x80":
            raise _pickle(target) from None
        raise _bad(target, "header", str(error), "a whole safetensors file") from None


def _json_file(root: Path, name: str) -> dict[str, Any] | None:
    if not (root / name).exists() and not (root / name).is_symlink():
        return None
    target = _inside(root, name, name)
    try:
        text = target.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise _bad(target, "encoding", str(error), "UTF-8") from None
    return _parse(root / name, "content", text)


def _parse(where: Path, field: str, text: str) -> dict[str, Any]:
    if text.startswith("\ufeff"):
        raise _bad(where, field, "a byte order mark", "JSON that begins with {")
    try:
        found = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise _bad(where, field, f"invalid JSON ({error})", "a JSON object") from None
    if not isinstance(found, dict):
        raise _bad(where, field, type(found).__name__, "a JSON object")
    return found


def _quantization(root: Path, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The quantization configuration: config.json's, its text_config's, then the side files in order.

    Files that agree may repeat one another; two that differ in what decides the weights are refused.
    """
    found: list[tuple[str, dict[str, Any]]] = []
    text = config.get("text_config")
    for where, holder in (("config.json", config), ("config.json text_config", text)):
        inner = holder.get("quantization_config") if isinstance(holder, Mapping) else None
        if inner is not None:
            if not isinstance(inner, dict):
                raise _bad(root / "config.json", "quantization_config", type(inner).__name__, "an object")
            found.append((where, inner))
    found += [(name, side) for name in SIDE_FILES if (side := _json_file(root, name)) is not None]
    for where, one in found:
        if one.get("model_file_base_name") is not None:
            plain(one["model_file_base_name"], root / where, "model_file_base_name")
    for where, other in found[1:]:
        first, second = _decisive(found[0][1]), _decisive(other)
        for key in first.keys() & second.keys():
            if first[key] != second[key]:
                values = f"{first[key]!r} in {found[0][0]}, {second[key]!r} in {where}"
                raise _bad(root, key, values, "the same in every configuration file")
    return found[0][1] if found else None


def _decisive(config: Mapping[str, Any]) -> dict[str, Any]:
    """The values that decide how weights are decoded, in one spelling."""
    names = {
        "bits": "bits", "w_bit": "bits", "group_size": "group_size", "q_group_size": "group_size", "sym": "sym",
        "desc_act": "desc_act", "quant_method": "quant_method", "checkpoint_format": "checkpoint_format",
        "zero_point": "zero_point", "version": "version", "packing_format": "packing_format", "format": "format",
    }  # fmt: skip
    row: dict[str, Any] = {}
    for key, name in names.items():
        value = config.get(key)
        if isinstance(value, str):
            value = int(value) if value.lstrip("-").isdigit() else value.lower()
        if value is not None:
            row.setdefault(name, value)
    return row


def write_checkpoint(
    path: str | os.PathLike[str],
    tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]],
    config: Mapping[str, Any] | None,
    metadata: Mapping[str, Any] | None = None,
    max_shard_bytes: int = 5_000_000_000,
) -> list[Path]:
    """Write a directory: ``model.safetensors`` or shards with an index, and ``config.json``. Returns the weight files.

    Each file is written beside its target, flushed to disk and renamed; the index (or the single file) and then the
    configuration come last, so that an interruption leaves the old checkpoint whole. ``metadata`` goes into each
    weight file under the key ``lowbit``. An iterable is consumed shard by shard.
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    notes = {"format": "pt", **({METADATA_KEY: json.dumps(metadata)} if metadata else {})}
    pending: list[tuple[Path, list[str], int]] = []  # temporary file, names, bytes
    finals: list[Path] = []
    settings: Path | None = None
    try:
        for shard in _shards(tensors, max_shard_bytes):
            pending.append((_write_file(root, shard, notes), list(shard), sum(_size(t) for t in shard.values())))
        if config is not None:
            settings = _write_text(root, json.dumps(dict(config), indent=2, sort_keys=True) + "\n")
        old = _old_files(root)
        finals = _commit(root, pending)
        if settings is not None:
            os.replace(settings, root / "config.json")
        for stale in old - {final.name for final in finals}:
            (root / stale).unlink(missing_ok=True)
        _sync_directory(root)
    except BaseException:
        for leftover in [temporary for temporary, _, _ in pending] + ([settings] if settings else []):
            leftover.unlink(missing_ok=True)
        raise
    return finals


def _commit(root: Path, pending: list[tuple[Path, list[str], int]]) -> list[Path]:
    """Rename the shards to their names, then the file that makes them count."""
    if len(pending) == 1:
        os.replace(pending[0][0], root / SINGLE)
        (root / INDEX).unlink(missing_ok=True)
        return [root / SINGLE]
    count, stem, attempt = len(pending), "model", 1
    while any((root / f"{stem}-{part + 1:05}-of-{count:05}.safetensors").exists() for part in range(count)):
        stem, attempt = f"model-v{attempt + 1}", attempt + 1
    names = [f"{stem}-{part + 1:05}-of-{count:05}.safetensors" for part in range(count)]
    weight_map = {name: file for file, (_, held, _) in zip(names, pending, strict=True) for name in held}
    index = {"metadata": {"total_size": sum(size for _, _, size in pending)}, "weight_map": weight_map}
    temporary = _write_text(root, json.dumps(index, indent=2) + "\n")
    try:
        for file, (shard, _, _) in zip(names, pending, strict=True):
            os.replace(shard, root / file)
        os.replace(temporary, root / INDEX)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    (root / SINGLE).unlink(missing_ok=True)
    return [root / file for file in names]


def _old_files(root: Path) -> set[str]:
    """The weight files that an earlier checkpoint of this directory consists of."""
    old = {SINGLE} if (root / SINGLE).exists() else set()
    try:
        old |= {file for file in _index(root).values() if (root / INDEX).exists()}
    except FormatError:
        pass  # no index, or none of ours: leave its files alone
    return old


def _shards(tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], limit: int) -> Iterator[dict[str, Tensor]]:
    shard: dict[str, Tensor] = {}
    held, seen = 0, set[str]()
    for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
        if name in seen:
            raise FormatError(f"{name}: name: found twice, accepted is once")
        if tensor.dtype not in TAGS:
            raise FormatError(f"{name}: dtype: found {tensor.dtype}, accepted is {', '.join(map(str, TAGS))}")
        seen.add(name)
        if shard and held + _size(tensor) > limit:
            yield shard
            shard, held = {}, 0
        shard[name] = tensor
        held += _size(tensor)
    yield shard


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_file(root: Path, shard: Mapping[str, Tensor], notes: Mapping[str, str]) -> Path:
    """One safetensors file under a temporary name, on disk when this returns."""
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    ordered = sorted(shard, key=lambda name: -shard[name].element_size())  # keeps every tensor aligned; stable
    start = 0
    for name in ordered:
        stop = start + _size(shard[name])
        header[name] = {
            "dtype": TAGS[shard[name].dtype],
            "shape": list(shard[name].shape),
            "data_offsets": [start, stop],
        }
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for name in ordered:
            flat = shard[name].detach().cpu().contiguous().reshape(-1)
            yield flat.view(torch.uint8).numpy().data if flat.numel() else b""

    return _temporary(root, chunks())


def _write_text(root: Path, text: str) -> Path:
    return _temporary(root, iter([text.encode()]))


def _temporary(root: Path, chunks: Iterator[Any]) -> Path:
    handle, name = tempfile.mkstemp(prefix=".lowbit-", suffix=".tmp", dir=root)
    try:
        with os.fdopen(handle, "wb") as file:
            os.fchmod(file.fileno(), 0o644)
            for chunk in chunks:
                file.write(chunk)
            file.flush()
            os.fsync(file.fileno())
    except BaseException:
        os.unlink(name)
        raise
    return Path(name)


def _sync_directory(root: Path) -> None:
    handle = os.open(root, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def _bad(where: Path, field: str, found: str, accepted: str) -> FormatError:
    return FormatError(f"{where}: {field}: found {found}, accepted is {accepted}")


def _pickle(target: Path) -> FormatError:
    name = target.name
    command = (
        f"""python -c "import torch; from safetensors.torch import save_file; save_file({{k: v.clone() for k, v in """
        f"""torch.load('{name}', weights_only=True).items()}}, 'model.safetensors')" """
    )
    return _bad(
        target, "file type", "a pickle, which is never opened", f"safetensors; convert it with: {command.strip()}"
    )
