"""Bad input of the CUDA operators, and the named failure cases GPU-01 ... GPU-03, as far as they go without a GPU.

csrc/*_ops_cuda.cpp are compiled here with tests/cuda_stub.cpp in the place of the kernels, for CPU tensors: what they
refuse, they refuse before a launch. The rest of the cases, on a GPU: tests/test_cases_gpu.py.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lowbit import dispatch, native, ops, ops_cuda
from lowbit.layouts import mma_tiles
from lowbit.nn import QuantLinear
from lowbit.types import FormatError, LowRank, QuantizedWeight

ROOT = Path(__file__).parents[1]
NAMES = (
    "quantize linear quantize4 linear4 norm_rope dequantize inverse_rms guided_score reveal attention attention_quantize"
).split()
SPACE = "lowbit_cuda_stub"


class Stub:
    """The operators over stubs: ``call(name, **arguments)``, and what was reached."""

    def __init__(self, library: Path) -> None:
        torch.ops.load_library(str(library))
        self.native = ctypes.CDLL(str(library))
        self.native.stub_reached.restype = ctypes.c_char_p
        self.native.stub_order.restype = ctypes.c_char_p
        self.native.stub_set.argtypes = [ctypes.c_int, ctypes.c_char_p]
        self.native.stub_join.argtypes = [ctypes.c_bool]

    def chip(self, capability: int, error: bytes | None = None, joins: bool = True) -> None:
        """A chip, what its kernels say, and whether the joined launcher takes what it is given."""
        self.native.stub_set(capability, error)
        self.native.stub_join(joins)

    @property
    def order(self) -> str:
        """Every kernel that was reached since ``chip``."""
        return str(self.native.stub_order().decode())

    @property
    def launches(self) -> int:
        return int(self.native.stub_launches())

    def call(self, name: str, arguments: dict[str, Any]) -> Any:
        return getattr(getattr(torch.ops, SPACE), f"cuda_{name}").default(**arguments)


@pytest.fixture(scope="module")
def library(tmp_path_factory: pytest.TempPathFactory) -> Stub:
    if not shutil.which("g++"):
        pytest.skip("no g++")
    home = Path(torch.__file__).parent
    target = tmp_path_factory.mktemp("stub") / "stub.so"
    command = [
        "g++", "-std=c++17", "-O0", "-shared", "-fPIC", "-w", f"-I{home / 'include'}", f"-I{ROOT / 'csrc'}",
        "-DLOWBIT_CUDA_STUB", f"-DLOWBIT_OPS={SPACE}", "-DTORCH_TARGET_VERSION=0x020a000000000000",
        *map(str, sorted((ROOT / "csrc").glob("*_ops_cuda.cpp"))), str(ROOT / "tests/cuda_stub.cpp"), "-o", str(target),
        f"-L{home / 'lib'}", "-ltorch_cpu",
    ]  # fmt: skip
    subprocess.run(command, check=True)
    schemas = torch.library.Library(SPACE, "DEF")
    for name in NAMES:
        schema = getattr(getattr(torch.ops, ops.NAMESPACE), f"cuda_{name}").default._schema
        schemas.define(str(schema).removeprefix(f"{ops.NAMESPACE}::"))
    stub = Stub(target)
    stub.schemas = schemas  # type: ignore[attr-defined]  # they live as long as it
    return stub


@pytest.fixture
def stub(library: Stub) -> Stub:
    library.chip(90)
    return library


def half(*shape: int) -> Tensor:
    return torch.zeros(shape, dtype=torch.float16)


def off(*shape: int, dtype: torch.dtype = torch.float32, by: int = 1) -> Tensor:
    """A contiguous tensor ``by`` elements past where the allocator starts."""
    return torch.zeros(torch.Size(shape).numel() + by, dtype=dtype)[by:].reshape(shape)


# Arguments that are all right, M = 5, N = 72, K = 128, rank 16.
GOOD: dict[str, dict[str, Any]] = {
    "quantize": dict(
        x=half(5, 128), residual=half(5, 128), norm=torch.ones(128), eps=1e-6, smooth=torch.ones(2, 128),
        down=half(1, 8, 32, 8), rank=16, hadamard=True, silu=False, tile_order=True,
    ),
    "linear": dict(
        codes=torch.zeros(5, 256, dtype=torch.int8), scales=torch.ones(5), low=half(1, 1, 128),
        weight=torch.zeros(2, 2, 4096, dtype=torch.uint8), channel=torch.ones(128), bias=torch.zeros(128),
        up=half(1, 8, 32, 8), n=72, mode=mma_tiles.CHANNEL, out=2, row=-1, gated=False,
    ),
    "linear4": dict(
        codes=torch.zeros(5, 128, dtype=torch.uint8), group_scales=torch.ones(4, 128), scales=torch.ones(5),
        low=half(1, 1, 128), weight=torch.zeros(128, 128, dtype=torch.uint8), weight_scales=torch.ones(4, 128),
        bias=torch.zeros(128), up=half(1, 8, 32, 8), n=72, out=2,
    ),
    "norm_rope": dict(
        qkv=half(5, 512), q_norm=torch.ones(128), k_norm=torch.ones(128), cosines=torch.ones(5, 64),
        sines=torch.ones(5, 64), heads=2, kv_heads=1, eps=1e-6,
    ),
    "dequantize": dict(
        codes=torch.zeros(3, 40, dtype=torch.uint8), scales=torch.ones(3, 2),
        zeros=torch.zeros(3, 2, dtype=torch.uint8), k=80, group_size=40, bits=4, out=2,
    ),
    "inverse_rms": dict(x=half(5, 64), eps=1e-6),
    "guided_score": dict(
        logits=half(2, 3, 7, 2, 9), guidance=torch.ones(()), penalty=torch.ones(2, 1), temperature=torch.ones(()),
        noise=torch.zeros(3, 2, 7), valid=torch.ones(3, 1, 7, dtype=torch.bool),
        tokens=torch.zeros(3, 2, 7, dtype=torch.int64), mask_id=8,
    ),
    "attention": dict(
        q=half(5, 4, 128), k=half(5, 2, 128), v=half(5, 2, 128), bounds=torch.tensor([0, 5], dtype=torch.int32), scale=0.1,
    ),
    "reveal": dict(
        tokens=torch.zeros(3, 14, dtype=torch.int64), pred=torch.zeros(3, 14, dtype=torch.int64),
        score=torch.zeros(3, 14), k=torch.ones(3, dtype=torch.int64),
    ),
}  # fmt: skip
GOOD["quantize4"] = {key: value for key, value in GOOD["quantize"].items() if key != "tile_order"} | {"clip": 1.0}
GOOD["attention_quantize"] = GOOD["attention"] | {"tile_order": True}
REACHED = {
    "quantize": "quantize", "quantize4": "quantize", "linear": "gemm_sm90", "linear4": "gemm_int4",
    "norm_rope": "norm_rope", "dequantize": "dequantize", "inverse_rms": "inverse_rms",
    "guided_score": "guided_score", "reveal": "reveal", "attention": "attention",
    "attention_quantize": "attention_quantize",
}  # fmt: skip

# (operator, what is changed, what the message says: the argument, and the value)
Bad = tuple[str, dict[str, Any], str]
BAD: dict[str, Bad] = {
    # shapes
    "x of no columns": ("quantize", {"x": half(5, 0)}, "x: found no columns"),
    "x of no dimension": ("quantize", {"x": half()}, "x: found no columns"),
    "x of 40 columns": ("quantize", {"x": half(5, 40)}, "x: found K=40, .*16"),
    "x of 80 columns behind a Hadamard": ("quantize", {"x": half(5, 80)}, "x: found K=80, .*64"),
    "x of 80 columns in 4 bits": ("quantize4", {"x": half(5, 80), "hadamard": False}, "x: found K=80, .*64"),
    "x of 32784 columns": ("quantize", {"x": half(1, 32784), "hadamard": False}, "x: found K=32784, .*32768"),
    "x of odd width, gated": ("quantize", {"x": half(5, 257), "silu": True}, "x: found 257"),
    "residual of other rows": ("quantize", {"residual": half(4, 128)}, "residual: found 512 elements, .*640"),
    "norm too short": ("quantize", {"norm": torch.ones(127)}, "norm: found 127 elements, .*128"),
    "smooth too long": ("quantize", {"smooth": torch.ones(129)}, "smooth: found 129 elements, .*256"),
    "down of another K": ("quantize", {"down": half(1, 4, 32, 8)}, "down: found 1024 elements, .*2048"),
    "codes of one dimension": ("linear", {"codes": torch.zeros(256, dtype=torch.int8)}, "codes: found 1 dim"),
    "codes off the padding": ("linear", {"codes": torch.zeros(5, 128, dtype=torch.int8)}, "codes: found Kp=128, .*256"),
    "codes of no columns": ("linear", {"codes": torch.zeros(5, 0, dtype=torch.int8)}, "codes: found Kp=0"),
    "scales of other rows": ("linear", {"scales": torch.ones(6)}, "scales: found 6 elements, .*5"),
    "weight of another K": (
        "linear", {"weight": torch.zeros(2, 4, 4096, dtype=torch.uint8)}, "weight: found 32768 elements, .*16384"),
    "weight of another mode": ("linear", {"mode": mma_tiles.GROUPS}, "weight: found 16384 elements, .*17408"),
    "channel unpadded": ("linear", {"channel": torch.ones(72)}, "channel: found 72 elements, .*128"),
    "bias unpadded": ("linear", {"bias": torch.ones(72)}, "bias: found 72 elements, .*128"),
    "low of other rows": ("linear", {"low": half(1, 2, 128)}, "low: found 256 elements, .*128"),
    "no n": ("linear", {"n": 0}, "n: found 0"),
    "n below zero": ("linear", {"n": -8}, "n: found -8"),
    "n beyond everything": ("linear", {"n": 2**62}, "n: found 4611686018427387904"),
    "n whose rows the copy engine cannot address": ("linear", {"n": 70}, "n: found 70 with Half output, .*8"),
    "codes of 4 bits off the padding": (
        "linear4", {"codes": torch.zeros(5, 64, dtype=torch.uint8)}, "codes: found Kp=128, .*256"),
    "group scales of other rows": ("linear4", {"group_scales": torch.ones(4, 64)}, "group_scales: found 256 .*512"),
    "weight scales of another K": ("linear4", {"weight_scales": torch.ones(8, 128)}, "weight_scales: found 1024 .*512"),
    "weight of 4 bits of another N": ("linear4", {"n": 200}, "up: found 2048|weight: found 16384"),
    "qkv of another width": ("norm_rope", {"qkv": half(5, 640)}, "qkv: found 640 columns, accepted are 512"),
    "qkv of no dimension": ("norm_rope", {"qkv": half()}, "qkv: found 0 dim"),
    "cosines of other rows": ("norm_rope", {"cosines": torch.ones(4, 64)}, "cosines: found 256 elements, .*320"),
    "sines of a whole head": ("norm_rope", {"sines": torch.ones(5, 128)}, "sines: found 640 elements, .*320"),
    "q_norm of a whole row": ("norm_rope", {"q_norm": torch.ones(256)}, "q_norm: found 256 elements, .*128"),
    "3 heads on 2": ("norm_rope", {"heads": 3, "kv_heads": 2}, "heads: found 3 and 2"),
    "q of heads of 64": ("attention", {"q": half(5, 8, 64)}, "q: found 3 dim"),
    "q of floats": ("attention", {"q": torch.zeros(5, 4, 128)}, "q: found Float"),
    "k of 3 heads": ("attention", {"k": half(5, 3, 128)}, "k: found 3 heads"),
    "v of other rows": ("attention", {"v": half(4, 2, 128)}, r"v: found another shape than \[5, 2, 128\]"),
    "k of bfloat16": ("attention", {"k": half(5, 2, 128).bfloat16()}, "k: found another dtype"),
    "v transposed": ("attention", {"v": half(2, 5, 128).transpose(0, 1)}, "v: found strides that are not"),
    "q off by one": ("attention", {"q": off(5, 4, 128, dtype=torch.float16)}, "q: found data at an address"),
    "bounds of longs": ("attention", {"bounds": torch.tensor([0, 5])}, "bounds: found Long, accepted is Int"),
    "bounds of one": ("attention", {"bounds": torch.zeros(1, dtype=torch.int32)}, "bounds: found 1 elements"),
    "logits of one condition": ("guided_score", {"logits": half(1, 3, 7, 2, 9)}, "logits: found 5 dim"),
    "logits of four dimensions": ("guided_score", {"logits": half(2, 21, 2, 9)}, "logits: found 4 dim"),
    "a mask beyond the classes": ("guided_score", {"mask_id": 10}, r"mask_id: found 10, accepted are 1 \.\. 9"),
    "penalty of other books": ("guided_score", {"penalty": torch.ones(3)}, "penalty: found 3 elements, .*2"),
    "noise of halves": ("guided_score", {"noise": half(3, 2, 7)}, "noise: found Half, accepted is Float"),
    "valid of bytes": ("guided_score", {"valid": torch.ones(3, 7).byte()}, "valid: found Byte, accepted is Bool"),
    "tokens of ints": ("guided_score", {"tokens": torch.zeros(3, 2, 7).int()}, "tokens: found Int, accepted is Long"),
    "tokens of three dimensions": ("reveal", {"tokens": torch.zeros(3, 2, 7).long()}, "tokens: found 3 dim"),
    "scores of fewer slots": ("reveal", {"score": torch.zeros(3, 13)}, "score: found 39 elements, .*42"),
    "k of other items": ("reveal", {"k": torch.ones(2).long()}, "k: found 2 elements, .*3"),
    "no heads": ("norm_rope", {"heads": 0}, "heads: found 0"),
    "kv_heads below zero": ("norm_rope", {"kv_heads": -1}, "heads: found 2 and -1"),
    "codes of a flat weight": ("dequantize", {"codes": torch.zeros(120, dtype=torch.uint8)}, "codes: found 1 dim"),
    "codes of another k": ("dequantize", {"k": 160}, "codes: found 120 elements, .*240"),
    "odd k": ("dequantize", {"k": 79}, "k: found 79"),
    "no k": ("dequantize", {"k": 0}, "k: found 0"),
    "no group": ("dequantize", {"group_size": 0}, "group_size: found 0"),
    "group below zero": ("dequantize", {"group_size": -1}, "group_size: found -1"),
    "scales of other groups": ("dequantize", {"group_size": 20}, "scales: found 6 elements, .*12"),
    "zeros of other groups": ("dequantize", {"zeros": torch.zeros(3, 1, dtype=torch.uint8)}, "zeros: found 3 .*6"),
    "x of three dimensions": ("inverse_rms", {"x": half(5, 2, 64)}, "x: found 3 dim"),
    "x of odd width": ("inverse_rms", {"x": half(5, 63)}, "x: found K=63"),
    "rounded q of heads of 64": ("attention_quantize", {"q": half(5, 8, 64)}, "q: found 3 dim"),
    "rounded k of 3 heads": ("attention_quantize", {"k": half(5, 3, 128)}, "k: found 3 heads"),
    "rounded v of other rows": (
        "attention_quantize", {"v": half(4, 2, 128)}, r"v: found another shape than \[5, 2, 128\]"),
    "rounded bounds of one": (
        "attention_quantize", {"bounds": torch.zeros(1, dtype=torch.int32)}, "bounds: found 1 elements"),
    "rows of 257 heads": (
        "attention_quantize", {key: half(5, 257, 128) for key in "qkv"}, "q: found K=32896, .*32768"),
    # dtypes
    "rounded q of floats": ("attention_quantize", {"q": torch.zeros(5, 4, 128)}, "q: found Float"),
    "x float64": ("quantize", {"x": torch.zeros(5, 128, dtype=torch.float64)}, "x: found Double, .*Half"),
    "x int32": ("quantize4", {"x": torch.zeros(5, 128, dtype=torch.int32)}, "x: found Int, .*Half"),
    "residual of another dtype": ("quantize", {"residual": torch.zeros(5, 128)}, "residual: found Float, .*Half"),
    "norm of halves": ("quantize", {"norm": half(128)}, "norm: found Half, accepted is Float"),
    "smooth of doubles": ("quantize", {"smooth": torch.ones(256).double()}, "smooth: found Double, accepted is Float"),
    "down of floats": ("quantize", {"down": torch.zeros(1, 8, 32, 8)}, "down: found Float, accepted is Half"),
    "codes unsigned": ("linear", {"codes": torch.zeros(5, 256, dtype=torch.uint8)}, "codes: found Byte, accepted is Char"),
    "scales of halves": ("linear", {"scales": half(5)}, "scales: found Half, accepted is Float"),
    "weight signed": ("linear", {"weight": torch.zeros(2, 2, 4096, dtype=torch.int8)}, "weight: found Char, .*Byte"),
    "channel of halves": ("linear", {"channel": half(128)}, "channel: found Half, accepted is Float"),
    "bias of halves": ("linear", {"bias": half(128)}, "bias: found Half, accepted is Float"),
    "up of bfloat16": ("linear", {"up": half(1, 8, 32, 8).bfloat16()}, "up: found BFloat16, accepted is Half"),
    "low of floats": ("linear", {"low": torch.zeros(1, 1, 128)}, "low: found Float, accepted is Half"),
    "output of no dtype": ("linear", {"out": 3}, "out: found 3"),
    "output of no dtype, 4 bits": ("linear4", {"out": -1}, "out: found -1"),
    "output of no dtype, weights": ("dequantize", {"out": 9}, "out: found 9"),
    "codes of 4 bits signed": ("linear4", {"codes": torch.zeros(5, 128, dtype=torch.int8)}, "codes: found Char, .*Byte"),
    "weight scales of halves": ("linear4", {"weight_scales": half(4, 128)}, "weight_scales: found Half, .*Float"),
    "qkv of integers": ("norm_rope", {"qkv": half(5, 512).short()}, "qkv: found Short, .*Half"),
    "cosines of halves": ("norm_rope", {"cosines": half(5, 64)}, "cosines: found Half, accepted is Float"),
    "zeros signed": ("dequantize", {"zeros": torch.zeros(3, 2, dtype=torch.int8)}, "zeros: found Char, .*Byte"),
    "x complex": ("inverse_rms", {"x": torch.zeros(5, 64, dtype=torch.complex64)}, "x: found ComplexFloat"),
    # strides
    "residual transposed": ("quantize", {"residual": half(128, 5).T}, r"residual: found strides \[1, 5\]"),
    "smooth spread": ("quantize", {"smooth": torch.ones(512)[::2]}, r"smooth: found strides \[2\]"),
    "codes of every other row": (
        "linear", {"codes": torch.zeros(10, 256, dtype=torch.int8)[::2]}, r"codes: found strides \[512, 1\]"),
    "weight transposed": (
        "linear", {"weight": torch.zeros(2, 2, 4096, dtype=torch.uint8).transpose(0, 1)}, "weight: found strides"),
    "bias of one value": ("linear", {"bias": torch.zeros(1).expand(128)}, r"bias: found strides \[0\]"),
    "qkv of a wider row": ("norm_rope", {"qkv": half(5, 1024)[:, :512]}, r"qkv: found strides \[1024, 1\]"),
    "sines transposed": ("norm_rope", {"sines": torch.ones(64, 5).T}, r"sines: found strides \[1, 5\]"),
    "x of every other row": ("inverse_rms", {"x": half(10, 64)[::2]}, r"x: found strides \[128, 1\]"),
    # alignment
    "rounded q off by one": (
        "attention_quantize", {"q": off(5, 4, 128, dtype=torch.float16)}, "q: found data at an address"),
    "residual off by one": ("quantize", {"residual": off(5, 128, dtype=torch.float16)}, "residual: found data 2 bytes"),
    "norm off by one": ("quantize", {"norm": off(128)}, "norm: found data 4 bytes past a multiple of 16"),
    "down off by one": ("quantize", {"down": off(1, 8, 32, 8, dtype=torch.float16)}, "down: found data 2 bytes"),
    "weight off by one": (
        "linear", {"weight": off(2, 2, 4096, dtype=torch.uint8)}, "weight: found data 1 bytes past a multiple of 16"),
    "codes off by eight": ("linear", {"codes": off(5, 256, dtype=torch.int8, by=8)}, "codes: found data 8 bytes"),
    "channel off by one": ("linear", {"channel": off(128)}, "channel: found data 4 bytes"),
    "group scales off by one": ("linear4", {"group_scales": off(4, 128)}, "group_scales: found data 4 bytes"),
    "qkv off by one": ("norm_rope", {"qkv": off(5, 512, dtype=torch.float16)}, "qkv: found data 2 bytes"),
    "x of the inverse RMS off by one": ("inverse_rms", {"x": off(5, 64, dtype=torch.float16)}, "x: found data 2 bytes"),
    # ranks
    "rank 8": ("quantize", {"rank": 8, "down": half(1, 8, 32, 4)}, "rank: found 8, .*16"),
    "rank 272": ("quantize", {"rank": 272}, "rank: found 272, .*256"),
    "rank below zero": ("quantize4", {"rank": -16}, "rank: found -16"),
    "rank without down": ("quantize", {"down": None}, "down: found none with rank 16"),
    "down without rank": ("quantize", {"rank": 0}, "down: found one with rank 0"),
    "up of rank 8": ("linear", {"up": half(1, 8, 32, 4)}, "up: found 1024 elements for N=128"),
    "up of rank 272": ("linear", {"up": half(17, 8, 32, 8)}, "up: found 34816 elements for N=128"),
    "up of another N": ("linear", {"up": half(1, 9, 32, 8)}, "up: found 2304 elements for N=128"),
    "up without low": ("linear", {"low": None}, "low: found none, .*rank 16"),
    "low without up": ("linear", {"up": None}, "up: found none, .*low of 128"),
    "up without low, 4 bits": ("linear4", {"low": None}, "low: found none, .*rank 16"),
    # values
    "scale of an attention 0, then rounded": ("attention_quantize", {"scale": 0.0}, "scale: found 0"),
    "eps below zero": ("quantize", {"eps": -1.0}, "eps: found -1"),
    "eps not a number": ("norm_rope", {"eps": float("nan")}, "eps: found -?nan"),
    "eps without end": ("inverse_rms", {"eps": float("inf")}, "eps: found inf"),
    "scale of an attention 0": ("attention", {"scale": 0.0}, "scale: found 0"),
    "scale of an attention not a number": ("attention", {"scale": float("nan")}, "scale: found -?nan"),
    "clip 0": ("quantize4", {"clip": 0.0}, "clip: found 0"),
    "clip not a number": ("quantize4", {"clip": float("nan")}, "clip: found -?nan"),
    "gated, N no multiple of 16": ("linear", {"gated": True}, "n: found 72, accepted with gated are multiples of 16"),
    "gated by the GEMV": ("linear", {"gated": True, "n": 80, "row": -2}, "gated: found with row=-2"),
    "mode 4": ("linear", {"mode": 4}, "mode: found 4, .*3"),
    "mode below zero": ("linear", {"mode": -1}, "mode: found -1"),
    "row below the names": ("linear", {"row": -4}, "row: found -4"),
    "GEMV of 17 rows": (
        "linear", {"codes": torch.zeros(17, 256, dtype=torch.int8), "scales": torch.ones(17), "row": -2},
        "row: found -2 .GEMV. with M=17 mode=1"),
    "GEMV of 8-bit weights": ("linear", {"mode": mma_tiles.W8, "row": -2}, "row: found -2 .GEMV. with M=5 mode=0"),
    "3 bits": ("dequantize", {"bits": 3}, "bits: found 3, accepted are 4 and 8"),
}  # fmt: skip


@pytest.mark.parametrize("name", NAMES)
def test_good_arguments_reach_the_kernel(stub: Stub, name: str) -> None:
    """What the table below changes is one argument of a call that is all right."""
    before = stub.launches
    stub.call(name, GOOD[name])
    assert stub.launches == before + 1 and stub.native.stub_reached().decode() == REACHED[name]


@pytest.mark.parametrize("case", BAD)
def test_bad_arguments_are_named_before_a_launch(stub: Stub, case: str) -> None:
    name, changed, message = BAD[case]
    assert set(changed) <= set(GOOD[name])
    before = stub.launches
    with pytest.raises(RuntimeError, match=message):
        stub.call(name, GOOD[name] | changed)
    assert stub.launches == before


@pytest.mark.parametrize("name", NAMES)
def test_an_optional_argument_may_be_missing(stub: Stub, name: str) -> None:
    schema = getattr(getattr(torch.ops, ops.NAMESPACE), f"cuda_{name}").default._schema
    optional = [a.name for a in schema.arguments if str(a.type) == "Optional[Tensor]"]
    bare = GOOD[name] | dict.fromkeys(optional) | ({"rank": 0} if "rank" in GOOD[name] else {})
    before = stub.launches
    stub.call(name, bare)
    assert stub.launches == before + 1


@pytest.mark.parametrize("name", NAMES)
def test_tracing_is_told_the_shapes_that_come(stub: Stub, name: str) -> None:
    """What ops_cuda_shapes.py says of tensors on meta is what the operator allocates."""
    op = getattr(getattr(torch.ops, ops.NAMESPACE), f"cuda_{name}").default
    traced = op(**{key: v.to("meta") if isinstance(v, Tensor) else v for key, v in GOOD[name].items()})
    found = [x if isinstance(x, tuple) else (x,) for x in (traced, stub.call(name, GOOD[name])) if x is not None]
    told, real = ([(list(t.shape), t.dtype) for t in one] for one in found) if found else ([], [])
    assert told == real


def test_x_may_have_any_strides_and_address(stub: Stub) -> None:
    """A slice of a sequence is an everyday input of a layer; only what is written to, and packed weights, may not."""
    wide = half(7, 3, 256)
    for x in (wide[:, -1:, :128], wide.transpose(0, 1)[..., :128], half(1, 128).expand(5, 128), off(5, 128).half()):
        arguments = GOOD["quantize"] | {"x": x, "residual": None}
        codes, scales, low = stub.call("quantize", arguments)
        rows = x.numel() // 128
        assert codes.shape == (rows, 256) and scales.shape == (rows,) and low.shape == (1, -(-rows // 8), 128)
    misaligned = off(5, 128, dtype=torch.float16)
    assert misaligned.data_ptr() % 16 and stub.call("quantize", GOOD["quantize"] | {"x": misaligned})


def test_a_gated_product_has_half_the_columns_where_the_chip_has_it(stub: Stub) -> None:
    assert stub.call("linear", GOOD["linear"] | {"gated": True, "n": 80}).shape == (5, 40)
    stub.chip(89, None)
    with pytest.raises(RuntimeError, match=r"gated: found with row=-1 on compute capability 8.9, accepted .* 9.0"):
        stub.call("linear", GOOD["linear"] | {"gated": True, "n": 80})


def test_what_cannot_be_joined_is_two_launches(stub: Stub) -> None:
    """The chip's own attention, then its quantizer."""
    for chip in (80, 90):
        stub.chip(chip, joins=False)
        codes, scales = stub.call("attention_quantize", GOOD["attention_quantize"])
        assert codes.shape == (5, 512) and scales.shape == (5,)
        assert stub.order == "attention quantize"


