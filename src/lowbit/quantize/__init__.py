"""Algorithms: pure functions from a weight, and what was measured of its inputs, to codes."""

from __future__ import annotations

from .channel import ChannelScales, channel_scales
from .gptq import Outcome, effective, gptq, solve
from .linears import METHODS, Method, Options, Row, quantize_linears
from .rtn import rtn
from .stats import InputStats, NonFinite

__all__ = [
    "METHODS",
    "ChannelScales",
    "InputStats",
    "Method",
    "NonFinite",
    "Options",
    "Outcome",
    "Row",
    "channel_scales",
    "effective",
    "gptq",
    "quantize_linears",
    "rtn",
    "solve",
]
