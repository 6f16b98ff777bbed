"""Where the loader took the variant without compiled kernels: what it went by, for the warning at import."""

import platform
from importlib import metadata

import torch

from ._lowbit import native

OLDEST_KERNELS = (0, 15, 1)  # the first that knows variants for torch's stable ABI


def remedy() -> str:
    """One line: what was found, what has compiled kernels, what to do."""
    try:
        kernels = metadata.version("kernels")
    except metadata.PackageNotFoundError:
        kernels = "none"
    system = f"{platform.system()} on {platform.machine()}"
    found = f"found kernels {kernels}, torch {torch.__version__}, {system}"
    accepted = "compiled are Linux on x86_64 and aarch64, glibc 2.28, for torch 2.10 and kernels 0.15.1 or newer"
    old = kernels != "none" and number(kernels) < OLDEST_KERNELS
    return f"{found}; {accepted}" + (": pip install -U 'kernels>=0.15.1'" if old else "")


def number(version: str) -> tuple[int, ...]:
    """The leading numbers: 0.15.0rc1 counts as 0.15.0."""
    parts = []
    for part in version.split(".")[:3]:
        digits = part[: len(part) - len(part.lstrip("0123456789"))]
        parts.append(int(digits or 0))
    return tuple(parts)


native.REMEDY = remedy()
