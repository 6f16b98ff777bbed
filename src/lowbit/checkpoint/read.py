"""Lazy, memory-mapped reading of safetensors checkpoints."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .files import DTYPES, INDEX, METADATA_KEY, PICKLES, json_file, locate, open_file, parse, refuse, refuse_pickle
from .settings import read_quantization


class Checkpoint(Mapping[str, Tensor]):
    """The tensors of a directory or file by name, mapped when asked for; shapes and dtypes come from headers."""

    def __init__(self, path: Path, files: Mapping[str, Path], index: Mapping[str, str] | None) -> None:
        self.path = path
        self._handles = {file: open_file(target) for file, target in files.items()}
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
                raise refuse(path / INDEX, "weight_map", f"{len(missing)} tensors not in their shard: {missing[0]}",
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
            raise refuse(self.path / self._where[name], name, str(error), "a safetensors tensor") from None
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
            raise refuse(self.path / self._where[name], f"{name}.dtype", tag, ", ".join(DTYPES))
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
                return parse(self.path / file, f"metadata {METADATA_KEY}", text)
        return {}


def open_checkpoint(path: str | os.PathLike[str]) -> Checkpoint:
    """Open a directory (single or sharded safetensors, config.json) or one ``.safetensors`` file.

    Raises FormatError for pickle files (with the command that converts one), for a malformed header, index or
    configuration, for an index that leaves the directory, and for configuration files that contradict each other.
    """
    path = Path(path)
    if path.is_dir():
        files, index = locate(path)
        checkpoint = Checkpoint(path, files, index)
        checkpoint.config = json_file(path, "config.json") or {}
        checkpoint.quantization = read_quantization(path, checkpoint.config)
        return checkpoint
    if path.suffix in PICKLES:
        raise refuse_pickle(path)
    if not path.is_file():
        raise refuse(path, "path", "nothing there", "a directory, or a .safetensors file")
    return Checkpoint(path.parent, {path.name: path}, None)
