"""Where the time of a run went: ``torch.profiler``, then arithmetic on its events.

``analyse`` is a function of events alone; ``profile`` makes the events. On a GPU the events that count are kernels and
copies, and a gap is time in which no stream had one; on a CPU they are operators by their own time (without the
operators inside them), and a gap is time in none.
"""

from __future__ import annotations

import os
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from lowbit.prove import trace
from lowbit.prove.kernel_names import CATEGORIES, of_kernel, of_operator
from lowbit.prove.profile_gaps import BOUNDARY, GAPS, Gap, Inside, busy_and_spaces, gap_of, inside
from lowbit.prove.trace import Event
from lowbit.types import FormatError


class Row(NamedTuple):
    """One category: time, its share of all categories, how many kernels or operators, and their mean."""

    category: str
    ms: float
    share: float
    events: int
    mean_us: float


class Profile(NamedTuple):
    """``span_ms`` from the first event to the end of the last, of all ``steps``; ``busy_ms`` of it with something
    running. ``launches`` are calls that send work (a graph is one), None where the trace has none; ``launch_us`` the
    CPU time they took, ``late_us`` the idle time in gaps whose next kernel had not been sent when they began.
    ``boundary_us`` and ``boundaries`` are of the gaps up to ``BOUNDARY``. ``inside``: of a GPU, what is between the first and the
    last kernel of a generation. ``wall_ms``: a step without the profiler."""

    device: str  # "cpu" or "gpu", where the events are
    steps: int
    span_ms: float
    busy_ms: float
    rows: list[Row]  # one a category
    events: int  # kernels and copies, or operators
    launches: int | None
    launch_us: float
    late_us: float
    gap_count: int  # of all gaps; ``gaps`` has the longest
    boundaries: int
    boundary_us: float
    gaps: list[Gap]
    inside: Inside | None = None
    wall_ms: float | None = None
    trace: str | None = None

    @property
    def idle(self) -> float:
        """Share of the span in which nothing ran."""
        return 1 - self.busy_ms / self.span_ms if self.span_ms else 0.0

    def as_dict(self) -> dict[str, Any]:
        """For JSON; what is a step's is divided by the steps."""
        return {
            **self._asdict(), "rows": [row._asdict() for row in self.rows], "gaps": [gap._asdict() for gap in self.gaps],
            "inside": None if self.inside is None else self.inside.as_dict(), "idle_share": self.idle, "per_step": self.per_step(),
        }  # fmt: skip

    def per_step(self) -> dict[str, float | None]:
        """Figures of one step: span and busy time, events, launches, CPU time in launches, idle time by cause."""
        n = self.steps
        return {
            "span_ms": self.span_ms / n, "busy_ms": self.busy_ms / n, "events": self.events / n,
            "launches": None if self.launches is None else self.launches / n, "launch_us": self.launch_us / n,
            "late_us": self.late_us / n, "boundary_us": self.boundary_us / n,
        }  # fmt: skip


def analyse(events: Sequence[Event], steps: int = 1, gaps: int = GAPS) -> Profile:
    """The figures of ``events`` (of a GPU where there is a kernel among them, else of the CPU) over ``steps`` steps.

    Stacks are those the events carry; see ``trace.with_stacks``. FormatError where nothing ran.
    """
    if steps < 1:
        raise FormatError(f"steps: found {steps}, accepted is 1 or more")
    on_gpu = [event for event in events if event.kind == "gpu"]
    ran = sorted(on_gpu or [event for event in events if event.kind == "op"], key=lambda event: event.start)
    if not ran:
        raise FormatError("profile: found no kernel and no operator, accepted is a run that has some")
    parts = [(e.name, e.duration) for e in ran] if on_gpu else _self_times(events)
    sent = _outermost([event for event in events if event.kind == "launch"])
    sender: dict[int | None, Event] = {}
    if on_gpu:
        sender = {event.correlation: event for event in sent if event.correlation is not None}
    busy, spaces = busy_and_spaces(ran)
    found = [gap_of(before, after, sender) for before, after in spaces]
    marks = [event for event in events if event.kind == "mark"]
    small = [gap.us for gap in found if gap.us <= BOUNDARY]
    largest = sorted(found, key=lambda gap: -gap.us)[:gaps]
    return Profile(
        "gpu" if on_gpu else "cpu", steps, (max(e.end for e in ran) - ran[0].start) / 1e3, busy / 1e3,
        _rows(parts, of_kernel if on_gpu else of_operator), len(parts), len(sent) if on_gpu and sent else None,
        sum(e.duration for e in sent), sum(gap.us for gap in found if gap.late), len(found), len(small), sum(small), largest,
        inside(ran, marks, sender, gaps) if on_gpu else None,
    )  # fmt: skip


