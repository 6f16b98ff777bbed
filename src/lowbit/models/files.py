"""Which weight files a model consists of, without reading them: what a long run is made from, and whether its result is whole."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

from lowbit.models.load import local_directory


def files_of(model: str | os.PathLike[str]) -> list[Any]:
    """The path, then [name, bytes, time in ns] of every safetensors file below a directory (or cached hub id), or of the one
    file. FormatError where there is no such model."""
    path = Path(model)
    path = path if path.exists() else local_directory(model)
    files = [path] if path.is_file() else sorted(path.rglob("*.safetensors"))
    stats = [(file.name, os.stat(file)) for file in files]
    return [str(path.resolve()), *([name, stat.st_size, stat.st_mtime_ns] for name, stat in stats)]
