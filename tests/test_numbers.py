"""docs/numbers.md is what the generator makes of the kept JSON lines, to the letter."""

from __future__ import annotations

from pathlib import Path

import pytest

from lowbit.bench import numbers
from lowbit.types import FormatError

ROOT = Path(__file__).parents[1]


def test_the_page_is_generated() -> None:
    files = sorted(str(path) for path in (ROOT / "bench" / "results").glob("*.jsonl"))
    assert files
    assert (ROOT / "docs" / "numbers.md").read_text("utf-8") == numbers.page(numbers.read(files))


def test_every_line_is_in_a_table() -> None:
    files = sorted(str(path) for path in (ROOT / "bench" / "results").glob("*.jsonl"))
    lines = numbers.read(files)
    rows = [row for row in numbers.page(lines).splitlines() if row.startswith("| ") and "---" not in row]
    assert len(rows) == len(lines) + numbers.page(lines).count("\n|---|")


def test_the_charts_are_generated_and_linked() -> None:
    lines = numbers.read(sorted(str(path) for path in (ROOT / "bench" / "results").glob("*.jsonl")))
    found = {path.name: path.read_text("utf-8") for path in (ROOT / "docs" / "charts").iterdir()}
    assert found == numbers.charts(lines)
    assert all(f"](charts/{name})" in numbers.page(lines) for name in found)


def test_other_files_are_refused(tmp_path: Path) -> None:
    for text in ("not json", "[1]", '{"bench": "rtf"}'):
        path = tmp_path / "x.jsonl"
        path.write_text(text, "utf-8")
        with pytest.raises(FormatError, match=r"x\.jsonl line 1: found"):
            numbers.read([str(path)])
