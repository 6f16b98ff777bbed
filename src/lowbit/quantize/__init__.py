"""Algorithms: pure functions from a weight, and what was measured of its inputs, to codes."""

from __future__ import annotations

from .channel import ChannelScales, channel_scales
from .gptq import Outcome, effective, gptq, solve
from .hadamard import BLOCK
from .linears import METHODS, Method, Options, Row, quantize_linears
from .rtn import rtn
from .scales import SCALES, Scales, scheme_for
from .smooth import smoothing
from .stats import InputStats, NonFinite
from .svdquant import RANKS, RECIPES, Recipe, svdquant

__all__ = [
    "BLOCK",
    "METHODS",
    "RANKS",
    "RECIPES",
    "SCALES",
    "ChannelScales",
    "InputStats",
    "Method",
    "NonFinite",
    "Options",
    "Outcome",
    "Recipe",
    "Row",
    "Scales",
    "channel_scales",
    "effective",
    "gptq",
    "quantize_linears",
    "rtn",
    "scheme_for",
    "smoothing",
    "solve",
    "svdquant",
]
