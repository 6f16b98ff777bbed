"""Times of the INT4 GEMM on chips that nobody here has, *predicted* from its instructions: ``python -m lowbit.bench.predict``.

The main loop is read from the disassembly of what was built; the chip's rates are its published ones. A tile takes the
longer of what its tensor cores and its schedulers need for the loop, a product as many rounds of tiles as the
multiprocessors need, and never less than its weight takes from memory (x and y too, where half of L2 cannot hold them).
Launch, the first loads and the end of a tile are not in it, so a measured time will be longer.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.bench import sass
from lowbit.bench.timer import machine
from lowbit.types import FormatError

LAYER = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}  # N, K
ROWS = (1, 16, 172, 685, 1890)
CHANNELS, COLUMNS, WARPS = 128, 256, 8  # of a tile, a block of the loop, a CTA: gemm_int4.cu
PRODUCTS = 16 * 8 * 64  # of one IMMA.16864


class Chip(NamedTuple):
    """Published rates. ``int4`` products a cycle and multiprocessor; ``registers`` a multiprocessor."""

    name: str
    sm: str
    multiprocessors: int
    hertz: float
    int4: int
    schedulers: int
    registers: int
    bytes_a_second: float
    l2: int


# 242 dense INT8 and 485 dense INT4 TOPS at 2.04 GHz: 1024 and 2048 products a cycle; 300 GB/s
L4 = Chip("NVIDIA L4", "sm_89", 58, 2.04e9, 2048, 4, 65536, 300e9, 48 << 20)


class Loop(NamedTuple):
    """One pass of the main loop, 256 columns: of a warp its matrix instructions; instructions issued by the CTA."""

    tokens: int
    matrix: int
    issued: int
    registers: int


def copies(tokens: int) -> int:
    """Copies of 16 bytes that a warp issues in one pass: rows of x and of the weight, and one of scales, of x's or the
    weight's or, in the last warps, of none."""
    return (tokens + CHANNELS) * 8 // (WARPS * 32) + 1


def loop_of(chip: Chip, tokens: int) -> Loop:
    """Read the loop of the tile of that many rows; FormatError where it does not look as this reader knows it."""
    for name, code in sass.functions(chip.sm).items():
        if re.search(rf"gemm_int4ILi{tokens}E", name):
            spans = sass.loops(code, "IMMA.16864.S4.S4")
            way = sass.fewest(code, *spans[0], "LDGSTS", copies(tokens)) if spans else None
            if way is not None:
                matrix = sum("IMMA" in line for line in code[spans[0][0] : spans[0][1]])
                return Loop(tokens, matrix, way * WARPS, sass.usage(chip.sm)[name].registers)
    raise FormatError(f"gemm_int4<{tokens}> for {chip.sm}: found no loop with {copies(tokens)} copies")


def cycles(chip: Chip, loop: Loop) -> tuple[float, float]:
    """Cycles of one pass: (tensor cores, schedulers)."""
    return loop.matrix * WARPS * PRODUCTS / chip.int4, loop.issued / chip.schedulers


def product(chip: Chip, loops: dict[int, Loop], n: int, k: int, m: int) -> dict[str, Any]:
    """Microseconds of y [m, n], and what bounds it; the tile is chosen as launch_gemm_int4 does."""
    across, blocks = -(-n // CHANNELS), -(-k // COLUMNS)
    loop = loops[32 if m <= 32 or across * -(-m // 64) < chip.multiprocessors else 64]
    tensor, issue = cycles(chip, loop)
    together = max(1, chip.registers // (loop.registers * WARPS * 32))  # CTAs that one multiprocessor holds
    tiles = across * -(-m // loop.tokens)
    rounds = math.ceil(tiles / (chip.multiprocessors * together)) * together
    compute = rounds * blocks * max(tensor, issue) / chip.hertz
    weight, rows = n * k / 2 + n * k / 64 * 4, m * k / 2 + m * k / 64 * 4 + m * n * 2
    memory = (weight + (rows if rows > chip.l2 / 2 else 0)) / chip.bytes_a_second
    bound = "memory" if memory > compute else "schedulers" if issue > tensor else "tensor cores"
    return {"us": round(1e6 * max(compute, memory), 2), "bound": bound}


def lines(chip: Chip = L4) -> Iterator[dict[str, Any]]:
    """One line a shape and M, and what the loop is; FormatError without a build or the tools."""
    loops = {tokens: loop_of(chip, tokens) for tokens in (32, 64)}
    here = machine()
    known = {"bench": "predicted", "chip": chip.name, **{key: here[key] for key in ("lowbit", "commit", "date")}}
    for loop in loops.values():
        tensor, issue = cycles(chip, loop)
        each = loop.issued / (loop.matrix * WARPS)
        yield {
            **known, "loop": f"gemm_int4<{loop.tokens}>", "matrix": loop.matrix, "issued": round(each, 1),
            "tensor_cycles": tensor, "issue_cycles": issue,
        }  # fmt: skip
    for m in ROWS:
        found = {name: product(chip, loops, n, k, m) for name, (n, k) in LAYER.items()}
        for name, one in found.items():
            n, k = LAYER[name]
            yield {**known, "int4": name, "shape": f"{n}x{k}", "m": m, **one}
        yield {**known, "layer": "w4a4", "m": m, "us": round(sum(one["us"] for one in found.values()), 2)}


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="python -m lowbit.bench.predict", description=__doc__)
    p.add_argument("--out", metavar="FILE", help="write the JSON lines here instead of printing them")
    args = p.parse_args(argv)
    try:
        text = "".join(json.dumps(line) + "\n" for line in lines())
    except FormatError as error:
        print(error, file=sys.stderr)
        return 2
    if args.out:
        Path(args.out).write_text(text, "utf-8")
    else:
        print(text, end="")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
