"""One self-contained HTML page: tables and plots as inline SVG. No script, no font and no file from elsewhere."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

from lowbit.prove import svg

WIDTH, HEIGHT = 880, 400  # of a plot, CSS pixels
LEFT, RIGHT, TOP, BOTTOM = 64, 16, 16, 48  # margins around its frame
LEGEND = 136  # beside the frame, so that no mark is under it

_STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; color: #1b1b1b; background: #fff; max-width: 66rem; margin: 2rem auto;
       padding: 0 1rem; }
table { border-collapse: collapse; margin: 1rem 0; font-size: .92rem; display: block; overflow-x: auto; }
th, td { padding: .3rem .6rem; border-bottom: 1px solid #d4d4d4; text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid #1b1b1b; font-weight: 600; }
th:first-child, td:first-child { text-align: left; }
figure { margin: 1.5rem 0; overflow-x: auto; }
figcaption { color: #444; max-width: 40rem; }
svg { display: block; max-width: 100%; height: auto; }
svg text { font: 12px system-ui, sans-serif; fill: #333; }
"""


class Point(NamedTuple):
    """One mark of a plot; an empty label writes nothing beside it. ``tip`` under the pointer (the label where empty)."""

    x: float
    y: float
    label: str = ""
    tip: str = ""


class Bar(NamedTuple):
    """One bar: its length is ``value`` (0 or more), ``note`` stands behind it; ``ours`` gives it the first colour."""

    label: str
    value: float
    note: str = ""
    ours: bool = False


class _Axis(NamedTuple):
    low: float
    high: float
    log: bool

    def at(self, value: float) -> float:
        """0 .. 1 along the axis."""
        low, high, v = (math.log10(n) if self.log else n for n in (self.low, self.high, value))
        return (v - low) / (high - low)


def plot(
    series: Mapping[str, Sequence[Point]],
    x_label: str,
    y_label: str,
    *,
    x_from: float | None = None,
    y_from: float | None = None,
    x_log: bool = False,
    y_log: bool = False,
    lines: Mapping[str, Sequence[tuple[float, float]]] | None = None,
) -> str:
    """An SVG scatter plot, which can stand in a file of its own, of named series, one colour each, with a legend where there are two or more.

    ``x_from`` and ``y_from`` are taken into the axis (0 shows sizes in proportion). ``lines`` are drawn under the points
    through the (x, y) given, which the axes take in, with their name at the end. Points that are not finite, or not
    positive on a logarithmic axis, are left out and counted in the plot. No points at all gives an empty frame.
    """
    every = [point for points in series.values() for point in points]
    shown = [
        p
        for p in every
        if math.isfinite(p.x) and math.isfinite(p.y) and (p.y > 0 or not y_log) and (p.x > 0 or not x_log)
    ]
    corners = [corner for line in (lines or {}).values() for corner in line]
    x_axis = _axis([*(p.x for p in shown), *(x for x, _ in corners)], x_from, x_log)
    y_axis = _axis([*(p.y for p in shown), *(y for _, y in corners)], y_from, y_log)
    inner_w = WIDTH - LEFT - RIGHT - (LEGEND if len(series) > 1 else 0)
    inner_h = HEIGHT - TOP - BOTTOM

    def px(value: float) -> float:
        return LEFT + x_axis.at(value) * inner_w

    def py(value: float) -> float:
        return TOP + (1 - y_axis.at(value)) * inner_h

    out: list[str] = []
    for tick in _ticks(x_axis):
        out.append(svg.line(px(tick), TOP, px(tick), TOP + inner_h, "#e6e6e6"))
        out.append(svg.text(px(tick), TOP + inner_h + 16, svg.number(tick), "middle"))
    for tick in _ticks(y_axis):
        out.append(svg.line(LEFT, py(tick), LEFT + inner_w, py(tick), "#e6e6e6"))
        out.append(svg.text(LEFT - 6, py(tick) + 4, svg.number(tick), "end"))
    out.append(f'<rect x="{LEFT}" y="{TOP}" width="{inner_w}" height="{inner_h}" fill="none" stroke="#888"/>')
    out.append(svg.text(LEFT + inner_w / 2, HEIGHT - 8, x_label, "middle"))
    out.append(
        f'<text transform="translate(14 {TOP + inner_h / 2}) rotate(-90)" text-anchor="middle">{escape(y_label)}</text>'
    )
    taken = [(px(p.x) - 5, py(p.y) - 5, px(p.x) + 5, py(p.y) + 5) for p in shown]
    for name, line in (lines or {}).items():
        path = " ".join(f"{px(x):.1f},{py(y):.1f}" for x, y in line)
        out.append(f'<polyline points="{path}" fill="none" stroke="#555" stroke-width="1.5"/>')
        end_x, end_y = px(line[-1][0]) - 4, py(line[-1][1]) - 5
        out.append(svg.text(end_x, end_y, name, "end"))
        taken.append((end_x - svg.LETTER * len(name), end_y - 11, end_x, end_y + 3))
    for index, (name, points) in enumerate(series.items()):
        colour = svg.COLOURS[index % len(svg.COLOURS)]
        for point in points:
            if point not in shown:
                continue
            x, y = px(point.x), py(point.y)
            title = escape(f"{point.tip or point.label or name}: {svg.number(point.x)}, {svg.number(point.y)}")
            out.append(f'<circle cx="{x:.1f}" cy="{y:.1f}" r="4" fill="{colour}" fill-opacity="0.8">')
            out.append(f"<title>{title}</title></circle>")
            if point.label:
                out += _label(x, y, point.label, taken, LEFT + inner_w)
        if len(series) > 1:
            row = TOP + 14 + 16 * index
            out.append(f'<circle cx="{LEFT + inner_w + 20}" cy="{row - 4}" r="4" fill="{colour}"/>')
            out.append(svg.text(LEFT + inner_w + 30, row, name, "start"))
    if len(shown) < len(every):
        out.append(svg.text(LEFT + 6, TOP + 14, f"{len(every) - len(shown)} points not shown", "start"))
    return svg.alone(WIDTH, HEIGHT, f"{y_label} against {x_label}", out)


