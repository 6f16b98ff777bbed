"""Peers of `peers.py` that are not torch: each builds the same layer in its own runtime, or raises."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.entry import Call, Entry, quantize, two_a_byte, zero_points
from lowbit.formats import FORMATS
from lowbit.reference import dequantize

# -- ONNX Runtime -----------------------------------------------------------------------------------------------------


def ort(weight: Tensor, group: int, threads: int) -> Entry:
    """MatMulNBits at accuracy level 4: int8 activations in blocks of ``group`` (16, 32, 64, 128 or 256)."""
    import numpy as np
    import onnx
    import onnxruntime as ort

    q = quantize(weight, 4, group)
    n, k = weight.shape
    initializers = {
        "B": two_a_byte(q.codes.reshape(n, k // group, group)).numpy(),
        "S": q.scales.float().reshape(-1).numpy(),
        "Z": two_a_byte(zero_points(q)).reshape(-1).numpy(),
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


def openvino(weight: Tensor, group: int, threads: int) -> Entry:
    """A product with 4-bit constants that the CPU plugin keeps compressed; activations int8 in blocks of ``group``."""
    import numpy as np
    import openvino as ov
    from openvino import opset13 as op

    q = quantize(weight, 4, group)
    n, k = weight.shape
    codes = two_a_byte(q.codes.reshape(n, k // group, group)).numpy().copy()
    zeros = two_a_byte(zero_points(q).reshape(-1)).numpy().copy()
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


_KEPT: list[Any] = []  # what C code may still call

# -- ggml -------------------------------------------------------------------------------------------------------------


def ggml(weight: Tensor, group: int, threads: int) -> Entry:
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

    log = ctypes.CFUNCTYPE(None, whole, ctypes.c_char_p, pointer)
    _KEPT.append(log(lambda level, text, data: None))  # it names every tensor otherwise
    bind(base, "ggml_log_set", None, log, pointer)(_KEPT[-1], None)
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


# -- GPTQModel --------------------------------------------------------------------------------------------------------

# Its 4-bit kernels for a CPU as its own loader would take them, best first: module of nn_modules.qlinear, class.
_GPTQMODEL = (("torch_cpu_avx512", "TorchCpuAvx512Linear"), ("torch_aten_kernel", "TorchAtenLinear"))


def gptqmodel(weight: Tensor, group: int, threads: int) -> Entry:
    """The first of its 4-bit kernels that runs here: bfloat16 activations, codes as in the checkpoint."""
    os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")
    package = import_module("gptqmodel")
    q = quantize(weight, 4, group)
    tensors = FORMATS["gptq_v2"].write(q, "layer")
    refused: list[str] = []
    for module, name in _GPTQMODEL:
        kind: Any = getattr(import_module(f"gptqmodel.nn_modules.qlinear.{module}"), name)
        runs, why = kind.validate_once()
        if runs:
            break
        refused.append(f"{name}: {why}")
    else:
        raise RuntimeError("; ".join(refused))

    def make(xs: Mapping[str, Tensor]) -> Call:
        layer = kind(
            bits=4, group_size=group, sym=False, desc_act=False, in_features=q.k, out_features=q.n, bias=False,
            pack_dtype=torch.int32, register_buffers=True,
        )  # fmt: skip
        layer.load_state_dict({name.removeprefix("layer."): tensor.clone() for name, tensor in tensors.items()})
        layer.scales = layer.scales.bfloat16()
        layer.qzero_format(format=2)
        layer.eval()
        layer.post_init()
        x = xs["bfloat16"]
        return lambda: layer(x)

    size = sum(tensor.nbytes for name, tensor in tensors.items() if "g_idx" not in name)
    facts = {"peer": "gptqmodel", "version": package.__version__, "group": group, "x_dtype": "bfloat16"}
    return Entry(f"gptqmodel {kind.__name__}", facts, size, make, dequantize(q))