def test_no_rows_are_no_launch(stub: Stub) -> None:
    before = stub.launches
    codes, scales, low = stub.call("quantize", GOOD["quantize"] | {"x": half(0, 128), "residual": half(0, 128)})
    assert codes.shape == (0, 256) and low.shape == (1, 0, 128)
    none = {"codes": codes, "scales": scales, "low": low}
    assert stub.call("linear", GOOD["linear"] | none).shape == (0, 72)
    assert stub.call("linear", GOOD["linear"] | none | {"row": -2}).shape == (0, 72)
    four = {"codes": torch.zeros(0, 128, dtype=torch.uint8), "group_scales": torch.ones(4, 0)}
    assert stub.call("linear4", GOOD["linear4"] | none | four).shape == (0, 72)
    empty = {"qkv": half(0, 512), "cosines": torch.ones(0, 64), "sines": torch.ones(0, 64)}
    stub.call("norm_rope", GOOD["norm_rope"] | empty)
    views = {"q": half(0, 4, 128), "k": half(0, 2, 128), "v": half(0, 2, 128)}
    rounded = stub.call("attention_quantize", GOOD["attention_quantize"] | views)
    assert [list(t.shape) for t in rounded] == [[0, 512], [0]]
    assert stub.call("inverse_rms", {"x": half(0, 64), "eps": 0.0}).shape == (0,)
    assert stub.launches == before


