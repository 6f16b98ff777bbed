"""``lowbit bench models``: one model in every runtime that is installed here: decoding, prefill, memory.

Every peer is a process of its own (`model_worker.py`). All of one thread count are loaded and warmed up first; then they
take turns for some rounds, one generation and one prefill each, and the one whose turn it is not is stopped, so that no
spinning thread of it takes a core. A peer that cannot run is named with the line that installs it and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import lowbit
from lowbit.bench import chart
from lowbit.bench.model_peers import PEERS
from lowbit.bench.shell import count, integers, padded, sink, words
from lowbit.bench.timer import machine
from lowbit.types import FormatError

OURS = ("native", "transformers")
# lowbit comes last on the path: a runtime's own packages hide those of this Python.
_START = "import sys; sys.path.append(sys.argv[1]); from lowbit.bench.model_worker import main; sys.exit(main())"
_TEXT = (
    "A clockmaker who lived above the harbour kept two ledgers. In the first he wrote what he was paid, in the second how "
    "many seconds each clock lost in a week, and on Sundays he read the second one aloud. The sailors said that he could "
    "hear a loose pivot through a wall. When the tide came in late he stopped every pendulum, counted the waves against "
    "his own pulse, and started them again one by one. "
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the rounds, write a JSON line for every peer and thread count, print a table last. Returns 0."""
    args = parser().parse_args(argv)
    lines: list[dict[str, Any]] = []
    facts = machine()
    with sink(args.json) as write, ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        job, given = prepare(args, folder)
        for threads in args.threads:
            for line in race(given, {**job, "threads": threads}, args.rounds, dict(args.python), folder):
                lines.append({**line, **facts})
                write(json.dumps(lines[-1]))
    if args.chart:
        Path(args.chart).write_text(chart.models(lines), "utf-8")
    if args.json != "-" and lines:
        print(text_table(lines))
    return 0


def parser() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(prog="lowbit bench models", description=__doc__)
    p.add_argument("--model", metavar="DIR", help="a lowbit checkpoint, for our two rows")
    p.add_argument("--source", metavar="DIR", help="the same model in floats, for torch's rows")
    p.add_argument(
        "--gguf", metavar="FILE", help="the same for llama.cpp; one that is not called q4_0 is made so first"
    )
    p.add_argument("--ort", metavar="DIR", help="the same for onnxruntime-genai, int4")
    p.add_argument("--ov", metavar="DIR", help="the same for OpenVINO GenAI, int4")
    p.add_argument("--peers", type=words(*PEERS), default=list(PEERS), metavar="P", help=", ".join(PEERS))
    p.add_argument("--python", type=_pair, action="append", default=[], metavar="P=EXE", help="the Python of one peer")
    p.add_argument("--threads", type=integers, default=[1], metavar="T", help="comma separated")
    p.add_argument("--rounds", type=count, default=5, metavar="N", help="turns of every peer")
    p.add_argument("--prompt", type=count, default=32, metavar="N", help="tokens before the decoded ones")
    p.add_argument("--decode", type=count, default=128, metavar="N", help="decoded tokens")
    p.add_argument("--prefill", type=count, default=512, metavar="N", help="tokens of the timed prefill")
    p.add_argument("--json", nargs="?", const="-", metavar="FILE", help="append JSON lines to FILE (or to stdout)")
    p.add_argument("--chart", metavar="FILE", help="draw the rows as an SVG bar chart")
    return p


def prepare(args: argparse.Namespace, folder: Path) -> tuple[dict[str, Any], list[str]]:
    """What every worker is told, and the peers whose paths are there. FormatError for a path that is not."""
    job = {key: getattr(args, key) for key in ("model", "source", "gguf", "ort", "ov")}
    for key, path in job.items():
        if path is not None and not Path(path).exists():
            raise FormatError(f"--{key}: found {path!r}, accepted is a path that exists")
    first = job["model"] or job["source"]
    if first is None:
        raise FormatError("bench models: found neither --model nor --source, accepted is at least one of them")
    job.update(ggml=os.environ.get("GGML_DIR"), steps=args.decode, reference="")
    given = []
    for name in args.peers:
        wanted = ["ggml", "gguf"] if name == "ggml" else [PEERS[name].path]
        if all(job[key] is not None for key in wanted):
            given.append(name)
        else:
            _left_out(name, "a path is missing")
    if "ggml" in given and "q4_0" not in Path(job["gguf"]).name.lower():
        made = folder / "model-q4_0.gguf"
        asked = {"ggml": job["ggml"], "requantize": [str(job["gguf"]), str(made)]}
        with Worker("ggml", asked, dict(args.python).get("ggml"), folder) as worker:
            answer = worker.answer()
        job["gguf"] = str(made)
        if "missing" in answer:
            _left_out("ggml", answer["missing"])
            given.remove("ggml")
    config = json.loads((Path(first) / "config.json").read_text("utf-8"))
    job["name"] = _model_name(config)
    ids = token_ids(Path(first), int(config["vocab_size"]), max(args.prompt, args.prefill))
    job.update(short=ids[: args.prompt], long=ids[: args.prefill])
    return job, given


