"""Layers over a packed weight: what one holds (held.py), how it is made and run (linear.py), one for SVDQuant (w4a4.py)."""

from .linear import DEFAULT as DEFAULT
from .linear import QuantLinear as QuantLinear
from .w4a4 import W4A4Linear as W4A4Linear
