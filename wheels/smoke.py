"""What a wheel must do in a fresh environment: python smoke.py [expected tier]. Run outside the source tree."""

from __future__ import annotations

import contextlib
import io
import json
import sys
import warnings
from pathlib import Path

warnings.simplefilter("error", UserWarning)  # a wheel has its kernels: nothing to warn of

import torch  # noqa: E402

import lowbit  # noqa: E402
from lowbit import cli, functional, native, ops, ops_cuda, reference  # noqa: E402


def main(expected: str = "") -> int:
    assert "site-packages" in str(Path(lowbit.__file__)) or "site" in Path(lowbit.__file__).parts, lowbit.__file__
    assert native.COMPILED and native.LIBRARY.is_file()
    assert not expected or ops.cpu_isa() == expected, (ops.cpu_isa(), expected)
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (48, 256), generator=g)
    scales, zeros = torch.rand(48, 4, generator=g).half(), torch.randint(0, 16, (48, 4), generator=g)
    packed = functional.pack_w4(codes, scales, zeros, 64)
    x = torch.randn(3, 256, generator=g)
    want = x.double() @ functional.dequant_w4(packed, scales, zeros, 64).double().T
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        y = functional.w4a8_linear(x.to(dtype), packed, scales, zeros, 64)
        assert y.dtype == dtype and reference.error(y, want) < 0.02, (dtype, reference.error(y, want))
    w8 = torch.randint(-128, 128, (48, 256), generator=g).to(torch.int8)
    y = functional.w8a8_linear(x, w8, torch.full((48,), 0.01))
    assert reference.error(y, x.double() @ (w8.double() * 0.01).T) < 0.02
    y = functional.fp16_gemv(x, w8.half() / 128)
    assert reference.error(y, x.double() @ (w8.double() / 128).T) < 1e-6

    layer = lowbit.QuantLinear.from_linear(torch.nn.Linear(256, 48), "w4a8")
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert torch.equal(compiled(x), layer(x))
    try:
        layer(x[:, :100])
    except lowbit.FormatError as error:
        assert "accepted" in str(error)
    else:
        raise AssertionError("a wrong shape was taken")
    if not torch.cuda.is_available():
        assert ops_cuda.refuses(0), "no GPU, and no reason given"
        with_cuda_13 = (torch.version.cuda or "").startswith("13.")
        assert not with_cuda_13 or not native.CUDA_LIBRARY.exists() or "sees no CUDA device" in str(ops_cuda.refuses(0))

    page = io.StringIO()
    with contextlib.redirect_stdout(page):
        cli.main(["doctor", "--json"])  # in this process: under emulation another import of torch takes half a minute
    said = json.loads(page.getvalue())
    red = [row for row in said["rows"] if row["state"] == "RED" and row["name"] != "threads"]
    assert not red, red
    tested = [row for row in said["rows"] if row["part"] == "self-test"]
    assert [row["name"] for row in tested][: len(ops.cpu_isas())] == ops.cpu_isas(), tested
    tiers = ", ".join(f"{row['name']} {row['found'].split(' over')[0]}" for row in tested)
    why = ops_cuda.refuses(0) if not torch.cuda.is_available() else "CUDA runs"
    print(f"smoke: python {sys.version.split()[0]}, torch {torch.__version__}, runs {ops.cpu_isa()}; {tiers}; {why}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
