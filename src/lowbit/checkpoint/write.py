"""Atomic writing: beside the target, flushed to disk, renamed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from ..types import FormatError
from .files import INDEX, METADATA_KEY, SINGLE, TAGS, read_index

_PIECE = 1 << 24  # bytes copied at once


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
    weight file under the key ``lowbit``. An iterable is consumed tensor by tensor: each goes to the disk before the next
    is asked for, in a file of its own by element size, and those are joined behind the header. So for a moment a shard
    takes its size twice on disk, and never in memory.
    """
    root = Path(path)
    root.mkdir(parents=True, exist_ok=True)
    notes = {"format": "pt", **({METADATA_KEY: json.dumps(metadata)} if metadata else {})}
    pending: list[tuple[Path, list[str], int]] = []  # temporary file, names, bytes
    finals: list[Path] = []
    settings: Path | None = None
    try:
        for shard in _shards(root, tensors, max_shard_bytes):
            pending.append((_write_file(root, shard, notes), list(shard.sizes), shard.total))
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
        for leftover in (temporary, *(root / file for file in names)):  # names that no old checkpoint has
            leftover.unlink(missing_ok=True)
        raise
    (root / SINGLE).unlink(missing_ok=True)
    return [root / file for file in names]


def _old_files(root: Path) -> set[str]:
    """The weight files that an earlier checkpoint of this directory consists of."""
    old = {SINGLE} if (root / SINGLE).exists() else set()
    try:
        old |= {file for file in read_index(root).values() if (root / INDEX).exists()}
    except FormatError:
        pass  # no index, or none of ours: leave its files alone
    return old


class _Shard:
    """Tensors on their way into one file: their bytes lie in one unnamed file an element size, wide ones first."""

    def __init__(self, root: Path) -> None:
        self.root = root
        self.entries: dict[int, list[tuple[str, str, list[int]]]] = {}  # element size -> (name, dtype tag, shape)
        self.sizes: dict[str, int] = {}  # bytes
        self.total = 0
        self.files: dict[int, IO[bytes]] = {}

    def add(self, name: str, tensor: Tensor) -> None:
        width = tensor.element_size()
        if width not in self.files:
            self.files[width] = tempfile.TemporaryFile(dir=self.root)
        flat = tensor.detach().cpu().contiguous().reshape(-1)
        if flat.numel():
            self.files[width].write(flat.view(torch.uint8).numpy().data)
        self.entries.setdefault(width, []).append((name, TAGS[tensor.dtype], list(tensor.shape)))
        self.sizes[name] = _size(tensor)
        self.total += self.sizes[name]

    def close(self) -> None:
        for file in self.files.values():
            file.close()


def _shards(root: Path, tensors: Mapping[str, Tensor] | Iterable[tuple[str, Tensor]], limit: int) -> Iterator[_Shard]:
    shard, seen = _Shard(root), set[str]()
    try:
        for name, tensor in tensors.items() if isinstance(tensors, Mapping) else tensors:
            if name in seen:
                raise FormatError(f"{name}: name: found twice, accepted is once")
            if tensor.dtype not in TAGS:
                raise FormatError(f"{name}: dtype: found {tensor.dtype}, accepted is {', '.join(map(str, TAGS))}")
            seen.add(name)
            if shard.sizes and shard.total + _size(tensor) > limit:
                yield shard
                shard.close()
                shard = _Shard(root)
            shard.add(name, tensor)
        yield shard
    finally:
        shard.close()


def _size(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()


def _write_file(root: Path, shard: _Shard, notes: Mapping[str, str]) -> Path:
    """One safetensors file under a temporary name, on disk when this returns."""
    header: dict[str, Any] = {"__metadata__": dict(notes)}
    start = 0
    widths = sorted(shard.entries, reverse=True)  # keeps every tensor aligned
    for name, tag, shape in (entry for width in widths for entry in shard.entries[width]):
        stop = start + shard.sizes[name]
        header[name] = {"dtype": tag, "shape": shape, "data_offsets": [start, stop]}
        start = stop
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)

    def chunks() -> Iterator[Any]:
        yield len(text).to_bytes(8, "little") + text
        for width in widths:
            file = shard.files[width]
            file.seek(0)
            while piece := file.read(_PIECE):
                yield piece

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
