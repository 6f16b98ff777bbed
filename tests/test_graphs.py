"""Buckets around a callable: which one is taken, what padding changes (nothing), and on a GPU what a capture keeps."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from lowbit.engines.graphs import BUCKETS, Graphs, check_buckets
from lowbit.types import FormatError


@dataclass
class Cells:
    """What the toy below reads: x [size, 4], and how many of its rows count."""

    x: Tensor
    rows: Tensor  # int64 []


class Toy:
    """Column sums of the rows that count, through a weight: padding would show."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.linear = torch.nn.Linear(4, 4, bias=False, device=device)
        self.linear.requires_grad_(False).weight.copy_(torch.arange(16).view(4, 4))  # whole numbers: sums are exact
        self.pointer = self.linear.weight.data_ptr()
        self.calls = 0

    def __call__(self, b: Cells) -> Tensor:
        self.calls += 1
        count = torch.arange(len(b.x), device=self.device) < b.rows
        return self.linear(torch.where(count[:, None], b.x, 0).cumsum(0))

    def make(self, size: int) -> Cells:
        return Cells(torch.zeros(size, 4, device=self.device), torch.zeros((), dtype=torch.long, device=self.device))

    def watch(self) -> None:
        if self.linear.weight.data_ptr() != self.pointer:
            raise FormatError("weight: found another")

    def through(self, graphs: Graphs[Cells], x: Tensor) -> Tensor:
        slot = graphs.take(len(x))
        slot.buffers.x[: len(x)] = x
        slot.buffers.x[len(x) :] = torch.nan
        slot.buffers.rows.fill_(len(x))
        out = slot.run()
        assert out is not None
        return out[: len(x)]

    def plainly(self, x: Tensor) -> Tensor:
        return self.linear(x.cumsum(0))


def whole(rows: int, device: str = "cuda") -> Tensor:
    return torch.randint(-8, 9, (rows, 4), device=device).float()


DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
LENGTHS = {1: 64, 63: 64, 64: 64, 65: 128, 255: 256, 256: 256, 257: "plain", 300: "plain"}


@pytest.mark.parametrize("device", DEVICES)
def test_every_length_gives_what_the_plain_call_gives_and_takes_its_bucket(device: str) -> None:
    toy = Toy(device)
    graphs = Graphs(toy, toy.make, buckets=(64, 128, 256), device=device, watch=toy.watch)
    captures = toy.calls
    for length, bucket in LENGTHS.items():
        graphs.counts.clear()
        x = whole(length, device)
        assert torch.equal(toy.through(graphs, x), toy.plainly(x))
        assert graphs.counts == {bucket: 1}
    if device == "cuda":
        assert toy.calls == captures + 2  # nothing but the two past the last bucket ran in Python
    with pytest.raises(FormatError, match="found 0"):
        graphs.take(0)


@pytest.mark.parametrize("buckets", [(), (64, 64), (128, 64), (0, 64), (64.0,), (True, 2)])
def test_a_list_of_buckets_that_makes_no_sense_is_refused(buckets: tuple[int, ...]) -> None:
    with pytest.raises(FormatError, match="growing whole numbers"):
        Graphs(Toy("cpu"), Toy("cpu").make, buckets=buckets, device="cpu")


def test_the_buckets_are_those_of_the_contract() -> None:
    assert check_buckets(BUCKETS) == (128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 2304)
    assert check_buckets("default") == BUCKETS
    fine = check_buckets("fine")
    assert fine[0] == 64 and fine[-1] == 2304 and 1024 in fine and next(b for b in fine if b >= 685) == 704
    assert {b - a for a, b in zip(fine, fine[1:]) if b <= 1024} == {64} and {
        b - a for a, b in zip(fine, fine[1:]) if b > 1024
    } == {128}
    with pytest.raises(FormatError, match="buckets: found 'finer', accepted are default, fine, or sizes"):
        check_buckets("finer")


@pytest.mark.parametrize("device", DEVICES)
def test_weights_that_were_replaced_are_refused_and_weights_written_to_count(device: str) -> None:
    toy = Toy(device)
    graphs = Graphs(toy, toy.make, buckets=(64,), device=device, watch=toy.watch)
    x = whole(50, device)
    toy.linear.weight.fill_(2)
    assert torch.equal(toy.through(graphs, x), toy.plainly(x))
    toy.linear.weight = torch.nn.Parameter(torch.full((4, 4), 3.0, device=device), requires_grad=False)
    with pytest.raises(FormatError, match="found another"):
        toy.through(graphs, x)


def test_without_graphs_buffers_are_made_when_they_are_used() -> None:
    toy = Toy("cpu")
    graphs = Graphs(toy, toy.make, buckets=(8, 16), device="cpu")
    assert graphs.slots == {} and toy.calls == 0
    first = graphs.take(3)
    assert graphs.take(8) is first and list(graphs.slots) == [8] and not first.captured


@pytest.mark.gpu
def test_graphs_of_one_pool_run_in_any_order_and_one_may_go() -> None:
    toy = Toy("cuda")
    graphs = Graphs(toy, toy.make, buckets=(64, 128, 256), device="cuda")
    assert all(slot.captured for slot in graphs.slots.values())
    x = {n: whole(n) for n in (60, 128, 200)}
    want = {n: toy.plainly(one) for n, one in x.items()}
    kept = toy.through(graphs, x[60]).clone()
    for n in (200, 60, 128, 60, 200, 128):
        assert torch.equal(toy.through(graphs, x[n]), want[n])
    assert torch.equal(kept, want[60])
    del graphs.slots[64]
    graphs.buckets = (128, 256)
    torch.cuda.empty_cache()
    for _ in range(50):
        assert torch.equal(toy.through(graphs, x[60]), want[60]) and torch.equal(toy.through(graphs, x[200]), want[200])


@pytest.mark.gpu
def test_streams_take_turns() -> None:
    toy = Toy("cuda")
    graphs = Graphs(toy, toy.make, buckets=(2048,), device="cuda")
    streams = [torch.cuda.Stream() for _ in range(3)]
    x = [whole(2000) for _ in streams]
    want = [toy.plainly(one) for one in x]
    torch.cuda.synchronize()
    for _ in range(20):
        got = []
        for stream, one in zip(streams, x, strict=True):
            with torch.cuda.stream(stream):
                got.append(toy.through(graphs, one).clone())
                graphs.ran()  # the copy too is read from the bucket
        torch.cuda.synchronize()
        assert all(torch.equal(a, b) for a, b in zip(got, want, strict=True))


@pytest.mark.gpu
def test_nothing_is_allocated_for_good_by_a_replay() -> None:
    toy = Toy("cuda")
    graphs = Graphs(toy, toy.make, buckets=(64, 256), device="cuda")
    x = whole(200)
    toy.through(graphs, x)
    before = torch.cuda.memory_allocated()
    for _ in range(10):
        toy.through(graphs, x)
    assert torch.cuda.memory_allocated() == before
