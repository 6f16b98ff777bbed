"""Lines of ``bench/gpu_check.py`` (figures of the CUDA kernels) as tables: what was to be reached, and all that was measured.

Of several lines of one case the last counts: by date, then by place. Predicted lines have columns of their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.bench import markdown

Line = Mapping[str, Any]
KINDS = (
    "layer", "gemm", "gemv", "quantize", "peers", "rope", "attention", "guided_score", "reveal", "inverse_rms",
    "dequantize", "int4", "error", "joined",
)  # fmt: skip
NAMES = {
    "w4two": "two-level scales", "w4ch": "channel scales", "w4grp": "fp16 scale per 64", "w8": "8-bit weights",
    "w4a4": "4-bit activations",
}  # fmt: skip
PEERS = {"fp16": "fp16", "fp8": "fp8", "int_mm": "int8 `_int_mm`", "tinygemm": "tinygemm"}
TARGETS_OF = "NVIDIA H200"
TOLD = """Microseconds: medians of CUDA events around graphs of at least 28 launches, every launch its own weights, programmatic
dependent launch; rank {rank} and bias in every product. Made by `bench/gpu_check.py`. "linears" are the four products of a
layer (qkv 4096×1024, o 1024×2048, gate and up 6144×1024, down 1024×3072), "whole" is with the quantize launches before
them (residual and norm) and SiLU·mul: in the end of the product of gate and up, up to 16 rows in the quantizer."""
FORETOLD = """*Predicted*, not measured: instructions of the main loop in the disassembly against the chip's published rates, or the
weight through its memory (`lowbit.bench.predict`). Launches and the ends of tiles are not in it. `make bench-l4` on an
L4 replaces it."""

Known = dict[tuple[Any, ...], Line]


class Figure(NamedTuple):
    """A row of what was to be reached: which line, which value of it, and the peers' line beside it."""

    what: str
    case: tuple[Any, ...]  # kind, name, shape, m
    key: str
    most: float
    aim: float | None = None
    peers: tuple[Any, ...] | None = None
    prototype: float | None = None


def _layer(mode: str, m: int, most: float, aim: float | None, prototype: float) -> Figure:
    what = f"four fused linears of a layer, M={m}, {NAMES[mode]}"
    return Figure(what, ("layer", mode, None, m), "by_table", most, aim, ("peers", "layer", None, m), prototype)


def _few(shape: str, m: int, most: float, aim: float | None, prototype: float) -> Iterator[Figure]:
    for mode in ("w4ch", "w4two", "w4grp"):
        what = f"{shape.replace('x', '×')}, M={m}, {NAMES[mode]}"
        yield Figure(what, ("gemv", mode, shape, m), "us", most, aim, ("peers", shape, None, m), prototype)


FIGURES = (
    _layer("w4two", 685, 30, 24, 29.5),
    _layer("w4ch", 685, 28, 23, 26.5),
    _layer("w4grp", 685, 42, None, 39.8),
    Figure(
        "activation quantize + low-rank down, fused with add + RMSNorm, M=685, K=1024",
        ("quantize", "685x1024", None, None), "add_norm_r16", 2.5,
    ),
    _layer("w4two", 172, 19, None, 18.3),
    _layer("w4two", 1890, 57, None, 54.3),
    *_few("4096x4096", 1, 4, None, 3.5),
    *_few("4096x4096", 16, 5, None, 4.4),
    *_few("11008x4096", 1, 8.5, 7, 8.1),
    *(
        Figure(f"error, W4A8, rank 16, M=685, 4096×1024, {NAMES[mode]}", ("error", mode, "4096x1024", 685), "frobenius", 1e-2)
        for mode in ("w4two", "w4ch", "w4grp")
    ),
)  # fmt: skip


def case(line: Line) -> tuple[Any, ...] | None:
    """What a line is a figure of: chip, kind, name, shape, M; None for a line that holds no figure."""
    kind = next((k for k in KINDS if k in line), None)
    if kind is None or "FAIL" in line or (kind == "quantize" and "plain_r0" not in line):
        return None
    return line["chip"], kind, line[kind], line.get("shape"), line.get("m")


