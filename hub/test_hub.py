"""The artifact of `make hub` through the real `kernels` package. `make hub` runs this; it is no part of `make test`."""

from __future__ import annotations

import os
import platform
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest
import torch

os.environ["HF_HUB_OFFLINE"] = "1"
kernels = pytest.importorskip("kernels")
from kernels._rust import Digest, Metadata  # noqa: E402
from kernels.variants import parse_variant  # noqa: E402

HUB = Path(os.environ.get("LOWBIT_HUB", Path(__file__).parents[1] / "build" / "hub" / "quant-matmul"))
VARIANTS = sorted(folder for folder in (HUB / "build").iterdir()) if (HUB / "build").is_dir() else []
PUBLIC = {
    "QuantLinear", "dequant_w4", "fp16_gemv", "from_awq", "from_gptq", "layers", "pack_w4", "quantize_activation",
    "w4a8_linear", "w8a8_linear",
}  # fmt: skip
N, K, GROUP = 40, 256, 64


@pytest.fixture(scope="module")
def kernel() -> ModuleType:
    module: ModuleType = kernels.get_local_kernel(HUB)
    return module


def weight() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(0)
    codes = torch.randint(0, 16, (N, K), generator=g)
    return codes, torch.rand(N, K // GROUP, generator=g).half(), torch.randint(0, 16, (N, K // GROUP), generator=g)


def x() -> torch.Tensor:
    return torch.randn(5, K, generator=torch.Generator().manual_seed(1))


def test_every_variant_is_named_described_and_whole() -> None:
    assert VARIANTS, f"nothing in {HUB}: `make hub` first"
    ids = set()
    for folder in VARIANTS:
        parse_variant(folder.name)
        metadata = Metadata.read_from_file(folder / "metadata.json")
        metadata.digest.validate(Digest.hash_variant(metadata.digest.algorithm, folder))
        assert metadata.name.python_name == "quant_matmul" and list(metadata.python_depends) == []
        native = (folder / "_lowbit" / "native.py").read_text()
        assert f'OPS = "{metadata.id}"' in native
        ids.add(metadata.id)
        libraries = {file.name for file in folder.rglob("*.so")}
        expected = set() if folder.name in ("torch-cpu", "torch-cuda") else {"_C.so"}
        assert libraries == expected | ({"_cuda13.so"} if "cu130-x86_64" in folder.name else set()), folder.name
    assert len(ids) == len(VARIANTS)  # two copies with one namespace would end the process


def test_the_surface_is_that_of_the_contract(kernel: ModuleType) -> None:
    assert set(kernel.__all__) == PUBLIC and all(hasattr(kernel, name) for name in PUBLIC)
    assert {n for n in vars(kernel) if not n.startswith("_")} <= PUBLIC | {"annotations"}
    machine, cuda = platform.machine(), torch.version.cuda or ""
    backend = "cu130" if cuda.startswith("13") else "cu126" if cuda else "cpu"
    assert Path(kernel.__file__).parent.name == f"torch-stable-abi210-{backend}-{machine}-linux"


def test_the_loader_takes_the_folder_its_build_and_a_variant(
    kernel: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert kernels.get_local_kernel(HUB / "build") is kernel
    assert kernels.get_local_kernel(Path(kernel.__file__).parent) is kernel
    monkeypatch.setenv("LOCAL_KERNELS", f"somebody/quant-matmul={HUB}")
    assert kernels.get_kernel("somebody/quant-matmul", version=1) is kernel


def test_it_computes(kernel: ModuleType) -> None:
    codes, scales, zeros = weight()
    packed = kernel.pack_w4(codes, scales, zeros, GROUP)
    want = x().double() @ kernel.dequant_w4(packed, scales, zeros, GROUP).double().T
    y = kernel.w4a8_linear(x(), packed, scales, zeros, GROUP)
    assert 0 < float((y - want).norm() / want.norm()) < 0.02
    a, sa = kernel.quantize_activation(x())
    w8 = torch.randint(-128, 128, (N, K), generator=torch.Generator().manual_seed(2)).to(torch.int8)
    exact = (a.double() * sa.double()[:, None]) @ w8.double().T
    assert torch.allclose(kernel.w8a8_linear(x(), w8, torch.ones(N)).double(), exact, rtol=1e-5, atol=1e-2)
    half = w8.half() / 64
    assert torch.allclose(kernel.fp16_gemv(x(), half), x() @ half.float().T, rtol=1e-4, atol=1e-3)
    for scheme in ("w4a8", "w8a8", "w4a16", "fp16"):
        linear = torch.nn.Linear(K, N).requires_grad_(False)
        layer = kernel.QuantLinear.from_linear(linear, scheme)
        assert float((layer(x()) - linear(x())).norm() / linear(x()).norm()) < (0.2 if "w4" in scheme else 0.02)


def test_it_compiles_into_one_graph(kernel: ModuleType) -> None:
    codes, scales, zeros = weight()
    packed = kernel.pack_w4(codes, scales, zeros, GROUP)

    def f(x: torch.Tensor) -> torch.Tensor:
        return kernel.w4a8_linear(x, packed, scales, zeros, GROUP) + 1

    assert torch.equal(torch.compile(f, fullgraph=True)(x()), f(x()))
    layer = kernel.QuantLinear.from_linear(torch.nn.Linear(K, N), "w4a8")
    compiled = torch.compile(layer, fullgraph=True, dynamic=True)
    for rows in (2, 9):
        assert torch.equal(compiled(x()[:1].expand(rows, K).contiguous()), layer(x()[:1].expand(rows, K).contiguous()))
    torch.library.opcheck(kernel._lowbit.ops._linear, (x(), packed, N, GROUP, 4, 0))


def adopter(kernel: ModuleType, name: str) -> torch.nn.Module:
    """A model whose layer carries the attributes, and computes in float until it is adopted."""

    @kernels.use_kernel_forward_from_hub(name)
    class Plain(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            codes, scales, zeros = weight()
            self.group_size = GROUP
            self.register_buffer("packed", kernel.pack_w4(codes, scales, zeros, GROUP))
            self.register_buffer("scales", scales)
            self.register_buffer("zeros", zeros)
            self.perm = None
            self.bias = None
            self.register_buffer("w_int8", codes.to(torch.int8))
            self.register_buffer("scale_wt", torch.ones(N))
            self.register_buffer("weight", codes.half())

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if name == "W4A8Linear":
                return x @ kernel.dequant_w4(self.packed, self.scales, self.zeros, GROUP).T
            return x @ self.weight.float().T

    return torch.nn.Sequential(Plain())


@pytest.mark.parametrize("name", ["W4A8Linear", "W8A8Linear", "Fp16Linear"])
def test_kernelize_adopts_its_layers(kernel: ModuleType, name: str) -> None:
    model = adopter(kernel, name)
    want = model(x())
    mapping = {name: {"cpu": kernels.LocalLayerRepository(repo_path=HUB, layer_name=name)}}
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False):
        kernels.kernelize(
            model, mode=kernels.Mode.INFERENCE | kernels.Mode.TORCH_COMPILE, device="cpu", use_fallback=False
        )
    got = model(x())
    assert "layers" in model[0].forward.__module__
    error = float((got - want).norm() / want.norm())
    assert error < 0.02 and (error > 0 or name == "Fp16Linear")
    assert torch.equal(torch.compile(model, fullgraph=True)(x()), got)
    with kernels.use_kernel_mapping(mapping, inherit_mapping=False), pytest.raises(ValueError, match="TRAINING"):
        kernels.kernelize(adopter(kernel, name), mode=kernels.Mode.TRAINING, device="cpu", use_fallback=False)


def test_the_hub_copy_the_other_variant_and_the_pip_package_live_in_one_process(kernel: ModuleType) -> None:
    lowbit = pytest.importorskip("lowbit")
    from lowbit import functional

    codes, scales, zeros = weight()
    packed = functional.pack_w4(codes, scales, zeros, GROUP)
    ours = functional.w4a8_linear(x(), packed, scales, zeros, GROUP)
    assert lowbit.QuantLinear is not kernel.QuantLinear
    assert torch.equal(kernel.w4a8_linear(x(), packed, scales, zeros, GROUP), ours)
    for name in ("torch-stable-abi210-cu126-x86_64-linux", "torch-cpu"):  # what another torch gets; the fallback
        if name == "torch-cpu":
            with pytest.warns(UserWarning, match="slow reference"):
                other = kernels.get_local_kernel(HUB / "build" / name)
        else:
            other = kernels.get_local_kernel(HUB / "build" / name)
        y = other.w4a8_linear(x(), packed, scales, zeros, GROUP)
        assert torch.allclose(y, ours, rtol=1e-4, atol=1e-4) and (name == "torch-cpu" or torch.equal(y, ours))


def test_the_resolver_picks_the_variant_of_every_torch() -> None:
    """As get_kernel decides: by torch's version and how it was built."""
    from kernels import variants as v
    from kernels.backends import parse_backend
    from packaging.version import Version

    names = [parse_variant(folder.name) for folder in VARIANTS]
    for backend, machine, torch_version, best in (
        ("cpu", "x86_64", "2.13", "torch-stable-abi210-cpu-x86_64-linux"),
        ("cpu", "aarch64", "2.10", "torch-stable-abi210-cpu-aarch64-linux"),
        ("cu130", "x86_64", "2.14", "torch-stable-abi210-cu130-x86_64-linux"),
        ("cu128", "x86_64", "2.10", "torch-stable-abi210-cu126-x86_64-linux"),
        ("cu130", "aarch64", "2.12", "torch-stable-abi210-cu130-aarch64-linux"),
        ("cpu", "riscv64", "2.13", "torch-cpu"),
        ("cpu", "x86_64", "2.9", "torch-cpu"),
    ):
        if best not in {folder.name for folder in VARIANTS}:
            pytest.skip(f"{best} was not built")
        accepted, _ = v._resolve_variant_for_system(
            names, parse_backend(backend), machine, "linux", Version(torch_version), True, None
        )
        assert accepted[0].variant_str == best


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_layer_runs_on_the_gpu(kernel: ModuleType) -> None:
    scheme = kernel.QuantLinear.from_linear(torch.nn.Linear(K, N).requires_grad_(False), "w8a8")
    want = scheme(x())
    got = scheme.to("cuda")(x().cuda()).cpu()
    assert scheme.explain()["kernel"] == "cuda_tiles"
    assert float((got - want).norm() / want.norm()) < 1e-3


def test_the_card_is_what_it_says(kernel: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_KERNELS", f"lowbit/quant-matmul={HUB}")
    card = (HUB / "README.md").read_text("utf-8")
    snippets = re.findall(r"```python\n(.*?)```", card, re.DOTALL)
    assert len(snippets) == 2
    names: dict[str, object] = {}
    exec("\n".join(snippets), names)
    assert names["qm"] is kernel and names["y"].shape == (2, 512)  # type: ignore[attr-defined]
    documented = set(re.findall(r"^\| `(\w+)", card, re.MULTILINE))
    assert documented == PUBLIC


def test_it_needs_no_lowbit() -> None:
    code = "import sys; sys.modules['lowbit'] = None; import kernels; k = kernels.get_local_kernel(__import__('pathlib').Path(sys.argv[1])); print(k.__name__)"
    done = subprocess.run([sys.executable, "-c", code, str(HUB)], capture_output=True, text=True)
    assert done.returncode == 0 and "quant_matmul" in done.stdout, done.stderr
