"""JSON lines of the benches as bar charts: a panel a case, a bar a row, longer is faster."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.prove.report import Bar, bars

Line = Mapping[str, Any]


def layers(lines: Sequence[Line]) -> str:
    """Lines of ``bench layers``: a panel for every shape, M and number of threads."""
    panels: dict[str, list[Bar]] = {}
    for x in lines:
        cached = ", in cache" if x["in_cache"] else ""
        title = f"{x['n']}×{x['k']}, M = {x['m']}, {_threads(x)}{cached}"
        note = f"{x['median_ms']:.3g} ms" if x["ratio"] is None else f"{x['median_ms']:.3g} ms, ×{x['ratio']:.2f}"
        panels.setdefault(title, []).append(Bar(x["name"], x["gops"], note, "tier" in x))
    return bars(list(panels.items()), f"GOPS by median time; × is the time over that of the first row. {_where(lines)}")


def models(lines: Sequence[Line]) -> str:
    """Lines of ``bench models``: panels of decoding and of prefill for every model and number of threads."""
    panels: dict[str, list[Bar]] = {}
    for what, key in (("decoding", "decode"), ("prefill", "prefill")):
        for x in lines:
            title = f"{what}, {_threads(x)}: {x['model']}"
            ratio = x[f"{key}_ratio"]
            note = f"{x[key]:.4g}" if ratio is None else f"{x[key]:.4g}, ×{ratio:.2f}"
            panels.setdefault(title, []).append(Bar(x["name"], x[key], note, x["ours"]))
    return bars(list(panels.items()), f"Tokens a second, medians; × is the time over the first row's. {_where(lines)}")


def _threads(line: Line) -> str:
    return f"{line['threads']} thread{'s' * (line['threads'] > 1)}"


def _where(lines: Sequence[Line]) -> str:
    return "; ".join(dict.fromkeys(f"{x['chip']}, {x['date']}" for x in lines))
