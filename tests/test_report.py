"""The report is one page that stands alone: well formed, escaped, nothing from elsewhere, marks where the data says."""

from __future__ import annotations

import math
import re
from itertools import pairwise
from pathlib import Path
from xml.etree import ElementTree

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbit.prove import report
from lowbit.prove.report import Point

SVG = "{http://www.w3.org/2000/svg}"
numbers = st.floats(-1e12, 1e12, allow_nan=False)


def parse(svg: str) -> ElementTree.Element:
    return ElementTree.fromstring(svg)


def centres(svg: str) -> list[tuple[float, float]]:
    """(x, y) of the marks, which alone have a title."""
    marks = [c for c in parse(svg).iter(f"{SVG}circle") if c.find(f"{SVG}title") is not None]
    return [(float(c.attrib["cx"]), float(c.attrib["cy"])) for c in marks]


def test_marks_are_in_proportion():
    svg = report.plot({"a": [Point(0, 0), Point(100, 10), Point(50, 5)]}, "MB", "loss", x_from=0, y_from=0)
    (x0, y0), (x1, y1), (x2, y2) = centres(svg)
    assert x0 == report.LEFT and y0 == report.HEIGHT - report.BOTTOM  # zero sits in the corner
    assert math.isclose(x2, (x0 + x1) / 2, abs_tol=0.11) and math.isclose(y2, (y0 + y1) / 2, abs_tol=0.11)
    assert x1 > x0 and y1 < y0  # SVG counts y downwards


def test_a_logarithmic_axis_has_equal_steps_for_equal_factors():
    svg = report.plot({"a": [Point(i, 10.0**-i) for i in range(4)]}, "layer", "error", y_log=True)
    ys = [y for _, y in centres(svg)]
    steps = [b - a for a, b in pairwise(ys)]
    assert all(math.isclose(step, steps[0], abs_tol=0.21) for step in steps) and steps[0] > 0


@given(st.lists(st.tuples(numbers, numbers), max_size=8), st.booleans())
def test_every_plot_is_well_formed_and_inside_its_frame(pairs, log):
    svg = report.plot({"a": [Point(x, y, "p") for x, y in pairs], "b": []}, "x", "y", y_log=log)
    for x, y in centres(svg):
        assert report.LEFT - 0.1 <= x <= report.WIDTH - report.RIGHT + 0.1
        assert report.TOP - 0.1 <= y <= report.HEIGHT - report.BOTTOM + 0.1


def test_points_that_cannot_be_drawn_are_counted():
    svg = report.plot({"a": [Point(1, math.nan), Point(math.inf, 1), Point(1, 2)]}, "x", "y")
    assert len(centres(svg)) == 1 and "2 points not shown" in svg
    assert "1 points not shown" in report.plot({"a": [Point(1, 0.0), Point(1, 1.0)]}, "x", "y", y_log=True)


def test_series_have_a_legend_only_where_there_are_several():
    assert "first" not in "".join(parse(report.plot({"first": []}, "x", "y")).itertext())
    text = "".join(parse(report.plot({"first": [], "second": []}, "x", "y")).itertext())
    assert "first" in text and "second" in text


def test_text_is_escaped_everywhere():
    nasty = "<b>&\"'"
    html = report.page(
        nasty,
        [
            report.paragraph(nasty),
            report.table([nasty], [[nasty]]),
            report.figure(report.plot({nasty: [Point(1, 1, nasty)], "b": []}, nasty, nasty), nasty),
        ],
    )
    assert "<b>" not in html and html.count("&lt;b&gt;&amp;") >= 9


def test_a_table_keeps_cells_and_order():
    html = report.table(["model", "MB"], [["float32", 538.1], ["ours", None]])
    assert re.findall(r"<t[hd]>(.*?)</t[hd]>", html) == ["model", "MB", "float32", "538.1", "ours", ""]
    with pytest.raises(ValueError, match="found a row of 1 cells, accepted is 2"):
        report.table(["a", "b"], [[1]])


def test_the_page_stands_alone_and_is_written_whole(tmp_path: Path):
    html = report.page("t", [report.figure(report.plot({"a": [Point(1, 1)]}, "x", "y"), "c")])
    named = html.replace('xmlns="http://www.w3.org/2000/svg"', "")  # a name, which nothing fetches
    assert not re.search(r"(?:src|href)\s*=|<script|@import|url\(|https?:", named)
    target = tmp_path / "deep" / "report.html"
    report.write(target, html)
    assert target.read_text("utf-8") == html
    assert [file.name for file in target.parent.iterdir()] == ["report.html"]