def race(
    given: Sequence[str], job: Mapping[str, Any], rounds: int, pythons: Mapping[str, str], folder: Path
) -> list[dict[str, Any]]:
    """The lines of one thread count."""
    job = {**job, "reference": str(folder / f"logits-{job['threads']}.npy")}
    loaded: dict[str, dict[str, Any]] = {}
    turns: dict[str, list[dict[str, Any]]] = {}
    with ExitStack() as stack:
        workers: dict[str, Worker] = {}
        for name in sorted(given, key=lambda name: name != "float32"):  # its logits are what the others are held to
            print(f"loading {name}, threads {job['threads']}", file=sys.stderr, flush=True)
            worker = stack.enter_context(Worker(name, {**job, "peer": name}, pythons.get(name), folder))
            answer = worker.answer()
            if "missing" in answer:
                _left_out(name, answer["missing"])
                worker.close()
                continue
            workers[name], loaded[name], turns[name] = worker, answer, []
        for index in range(rounds):
            print(f"round {index + 1} of {rounds}, threads {job['threads']}", file=sys.stderr, flush=True)
            order = [name for name in given if name in workers]
            start = index % max(len(order), 1)
            for name in order[start:] + order[:start]:
                answer = workers[name].turn()
                if "missing" in answer:
                    _left_out(name, answer["missing"])
                    workers.pop(name).close()
                    continue
                turns[name].append(answer)
    names = [name for name in given if name in workers]
    base = next((name for name in names if name in OURS), None)
    return [_line(name, job, loaded, turns, base) for name in names]


class Worker:
    """A peer in a process of its own, stopped whenever nobody waits for its answer."""

    def __init__(self, name: str, job: Mapping[str, Any], python: str | None, folder: Path) -> None:
        threads = str(job.get("threads", 1))
        env = {**os.environ, "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads, "HF_HUB_OFFLINE": "1"}
        command = [python or sys.executable, "-c", _START, str(Path(lowbit.__file__).resolve().parents[1])]
        self._log = (folder / f"{name}-{threads}.log").open("w+", encoding="utf-8", errors="replace")
        try:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True,
                env={**env, "TOKENIZERS_PARALLELISM": "false"},
            )  # fmt: skip
        except OSError as error:
            self._log.close()
            raise FormatError(f"--python {name}: found {command[0]!r} ({error.strerror})") from error
        self.pid = self._process.pid
        self._say(json.dumps(job))

    def answer(self) -> dict[str, Any]:
        """The next answer; ``missing`` with the end of its log where it died."""
        assert self._process.stdout is not None
        text = self._process.stdout.readline()
        if text:
            self._process.send_signal(signal.SIGSTOP)
            found: dict[str, Any] = json.loads(text)
            return found
        self._log.seek(0)
        said = [line for line in self._log.read().splitlines() if line.strip()]
        return {"missing": f"its process ended with {self._process.wait()}: {said[-1] if said else 'no word'}"}

    def turn(self) -> dict[str, Any]:
        self._process.send_signal(signal.SIGCONT)
        self._say("turn")
        return self.answer()

    def _say(self, line: str) -> None:
        assert self._process.stdin is not None
        with suppress(BrokenPipeError):  # it has ended: `answer` says how
            print(line, file=self._process.stdin, flush=True)

    def close(self) -> None:
        self._process.kill()  # a stopped process as well
        self._process.wait()
        for file in (self._process.stdin, self._process.stdout, self._log):
            assert file is not None
            with suppress(BrokenPipeError):
                file.close()

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()


