"""state_dict of a layer: the tensors of a checkpoint on every device, read back and packed for where the layer is.

Without a GPU the layers of a CUDA device are made of CPU tensors: packing and unpacking are torch, only a forward is not.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import oracle
from lowbit import dispatch, ops_cuda
from lowbit.cuda import DeviceLinear
from lowbit.formats import lowbit as canonical
from lowbit.layouts import mma_tiles, panels
from lowbit.nn import QuantLinear, W4A4Linear
from lowbit.types import Activation, LowRank, QuantizedWeight
from samples import generator, rows

KERNELS = {kernel.name: kernel for kernel in dispatch.KERNELS}


@contextmanager
def as_on_a_gpu() -> Iterator[None]:
    """Layers made inside get the kernel that a CUDA device would give them."""

    def choose(q: QuantizedWeight, device: str = "cpu") -> dispatch.Choice:
        taken = (
            "cuda_tiles" if mma_tiles.refuses(q) is None else "reference" if q.bits == 4 and q.k % 2 else "cuda_float"
        )
        return dispatch.Choice(KERNELS[taken], ())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(dispatch, "choose", choose)
        patch.setattr(ops_cuda, "has_int4", lambda device: True)
        patch.setattr(ops_cuda, "runs_int4", lambda device: True)
        yield


def over(layer: QuantLinear, where: str) -> QuantLinear:
    """The layer on the other device, in place: a real one, or tiles of CPU tensors."""
    if where == "cuda":
        return layer.cuda()
    with as_on_a_gpu():
        return layer._move(torch.device("cpu"))


def back(layer: QuantLinear, where: str) -> QuantLinear:
    return layer.cpu() if where == "cuda" else layer._move(torch.device("cpu"))


WHERE = ["tiles", pytest.param("cuda", marks=pytest.mark.gpu)]


def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    return list(a) == list(b) and all(
        a[name].dtype == b[name].dtype and oracle.same_bits(a[name].cpu(), b[name].cpu()) for name in a
    )


@st.composite
def weights(draw: st.DrawFn) -> QuantizedWeight:
    """Everything that a layer may hold, most of it what the tiles take."""
    r = generator(draw(st.integers(0, 2**20)))
    n, k = draw(st.integers(1, 70)), 16 * draw(st.integers(1, 20))
    bits = draw(st.sampled_from((4, 4, 4, 8)))
    group = draw(st.sampled_from((k, k, *(g for g in (32, 64, 128, 100) if g <= k and bits == 4))))
    zeros = draw(st.sampled_from((False, False, False, True)))
    groups, kind = -(-k // group), draw(st.sampled_from(("two-level", "half", "bfloat16", "float")))
    scales = (torch.rand(n, groups, generator=r) + 0.1) * 2.0 ** draw(st.integers(-20, 3))
    if kind == "two-level":
        scales = scales[:, :1].half().float() * torch.randint(-15, 16, (n, groups), generator=r)
    scales = scales * torch.where(torch.rand(n, groups, generator=r) < 0.2, -1.0, 1.0)
    scales = scales * (torch.rand(n, groups, generator=r) < 0.9)  # zeros of both signs
    scales = scales.to({"half": torch.float16, "bfloat16": torch.bfloat16}.get(kind, torch.float32))
    low, high = (0, 2**bits) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1))
    q = QuantizedWeight(
        torch.randint(low, high, (n, k), generator=r).to(torch.uint8 if zeros else torch.int8), scales, group, bits,
        zeros=torch.randint(0, 2**bits, (n, groups), generator=r).to(torch.uint8) if zeros else None,
    )  # fmt: skip
    if draw(st.booleans()):
        size = draw(st.sampled_from((0.1, 1.0, 60.0)))  # the largest has to be balanced between the factors
        down, up = torch.randn(k, 16, generator=r) * size, torch.randn(n, 16, generator=r) / 64
        dtype = draw(st.sampled_from((torch.float16, torch.float16, torch.bfloat16, torch.float32)))
        q = q.with_(low_rank=LowRank(down.to(dtype), up.to(dtype)))
    if draw(st.booleans()):
        q = q.with_(smooth=torch.rand(k, generator=r).half() + 0.5, hadamard=64 if k % 64 == 0 else 0)
    if draw(st.booleans()):
        q = q.with_(bias=torch.randn(n, generator=r))
    if draw(st.sampled_from((False, False, False, True))):
        q = q.with_(perm=torch.randperm(k, generator=r).int())
    return q


def meant(q: QuantizedWeight) -> dict[str, Tensor]:
    """What a checkpoint of ``q`` holds, with one zero."""
    bias = None if q.bias is None else q.bias.float()
    return canonical.write(q.with_(scales=q.scales + 0.0, bias=bias), "")


def _round_trip(q: QuantizedWeight, where: str) -> None:
    layer = QuantLinear.from_quantized(q, "token")
    first = layer.state_dict()
    assert same(first, meant(q))
    moved = over(layer, where)
    assert moved is layer and (layer.on_device is not None or layer.on_float is not None)
    assert same(layer.state_dict(), first)
    other = over(QuantLinear.from_quantized(spoiled(q), "token"), where)
    other.load_state_dict(first)  # canonical of the CPU into tiles
    assert same(other.state_dict(), first)
    assert same(back(layer, where).state_dict(), first)
    here = QuantLinear.from_quantized(spoiled(q), "token")
    here.load_state_dict(other.state_dict())  # and of tiles into panels
    assert same(here.state_dict(), first)
    x = rows(3, q.k)
    assert oracle.same_bits(here(x), QuantLinear.from_quantized(q, "token")(x))


def spoiled(q: QuantizedWeight) -> QuantizedWeight:
    """Another weight of the same shape and parts."""
    low = None if q.low_rank is None else LowRank(*(torch.ones_like(t) for t in q.low_rank))
    return q.with_(
        codes=torch.zeros_like(q.codes), scales=torch.ones_like(q.scales), low_rank=low,
        zeros=None if q.zeros is None else torch.ones_like(q.zeros),
        perm=None if q.perm is None else torch.arange(q.k).int(),
        smooth=None if q.smooth is None else torch.ones_like(q.smooth),
        bias=None if q.bias is None else torch.ones_like(q.bias),
    )  # fmt: skip


@given(weights())
def test_from_device_to_device_it_keeps_every_bit(q: QuantizedWeight) -> None:
    _round_trip(q, "tiles")


@pytest.mark.gpu
@given(weights())
def test_from_cpu_to_gpu_and_back_it_keeps_every_bit(q: QuantizedWeight) -> None:
    _round_trip(q, "cuda")


def two_level(n: int = 40, k: int = 256, seed: int = 0) -> QuantizedWeight:
    r = generator("two-level", n, k, seed)
    steps = torch.randint(1, 16, (n, k // 64), generator=r)
    codes = torch.randint(-8, 8, (n, k), generator=r).to(torch.int8)
    low = LowRank(torch.randn(k, 16, generator=r).half() / 16, torch.randn(n, 16, generator=r).half() / 16)
    scales = torch.rand(n, 1, generator=r).half().float() / 64 * steps
    bias, smooth = torch.randn(n, generator=r), torch.rand(k, generator=r).half() + 0.5
    return QuantizedWeight(codes, scales, 64, 4, low_rank=low, bias=bias, smooth=smooth, hadamard=64,
                           activation=Activation(4, "group"))  # fmt: skip


@pytest.mark.parametrize("kind", [QuantLinear, W4A4Linear])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("where", WHERE)
def test_names_dtypes_and_no_second_copy(where: str, bits: int, kind: type[QuantLinear]) -> None:
    """As the checkpoint has them, and the layer holds nothing more for having been asked."""
    q = two_level()
    layer = over(kind.from_quantized(q), where)
    with as_on_a_gpu():
        layer.activation_bits = bits
    before = layer.packed_bytes()
    state = layer.state_dict()
    said = {name: (str(t.dtype)[6:], list(t.shape)) for name, t in state.items()}
    assert said == {
        "qweight": ("uint8", [40, 128]), "w_scales": ("float32", [40, 4]), "smooth": ("float16", [256]),
        "proj_down": ("float16", [256, 16]), "proj_up": ("float16", [40, 16]), "bias": ("float32", [40]),
    }  # fmt: skip
    assert layer.packed_bytes() == before and not layer.packed.numel()
    held = {t.data_ptr() for t in layer.buffers()}
    assert state["qweight"].data_ptr() not in held
    nested = torch.nn.Sequential(torch.nn.Identity(), layer)
    assert set(nested.state_dict()) == {f"1.{name}" for name in said}
    read = canonical.read(state, "", {"linears": {"": canonical.describe(q)}})
    assert torch.equal(read.codes.cpu(), q.codes) and torch.equal(read.scales.cpu().float(), q.scales)


@pytest.mark.parametrize("where", WHERE)
def test_loading_keeps_the_memory_that_graphs_read(where: str) -> None:
    layer = over(QuantLinear.from_quantized(two_level(), "token"), where)
    with as_on_a_gpu():
        layer.activation_bits = 4
        assert layer.on_device is not None and layer.on_int4 is not None
        places = {name: t.data_ptr() for name, t in layer.named_buffers()}
        layer.load_state_dict(QuantLinear.from_quantized(two_level(seed=1), "token").state_dict())
        fresh = over(QuantLinear.from_quantized(two_level(seed=1), "token"), where)
        fresh.activation_bits = 4
    assert {name: t.data_ptr() for name, t in layer.named_buffers()} == places
    assert all(torch.equal(a, b) for a, b in zip(layer.buffers(), fresh.buffers(), strict=True))
    cpu = QuantLinear.from_quantized(two_level(), "token")
    places = {name: t.data_ptr() for name, t in cpu.named_buffers()}
    cpu.load_state_dict(layer.state_dict())
    assert {name: t.data_ptr() for name, t in cpu.named_buffers()} == places


@pytest.mark.gpu
@pytest.mark.parametrize("activation_bits", [8, 4])
def test_on_a_gpu_a_loaded_layer_computes_what_the_other_does(activation_bits: int) -> None:
    made = W4A4Linear.from_quantized(two_level().to("cuda"), activation_bits=activation_bits)
    other = W4A4Linear.from_quantized(two_level(seed=1).to("cuda"), activation_bits=activation_bits)
    x = rows(40, 256).half().cuda()
    want = made(x)
    assert not torch.equal(other(x), want)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        replayed = other(x)
    other.load_state_dict({name: t.cpu() for name, t in made.state_dict().items()})
    assert torch.equal(other(x), want) and other.activation_bits == activation_bits
    graph.replay()
    torch.cuda.synchronize()
    assert torch.equal(replayed, want)


def test_what_the_layer_is_stays() -> None:
    """Activation, its bits and what a save declares are of the layer, not of its tensors."""
    layer = W4A4Linear.from_quantized(two_level(), activation_bits=4)
    layer.load_state_dict(W4A4Linear.from_quantized(two_level(seed=1)).state_dict())
    assert (layer.activation, layer.activation_bits, layer.declares()) == ("token", 4, Activation(4, "group"))
    x = rows(3, 256)
    assert torch.equal(layer(x), W4A4Linear.from_quantized(two_level(seed=1), activation_bits=4)(x))


def test_factors_that_the_tiles_round_or_balance_are_kept_in_host_memory() -> None:
    q = two_level()
    low = q.low_rank
    assert low is not None and DeviceLinear(q).factors is None
    for factors in (
        LowRank(low.down * 2000, low.up),  # the sum of a column times 127 would pass fp16
        LowRank(low.down.float() / 3, low.up.float()),
    ):
        held = DeviceLinear(q.with_(low_rank=factors))
        back = held.weights()[3]
        assert held.factors is not None and back is not None
        assert all(torch.equal(a, b) and a.dtype == b.dtype for a, b in zip(back, factors, strict=True))
        assert copy.deepcopy(held).factors is not held.factors


def refused(state: dict[str, Any], said: str, **more: Any) -> None:
    layer = QuantLinear.from_quantized(two_level(), "token")
    before = layer.state_dict()
    model = torch.nn.ModuleDict({"proj": layer})
    with pytest.raises(RuntimeError, match=said):
        model.load_state_dict({f"proj.{name}": t for name, t in state.items()}, **more)
    assert same(layer.state_dict(), before)


def test_what_does_not_fit_is_named_and_changes_nothing() -> None:
    good = QuantLinear.from_quantized(two_level(seed=1), "token").state_dict()
    bits8 = QuantLinear.from_quantized(
        QuantizedWeight(torch.ones(40, 256, dtype=torch.int8), torch.ones(40, 1), 256, 8)
    )
    refused({**good, "w_scales": torch.ones(40, 2)}, "proj: group_size: found 64 with 2 groups")
    refused({**good, "qweight": good["qweight"][:8], "w_scales": good["w_scales"][:8], "proj_up": good["proj_up"][:8],
             "bias": good["bias"][:8]}, "proj.qweight: found 8 rows, accepted is 40")  # fmt: skip
    refused({**good, "qweight": bits8.state_dict()["qweight"]}, "proj: bits: found 4 with qweight int8")
    refused({**good, "w_scales": good["w_scales"] * float("nan")}, "proj.*w_scales")
    refused({**good, "proj_down": good["proj_down"][:, :8], "proj_up": good["proj_up"][:, :8]},
            "proj.proj_down: found 8 columns, accepted is 16")  # fmt: skip
    refused({**good, "smooth": [1.0]}, "proj.smooth: found list, accepted is a tensor")


def test_names_are_strict_where_strict_is_asked() -> None:
    good = QuantLinear.from_quantized(two_level(seed=1), "token").state_dict()
    less = {name: t for name, t in good.items() if name != "bias"}
    layer = QuantLinear.from_quantized(two_level(), "token")
    own = layer.state_dict()["bias"].clone()
    for state, said in (
        (less, 'Missing key.*"bias"'),
        ({**good, "w_zeros": good["qweight"]}, 'Unexpected key.*"w_zeros"'),
    ):
        with pytest.raises(RuntimeError, match=said):
            copy.deepcopy(layer).load_state_dict(state)
    told = layer.load_state_dict({**less, "w_zeros": good["qweight"]}, strict=False)
    assert (told.missing_keys, told.unexpected_keys) == (["bias"], ["w_zeros"])
    assert same(layer.state_dict(), {**good, "bias": own})


@pytest.mark.parametrize("name", ["packed", "on_device.weight", "on_float.codes"])
def test_a_state_dict_of_packed_bytes_is_refused(name: str) -> None:
    for strict in (True, False):
        refused({name: torch.zeros(4, dtype=torch.uint8)}, f"proj.{name}: found bytes packed .* load the checkpoint",
                strict=strict)  # fmt: skip


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float16_storage(device: str) -> None:
    made = QuantLinear.from_half(torch.randn(24, 50, generator=generator("half")), torch.ones(24))
    state = made.state_dict()
    assert {name: t.dtype for name, t in state.items()} == {"weight": torch.float16, "bias": torch.float32}
    other = QuantLinear.from_half(torch.zeros(24, 50), torch.zeros(24)).to(device)
    place = other.packed.data_ptr()
    other.load_state_dict(state)
    x = rows(3, 50).to(device)
    assert other.packed.data_ptr() == place and torch.equal(other(x), made.to(device)(x))
    for bad, said in (
        ({**state, "weight": state["weight"][:, 1:]}, r"weight: found float16 \[24, 49\], accepted is floating point"),
        ({**state, "weight": state["weight"].float() * 1e6}, "weight: found .*, accepted with float16 storage"),
        ({**state, "bias": torch.ones(3)}, r"bias: found shape \[3\], accepted is \[24\]"),
    ):
        with pytest.raises(RuntimeError, match=said):
            other.load_state_dict(bad)


@pytest.mark.parametrize("device", ["meta", pytest.param("cuda", marks=pytest.mark.gpu)])
def test_float16_storage_is_packed_where_the_weight_is(device: str) -> None:
    weight = torch.randn(24, 50, generator=generator("half")).half()
    packed = panels.pack_half(weight.to(device))
    assert packed.device.type == device and packed.shape == panels.pack_half(weight).shape
    if device == "cuda":
        layer = QuantLinear.from_linear(linear := torch.nn.Linear(50, 24, device=device), "fp16")
        x = rows(3, 50).to(device)
        assert layer(x).device == x.device and torch.allclose(layer(x), linear(x), rtol=1e-2, atol=1e-3)


def test_from_meta_it_has_names_and_shapes_and_into_meta_it_goes_where_the_tensors_are() -> None:
    q = two_level()
    layer = QuantLinear.from_quantized(q, "token")
    state = layer.state_dict()
    empty = copy.deepcopy(layer).to("meta")
    assert {n: t.shape for n, t in empty.state_dict().items()} == {n: t.shape for n, t in state.items()}
    empty.load_state_dict(state, assign=True)
    x = rows(3, 256)
    assert torch.equal(empty(x), layer(x)) and same(empty.state_dict(), state)
