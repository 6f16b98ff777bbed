"""W4A4Linear as a module: dtypes of x, inference mode, streams, graphs, devices; on the CPU and, marked, on a GPU."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from torch import Tensor, nn

from lowbit import reference
from lowbit.formats import lowbit as canonical
from lowbit.nn import W4A4Linear
from lowbit.types import Activation, LowRank, QuantizedWeight
from samples import DTYPES, generator

N, K = 72, 256  # N is no multiple of the GPU's tiles
DEVICES = ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)]
# half an ulp of y, and on a GPU the fp16 sums of the low rank
LOSS = {torch.float32: 1e-3, torch.float16: 1e-3, torch.bfloat16: 4e-3}
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def weight() -> QuantizedWeight:
    """As `lowbit quantize --scheme w4a4 --scales two-level` makes them."""
    r = generator("w4a4")
    steps = torch.randint(1, 16, (N, K // 64), generator=r)
    low = LowRank(torch.randn(K, 16, generator=r).half() / 16, torch.randn(N, 16, generator=r).half() / 8)
    return QuantizedWeight(
        torch.randint(-8, 8, (N, K), generator=r).to(torch.int8), torch.rand(N, 1, generator=r).half().float() / 64 * steps,
        64, 4, low_rank=low, smooth=torch.rand(K, generator=r).half() + 0.5, hadamard=64,
        activation=Activation(4, "group"), bias=torch.randn(N, generator=r).half(),
    )  # fmt: skip


def made(device: str, bits: int | None = 8) -> W4A4Linear:
    return W4A4Linear.from_quantized(weight().to(device), activation_bits=bits)


def rows(m: int, device: str = "cpu", dtype: torch.dtype = torch.float16) -> Tensor:
    return torch.randn(m, K, generator=generator("x", m)).to(device, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_x_of_every_dtype(device: str, bits: int, dtype: torch.dtype) -> None:
    layer = made(device, bits)
    want_of = Activation(4, "group") if bits == 4 else Activation(8, "token")
    for shape in ((1, K), (3, 7, K), (40, K), (0, K), (K,)):
        x = torch.randn(shape, generator=generator(shape)).to(device, dtype)
        y = layer(x)
        assert (y.shape, y.dtype, y.device) == ((*shape[:-1], N), dtype, x.device)
        if x.numel():
            assert reference.error(y.float().cpu(), reference.linear(x.cpu(), weight(), want_of)) < LOSS[dtype], shape


@pytest.mark.parametrize("device", DEVICES)
def test_it_takes_the_place_of_a_linear_from_a_checkpoint(device: str, tmp_path: Path) -> None:
    q, name = weight(), "layers.0.proj"
    said = {"lowbit": json.dumps({"linears": {name: canonical.describe(q)}})}
    save_file(canonical.write(q, name), tmp_path / "m.safetensors", said)
    model = nn.Sequential(nn.Linear(K, N), nn.GELU())
    model[0] = W4A4Linear.from_checkpoint(tmp_path / "m.safetensors", name)
    model = model.to(device).half()
    x = rows(5, device)
    assert torch.equal(model(x), nn.functional.gelu(made(device, model[0].activation_bits)(x)))
    assert model[0].declares() == Activation(4, "group")


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("device", DEVICES)
def test_inference_mode_around_the_call_and_around_the_making(device: str, bits: int) -> None:
    layer, x = made(device, bits), rows(40, device)
    want = layer(x)
    with torch.inference_mode():
        inside = made(device, bits)
        assert torch.equal(layer(x), want) and torch.equal(inside(x), want)
        copied = copy.deepcopy(inside)
    assert not any(t.is_inference() for t in inside.buffers())
    z = x.clone().requires_grad_()
    copied(z).float().sum().backward()
    assert z.grad is not None and bool(z.grad.any())


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_compiled_as_one_graph(bits: int, dtype: torch.dtype) -> None:
    layer, x = made("cuda", bits), rows(40, "cuda", dtype)
    torch._dynamo.reset()
    assert torch.equal(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))


@pytest.mark.gpu
@pytest.mark.parametrize("m", [3, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_side_stream_it_waits_for_its_x(bits: int, m: int) -> None:
    """Behind a pause of that stream, a launch on another one would see the x of before."""
    layer, new = made("cuda", bits), rows(m, "cuda")
    want, x, stream = layer(new), torch.ones_like(new), torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        torch.cuda._sleep(20_000_000)
        x.copy_(new)
        y = layer(x)
    stream.synchronize()
    assert torch.equal(y, want)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [8, 4])
def test_a_graph_replays_what_its_input_holds_now(bits: int, dtype: torch.dtype) -> None:
    layer, static, graph = made("cuda", bits), torch.ones(40, K, device="cuda", dtype=dtype), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph):
        y = layer(static)
    x = rows(40, "cuda", dtype)
    static.copy_(x)
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(y, layer(x))


@pytest.mark.gpu
@two
@pytest.mark.parametrize("bits", [8, 4])
def test_the_second_device_gives_the_bits_of_the_first(bits: int) -> None:
    here, there = made("cuda:0", bits), made("cuda:0", bits).to("cuda:1")
    x = rows(40, "cuda:0")
    assert torch.equal(there(x.to("cuda:1")).to("cuda:0"), here(x)) and torch.cuda.current_device() == 0
