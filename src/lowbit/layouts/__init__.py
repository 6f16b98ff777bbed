"""Byte orders that kernels read. A row: tag -> (pack, unpack)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from . import panels


class Layout(NamedTuple):
    pack: Callable[..., Any]
    unpack: Callable[..., Any]


LAYOUTS: dict[str, Layout] = {
    "x86_panels": Layout(panels.pack, panels.unpack),
    "half_panels": Layout(panels.pack_half, panels.unpack_half),
}
