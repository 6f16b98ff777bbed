"""Work spread over the processes of a Ray cluster: who dies is replaced, and what it held is done again.

    batches ─► waiting ─► a worker of Ray (loads once, then batch after batch) ─► (item, row, error)
                  ▲                          │ dies
                  └──── its items, singly ◄──┘

What the work is, its caller says: ``make()`` runs in each worker and returns what takes one item and returns one row. An
item that is done twice must come out the same, so a worker asks first whether it is done. Nothing but items and rows travels.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import uuid
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout, suppress
from pathlib import Path
from typing import Any, Generic, NamedTuple, TypeVar

from lowbit.types import FormatError, one_line

TRIES = 3  # deaths that one item, or the starts of workers in a row, may cost
STORE = 80 * 2**20  # bytes of Ray's object store, which stays all but empty; Ray accepts no less than 75 MiB
BATCHES = 8  # of each worker, on average: enough to even out, few enough to be worth the trip

Item = TypeVar("Item")
Row = TypeVar("Row")


def package() -> Any:
    """The package ray. FormatError with what to install where it is missing."""
    try:
        import ray
    except ImportError as error:
        raise FormatError("--ray: found no package ray, accepted after pip install lowbit[cluster]") from error
    return ray


class Pool(NamedTuple):
    """Workers, and what of a machine each of them takes. ``cpus`` are the threads of torch there."""

    workers: int
    cpus: int
    gpus: int


@contextmanager
def cluster(workers: int | None, threads: int | None, gpu: bool) -> Iterator[Pool]:
    """A running Ray: the one of this process, the one that RAY_ADDRESS names, or else one of this machine alone that ends
    with the block. ``workers``: None is as many as the cluster has places for, each of ``threads`` CPUs (None: 4, or 1
    beside a GPU) and one GPU where ``gpu`` says so. FormatError where there is no Ray, and where a machine of our own has
    no place for a worker."""
    ray = package()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    cpus = threads or (1 if gpu else min(4, cores))
    address = os.environ.get("RAY_ADDRESS")
    ours, alone = not ray.is_initialized(), not address
    if ours:
        _start(ray, address, (workers or cores // cpus) * cpus)
    try:
        places = sum(_places(node["Resources"], cpus, int(gpu)) for node in ray.nodes() if node["Alive"])
        if not places and ours and alone:
            what = f"{cpus} CPUs{' and a GPU' if gpu else ''} for a worker"
            raise FormatError(f"--ray: found no {what} on this machine, accepted is --device cpu or fewer --threads")
        with redirect_stdout(sys.stderr):  # where Ray says that a worker is gone; stdout is the caller's
            yield Pool(workers or max(places, 1), cpus, int(gpu))
    finally:
        if ours:
            ray.shutdown()


def _start(ray: Any, address: str | None, cpus: int) -> None:
    quiet: dict[str, Any] = dict(log_to_driver=False, logging_level=logging.ERROR)
    here: dict[str, Any] = dict(num_cpus=cpus, include_dashboard=False, object_store_memory=STORE)
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    for last in (bool(address), True):
        try:
            ray.init(address or "local", **quiet, **({} if address else here))
            return
        except Exception as error:  # of many kinds; Ray gives a machine 30 s to start, which a busy one may need twice
            ray.shutdown()
            if last:
                named, found = f"RAY_ADDRESS {address}" if address else "a local Ray", one_line(error)[:200]
                raise FormatError(f"--ray: {named}: found {found}, accepted is a cluster that runs") from error


def _places(has: dict[str, float], cpus: int, gpus: int) -> int:
    free = int(has.get("CPU", 0)) // cpus
    return min(free, int(has.get("GPU", 0)) // gpus) if gpus else free


def balanced(items: Iterable[Item], weight: Callable[[Item], float], workers: int) -> list[list[Item]]:
    """Items of similar weight together, the heaviest first, so that no worker waits long for the last one: a batch holds
    one item, or several that weigh no more than a ``BATCHES``-th of a worker's share."""
    ordered = sorted(items, key=weight, reverse=True)
    most = sum(map(weight, ordered)) / (workers * BATCHES)
    batches: list[list[Item]] = []
    held = 0.0
    for item in ordered:
        if not batches or held + weight(item) > most:
            batches.append([])
            held = 0.0
        batches[-1].append(item)
        held += weight(item)
    return batches


