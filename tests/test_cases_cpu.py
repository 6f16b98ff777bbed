"""The named failure cases CPU-01 ... CPU-11, with their own inputs and right values."""

from __future__ import annotations

import copy
import gc
import io
import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import textwrap
import threading
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch._dynamo.testing import CompileCounter

import lowbit
import oracle
from lowbit import ops
from lowbit.nn import QuantLinear
from lowbit.types import QuantizedWeight
from samples import DTYPES, flat, generator, rows, weight

# One of each way a layer can be stored and run: (weight options, activation).
KINDS: dict[str, tuple[dict[str, object], str | None]] = {
    "w4-group": ({}, "group"),
    "w4-token": ({}, "token"),
    "w4-float": ({}, None),
    "w4-symmetric": ({"zeros": False}, "group"),
    "w4-act-order": ({"perm": True, "smooth": True}, "group"),
    "w8-token": ({"bits": 8, "zeros": False, "group_size": -1}, "token"),
    "w8-zeros": ({"bits": 8}, "group"),
    "w8-float": ({"bits": 8}, None),
}


def layer(kind: str, n: int, k: int, group_size: int = 32, bias: bool = False) -> nn.Module:
    if kind == "fp16":
        linear = nn.Linear(k, n, bias=bias)
        with torch.no_grad():
            for p in linear.parameters():
                p.copy_(torch.randn(p.shape, generator=generator(kind, n, k)).half())
        return QuantLinear.from_linear(linear, "fp16")
    options, activation = KINDS[kind]
    return QuantLinear.from_quantized(weight(n, k, **({"group_size": group_size, "bias": bias} | options)), activation)  # type: ignore[arg-type]


def of(q: QuantizedWeight, activation: str | None = "token") -> QuantLinear:
    return QuantLinear.from_quantized(q, activation)


