"""Commands that write a checkpoint: ``quantize`` a model, ``convert`` a checkpoint to another format."""

from __future__ import annotations

import argparse
import shutil
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lowbit.cli.show import as_json, clustering, megabytes, refuse_cluster, short, table
from lowbit.models.overrides import parse
from lowbit.quantize import RECIPES, SCALES
from lowbit.types import SCHEMES, FormatError

if TYPE_CHECKING:
    from lowbit.models.report import Report
    from lowbit.models.sensitivity import Budget

CONVERT_TO = ("gptq", "gptq_v2", "awq", "compressed-tensors", "lowbit")


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the two commands."""
    one = commands.add_parser("quantize", parents=[common], help="quantize a model's linears and save it")
    one.add_argument("model", nargs="?", help="directory (or cached hub id) with plain weights")
    one.add_argument("out", nargs="?", help="directory to write")
    one.add_argument(
        "--jobs", metavar="FILE",
        help='many: lines {"model": DIR, "out": DIR, "scheme": ...} with any of these options; what a line does not say, '
        "the command line does",
    )  # fmt: skip
    clustering(one, "--jobs")
    options(one)
    one.set_defaults(run=quantize)

    two = commands.add_parser("convert", parents=[common], help="write a quantized checkpoint in another format")
    two.add_argument("model", metavar="in")
    two.add_argument("out")
    two.add_argument("--to", required=True, choices=CONVERT_TO)
    two.set_defaults(run=convert)


def options(one: argparse.ArgumentParser) -> None:
    """What may be said of one quantization, on the command line or in a line of a jobs file."""
    one.add_argument("--scheme", choices=tuple(SCHEMES), default="w4a8")
    one.add_argument(
        "--method", choices=("rtn", "gptq", "svdquant"), help="default: svdquant for w4a4, gptq for the others"
    )
    one.add_argument(
        "--calibration", metavar="FILE",
        help='text or JSONL file; for speech lines {"audio": WAV, "text": TRANSCRIPT}, for OmniVoice '
        '{"text", "ref_audio", "ref_text"} (all methods but rtn)',
    )  # fmt: skip
    one.add_argument("--blocks", metavar="A,B", help="dotted paths of the lists of blocks (default: found by itself)")
    one.add_argument("--device", default="cpu", metavar="D", help="where blocks are quantized: cpu (default), cuda")
    one.add_argument("--rank", type=int, metavar="R", help="svdquant: rank of the branch, 0, 16 (default), 32 or 64")
    one.add_argument("--recipe", choices=RECIPES, help="svdquant: default, or iterative (as published)")
    one.add_argument("--no-hadamard", dest="hadamard", action="store_false", help="svdquant: leave out the rotation")
    one.add_argument(
        "--scales", choices=SCALES,
        help="group (default); two-level: an integer 1..15 times one scale a row, for INT8 tensor cores (default of an "
        "OmniVoice with 4 bits); channel: one scale a row",
    )  # fmt: skip
    one.add_argument(
        "--override", action="append", default=[], metavar="NAME=A",
        help="activations of the linears of this name: a4, a8, a8-token or a16 (repeatable)",
    )  # fmt: skip
    one.add_argument(
        "--budget", type=float, metavar="B",
        help="w4a4: bits of activations on average, 4 .. 8; the most sensitive inputs, as measured, run at 8",
    )  # fmt: skip
    one.add_argument("--group", type=int, metavar="N", help="group size along K, -1 for one group a row")
    one.add_argument("--symmetric", action="store_true", default=None, help="signed codes without zero points")
    one.add_argument(
        "--activation", choices=("group", "token", "none"), help="int8 scale per group or token; none: float"
    )
    one.add_argument("--tokens", type=int, metavar="N", help="calibration tokens")
    one.add_argument("--skip", action="append", metavar="NAME", help="leave linears of this name dense (repeatable)")
    one.add_argument("--head", action="store_true", help="quantize the output head too (rounded to nearest)")
    one.add_argument(
        "--no-channel-scales", dest="channel_scales", action="store_false", help="leave out the scale search"
    )
    one.add_argument("--dense-dtype", choices=("float32", "bfloat16", "float16"), help="cast what stays dense")
    one.add_argument("--resume-dir", metavar="DIR", help="where finished blocks are kept (default: OUT.partial)")


def quantize(args: argparse.Namespace) -> int:
    from lowbit.cli import jobs

    refuse_cluster(args, "jobs")
    if args.jobs is not None:
        return jobs.run(args)
    if args.model is None or args.out is None:
        raise FormatError(f"quantize: found {args.model or 'nothing'}, accepted are MODEL and OUT, or --jobs FILE")
    out = Path(args.out)
    report = quantize_one(args)
    size = sum(file.stat().st_size for file in out.glob("*.safetensors"))
    if args.json:
        as_json({**report.to_dict(), "out": str(out), "file_bytes": size})
        return 0
    table("", *report.table())
    if report.budget is not None:
        _show(report.budget)
    print(f"{len(report.rows)} linears in {report.seconds:.0f} s; wrote {out} ({megabytes(size)} MB)")
    return 0


def method_of(args: argparse.Namespace) -> str:
    """The method of a quantization. FormatError for options that do not fit it."""
    from lowbit.models import api

    method: str = args.method or api.default_method(SCHEMES[args.scheme])
    if method != "svdquant" and (args.rank is not None or args.recipe or not args.hadamard):
        raise FormatError(f"--rank, --recipe, --no-hadamard: found with method {method}, accepted is --method svdquant")
    if method != "rtn" and args.scheme != "fp16" and not args.calibration:
        raise FormatError("--calibration: found nothing, accepted is a text or JSONL file (or --method rtn)")
    return method


def quantize_one(args: argparse.Namespace) -> Report:
    """Write what the options say. Finished blocks are kept until then, and found again by another try."""
    import torch

    from lowbit.models.directory import quantize_directory
    from lowbit.models.load import local_directory
    from lowbit.models.omnivoice import is_omnivoice
    from lowbit.models.omnivoice_quantize import quantize_omnivoice

    source, out = local_directory(args.model), Path(args.out)
    _not_the_same(source, out)
    method = method_of(args)
    resume = Path(args.resume_dir) if args.resume_dir else out.with_name(out.name + ".partial")
    args.after_stop = f"finished blocks are in {resume}, the same command resumes there"
    shared: dict[str, Any] = dict(
        group_size=args.group, symmetric=args.symmetric, activation=args.activation, skip=args.skip or (),
        channel_scales=args.channel_scales, resume_dir=resume, tokens=args.tokens, progress=sys.stderr.isatty(),
        rank=16 if args.rank is None else args.rank, recipe=args.recipe or "default", hadamard=args.hadamard,
        overrides=dict(parse(text) for text in args.override), device=args.device,
    )  # fmt: skip
    if is_omnivoice(source):
        _only_for_text(args)
        report: Report = quantize_omnivoice(
            source, out, args.scheme, method, args.calibration, scales=args.scales, **shared
        )
    else:
        report = quantize_directory(
            source, out, args.scheme, method, args.calibration, head=args.head, blocks=args.blocks, budget=args.budget,
            scales=args.scales or "group", dense_dtype=getattr(torch, args.dense_dtype) if args.dense_dtype else None, **shared,
        )  # fmt: skip
    if not args.resume_dir:
        shutil.rmtree(resume, ignore_errors=True)
    return report


def _only_for_text(args: argparse.Namespace) -> None:
    """An OmniVoice's checkpoint holds the linears of its stack alone, so there is nothing else to choose."""
    given = {
        "--budget": args.budget,
        "--head": args.head or None,
        "--blocks": args.blocks,
        "--dense-dtype": args.dense_dtype,
    }
    for name, value in given.items():
        if value is not None:
            raise FormatError(f"{name}: found {value!r} with an OmniVoice, accepted is to leave it out")


