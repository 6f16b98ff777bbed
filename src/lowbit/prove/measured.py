"""JSON lines of the benches beside what the roofline predicts for the same work."""

from __future__ import annotations

import json
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.prove import work
from lowbit.prove.chips import Chip
from lowbit.prove.roofline import Row, place
from lowbit.prove.work import PRECISIONS, Work
from lowbit.types import FormatError

# bench/gpu_check.py names the linears of an OmniVoice layer
_SHAPES = {"qkv": (4096, 1024), "o": (1024, 2048), "gate_up": (6144, 1024), "down": (1024, 3072)}
_MODES = {"w8": "w8a8", "w4ch": "w4a8", "w4two": "w4a8", "w4grp": "w4a8"}
_PEERS = {"fp16": "fp16", "fp8": "fp8", "int_mm": "w8a8"}
_NAMES = {"cuBLAS float16": "fp16", "fp8 _scaled_mm": "fp8", "int8 _int_mm": "w8a8"}
_WIDE = {"float32": 4, "float16": 2, "bfloat16": 2}


class Measured(NamedTuple):
    """``name`` took ``seconds`` for ``items``, on the machine ``chip`` (with ``threads`` on a CPU, else None)."""

    name: str
    items: tuple[Work, ...]
    precision: str
    m: int
    seconds: float
    chip: str
    threads: int | None


class Compared(NamedTuple):
    """One measured piece of work, and its floor on a chip."""

    measured: Measured
    rows: list[Row]

    @property
    def predicted(self) -> float:
        """Seconds."""
        return sum(row.seconds for row in self.rows)

    @property
    def operations(self) -> int:
        return sum(row.operations for row in self.rows)

    @property
    def intensity(self) -> float:
        """Operations a byte, of all rows together."""
        return self.operations / sum(row.bytes for row in self.rows)

    @property
    def bound(self) -> str:
        """Of the row that takes longest."""
        return max(self.rows, key=lambda row: row.seconds).bound

    @property
    def share(self) -> float:
        """Of the roof that was reached: predicted over measured."""
        return self.predicted / self.measured.seconds

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        m = self.measured
        return {
            "name": m.name, "m": m.m, "precision": m.precision, "chip": m.chip, "gflop": self.operations / 1e9,
            "flop_per_byte": self.intensity, "bound": self.bound, "predicted_us": 1e6 * self.predicted,
            "measured_us": 1e6 * m.seconds, "share_of_roof": self.share,
        }  # fmt: skip


