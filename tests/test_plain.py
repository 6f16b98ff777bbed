"""The installation without compiled kernels: the same package less its libraries, in a process of its own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from lowbit import native, plain, selftest

ROOT = Path(native.__file__).parent
CODE = """
import os, sys, warnings
with warnings.catch_warnings(record=True) as caught:
    warnings.simplefilter("always")
    import lowbit
    from lowbit import dispatch, engines, functional, ops, selftest
    from lowbit.types import FormatError
ours = [str(w.message) for w in caught if "lowbit" in str(w.message)]
assert len(ours) == 1 and "no compiled kernels" in ours[0], ours
import torch
assert ops.cpu_isas() == ["reference"] and dict(dispatch.tiers())["reference"] == "runs"
torch.save(selftest.of_tier("reference"), sys.argv[1])
layer, kind = next(selftest.layers())
layer = lowbit.QuantLinear.from_quantized(layer, kind)
x = torch.randn(3, selftest.K)
assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
checks = ("test_schema", "test_autograd_registration", "test_faketensor")
torch.library.opcheck(ops._linear, (x, layer.packed, selftest.N, 64, 4, 0), test_utils=checks)
torch.library.opcheck(ops._quantize_rows, (x, 64), test_utils=checks)
codes, scales = functional.quantize_activation(x)
assert codes.shape == x.shape and scales.shape == (3,)
for wrong in (lambda: ops.decoder_new([], [], 1.0, 1.0), lambda: ops.linear(x, layer.packed, 72, 64, 4, 0, isa="avx2"),
              lambda: ops.linear(x[:, 1:], layer.packed, 72, 64, 4, 0)):
    try:
        wrong()
    except (FormatError, RuntimeError) as error:
        assert "accepted" in str(error) or "has reference" in str(error), error
    else:
        raise AssertionError("not refused")
"""


@pytest.fixture(scope="module")
def bare(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The package without its libraries, by links."""
    folder = tmp_path_factory.mktemp("plain")
    (folder / "lowbit").mkdir()
    for file in ROOT.iterdir():
        if file.suffix != ".so":
            (folder / "lowbit" / file.name).symlink_to(file)
    return folder


def run(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1", "QM_CPU_ISA": ""}
    return subprocess.run([sys.executable, *arguments], capture_output=True, text=True, env=environment, timeout=300)


def test_it_warns_once_and_computes_what_the_kernels_compute(bare: Path, tmp_path: Path) -> None:
    done = run(bare, "-c", CODE, str(tmp_path / "y.pt"))
    assert done.returncode == 0, done.stderr
    error, results = torch.load(tmp_path / "y.pt")
    assert error <= selftest.TOLERANCE
    _, ours = selftest.of_tier("scalar")
    assert len(results) == len(ours) == 13
    for a, b in zip(results, ours, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-5 * float(b.abs().max()))


def test_doctor_is_red_about_it(bare: Path) -> None:
    done = run(bare, "-W", "ignore", "-m", "lowbit", "doctor")
    assert done.returncode == 1 and re.search(r"RED +lowbit .*no compiled kernels", done.stdout), (
        done.stdout + done.stderr
    )
    assert re.search(r"ok +reference +error", done.stdout), done.stdout


@pytest.mark.skipif(not native.COMPILED, reason="no compiled kernels here")
def test_the_schemas_are_those_of_the_library() -> None:
    operators = getattr(torch.ops, native.OPS)
    for schema in native.SCHEMAS:
        name = schema.partition("(")[0]
        compiled = getattr(operators, name).default._schema
        assert str(compiled) == str(torch._C.parse_schema(f"{native.OPS}::{schema}")), name


@pytest.mark.skipif(not native.COMPILED, reason="no compiled kernels here")
def test_the_plain_operators_in_this_process() -> None:
    """Called directly: float16 storage behind everything that may stand before it, and the low rank."""
    from lowbit import ops
    from lowbit.layouts import panels

    g = torch.Generator().manual_seed(0)
    x, w = torch.randn(3, 64, generator=g), torch.randn(20, 64, generator=g).half()
    behind = {
        "perm": torch.randperm(64, generator=g).int(),
        "smooth": torch.rand(64, generator=g) + 0.5,
        "hadamard": 64,
    }
    half = (x, panels.pack_half(w), 20, 64, 16, 2, torch.randn(20, generator=g))
    torch.testing.assert_close(plain.linear(*half, **behind), ops.linear(*half, **behind), rtol=1e-4, atol=1e-4)
    q, _ = next(selftest.layers())
    from lowbit.nn import QuantLinear

    packed = QuantLinear.from_quantized(q).packed
    wide = torch.randn(5, selftest.K, generator=g)
    rank = {
        "down": panels.pack_half(torch.randn(8, selftest.K, generator=g).half()),
        "up": panels.pack_half(torch.randn(q.n, 8, generator=g).half()),
    }
    args = (wide, packed, q.n, 64, 4, 1)
    torch.testing.assert_close(plain.linear(*args, **rank), ops.linear(*args, **rank), rtol=1e-4, atol=1e-3)
    assert not torch.allclose(plain.linear(*args, **rank), plain.linear(*args), atol=1e-3)
    codes, scales = plain.quantize_rows(wide, 32)
    theirs, of_theirs = ops.quantize_rows(wide, 32)
    assert torch.equal(codes, theirs) and torch.equal(scales, of_theirs)
