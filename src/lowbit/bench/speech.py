"""Lines of ``lowbit eval --speech --json`` as one table: what quantizing a speech recogniser cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.bench import markdown

Line = Mapping[str, Any]
TARGETS = {"w4a8 g64": 0.196, "w4a4 g64": 0.205}  # nats a token, by scheme
COLUMNS = ("model", "weights", "method", "activations", "bits a weight", "nll a token", "to reach", "word errors")
TOLD = """Mean negative log likelihood of the transcripts, nats a token, each token after the right ones before it; word errors of
greedy transcription. Calibrated on other clips than the scored ones (docs/accuracy.md). **Bold** where it is within what
was to be reached."""


def chapter(lines: Sequence[Line]) -> str:
    """The table of all lines, a row a line."""
    first = lines[0]
    runs = ", ".join(dict.fromkeys(f"torch {x['torch']}, {x['date']}" for x in lines))
    sources = ", ".join(f"`{name}`" for name in dict.fromkeys(x["source"] for x in lines))
    return "\n\n".join(
        [
            f"## Speech: {first['tokens']} tokens of {first['clips']} clips",
            f"{runs}; lines: {sources}",
            markdown.table(COLUMNS, map(_cells, lines)),
            TOLD,
        ]
    )


def _cells(x: Line) -> tuple[str, ...]:
    reach = TARGETS.get(x["scheme"])
    nll = f"{x['nll']:.4f}"
    how = x["method"] + (f", rank {x['rank']}" if x["rank"] else "")
    return (
        x["model"], x["scheme"], how, x["activation"], f"{x['bits_per_weight']:.3f}",
        f"**{nll}**" if reach is not None and x["nll"] <= reach else nll, "" if reach is None else f"{reach:g}",
        "" if x.get("wer") is None else f"{100 * x['wer']:.2f} %",
    )  # fmt: skip
