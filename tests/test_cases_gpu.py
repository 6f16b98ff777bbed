"""What a GPU has to show of the CUDA operators beyond their numbers (bench/gpu_check.py, tests/test_cuda_gpu.py): their
contracts with torch, the memory around their buffers, streams, captures, devices, copies. `make test-gpu` runs them."""

from __future__ import annotations

import copy
import ctypes
import io
import os
import pickle
import subprocess
import sys
import textwrap
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import ops, ops_cuda
from lowbit.layouts import mma_tiles as tiles
from lowbit.nn import QuantLinear, W4A4Linear
from lowbit.types import FormatError, LowRank, QuantizedWeight

ROOT = Path(__file__).parents[1]
WHY = ops_cuda.refuses(0)
pytestmark = [pytest.mark.gpu, pytest.mark.skipif(WHY is not None, reason=WHY or "")]
MODES = ("w8", "w4ch", "w4two", "w4grp")
two = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")


def weight(mode: str, n: int, k: int, rank: int = 16, device: str = "cuda:0") -> QuantizedWeight:
    from lowbit.bench.cuda_layers import weight as drawn

    where = torch.device(device)
    g = torch.Generator(device=where).manual_seed(n + k)
    q = drawn(mode, n, k, where).with_(bias=torch.randn(n, generator=g, device=where), hadamard=64)
    if rank:
        down = torch.randn(k, rank, generator=g, device=where) / k**0.5
        up = torch.randn(n, rank, generator=g, device=where) / 8
        q = q.with_(low_rank=LowRank(down.half(), up.half()))
    return q


def layer(mode: str = "w4two", n: int = 256, k: int = 512, device: str = "cuda:0") -> QuantLinear:
    return QuantLinear.from_quantized(weight(mode, n, k, device=device), "token")


def rows(m: int, k: int = 512, device: str = "cuda:0", seed: int = 0) -> Tensor:
    g = torch.Generator(device=device).manual_seed(seed)
    return torch.randn(m, k, generator=g, device=device).half()