def _outermost(sent: Sequence[Event]) -> list[Event]:
    """Launches, without those of the driver by which the runtime sends: they have its correlation."""
    first: dict[int | None, Event] = {}
    return [
        e
        for e in sorted(sent, key=lambda e: e.start)
        if e.correlation is None or first.setdefault(e.correlation, e) is e
    ]


def _rows(parts: Sequence[tuple[str, float]], category: Callable[[str], str]) -> list[Row]:
    """A row for every category that occurs, the longest first."""
    sums = {name: [0.0, 0] for name in CATEGORIES}
    for name, us in parts:
        entry = sums[category(name)]
        entry[0] += us
        entry[1] += 1
    total = sum(us for us, _ in sums.values()) or 1.0
    rows = [Row(name, us / 1e3, us / total, int(n), us / n) for name, (us, n) in sums.items() if n]
    return sorted(rows, key=lambda row: -row.ms)


def _self_times(events: Sequence[Event]) -> list[tuple[str, float]]:
    """Operators with the time that was not in operators they called."""
    nested = list(trace.nest([event for event in events if event.kind == "op"]))
    inner: dict[int, float] = {}
    for event, parents in nested:
        if parents:
            inner[id(parents[-1])] = inner.get(id(parents[-1]), 0.0) + event.duration
    return [(event.name, max(event.duration - inner.get(id(event), 0.0), 0.0)) for event, _ in nested]


def profile(
    fn: Callable[[], object],
    steps: int = 1,
    *,
    per_call: int = 1,
    warmup: int = 1,
    stacks: bool = True,
    path: str | os.PathLike[str] | None = None,
) -> Profile:
    """Run ``fn`` ``warmup`` times, once with a clock, then ``steps`` times under torch.profiler.

    A call of ``fn`` is ``per_call`` steps of the figures (tokens, decoding steps). ``stacks`` records the Python calls
    too, which names the cause of a gap and makes the CPU slower: compare ``wall_ms`` with the span. ``path`` (.json or
    .json.gz) keeps the trace, for chrome://tracing or Perfetto. FormatError where nothing ran.
    """
    if steps < 1 or per_call < 1:
        raise FormatError(f"profile: found {steps} steps of {per_call}, accepted is 1 or more of each")
    for _ in range(warmup):
        fn()
    _synchronize()
    began = time.perf_counter()
    fn()
    _synchronize()
    wall = time.perf_counter() - began
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "trace.json" if path is None else Path(path)
        _record(fn, steps, per_call, stacks, file)
        found = analyse(trace.with_stacks(trace.read(file)), steps * per_call)
    return found._replace(wall_ms=1e3 * wall / per_call, trace=None if path is None else str(path))


def of_file(path: str | os.PathLike[str], steps: int | None = None) -> Profile:
    """The figures of a trace that is there already. ``steps``: None counts its marks, and takes 1 where it
    has none. FormatError for a file that is absent, no trace, or without events."""
    events = trace.with_stacks(trace.read(path))
    return analyse(events, steps or trace.steps_of(events) or 1)._replace(trace=str(path))


_NOISE = ("<built-in", "torch/nn/modules/module.py", "torch/_ops.py", "torch/utils/_contextlib.py", "<string>")


def cause(stack: Sequence[str], most: int = 3) -> str:
    """The innermost frames of a stack in one line, without those that every call goes through."""
    told = [frame for frame in stack if not frame.startswith(_NOISE)]
    return " > ".join(told[-most:])


def _synchronize() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _record(fn: Callable[[], object], calls: int, steps: int, stacks: bool, file: Path) -> None:
    kinds = [torch.profiler.ProfilerActivity.CPU]
    if torch.cuda.is_available():
        kinds.append(torch.profiler.ProfilerActivity.CUDA)
        with torch.profiler.profile(activities=kinds):  # the first use of CUPTI makes gaps of its own
            fn()
            _synchronize()
    file.parent.mkdir(parents=True, exist_ok=True)
    with torch.profiler.profile(activities=kinds, with_stack=stacks) as recorded:
        for call in range(calls):
            with torch.profiler.record_function(trace.mark(call, steps)):
                fn()
        _synchronize()
    recorded.export_chrome_trace(str(file))
