"""``lowbit eval --report``: the results of an evaluation as one page."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from lowbit.prove import report
from lowbit.prove.heat import grid, heat_map, scale_of, sensitivity_bars
from lowbit.prove.report import Point
from lowbit.prove.several import name_of


def write(
    path: str | os.PathLike[str], found: Mapping[str, Any], budgets: Mapping[str, Mapping[str, Any]], text: str
) -> None:
    """``found`` is what ``several.evaluate`` gives, ``budgets`` {directory: what its ``--budget`` measured}."""
    report.write(path, evaluation(found, budgets, text))


def evaluation(found: Mapping[str, Any], budgets: Mapping[str, Mapping[str, Any]], text: str) -> str:
    """The page: table, quality against size, the error of every layer, what budgets were spent on."""
    rows = found["models"]
    directories = [row["model"] for row in rows]
    names = {d: name_of(d, directories) for d in directories}
    against = f", against {found['reference']}" if found["reference"] else ""
    parts = [
        report.paragraph(
            f"{rows[0]['scored']} tokens of {Path(text).name} in {rows[0]['windows']} windows{against}. "
            "± is the standard error of a paired comparison over tokens."
        ),
        report.table(*_table(rows, names)),
    ]
    compared = found["reference"] is not None
    drawn = [row for row in rows if not compared or "ratio" in row]  # the reference's own ratio is 1
    if len(rows) > 1 and drawn:
        key = "ratio" if compared else "perplexity"
        points = {
            kind: [Point(r["bits_per_weight"], r[key], names[r["model"]]) for r in some]
            for kind, some in _kinds(drawn).items()
        }
        y = "perplexity over the reference's" if compared else "perplexity"
        bits = "bits a weight, everything stored of the linears counted"
        drawing = report.plot(points, bits, y, y_from=1.0 if compared else None)
        parts += ["<h2>Quality against size</h2>", report.figure(drawing, "Lower and further left is better.")]
    scale = scale_of([grid(row["layers"]) for row in rows if row.get("layers")])
    for row in rows:
        if row.get("layers"):
            errors = [entry["error"] for entry in row["layers"]]
            what = (
                f"{names[row['model']]}: error of each linear's output on {row['layers'][0]['rows']} tokens of the text"
            )
            caption = (
                f"Relative Frobenius distance to the reference's output for the reference's input. Mean "
                f"{sum(errors) / len(errors):.4f}, least {min(errors):.4f}, most {max(errors):.4f}."
            )
            parts += ["<h2>Layer by layer</h2>", report.figure(heat_map(grid(row["layers"]), what, scale), caption)]
    for directory, budget in budgets.items():
        what = f"{names[directory]}: KL a token per million weights, one input at 4 bits and the rest at 8"
        caption = (
            f"Measured on {budget['tokens']} tokens of the calibration text. Asked for {budget['asked']:g} bits of activations "
            f"on average, chosen {budget['average']:.3f}. KL to 8 bits everywhere: {budget['as_chosen']:.4f} as chosen, "
            f"{budget['everything_at_4']:.4f} at 4 bits everywhere."
        )
        parts += ["<h2>Sensitivity</h2>", report.figure(sensitivity_bars(budget, what), caption)]
    return report.page("What quantization cost", parts)


def _kinds(rows: list[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
    """Rows by what made them: plain, or the format of the checkpoint."""
    kinds: dict[str, list[Mapping[str, Any]]] = {}
    for row in rows:
        kinds.setdefault(row["format"] or "plain", []).append(row)
    return kinds


def _table(rows: list[Mapping[str, Any]], names: Mapping[str, str]) -> tuple[list[str], list[list[object]]]:
    """Columns that no row has are left out."""
    cells: dict[str, list[object]] = {
        "model": [names[r["model"]] for r in rows],
        "perplexity": [f"{r['perplexity']:.3f}" for r in rows],
        "ratio": [_pair(r, "ratio") for r in rows],
        "KL": [_pair(r, "kl") for r in rows],
        "top-1": [f"{100 * r['top1']:.1f} %" if "top1" in r else None for r in rows],
        "same text": [f"{r['generation']['first_difference']:.1f}" if "generation" in r else None for r in rows],
        "bits/weight": [f"{r['bits_per_weight']:.3f}" for r in rows],
        "MB on disk": [f"{r['disk_bytes'] / 1e6:.1f}" for r in rows],
        "seconds": [f"{r['seconds']:.1f}" for r in rows],
    }
    kept = {name: column for name, column in cells.items() if any(cell is not None for cell in column)}
    return list(kept), [list(row) for row in zip(*kept.values(), strict=True)]


def _pair(row: Mapping[str, Any], key: str) -> str | None:
    if key not in row:
        return None
    return f"{row[key]:.4f} ± {row[key + '_se']:.4f}" if math.isfinite(row[key]) else "not finite"
