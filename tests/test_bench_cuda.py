"""The bench of the CUDA kernels, its logic, on the CPU: a timer that returns what it is told, operators that only record."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

from lowbit import ops_cuda
from lowbit.bench import cuda_layers, cuda_peers, layers
from lowbit.types import FormatError

CPU = torch.device("cpu")


class Told:
    """A timer. ``prepare`` calls everything once; a repetition takes the next of the times it was given, or as many
    microseconds as there are different calls."""

    def __init__(self, *times: float) -> None:
        self.times: Iterator[float] | None = iter(times) if times else None
        self.log: list[int] = []
        self.prepared: list[list[Any]] = []

    def prepare(self, calls: cuda_layers.Calls) -> int:
        for call in calls:
            call()
        self.prepared.append(list(calls))
        return len(self.prepared) - 1

    def time(self, prepared: int) -> float:
        self.log.append(prepared)
        return next(self.times) if self.times else float(len({id(c) for c in self.prepared[prepared]}))


def test_rounds_go_over_all_competitors_and_a_time_is_a_median_a_copy() -> None:
    def refused() -> None:
        raise RuntimeError("no such kernel\nlong story")

    timer = Told(*(20, 2, 30, 3), *(200, 20, 300, 30), *(40, 4, 60, 6))
    calls: dict[str, list[Callable[[], object]]] = {
        "a": [lambda: 0, lambda: 0], "no": [refused], "b": [lambda: 0, lambda: 0, lambda: 0]
    }  # fmt: skip
    found = cuda_layers.race(calls, timer, repeats=3)
    assert timer.log == [0, 1, 2, 3] * 3  # cold and warm of a, of b, and again
    assert found == {"no": "no such kernel", "a": (20, 2), "b": (20, 2)}  # medians 40, 4 and 60, 6, of 2 and 3 copies
    assert timer.prepared[1] == calls["a"][:1] * 2 and timer.prepared[3] == calls["b"][:1] * 3


def test_what_takes_long_has_three_rounds_and_any_exception_costs_its_own_row() -> None:
    def silent() -> None:
        raise AttributeError

    long = cuda_layers.LONG_US / 2
    timer = Told(*(long, 2, 10, 1), *(long, 2, 10, 1), *(long, 2, 10, 1), *(2, 10, 1) * 2)
    found = cuda_layers.race({"slow": [int], "silent": [silent], "b": [int]}, timer, repeats=5)
    assert found == {"silent": "AttributeError", "slow": (long, 2), "b": (10, 1)}
    assert timer.log == [0, 1, 2, 3] * 3 + [1, 2, 3] * 2


def test_a_chip_without_int4_is_told(monkeypatch: pytest.MonkeyPatch, recorded: list[tuple[Any, ...]]) -> None:
    monkeypatch.setattr(ops_cuda, "has_int4", lambda device: False)
    lines = list(cuda_layers.run_shape(128, 256, [1], ["w4ch"], CPU, Told()))
    assert [x["left_out"] for x in lines if x["name"] == "lowbit w4a4"] == [
        "the chip has no INT4 tensor cores (8.0, 8.6 and 8.9 have)"
    ]


@pytest.mark.parametrize("m", [1, 16, 17, 2048])
def test_torch_takes_what_the_peers_are_given(m: int) -> None:
    """By torch's own shape functions, for every shape that is run unasked: fakes of CUDA tensors, no GPU."""
    device = torch.device("cuda")
    with FakeTensorMode(), torch.inference_mode():
        for n, k in cuda_layers.SHAPES:
            x = torch.empty(m, k, device=device, dtype=torch.float16)
            makers = (partial(cuda_peers.floats, torch.bfloat16), cuda_peers.fp8, cuda_peers.int8, cuda_peers.tinygemm)
            for make in makers:
                (side,) = make(n, k, 2, device)
                outs: list[Any] = [call() for call in side.calls(x)]
                assert len(outs) == 2 and all(y.shape[1] == n and m <= len(y) <= m + 23 for y in outs), side.name


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """Operators on CPU tensors that say what they were called with, and give the right shapes."""
    log: list[tuple[Any, ...]] = []

    def quantize(x: Tensor, *, down: Tensor | None, hadamard: bool, tile_order: bool = True) -> tuple[Tensor, ...]:
        assert down is not None and hadamard
        log.append(("quantize", len(x), tile_order, down.data_ptr()))
        return torch.zeros(len(x), 256, dtype=torch.int8), torch.ones(len(x)), torch.zeros(1)

    def linear(codes: Tensor, scales: Tensor, low: Tensor, weight: Tensor, channel: Tensor, bias: Tensor,
               up: Tensor, n: int, mode: int, dtype: torch.dtype, row: int, gated: bool) -> Tensor:  # fmt: skip
        log.append(("linear", len(codes), mode, row, weight.data_ptr(), up.data_ptr()))
        return torch.zeros(len(codes), n, dtype=dtype)

    def quantize4(x: Tensor, *, down: Tensor, hadamard: bool) -> tuple[Tensor, ...]:
        log.append(("quantize4", len(x), down.data_ptr()))
        return tuple(torch.zeros(len(x)) for _ in range(4))

    def linear4(codes: Tensor, *given: Any) -> Tensor:
        log.append(("linear4", len(codes), given[3].data_ptr()))
        return torch.zeros(len(codes), given[-2], dtype=given[-1])

    monkeypatch.setattr(cuda_layers, "L2_BYTES", 100_000)
    for replacement in (quantize, linear, quantize4, linear4):
        monkeypatch.setattr(ops_cuda, replacement.__name__, replacement)
    monkeypatch.setattr(ops_cuda, "has_int4", lambda device: True)
    monkeypatch.setattr(torch, "_weight_int4pack_mm", lambda *a: None)
    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", lambda raw, tiles: raw.clone())
    monkeypatch.setattr(torch, "_int_mm", lambda a, b: torch.zeros(len(a), b.shape[1], dtype=torch.int32))

    def scaled_mm(a: Tensor, b: Tensor, **more: Any) -> Tensor:
        if len(a) > 16:
            raise RuntimeError("fp8: not here")
        return torch.zeros(len(a), b.shape[1])

    monkeypatch.setattr(torch, "_scaled_mm", scaled_mm)
    return log