def read(paths: Iterable[str | os.PathLike[str]]) -> tuple[list[Measured], int]:
    """What the lines time of linears, and how many lines are of something else (other precisions, whole models,
    weights that stay in a cache). FormatError for a file that is absent or a line that is no JSON object."""
    found: list[Measured] = []
    others = 0
    for path in paths:
        try:
            lines = Path(path).read_text("utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            raise FormatError(f"--measured: {path}: found {error}, accepted are JSON lines of lowbit bench") from error
        for number, text in enumerate(lines, 1):
            if not text.strip():
                continue
            try:
                line = json.loads(text)
                if not isinstance(line, dict):
                    raise ValueError(f"a JSON {type(line).__name__}")
                some = _of_line(line)
            except (ValueError, KeyError, TypeError) as error:
                what = f"no {error}" if isinstance(error, KeyError) else str(error)
                raise FormatError(
                    f"--measured: {path}: line {number}: found {what}, accepted are JSON lines of lowbit bench"
                ) from error
            found += some
            others += not some
    return found, others


def compare(measured: Sequence[Measured], chip: Chip, threads: int | None = None) -> list[Compared]:
    """Those that ran on ``chip`` (with ``threads``, where given). FormatError where none did."""
    mine = [x for x in measured if x.chip == chip.name or chip.matches(x.chip)]
    if measured and not mine:
        chips = ", ".join(dict.fromkeys(x.chip for x in measured))
        raise FormatError(f"--measured: found lines of {chips}, accepted with this --device are those of {chip.name}")
    some = [x for x in mine if threads is None or x.threads in (None, threads)]
    if mine and not some:
        counts = ", ".join(str(n) for n in sorted({x.threads for x in mine if x.threads is not None}))
        raise FormatError(f"--measured: found lines of {counts} threads, accepted with --threads {threads} are its own")
    return [Compared(x, [place(item, chip) for item in x.items]) for x in some]


def _of_line(line: Mapping[str, Any]) -> list[Measured]:
    bench = line.get("bench")
    if bench == "cuda":
        return _of_check(line)
    if bench == "cuda-layers":
        return _of_cuda_layers(line)
    return _of_layers(line) if bench == "layers" and "median_ms" in line else []


def _linears(
    sizes: Sequence[tuple[int, int]], m: int, precision: str, rank: int, quantize: bool = False
) -> tuple[Work, ...]:
    p = PRECISIONS[precision]._replace(low_rank=rank > 0)
    found: list[Work] = []
    for n, k in sizes:
        both = work.linear(m, n, k, p, rank=rank)
        found += both if quantize else both[-1:]
    return tuple(found)


def _size(shape: str) -> tuple[int, int]:
    if shape in _SHAPES:
        return _SHAPES[shape]
    n, k = shape.split("x")
    return int(n), int(k)


def _of_check(line: Mapping[str, Any]) -> list[Measured]:
    """bench/gpu_check.py: products of ours at the tile the table chose, and torch's. Microseconds."""
    chip, rank = str(line["chip"]), int(line["rank"])

    def one(name: str, sizes: Sequence[tuple[int, int]], precision: str, us: float, low: int) -> Measured:
        items = _linears(sizes, line["m"], precision, low)
        return Measured(name, items, precision, line["m"], us * 1e-6, chip, None)

    for kind, key in (("gemm", "table"), ("gemv", "us")):
        if kind in line:
            mode, shape = line[kind], line["shape"]
            return [one(f"{kind} {mode} {shape}", [_size(shape)], _MODES[mode], line[key], rank)]
    if "layer" in line:
        mode, every = line["layer"], list(_SHAPES.values())
        return [one(f"layer {mode}: 4 products", every, _MODES[mode], line["linears"], rank)]
    if "peers" in line:
        shape = line["peers"]
        sizes = list(_SHAPES.values()) if shape == "layer" else [_size(shape)]
        return [one(f"torch {key} {shape}", sizes, p, line[key], 0) for key, p in _PEERS.items() if key in line]
    return []


def _of_cuda_layers(line: Mapping[str, Any]) -> list[Measured]:
    """``lowbit bench layers --device cuda``: weights out of the cache. Microseconds."""
    if "left_out" in line:
        return []
    name, rank, quantize = str(line["name"]), 0, False
    precision = _NAMES.get(name)
    if name.startswith("lowbit "):
        precision, rank, quantize = _MODES.get(name.split()[1]), int(line["rank"]), name.endswith("with quantize")
    if precision is None:
        return []
    n, k, m = line["n"], line["k"], line["m"]
    items = _linears([(n, k)], m, precision, rank, quantize)
    return [Measured(f"{name} {n}x{k}", items, precision, m, line["cold_us"] * 1e-6, str(line["chip"]), None)]


def _of_layers(line: Mapping[str, Any]) -> list[Measured]:
    """``lowbit bench layers`` on a CPU: x is quantized inside the call. Milliseconds."""
    precision = line.get("scheme")
    if precision not in PRECISIONS or line["in_cache"]:
        return []
    n, k, m, wide = line["n"], line["k"], line["m"], _WIDE[line["x_dtype"]]
    group = line["group"] if precision == "w4a8" else work.GROUP
    items = tuple(work.linear(m, n, k, PRECISIONS[precision], wide=wide, group=group))
    chip, threads = str(line["chip"]), int(line["threads"])
    return [Measured(f"{line['name']} {n}x{k}", items, precision, m, line["median_ms"] * 1e-3, chip, threads)]