def latest(lines: Sequence[Line]) -> Known:
    """Case -> its last line."""
    found: Known = {}
    for line in sorted(lines, key=lambda x: str(x["date"])):
        of = case(line)
        if of is not None:
            found[of] = line
    return found


def chapter(lines: Sequence[Line], predicted: Sequence[Line] = ()) -> str:
    """The tables of every chip with figures, then what is only predicted."""
    found, parts = latest(lines), []
    for chip in dict.fromkeys(x["chip"] for x in lines):
        mine = {of[1:]: line for of, line in found.items() if of[0] == chip}
        parts += [f"## CUDA kernels: {chip}", _runs(list(mine.values())), TOLD.format(rank=_rank(lines))]
        broken = sorted({str(x["FAIL"]) for x in lines if x["chip"] == chip and "FAIL" in x})
        parts += [f"**Checks that failed in these runs:** {', '.join(broken)}"] if broken else []
        parts += [reached(mine)] if chip == TARGETS_OF else []
        parts += [text for text in (_layers(mine), _shapes(mine), _quantize(mine), _joined(mine), _rest(mine)) if text]
    foretold = latest(predicted)
    for chip in dict.fromkeys(x["chip"] for x in predicted):
        measured = {of[1:]: line for of, line in found.items() if of[0] == chip}
        parts.append(_predicted(chip, {of[1:]: x for of, x in foretold.items() if of[0] == chip}, measured, predicted))
    return "\n\n".join(parts)


def reached(mine: Known) -> str:
    """What was to be reached, what was measured (bold where it is within), what stands beside it."""
    rows = []
    for f in FIGURES:
        line = mine.get(f.case)
        value = None if line is None else line.get(f.key)
        text = "not measured" if value is None else f"{value:.2e}" if f.case[0] == "error" else f"{value:.1f}"
        beside = _beside(mine.get(f.peers) if f.peers else None)
        beside += [] if f.prototype is None else [f"prototype without low rank {f.prototype:g}"]
        reach = f"≤ {f.most:g}" + (f", aim {f.aim:g}" if f.aim else "")
        rows.append(
            [f.what, reach, f"**{text}**" if value is not None and value <= f.most else text, ", ".join(beside)]
        )
    return markdown.table(("", "to reach", "measured", "beside"), rows)


def _beside(line: Line | None) -> list[str]:
    return [] if line is None else [f"{name} {line[key]:.1f}" for key, name in PEERS.items() if key in line]


def _runs(lines: Sequence[Line]) -> str:
    runs: dict[str, None] = {}
    for x in lines:
        commit = f", commit {x['commit']}" if x.get("commit") else ""
        runs[f"torch {x['torch']}, CUDA {x['cuda']}, lowbit {x['lowbit']}{commit}, {x['date']}"] = None
    sources = ", ".join(f"`{name}`" for name in dict.fromkeys(x["source"] for x in lines))
    return f"{'; '.join(runs)}; lines: {sources}"


def _rank(lines: Sequence[Line]) -> int:
    return int(next((x["rank"] for x in lines if "rank" in x), 0))


def _of(mine: Known, kind: str) -> dict[tuple[Any, ...], Line]:
    return {of[1:]: line for of, line in mine.items() if of[0] == kind}


def _layers(mine: Known) -> str:
    """A row an M: the peers' four products, ours by mode alone and with quantize."""
    layers = _of(mine, "layer")
    modes = [mode for mode in NAMES if any(of[0] == mode for of in layers)]
    peers = [key for key in PEERS if any(of[0] == "layer" and key in x for of, x in _of(mine, "peers").items())]
    head = ["a layer, M", *(PEERS[key] for key in peers), *(f"{NAMES[mode]}: linears / whole" for mode in modes)]
    rows = []
    for m in sorted({of[2] for of in layers}):
        beside = mine.get(("peers", "layer", None, m), {})
        row = [str(m), *(f"{beside[key]:.1f}" if key in beside else "" for key in peers)]
        for mode in modes:
            x = layers.get((mode, None, m))
            row.append("" if x is None else f"{x.get('by_table', x['linears']):.1f} / {x['all']:.1f}")
        rows.append(row)
    return markdown.table(head, rows) if rows else ""