def script(body: str, timeout: float = 120, **env: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process (and a process group) of its own, where samples and oracle can be imported."""
    path = os.pathsep.join(
        [str(Path(__file__).parent), str(Path(lowbit.__file__).parents[1]), os.environ.get("PYTHONPATH", "")]
    )
    command = [sys.executable, "-c", textwrap.dedent(body)]
    process = subprocess.Popen(
        command,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | {"PYTHONPATH": path} | env,
        start_new_session=True,
    )
    try:
        out, err = process.communicate(timeout=timeout)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # its children too
        process.communicate()
        raise
    return subprocess.CompletedProcess(command, process.returncode, out, err)


every_kind = pytest.mark.parametrize("kind", [*KINDS, "fp16"])
every_dtype = pytest.mark.parametrize("dtype", DTYPES, ids=lambda d: str(d)[6:])


# ---- CPU-01 ----------------------------------------------------------------------------------------------------------
@every_kind
@every_dtype
@pytest.mark.parametrize("bias", [False, True])
def test_cpu_01_no_rows_and_any_rank(kind: str, dtype: torch.dtype, bias: bool) -> None:
    m = layer(kind, 8, 32, bias=bias)
    for shape in ((0, 32), (2, 0, 32), (0, 0, 32), (32,), (1, 1, 1, 32), (2, 3, 32)):
        x = torch.randn(shape).to(dtype)
        y = m(x)
        assert y.shape == (*shape[:-1], 8) and y.dtype == dtype and y.device == x.device
        assert oracle.same_bits(y.reshape(-1, 8), m(x.reshape(-1, 32)))
    for shape in ((1, 31), (31,), (0, 31), (1, 33), (32, 1)):
        with pytest.raises((ValueError, RuntimeError), match="3[123]|1"):
            m(torch.randn(shape).to(dtype))


# ---- CPU-02 ----------------------------------------------------------------------------------------------------------
def strided() -> list[tuple[str, Tensor]]:
    base = torch.arange(64 * 128).reshape(64, 128) / 1000
    return [
        ("rows", base[::2]),
        ("columns", base[:, ::4]),
        ("transpose", base.t()[:, :32]),
        ("expand", base[:1].expand(5, 128)),
        ("offset", base.view(-1)[3 : 3 + 128 * 10].view(10, 128)),
        ("last token", torch.randn(2, 7, 128)[:, -1:, :]),
        ("overlap", torch.as_strided(base, (6, 128), (5, 1))),
        ("inner dimension", torch.randn(3, 128, 2)[..., 1]),
    ]


@every_kind
@every_dtype
def test_cpu_02_strided_inputs(kind: str, dtype: torch.dtype) -> None:
    modules = {k: layer(kind, 24, k) for k in (32, 128)}
    for name, x in strided():
        if dtype != torch.float32 and name not in ("expand", "overlap"):
            x = x.to(dtype)
        elif dtype != torch.float32:
            x = (
                x.to(dtype).contiguous()[:1].expand(5, 128)
                if name == "expand"
                else torch.as_strided(x.to(dtype), (6, 64), (5, 1))
            )
            x = torch.cat([x, x], 1).t().contiguous().t() if x.shape[1] == 64 else x
        before = x.clone()
        assert oracle.same_bits(modules[x.shape[-1]](x), modules[x.shape[-1]](x.contiguous())), name
        assert torch.equal(x, before), name


def test_cpu_02_strided_weights_and_bias() -> None:
    q = weight(24, 64, 32, bias=True, perm=True, smooth=True)
    wide: dict[str, Tensor] = {}
    for field in ("codes", "scales", "zeros", "perm", "smooth", "bias"):
        t = getattr(q, field)
        wide[field] = torch.stack([t, t.flip(0)], -1)[..., 0]
        assert not wide[field].is_contiguous() or t.numel() == 1
    x = torch.randn(3, 64)
    assert oracle.same_bits(of(q.with_(**wide))(x), of(q)(x))


# ---- CPU-03 ----------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize("activation", ["group", "token", None])
@pytest.mark.parametrize("g", [32, 64, 128, 512])
def test_cpu_03_rows_of_a_batch_are_rows_alone(g: int, activation: str | None) -> None:
    k, n = 512, 40
    x = rows(2049, k)
    for perm in (None, torch.randperm(k).int()):
        m = of(flat(n, k, g, torch.arange(1, k // g + 1).half(), perm), activation)
        whole = m(x)
        picks = sorted({0, 1, 2, 7, 15, 16, 31, 32, 63, 127, 128, 129, 1023, 2046, 2047, 2048})
        for i in picks:
            assert oracle.same_bits(whole[i : i + 1], m(x[i : i + 1])), i
        for rows_ in (2, 3, 7, 8, 9, 15, 16, 17, 31, 32, 33, 127, 128, 129, 2047, 2048):
            assert oracle.same_bits(m(x[:rows_]), whole[:rows_]), rows_


@pytest.mark.parametrize("g", [32, 64, 128, 512])
def test_cpu_03_the_right_group_is_taken(g: int) -> None:
    """x is 1 in one group only: y is the size of the group times its scale, at every M, with and without act-order."""
    k, n = 512, 40
    for perm in (None, torch.randperm(k).int()):
        q = flat(n, k, g, torch.arange(1, k // g + 1).half(), perm)
        for activation in ("group", "token", None):
            m = of(q, activation)
            for rows_ in (1, 33):
                for group in range(0, k // g, max(1, k // g // 5)):
                    x = torch.zeros(k)
                    chosen = torch.arange(group * g, group * g + g)
                    x[chosen if perm is None else perm[chosen].long()] = 1
                    y = m(x.expand(rows_, k))
                    assert torch.allclose(y, torch.tensor(float(g * (group + 1))), rtol=1e-6), (g, group, activation)


@pytest.mark.big
def test_cpu_03_an_output_past_2_gib() -> None:
    m, n, k = 65537, 32768, 32
    module = of(weight(n, k, 32), "token")
    x = rows(1, k, torch.float16).expand(m, k)
    y = module(x)
    assert y.shape == (m, n) and y.dtype == torch.float16
    assert oracle.same_bits(y[m - 1 :], module(x[:1]))
    assert oracle.same_bits(y[m // 2 : m // 2 + 1], module(x[:1]))


# ---- CPU-04 ----------------------------------------------------------------------------------------------------------
def identity() -> QuantizedWeight:
    eye = torch.eye(32, dtype=torch.uint8)
    return QuantizedWeight(
        codes=eye + 8,
        scales=torch.ones(32, 1).half(),
        group_size=32,
        bits=4,
        zeros=torch.full((32, 1), 8, dtype=torch.uint8),
        bias=torch.arange(32) / 8.0,
    )


@pytest.mark.parametrize("activation", ["group", "token", None])
@pytest.mark.parametrize("batch", [1, 8])
def test_cpu_04_zero_tiny_nan_and_inf(activation: str | None, batch: int) -> None:
    q = identity()
    assert q.bias is not None
    with_bias, m = of(q, activation), of(q.with_(bias=None), activation)
    x = torch.zeros(8, 32)
    x[1] = 1e-40
    x[2] = 2.0**-24
    x[3], x[4] = 1.0, 1.0
    x[3, 3] = float("inf")
    x[4, 5] = float("nan")
    x[5] = torch.arange(1, 33)
    x[6] = 1
    x[6, 9] = 65504
    x[7] = -0.0

    def run(module: nn.Module, rows_: Tensor) -> Tensor:
        return module(rows_) if batch == 8 else torch.cat([module(r[None]) for r in rows_])

    y, biased = run(m, x), run(with_bias, x)
    assert torch.equal(biased[0], q.bias) and torch.equal(biased[7], q.bias)
    assert torch.equal(y[0], torch.zeros(32)) and torch.equal(y[7], torch.zeros(32))
    assert bool((y[1] >= 0).all()) and bool((y[1] <= 1.02e-40).all())
    assert bool(((y[2] - 2.0**-24).abs() <= 2.0**-24 / 127).all())
    assert not bool(torch.isfinite(y[3:5]).any()) and not bool(torch.isfinite(biased[3:5]).any())
    keep = [0, 1, 2, 5, 6, 7]
    assert oracle.same_bits(run(m, x[keep]), y[keep])  # the broken rows touched nobody
    step = {"group": 254.0, "token": 254.0, None: 1e6}[activation]
    assert bool(((y[5] - x[5]).abs() <= 32 / step).all()) and bool(((y[6] - x[6]).abs() <= 65504 / step).all())
    half = m(x[2:3].half())  # the smallest float16, whose scale float16 could not hold
    assert half.dtype == torch.float16 and bool((half == 2.0**-24).all())


@every_kind
def test_cpu_04_a_broken_row_stays_alone(kind: str) -> None:
    m = layer(kind, 40, 96, bias=True)
    x = rows(9, 96)
    want = m(x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        for row in (0, 4, 8):
            for column in (0, 50, 95):
                broken = x.clone()
                broken[row, column] = bad
                y = m(broken)
                others = [i for i in range(9) if i != row]
                assert oracle.same_bits(y[others], want[others])
                assert not bool(torch.isfinite(y[row]).any())
    assert oracle.same_bits(m(x), want)


@pytest.mark.parametrize("flush", [False, True])
def test_cpu_04_the_denormal_state_of_the_caller_stays(flush: bool) -> None:
    if not torch.set_flush_denormal(flush):
        pytest.skip("this CPU has no flush-to-zero state")
    try:
        for kind in (*KINDS, "fp16"):
            layer(kind, 16, 32)(torch.full((4, 32), 1e-40))
            flushed = float(torch.tensor([1e-40]).mul(torch.tensor([1.0])).view(torch.int32)) == 0
            assert flushed == flush, kind
    finally:
        torch.set_flush_denormal(False)


# ---- CPU-06 ----------------------------------------------------------------------------------------------------------
@every_kind
def test_cpu_06_no_output_keeps_its_poison(kind: str) -> None:
    for n, k in ((1, 32), (17, 33), (40, 96), (129, 64)):
        m = layer(kind, n, k, group_size=min(k, 32))
        for count in (1, 2, 5, 33):
            x = rows(count, k)
            want = m(x)
            torch.use_deterministic_algorithms(True)
            try:
                assert torch.utils.deterministic.fill_uninitialized_memory  # torch.empty is full of NaN from here
                poisoned = m(x)
            finally:
                torch.use_deterministic_algorithms(False)
            assert oracle.same_bits(poisoned, want) and bool(torch.isfinite(want).all())


FORCED = """
import torch, lowbit
from samples import rows, weight
from lowbit.nn import QuantLinear
m = QuantLinear.from_quantized(weight(40, 96, 32), "group")
import hashlib
print(hashlib.sha256(m(rows(9, 96)).numpy().tobytes()).hexdigest(), m.explain())
"""


def test_cpu_06_every_tier_that_is_here_can_be_forced() -> None:
    seen = set()
    for tier in ops.cpu_isas():
        done = script(FORCED, QM_CPU_ISA=tier)
        assert done.returncode == 0, done.stderr
        digest, said = done.stdout.split(maxsplit=1)
        assert tier in said
        seen.add(digest)
    assert len(seen) == 1


def refused(word: str) -> str:
    """The last line of what an import says under QM_CPU_ISA=word; it must fail, and not by a signal."""
    done = script("from lowbit import ops", QM_CPU_ISA=word)
    assert done.returncode > 0, (word, done.returncode)
    last = done.stderr.strip().splitlines()[-1]
    assert "QM_CPU_ISA" in last and word.strip() in last, done.stderr
    return last


@pytest.mark.parametrize("word", ["mmx", "AVX2", " "])
def test_cpu_06_a_word_that_is_no_tier_is_an_error_that_lists_them(word: str) -> None:
    assert all(tier in refused(word) for tier in ops.cpu_isas())


@pytest.mark.parametrize("family", [("amx", "avx512vnni", "avxvnni", "avx2"), ("i8mm", "dotprod", "neon")])
def test_cpu_06_a_tier_that_this_cpu_lacks_is_an_error_that_lists_what_is_here(family: tuple[str, ...]) -> None:
    missing = [t for t in family if t not in ops.cpu_isas()]
    if not missing:
        pytest.skip("this CPU has every tier of the family")
    assert all(tier in refused(missing[0]) for tier in ops.cpu_isas())


def test_cpu_06_empty_means_the_best() -> None:
    best = ops.cpu_isas()[0]
    done = script("from lowbit import ops; print(ops.cpu_isa())", QM_CPU_ISA="")
    assert done.returncode == 0 and done.stdout.strip() == best, done.stderr


# ---- CPU-07 ----------------------------------------------------------------------------------------------------------
FORK = """
import os, sys, torch
from samples import rows, weight
from lowbit.nn import QuantLinear
torch.set_num_threads(4)
m = QuantLinear.from_quantized(weight(1024, 1024, 64), "group")
x = rows(64, 1024)
want = m(x)

# torch's own operators may hang in a child (torch.equal does), so the bytes are compared without them.
wanted = want.numpy().tobytes()
def same():
    return m(x).numpy().tobytes() == wanted and m(x[:1]).numpy().tobytes() == wanted[:4096]
"""


def fork_script(tail: str) -> None:
    try:
        done = script(FORK + textwrap.dedent(tail), timeout=60)
    except subprocess.TimeoutExpired as e:
        pytest.fail(f"hangs after fork: {e.stdout!r} {e.stderr!r}")
    assert done.returncode == 0 and done.stdout.strip().endswith("fine"), done.stdout + done.stderr


def test_cpu_07_os_fork() -> None:
    fork_script("""
        pid = os.fork()
        if pid == 0:
            os._exit(0 if same() else 3)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        assert torch.equal(m(x), want)
        print("fine")
    """)


def test_cpu_07_multiprocessing_fork_and_data_loader() -> None:
    fork_script("""
        import multiprocessing
        class Items(torch.utils.data.Dataset):
            def __len__(self): return 4
            def __getitem__(self, i): return m(x[i:i + 1])[0]
        def child(queue): queue.put(same())
        context = multiprocessing.get_context("fork")
        queue = context.Queue()
        process = context.Process(target=child, args=(queue,))
        process.start()
        assert queue.get(timeout=40) is True
        process.join(10)
        assert process.exitcode == 0
        got = torch.cat(list(torch.utils.data.DataLoader(Items(), batch_size=2, num_workers=2, multiprocessing_context="fork")))
        assert torch.equal(got, want[:4])
        print("fine")
    """)


def _spawned(module: nn.Module, x: Tensor, want: Tensor) -> None:
    if not torch.equal(module(x), want):
        raise SystemExit(3)


def test_cpu_07_spawn() -> None:
    m, x = layer("w4-group", 64, 64), rows(9, 64)
    process = multiprocessing.get_context("spawn").Process(target=_spawned, args=(m, x, m(x)))
    process.start()
    process.join(60)
    assert process.exitcode == 0


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs /proc")
def test_cpu_07_one_openmp_runtime() -> None:
    done = script("""
        import torch, lowbit.ops, re
        from lowbit import ops
        ops.cpu_isas()
        files = {line.split()[-1] for line in open("/proc/self/maps") if re.search(r"lib(gomp|iomp|omp)[^/]*\\.so", line)}
        print(len(files), files)
    """)
    assert done.returncode == 0 and done.stdout.startswith(("0 ", "1 ")), done.stdout + done.stderr


# ---- CPU-08 ----------------------------------------------------------------------------------------------------------
@every_kind
def test_cpu_08_eight_threads_in_one_fresh_module(kind: str) -> None:
    counts = [1, 2, 5, 16, 33, 129, 600, 2049]
    serial, fresh = layer(kind, 32, 64), layer(kind, 32, 64)
    inputs = [rows(m, 64) + i for i, m in enumerate(counts)]
    wants = [serial(x) for x in inputs]
    barrier, wrong = threading.Barrier(8), []

    def work(i: int) -> None:
        barrier.wait()
        for r in range(25):
            if not torch.equal(fresh(inputs[i]), wants[i]):
                wrong.append((i, r))

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for t in threads:
        t.start()
    for t in threads:
        t.join()
    assert wrong == []


@pytest.mark.skipif(not Path("/proc/self/task").exists(), reason="needs /proc")
def test_cpu_08_the_thread_limit_is_kept() -> None:
    done = script("""
        import os, torch
        from samples import rows, weight
        from lowbit.nn import QuantLinear
        torch.set_num_threads(1)
        m = QuantLinear.from_quantized(weight(1024, 1024, 64), "group")
        before = len(os.listdir("/proc/self/task"))
        m(rows(64, 1024)), m(rows(1, 1024))
        print(len(os.listdir("/proc/self/task")) - before)
    """)
    assert done.stdout.strip() == "0", done.stdout + done.stderr


@every_kind
def test_cpu_08_the_number_of_threads_changes_nothing(kind: str) -> None:
    m = layer(kind, 200, 256, bias=True)
    before = torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 3, 7):
            torch.set_num_threads(threads)
            results.append([m(rows(c, 256)) for c in (1, 3, 64, 129)])
        assert all(oracle.same_bits(a, b) for r in results[1:] for a, b in zip(r, results[0], strict=True))
    finally:
        torch.set_num_threads(before)


# ---- CPU-10 ----------------------------------------------------------------------------------------------------------
@every_kind
def test_cpu_10_dtypes(kind: str) -> None:
    m = layer(kind, 8, 32)
    for dtype in DTYPES:
        assert m(torch.ones(2, 32, dtype=dtype)).dtype == dtype
    for dtype in (torch.float64, torch.int64, torch.int8, torch.bool, torch.complex64):
        with pytest.raises((ValueError, TypeError, RuntimeError), match="float16|bfloat16|float32|Half") as e:
            m(torch.ones(2, 32, dtype=dtype))
        assert str(dtype)[6:] in str(e.value)


@every_kind
@every_dtype
def test_cpu_10_autocast(kind: str, dtype: torch.dtype) -> None:
    m, x = layer(kind, 8, 32), rows(2, 32, dtype)
    want = m(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert oracle.same_bits(m(x), want)


@pytest.mark.parametrize("activation", ["group", "token", None])
@every_dtype
def test_cpu_10_sums_do_not_overflow(activation: str | None, dtype: torch.dtype) -> None:
    k = 256
    for g in (32, 128, 256):
        ones = flat(8, k, g, torch.ones(k // g).half())
        codes = ones.codes.clone()
        codes[:, 128:] = 7
        for count in (1, 3, 64):
            x = torch.full((count, k), 1000.0, dtype=dtype)
            y = of(ones.with_(codes=codes), activation)(x)
            if activation == "group" and g < k:  # the scale of x is in every term, and float32 rounds each sum
                assert bool((y.abs() <= 128000 * 2.0**-23).all())
            else:
                assert torch.equal(y, torch.zeros(count, 8, dtype=dtype))
            y = of(ones, activation)(x)
            if dtype == torch.float32:
                assert torch.allclose(y, torch.tensor(256000.0), rtol=1e-6)
            else:
                want = 256000.0 if dtype == torch.bfloat16 else float("inf")
                assert torch.equal(y, torch.full((count, 8), want, dtype=dtype))


# ---- CPU-11 ----------------------------------------------------------------------------------------------------------
@every_kind
def test_cpu_11_compile_one_graph_and_no_recompile(kind: str) -> None:
    torch._dynamo.reset()
    m = layer(kind, 40, 64, bias=True)
    counter = CompileCounter()
    compiled = torch.compile(m, fullgraph=True, dynamic=True, backend=counter)
    seen = []
    for count in (1, 5, 64, 17, 129):
        x = rows(count, 64)
        assert oracle.same_bits(compiled(x), m(x))
        seen.append(counter.frame_count)
    assert seen[1] <= 2 and seen[-1] == seen[1], seen


def test_cpu_11_compile_through_inductor() -> None:
    torch._dynamo.reset()
    m = nn.Sequential(layer("w4-group", 40, 64), nn.GELU(), layer("w8-token", 24, 40))
    compiled = torch.compile(m, fullgraph=True, dynamic=True)
    for count in (5, 64):
        x = rows(count, 64)
        got, want = compiled(x), m(x)
        assert got.shape == want.shape and torch.allclose(got, want, atol=2e-2 * float(want.abs().max()))


@every_kind
def test_cpu_11_export(kind: str) -> None:
    m = layer(kind, 40, 64, bias=True)
    batch = torch.export.Dim("batch", min=2, max=4096)
    program = torch.export.export(m, (rows(4, 64),), dynamic_shapes=({0: batch},))
    for count in (2, 17):
        x = rows(count, 64)
        assert oracle.same_bits(program.module()(x), m(x))


@every_kind
def test_cpu_11_backward_is_right_or_an_error(kind: str) -> None:
    m = layer(kind, 24, 64)
    x = rows(5, 64).requires_grad_()
    grad = rows(5, 24)
    try:
        y = m(x)
        if not y.requires_grad:
            pytest.fail("the output forgot its input: a gradient would be lost without an error")
        y.backward(grad)
    except RuntimeError as e:
        assert "inference" in str(e)
        return
    assert x.grad is not None
    if kind == "fp16":
        eye = m(torch.eye(64)).detach().t()
    else:
        q = m.to_quantized()
        assert isinstance(q, QuantizedWeight)
        eye = oracle.dequantize(q.codes, q.scales, q.zeros, q.group_size, q.perm).float()
        eye = eye / q.smooth.float() if q.smooth is not None else eye
    assert torch.allclose(x.grad, grad @ eye, atol=1e-4)


@every_kind
def test_cpu_11_made_under_inference_mode_then_used_outside(kind: str) -> None:
    with torch.inference_mode():
        m = layer(kind, 24, 64, bias=True)
    with torch.no_grad():
        n = layer(kind, 24, 64, bias=True)
    assert not any(t.is_inference() for t in m.buffers())
    x = rows(3, 64)
    want = n(x)
    assert oracle.same_bits(m(x), want)
    with torch.inference_mode():
        assert not any(t.is_inference() for t in m.state_dict().values())
        assert oracle.same_bits(m(x), want)
    with torch.no_grad():
        assert oracle.same_bits(m(x.clone().requires_grad_()), want)
    z = x.clone().requires_grad_()
    try:
        m(z).sum().backward()
    except RuntimeError as e:
        assert "inference only" in str(e)
    else:
        assert z.grad is not None and bool(z.grad.abs().max() > 0)


def copies() -> dict[str, Callable[[nn.Module], nn.Module]]:
    def saved(m: nn.Module) -> nn.Module:
        buffer = io.BytesIO()
        torch.save(m, buffer)
        buffer.seek(0)
        return torch.load(buffer, weights_only=False)  # type: ignore[no-any-return]

    return {"deepcopy": copy.deepcopy, "pickle": lambda m: pickle.loads(pickle.dumps(m)), "torch.save": saved}


@every_kind
@pytest.mark.parametrize("how", ["deepcopy", "pickle", "torch.save"])
def test_cpu_11_copies(kind: str, how: str) -> None:
    m, x = layer(kind, 24, 64, bias=True), rows(5, 64)
    want = m(x)
    other = copies()[how](m)
    assert type(other) is type(m) and other.extra_repr() == m.extra_repr()
    pointers = {t.data_ptr() for t in m.buffers()}
    assert not any(t.data_ptr() in pointers for t in other.buffers() if t.numel())
    del m
    gc.collect()
    assert oracle.same_bits(other(x), want)


@every_kind
def test_cpu_11_state_dict(kind: str) -> None:
    x = rows(5, 64)
    a = layer(kind, 24, 64, bias=True)
    state = {name: t.clone() for name, t in a.state_dict().items()}
    b = copy.deepcopy(a)
    for t in b.buffers():
        t.zero_()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        b.load_state_dict(state, strict=True)
    assert oracle.same_bits(b(x), a(x))
