"""What a quantization did, and how it is told while it runs."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from tqdm import tqdm

from ..quantize import Row
from ..types import Scheme

if TYPE_CHECKING:
    from .sensitivity import Budget

Progress = bool | Callable[[int, int, str], None]


@dataclass
class Report:
    """What was done: one row per linear, in the order of the model."""

    scheme: Scheme
    method: str
    rows: list[Row] = field(default_factory=list)
    calibration_tokens: int = 0
    seconds: float = 0.0
    budget: Budget | None = None  # where the activations of some linears were chosen by measurement

    def table(self) -> tuple[list[str], list[list[str]]]:
        """Column names and cells: the error of plain rounding and that of what is stored, the rank of the branch, what
        the 4-bit scales of the activations were clipped to, the damping of the Hessian."""
        columns = ["layer", "method", "error rounded", "error", "rank", "clip", "damp", "tokens", "notes"]
        rows = [
            [
                r.name, r.method, f"{r.error_before:.4f}", f"{r.error_after:.4f}", str(r.rank or "-"),
                "-" if r.clip is None else f"{r.clip:g}", "-" if r.damping is None else f"{r.damping:g}",
                str(r.tokens), "; ".join(r.notes),
            ]
            for r in self.rows
        ]  # fmt: skip
        return columns, rows

    def __str__(self) -> str:
        columns, rows = self.table()
        widths = [max(len(line[i]) for line in [columns, *rows]) for i in range(len(columns))]
        return "\n".join(
            "  ".join(cell.ljust(w) if i in (0, 1, 8) else cell.rjust(w) for i, (cell, w) in enumerate(zip(line, widths)))
            .rstrip()
            for line in [columns, *rows]
        )  # fmt: skip

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        budget = None if self.budget is None else self.budget.to_dict()
        return {**asdict(self), "rows": [r._asdict() for r in self.rows], "budget": budget}


@contextmanager
def reporter(progress: Progress, total: int) -> Iterator[Callable[[str], None]]:
    """What to call after each block: a bar with an estimate (True), or a function (done, total, label)."""
    done = 0
    with tqdm(total=total, unit="block", desc="quantizing", disable=progress is not True) as bar:

        def tell(label: str) -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(label)
            bar.update()
            if callable(progress):
                progress(done, total, label)

        yield tell
