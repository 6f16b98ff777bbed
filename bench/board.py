#!/usr/bin/env python3
"""Times lowbit's linears on this board and prints them beside published figures for the same shapes.

Needs Python, torch and the lowbit wheel, nothing else:  python board.py [--quick] [--threads 4] [--json board.jsonl]

Every case runs `lowbit bench layers`: weights rotated out of the caches, medians, activation quantization included. The
published figures, the ones to beat, are of a Raspberry Pi 5 (4 x Cortex-A76 2.4 GHz), a Raspberry Pi 4 (4 x
Cortex-A72 1.8 GHz) and a 12th-generation mobile x86 with AVX-VNNI, 4-bit weights in groups of 128. Only the column of
this board's own chip compares like with like.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from pathlib import Path
from typing import Any, NamedTuple


class Case(NamedTuple):
    scheme: str
    n: int  # out features
    k: int  # in features
    m: int
    published: dict[str, float]  # board -> ms


PI5, PI4, LAPTOP = "Pi 5", "Pi 4", "x86 laptop"
CASES = (
    Case("w4a8", 4096, 4096, 1, {PI5: 1.10, PI4: 8.76, LAPTOP: 0.16}),
    Case("w4a8", 11008, 4096, 1, {PI5: 3.44, PI4: 22.68}),
    Case("w4a8", 4096, 11008, 1, {PI5: 3.57, PI4: 10.4}),
    Case("w4a8", 4096, 4096, 128, {PI5: 23.2, PI4: 209.0}),
    Case("w8a8", 4096, 4096, 1, {PI5: 1.48, PI4: 11.45}),
    Case("fp16", 4096, 4096, 1, {PI5: 2.80, PI4: 13.5, LAPTOP: 0.25}),
)


def board() -> str:
    """What the device tree or the CPU calls itself, for the head of the table."""
    for path in ("/proc/device-tree/model", "/sys/firmware/devicetree/base/model"):
        try:
            return Path(path).read_text(errors="replace").strip("\0\n ")
        except OSError:
            continue
    from lowbit.bench.timer import machine

    return str(machine()["chip"])


def run(case: Case, threads: int, seconds: float, tier: str) -> list[dict[str, Any]]:
    """The JSON lines of `lowbit bench layers` for one case."""
    from lowbit.bench import layers

    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "lines"
        options = [
            "--shape", f"{case.n}x{case.k}", "--M", str(case.m), "--schemes", case.scheme, "--activation", "group,token",
            "--threads", str(threads), "--seconds", str(seconds), "--tier", tier, "--peers", "", "--json", str(path),
        ]  # fmt: skip
        if layers.main(options):
            raise SystemExit("lowbit bench layers failed")
        return [json.loads(line) for line in path.read_text().splitlines()]


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("--threads", type=int, default=os.cpu_count() or 1)
    p.add_argument("--seconds", type=float, default=3.0, help="a case and kernel")
    p.add_argument("--quick", action="store_true", help="4096 x 4096 at M = 1 only, a fraction of a second each")
    p.add_argument("--tier", default="auto", help="auto, all, or names")
    p.add_argument("--json", type=Path, help="append every line of the bench to this file")
    a = p.parse_args()
    boards = sorted({name for case in CASES for name in case.published}, reverse=True)
    cases = [c for c in CASES if not a.quick or (c.n == c.k and c.m == 1)]
    rows: list[list[str]] = []
    for case in cases:
        for line in run(case, a.threads, 0.3 if a.quick else a.seconds, a.tier):
            if a.json:
                with a.json.open("a", encoding="utf-8") as file:
                    file.write(json.dumps(line) + "\n")
            published = [f"{case.published[b]:g}" if b in case.published else "-" for b in boards]
            shape = f"{case.n}x{case.k} M={case.m}"
            rows.append([shape, line["name"], f"{line['median_ms']:.3f}", f"{line['gb_per_s']:.1f}", *published])
    head = ["shape", "ours", "median ms", "GB/s", *(f"published {b}" for b in boards)]
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    print(f"\n{board()}, {a.threads} threads; medians of this board, and published medians of others in ms")
    for row in [head, *rows]:
        print("  ".join(cell.ljust(w) if i < 2 else cell.rjust(w) for i, (cell, w) in enumerate(zip(row, widths))))


if __name__ == "__main__":
    main()
