"""Pieces of SVG that every drawing uses: text, lines, numbers, colours."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

COLOURS = ("#1f5fa8", "#c4541a", "#2e7d4f", "#7a3e9d", "#9a7400", "#b3264a", "#3b7f8c", "#555555")  # dark on white
GREY = "#9aa3ad"
BOLD = ' style="font-weight:600"'  # a style: a page's own rule for text would win over an attribute
LETTER = 6.6  # width of a 12 px letter, on average or more


def number(value: float) -> str:
    """Four significant digits."""
    return f"{value:.4g}"


def line(x1: float, y1: float, x2: float, y2: float, colour: str) -> str:
    return f'<line x1="{x1:.1f}" y1="{y1:.1f}" x2="{x2:.1f}" y2="{y2:.1f}" stroke="{colour}"/>'


def text(x: float, y: float, words: str, anchor: str = "start", more: str = "") -> str:
    """``more``: further attributes."""
    return f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{more}>{escape(words)}</text>'


def box(x: float, y: float, width: float, height: float, colour: str, tip: str, more: str = "") -> str:
    """A filled rectangle that says ``tip`` under the pointer."""
    place = f'x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}"'
    return f'<rect {place} fill="{colour}"{more}><title>{escape(tip)}</title></rect>'


def alone(width: int, height: int, what: str, parts: Sequence[str]) -> str:
    """A drawing that can stand in a file of its own: white ground, its own font."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}"'
    font = 'font-family="system-ui, sans-serif" font-size="12"'
    ground = f'<rect width="{width}" height="{height}" fill="#fff"/>'
    return "\n".join([f'{head} role="img" aria-label="{escape(what)}" {font}>', ground, *parts, "</svg>"]) + "\n"
