"""``lowbit bench numbers``: the JSON lines of the benches as one Markdown page. Nothing is typed by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit.types import FormatError

# What makes two lines parts of one run, and so of one table.
RUN = ("chip", "torch", "lowbit", "commit", "date", "pages", "in_cache", "source")
HEAD = """# Numbers

Made by `lowbit bench numbers` from the JSON lines that `lowbit bench layers --json` wrote; each table is one interleaved
run on one machine, medians over the stated repeats. `x` is the time over that of the first row of its shape: above 1 is
slower than ours. The error is the relative Frobenius distance to the float product on Gaussian x.
"""


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of all files; FormatError names a file and line that is no JSON object of ``bench layers``."""
    lines: list[dict[str, Any]] = []
    for path in paths:
        for number, text in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise FormatError(f"{path} line {number}: found no JSON ({error.msg})") from None
            if not isinstance(line, dict) or line.get("bench") != "layers":
                raise FormatError(f"{path} line {number}: found {text[:40]!r}, accepted is a line of bench layers")
            lines.append({**line, "source": Path(path).name})
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One run: a row a competitor and shape, with what the run ran on above it."""
    first = lines[0]
    where = "in cache" if first["in_cache"] else "weights rotated out of cache"
    commit = f", commit {first['commit'][:12]}" if first.get("commit") else ""
    rows = [
        f"## {first['chip']}, {first['date']}, {where}",
        "",
        f"lowbit {first['lowbit']}{commit}, torch {first['torch']}; pages: {first['pages']}; lines: `{first['source']}`",
        "",
        "| N×K | M | threads | | median ms | min ms | GOPS | GB/s | error | x | repeats |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    rows += [
        f"| {x['n']}×{x['k']} | {x['m']} | {x['threads']} | {x['name']} | {x['median_ms']:.4f} | {x['min_ms']:.4f} "
        f"| {x['gops']:.0f} | {x['gb_per_s']:.1f} | {x['error']:.1e} | {x['ratio']:.2f} | {x['repeats']} |"
        for x in lines
    ]
    return "\n".join(rows)


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: runs in the order in which they are first seen."""
    runs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for line in lines:
        runs.setdefault(tuple(str(line.get(key)) for key in RUN), []).append(line)
    return "\n\n".join([HEAD.rstrip(), *(table(run) for run in runs.values())]) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="lowbit bench numbers", description=__doc__)
    p.add_argument("files", nargs="+", metavar="JSONL", help="what lowbit bench layers --json wrote")
    p.add_argument("--out", metavar="FILE", help="write the page here instead of printing it")
    args = p.parse_args(argv)
    text = page(read(args.files))
    if args.out:
        Path(args.out).write_text(text, "utf-8")
    else:
        print(text, end="")
    return 0
