"""The CUDA kernels on a GPU: bench/gpu_check.py's sections as tests. `make test-gpu` runs them and counts."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

from lowbit import ops_cuda
from lowbit.types import FormatError

sys.path.insert(0, str(Path(__file__).parents[1] / "bench"))

WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]


@pytest.mark.parametrize("section", ["quantize", "gemv", "int4", "rope", "overlap", "module", "error", "joined_bits"])
def test_section(section: str) -> None:
    import gpu_check

    gpu_check.failed.clear()
    getattr(gpu_check, section)()
    assert gpu_check.failed == []


@pytest.mark.parametrize("mode", ["w8", "w4ch", "w4two", "w4grp"])
def test_gemm_is_exact(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import gpu_check

    monkeypatch.setattr(gpu_check, "MODES", {mode: gpu_check.MODES[mode]})
    gpu_check.failed.clear()
    gpu_check.gemm()
    assert gpu_check.failed == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_the_second_device_gives_the_same_and_the_first_stays_current() -> None:
    import gpu_check

    from lowbit.nn import QuantLinear

    q = gpu_check.weight("w4two", 256, 512, exact=False)
    here = QuantLinear.from_quantized(q, "token")
    there = QuantLinear.from_quantized(q, "token").to("cuda:1")
    x = torch.randn(40, 512, device="cuda:0").half()
    before = torch.cuda.memory_allocated(0)
    y = there(x.to("cuda:1"))
    assert torch.cuda.current_device() == 0 and torch.cuda.memory_allocated(0) == before
    assert torch.equal(y.to("cuda:0"), here(x))
    with pytest.raises(FormatError, match="x: found on cuda:0, accepted is cuda:1"):
        there(x)


def test_every_chip_is_told_what_runs() -> None:
    assert ops_cuda.refuses(0) is None