def arguments(name: str, m: int = 128) -> dict[str, Any]:
    """A call of each operator: N = 200, K = 320, rank 16 behind everything that there is."""
    k, n, device = 320, 200, "cuda:0"
    x = rows(m, k)
    ones = torch.ones(k, device=device)
    low = LowRank(torch.randn(k, 16, device=device) / 18, torch.randn(n, 16, device=device) / 8)
    before = dict(
        x=x,
        residual=rows(m, k, seed=1),
        norm=ones,
        eps=1e-6,
        smooth=tiles.pack_smooth(ones + 0.5),
        rank=16,
        hadamard=True,
        silu=False,
    )
    if name == "quantize":
        return before | dict(down=tiles.pack_branch(low, n).down, tile_order=True)
    if name == "quantize4":
        return before | dict(down=tiles.pack_branch(low, n).down, clip=0.9)
    if name == "linear":
        branch, t = tiles.pack_branch(low, n), tiles.pack(weight("w4two", n, k, 0))
        codes, scales, half = ops_cuda.quantize(x, down=branch.down, hadamard=True)
        bias = torch.randn(256, device=device)
        return dict(codes=codes, scales=scales, low=half, weight=t.weight, channel=t.channel, bias=bias, up=branch.up,
                    n=n, mode=t.mode, out=2, row=-1)  # fmt: skip
    if name == "gemv":
        branch, t = tiles.pack_branch(low, n), tiles.pack(weight("w4two", n, k, 0))
        codes, scales, half = ops_cuda.quantize(x[:7], down=branch.down, hadamard=True, tile_order=False)
        bias = torch.randn(256, device=device)
        return dict(codes=codes, scales=scales, low=half, weight=t.weight, channel=t.channel, bias=bias, up=branch.up,
                    n=n, mode=t.mode, out=2, row=ops_cuda.GEMV)  # fmt: skip
    if name == "attention_quantize":  # 4 heads on 2: one launch where the chip has it
        parts = rows(m, 1024).view(m, 8, 128).split([4, 2, 2], 1)
        bounds = torch.tensor([0, m // 3, m], dtype=torch.int32, device=device)
        return dict(zip("qkv", (t.contiguous() for t in parts)), bounds=bounds, scale=0.1, tile_order=True)
    if name == "linear4":
        branch, r = tiles.pack_branch(low, n, 128), tiles.pack_rows(weight("w4two", n, k, 0))
        codes, groups, scales, half = ops_cuda.quantize4(x, down=branch.down, hadamard=True)
        bias = torch.randn(256, device=device)
        return dict(codes=codes, group_scales=groups, scales=scales, low=half, weight=r.weight,
                    weight_scales=r.scales, bias=bias, up=branch.up, n=n, out=2)  # fmt: skip
    if name == "norm_rope":
        angle = torch.rand(m, 64, device=device)
        w = torch.ones(128, device=device)
        return dict(qkv=rows(m, 512), q_norm=w, k_norm=w + 1, cosines=angle.cos(), sines=angle.sin(), heads=2,
                    kv_heads=1, eps=1e-6)  # fmt: skip
    if name == "dequantize":
        codes = torch.randint(0, 256, (m, 40), device=device, dtype=torch.uint8)
        zeros = torch.randint(0, 16, (m, 2), device=device, dtype=torch.uint8)
        return dict(
            codes=codes, scales=torch.rand(m, 2, device=device), zeros=zeros, k=80, group_size=40, bits=4, out=0
        )
    if name == "guided_score":
        return dict(
            logits=torch.randn(2, 2, m, 3, 65, device=device).half(), guidance=torch.tensor(2.0, device=device),
            penalty=torch.rand(3, 1, device=device), temperature=torch.tensor(5.0, device=device),
            noise=torch.rand(2, 3, m, device=device), valid=torch.rand(2, 1, m, device=device) < 0.9,
            tokens=torch.randint(60, 65, (2, 3, m), device=device), mask_id=64,
        )  # fmt: skip
    if name == "reveal":
        return dict(
            tokens=torch.zeros(2, 3 * m, dtype=torch.int64, device=device),
            pred=torch.randint(1, 9, (2, 3 * m), device=device), score=torch.randn(2, 3 * m, device=device),
            k=torch.tensor([m, 1], device=device),
        )  # fmt: skip
    assert name == "inverse_rms"
    return dict(x=x, eps=1e-6)


NAMES = (
    "quantize linear gemv quantize4 linear4 norm_rope dequantize inverse_rms guided_score reveal attention_quantize"
).split()


def op_of(name: str) -> Any:
    return getattr(getattr(torch.ops, ops.NAMESPACE), f"cuda_{'linear' if name == 'gemv' else name}").default


def written(name: str, arguments: dict[str, Any], result: Any) -> list[Tensor]:
    """What a call gives, without the padding of rows that nobody reads."""
    if name in ("norm_rope", "reveal"):
        return [arguments["qkv" if name == "norm_rope" else "tokens"]]
    parts = list(result) if isinstance(result, tuple) else [result]
    if name.startswith("quantize"):
        m = len(parts[0])
        parts[-1] = tiles.unpack_low(parts[-1], m)
        if name == "quantize4":
            parts[1] = parts[1][: arguments["x"].shape[1] // 64, :m]
    return parts


# -- contracts with torch --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_opcheck(name: str) -> None:
    """Schema (what is written to), fake shapes and strides, tracing with dynamic shapes. 128 rows: none is padding."""
    torch.library.opcheck(op_of(name), (), arguments(name))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("backend", ["aot_eager", "inductor"])
def test_compiled_as_one_graph(bits: int, backend: str) -> None:
    if backend == "inductor":
        pytest.importorskip("triton")
    made = W4A4Linear.from_quantized(weight("w4two", 256, 512), "token", activation_bits=bits)
    assert isinstance(made, W4A4Linear) and made.explain()["kernel"] == "cuda_tiles"
    torch._dynamo.reset()
    compiled = torch.compile(made, fullgraph=True, backend=backend, dynamic=True)
    for m in (40, 64, 685, 5, 3):
        x = rows(m)
        assert torch.equal(compiled(x), made(x)), m
    torch._dynamo.reset()
    plain = layer("w4grp")
    assert torch.equal(torch.compile(plain, fullgraph=True, backend=backend)(rows(40)), plain(rows(40)))


def test_inference_mode_and_what_was_made_in_it() -> None:
    made = layer()
    with torch.inference_mode():
        inside = layer()
        y = made(rows(9))
        assert y.is_inference() and torch.equal(inside(rows(9)), y)
    x = rows(9).requires_grad_(True)
    inside(x).float().sum().backward()  # buffers that were made in inference mode are no inference tensors
    assert x.grad is not None and bool(torch.isfinite(x.grad).all()) and bool(x.grad.any())


# -- memory ----------------------------------------------------------------------------------------------------------

PATTERN, GUARD = 0xA5, 512  # the allocator's step: views past it would be another tensor's


class Raw:
    """Bytes at an address, as torch.as_tensor takes them without a copy."""

    def __init__(self, address: int, size: int) -> None:
        self.__cuda_array_interface__ = {
            "shape": (size,), "typestr": "|u1", "data": (address, False), "version": 3, "strides": None,
        }  # fmt: skip


def at(address: int, size: int) -> Tensor:
    view = torch.as_tensor(Raw(address, size), device="cuda:0")
    assert view.data_ptr() == address
    return view


def fenced(t: Tensor) -> tuple[Tensor, Tensor]:
    """(the whole buffer, a copy of ``t`` in its middle): a pattern before and behind."""
    size = t.numel() * t.element_size()
    whole = torch.full((size + 2 * GUARD,), PATTERN, dtype=torch.uint8, device=t.device)
    inside = whole[GUARD : GUARD + size].view(t.dtype).view(t.shape)
    inside.copy_(t)
    return whole, inside


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("m", [5, 37])
def test_inputs_are_read_only_and_their_surroundings_stay(name: str, m: int) -> None:
    given = arguments(name, m)
    tensors = {key: value for key, value in given.items() if isinstance(value, Tensor) and value.numel()}
    changed = {"norm_rope": "qkv", "quantize": "residual", "quantize4": "residual", "reveal": "tokens"}.get(name)
    want = written(name, again := {k: v.clone() if k == changed else v for k, v in given.items()}, op_of(name)(**again))
    buffers = {key: fenced(value) for key, value in tensors.items()}
    before = {key: whole.clone() for key, (whole, _) in buffers.items()}
    call = given | {key: inside for key, (_, inside) in buffers.items()}
    result = written(name, call, op_of(name)(**call))
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(result, want))
    for key, (whole, _) in buffers.items():
        assert bool((whole[:GUARD] == PATTERN).all()) and bool((whole[-GUARD:] == PATTERN).all()), key
        assert (key == changed) != torch.equal(whole, before[key]), key


@pytest.mark.parametrize("name", [n for n in NAMES if n not in ("norm_rope", "reveal")])
@pytest.mark.parametrize("m", [5, 37])
def test_outputs_are_written_whole_and_nothing_behind_them(name: str, m: int) -> None:
    """The allocator hands out the same addresses again; they are filled with a pattern between two calls."""
    given = arguments(name, m)
    fixed = {key: given[key].clone() for key in ("residual",) if key in given}

    def run() -> Any:
        for key, value in fixed.items():
            given[key].copy_(value)
        result = op_of(name)(**given)
        torch.cuda.synchronize()
        return result

    def places(result: Any) -> list[tuple[int, int]]:
        parts = result if isinstance(result, tuple) else (result,)
        return [(t.data_ptr(), t.numel() * t.element_size()) for t in parts if t.numel()]

    result = run()
    want = [t.clone() for t in written(name, given, result)]
    del result
    for _ in range(5):
        found = places(result := run())
        for address, size in found:
            at(address, -(-size // GUARD) * GUARD).fill_(PATTERN)
        torch.cuda.synchronize()
        del result
        result = run()
        if places(result) == found:
            break
    else:
        pytest.fail("the allocator never gave the same addresses twice")
    for address, size in found:
        slack = at(address + size, -size % GUARD) if size % GUARD else torch.empty(0, device="cuda:0")
        assert bool((slack == PATTERN).all()), (name, size)
    assert all(torch.equal(a, b) for a, b in zip(written(name, given, result), want))


# -- bits ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_the_bits_of_a_row_depend_on_nothing_else(mode: str) -> None:
    """Not on the run, nor on the order of the rows; and, but for group scales, whose sums are float, nor on M."""
    made, x = layer(mode, 384, 1024), rows(2049, 1024)
    whole = made(x)
    assert all(torch.equal(made(x), whole) for _ in range(5))
    order = torch.randperm(2049, device="cuda:0")
    assert torch.equal(made(x[order]), whole[order])
    if mode == "w4grp":
        return
    for m in (1, 2, 7, 8, 9, 15, 16, 17, 31, 33, 64, 65, 127, 129, 172, 685, 1890, 2048):
        assert torch.equal(made(x[:m]), whole[:m]), m
        assert torch.equal(made(x[2049 - m :]), whole[2049 - m :]), m


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("m", [3, 16, 40])
@pytest.mark.parametrize("bits", [8, 4])
def test_a_row_that_is_no_number_stays_alone(bad: float, m: int, bits: int) -> None:
    made = W4A4Linear.from_quantized(weight("w4two", 256, 512), "token", activation_bits=bits)
    x = rows(m)
    clean = made(x)
    x[1, 77] = bad
    dirty, keep = made(x), torch.arange(m, device="cuda:0") != 1
    assert torch.equal(dirty[keep], clean[keep])
    assert not bool(torch.isfinite(dirty[1]).any())


def test_strided_and_misaligned_x() -> None:
    made = layer()
    wide = rows(7 * 40, 1024).reshape(7, 40, 1024)
    flat = rows(9, 512).reshape(-1)
    long = torch.cat([flat[:3], flat])
    cases = [wide[:, -1:, :512], wide[:, ::3, 512:], wide.transpose(0, 1)[..., 256:768], rows(1).expand(20, 512)]
    for x in [*cases, long[3:].reshape(9, 512), rows(512, 16).T]:
        assert torch.equal(made(x), made(x.contiguous().clone()))


# -- copies ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", MODES)
def test_copies_of_a_layer(mode: str) -> None:
    made, x = layer(mode), rows(40)
    want = made(x)
    again: list[Callable[[], QuantLinear]] = [
        lambda: copy.deepcopy(made),
        lambda: pickle.loads(pickle.dumps(made)),
        lambda: made.cpu().cuda(),
    ]
    buffer = io.BytesIO()
    torch.save(made, buffer)
    buffer.seek(0)
    again.insert(0, lambda: torch.load(buffer, weights_only=False))
    for make in again:
        other = make()
        assert other.explain()["kernel"] == "cuda_tiles" and torch.equal(other(x), want)
    copied = copy.deepcopy(made)
    originals = dict(made.named_buffers())
    for name, tensor in copied.named_buffers():
        tensor.zero_()
        assert not torch.equal(tensor, originals[name]) or not tensor.numel(), name  # storage of its own
    assert torch.equal(made(x), want)


# -- GPU-02: more than one device ------------------------------------------------------------------------------------


@two
def test_gpu_02_graphs_on_two_devices_take_turns() -> None:
    q = weight("w4two", 256, 512)
    layers = {d: QuantLinear.from_quantized(q, "token").to(d) for d in ("cuda:0", "cuda:1")}
    static, graphs, outs = {}, {}, {}
    for d, made in layers.items():
        with torch.cuda.device(d):
            static[d], graphs[d] = torch.ones(40, 512, device=d).half(), torch.cuda.CUDAGraph()
            # torch's own stream for captures is one of the device that captured first
            with torch.cuda.graph(graphs[d], stream=torch.cuda.Stream(d)):
                outs[d] = made(static[d])
    assert torch.cuda.current_device() == 0
    for seed in range(4):
        for d in layers:
            static[d].copy_(rows(40, seed=seed))
            with torch.cuda.device(d):
                graphs[d].replay()
        for d in layers:
            torch.cuda.synchronize(d)
        want = layers["cuda:0"](rows(40, seed=seed))
        assert all(torch.equal(outs[d].to("cuda:0"), want) for d in layers)


@two
def test_gpu_02_every_operator_names_the_other_device() -> None:
    made = layer(device="cuda:0")
    with pytest.raises(FormatError, match="x: found on cuda:1, accepted is cuda:0"):
        made(rows(3).to("cuda:1"))
    for name, other in (
        ("quantize", "norm"),
        ("linear", "weight"),
        ("linear4", "group_scales"),
        ("norm_rope", "sines"),
        ("attention_quantize", "bounds"),
    ):
        given = arguments(name)
        given[other] = given[other].to("cuda:1")
        with pytest.raises(RuntimeError, match=rf"{other}: found on another device \(cuda:1\), accepted is cuda:0"):
            op_of(name)(**given)
    assert torch.cuda.current_device() == 0


def test_gpu_02_an_argument_on_the_cpu_is_named() -> None:
    for name, other in (
        ("quantize", "norm"),
        ("linear", "weight"),
        ("linear4", "group_scales"),
        ("norm_rope", "sines"),
        ("attention_quantize", "bounds"),
    ):
        given = arguments(name)
        given[other] = given[other].cpu()
        with pytest.raises(
            RuntimeError, match=rf"{other}: found on another device \(no GPU: -?\d+\), accepted is cuda:0"
        ):
            op_of(name)(**given)
    with pytest.raises(FormatError, match="x: found on cpu, accepted is cuda:0"):
        layer()(rows(3).cpu())


# -- GPU-03: streams and captures ------------------------------------------------------------------------------------


def test_gpu_03_work_waits_for_its_own_stream() -> None:
    """Behind a pause on a stream that the default stream does not wait for, a launch elsewhere would see the old x."""
    made, new = layer(), rows(40)
    want = made(new)
    library = ctypes.CDLL("libcudart.so.13")
    handle = ctypes.c_void_p()
    assert library.cudaStreamCreate(ctypes.byref(handle)) == 0
    blocking = torch.cuda.ExternalStream(handle.value)
    for stream in (torch.cuda.Stream(), blocking):
        x = torch.ones_like(new)
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(20_000_000)
            x.copy_(new)
            y = made(x)
        stream.synchronize()
        assert torch.equal(y, want)


@pytest.mark.parametrize("mode", ["global", "thread_local", "relaxed"])
@pytest.mark.parametrize("m", [3, 40])
def test_gpu_03_replays_see_what_the_input_holds_now(mode: str, m: int) -> None:
    made, static, graph = layer(), torch.ones(m, 512, device="cuda:0").half(), torch.cuda.CUDAGraph()
    torch.cuda.synchronize()
    with torch.cuda.graph(graph, capture_error_mode=mode):
        out = made(static)
    for seed in range(3):
        static.copy_(rows(m, seed=seed))
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, made(rows(m, seed=seed)))


def test_gpu_03_cold_captures_and_a_capture_that_fails() -> None:
    """In a fresh process every operator meets its device for the first time inside a capture."""
    body = textwrap.dedent(
        """
        import sys, torch
        sys.path.insert(0, sys.argv[1])
        import test_cases_gpu as cases
        from lowbit import ops_cuda

        # arguments without a launch of ours: the ones that a quantizer would give are drawn
        tiles = cases.tiles
        x = torch.randn(24, 320, device="cuda").half()
        codes = torch.randint(-127, 128, (24, 512), device="cuda").to(torch.int8)
        t = tiles.pack(cases.weight("w4two", 200, 320, 0))
        r = tiles.pack_rows(cases.weight("w4two", 200, 320, 0))
        four = torch.randint(0, 256, (24, 256), device="cuda", dtype=torch.uint8)
        ones = torch.ones(24, device="cuda")
        groups = torch.rand(8, 128, device="cuda")
        angle = torch.rand(24, 64, device="cuda")
        qkv = torch.randn(24, 512, device="cuda").half()
        packed = torch.randint(0, 256, (3, 40), device="cuda", dtype=torch.uint8)
        scales = torch.ones(3, 2, device="cuda")
        heads = torch.randn(24, 8, 128, device="cuda").half()
        bounds = torch.tensor([0, 5, 24], dtype=torch.int32, device="cuda")
        half = torch.float16
        calls = {
            "quantize": lambda: ops_cuda.quantize(x, hadamard=True)[0],
            "linear": lambda: ops_cuda.linear(codes, ones, None, *t[:2], None, None, 200, t.mode, half),
            "portable": lambda: ops_cuda.linear(codes, ones, None, *t[:2], None, None, 200, t.mode, half, ops_cuda.PORTABLE),
            "gemv": lambda: ops_cuda.linear(codes[:5], ones[:5], None, *t[:2], None, None, 200, t.mode, half, ops_cuda.GEMV),
            "rounded attention": lambda: ops_cuda.attention_quantize(*heads.split([4, 2, 2], 1), bounds, 0.1)[0],
            "quantize4": lambda: ops_cuda.quantize4(x, hadamard=True)[0],
            "linear4": lambda: ops_cuda.linear4(four, groups, ones, None, *r, None, None, 200, half),
            "rope": lambda: ops_cuda.norm_rope(qkv, None, None, angle, angle, 2, 1),
            "rms": lambda: ops_cuda.inverse_rms(x, 1e-6),
            "dequantize": lambda: ops_cuda.dequantize(packed, scales, None, 80, 40, 4, half),
        }
        torch.cuda.synchronize()
        for name, call in calls.items():
            before = qkv.clone()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = call()
            x.normal_()
            graph.replay()
            torch.cuda.synchronize()
            if name == "rope":
                got = qkv.clone()
                qkv.copy_(before)
                call()
                assert torch.equal(got, qkv) and not torch.equal(got, before), name
            else:
                assert torch.equal(out, call()), name
            print("captured", name, flush=True)
        layer = cases.layer()
        rows = cases.rows(40)
        want = layer(rows)
        try:
            with torch.cuda.graph(torch.cuda.CUDAGraph()):
                layer(rows).sum().item()
            raise SystemExit("a synchronisation was captured")
        except RuntimeError as error:
            print("refused", str(error).splitlines()[0])
        torch.cuda.synchronize()
        assert torch.equal(layer(rows), want)
        print("usable")
        """
    )
    path = os.pathsep.join(p for p in (str(Path(ops.__file__).parents[1]), os.environ.get("PYTHONPATH", "")) if p)
    done = subprocess.run(
        [sys.executable, "-c", body, str(ROOT / "tests")],
        capture_output=True, text=True, timeout=240, env={**os.environ, "PYTHONPATH": path},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr[-1500:]
    lines = done.stdout.splitlines()
    assert sum(line.startswith("captured ") for line in lines) == 10 and lines[-1] == "usable"


def test_threads_and_streams_share_a_layer() -> None:
    """Eight threads behind a barrier, each with a stream and a number of rows of its own, on a layer that never ran."""
    sizes = (1, 2, 9, 16, 17, 65, 172, 685)
    reference, fresh = layer(), layer()
    want = [reference(rows(m, seed=m)) for m in sizes]
    inputs = [rows(m, seed=m) for m in sizes]
    torch.cuda.synchronize()
    wrong: list[int] = []
    barrier = threading.Barrier(len(sizes))

    def work(i: int) -> None:
        stream = torch.cuda.Stream()
        barrier.wait()
        with torch.cuda.stream(stream), torch.inference_mode():
            found = [fresh(inputs[i]) for _ in range(20)]
        stream.synchronize()
        if not all(torch.equal(y, want[i]) for y in found):
            wrong.append(sizes[i])

    threads = [threading.Thread(target=work, args=(i,)) for i in range(len(sizes))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert wrong == [] and not any(thread.is_alive() for thread in threads)
