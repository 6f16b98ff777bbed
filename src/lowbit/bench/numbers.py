"""``lowbit bench numbers``: the JSON lines of the benches as one Markdown page with bar charts. Nothing is typed by hand."""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbit.bench import accuracy, chart, cuda_figures, cuda_kernels, cuda_sweep, markdown, models, rtf_page, speech
from lowbit.types import FormatError

# What makes two lines parts of one run, and so of one table.
RUN = ("bench", "chip", "torch", "lowbit", "commit", "date", "pages", "in_cache", "model", "source")
HEAD = """# Numbers

Made by `lowbit bench numbers` from the JSON lines that `lowbit bench layers --json`, `bench models --json`, `bench rtf` and
`bench/accuracy.py` wrote, and `bench/gpu_check.py` on GPUs (`make accuracy`). Speed comes first, CPUs before GPUs: each
table of a CPU is one interleaved run on one machine, medians over the stated repeats or rounds. `x` is the time over that of the first row of its shape: above 1 is slower than ours.
The error is the relative Frobenius distance to the float product on Gaussian x.
"""
# Said once, under the first table of whole models.
MODELS = """Tokens a second: the median over the rounds, then the best (of decoding: every step at its least over the
rounds). Memory is what a process grew by beyond an interpreter with torch, or a bare one where the runtime needs no
torch: resident while decoding, and at its peak, loading included. `cpu` is CPU seconds a second of decoding. `same`
counts the first greedy tokens, of 16, that float32 gives too; the error is that of the logits after the prompt."""
KINDS = {"layers": chart.layers, "models": chart.models}  # of speed
OF_CUDA = ("cuda", "cuda-layers", "predicted")


def read(paths: Sequence[str]) -> list[dict[str, Any]]:
    """The lines of all files; FormatError names a file and line that is no JSON object of a bench."""
    lines: list[dict[str, Any]] = []
    for path in paths:
        for number, text in enumerate(Path(path).read_text("utf-8").splitlines(), 1):
            try:
                line = json.loads(text)
            except json.JSONDecodeError as error:
                raise FormatError(f"{path} line {number}: found no JSON ({error.msg})") from None
            if not isinstance(line, dict) or line.get("bench") not in (*KINDS, *OF_CUDA, "accuracy", "speech", "rtf"):
                accepted = "a line of bench layers, bench models, bench rtf, gpu_check, accuracy or speech"
                raise FormatError(f"{path} line {number}: found {text[:40]!r}, accepted is {accepted}")
            lines.append({**line, "source": Path(path).name})
    return lines


def table(lines: Sequence[Mapping[str, Any]]) -> str:
    """One run: a row a competitor and case, with what the run ran on above it."""
    first = lines[0]
    what = first.get("model") or ("in cache" if first["in_cache"] else "weights rotated out of cache")
    commit = f", commit {first['commit']}" if first.get("commit") else ""
    versions = f"lowbit {first['lowbit']}{commit}, torch {first['torch']}"
    if first["bench"] == "models":
        versions, head = f"{versions}; {models.work(first)}", models.HEAD
        rows = [models.cells(x) for x in lines]
    else:
        versions = f"{versions}; pages: {first['pages']}"
        head = ["N×K", "M", "threads", "", "median ms", "min ms", "GOPS", "GB/s", "error", "x", "repeats"]
        rows = [_cells(x) for x in lines]
    return "\n".join(
        [
            f"## {first['chip']}, {first['date']}, {what}",
            "",
            f"{versions}; lines: `{first['source']}`",
            "",
            markdown.table(head, rows),
        ]
    )


def _cells(x: Mapping[str, Any]) -> list[str]:
    ratio = "" if x["ratio"] is None else f"{x['ratio']:.2f}"
    times = [f"{x['median_ms']:.4f}", f"{x['min_ms']:.4f}"]
    rates = [f"{x['gops']:.0f}", f"{x['gb_per_s']:.1f}", f"{x['error']:.1e}"]
    return [f"{x['n']}×{x['k']}", str(x["m"]), str(x["threads"]), x["name"], *times, *rates, ratio, str(x["repeats"])]