@contextmanager
def mark(folder: Path) -> Iterator[Path]:
    """A file in ``folder``, which is made, that a worker elsewhere can look for: ``seen``."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f".lowbit-{uuid.uuid4().hex}"
    path.touch()
    try:
        yield path
    finally:
        path.unlink(missing_ok=True)


def seen(path: Path) -> None:
    """FormatError where this machine does not see a ``mark``: what is written here would be seen by nobody."""
    if not path.exists():
        raise FormatError(
            f"{path.parent}: found another directory of this name on {socket.gethostname()}, accepted is one that all "
            "machines of the cluster share"
        )


class _Actor(Generic[Item, Row]):
    """What Ray starts: one process, one model."""

    def __init__(self, make: Callable[[], Callable[[Item], Row]], threads: int) -> None:
        self._make, self._threads = make, threads

    def load(self) -> str:
        """Why this cannot work, "" where it can."""
        import torch

        torch.set_num_threads(self._threads)
        try:
            self._work = self._make()
        except Exception as error:
            return one_line(error)
        return ""

    def do(self, items: Sequence[Item]) -> list[tuple[Row | None, str]]:
        """Of each item its row, or None and why not."""
        rows: list[tuple[Row | None, str]] = []
        for item in items:
            try:
                rows.append((self._work(item), ""))
            except Exception as error:
                rows.append((None, one_line(error)))
        return rows


class _Batch(NamedTuple):
    items: list[Any]
    deaths: int = 0  # of workers that had it


def spread(
    make: Callable[[], Callable[[Item], Row]],
    batches: Iterable[list[Item]],
    pool: Pool,
    note: Callable[[str], None],
) -> Iterator[tuple[Item, Row | None, str]]:
    """Every item once, in the order in which they are done: its row and "", or None and why there is none.

    A worker whose process or machine is gone is replaced, and its items wait again, singly; one that took three workers
    with it has no row. ``make`` and items are pickled. FormatError where workers cannot start; all of them are
    ended when the iterator is.
    """
    ray = package()
    kind = ray.remote(num_cpus=pool.cpus, num_gpus=pool.gpus, max_restarts=0, scheduling_strategy="SPREAD")(_Actor)
    waiting = deque(_Batch(items) for items in batches)
    busy: dict[Any, tuple[Any, _Batch | None]] = {}  # what is awaited: of whom, and what it holds; None while it loads
    lost_starts = 0
    try:
        while waiting or busy:
            loading = sum(batch is None for _, batch in busy.values())
            for _ in range(min(pool.workers - len(busy), len(waiting) - loading)):
                actor = kind.remote(make, pool.cpus)
                busy[actor.load.remote()] = (actor, None)
            ready = ray.wait(list(busy), num_returns=1)[0][0]
            actor, batch = busy.pop(ready)
            try:
                found = ray.get(ready)
            except (
                ray.exceptions.RayTaskError
            ) as error:  # what an actor does not catch: it cannot be sent, or is no item
                raise FormatError(f"--ray: a worker failed: {one_line(error.cause)}") from error
            except ray.exceptions.RayError as error:
                with suppress(Exception):
                    ray.kill(actor)  # where it is merely out of reach
                if batch is None:
                    lost_starts += 1
                    if lost_starts >= TRIES:
                        raise FormatError(
                            f"--ray: found {lost_starts} workers in a row that ended as they started ({_why(error)}), accepted "
                            "is a cluster that has lowbit installed, and memory for a model in each worker"
                        ) from error
                    continue
                note(f"a worker ended ({_why(error)}); what it held of {len(batch.items)} is done again")
                if batch.deaths + 1 >= TRIES and len(batch.items) == 1:
                    yield batch.items[0], None, f"{TRIES} workers ended over it, the last one: {_why(error)}"
                else:
                    waiting.extendleft(_Batch([item], batch.deaths + 1) for item in reversed(batch.items))
                continue
            if batch is None:
                if found:
                    raise FormatError(found)
                lost_starts = 0
            if waiting:
                following = waiting.popleft()
                busy[actor.do.remote(following.items)] = (actor, following)
            else:
                ray.kill(actor)  # its place is free at once
            if batch is not None:
                for item, (row, why) in zip(batch.items, found, strict=True):
                    yield item, row, why
    finally:
        for actor, _ in busy.values():
            with suppress(Exception):
                ray.kill(actor)


def _why(error: BaseException) -> str:
    """The end of what Ray says, on one line, without its guesses."""
    lines = [line.strip() for line in str(error).partition(" Some common causes")[0].splitlines() if line.strip()]
    return (lines[-1] if lines else type(error).__name__)[:200].rstrip(".")
