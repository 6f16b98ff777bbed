"""Byte orders that kernels read. A row: tag -> (pack, unpack)."""

from __future__ import annotations

import platform
from collections.abc import Callable
from typing import Any, NamedTuple

from . import arm_panels, mma_tiles, panels


class Layout(NamedTuple):
    pack: Callable[..., Any]
    unpack: Callable[..., Any]


LAYOUTS: dict[str, Layout] = {
    "x86_panels": Layout(panels.pack, panels.unpack),
    "arm_panels": Layout(arm_panels.pack, arm_panels.unpack),
    "mma_tiles": Layout(mma_tiles.pack, mma_tiles.unpack),
    "half_panels": Layout(panels.pack_half, panels.unpack_half),
}

# What the CPU kernels of this machine read; the one place that decides it. csrc/cpu decides the same at compile time.
MACHINE = "arm_panels" if platform.machine().lower() in ("aarch64", "arm64") else "x86_panels"
pack, unpack = LAYOUTS[MACHINE]
