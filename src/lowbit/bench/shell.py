"""What the benches share at the command line: types of options, where JSON lines go, padded text."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path


@contextmanager
def sink(target: str | None) -> Iterator[Callable[[str], None]]:
    """Where JSON lines go: nowhere, to stdout ("-"), or to the end of a file."""
    if target is None:
        yield lambda line: None
    elif target == "-":
        yield lambda line: print(line, flush=True)
    else:
        with Path(target).open("a", encoding="utf-8") as file:
            yield lambda line: print(line, file=file, flush=True)


def padded(rows: Sequence[Sequence[str]]) -> list[str]:
    """Rows of equal length as lines: the first column to the left, the others to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(c.ljust(w) if i == 0 else c.rjust(w) for i, (c, w) in enumerate(zip(row, widths))) for row in rows
    ]


def integers(text: str) -> list[int]:
    """Comma-separated whole numbers from 1 on."""
    values = [int(part) for part in text.split(",")]
    if min(values) < 1:
        raise argparse.ArgumentTypeError(f"found {min(values)}, accepted is 1 or more")
    return values


def count(text: str) -> int:
    """One whole number from 1 on."""
    (value,) = integers(text.replace(",", " "))
    return value


def words(*accepted: str) -> Callable[[str], list[str]]:
    """Comma-separated words, each one of ``accepted``."""

    def parse(text: str) -> list[str]:
        found = [word for word in text.split(",") if word]
        wrong = [word for word in found if word not in accepted]
        if wrong:
            raise argparse.ArgumentTypeError(f"found {wrong[0]!r}, accepted are {', '.join(accepted)}")
        return found

    return parse
