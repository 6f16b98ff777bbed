"""Safetensors checkpoints of strangers and our own: lazy, memory-mapped reading and atomic writing.

Nothing but safetensors and JSON is ever opened.
"""

from __future__ import annotations

from .files import INDEX, SINGLE
from .read import Checkpoint, open_checkpoint
from .write import write_checkpoint

__all__ = ["INDEX", "SINGLE", "Checkpoint", "open_checkpoint", "write_checkpoint"]