def test_what_a_kernel_says_comes_with_its_shape(stub: Stub) -> None:
    stub.chip(90, b"row: the tile does not divide the shape")
    with pytest.raises(RuntimeError, match=r"cuda_linear: row: the tile .* \(M=5 N=72 K=256 row=3\)"):
        stub.call("linear", GOOD["linear"] | {"row": 3})
    stub.chip(90, b"K: one row with its low rank does not fit the shared memory")
    with pytest.raises(RuntimeError, match=r"cuda_quantize: K: one row .* \(M=5 K=128 rank=16\)"):
        stub.call("quantize", GOOD["quantize"])
    with pytest.raises(RuntimeError, match=r"cuda_attention_quantize: K: one row .* \(M=5 heads=4\)"):
        stub.call("attention_quantize", GOOD["attention_quantize"])


# -- GPU-01: architecture, driver ------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("capability", [61, 70, 75])
def test_gpu_01_a_chip_before_ampere_is_named(stub: Stub, name: str, capability: int) -> None:
    stub.chip(capability)
    before = stub.launches
    message = f"device: found compute capability {capability // 10}.{capability % 10}, accepted are 8.0"
    with pytest.raises(RuntimeError, match=message):
        stub.call(name, GOOD[name])
    assert stub.launches == before


@pytest.mark.parametrize(
    ("capability", "kernel"),
    [(80, "gemm_mma"), (86, "gemm_mma"), (89, "gemm_mma"), (90, "gemm_sm90"), (100, "gemm_mma"), (120, "gemm_mma")],
)
def test_gpu_01_every_chip_gets_a_kernel_that_was_compiled_for_it(stub: Stub, capability: int, kernel: str) -> None:
    stub.chip(capability)
    stub.call("linear", GOOD["linear"])
    assert stub.native.stub_reached().decode() == kernel
    stub.call("linear", GOOD["linear"] | {"row": ops_cuda.GEMV})
    assert stub.native.stub_reached().decode() == "gemv"
    stub.call("linear", GOOD["linear"] | {"row": ops_cuda.PORTABLE})
    assert stub.native.stub_reached().decode() == "gemm_mma"
    before = stub.launches
    if capability != 90:
        with pytest.raises(RuntimeError, match="row: found 3, .*Hopper's"):
            stub.call("linear", GOOD["linear"] | {"row": 3})
    if capability > 90:  # no PTX of the INT4 kernel: newer chips have no such instruction
        with pytest.raises(RuntimeError, match=f"device: found compute capability {capability // 10}.0, .*8.0 .. 9.0"):
            stub.call("linear4", GOOD["linear4"])
    assert stub.launches == before