def _label(x: float, y: float, words: str, taken: list[tuple[float, float, float, float]], right: float) -> list[str]:
    """The label of a mark where it covers no mark and no label; nothing where all places are taken (the tip has it)."""
    width = svg.LETTER * len(words)
    for start in (x + 8, x - 8 - width):
        for dy in (4, -8, 18):
            frame = (start, y + dy - 11, start + width, y + dy + 3)
            free = all(frame[2] < a or c < frame[0] or frame[3] < b or d < frame[1] for a, b, c, d in taken)
            if free and start >= LEFT and frame[2] <= right and frame[1] >= TOP and frame[3] <= HEIGHT - BOTTOM:
                taken.append(frame)
                return [svg.text(start, y + dy, words)]
    return []


def bars(panels: Sequence[tuple[str, Sequence[Bar]]], what: str) -> str:
    """An SVG of horizontal bars in titled panels, each from 0 on a scale of its own. It can stand in a file of its own.

    ``what`` says what a length is. Raises ValueError for a value that is negative or not finite.
    """
    wrong = [bar for _, row in panels for bar in row if not (math.isfinite(bar.value) and bar.value >= 0)]
    if wrong:
        raise ValueError(f"bars: found {wrong[0].value} for {wrong[0].label!r}, accepted is a finite number from 0 on")
    labels = [bar.label for _, row in panels for bar in row]
    notes = [bar.note for _, row in panels for bar in row]
    left = 16 + svg.LETTER * max(map(len, labels), default=0)  # 12 px letters are narrower on average
    room = max(WIDTH - left - 16 - svg.LETTER * max(map(len, notes), default=0), 120)
    y, out = 24.0, [svg.text(8, 18, what, "start")]
    for title, row in panels:
        y += 26
        out.append(svg.text(8, y, title, more=svg.BOLD))
        y += 8
        longest = max((bar.value for bar in row), default=0.0) or 1.0
        for bar in row:
            length = room * bar.value / longest
            place = f'x="{left:.1f}" y="{y:.0f}" width="{length:.1f}" height="14"'
            tip = (
                f"{bar.label}: {svg.number(bar.value)}; {bar.note}"
                if bar.note
                else f"{bar.label}: {svg.number(bar.value)}"
            )
            out.append(svg.text(left - 6, y + 12, bar.label, "end"))
            out.append(f'<rect class="bar" {place} fill="{svg.COLOURS[0] if bar.ours else svg.GREY}">')
            out.append(f"<title>{escape(tip)}</title></rect>")
            out.append(svg.text(left + length + 6, y + 12, bar.note, "start"))
            y += 20
    return svg.alone(WIDTH, round(y + 12), what, out)


def table(columns: Sequence[str], rows: Sequence[Sequence[object]]) -> str:
    """An HTML table; None is an empty cell. Raises ValueError where a row has another length than the columns."""
    for row in rows:
        if len(row) != len(columns):
            raise ValueError(f"table: found a row of {len(row)} cells, accepted is {len(columns)}: {list(row)}")
    head = "".join(f"<th>{escape(column)}</th>" for column in columns)
    lines = ["".join(f"<td>{'' if cell is None else escape(str(cell))}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    return f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table>"


def figure(drawing: str, caption: str) -> str:
    """A plot and what it shows, in words."""
    return f"<figure>\n{drawing}\n<figcaption>{escape(caption)}</figcaption>\n</figure>"


def paragraph(text: str) -> str:
    """Plain text as one paragraph."""
    return f"<p>{escape(text)}</p>"


def page(title: str, parts: Sequence[str]) -> str:
    """The whole page; ``parts`` are what the functions above return, in reading order."""
    body = "\n".join(parts)
    return (
        '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n"
        f"<body>\n<h1>{escape(title)}</h1>\n{body}\n</body>\n</html>\n"
    )


def write(path: str | os.PathLike[str], html: str) -> None:
    """Write a page, whole or not at all; folders are made."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(target.name + ".partial")
    partial.write_text(html, "utf-8")
    partial.replace(target)


def _axis(values: Sequence[float], include: float | None, log: bool) -> _Axis:
    known = [*values, *([] if include is None or (log and include <= 0) else [include])]
    low, high = (min(known), max(known)) if known else (1.0, 10.0)
    if log:
        low, high = 10.0 ** math.floor(math.log10(low)), 10.0 ** math.ceil(math.log10(high))
        return _Axis(low, high if high > low else low * 10, True)
    room = 0.08 * (high - low) or 0.5 * abs(high) or 1.0
    return _Axis(low if low == include else low - room, high if high == include else high + room, False)


def _ticks(axis: _Axis) -> list[float]:
    """Round numbers inside the axis: decades, or four to ten steps of 1, 2 or 5 times a power of ten."""
    if axis.log:
        first, last = round(math.log10(axis.low)), round(math.log10(axis.high))
        return [10.0**power for power in range(first, last + 1)]
    rough = (axis.high - axis.low) / 5
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(power * factor for factor in (1, 2, 5, 10) if power * factor >= rough * 0.999)
    first = math.ceil(axis.low / step - 1e-9)
    last = math.floor(axis.high / step + 1e-9)
    return [step * i for i in range(first, last + 1)]
