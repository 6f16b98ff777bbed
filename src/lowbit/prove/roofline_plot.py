"""The roofline as a drawing: ceilings of a chip, log-log, and on it what was predicted and what was measured."""

from __future__ import annotations

import math
from collections.abc import Sequence

from lowbit.prove import svg
from lowbit.prove.chips import Chip
from lowbit.prove.measured import Compared
from lowbit.prove.report import Point, plot
from lowbit.prove.roofline import Row

MOST = 24  # names that a drawing has room for; more are under the pointer only
X, Y = "operations a byte", "10¹² operations a second"


def draw(chip: Chip, rows: Sequence[Row], compared: Sequence[Compared] = ()) -> str:
    """An SVG. Predicted points lie on a roof, or below it where an operator needs a slower unit too; measured points,
    a series a precision, lie where their time puts them."""
    series: dict[str, list[Point]] = {}
    for row in rows:
        if row.operations and row.seconds:
            point = _point(
                row.intensity, row.operations / row.seconds, f"{row.name} {row.precision}".strip(), len(rows)
            )
            series.setdefault("predicted", []).append(point)
    for one in compared:
        rate = one.operations / one.measured.seconds
        point = _point(one.intensity, rate, f"{one.measured.name} M={one.measured.m}", len(compared))
        series.setdefault(f"measured {one.measured.precision}", []).append(point)
    units = {row.unit for row in rows} | {row.unit for one in compared for row in one.rows}
    return plot(series, X, f"{Y}: {chip.name}", x_log=True, y_log=True, lines=_ceilings(chip, units, series))


def _point(intensity: float, rate: float, words: str, among: int) -> Point:
    return Point(intensity, rate / 1e12, words if among <= MOST else "", words)


def _ceilings(chip: Chip, units: set[str], series: dict[str, list[Point]]) -> dict[str, list[tuple[float, float]]]:
    """The slope of memory up to the highest of the flat roofs, and every roof from where it leaves the slope."""
    knees: dict[float, list[str]] = {}  # break-even: the units that have it
    for unit in sorted(units, key=lambda unit: (chip.rate(unit), unit)):
        knees.setdefault(chip.break_even(unit), []).append(unit)
    xs = [point.x for points in series.values() for point in points] + [*knees]
    low, high = 10.0 ** math.floor(math.log10(min(xs))), 10.0 ** math.ceil(math.log10(max(xs)) + 1e-9)
    bandwidth = chip.bandwidth.per_second
    top = max(knees)
    lines = {f"{svg.number(bandwidth / 1e9)} GB/s": [(low, low * bandwidth / 1e12), (top, top * bandwidth / 1e12)]}
    for knee, names in knees.items():
        rate = chip.rate(names[0]) / 1e12
        lines[f"{', '.join(names)} {svg.number(rate)}"] = [(knee, rate), (high, rate)]
    return lines
