"""docs/numbers.md is what the generator makes of the kept JSON lines, to the letter."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from lowbit.bench import accuracy, numbers
from lowbit.types import FormatError

ROOT = Path(__file__).parents[1]


def test_the_page_is_generated() -> None:
    files = sorted(str(path) for path in (ROOT / "bench" / "results").glob("*.jsonl"))
    assert files
    assert (ROOT / "docs" / "numbers.md").read_text("utf-8") == numbers.page(numbers.read(files))


def test_every_line_is_in_a_table() -> None:
    files = sorted(str(path) for path in (ROOT / "bench" / "results").glob("*.jsonl"))
    counted(numbers.read(files))


def counted(lines: list[dict[str, Any]]) -> None:
    """A row a line of speed; one for all spans of a way to quantize; and the heads of the tables."""
    judged = [x for x in lines if x["bench"] == "accuracy"]
    rows = [row for row in numbers.page(lines).splitlines() if row.startswith("| ") and "---" not in row]
    wanted = len(lines) - len(judged) + len({accuracy.row_of(x) for x in judged})
    assert len(rows) == wanted + numbers.page(lines).count("\n|---|")
    page = numbers.page(lines)
    assert all(f"{x['ratio']:.4f}" in page for x in judged)
    assert all(f"{x['kl']:.4f} ± {x['kl_se']:.4f}" in page for x in judged if "kl" in x)


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


def judged(name: str, table: str, act: str, bits: float, *ratios: float) -> list[dict[str, Any]]:
    """Lines of bench/accuracy.py, one a span."""
    base = {"bench": "accuracy", "model": "m", "text": "t", "context": 1024, "calibration": ["c4", 32768, 256],
            "device": "d", "torch": "2", "lowbit": "0", "commit": "c", "date": "2026", "name": name, "table": table,
            "act": act, "bits_per_weight": bits, "quantize_s": 12.3, "method": "gptq", "options": {"group": 64}, "se": 0.004, "kl": 0.1, "kl_se": 0.002}  # fmt: skip
    return [
        {**base, "span": [start, start + 8192], "ppl_ref": 19.5 + i, "ratio": ratio, "kl": 0.1 + ratio / 100}
        for i, (start, ratio) in enumerate(zip((60000, 100000), ratios, strict=True))
    ]


def test_accuracy_stands_beside_what_was_to_be_reached(tmp_path: Path) -> None:
    made = [
        *judged("w4a4 rank 16", "w4a4", "a4", 5.0, 1.16, 1.21),
        *judged("w4 g64 symmetric, gptq", "w4", "a8", 4.27, 1.11, 1.115),
        *judged("w4 g64 asymmetric, gptq", "w4", "a8", 4.4, 1.10, 1.10),  # more bits than its target allows
        *({**x, "activation_bits": 4.98} for x in judged("w4a4 rank 16", "w4a4", "a4, budget 5", 5.0, 1.15, 1.15)),
        *judged("w4a4 rank 16, iterative", "w4a4", "a4", 5.0, 3.06, 3.1),
        *({**x, "method": "rtn"} for x in judged("w4 g64 symmetric, rtn", "w4", "a4", 4.25, 4.0, 4.1)),
    ]
    peer = {"settings": {"iters": 200, "samples": 128}, "quantize_device": "GPU"}
    for x in judged("tool 1.0, g64 symmetric", "peers", "a16", 4.25, 1.2, 1.2):
        made.append({key: value for key, value in {**x, **peer}.items() if key not in ("kl", "kl_se")})
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps(x) + "\n" for x in made), "utf-8")
    lines = numbers.read([str(path)])
    counted(lines)
    page = numbers.page(lines)
    rows = {
        row.split("|")[1].strip(): row for row in page.splitlines() if row.startswith("| w4") and "budget" not in row
    }
    assert "| a4, budget 5 (4.98 bits) |" in page
    assert "| **1.1600** ± 0.0040 |" in rows["w4a4 rank 16"] and "| 1.2100 ± 0.0040 |" in rows["w4a4 rank 16"]
    assert "| 1.2 (1.14) |" in rows["w4a4 rank 16"] and "**1.1150**" in rows["w4 g64 symmetric, gptq"]
    assert "1.12" not in rows["w4 g64 asymmetric, gptq"] and "**" not in rows["w4 g64 asymmetric, gptq"]
    assert "tokens 60000 … 68191: 19.500; tokens 100000 … 108191: 20.500" in page
    assert "| iters 200, samples 128 | 12 s on GPU |" in page
    drawn = {name: "".join(ElementTree.fromstring(svg).itertext()) for name, svg in numbers.charts(lines).items()}
    assert all(f"](charts/{name})" in page for name in drawn)
    assert "1 points not shown" in drawn["accuracy-1-bits.svg"]  # 4.1 is off the scale
    assert "(1 above 1.6 left out)" in drawn["accuracy-1-loss.svg"]
    assert "21.0 ± 0.4 %, 5.00 bits" in drawn["accuracy-1-loss.svg"]


def test_every_target_names_a_recipe_of_the_script() -> None:
    import importlib.util

    spec = importlib.util.spec_from_file_location("accuracy_script", ROOT / "bench" / "accuracy.py")
    assert spec is not None and spec.loader is not None
    script = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(script)
    known = {(recipe.name, act) for recipe in script.RECIPES for act in recipe.acts}
    assert set(accuracy.NAMED) <= known
    assert {group for group, _ in accuracy.GROUPS} <= {r.scheme.group_size for r in script.RECIPES if r.table == "w4"}
    assert {recipe.table for recipe in script.RECIPES} <= set(accuracy.TABLES)
