"""Quantizing where the model is: on a device that exists in name only, and on a GPU where there is one."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from elsewhere import DEVICE, Elsewhere, OneThread, TwoDevices, move, register
from lowbit.models import calibrate
from lowbit.models.calibrate import quantize_model
from lowbit.models.disk import DiskModel
from lowbit.quantize import InputStats, Options, quantize_linears
from lowbit.types import SCHEMES, QuantizedWeight

transformers = pytest.importorskip("transformers")


@pytest.fixture(scope="module", autouse=True)
def _device() -> None:
    register()


def llama() -> nn.Module:
    torch.manual_seed(1)
    config = transformers.LlamaConfig(
        hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        head_dim=32, vocab_size=97, pad_token_id=0, attn_implementation="eager",
    )  # fmt: skip
    model: nn.Module = transformers.LlamaForCausalLM(config)
    return model.eval()


def ids() -> Tensor:
    return torch.randint(3, 97, (4, 24), generator=torch.Generator().manual_seed(0))


def same(a: QuantizedWeight, b: QuantizedWeight) -> bool:
    pairs = [(getattr(a, f), getattr(b, f)) for f in ("codes", "scales", "zeros", "smooth")]
    pairs += [] if a.low_rank is None or b.low_rank is None else [*zip(a.low_rank, b.low_rank, strict=True)]
    return all((x is None) == (y is None) and (x is None or torch.equal(x, y)) for x, y in pairs)


def test_the_guard_sees_what_cuda_would_refuse() -> None:
    far, near = Elsewhere(torch.ones(3)), torch.ones(3)
    with TwoDevices():
        assert isinstance(far + 1, Elsewhere) and (far * torch.tensor(2.0)).device == DEVICE
        assert isinstance(torch.zeros(3, device=far.device) + far, Elsewhere) and not isinstance(far.cpu(), Elsewhere)
        assert isinstance(near.to(DEVICE), Elsewhere) and float(far.sum()) == 3
        for wrong in (lambda: far + near, lambda: torch.cat([far, near]), lambda: near[far.long()], lambda: far @ near):
            with pytest.raises(AssertionError, match="tensors of two devices"):
                wrong()
    with pytest.raises((RuntimeError, TypeError)):
        far.numpy()


@pytest.mark.parametrize(
    ("scheme", "method", "options"),
    [
        ("w4a8", "gptq", {}),
        ("w4a8", "rtn", {}),
        ("w8a8", "gptq", {"act_order": False}),
        ("w4a4", "svdquant", {}),
        ("w4a4", "svdquant", {"recipe": "iterative", "scales": "two-level"}),
    ],
)
def test_everything_happens_on_the_device_of_the_model(
    scheme: str, method: Any, options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The same bytes as on the CPU, and no operator that saw tensors of two devices."""
    monkeypatch.setattr(calibrate, "ThreadPoolExecutor", OneThread)
    want, _ = quantize_model(llama(), scheme, method, [ids()], progress=False, **options)
    model = move(llama())
    with TwoDevices():
        found, report = quantize_model(
            model, scheme, method, [ids()], progress=False, resume_dir=tmp_path / "w", **options
        )
    assert all(isinstance(p, Elsewhere) for p in model.parameters())
    for name, q in found.items():
        assert not isinstance(q.codes, Elsewhere) and same(q, want[name]), name
    assert all(row.tokens == 96 for row in report.rows)


def test_statistics_stay_where_the_rows_are() -> None:
    x = torch.randn(3000, 64)
    here, there = InputStats(64), InputStats(64)
    here.add(x, torch.arange(3000) % 7 > 0)
    with TwoDevices():
        there.add(Elsewhere(x), torch.arange(3000) % 7 > 0)
        found = [there.hessian(), there.rms(), there.absmax(), there.sample()]
    assert all(isinstance(t, Elsewhere) for t in found)
    want = [here.hessian(), here.rms(), here.absmax(), here.sample()]
    assert all(torch.equal(a.inner, b) for a, b in zip(found, want, strict=True) if isinstance(a, Elsewhere))


def test_a_linear_that_saw_nothing_on_a_device() -> None:
    w = torch.randn(32, 64)
    for method in ("gptq", "svdquant"):
        scheme = SCHEMES["w4a4"]
        options = Options(method)  # type: ignore[arg-type]
        want = quantize_linears({"w": w}, InputStats(64), scheme, options)["w"][0]
        with TwoDevices():
            found = quantize_linears({"w": Elsewhere(w)}, InputStats(64), scheme, options)["w"][0]
        assert same(found, want)


gpu = pytest.mark.gpu


@gpu
@pytest.mark.parametrize(("scheme", "method"), [("w4a8", "gptq"), ("w8a8", "gptq"), ("w4a4", "svdquant")])
def test_on_a_gpu_as_on_the_cpu(scheme: str, method: Any) -> None:
    """Sums differ in their last bits, so not every code is the same; what is lost is."""
    here = llama()
    there = copy.deepcopy(here).cuda()
    want, told = quantize_model(here, scheme, method, [ids()], progress=False)
    found, report = quantize_model(there, scheme, method, [ids()], progress=False)
    assert all(p.is_cuda for p in there.parameters())
    first = next(iter(want))
    assert float((want[first].codes == found[first].codes).float().mean()) > (0.99 if method == "gptq" else 0.9)
    for a, b in zip(told.rows, report.rows, strict=True):
        assert not found[a.name].codes.is_cuda and a.tokens == b.tokens
        assert b.error_after == pytest.approx(a.error_after, rel=0.25)


@gpu
def test_a_model_on_disk_is_quantized_on_a_gpu(tmp_path: Path) -> None:
    llama().save_pretrained(tmp_path / "plain")
    disk = DiskModel(tmp_path / "plain", "model.layers", device="cuda")
    found, report = quantize_model(
        disk.model, "w4a8", "gptq", [ids()], present=disk.present, resume_dir=tmp_path / "w", progress=False
    )
    want, _ = quantize_model(llama().cuda(), "w4a8", "gptq", [ids()], progress=False)
    assert all(same(found[name], q) for name, q in want.items()) and len(report.rows) == 14
