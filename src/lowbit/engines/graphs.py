"""CUDA-graph buckets around a callable over static buffers.

    graphs = Graphs(step, make, buckets=(128, 256), device="cuda", watch=backbone.check)
    slot = graphs.take(200)          # the bucket of 256; past the last one, buffers of exactly 200 and the plain call
    slot.buffers.x[:200] = ...       # write what the step reads
    out = slot.run()                 # one replay, on the stream that is current

Several callables over the same buffers, one a stage of a job, are a list in the place of ``step``: ``slot.run(1)`` is the second.
Every bucket is captured when ``Graphs`` is made, from the largest down, into one memory pool, and none afterwards. Buffers and what
``run`` gives are valid until the next ``take`` or ``run`` of any bucket. Several streams may call in turn: a stream
waits for what the stream before it has started. On a device without CUDA, or with ``capture=False``, the same buckets run
the callable, padded just so. This file knows nothing of models.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor
from tqdm import tqdm

from lowbit.types import FormatError

BUCKETS = (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304)
FINE = (*range(64, 1024, 64), *range(1024, 2305, 128))  # less padding, 26 graphs instead of 10 to capture at start-up
NAMED = {"default": BUCKETS, "fine": FINE}
WARM_UPS = 2

Buffers = TypeVar("Buffers")


class Slot(Generic[Buffers]):
    """Static buffers for up to ``size``, and how to run the callable over them."""

    def __init__(
        self, size: int, buffers: Buffers, calls: Sequence[Callable[[Buffers], Tensor | None]], owner: Graphs[Buffers]
    ):
        self.size, self.buffers = size, buffers
        self._calls, self._owner = calls, owner
        self._graphs: list[Any] = []  # of each callable, or none
        self._outs: list[Tensor | None] = []

    @property
    def captured(self) -> int:
        """How many graphs there are."""
        return len(self._graphs)

    def run(self, stage: int = 0) -> Tensor | None:
        if not self._graphs:
            out = self._calls[stage](self.buffers)
        else:
            self._graphs[stage].replay()
            out = self._outs[stage]
        self._owner.ran()
        return out

    def capture(self, pool: Any, stream: torch.cuda.Stream) -> None:
        """Warm up and capture, both on ``stream``, every callable."""
        graphs, outs = [], []
        with torch.cuda.stream(stream):
            for call in self._calls:
                for _ in range(WARM_UPS):  # lazy handles, workspaces and autotuning come into being here
                    call(self.buffers)
                stream.synchronize()
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    outs.append(call(self.buffers))
                graphs.append(graph)
        self._graphs, self._outs = graphs, outs


class Graphs(Generic[Buffers]):
    """``call``, or each of several, over the buffers that ``make(size)`` gives, for every size of ``buckets``.

    ``make(size)`` must give buffers that can be run as they are, all on ``device``; ``call`` must read its sizes from them,
    wait for nothing on the device, and keep no tensor from one call to the next. ``watch`` raises where what was
    captured is no longer what is there (weights that were moved). ``buckets`` are sizes, or a word of NAMED; FormatError for what is
    neither or no growing list.
    """

    def __init__(
        self,
        call: Callable[[Buffers], Tensor | None] | Sequence[Callable[[Buffers], Tensor | None]],
        make: Callable[[int], Buffers],
        *,
        buckets: Sequence[int] | str = BUCKETS,
        device: torch.device | str = "cuda",
        watch: Callable[[], None] | None = None,
        capture: bool = True,
        progress: bool = False,
    ) -> None:
        self.buckets = check_buckets(buckets)
        self.device = torch.device(device)
        self.counts: Counter[int | str] = Counter()  # takes of each bucket, and of "plain"
        self._calls = [call] if callable(call) else list(call)
        self._make, self._watch = make, watch
        self._last: torch.cuda.Event | None = None
        self._stream: torch.cuda.Stream | None = None
        self.slots: dict[int, Slot[Buffers]] = {}
        if self.device.type == "cuda" and capture:
            self._capture(progress)

    def take(self, size: int) -> Slot[Buffers]:
        """The smallest bucket that holds ``size``; past the last, new buffers of exactly that size and the plain call."""
        if size < 1:
            raise FormatError(f"size: found {size}, accepted is at least 1")
        bucket = next((b for b in self.buckets if b >= size), None)
        if bucket is None:
            return self.lend(size, self._make(size))
        self._begin(bucket)
        if bucket not in self.slots:  # without graphs: made when first used
            self.slots[bucket] = Slot(bucket, self._make(bucket), self._calls, self)
        return self.slots[bucket]

    def lend(self, size: int, buffers: Buffers) -> Slot[Buffers]:
        """The plain call over buffers of the caller's own."""
        self._begin("plain")
        return Slot(size, buffers, self._calls, self)

    def _begin(self, bucket: int | str) -> None:
        if self._watch is not None:
            self._watch()
        self.counts[bucket] += 1
        if self._last is not None:
            torch.cuda.current_stream(self.device).wait_event(self._last)

    def ran(self) -> None:
        """Note on the current stream that buckets are in use until here."""
        if self.device.type == "cuda":
            if self._last is None:
                self._last = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._last.record(torch.cuda.current_stream(self.device))

    def _capture(self, progress: bool) -> None:
        with torch.cuda.device(self.device), torch.inference_mode(False), torch.no_grad():
            here = torch.cuda.current_stream()
            side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
            pool = torch.cuda.graph_pool_handle()
            sizes = tqdm(self.buckets[::-1], desc="CUDA graphs", unit="graph", disable=not progress, leave=False)
            for size in sizes:
                slot = Slot(size, self._make(size), self._calls, self)
                side.wait_stream(here)
                slot.capture(pool, side)
                here.wait_stream(side)
                self.slots[size] = slot


def check_buckets(buckets: Sequence[int] | str) -> tuple[int, ...]:
    if isinstance(buckets, str):
        if buckets not in NAMED:
            raise FormatError(f"buckets: found {buckets!r}, accepted are {', '.join(NAMED)}, or sizes")
        return NAMED[buckets]
    sizes = tuple(buckets)
    whole = all(isinstance(size, int) and not isinstance(size, bool) and size > 0 for size in sizes)
    if not sizes or not whole or any(a >= b for a, b in zip(sizes, sizes[1:])):
        raise FormatError(f"buckets: found {list(sizes)}, accepted are growing whole numbers above 0")
    return sizes
