#!/usr/bin/env python3
"""Instructions, modelled cycles and predicted times of the aarch64 kernels as a Markdown table, for docs/kernels.md.

    python bench/arm_counts.py build/py3-none-linux_aarch64/kernel_check      (tests/test_kernel_check.py builds it)

Counted under qemu-user and modelled by llvm-mca on the executed trace (tests/armcount.py). Every millisecond here is
predicted: cycles are those of warm caches, and the factor from the model to a board is a guess from published figures.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import NamedTuple

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
import armcount  # noqa: E402

SIDE = 4096
KERNEL = "lowbit3cpu.*(int_|linear_|float_|finish_row|expand)"


class Core(NamedTuple):
    label: str
    qemu: str
    model: str  # of llvm-mca, with the width of the front end
    ghz: float
    gb_per_s: float | None  # of the whole board
    factor: float  # board over model: 1.25 on A76 and V1, 1.6 on A72, from published figures


A72 = Core("Pi 4 (A72, 1.8 GHz)", "cortex-a72", "cortex-a72:3", 1.8, 4.3, 1.6)
A76 = Core("Pi 5 (A76, 2.4 GHz)", "cortex-a76", "neoverse-n1:4", 2.4, 12.0, 1.25)
V1 = Core("Neoverse V1, 2.6 GHz", "max", "neoverse-v1:8", 2.6, None, 1.25)

# tier, core, bits, activation (0 one scale a row, 1 one a group, 2 float), M, group
ROWS = [
    *[("dotprod", A76, 4, a, 1, g) for g, a in ((128, 0), (128, 1), (64, 1), (32, 1))],
    *[("neon", A72, 4, a, 1, g) for g, a in ((128, 0), (128, 1), (64, 1), (32, 1))],
    ("dotprod", V1, 4, 0, 1, 128),
    *[("dotprod", A76, 4, a, 128, g) for g, a in ((128, 0), (128, 1), (64, 1), (32, 1))],
    *[("neon", A72, 4, a, 128, g) for g, a in ((128, 0), (128, 1), (64, 1), (32, 1))],
    *[("i8mm", V1, 4, a, 128, g) for g, a in ((128, 0), (128, 1), (64, 1), (32, 1))],
    *[("dotprod", A76, 4, 0, m, 128) for m in (2, 4, 7)],
    *[("neon", A72, 4, 0, m, 128) for m in (2, 4, 7)],
    *[("i8mm", V1, 4, 0, m, 128) for m in (2, 4, 7)],
    ("dotprod", A76, 8, 0, 1, SIDE),
    ("neon", A72, 8, 0, 1, SIDE),
    ("dotprod", A76, 8, 0, 128, SIDE),
    ("neon", A72, 8, 0, 128, SIDE),
    ("i8mm", V1, 8, 0, 128, SIDE),
    ("dotprod", A76, 16, 2, 1, SIDE),
    ("neon", A72, 16, 2, 1, SIDE),
]


def megabytes(bits: int, group: int) -> float:
    tail = 0 if bits == 16 else 64 / 16 * SIDE / group
    return SIDE * (SIDE * bits / 8 + tail) / 1e6


def row(elf: Path, tier: str, core: Core, bits: int, activation: int, m: int, group: int) -> str:
    n = 16 if m == 128 else 32 if bits == 16 else 256 if m == 1 else 64
    arguments = ["once", tier, *map(str, (bits, activation, m, n, SIDE, group))]
    r = armcount.count(elf, arguments, KERNEL, m * n * SIDE, core.qemu, [core.model])
    cycles = next(iter(r["cycles"].values()))
    compute = m * SIDE * SIDE / 64 * cycles / core.ghz / 4e6  # ms on four cores
    size = megabytes(bits, group)
    memory = size / core.gb_per_s if core.gb_per_s else 0.0
    goal = max(compute * core.factor, memory * 1.07)
    what = {4: "W4", 8: "W8", 16: "fp16"}[bits] + {0: " token", 1: " group", 2: ""}[activation]
    shown = "-" if group == SIDE else str(group)
    floor = f"{memory:.2f}" if memory else "-"
    return (
        f"| {core.label} | `{tier}` | {what} | {m} | {shown} | {r['total']:.2f} | {r['dot']:.2f} | {cycles:.2f} "
        f"| {compute:.3g} | {floor} | {goal:.3g} |"
    )


def main() -> None:
    p = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    p.add_argument("elf", type=Path)
    a = p.parse_args()
    print("| core | tier | weights, activations | M | group | instructions | of them dot products | cycles (model) "
          "| compute, 4 cores, ms | DRAM floor, ms | *predicted* ms |")  # fmt: skip
    print("|" + "---|" * 11)
    for r in ROWS:
        print(row(a.elf, *r), flush=True)


if __name__ == "__main__":
    main()
