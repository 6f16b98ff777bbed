"""The only timer: competitors take turns in one process, on weights that are rotated so that none stays in a cache."""

from __future__ import annotations

import datetime
import os
import platform
import re
import statistics
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

# Flags of /proc/cpuinfo that decide which code runs, ours or a peer's.
_FLAGS = (
    "avx2 fma f16c avx_vnni avx512f avx512bw avx512vl avx512_vnni avx512_bf16 avx512_fp16 amx_tile amx_int8 amx_bf16 "
    "asimd asimddp asimdhp i8mm bf16 sve sve2"
).split()


class Competitor(NamedTuple):
    """One way to do the same work. ``calls`` do it on equal weights at different addresses, one after the other."""

    name: str
    calls: Sequence[Callable[[], object]]


class Timing(NamedTuple):
    """Milliseconds a call."""

    median: float
    least: float
    repeats: int


def race(
    competitors: Sequence[Competitor], seconds: float = 1.0, least_rounds: int = 11, in_cache: bool = False
) -> dict[str, Timing]:
    """Time all competitors round robin, after one untimed pass over all their calls.

    A round is one call of each; rounds go on for ``seconds`` a competitor on average, and at least ``least_rounds``.
    With ``in_cache`` every timed call follows an untimed one of itself, and only the first call of each is used.
    """
    for competitor in competitors:
        for call in competitor.calls:
            call()
    samples: dict[str, list[float]] = {competitor.name: [] for competitor in competitors}
    end = time.perf_counter() + seconds * len(competitors)
    rounds = 0
    while rounds < least_rounds or time.perf_counter() < end:
        for competitor in competitors:
            call = competitor.calls[0 if in_cache else rounds % len(competitor.calls)]
            if in_cache:
                call()
            began = time.perf_counter()
            call()
            samples[competitor.name].append(time.perf_counter() - began)
        rounds += 1
    return {name: Timing(1e3 * statistics.median(s), 1e3 * min(s), len(s)) for name, s in samples.items()}


def copies_needed(weight_bytes: int, least: int = 2, most: int = 256) -> int:
    """How many copies of a weight make sure that one has left the last-level cache when its turn comes again."""
    return min(max(-(-2 * last_level_cache() // max(weight_bytes, 1)), least), most)


def last_level_cache() -> int:
    """Bytes of the largest cache that the first core sees; 64 MiB where the system does not say."""
    found = [64 << 20]
    for size in Path("/sys/devices/system/cpu/cpu0/cache").glob("index*/size"):
        match = re.fullmatch(r"(\d+)([KM])", size.read_text().strip())
        if match:
            found.append(int(match[1]) << (10 if match[2] == "K" else 20))
    return max(found[1:], default=found[0])


def machine() -> dict[str, Any]:
    """Chip, versions, commit, date and page setting: what has to stand beside a figure."""
    import lowbit

    chip, flags = _cpuinfo()
    return {
        "chip": chip,
        "flags": flags,
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "cache_bytes": last_level_cache(),
        "pages": pages(),
        "torch": torch.__version__,
        "lowbit": lowbit.__version__,
        "python": platform.python_version(),
        "commit": _commit(),
        "date": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d"),
    }


def pages() -> str:
    """The kernel's rule for 2 MiB pages, and how much of this process lies in them now."""
    page = f"{os.sysconf('SC_PAGE_SIZE') // 1024} KiB"
    try:
        rule = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        rollup = Path("/proc/self/smaps_rollup").read_text()
    except OSError:
        return page
    chosen = re.search(r"\[(\w+)\]", rule)
    huge = re.search(r"AnonHugePages:\s+(\d+)", rollup)
    return f"{page}, huge pages: {chosen[1] if chosen else '?'}, {int(huge[1]) // 1024 if huge else 0} MiB in use"


def _cpuinfo() -> tuple[str, list[str]]:
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return platform.processor() or platform.machine(), []
    pairs: list[tuple[str, str]] = re.findall(r"^([\w ]+?)\s*:[ \t]*(.*)$", text.split("\n\n")[0], re.MULTILINE)
    fields = dict(pairs)
    name = fields.get("model name") or fields.get("CPU part") or platform.machine()
    numbers = [
        f"{key} {fields[field]}" for key, field in (("family", "cpu family"), ("model", "model")) if field in fields
    ]
    has = set(fields.get("flags", fields.get("Features", "")).split())
    return " ".join([name, *numbers]), [flag for flag in _FLAGS if flag in has]


def _commit() -> str | None:
    """The commit of the checkout that the bench is started in; None outside one."""
    if not Path("src/lowbit").is_dir():
        return None
    try:
        done = subprocess.run(["git", "describe", "--always", "--dirty"], capture_output=True, text=True, check=True)
    except (OSError, subprocess.CalledProcessError):
        return None
    return done.stdout.strip() or None
