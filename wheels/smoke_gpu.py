"""What the installed wheel, and a variant of the artifact for `kernels`, must do on a GPU: python smoke_gpu.py [VARIANT_FOLDER]

The wheel's layers against their own results on the CPU, as one graph of torch.compile and in a CUDA graph; then the variant
beside it in the same process, which must give the same bits. `kernels` is not needed: the folder is imported as it would.
"""

from __future__ import annotations

import importlib.util
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import torch

import lowbit
from lowbit import native, ops_cuda, reference

N, K = 256, 512
# scheme, weights signed and activations per token, the kernel it gets, error against the CPU's result; W4A8 with zero points
# runs on float activations there, so it differs by the rounding of int8
CASES = (("w8a8", True, "cuda_tiles", 1e-3), ("w4a8", True, "cuda_tiles", 1e-3), ("w4a8", False, "cuda_float", 2e-2))


def made(types: Any, layer_of: Any, scheme: str, signed: bool) -> Any:
    torch.manual_seed(0)
    linear = torch.nn.Linear(K, N).requires_grad_(False)
    chosen = types.SCHEMES[scheme]
    if signed:
        chosen = replace(chosen, symmetric=True, activation=types.Activation(8, "token"))
    return layer_of.from_linear(linear, chosen)


def same(a: torch.Tensor, b: torch.Tensor, kernel: str) -> bool:
    """Bit for bit; a float product of torch's may choose another algorithm."""
    return torch.equal(a, b) or (kernel == "cuda_float" and torch.allclose(a, b, rtol=1e-2, atol=1e-2))


def results(types: Any, layer_of: Any, name: str) -> list[torch.Tensor]:
    """Every case on the GPU, checked."""
    found = []
    for scheme, signed, kernel, tolerance in CASES:
        layer = made(types, layer_of, scheme, signed)
        x = torch.randn(40, K, generator=torch.Generator().manual_seed(1))
        inputs = [x[:rows].to(dtype) for rows in (1, 5, 40) for dtype in (torch.float32, torch.float16)]
        wanted = [layer(given) for given in inputs]
        there = layer.to("cuda")
        assert there.explain()["kernel"] == kernel, (scheme, signed, there.explain())
        for given, want in zip(inputs, wanted, strict=True):
            y = there(given.cuda())
            error = reference.error(y.float().cpu(), want.double())
            assert y.dtype == given.dtype and error < tolerance, (scheme, signed, given.shape, given.dtype, error)
        compiled = torch.compile(there, fullgraph=True, backend="aot_eager")
        assert same(compiled(x.cuda()), there(x.cuda()), kernel), (scheme, signed, "compiled")
        static = x.cuda().half()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = there(static)
        static.copy_(x.flip(0))
        graph.replay()
        assert same(out, there(static), kernel), (scheme, signed, "in a CUDA graph")
        back = there.to("cpu")
        assert torch.equal(back(x), wanted[-2]), (scheme, signed, "back on the CPU")
        found.append(out.cpu())
        print(f"smoke: {name}: {scheme}, {'signed' if signed else 'zero points'}: {kernel}", flush=True)
    return found


def variant(folder: Path) -> ModuleType:
    """Import a variant folder as the loader does, under the name that its metadata gives."""
    name = json.loads((folder / "metadata.json").read_text())["id"]
    spec = importlib.util.spec_from_file_location(name, folder / "__init__.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module


def main(folder: str = "") -> int:
    assert "site-packages" in Path(lowbit.__file__).parts, lowbit.__file__
    assert native.CUDA_LIBRARY.is_file() and ops_cuda.refuses(0) is None, ops_cuda.refuses(0)
    ours = results(lowbit.types, lowbit.QuantLinear, "wheel")
    if folder:
        kernel = variant(Path(folder).resolve())
        theirs = results(kernel._lowbit.types, kernel.QuantLinear, Path(folder).name)
        assert kernel.QuantLinear is not lowbit.QuantLinear
        for a, b, (*_, case, _) in zip(ours, theirs, CASES, strict=True):
            assert same(a, b, case), "two copies, two results"
    chip = torch.cuda.get_device_name(0)
    print(f"smoke: python {sys.version.split()[0]}, torch {torch.__version__}, {chip}: right", flush=True)
    return 0


if __name__ == "__main__":
    raise SystemExit(main(*sys.argv[1:]))
