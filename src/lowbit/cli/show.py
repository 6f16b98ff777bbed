"""What commands share: options; results and errors on the terminal: tables, plain text in a pipe, JSON on request."""

from __future__ import annotations

import argparse
import json
import math
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from lowbit.types import FormatError


def loading(command: argparse.ArgumentParser) -> None:
    """The options of every command that loads a model to run it."""
    command.add_argument(
        "--activation", choices=("group", "token", "none"), help="override what the checkpoint declares"
    )
    command.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), default="float32", help="of what is dense"
    )


def clustering(command: argparse.ArgumentParser, what: str) -> None:
    """The options of every command that spreads its work over a Ray cluster."""
    command.add_argument(
        "--ray", action="store_true",
        help=f"spread {what} over the cluster that RAY_ADDRESS names, or over processes of this machine (lowbit[cluster])",
    )  # fmt: skip
    command.add_argument(
        "--workers", type=int, metavar="N",
        help="with --ray: processes, each of --threads CPUs (4), or of a GPU (default: what there is room for)",
    )  # fmt: skip


def refuse_cluster(args: argparse.Namespace, many: str) -> None:
    """FormatError for options of a cluster that do not fit; ``many`` is the option that names the work."""
    if args.workers is not None and not args.ray:
        raise FormatError(f"--workers: found {args.workers} without --ray, accepted is both")
    if args.workers is not None and args.workers < 1:
        raise FormatError(f"--workers: found {args.workers}, accepted is 1 or more")
    if args.ray and getattr(args, many) is None:
        raise FormatError(f"--ray: found no --{many}, accepted is --{many} FILE: there is nothing to spread")
    if args.ray and args.device not in ("cpu", "cuda"):
        raise FormatError(f"--device: found {args.device}, accepted with --ray is cpu or cuda (Ray picks which)")


def table(title: str, columns: Sequence[str], rows: Sequence[Sequence[object]]) -> None:
    """Print one table; numbers are right-aligned. In a pipe: the same columns, padded with spaces."""
    cells = [["" if cell is None else str(cell) for cell in row] for row in rows]
    right = [bool(cells) and all(_numeric(row[i]) for row in cells) for i in range(len(columns))]
    if sys.stdout.isatty() and find_spec("rich") is not None:
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(title=title or None)
        for column, number in zip(columns, right, strict=True):
            grid.add_column(column, justify="right" if number else "left", overflow="fold")
        for row in cells:
            grid.add_row(*(Text(cell) for cell in row))
        Console().print(grid)
        return
    widths = [
        max(len(column), *(len(row[i]) for row in cells)) if cells else len(column) for i, column in enumerate(columns)
    ]
    if title:
        print(title)
    for row in [list(columns), *cells]:
        padded = [cell.rjust(w) if n else cell.ljust(w) for cell, w, n in zip(row, widths, right, strict=True)]
        print("  ".join(padded).rstrip())


def _numeric(cell: str) -> bool:
    return cell.replace(".", "").replace(",", "").replace("-", "").isdigit() or cell in ("", "-")


def as_json(value: object) -> None:
    """Print one JSON document on one line."""
    print(json.dumps(_finite(value), default=str, allow_nan=False))


def _finite(value: object) -> object:
    """NaN and Inf have no form in JSON: they become null."""
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(key): _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, (list, tuple)) else value


def megabytes(count: int) -> str:
    """Bytes as MB of 10^6, one decimal."""
    return f"{count / 1e6:,.1f}"


def read_text(path: str) -> str:
    """A UTF-8 text file. FormatError naming the file where it is absent or not UTF-8."""
    try:
        return Path(path).read_text("utf-8")
    except OSError as error:
        raise FormatError(f"{path}: found {error.strerror or error}, accepted is a UTF-8 text file") from error
    except UnicodeDecodeError as error:
        raise FormatError(
            f"{path}: found bytes that are not UTF-8 at {error.start}, accepted is a UTF-8 text file"
        ) from error


def bar(label: str, unit: str = "window") -> Callable[[int, int], None]:
    """A progress callback (done, total) that draws on stderr where that is a terminal."""
    from tqdm import tqdm

    state: dict[str, Any] = {}

    def update(done: int, total: int) -> None:
        if "bar" not in state:
            state["bar"] = tqdm(total=total, desc=label, unit=unit, disable=None, leave=False)
        state["bar"].update(done - state["bar"].n)
        if done >= total:
            state["bar"].close()

    return update


def short(names: Sequence[str]) -> str:
    """Linears of one module in few words: "model.layers.0.self_attn.q_proj, k_proj"; no other name is shortened."""
    stem = names[0].rpartition(".")[0]
    same = all(name.rpartition(".")[0] == stem for name in names)
    return ", ".join([names[0], *(n.rpartition(".")[2] if same else n for n in names[1:])])


def from_pairs(rows: Sequence[Any]) -> list[Mapping[str, Any]]:
    """Named tuples as dictionaries, for JSON."""
    return [row._asdict() for row in rows]