def _show(budget: Budget) -> None:
    """Every input, what it loses at 4 bits, and what it got; the most sensitive per weight first."""
    print()
    found = sorted(budget.choices, key=lambda c: -(c.sensitivity or 0.0) / c.weights)
    table("", ["input of", "weights", "KL at 4 bits", "bits"], [
        [short(c.names), c.weights, "override" if c.sensitivity is None else f"{c.sensitivity:.6f}", c.bits]
        for c in found
    ])  # fmt: skip
    losses = f"{budget.as_chosen:.5f} as chosen, {budget.everything_at_4:.5f} at 4 bits everywhere"
    print(f"activations: {budget.average:.3f} bits on average (asked: {budget.asked:g})")
    print(f"KL to 8 bits everywhere, over {budget.tokens} tokens of the calibration: {losses}")


def _not_the_same(source: Path, out: Path) -> None:
    if out.exists() and not out.is_dir():
        raise FormatError(f"{out}: found a file, accepted is a directory")
    if out.exists() and source.resolve() == out.resolve():
        raise FormatError(f"{out}: found the input itself, accepted is another directory")


def convert(args: argparse.Namespace) -> int:
    from lowbit.models.convert import convert as run
    from lowbit.models.load import local_directory

    source, out = local_directory(args.model), Path(args.out)
    _not_the_same(source, out)
    args.after_stop = f"{out} holds nothing unfinished"
    result = run(source, out, args.to)
    if args.json:
        as_json(result._asdict())
        return 0
    print(f"{result.layers} linears, {result.source} -> {result.target}; wrote {out} ({megabytes(result.bytes)} MB)")
    for note in result.notes:
        print(f"note: {note}", file=sys.stderr)
    return 0