def _line(
    name: str, job: Mapping[str, Any], loaded: Mapping[str, Mapping[str, Any]],
    turns: Mapping[str, Sequence[Mapping[str, Any]]], base: str | None,
) -> dict[str, Any]:  # fmt: skip
    """Medians over the rounds; the best decoding has each step at its least, so one busy moment costs no round."""
    mine, row, start = turns[name], PEERS[name], loaded[name]

    def seconds(who: str, what: str) -> list[float]:
        return [sum(t["steps"]) if what == "decode" else t["prefill"] for t in turns[who]]

    def ratio(what: str) -> float | None:  # rounds are compared with themselves: a slow minute is slow for all
        if base is None:
            return None
        return round(statistics.median(a / b for a, b in zip(seconds(name, what), seconds(base, what))), 3)

    quiet = sum(min(step) for step in zip(*(t["steps"] for t in mine)))
    truth = loaded.get("float32", {}).get("tokens")
    same = None
    if truth is not None:
        same = next((i for i, (a, b) in enumerate(zip(start["tokens"], truth)) if a != b), min(16, len(truth)))
    steps, tokens = job["steps"], len(job["long"])
    return {
        "bench": "models", "name": row.name, "peer": name, "ours": name in OURS, "model": job["name"],
        "threads": job["threads"], "rounds": len(mine), "version": start["version"],
        "prompt_tokens": len(job["short"]), "decode_tokens": steps, "prefill_tokens": tokens,
        "decode": round(steps / statistics.median(seconds(name, "decode")), 2), "decode_best": round(steps / quiet, 2),
        "decode_ratio": ratio("decode"),
        "prefill": round(tokens / statistics.median(seconds(name, "prefill")), 1),
        "prefill_best": round(tokens / min(seconds(name, "prefill")), 1), "prefill_ratio": ratio("prefill"),
        "ratio_to": None if base is None else PEERS[base].name,
        "resident_bytes": start["resident"], "peak_bytes": max(max(t["peak"] for t in mine) - start["base"], 0),
        "above": start["above"], "weight_bytes": start["weight_bytes"],
        "cpu": round(statistics.median(t["cpu"] for t in mine), 2), "load_s": start["load_s"],
        "same": same, "error": None if start["error"] is None else float(f"{start['error']:.3g}"),
    }  # fmt: skip


HEAD = ["", "threads", "decode/s", "best", "x", "prefill/s", "best", "x", "resident MB", "peak MB", "above", "cpu",
        "weights MB", "same", "error", "rounds"]  # fmt: skip


def cells(line: Mapping[str, Any]) -> list[str]:
    """One line under `HEAD`."""

    def times(key: str) -> str:
        return "" if line[key] is None else f"{line[key]:.2f}"

    return [
        line["name"], str(line["threads"]), f"{line['decode']:.1f}", f"{line['decode_best']:.1f}", times("decode_ratio"),
        f"{line['prefill']:.0f}", f"{line['prefill_best']:.0f}", times("prefill_ratio"),
        f"{line['resident_bytes'] / 1e6:.0f}", f"{line['peak_bytes'] / 1e6:.0f}", line["above"], f"{line['cpu']:.2f}",
        f"{line['weight_bytes'] / 1e6:.1f}", "" if line["same"] is None else str(line["same"]),
        "" if line["error"] is None else f"{line['error']:.3f}", str(line["rounds"]),
    ]  # fmt: skip


def work(line: Mapping[str, Any]) -> str:
    """What a peer had to do, in words."""
    return f"{line['decode_tokens']} tokens after {line['prompt_tokens']}, prefill of {line['prefill_tokens']}"


def text_table(lines: Sequence[Mapping[str, Any]]) -> str:
    first = lines[0]
    versions = f"torch {first['torch']}, lowbit {first['lowbit']}"
    last = f"{first['model']}; {work(first)}; {first['chip']}; {versions}; {first['date']}"
    return "\n".join([*padded([HEAD, *map(cells, lines)]), last])


def _left_out(name: str, reason: str) -> None:
    print(f"{name} is left out: {reason} ({PEERS[name].install})", file=sys.stderr, flush=True)


def _model_name(config: Mapping[str, Any]) -> str:
    parts = [f"{config.get('num_hidden_layers', '?')} layers", f"hidden {config.get('hidden_size', '?')}"]
    return ", ".join([str(config.get("model_type", "?")), *parts, f"vocabulary {config['vocab_size']}"])


def token_ids(folder: Path, vocabulary: int, length: int) -> list[int]:
    """A text in the tokens of the model; random ones where it has no tokenizer."""
    if (folder / "tokenizer.json").exists():
        from tokenizers import Tokenizer

        ids: list[int] = Tokenizer.from_file(str(folder / "tokenizer.json")).encode(_TEXT).ids
        return (ids * -(-length // len(ids)))[:length]
    draw = random.Random(0)
    return [draw.randrange(vocabulary) for _ in range(length)]


def _pair(text: str) -> tuple[str, str]:
    name, _, path = text.partition("=")
    if name not in PEERS or not path:
        raise argparse.ArgumentTypeError(f"found {text!r}, accepted is PEER=PATH, PEER one of {', '.join(PEERS)}")
    return name, path
