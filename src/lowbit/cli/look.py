"""Commands that only look: ``inspect`` a checkpoint, ``explain`` which kernels a model runs."""

from __future__ import annotations

import argparse
from typing import Any

from lowbit.cli.show import as_json, from_pairs, megabytes, table


def add(commands: Any, common: argparse.ArgumentParser) -> None:
    """Register the two commands."""
    one = commands.add_parser("inspect", parents=[common], help="what is in a checkpoint, layer by layer")
    one.add_argument("directory")
    one.set_defaults(run=inspect)
    two = commands.add_parser(
        "explain", parents=[common], help="which kernel runs each layer, and why not a faster one"
    )
    two.add_argument("model")
    two.add_argument("--activation", choices=("group", "token", "none"), help="override what the checkpoint declares")
    two.set_defaults(run=explain)


def inspect(args: argparse.Namespace) -> int:
    from lowbit.prove.inspect import inspect_checkpoint

    info = inspect_checkpoint(args.directory)
    if args.json:
        as_json({**info._asdict(), "layers": from_pairs(info.layers)})
        return 0
    columns = ["layer", "format", "bits", "group", "symmetric", "act-order", "shape", "bytes", "activation", "extras"]
    rows = [
        [
            row.name, row.format, row.bits, row.group, _yes(row.symmetric), _yes(row.act_order), f"{row.n}x{row.k}",
            row.bytes, row.activation, row.extras or "-",
        ]
        for row in info.layers
    ]  # fmt: skip
    if rows:
        table("", columns, rows)
    for row in info.layers:
        for note in row.notes:
            print(f"note: {row.name}: {note}")
    dense = f"{info.dense_tensors} dense tensors ({megabytes(info.dense_bytes)} MB)"
    print(f"{info.format}: {len(info.layers)} quantized linears, {dense}, {megabytes(info.total_bytes)} MB in all")
    return 0


def _yes(value: bool) -> str:
    return "yes" if value else "no"


def explain(args: argparse.Namespace) -> int:
    from lowbit.models import api, load

    report = api.explain(load.load(args.model, activation=args.activation))
    if args.json:
        as_json({"layers": report.rows})
        return 0
    columns, rows = report.table()
    table("", columns, rows)
    for line in report.why_not():
        print(line)
    return 0