@pytest.mark.parametrize("capability", [(7, 5), (8, 0), (8, 6), (8, 7), (8, 9), (9, 0), (10, 0), (12, 0)])
def test_gpu_01_what_python_says_of_a_chip(capability: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_cuda, "_NO_CUDA", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Some GPU")
    q = QuantizedWeight(torch.zeros(8, 64, dtype=torch.int8), torch.ones(8, 1), 64, 4)
    choice = dispatch.choose(q, "cuda:0")
    if capability < (8, 0):
        said = "Some GPU has compute capability 7.5, accepted are 8.0 and newer"
        assert said in (ops_cuda.refuses("cuda:0") or "")
        assert choice.kernel.name == "reference" and said in dict(choice.passed_over)["cuda_tiles"]
    else:
        assert ops_cuda.refuses("cuda:0") is None and choice.kernel.name == "cuda_tiles"
    heads = ((16, 8), (4, 2), (2, 1), (18, 9), (8, 8), (8, 2))
    found = [ops_cuda.joins(torch.device("cuda:0"), *pair) for pair in heads]
    assert found == [capability == (9, 0)] * 2 + [False] * 4 and not ops_cuda.joins(torch.device("cpu"), 16, 8)
    # 4-bit activations: by the tensor core on Ampere and Ada, emulated on Hopper, not at all on newer chips
    assert ops_cuda.has_int4("cuda:0") == (capability[0] == 8)
    assert ops_cuda.runs_int4("cuda:0") == (capability <= (9, 0))


@pytest.mark.parametrize(
    ("version", "content", "said"),
    [
        (None, None, "this torch has no CUDA"),
        ("12.8", None, "torch was built with CUDA 12.8, accepted is 13.x"),
        ("14.0", None, "torch was built with CUDA 14.0, accepted is 13.x"),
        ("13.0", None, "nvcc 13 was not found"),
        ("13.0", b"no library", "_cuda13.so: cannot be loaded"),
    ],
)
def test_gpu_01_the_build_of_torch_is_named(
    version: str | None, content: bytes | None, said: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    library = tmp_path / "_cuda13.so"
    if content is not None:
        library.write_bytes(content)
    monkeypatch.setattr(torch.version, "cuda", version)
    monkeypatch.setattr(native, "CUDA_LIBRARY", library)
    assert said in ops_cuda._load_cuda()


def test_gpu_01_no_visible_device(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ops_cuda, "_NO_CUDA", "")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert "torch sees no CUDA device" in (ops_cuda.refuses(0) or "") and "580" in (ops_cuda.refuses(0) or "")


def test_gpu_01_import_never_fails() -> None:
    """No GPU visible: everything imports, a layer runs, and the reason is a sentence."""
    body = (
        "import torch, lowbit; from lowbit import ops_cuda; from lowbit.nn import QuantLinear\n"
        "layer = QuantLinear.from_linear(torch.nn.Linear(64, 8), 'w4a8')\n"
        "assert layer(torch.ones(2, 64)).shape == (2, 8)\n"
        "print(ops_cuda.refuses(0))"
    )
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "PYTHONPATH": str(Path(ops.__file__).parents[1])}
    done = subprocess.run([sys.executable, "-c", body], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr[-400:]
    assert "CUDA" in done.stdout or "nvcc" in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_a_run_of_the_gpu_tests_says_how_many_ran() -> None:
    """And is no success where none did."""
    command = [sys.executable, "-m", "pytest", "-m", "gpu", "-q", "tests/test_cuda_gpu.py", "tests/test_cases_gpu.py"]
    environment = {**os.environ, "PYTHONPATH": str(Path(ops.__file__).parents[1])}
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, env=environment)
    assert done.returncode == 1 and "GPU tests: 0 ran (0 passed, 0 failed, 0 error, " in done.stdout


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_the_bench_of_a_chip_says_what_it_found_instead() -> None:
    environment = {**os.environ, "PYTHONPATH": str(Path(ops.__file__).parents[1]), "PYTHON": sys.executable}
    command = ["bash", str(ROOT / "bench/bench_gpu.sh"), "8.9"]
    done = subprocess.run(command, capture_output=True, text=True, env=environment)
    assert done.returncode == 2 and not done.stdout
    assert "chip: found no CUDA device (0.0), accepted is compute capability 8.9" in done.stderr


# -- the Python side: what comes before an operator ------------------------------------------------------------------

CPU_CALLS: dict[str, Callable[[], object]] = {
    "x": lambda: ops_cuda.quantize(half(5, 128)),
    "x, 4 bits": lambda: ops_cuda.quantize4(half(5, 128)),
    "codes": lambda: ops_cuda.linear(
        *(GOOD["linear"][a] for a in "codes scales low weight channel bias up n mode".split()), torch.float16
    ),
    "codes, 4 bits": lambda: ops_cuda.linear4(
        *(GOOD["linear4"][a] for a in "codes group_scales scales low weight weight_scales bias up n".split()),
        torch.float16,
    ),
    "codes, weights": lambda: ops_cuda.dequantize(
        torch.zeros(3, 40, dtype=torch.uint8), torch.ones(3, 2), None, 80, 40, 4, torch.float16
    ),
    "qkv": lambda: ops_cuda.norm_rope(half(5, 512), None, None, torch.ones(5, 64), torch.ones(5, 64), 2, 1),
    "q": lambda: ops_cuda.attention_quantize(*(GOOD["attention"][a] for a in "q k v bounds scale".split())),
    "x, inverse RMS": lambda: ops_cuda.inverse_rms(half(5, 64), 1e-6),
}


@pytest.mark.parametrize("case", CPU_CALLS)
def test_a_tensor_on_the_cpu_is_named(case: str) -> None:
    with pytest.raises(FormatError, match=f"{case.split(',')[0]}: found on cpu, accepted is a CUDA device"):
        CPU_CALLS[case]()


def test_python_names_what_it_reads_itself() -> None:
    x = torch.empty(5, 128, dtype=torch.float16, device="meta")
    with pytest.raises(FormatError, match=r"down: found shape \[16, 128\]"):
        ops_cuda.quantize(x, down=half(16, 128))
    with pytest.raises(FormatError, match="dtype: found torch.float64, accepted are float32"):
        ops_cuda.dequantize(x.byte(), x, None, 80, 40, 4, torch.float64)
    for bad in (x[:, :0], torch.empty((), device="meta")):
        with pytest.raises(FormatError, match="x: found shape"):
            ops_cuda.quantize(bad)


def test_tiles_refuse_by_name() -> None:
    """A weight that no integer kernel takes says why; the layer then runs in float, and `explain` repeats it."""
    codes, scales = torch.zeros(8, 128, dtype=torch.int8), torch.ones(8, 1)
    q = QuantizedWeight(codes, scales, 128, 4)
    low = LowRank(torch.zeros(128, 24), torch.zeros(8, 24))
    for bad, why in (
        (q.with_(low_rank=low), "the low rank is 24, accepted are multiples of 16"),
        (q.with_(perm=torch.arange(128).int()), "permuted"),
        (QuantizedWeight(codes[:, :120], scales, 120, 4), "K is 120, accepted are multiples of 16"),
        (QuantizedWeight(codes, torch.ones(8, 4), 32, 4), "the group is 32 columns"),
        (QuantizedWeight(torch.zeros(8, 32784, dtype=torch.int8), scales, 32784, 4), "K is 32784, accepted is at most"),
        (QuantizedWeight(codes, torch.ones(8, 2), 64, 8), "8-bit codes have groups of 64"),
    ):
        assert why in (mma_tiles.refuses(bad) or "")
        with pytest.raises(FormatError, match="weight: .*" + why):
            mma_tiles.pack(bad)


def test_a_layer_names_x() -> None:
    layer = QuantLinear.from_linear(torch.nn.Linear(64, 8), "w4a8")
    for x, said in (
        (torch.ones(3, 63), r"x: found shape \[3, 63\], accepted is \[..., 64\]"),
        (torch.tensor(1.0), r"x: found shape \[\]"),
        (torch.ones(3, 64, dtype=torch.float64), "x: found torch.float64"),
    ):
        with pytest.raises(FormatError, match=said):
            layer(x)
