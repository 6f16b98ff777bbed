"""``eval``: what a model's quantization cost, on a text: one model's perplexity, or several against a reference."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from lowbit.cli import speech
from lowbit.cli.show import as_json, bar, loading, megabytes, read_text, table
from lowbit.types import FormatError


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the command."""
    score = commands.add_parser("eval", parents=[common], help="perplexity on a text, of quantized or plain models")
    score.add_argument("model", nargs="+", help="several are compared with the first plain one")
    score.add_argument("--text", metavar="FILE")
    speech.add_options(score)
    score.add_argument("--tokens", type=int, default=16384, metavar="N")
    score.add_argument("--context", type=int, default=1024, metavar="N")
    score.add_argument("--skip", type=int, default=0, metavar="N", help="tokens to leave out at the beginning")
    score.add_argument(
        "--exact",
        action="store_true",
        help="simulate the 4-bit activations that a layer declares (default: run in 8 bits)",
    )
    score.add_argument("--reference", metavar="DIR", help="compare with this one")
    score.add_argument("--kl", action="store_true", help="KL(reference || model); both are in memory at once")
    score.add_argument(
        "--agreement", type=int, nargs="?", const=16, default=0, metavar="N",
        help="let both continue N prompts of the text (16), 64 tokens each, and say where they part",
    )  # fmt: skip
    score.add_argument("--layers", action="store_true", help="error of every linear's output on the text")
    score.add_argument("--report", metavar="FILE", help="write one HTML page with tables and plots (implies --layers)")
    loading(score)
    score.set_defaults(run=evaluate)


def evaluate(args: argparse.Namespace) -> int:
    if args.speech:
        return speech.evaluate(args)
    if not args.text:
        raise FormatError("eval: found neither --text nor --speech, accepted is one of them")
    import torch

    from lowbit.prove import several

    if args.agreement < 0:
        raise FormatError(f"--agreement: found {args.agreement}, accepted is a number of prompts")
    questions = several.Questions(
        args.context, args.tokens, args.skip, args.activation, getattr(torch, args.dtype), args.exact, args.kl,
        args.agreement, args.layers or bool(args.report and (len(args.model) > 1 or args.reference)),
    )  # fmt: skip
    found = several.evaluate(args.model, read_text(args.text), questions, args.reference, bar)
    if args.report:
        from lowbit.prove import page

        budgets = {directory: several.budget_of(directory) for directory in args.model}
        page.write(args.report, found, {d: b for d, b in budgets.items() if b is not None}, args.text)
    rows = found["models"]
    if args.json:
        as_json(rows[0] if len(rows) == 1 and found["reference"] is None else found)
        return 0
    _one(rows) if found["reference"] is None else _several(rows, found["reference"])
    for row in rows:
        if "layers" in row:
            _layers(row)
    if args.report:
        print(f"wrote {args.report}")
    return 0


def _one(rows: Sequence[Mapping[str, Any]]) -> None:
    columns = ["model", "perplexity", "tokens scored", "MB in memory", "tokens/s"]
    table("", columns, [
        [r["model"], f"{r['perplexity']:.4f}", r["scored"], megabytes(r["bytes"]), f"{r['scored'] / r['seconds']:.1f}"]
        for r in rows
    ])  # fmt: skip


def _several(rows: Sequence[Mapping[str, Any]], reference: str) -> None:
    """One row a model; columns that no model has are left out."""
    wanted = {name: cell for name, cell in COLUMNS.items() if any(cell(row) for row in rows)}
    cells = [[row["model"], *(cell(row) or "-" for cell in wanted.values())] for row in rows]
    table("", ["model", *wanted], cells)
    asked = next((row["generation"] for row in rows if "generation" in row), None)
    print(f"{rows[0]['scored']} tokens scored; against {reference}; ± is the standard error of a paired comparison")
    if asked:
        print(
            f"same text: tokens before the first difference, of {asked['length']} after each of {asked['prompts']} prompts"
        )


def _pair(key: str, form: str) -> Callable[[Mapping[str, Any]], str]:
    return lambda r: f"{r[key]:{form}} ± {r[key + '_se']:{form}}" if key in r else ""


COLUMNS: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "perplexity": lambda r: f"{r['perplexity']:.4f}",
    "ratio": _pair("ratio", ".4f"),
    "KL": _pair("kl", ".4f"),
    "top-1": lambda r: f"{100 * r['top1']:.1f} %" if "top1" in r else "",
    "same text": lambda r: f"{r['generation']['first_difference']:.1f}" if "generation" in r else "",
    "bits/weight": lambda r: f"{r['bits_per_weight']:.3f}",
    "MB on disk": lambda r: megabytes(r["disk_bytes"]),
    "MB in memory": lambda r: megabytes(r["bytes"]),
    "seconds": lambda r: f"{r['seconds']:.1f}",
}


def _layers(row: Mapping[str, Any]) -> None:
    """Errors of one model's layers, a row a block and a column a linear."""
    from lowbit.prove.heat import grid

    found = grid(row["layers"])
    print()
    table(f"{row['model']}: relative error of each linear's output", ["block", *found.columns], [
        [name, *("-" if value is None else f"{value:.4f}" for value in values)]
        for name, values in zip(found.rows, found.values, strict=True)
    ])  # fmt: skip
