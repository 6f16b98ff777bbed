"""Memory for packed weights: large ones lie on 2 MB pages where Linux gives them, so that a stream misses no TLB."""

from __future__ import annotations

import ctypes
import math
import sys

import torch
from torch import Tensor

HUGE = 2 << 20
_MADV_HUGEPAGE = 14


def empty(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """An uninitialized CPU tensor. From 4 MB on it starts on a 2 MB boundary and asks for huge pages before first use."""
    nbytes = math.prod(shape) * dtype.itemsize
    if nbytes < 2 * HUGE or torch.compiler.is_compiling() or not sys.platform.startswith("linux"):
        return torch.empty(shape, dtype=dtype)
    raw = torch.empty(nbytes + HUGE, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE
    try:
        ctypes.CDLL(None).madvise(
            ctypes.c_void_p(raw.data_ptr() + start), ctypes.c_size_t(nbytes), ctypes.c_int(_MADV_HUGEPAGE)
        )
    except (OSError, AttributeError):  # a libc without madvise: small pages then
        pass
    return raw[start : start + nbytes].view(dtype).reshape(shape)