def test_every_competitor_has_a_line_for_every_m(recorded: list[tuple[Any, ...]]) -> None:
    lines = list(cuda_layers.run_shape(128, 256, [1, 16, 17], list(cuda_layers.MODES), CPU, Told()))
    ours = [f"lowbit {m}{q}" for m in (*cuda_layers.MODES, "w4a4") for q in ("", " with quantize")]
    peers = ["cuBLAS float16", "cuBLAS bfloat16", "fp8 _scaled_mm", "int8 _int_mm", "tinygemm int4"]
    for m in (1, 16, 17):
        mine = {x["name"]: x for x in lines if x["m"] == m}
        assert sorted(mine) == sorted([*ours, *peers])
        for name, x in mine.items():
            if name.startswith("fp8") and m == 17:
                assert x["left_out"] == "fp8: not here" and "cold_us" not in x
                continue
            # as many different calls as copies when cold, one when warm, over as many launches
            assert x["copies"] >= 2 and x["cold_us"] == 1 and x["warm_us"] == round(1 / x["copies"], 3), name
            assert x["ratio"] == 1 and x["ratio_to"] == "cuBLAS float16"
    json.dumps(lines)


def test_launches_rotate_over_copies_that_l2_cannot_hold(recorded: list[tuple[Any, ...]]) -> None:
    timer = Told()
    lines = list(cuda_layers.run_shape(128, 256, [1, 40], ["w4ch"], CPU, timer))
    copies = next(x["copies"] for x in lines if x["name"] == "lowbit w4ch")
    assert copies * 128 * 256 // 2 >= cuda_layers.L2_BYTES
    products = [entry for entry in recorded if entry[0] == "linear"]
    assert len({entry[4] for entry in products}) == len({entry[5] for entry in products}) == copies
    for m, row in ((1, ops_cuda.GEMV), (40, -1)):  # the GEMV reads plain order, the GEMM tiles
        assert {entry[3] for entry in products if entry[1] == m} == {row}
        assert {entry[2] for entry in recorded if entry[0] == "quantize" and entry[1] == m} == {row == -1}
    # with quantize: each launch of a product has one of its own before it, with the low rank of its own copy
    downs = {entry[3] for entry in recorded if entry[0] == "quantize"}
    assert len(downs) == copies


def test_what_cannot_be_made_costs_itself_alone(
    recorded: list[tuple[Any, ...]], monkeypatch: pytest.MonkeyPatch
) -> None:
    def none(raw: Tensor, tiles: int) -> Tensor:
        raise NotImplementedError("not compiled with CUDA")

    monkeypatch.setattr(torch, "_convert_weight_to_int4pack", none)
    lines = list(cuda_layers.run_shape(72, 200, [3], ["w8", "w4ch"], CPU, Told()))  # K is off our tiles
    left = {x["name"]: x["left_out"] for x in lines if "left_out" in x}
    assert "K is 200, accepted are multiples of 16" in left["lowbit w8"] and "K is 200" in left["lowbit w4ch"]
    assert left["tinygemm int4"] == "not compiled with CUDA"
    assert {"cuBLAS float16", "int8 _int_mm"} <= {x["name"] for x in lines if "cold_us" in x}
    text = layers.cuda_table(lines)
    assert "left out: 72x200 tinygemm int4: not compiled with CUDA" in text and "72x200 cuBLAS float16" in text


@pytest.mark.skipif(ops_cuda.refuses(0) is None, reason="there is a GPU")
def test_options_of_the_cpu_and_a_missing_device_are_named() -> None:
    for option in ("--tier=all", "--threads=2", "--in-cache", "--group=64", "--peers=float32", "--chart=x.svg"):
        with pytest.raises(FormatError, match=rf"{option.split('=')[0]}: found .*, accepted on cuda is none"):
            layers.main(["--device", "cuda", option])
    with pytest.raises(FormatError, match="--device: found cuda, but "):
        layers.main(["--device", "cuda"])
