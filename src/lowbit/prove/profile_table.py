"""Profiles side by side, as a Markdown table made of what ``lowbit profile --out`` wrote."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit.prove.kernel_names import CATEGORIES
from lowbit.types import FormatError

BEGIN, END = "<!-- made by lowbit profile --tabulate -->", "<!-- end -->"
Found = Mapping[str, Any]
_NEEDS = ("what", "steps", "per_step", "idle_share", "rows")


def read(paths: Sequence[str | os.PathLike[str]]) -> list[dict[str, Any]]:
    """The documents of files. FormatError for one that is absent or something else."""
    found = []
    for path in paths:
        try:
            document = json.loads(Path(path).read_text("utf-8"))
        except (OSError, ValueError) as error:
            raise FormatError(
                f"--tabulate: {path}: found {error}, accepted is what lowbit profile --out wrote"
            ) from error
        missing = [key for key in _NEEDS if not isinstance(document, dict) or key not in document]
        if missing:
            raise FormatError(
                f"--tabulate: {path}: found no {missing[0]!r}, accepted is what lowbit profile --out wrote"
            )
        found.append(document)
    return found


def markdown(found: Sequence[Found]) -> str:
    """One column a profile, figures of a step."""
    lines = [("a step", [str(one["what"]) for one in found])]
    lines += [
        ("without the profiler, ms", _cells(found, lambda x: x.get("wall_ms"), ".2f")),
        ("from the first kernel to the end of the last, ms", _cells(found, lambda x: x["per_step"]["span_ms"], ".2f")),
        ("of it in the decoding loop, ms", _cells(found, _loop, ".2f")),
        ("some kernel runs, ms", _cells(found, lambda x: x["per_step"]["busy_ms"], ".2f")),
        ("none runs, %", _cells(found, lambda x: 100 * x["idle_share"], ".1f")),
        ("kernels", _cells(found, lambda x: x["per_step"]["events"], ".0f")),
        ("launches", _cells(found, lambda x: x["per_step"].get("launches"), ".1f")),
        ("CPU time in launches, µs", _cells(found, lambda x: x["per_step"].get("launch_us"), ".0f")),
    ]
    for name in CATEGORIES:
        row = [next((r for r in x["rows"] if r["category"] == name), None) for x in found]
        if any(row):
            each = [None if r is None else r["ms"] / x["steps"] for r, x in zip(row, found, strict=True)]
            lines.append((f"{name}, ms", [_cell(value, ".3f") for value in each]))
    lines += [
        ("gaps above 5 µs inside the generation", _cells(found, _inside("gap_count"), ".2f")),
        ("their sum, µs", _cells(found, _inside("gap_us"), ".1f")),
        ("of them from the first replay to the last", _cells(found, _inside("step_gaps", "replays"), ".2f")),
        ("boundaries of kernels inside replays, µs", _cells(found, _inside("boundary_us", "replays"), ".1f")),
        ("a kernel, µs", _cells(found, _of_kernel, ".2f")),
        ("kernels that begin before the last one ended", _cells(found, _inside("overlaps", "replays"), ".1f")),
    ]
    head, *rest = [f"| {name} | {' | '.join(cells)} |" for name, cells in lines]
    facts = dict.fromkeys(", ".join(str(x[k]) for k in ("chip", "date") if x.get(k)) for x in found)
    said = "; ".join(fact for fact in facts if fact)
    return "\n".join([*([f"{said}:", ""] if said else []), head, "|---|" + "---|" * len(found), *rest])


def into(path: str | os.PathLike[str], text: str) -> None:
    """Put ``text`` between the two marks of a page. FormatError where it has none."""
    page = Path(path)
    try:
        whole = page.read_text("utf-8")
    except OSError as error:
        raise FormatError(f"--into: {path}: found {error.strerror}, accepted is a page with {BEGIN}") from error
    head, begin, rest = whole.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise FormatError(f"--into: {path}: found no marks, accepted is a page with {BEGIN} and {END}")
    page.write_text(f"{head}{BEGIN}\n\n{text}\n\n{END}{tail}", "utf-8")


def _cells(found: Sequence[Found], of: Callable[[Found], Any], form: str) -> list[str]:
    return [_cell(of(one), form) for one in found]


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else format(value, form)


def _inside(key: str, needs: str | None = None) -> Callable[[Found], float | None]:
    """A figure of the generation, a step; None where there is none, or nothing of what it ``needs``."""

    def of(one: Found) -> float | None:
        some = one.get("inside")
        return (
            None
            if not some or not some["runs"] or (needs is not None and not some[needs])
            else some[key] / one["steps"]
        )

    return of


def _loop(one: Found) -> float | None:
    some = one.get("inside")
    return some["span_us"] / 1e3 / one["steps"] if some and some["runs"] and some["of"] == "generation" else None


def _of_kernel(one: Found) -> float | None:
    some = one.get("inside")
    return some["boundary_mean_us"] if some and some["replays"] else None
