"""The memory of a quantization on a GPU: what is counted, what is refused, and that it does not grow (QNT-07)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from lowbit.models import calibrate, memory
from lowbit.models.blocks import Block
from lowbit.models.calibrate import quantize_model
from lowbit.models.memory import Need, estimate, told, workers_that_fit
from lowbit.types import FormatError

gpu = pytest.mark.gpu
QKV = (("q", "k", "v"),)


class Layer(nn.Module):
    def __init__(self, width: int, inner: int) -> None:
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(width, width, bias=False) for _ in range(3))
        self.up, self.down = nn.Linear(width, inner, bias=False), nn.Linear(inner, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.q(x).tanh() * self.k(x).sigmoid() + self.v(x)
        return x + self.down(self.up(x).relu())


class Stack(nn.Module):
    def __init__(self, *inner: int, width: int = 64) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.ModuleList(Layer(width, i) for i in inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def block(module: nn.Module) -> Block:
    return Block("b", module, {f"b.{n}": m for n, m in module.named_modules() if isinstance(m, nn.Linear)})


def calls(count: int = 4, width: int = 64) -> list[dict[str, torch.Tensor]]:
    return [{"x": torch.randn(64, width, generator=torch.Generator().manual_seed(i))} for i in range(count)]


def test_linears_of_one_input_have_one_hessian() -> None:
    with torch.device("meta"):
        b = block(Layer(512, 2048))
    shared, apart = (estimate([b], groups, 1000, 100) for groups in (QKV, ()))
    assert shared.statistics == memory.STATISTICS * (2 * 512**2 + 2048**2) + memory.CHUNK * (2 * 512 + 2048)
    assert apart.statistics - shared.statistics == 2 * (memory.STATISTICS * 512**2 + memory.CHUNK * 512)
    assert len(shared.solving) == 3 and len(apart.solving) == 5
    assert shared.solving[0] == memory.SOLVING_HESSIAN * 2048**2 + memory.SOLVING_WEIGHT * 512 * 2048
    assert shared.hidden == 2 * 1000 * 512 * 4 and shared.weights == 0
    assert estimate([b], QKV, 1000, 100, on_disk=True).weights == (3 * 512 + 2 * 2048) * 512 * 4
    rounded = estimate([b], QKV, 1000, 100, hessian=False)
    assert (
        rounded.statistics == memory.CHUNK * (2 * 512 + 2048)
        and rounded.solving[0] == memory.SOLVING_WEIGHT * 2048 * 512
    )


def test_a_very_wide_linear_and_the_block_that_needs_most() -> None:
    with torch.device("meta"):
        wide, narrow = (block(nn.ModuleDict({"w": nn.Linear(k, 64)})) for k in (18944, 64))
    found = estimate([narrow, wide, narrow], (), 10, 10)
    assert found.statistics - memory.CHUNK * 18944 == 2 * 1_435_500_544  # float64 where one float32 is 1,435,500,544
    assert found == estimate([wide], (), 10, 10)


def test_fewer_inputs_at_a_time_where_memory_is_short_and_a_refusal_where_one_is_too_much() -> None:
    need = Need(weights=10**9, hidden=10**9, forward=5 * 10**8, statistics=10**9, solving=(4 * 10**9, 2 * 10**9, 10**9))
    fixed = 3 * 10**9 + memory.LIBRARIES
    assert [workers_that_fit(need, fixed + extra * 10**9, 8, "cuda:0") for extra in (4, 5, 6, 7, 9)] == [1, 1, 2, 8, 8]
    with pytest.raises(
        FormatError, match=r"device cuda:0: found 7\.2\d GB free, accepted is 7\.27 GB or more.*work 4\.27"
    ):
        workers_that_fit(need, fixed + 4 * 10**9 - 10**7, 8, "cuda:0")
    assert told(need._replace(weights=0), 1) == "hidden states 1.00, statistics 1.00, work 4.27"


@pytest.mark.parametrize("workers", [1, 3])
def test_how_many_are_solved_at_once_changes_no_byte(workers: int, monkeypatch: pytest.MonkeyPatch) -> None:
    want, _ = quantize_model(Stack(128, 64), "w4a8", "gptq", calls(), blocks="layers", progress=False)
    monkeypatch.setattr(torch, "get_num_threads", lambda: workers)
    got, _ = quantize_model(Stack(128, 64), "w4a8", "gptq", calls(), blocks="layers", progress=False)
    assert all(torch.equal(got[n].codes, q.codes) and torch.equal(got[n].scales, q.scales) for n, q in want.items())


def test_a_failure_in_the_third_layer_leaves_two_and_a_rerun_ends_in_the_same_bytes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def run(**more: Any) -> Any:
        return quantize_model(Stack(64, 128, 64, 64), "w4a8", "gptq", calls(), blocks="layers", progress=False, **more)

    want, _ = run()
    real, seen = calibrate._quantize_block, []

    def failing(b: Block, *args: Any) -> Any:
        seen.append(b.name)
        if b.name == "layers.2" and len(seen) == 3:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(b, *args)

    monkeypatch.setattr(calibrate, "_quantize_block", failing)
    with pytest.raises(torch.OutOfMemoryError):
        run(resume_dir=tmp_path / "w")
    got, _ = run(resume_dir=tmp_path / "w")
    assert seen == ["layers.0", "layers.1", "layers.2", "layers.2", "layers.3"]
    assert all(torch.equal(got[n].codes, q.codes) and torch.equal(got[n].scales, q.scales) for n, q in want.items())


@gpu
@pytest.mark.parametrize(("scheme", "method"), [("w4a8", "gptq"), ("w4a4", "svdquant")])
def test_memory_does_not_climb_from_layer_to_layer(scheme: str, method: Any) -> None:
    model = Stack(2048, 4096, 2048, 2048, width=1024).cuda()
    inputs = calls(8, 1024)
    after: list[int] = []

    def look(done: int, total: int, label: str) -> None:
        torch.cuda.synchronize()
        after.append(torch.cuda.memory_allocated())

    torch.cuda.reset_peak_memory_stats()
    start = torch.cuda.memory_allocated()
    quantize_model(model, scheme, method, inputs, blocks="layers", progress=look)
    assert len(after) == 4 and after[2] <= 1.05 * after[0] and after[3] <= 1.05 * after[0]
    blocks = [Block(f"layers.{i}", m, {f"layers.{i}.{n}": x for n, x in m.named_modules() if isinstance(x, nn.Linear)})
              for i, m in enumerate(model.layers)]  # fmt: skip
    need = estimate(blocks, (), 512, 2048)
    assert torch.cuda.max_memory_allocated() - start <= need.total(torch.get_num_threads())


@gpu
def test_a_card_that_is_too_small_is_refused_before_work(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    model = Stack(4096, width=1024).cuda()
    torch.cuda.empty_cache()
    total = torch.cuda.mem_get_info()[1]
    monkeypatch.setattr(calibrate, "collect", lambda *a, **k: pytest.fail("work was begun"))
    torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_allocated() + 10**9) / total)
    try:
        with pytest.raises(FormatError, match=r"device cuda:0: found 1\.00 GB free, accepted is"):
            quantize_model(model, "w4a4", "svdquant", calls(4, 1024), blocks="layers", progress=False)
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)
    monkeypatch.undo()
    quantize_model(model, "w4a8", "rtn", calls(4, 1024), blocks="layers")
    assert "memory on cuda:0: " in capsys.readouterr().err
