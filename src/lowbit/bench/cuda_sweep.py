"""Lines of ``lowbit bench layers --device cuda`` as tables: every competitor over M."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.bench import markdown

Line = Mapping[str, Any]
TOLD = """Microseconds, cold / warm L2: graphs of as many launches as it takes copies of the weight to leave L2 (cold) and of one
copy (warm), competitors in turns, medians (`lowbit bench layers --device cuda`)."""


def chapter(lines: Sequence[Line]) -> str:
    """A table a chip and shape: a row a competitor, a column an M; the last line of a case counts."""
    parts = ["## CUDA layers over M", TOLD]
    latest = {
        (x["chip"], x["n"], x["k"], x["name"], x.get("m")): x for x in sorted(lines, key=lambda x: str(x["date"]))
    }
    for chip, n, k in dict.fromkeys(key[:3] for key in latest):
        mine = {key[3:]: x for key, x in latest.items() if key[:3] == (chip, n, k) and "cold_us" in x}
        left = {key[3:]: x for key, x in latest.items() if key[:3] == (chip, n, k) and "left_out" in x}
        sizes = sorted({int(m) for _, m in mine if m is not None})
        rows = [
            [name, *(_cell(mine.get((name, m))) for m in sizes)] for name in dict.fromkeys(name for name, _ in mine)
        ]
        any_line = next(iter({**mine, **left}.values()))
        facts = f"{chip}, {n}×{k}: torch {any_line['torch']}, {any_line['date']}; lines: `{any_line['source']}`"
        parts += [facts, markdown.table(("", *(f"M={m}" for m in sizes)), rows)]
        if left:
            told = (f"{name}{'' if m is None else f' (M={m})'}: {x['left_out']}" for (name, m), x in left.items())
            parts.append("Left out: " + "; ".join(told) + ".")
    return "\n\n".join(parts)


def _cell(line: Line | None) -> str:
    return "" if line is None else f"{line['cold_us']:.1f} / {line['warm_us']:.1f}"
