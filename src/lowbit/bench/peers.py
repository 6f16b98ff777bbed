"""``lowbit bench peers``: one layer beside every other way to run it that is installed here, in one interleaved run.

A peer is a row of `PEERS`: how to build it, and the line that installs it. One that is missing, or that lacks the shape,
is named with that line and left out.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from lowbit.bench import runtimes
from lowbit.bench.entry import Call, Entry, Peer, quantize, zero_points
from lowbit.reference import dequantize
from lowbit.types import FormatError, QuantizedWeight

# -- torch ------------------------------------------------------------------------------------------------------------


def _dense(name: str, weight: Tensor, group: int, threads: int) -> Entry:
    dense = weight.to(getattr(torch, name))

    def make(xs: Mapping[str, Tensor]) -> Call:
        mine, x = dense.clone(), xs[name]
        return lambda: torch.nn.functional.linear(x, mine)

    return Entry(f"torch {name} linear", {"peer": name, "x_dtype": name}, dense.nbytes, make, dense.float())


def int4pack(q: QuantizedWeight) -> Entry:
    """torch's ``_weight_int4pack_mm_for_cpu`` in bfloat16: w = (code - 8) * scale + offset, offset = (8 - zero) * scale."""
    aten = torch.ops.aten
    packed = aten._convert_weight_to_int4pack_for_cpu(q.codes.int(), 1)
    scales = q.scales.float()
    pair = torch.stack([scales, (8 - zero_points(q).float()) * scales], -1).transpose(0, 1).contiguous().bfloat16()
    group = q.group_size
    probe = torch.zeros(1, q.k, dtype=torch.bfloat16)
    aten._weight_int4pack_mm_for_cpu(probe, packed, group, pair)  # refuses odd groups here

    def make(xs: Mapping[str, Tensor]) -> Call:
        mine, scale, x = packed.clone(), pair.clone(), xs["bfloat16"]
        return lambda: aten._weight_int4pack_mm_for_cpu(x, mine, group, scale)

    facts = {"peer": "int4pack", "group": group, "x_dtype": "bfloat16"}
    return Entry("torch int4pack bfloat16", facts, packed.nbytes + pair.nbytes, make, dequantize(q))


def _dynamic_int8(engine: str, weight: Tensor, group: int, threads: int) -> Entry:
    """torch's dynamically quantized linear: int8 on both sides, one scale a tensor of x."""
    if engine not in torch.backends.quantized.supported_engines:
        raise RuntimeError(f"this torch has no engine {engine}")
    n, k = weight.shape

    def make(xs: Mapping[str, Tensor]) -> Call:
        torch.backends.quantized.engine = engine
        linear = torch.nn.Linear(k, n, bias=False)
        linear.weight = torch.nn.Parameter(weight.clone(), requires_grad=False)
        with torch.inference_mode(False):
            made = torch.ao.quantization.quantize_dynamic(  # type: ignore[no-untyped-call]
                torch.nn.Sequential(linear), {torch.nn.Linear}, dtype=torch.qint8
            )
        return partial(made, xs["float32"])

    return Entry(f"torch {engine} dynamic int8", {"peer": engine, "x_dtype": "float32"}, n * k, make, weight)


PEERS: dict[str, Peer] = {
    "float32": Peer(partial(_dense, "float32")),
    "bfloat16": Peer(partial(_dense, "bfloat16")),
    "float16": Peer(partial(_dense, "float16")),
    "int4pack": Peer(lambda weight, group, threads: int4pack(quantize(weight, 4, group))),
    "onednn": Peer(partial(_dynamic_int8, "onednn")),
    "fbgemm": Peer(partial(_dynamic_int8, "fbgemm")),
    "ort": Peer(runtimes.ort, "onnxruntime", "pip install onnx onnxruntime"),
    "openvino": Peer(runtimes.openvino, "openvino", "pip install openvino"),
    "ggml": Peer(
        runtimes.ggml, "GGML_DIR", "npm pack @node-llama-cpp/linux-x64, unpack it, set GGML_DIR to its bins/linux-x64"
    ),
    "gptqmodel": Peer(runtimes.gptqmodel, "gptqmodel", "pip install gptqmodel"),
}
OF_TORCH = ("float32", "bfloat16", "float16", "int4pack")  # what `bench layers` runs unless told otherwise


def entries(names: Sequence[str], weight: Tensor, group: int, threads: int) -> Iterator[Entry]:
    """The peers that can run here; the others are named on stderr with the reason and the line that installs them."""
    for name in names:
        peer = PEERS[name]
        there = bool(os.environ.get(peer.needs)) if peer.needs.isupper() else importlib.util.find_spec(peer.needs)
        if not there:
            print(f"{name} is left out: {peer.needs} is missing ({peer.install})", file=sys.stderr)
            continue
        try:
            yield peer.entry(weight, group, threads)
        except FormatError:
            raise
        except Exception as error:  # whatever a peer raises: it lacks this shape or this CPU
            left_out(name, error)


def left_out(name: str, error: Exception) -> None:
    """Say on stderr why a peer is not timed."""
    reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    print(f"{name} is left out: {reason}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """`bench layers` with every peer; the same options."""
    from lowbit.bench import layers

    return layers.main(argv, prog="lowbit bench peers", default_peers=list(PEERS))
