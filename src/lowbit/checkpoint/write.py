"""Atomic writing: beside the target, flushed to disk, renamed."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..types import FormatError
from .files import INDEX, METADATA_KEY, SINGLE, TAGS, read_index


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
