"""One number a linear, drawn by place: a heat map of blocks and linears, and bars of every input along the blocks."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.prove import svg

WIDTH = 880
_LEFT, _CELL = 120, 24
_PALE, _DARK = (247, 244, 236), (122, 24, 52)  # ends of the scale


class Grid(NamedTuple):
    """``values[row][column]``; None where a block has no such linear."""

    rows: list[str]  # blocks, by number
    columns: list[str]  # linears of a block
    values: list[list[float | None]]


def grid(errors: Sequence[Mapping[str, Any]]) -> Grid:
    """Layers {"name", "error"} by block and linear: the first number in a dotted name is the block, the rest the linear.

    A name without one is a row of its own. Linears are called by their last word where that tells them apart.
    """
    found: dict[tuple[str, str], float] = {}
    for entry in errors:
        parts = str(entry["name"]).split(".")
        at = next((i for i, part in enumerate(parts) if part.isdigit()), None)
        row, column = ("-", entry["name"]) if at is None else (parts[at], ".".join(parts[at + 1 :]))
        found[row, column] = entry["error"]
    rows, columns = list(dict.fromkeys(r for r, _ in found)), list(dict.fromkeys(c for _, c in found))
    last = [column.rpartition(".")[2] for column in columns]
    names = last if len(set(last)) == len(last) else columns
    return Grid(rows, names, [[found.get((row, column)) for column in columns] for row in rows])


def scale_of(grids: Sequence[Grid]) -> tuple[float, float]:
    """Ends of a scale for several heat maps: the greatest value, and what all but the least twentieth reach."""
    known = sorted(
        v for cells in grids for row in cells.values for v in row if v is not None and math.isfinite(v) and v > 0
    )
    return (known[len(known) // 20], known[-1]) if known else (1.0, 1.0)


def heat_map(cells: Grid, what: str, scale: tuple[float, float] | None = None) -> str:
    """An SVG of blocks from left to right and linears from top to bottom, darker for more, on a logarithmic scale."""
    low, high = scale or scale_of([cells])
    cell = min(_CELL, (WIDTH - _LEFT - 16) / max(len(cells.rows), 1))
    out = [svg.text(8, 18, what)]
    top = 32
    for j, column in enumerate(cells.columns):
        y = top + j * _CELL
        out.append(svg.text(_LEFT - 8, y + 16, column, "end"))
        for i, row in enumerate(cells.rows):
            value = cells.values[i][j]
            if value is not None:
                tip = f"block {row}, {column}: {svg.number(value)}"
                out.append(svg.box(_LEFT + i * cell, y, cell - 1, _CELL - 1, _shade(value, low, high), tip))
    bottom = top + len(cells.columns) * _CELL
    step = max(1, math.ceil(26 / cell))
    for i in range(0, len(cells.rows), step):
        out.append(svg.text(_LEFT + (i + 0.5) * cell, bottom + 14, cells.rows[i], "middle"))
    out.append(svg.text(_LEFT - 8, bottom + 14, "block", "end"))
    for i in range(41):  # the scale
        value = low * (high / low) ** (i / 40)
        out.append(svg.box(_LEFT + 6 * i, bottom + 28, 6.2, 12, _shade(value, low, high), svg.number(value)))
    for part, anchor, sign in ((0.0, "start", "≤ "), (0.5, "middle", ""), (1.0, "end", "")):
        label = sign + svg.number(low * (high / low) ** part)
        out.append(svg.text(_LEFT + 246 * part, bottom + 54, label, anchor))
    return svg.alone(WIDTH, bottom + 64, what, out)


def _shade(value: float, low: float, high: float) -> str:
    if not (math.isfinite(value) and value > 0):
        return "#000000" if value != 0 else "#ffffff"
    part = math.log(value / low) / math.log(high / low) if high > low else 0.5
    return "#" + "".join(f"{round(a + (b - a) * min(max(part, 0), 1)):02x}" for a, b in zip(_PALE, _DARK, strict=True))


def sensitivity_bars(budget: Mapping[str, Any], what: str) -> str:
    """An SVG of what `quantize --budget` measured: a panel a kind of input, a bar a block, its length KL per weight.

    All panels share one scale, so that lengths compare; the colour says which bits were chosen. Linears that an override
    decided have no bar.
    """
    panels: dict[str, list[tuple[str, Mapping[str, Any], float]]] = {}
    for choice in budget["choices"]:
        if choice["sensitivity"] is None:
            continue
        cells = grid([{"name": name, "error": 0.0} for name in choice["names"]])
        per_weight = 1e6 * choice["sensitivity"] / max(choice["weights"], 1)
        panels.setdefault(", ".join(cells.columns), []).append((cells.rows[0], choice, per_weight))
    longest = max((value for bars in panels.values() for _, _, value in bars), default=0.0) or 1.0
    out, y, tall = [svg.text(8, 18, what)], 32.0, 84.0
    for i, bits in enumerate((4, 8)):
        x = 8 + 140 * i
        out.append(svg.box(x, y, 12, 12, _bits_colour(bits), f"{bits} bits"))
        out.append(svg.text(x + 18, y + 11, f"runs at {bits} bits"))
    y += 24
    for title, bars in panels.items():
        out.append(svg.text(8, y + 14, title, more=svg.BOLD))
        y += 32
        floor = y + tall
        cell = min(_CELL, (WIDTH - 80) / max(len(bars), 1))
        for part in (0.0, 0.5, 1.0):
            out.append(svg.line(56, floor - part * tall, 64 + cell * len(bars), floor - part * tall, "#e0e0e0"))
            out.append(svg.text(50, floor - part * tall + 4, svg.number(part * longest), "end"))
        step = max(1, math.ceil(26 / cell))
        for i, (row, choice, value) in enumerate(bars):
            height = tall * max(value, 0.0) / longest
            said = f"block {row}, {title}: KL {svg.number(choice['sensitivity'])}, {choice['bits']} bits"
            colour = _bits_colour(choice["bits"])
            out.append(svg.box(60 + i * cell, floor - height, cell - 2, height, colour, said, ' class="bar"'))
            if i % step == 0:
                out.append(svg.text(60 + (i + 0.5) * cell - 1, floor + 14, row, "middle"))
        y = floor + 30
    return svg.alone(WIDTH, round(y), what, out)


def _bits_colour(bits: int) -> str:
    return svg.COLOURS[0] if bits == 8 else svg.GREY
