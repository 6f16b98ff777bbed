"""Mapped checkpoint files and physical memory: pages that were read once need not stay."""

from __future__ import annotations

import ctypes
import os
import re
from collections.abc import Iterator
from pathlib import Path

_HEADER = re.compile(r"^([0-9a-f]+)-([0-9a-f]+) \S+ \S+ \S+ \S+\s*(.*)$")
_DONTNEED = 4  # of madvise(2), Linux


def drop_clean_pages(folder: Path | str) -> int:
    """Give back the memory of mapped ``*.safetensors`` under ``folder``; returns the bytes that were resident.

    What is touched later comes from the system's file cache again. A mapping that anyone wrote into (its own copies of
    pages would be lost) is left alone. Does nothing where the system has no smaps.
    """
    smaps = Path("/proc/self/smaps")
    if not smaps.exists():
        return 0
    root = os.path.realpath(folder) + os.sep
    advise = ctypes.CDLL(None, use_errno=True).madvise
    advise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    dropped = 0
    for begin, end, name, sizes in _mappings(smaps.read_text().splitlines()):
        ours = name.startswith(root) and name.endswith(".safetensors")
        if ours and sizes.get("Rss") and not sizes.get("Private_Dirty", 1) and not sizes.get("Anonymous", 1):
            if advise(begin, end - begin, _DONTNEED) == 0:
                dropped += 1024 * sizes["Rss"]
    return dropped


def _mappings(lines: list[str]) -> Iterator[tuple[int, int, str, dict[str, int]]]:
    """First address, end, file name and the sizes in kB of every mapping."""
    found: tuple[int, int, str, dict[str, int]] | None = None
    for line in lines:
        header = _HEADER.match(line)
        if header:
            if found is not None:
                yield found
            found = (int(header[1], 16), int(header[2], 16), header[3], {})
        elif found is not None:
            key, _, rest = line.partition(":")
            number = rest.split()
            if number and number[0].isdigit():
                found[3][key] = int(number[0])
    if found is not None:
        yield found
