"""``lowbit bench rtf``: real-time factors of a voice clone, engine beside engine, with what precision costs beside speed.

    lowbit bench rtf --random full --device cuda --engines stock,fp16,w8a8,w4a8 --out rtf.jsonl
    lowbit bench rtf --model DIR --set prompts.jsonl --weights w4a8=OUT --asr WHISPER --out rtf.jsonl
    lowbit bench rtf --random full --device cuda --step 172,685,1890 --out steps.jsonl

All engines share one model's weights and take turns in one process; seeds are equal. Without --model the real class is
made on the spot with random weights, which time as trained ones do and speak noise. --out FILE.jsonl also writes drawings
(FILE-*.svg) and FILE-listen.html beside it.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from lowbit.bench import rtf_engines, rtf_listen, rtf_page, rtf_run, rtf_step
from lowbit.bench.rtf_engines import ENGINES, Settings
from lowbit.bench.rtf_model import SIZES, random_model
from lowbit.bench.rtf_set import samples
from lowbit.bench.shell import count, integers, padded, sink, words
from lowbit.bench.timer import machine
from lowbit.engines.graphs import NAMED
from lowbit.models.omnivoice import is_trained, load_omnivoice, package
from lowbit.ops_cuda import device_there
from lowbit.prove import report
from lowbit.types import FormatError

DTYPES = {"float16": torch.float16, "bfloat16": torch.bfloat16, "float32": torch.float32}


def _buckets(text: str) -> tuple[int, ...] | str:
    return text if text in NAMED else tuple(integers(text))


def options() -> argparse.ArgumentParser:
    p = argparse.ArgumentParser(
        prog="lowbit bench rtf", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    p.add_argument("--model", metavar="DIR", help="an OmniVoice of a directory or a cached hub id")
    p.add_argument("--random", choices=tuple(SIZES), help="random weights instead (full: the published shape)")
    p.add_argument("--device", default="cpu", help="cpu (default), cuda, cuda:1")
    p.add_argument("--dtype", choices=tuple(DTYPES), help="of the model (float16 on CUDA, float32 on a CPU)")
    p.add_argument("--threads", type=count, metavar="N", help="threads torch may use")
    p.add_argument("--engines", type=words(*ENGINES), default=list(rtf_engines.DEFAULT), metavar="A,B",
                   help=f"of {', '.join(ENGINES)} (default: all)")  # fmt: skip
    p.add_argument(
        "--weights", action="append", default=[], metavar="ENGINE=DIR", help="a checkpoint for w8a8, w4a8 or w4a4"
    )
    p.add_argument(
        "--buckets", type=_buckets, metavar="A,B", help="packed tokens of the graphs, or fine: steps of 64 and 128"
    )
    p.add_argument(
        "--set", metavar="FILE", help='.jsonl of {"text", "ref_audio", "ref_text", "duration"} (default: built in)'
    )
    p.add_argument(
        "--ref", metavar="WAV", help="reference of every utterance that names none (default: a made-up voice)"
    )
    p.add_argument("--ref-text", metavar="TEXT", help="what it says")
    p.add_argument("--samples", type=count, metavar="N", help="so many of the set")
    p.add_argument("--seconds", type=float, metavar="S", help="no utterance longer than this")
    p.add_argument("--steps", type=count, default=32, metavar="N", help="decoding steps (32)")
    p.add_argument("--rounds", type=count, metavar="N", help="timed rounds (5 on CUDA, 3 on a CPU)")
    p.add_argument("--seed", type=int, default=0)
    p.add_argument("--no-quality", action="store_true", help="leave out tokens, KL and judges")
    p.add_argument("--asr", metavar="DIR", help="a Whisper of transformers, for word errors")
    p.add_argument("--step", type=integers, metavar="M,M", help="time one step over so many packed rows instead")
    p.add_argument("--no-compile", action="store_true", help="--step: leave out the torch.compile baseline")
    p.add_argument("--out", metavar="FILE", help="append JSON lines here")
    p.add_argument(
        "--listen", type=int, default=3, metavar="N", help="samples on the listening page, 0 for no page (3)"
    )
    p.add_argument("--json", action="store_true", help="print the JSON lines")
    return p


def main(argv: Sequence[str] | None = None) -> int:
    args = options().parse_args(argv)
    device = device_there(args.device, "--device")
    _check(args, device)
    if args.threads:
        torch.set_num_threads(args.threads)
    dtype = DTYPES[args.dtype] if args.dtype else None
    if args.model:
        model = load_omnivoice(args.model, device, dtype)
    else:
        package()
        usual = torch.float16 if device.type == "cuda" else torch.float32
        model = random_model(args.random, device, dtype or usual)
    trained = bool(args.model) and is_trained(model)
    facts = {"bench": "rtf", **_facts(device), "steps": args.steps, "dtype": str(model.llm.dtype).removeprefix("torch."),
             "model": f"{args.model or args.random}{'' if trained else ', random weights'}", "trained": trained}  # fmt: skip
    settings = Settings(device, _weights(args.weights), args.buckets)
    if args.buckets is not None:
        facts["buckets"] = args.buckets
    found: list[dict[str, Any]] = []
    said: rtf_run.Said = {}
    with sink("-" if args.json else None) as show, sink(args.out) as keep:

        def write(line: Mapping[str, Any]) -> None:  # at once: a run that is cut short has what it measured
            found.append({**facts, **line})
            show(json.dumps(found[-1]))
            keep(json.dumps(found[-1]))

        made = rtf_run.make(model, args.engines, settings)
        try:
            if args.step:
                number = args.rounds or (11 if device.type == "cuda" else 5)
                for line in rtf_step.lines(made.models, args.step, number, device, not args.no_compile):
                    write(line)
                for name, why in made.broken.items():
                    write({"kind": "step", "engine": name, "why": why})
            else:
                given = None if args.ref is None else (args.ref, args.ref_text)
                chosen = samples(args.set, given, args.samples, args.seconds)
                plan = rtf_run.Plan(
                    chosen, args.steps, args.seed, args.rounds or (5 if device.type == "cuda" else 3), trained,
                    not args.no_quality, args.asr,
                )  # fmt: skip
                said = rtf_run.utterances(model, made, plan, device, write)
        finally:
            rtf_engines.close(made.models)
    if not args.json:
        _print(found)
    if args.out:
        _beside(Path(args.out), [{**line, "source": Path(args.out).name} for line in found], said, args, facts)
    return 0


def _check(args: argparse.Namespace, device: torch.device) -> None:
    if (args.model is None) == (args.random is None):
        raise FormatError("bench rtf: accepted is one of --model DIR and --random full|deep|tiny")
    if device.type not in ("cpu", "cuda"):
        raise FormatError(f"--device: found {args.device}, accepted are cpu and cuda")
    if (args.ref is None) != (args.ref_text is None):
        raise FormatError("--ref, --ref-text: found one, accepted are both: a reference and what it says")
    if args.seconds is not None and not args.seconds >= 0.04:
        raise FormatError(f"--seconds: found {args.seconds:g}, accepted is a frame (0.04) or more")


def _weights(pairs: Sequence[str]) -> dict[str, str]:
    found = {}
    for pair in pairs:
        name, _, path = pair.partition("=")
        if name not in ("w8a8", "w4a8", "w4a4") or not path:
            raise FormatError(f"--weights: found {pair!r}, accepted is w8a8=DIR, w4a8=DIR or w4a4=DIR")
        found[name] = path
    return found


def _facts(device: torch.device) -> dict[str, Any]:
    from importlib.metadata import PackageNotFoundError, version

    here = machine()
    keep = ("chip", "cores", "torch", "lowbit", "python", "commit", "date")
    facts = {key: here[key] for key in keep} | {"threads": torch.get_num_threads()}
    for name in ("omnivoice", "transformers"):
        try:
            facts[name] = version(name)
        except PackageNotFoundError:
            facts[name] = None
    if device.type == "cuda":
        facts |= {"cpu": facts["chip"], "chip": torch.cuda.get_device_name(device), "cuda": torch.version.cuda}
    return facts


def _print(lines: Sequence[Mapping[str, Any]]) -> None:
    mine = [x for x in lines if x["kind"] == "engine" and "why" not in x]
    if mine:
        head = ["engine", "loop", "+ codec", "whole", "p50 ms", "first ms", "tokens", "KL", "WER"]
        rows = [[x["engine"], *(f"{x[k]:.4f}" for k in ("rtf_loop", "rtf_codec", "rtf")), f"{x['p50_ms']:.1f}",
                 f"{x['first_ms']:.1f}", *(_cell(x.get(k), f) for k, f in (("tokens_same", ".3f"), ("kl", ".1e"), ("wer", ".3f")))]
                for x in mine]  # fmt: skip
        print("\n".join(padded([head, *rows])))
    steps = [x for x in lines if x["kind"] == "step" and "ms" in x]
    if steps:
        rows = [[x["engine"], str(x["m"]), f"{x['ms']:.3f}", *(_cell(x.get(k), ".3f") for k in ("bucket_ms", "step_ms"))]
                for x in steps]  # fmt: skip
        print("\n".join(padded([["engine", "M", "layers ms", "in bucket", "whole step"], *rows])))
    for x in lines:
        if "why" in x:
            print(f"{x['engine']}: not run: {x['why']}")


def _cell(value: Any, form: str) -> str:
    return "-" if value is None else value if isinstance(value, str) else format(value, form)


def _beside(
    out: Path, lines: Sequence[Mapping[str, Any]], said: Mapping[str, Mapping[str, Any]], args: argparse.Namespace,
    facts: Mapping[str, Any],
) -> None:  # fmt: skip
    """Drawings and the listening page of this run, beside its lines."""
    for name, drawing in rtf_page.drawings(lines).items():
        out.with_name(f"{out.stem}-{name.rpartition('-')[2]}").write_text(drawing, "utf-8")
    if not said or not args.listen:
        return
    chosen = {s.name: s for s in samples(args.set, None, args.samples, args.seconds)}
    names = [name for name in said if chosen[name].seconds <= 12] or list(said)
    rows = [(name, chosen[name].line.text, said[name]) for name in names[: args.listen]]
    rtf = {x["engine"]: f"RTF {x['rtf']:.4f}" for x in lines if x["kind"] == "engine" and "why" not in x}
    note = f"{facts['chip']}, {facts['date']}, {facts['model']}, {args.steps} steps, seed {args.seed} everywhere."
    if not facts["trained"]:
        note += " Random weights speak noise: only differences between engines can be heard here."
    page = rtf_listen.page("The same text by every engine", note, rows, rtf)
    report.write(os.fspath(out.with_name(f"{out.stem}-listen.html")), page)
