"""``lowbit bench peers``: one layer beside every other way to run it that is installed here, in one interleaved run.

A peer is a row of `PEERS`: how to build it, and the line that installs it. One that is missing, or that lacks the shape,
is named with that line and left out.
"""

from __future__ import annotations

import ctypes
import importlib.util
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.reference import dequantize
from lowbit.types import FormatError, QuantizedWeight

Call = Callable[[], Tensor]


class Entry(NamedTuple):
    """Something to time: ``make(x)`` gives a call over a copy of the weights of its own; x is there in every dtype."""

    name: str
    facts: dict[str, Any]
    weight_bytes: int
    make: Callable[[Mapping[str, Tensor]], Call]
    exact: Tensor  # [N, K] float32, what the layer multiplies with


class Peer(NamedTuple):
    """``entry(weight [N, K], group, threads)``; ``needs``: the module that has to be there; ``install``: how to get it."""

    entry: Callable[[Tensor, int, int], Entry]
    needs: str = "torch"
    install: str = "comes with torch"


def quantize(weight: Tensor, bits: int, group: int) -> QuantizedWeight:
    """Round to nearest: 4 bits with zero points, 8 bits signed. Scales are what float16 holds, as in a checkpoint."""
    n, k = weight.shape
    if group < 1 or k % group:
        raise FormatError(f"--group: found {group}, accepted here is a divisor of K={k}")
    blocks = weight.reshape(n, k // group, group)
    if bits == 8:
        scales = (blocks.abs().amax(-1) / 127).half()
        codes = (blocks / scales.float()[..., None]).round().clamp(-127, 127).to(torch.int8)
        return QuantizedWeight(codes.reshape(n, k), scales, group, bits)
    low, high = blocks.amin(-1).clamp(max=0), blocks.amax(-1).clamp(min=0)
    scales = ((high - low) / 15).half()
    zeros = (-low / scales.float()).round().clamp(0, 15)
    codes = (blocks / scales.float()[..., None] + zeros[..., None]).round().clamp(0, 15).to(torch.uint8)
    return QuantizedWeight(codes.reshape(n, k), scales, group, bits, zeros=zeros.to(torch.uint8))


def _zeros(q: QuantizedWeight) -> Tensor:
    assert q.zeros is not None
    return q.zeros


def _two_a_byte(codes: Tensor) -> Tensor:
    """Pairs along the last dimension, the first in the low nibble."""
    if codes.shape[-1] % 2:
        codes = torch.nn.functional.pad(codes, (0, 1))
    return codes[..., 0::2] | codes[..., 1::2] << 4


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
    pair = torch.stack([scales, (8 - _zeros(q).float()) * scales], -1).transpose(0, 1).contiguous().bfloat16()
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


# -- ONNX Runtime -----------------------------------------------------------------------------------------------------


def _ort(weight: Tensor, group: int, threads: int) -> Entry:
    """MatMulNBits at accuracy level 4: int8 activations in blocks of ``group`` (16, 32, 64, 128 or 256)."""
    import numpy as np
    import onnx
    import onnxruntime as ort

    q = quantize(weight, 4, group)
    n, k = weight.shape
    initializers = {
        "B": _two_a_byte(q.codes.reshape(n, k // group, group)).numpy(),
        "S": q.scales.float().reshape(-1).numpy(),
        "Z": _two_a_byte(_zeros(q)).reshape(-1).numpy(),
    }
    types = {"float32": onnx.TensorProto.FLOAT, "uint8": onnx.TensorProto.UINT8}
    node = onnx.NodeProto(op_type="MatMulNBits", domain="com.microsoft", input=["A", *initializers], output=["Y"])
    for name, value in {"K": k, "N": n, "bits": 4, "block_size": group, "accuracy_level": 4}.items():
        node.attribute.add(name=name, type=onnx.AttributeProto.INT, i=value)
    graph = onnx.GraphProto(name="layer", node=[node])
    for name, array in initializers.items():
        raw = np.ascontiguousarray(array)
        graph.initializer.add(name=name, dims=raw.shape, data_type=types[raw.dtype.name], raw_data=raw.tobytes())
    for values, name, columns in ((graph.input, "A", k), (graph.output, "Y", n)):
        tensor = values.add(name=name).type.tensor_type
        tensor.elem_type = onnx.TensorProto.FLOAT
        tensor.shape.dim.add(dim_param="M")
        tensor.shape.dim.add(dim_value=columns)
    model = onnx.ModelProto(ir_version=9, graph=graph)
    model.opset_import.add(domain="", version=17)
    model.opset_import.add(domain="com.microsoft", version=1)
    serialized = model.SerializeToString()

    def make(xs: Mapping[str, Tensor]) -> Call:
        options = ort.SessionOptions()
        options.intra_op_num_threads, options.inter_op_num_threads, options.log_severity_level = threads, 1, 3
        session = ort.InferenceSession(serialized, options, providers=["CPUExecutionProvider"])
        x, y = xs["float32"].numpy(), np.empty((xs["float32"].shape[0], n), np.float32)
        binding = session.io_binding()
        binding.bind_cpu_input("A", x)
        binding.bind_output("Y", "cpu", 0, np.float32, y.shape, y.ctypes.data)
        out = torch.from_numpy(y)

        def call() -> Tensor:
            session.run_with_iobinding(binding)
            return out

        return call

    size = sum(array.nbytes for array in initializers.values())
    facts = {"peer": "ort", "version": ort.__version__, "group": group, "x_dtype": "float32"}
    return Entry("onnxruntime MatMulNBits level 4", facts, size, make, dequantize(q))


# -- OpenVINO ---------------------------------------------------------------------------------------------------------


def _openvino(weight: Tensor, group: int, threads: int) -> Entry:
    """A product with 4-bit constants that the CPU plugin keeps compressed; activations int8 in blocks of ``group``."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    q = quantize(weight, 4, group)
    n, k = weight.shape
    codes = _two_a_byte(q.codes.reshape(n, k // group, group)).numpy().copy()
    zeros = _two_a_byte(_zeros(q).reshape(-1)).numpy().copy()
    scales = q.scales.reshape(n, k // group, 1).numpy()
    core = ov.Core()

    def make(xs: Mapping[str, Tensor]) -> Call:
        x = xs["float32"].numpy()
        given = op.parameter([x.shape[0], k], np.float32, name="A")
        w = op.constant(ov.Tensor(codes, [n, k // group, group], ov.Type.u4))
        z = op.constant(ov.Tensor(zeros, [n, k // group, 1], ov.Type.u4))
        dense = op.multiply(op.subtract(op.convert(w, "f16"), op.convert(z, "f16")), op.constant(scales))
        dense = op.convert(op.reshape(dense, op.constant(np.array([n, k], np.int64)), False), "f32")
        options = {
            "PERFORMANCE_HINT": "LATENCY", "INFERENCE_NUM_THREADS": threads, "NUM_STREAMS": 1,
            "INFERENCE_PRECISION_HINT": "f32", "DYNAMIC_QUANTIZATION_GROUP_SIZE": group,
        }  # fmt: skip
        compiled = core.compile_model(ov.Model([op.matmul(given, dense, False, True)], [given]), "CPU", options)
        request = compiled.create_infer_request()
        y = np.empty((x.shape[0], n), np.float32)
        request.set_input_tensor(ov.Tensor(x, shared_memory=True))
        request.set_output_tensor(ov.Tensor(y, shared_memory=True))
        out = torch.from_numpy(y)

        def call() -> Tensor:
            request.infer()
            return out

        return call

    facts = {"peer": "openvino", "version": ov.__version__, "group": group, "x_dtype": "float32"}
    return Entry("openvino int4 dynamic", facts, codes.nbytes + zeros.nbytes + scales.nbytes, make, dequantize(q))


# -- ggml -------------------------------------------------------------------------------------------------------------


def _ggml(weight: Tensor, group: int, threads: int) -> Entry:
    """Q4_0 (symmetric, blocks of 32), rows interleaved as llama.cpp does it, through the C interface.

    GGML_DIR is the folder with libggml-base.so, GGML_CPU the variant of libggml-cpu-<variant>.so (default: the best of
    zen4, icelake, alderlake, haswell that the flags of this CPU allow).
    """
    folder = Path(os.environ["GGML_DIR"])
    flags = Path("/proc/cpuinfo").read_text() if Path("/proc/cpuinfo").exists() else ""
    best = "icelake" if "avx512_vnni" in flags else "alderlake" if "avx_vnni" in flags else "haswell"
    best = "zen4" if "avx512_bf16" in flags else best
    variant = os.environ.get("GGML_CPU", best)
    base = ctypes.CDLL(str(folder / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
    cpu = ctypes.CDLL(str(folder / f"libggml-cpu-{variant}.so"))
    pointer, size_t, wide, whole = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int64, ctypes.c_int

    class Parameters(ctypes.Structure):
        _fields_ = (("mem_size", size_t), ("mem_buffer", pointer), ("no_alloc", ctypes.c_bool))

    def bind(library: ctypes.CDLL, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(library, name)
        function.restype, function.argtypes = result, list(arguments)
        bound: Callable[..., Any] = function
        return bound

    init = bind(base, "ggml_init", pointer, Parameters)
    new_2d = bind(base, "ggml_new_tensor_2d", pointer, pointer, whole, wide, wide)
    product = bind(base, "ggml_mul_mat", pointer, pointer, pointer, pointer)
    new_graph = bind(base, "ggml_new_graph", pointer, pointer)
    expand = bind(base, "ggml_build_forward_expand", None, pointer, pointer)
    on_backend = bind(base, "ggml_backend_alloc_ctx_tensors", pointer, pointer, pointer)
    in_buffer = bind(base, "ggml_backend_alloc_ctx_tensors_from_buft", pointer, pointer, pointer)
    write = bind(base, "ggml_backend_tensor_set", None, pointer, pointer, size_t, size_t)
    fetch = bind(base, "ggml_backend_tensor_get", None, pointer, pointer, size_t, size_t)
    compute = bind(base, "ggml_backend_graph_compute", whole, pointer, pointer)
    backend = bind(cpu, "ggml_backend_cpu_init", pointer)()
    bind(cpu, "ggml_backend_cpu_set_n_threads", None, pointer, whole)(backend, threads)
    interleaved = bind(cpu, "_Z35ggml_backend_cpu_repack_buffer_typev", pointer)

    n, k = weight.shape
    blocks = weight.reshape(n, k // 32, 32)
    scales = (blocks.abs().amax(-1) / 7).half()
    codes = ((blocks / scales.float()[..., None]).round().clamp(-8, 7) + 8).to(torch.uint8)
    exact = ((codes.float() - 8) * scales.float()[..., None]).reshape(n, k)
    nibbles = codes[..., :16] | codes[..., 16:] << 4  # low nibble k, high nibble k + 16
    raw = torch.cat([scales.view(torch.uint8).reshape(n, k // 32, 2), nibbles], -1).contiguous()

    def make(xs: Mapping[str, Tensor]) -> Call:
        x = xs["float32"]
        holder, work = (init(Parameters(1 << 20, None, True)) for _ in range(2))
        w = new_2d(holder, 2, k, n)  # 2: Q4_0
        in_buffer(holder, interleaved())
        write(w, raw.data_ptr(), 0, raw.nbytes)
        given = new_2d(work, 0, k, x.shape[0])
        y = product(work, w, given)
        graph = new_graph(work)
        expand(graph, y)
        on_backend(work, backend)
        write(given, x.data_ptr(), 0, x.nbytes)
        out = torch.empty(x.shape[0], n)
        seen = [False]

        def call() -> Tensor:
            if compute(backend, graph):
                raise RuntimeError("ggml_backend_graph_compute failed")
            if not seen[0]:
                fetch(y, out.data_ptr(), 0, out.nbytes)
                seen[0] = True
            return out

        return call

    facts = {"peer": "ggml", "version": variant, "group": 32, "x_dtype": "float32"}
    return Entry(f"ggml Q4_0 {variant}", facts, raw.nbytes, make, exact)


PEERS: dict[str, Peer] = {
    "float32": Peer(partial(_dense, "float32")),
    "bfloat16": Peer(partial(_dense, "bfloat16")),
    "float16": Peer(partial(_dense, "float16")),
    "int4pack": Peer(lambda weight, group, threads: int4pack(quantize(weight, 4, group))),
    "onednn": Peer(partial(_dynamic_int8, "onednn")),
    "fbgemm": Peer(partial(_dynamic_int8, "fbgemm")),
    "ort": Peer(_ort, "onnxruntime", "pip install onnx onnxruntime"),
    "openvino": Peer(_openvino, "openvino", "pip install openvino"),
    "ggml": Peer(
        _ggml, "GGML_DIR", "npm pack @node-llama-cpp/linux-x64, unpack it, set GGML_DIR to its bins/linux-x64"
    ),
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
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            print(f"{name} is left out: {reason}", file=sys.stderr)


def main(argv: Sequence[str] | None = None) -> int:
    """`bench layers` with every peer; the same options."""
    from lowbit.bench import layers

    return layers.main(argv, prog="lowbit bench peers", default_peers=list(PEERS))