def _shapes(mine: Known) -> str:
    """Products of up to 16 rows, the peers beside them."""
    few = _of(mine, "gemv")
    rows = []
    for shape, m in dict.fromkeys((of[1], of[2]) for of in few):
        cells = []
        for mode in ("w4ch", "w4two", "w4grp"):
            x = few.get((mode, shape, m))
            cells.append("" if x is None else f"{x['us']:.1f} / {x['with_quantize']:.1f}")
        beside = mine.get(("peers", shape, None, m), {})
        others = [f"{beside[key]:.1f}" if key in beside else "" for key in ("fp16", "fp8", "tinygemm")]
        rows.append([shape.replace("x", "×"), str(m), *others, *cells])
    modes = [f"{NAMES[mode]}: product / with quantize" for mode in ("w4ch", "w4two", "w4grp")]
    return markdown.table(("N×K, 4 bit", "M", "fp16", "fp8", "tinygemm", *modes), rows) if rows else ""


def _quantize(mine: Known) -> str:
    keys = ("plain_r0", "plain_r16", "add_norm_r0", "add_norm_r16", "silu_r16")
    rows = [
        [of[0].replace("x", " × "), *(f"{line[key]:.1f}" if key in line else "" for key in keys)]
        for of, line in _of(mine, "quantize").items()
    ]
    head = (
        "quantize, rows × K",
        "plain",
        "+ low rank 16",
        "residual + norm",
        "the same + low rank 16",
        "SiLU·mul + low rank 16",
    )
    return markdown.table(head, rows) if rows else ""


def _joined(mine: Known) -> str:
    """Attention with the quantizer of o, and a layer with them: two launches and one, by M."""
    found = _of(mine, "joined")
    every = sorted({of[2] for of in found})
    rows = []
    for what in dict.fromkeys(of[0] for of in found):
        lines = [found.get((what, None, m)) for m in every]
        rows.append([str(what), *("" if x is None else f"{x['apart']:.1f} / {x['us']:.1f}" for x in lines)])
    head = ["µs, attention and the quantizer of o apart / joined", *(f"M={m}" for m in every)]
    return markdown.table(head, rows) if rows else ""


def _rest(mine: Known) -> str:
    """Kernels of one figure each."""
    names = {
        "rope": "norm and rotation of queries and keys",
        "attention": "attention",
        "guided_score": "guided score",
        "reveal": "reveal",
        "inverse_rms": "inverse RMS",
        "dequantize": "codes to fp16",
    }
    rows = [[names[of[0]], str(of[1]), f"{line['us']:.1f}"] for of, line in mine.items() if of[0] in names]
    rows += [
        [f"INT4 product, {of[1]}", f"{of[2].replace('x', '×')}, M={of[3]}", f"{line['us']:.1f}"]
        for of, line in mine.items()
        if of[0] == "int4"
    ]
    return markdown.table(("kernel", "case", "µs"), rows) if rows else ""


def _predicted(chip: str, foretold: Known, measured: Known, lines: Sequence[Line]) -> str:
    """Predicted figures, a column of measured ones beside them where somebody has measured."""
    rows = []
    for of, line in foretold.items():
        shape = f"{of[1]}, {of[2].replace('x', '×')}" if of[0] == "int4" else "four linears of a layer"
        there = measured.get(of)
        value = None if there is None else there.get("us", there.get("linears"))
        rows.append(
            [shape, str(of[3]), f"*{line['us']:.1f}*", line.get("bound", ""), "" if value is None else f"{value:.1f}"]
        )
    loops = [
        f"`{x['loop']}`: {x['matrix']} matrix instructions a pass and warp, *{x['issued']}* instructions issued for each; "
        f"*{x['tensor_cycles']:.0f}* cycles of the tensor cores, *{x['issue_cycles']:.0f}* of the schedulers"
        for x in lines
        if "loop" in x and x["chip"] == chip
    ]
    head = ("INT4 product, 4-bit activations", "M", "*predicted* µs", "bound by", "measured µs")
    return "\n\n".join(
        [f"## CUDA kernels: {chip}, *predicted*", FORETOLD, "; ".join(loops) + ".", markdown.table(head, rows)]
    )
