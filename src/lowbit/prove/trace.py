"""Events of a Chrome trace as torch.profiler writes it, and which of them were around which."""

from __future__ import annotations

import gzip
import json
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.types import FormatError

_MARK = re.compile(r"lowbit call \d+, (\d+) steps$|ProfilerStep#\d+$")  # of a user annotation
_KINDS = {
    "kernel": "gpu", "gpu_memcpy": "gpu", "gpu_memset": "gpu", "cuda_runtime": "launch", "cuda_driver": "launch",
    "cpu_op": "op", "python_function": "python", "user_annotation": "mark",
}  # fmt: skip
_LAUNCH = re.compile(r"LaunchKernel|GraphLaunch|LaunchCooperative|Memcpy\w*Async|Memset\w*Async")


GENERATION = "lowbit generation"  # what the decoding loop of an utterance is marked with


class Event(NamedTuple):
    """``kind``: "gpu" (kernel, copy, fill), "launch" (the call that sent it), "op", "python" or "mark" on the CPU.
    Microseconds. ``lane``: device and stream, or process and thread. ``correlation`` of a launch and of what it sent
    are the same. ``stack``: the CPU events around it, the outermost first."""

    name: str
    start: float
    duration: float
    kind: str
    lane: str = ""
    correlation: int | None = None
    stack: tuple[str, ...] = ()

    @property
    def end(self) -> float:
        return self.start + self.duration


def read(path: str | os.PathLike[str]) -> list[Event]:
    """The events of a trace file (.json or .json.gz), in order of start; the first starts at 0.

    Calls of the CUDA runtime that send no work (synchronize, query) are left out. FormatError for a file that is absent,
    no JSON, or without events.
    """
    file = Path(path)
    try:
        data = file.read_bytes()
        document = json.loads(gzip.decompress(data) if data[:2] == b"\x1f\x8b" else data)
        raw = document["traceEvents"] if isinstance(document, dict) else document
        found = [event for item in raw if (event := _event(item)) is not None]
    except OSError as error:
        raise FormatError(f"{file}: found {error.strerror or error}, accepted is a Chrome trace") from error
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise FormatError(f"{file}: found {type(error).__name__} ({error}), accepted is a Chrome trace") from error
    if not found:
        raise FormatError(f"{file}: found no kernel and no operator, accepted is a trace of torch.profiler")
    first = min(event.start for event in found)
    return sorted((event._replace(start=event.start - first) for event in found), key=lambda event: event.start)


def _event(item: dict[str, Any]) -> Event | None:
    kind = _KINDS.get(item.get("cat", ""))
    if kind is None or item.get("ph") != "X":
        return None
    name, args = str(item["name"]), item.get("args") or {}
    if kind == "launch" and not _LAUNCH.search(name):
        return None
    lane = (
        f"device {args.get('device', 0)} stream {args.get('stream', 0)}"
        if kind == "gpu"
        else f"{item['pid']}/{item['tid']}"
    )
    correlation = args.get("correlation")
    return Event(
        name, float(item["ts"]), float(item["dur"]), kind, lane, None if correlation is None else int(correlation)
    )


class Nested(NamedTuple):
    """A CPU event with its ``parents`` on the same thread, the outermost first."""

    event: Event
    parents: tuple[Event, ...]


def nest(events: Sequence[Event]) -> Iterator[Nested]:
    """CPU events thread by thread, in order of start. One that starts inside another belongs to it."""
    lanes: dict[str, list[Event]] = {}
    for event in events:
        if event.kind != "gpu":
            lanes.setdefault(event.lane, []).append(event)
    for lane in lanes.values():
        open_: list[Event] = []
        for event in sorted(lane, key=lambda event: (event.start, -event.duration)):
            while open_ and open_[-1].end <= event.start:
                open_.pop()
            yield Nested(event, tuple(open_))
            open_.append(event)


def with_stacks(events: Sequence[Event]) -> list[Event]:
    """The same events; launches and operators have as their stack the names of what was around them."""
    out = [event for event in events if event.kind == "gpu"]
    for event, parents in nest(events):
        wanted = event.kind in ("launch", "op") and not event.stack
        out.append(event._replace(stack=tuple(p.name for p in parents)) if wanted else event)
    return sorted(out, key=lambda event: event.start)


def mark(call: int, steps: int) -> str:
    """What a user annotation is called that ``steps_of`` counts."""
    return f"lowbit call {call}, {steps} steps"


def is_call(event: Event) -> bool:
    """Whether an event is such an annotation."""
    return event.kind == "mark" and _MARK.match(event.name) is not None


def steps_of(events: Sequence[Event]) -> int:
    """How many steps the trace marks (``mark``, or the profiler's own ``ProfilerStep#``); 0 where it marks none."""
    found = [_MARK.match(event.name) for event in events if event.kind == "mark"]
    return sum(int(match[1] or 1) for match in found if match)
