"""Attention inside the segments of a packed batch: every way there is, and which one runs where.

Each row of ``ATTENTIONS`` is bound once a forward to the bounds of the segments and gives a function of q [M, H, D],
k and v [M, G, D] (G key-value heads, views with any strides) that returns [M, H, D]. No row copies k or v for the
query heads that share them.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from lowbit import ops_cuda
from lowbit.types import FormatError

try:
    from torch.nn.attention import varlen as _torch_varlen
except ImportError:  # torch < 2.10
    _torch_varlen = None  # type: ignore[assignment]

Attend = Callable[[Tensor, Tensor, Tensor, float], Tensor]  # q, k, v, scale
_varlen_attn: Any = getattr(_torch_varlen, "varlen_attn", None)
# Newer versions ask for a word before heads may share keys; older ones let them.
_WORDS = {} if _varlen_attn is None else inspect.signature(_varlen_attn).parameters
_GQA: dict[str, Any] = {"enable_gqa": True} if "enable_gqa" in _WORDS else {}


class Spans(NamedTuple):
    """Where the segments of M packed rows lie."""

    bounds: Tensor  # int32 [S + 1] on the device, 0 .. M; equal neighbours are segments of no rows
    longest: int  # at least the rows of the longest segment


def _grouped(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """[L, H, D], [L, G, D] -> [G, H / G, L, D] each, k and v with a stride of 0 over the query heads that share them."""
    groups = k.shape[1]
    wide = q.reshape(len(q), groups, -1, q.shape[2]).permute(1, 2, 0, 3)
    shape = wide.shape[:2] + (k.shape[0], k.shape[2])
    return wide, k.transpose(0, 1)[:, None].expand(shape), v.transpose(0, 1)[:, None].expand(shape)


def _together(y: Tensor) -> Tensor:
    """[G, H / G, L, D] -> [L, H, D]."""
    return y.permute(2, 0, 1, 3).flatten(1, 2)


def _segments(spans: Spans) -> Attend:
    """torch's attention once a segment. Reads the bounds on the host: not for a graph."""
    ends: list[int] = spans.bounds.tolist()

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        out = q.new_empty(q.shape)
        for a, b in zip(ends, ends[1:]):
            if b > a:
                out[a:b] = _together(scaled_dot_product_attention(*_grouped(q[a:b], k[a:b], v[a:b]), scale=scale))
        return out

    return attend


def _masked(spans: Spans) -> Attend:
    """torch's attention over all M rows behind a mask: any device and dtype, M² work, fit for a graph."""
    mask: list[Tensor] = []

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        if not mask:
            rows = torch.arange(q.shape[0], dtype=torch.int32, device=q.device)
            segment = torch.searchsorted(spans.bounds[1:], rows, right=True)
            mask.append(segment[:, None] == segment)
        return _together(scaled_dot_product_attention(*_grouped(q, k, v), attn_mask=mask[0], scale=scale))

    return attend


def _varlen(spans: Spans) -> Attend:
    """torch's FlashAttention over the segments: CUDA, 16-bit floats, fit for a graph."""
    if _varlen_attn is None:
        raise FormatError(f"attention: found 'varlen' with torch {torch.__version__}, accepted is torch 2.10 or newer")
    bounds, longest = spans

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        y: Tensor = _varlen_attn(q, k, v, bounds, bounds, longest, longest, scale=scale, **_GQA)
        return y

    return attend


def _ours(spans: Spans) -> Attend:
    """One launch of our own over the segments: CUDA, 16-bit floats, heads of 128, fit for a graph."""

    def attend(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
        return ops_cuda.attention(q, k, v, spans.bounds, scale)

    return attend


ATTENTIONS: dict[str, Callable[[Spans], Attend]] = {
    "segments": _segments, "masked": _masked, "varlen": _varlen, "ours": _ours,
}  # fmt: skip


class Choice(NamedTuple):
    """Where a row of ATTENTIONS runs; None fits any."""

    device: str
    dtype: torch.dtype | None
    capability: tuple[int, int] | None
    rows: int | None  # packed rows, at most
    name: str


# The first that fits and can run does. Measured on an H200, 2026-11-30, torch 2.11, 16 heads on 8, microseconds (attention_sm90.cu,
# attention.cu, varlen, masked): 172 rows in two segments 5.0, 5.2, 9.2, 17; 685 in two 9.7, 17.2, 18, 44; 768 in three 9.6, 17.8, 27,
# 30; 1890 in two 36, 73, 60, 104. docs/omnivoice.md.
CHOICE = (
    Choice("cpu", None, None, None, "segments"),
    Choice("cuda", torch.float16, (9, 0), None, "ours"),
    Choice("cuda", torch.bfloat16, (9, 0), None, "ours"),
    Choice("cuda", torch.float16, None, 1024, "ours"),
    Choice("cuda", torch.bfloat16, None, 1024, "ours"),
    Choice("cuda", torch.float16, None, None, "varlen"),
    Choice("cuda", torch.bfloat16, None, None, "varlen"),
    Choice("cuda", None, None, None, "masked"),
)


def choose(
    device: torch.device, dtype: torch.dtype, head_dim: int, rows: int, forced: str | None = None, ours: bool = True
) -> str:
    """The row that runs there for so many packed ``rows``; without ``ours`` one of torch's. FormatError for a word that is no
    row."""
    can = {
        "ours": ours and head_dim == 128 and device.type == "cuda" and ops_cuda.refuses(device) is None,
        "varlen": _varlen_attn is not None and head_dim % 8 == 0 and head_dim <= 256,
    }
    if forced is not None:
        if forced not in ATTENTIONS:
            raise FormatError(f"attention: found {forced!r}, accepted are {', '.join(ATTENTIONS)}")
        if not can.get(forced, True):
            left = ", ".join(name for name in ATTENTIONS if can.get(name, True))
            raise FormatError(
                f"attention: found {forced!r} with heads of {head_dim} on {device}, accepted there are {left}"
            )
        return forced
    capability = torch.cuda.get_device_capability(device) if can["ours"] else None
    for row in CHOICE:
        fits = row.device == device.type and row.dtype in (None, dtype) and row.capability in (None, capability)
        if fits and (row.rows is None or rows <= row.rows) and can.get(row.name, True):
            return row.name
    return "masked"
