"""Time of a GPU in which nothing runs: gaps, the boundaries of kernels inside a graph's replay, and what caused them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from lowbit.prove.trace import GENERATION, Event, is_call

BOUNDARY = 5.0  # us; a shorter gap is the end of one kernel and the start of the next
GAPS = 10
TICK = 5e-4  # us; half a nanosecond, which is what a trace counts in: less is rounding


class Gap(NamedTuple):
    """Time with nothing running, from the end of ``before`` to the start of ``after``; ``stack``: what the CPU was in
    when it sent ``after``, the outermost first; ``late``: it was sent after the gap had begun (None: not known)."""

    start_us: float
    us: float
    before: str
    after: str
    late: bool | None
    stack: tuple[str, ...]


class Inside(NamedTuple):
    """What a GPU did between the first kernel of a generation and its last; of several, sums.

    ``of``: "generation" (the decoding loop of an utterance), "call" where the trace marks no generation, "trace" where it
    marks neither. ``step_gaps`` and ``step_gap_us`` are those from the first replay of a graph to the end of the last one:
    the decoding steps. ``gap_count`` and ``gap_us`` are of gaps above BOUNDARY, ``gaps`` the largest. ``replays`` of graphs
    had ``replay_events`` kernels, copies and fills; ``boundaries`` times one of them ended and the next began up to BOUNDARY later,
    ``boundary_us`` in all, and ``overlaps`` times the next had begun already, by ``overlap_us`` in all (programmatic
    dependent launch, or branches).
    """

    of: str
    runs: int
    span_us: float
    busy_us: float
    events: int
    gap_count: int
    gap_us: float
    gaps: list[Gap]
    step_gaps: int
    step_gap_us: float
    replays: int
    replay_events: int
    boundaries: int
    boundary_us: float
    overlaps: int
    overlap_us: float

    @property
    def boundary_mean_us(self) -> float:
        """Boundary time a kernel of a replay."""
        return self.boundary_us / self.replay_events if self.replay_events else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            **self._asdict(), "gaps": [gap._asdict() for gap in self.gaps], "boundary_mean_us": self.boundary_mean_us,
        }  # fmt: skip


def busy_and_spaces(ran: Sequence[Event]) -> tuple[float, list[tuple[Event, Event]]]:
    """Microseconds in which at least one event ran, and the pairs of events around the time in which none did. ``ran`` is
    in order of start."""
    busy, begin, last = 0.0, ran[0].start, ran[0]
    spaces: list[tuple[Event, Event]] = []
    for event in ran[1:]:
        if event.start > last.end:
            busy += last.end - begin
            begin = event.start
            spaces.append((last, event))
        if event.end > last.end:
            last = event
    return busy + last.end - begin, spaces


def gap_of(before: Event, after: Event, sender: Mapping[int | None, Event]) -> Gap:
    """``sender``: a correlation to the launch of a GPU's event; operators of the CPU have none."""
    launch = sender.get(after.correlation)
    late = None if launch is None else launch.start >= before.end
    stack = after.stack if launch is None else launch.stack
    return Gap(before.end, after.start - before.end, before.name, after.name, late, stack)


def inside(
    ran: Sequence[Event], marks: Sequence[Event], sender: Mapping[int | None, Event], most: int = GAPS
) -> Inside:
    """``ran``: events of a GPU in order of start; they belong to the mark in which they were sent."""
    generations = [mark for mark in marks if mark.name == GENERATION]
    calls = [mark for mark in marks if is_call(mark)]
    of = "generation" if generations else "call" if calls else "trace"
    groups = _groups(ran, generations or calls, sender) if generations or calls else [list(ran)]
    span = busy = 0.0
    found: list[Gap] = []
    for group in groups:
        some, spaces = busy_and_spaces(group)
        busy += some
        span += max(event.end for event in group) - group[0].start
        found += [gap_of(before, after, sender) for before, after in spaces]
    large = sorted((gap for gap in found if gap.us > BOUNDARY), key=lambda gap: -gap.us)
    between: list[Gap] = []
    for group in groups:
        replayed = [event for event in group if _is_replayed(event, sender)]
        if replayed:
            first, last = replayed[0].start, max(event.end for event in replayed)
            between += [gap for gap in large if first <= gap.start_us < last]
    return Inside(
        of, len(groups), span, busy, sum(map(len, groups)), len(large), sum(gap.us for gap in large), large[:most],
        len(between), sum(gap.us for gap in between),
        *_replays([event for group in groups for event in group], sender),
    )  # fmt: skip


def _groups(ran: Sequence[Event], marks: Sequence[Event], sender: Mapping[int | None, Event]) -> list[list[Event]]:
    """The events that each mark sent; marks that sent none are left out."""
    groups: list[list[Event]] = [[] for _ in marks]
    for event in ran:
        when = sender.get(event.correlation, event).start
        for mark, group in zip(marks, groups, strict=True):
            if mark.start <= when <= mark.end:
                group.append(event)
                break
    return [group for group in groups if group]


def _is_replayed(event: Event, sender: Mapping[int | None, Event]) -> bool:
    launch = sender.get(event.correlation)
    return event.correlation is not None and launch is not None and "GraphLaunch" in launch.name


def _replays(ran: Sequence[Event], sender: Mapping[int | None, Event]) -> tuple[int, int, int, float, int, float]:
    """Of graph launches, whose kernels share their correlation: replays, events, boundaries and overlaps."""
    groups: dict[int, list[Event]] = {}
    for event in ran:
        if event.correlation is not None and _is_replayed(event, sender):
            groups.setdefault(event.correlation, []).append(event)
    close: list[float] = []
    over: list[float] = []
    for group in groups.values():
        end = group[0].end
        for event in group[1:]:
            apart = event.start - end
            if apart < -TICK:
                over.append(min(end, event.end) - event.start)
            elif apart <= BOUNDARY:
                close.append(max(apart, 0.0))
            end = max(end, event.end)
    return len(groups), sum(map(len, groups.values())), len(close), sum(close), len(over), sum(over)