def charts(lines: Sequence[Mapping[str, Any]]) -> dict[str, str]:
    """File name -> SVG: one for the layers and one for the models of every file of lines, one for each model's accuracy."""
    groups: dict[tuple[str, str], list[Mapping[str, Any]]] = {}
    speed, judged = _split(lines)
    for line in speed:
        groups.setdefault((line["bench"], line["source"]), []).append(line)
    found = {_chart(kind, source): KINDS[kind](group) for (kind, source), group in groups.items()}
    for index, some in enumerate(accuracy.models(judged)):
        found |= {_accuracy(index, what): svg for what, svg in accuracy.drawings(some).items()}
    for index, run in enumerate(rtf_page.runs([x for x in lines if x["bench"] == "rtf"])):
        found |= rtf_page.drawings(run, index)
    return found


def _split(lines: Sequence[Mapping[str, Any]]) -> tuple[list[Mapping[str, Any]], list[Mapping[str, Any]]]:
    """(lines of speed, lines of accuracy)."""
    return [x for x in lines if x["bench"] in KINDS], [x for x in lines if x["bench"] == "accuracy"]


def _accuracy(index: int, what: str) -> str:
    return f"accuracy-{index + 1}-{what}.svg"


def _chart(kind: str, source: str) -> str:
    return f"{Path(source).stem}-{kind}.svg"


def page(lines: Sequence[Mapping[str, Any]]) -> str:
    """The whole page: runs in the order in which they are first seen, each file's chart above its first table; accuracy."""
    runs: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    speed, judged = _split(lines)
    for line in speed:
        runs.setdefault(tuple(str(line.get(key)) for key in RUN), []).append(line)
    parts, drawn, told = [HEAD.rstrip()], set(), False
    for run in runs.values():
        name = _chart(run[0]["bench"], run[0]["source"])
        if name not in drawn:
            parts.append(f"![bars of the {run[0]['bench']} in {run[0]['source']}](charts/{name})")
        drawn.add(name)
        parts.append(table(run))
        if run[0]["bench"] == "models" and not told:
            parts.append(MODELS)
            told = True
    cuda, swept, foretold = ([x for x in lines if x["bench"] == kind] for kind in OF_CUDA)
    if cuda or foretold:
        parts.append(cuda_figures.chapter(cuda, foretold))
    if swept:
        parts.append(cuda_sweep.chapter(swept))
    for index, some in enumerate(accuracy.models(judged)):
        addresses = {what: f"charts/{_accuracy(index, what)}" for what in accuracy.drawings(some)}
        parts.append(accuracy.chapter(some, addresses))
    if cloned := [x for x in lines if x["bench"] == "rtf"]:
        drawn_there = {
            n: f"charts/{n}" for i, run in enumerate(rtf_page.runs(cloned)) for n in rtf_page.drawings(run, i)
        }
        parts.append(rtf_page.chapter(cloned, drawn_there))
    if heard := [x for x in lines if x["bench"] == "speech"]:
        parts.append(speech.chapter(heard))
    return "\n\n".join(parts) + "\n"


def main(argv: Sequence[str] | None = None) -> int:
    p = argparse.ArgumentParser(prog="lowbit bench numbers", description=__doc__)
    p.add_argument("files", nargs="+", metavar="JSONL", help="what the benches wrote")
    p.add_argument(
        "--out",
        metavar="FILE",
        help="write the page here, its charts into charts/ and the table of kernels.md beside it",
    )
    args = p.parse_args(argv)
    lines = read(args.files)
    if not args.out:
        print(page(lines), end="")
        return 0
    folder = Path(args.out).parent / "charts"
    folder.mkdir(exist_ok=True)
    for name, svg in charts(lines).items():
        (folder / name).write_text(svg, "utf-8")
    Path(args.out).write_text(page(lines), "utf-8")
    kernels = Path(args.out).with_name("kernels.md")
    if kernels.exists() and cuda_kernels.BEGIN in kernels.read_text("utf-8"):
        cuda = [x for x in lines if x["bench"] == "cuda"]
        kernels.write_text(cuda_kernels.fill(kernels.read_text("utf-8"), cuda), "utf-8")
    return 0
