"""The peers of ``lowbit bench models``: one model in each runtime, and the lines that install them."""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from lowbit.bench.engine import Engine, Job
from lowbit.bench.llama_cpp import Ggml

# -- on torch ---------------------------------------------------------------------------------------------------------


class Native(Engine):
    """lowbit's own decoder with its 8-bit head."""

    def __init__(self, job: Job) -> None:
        import lowbit
        from lowbit.engines.decode import load_model
        from lowbit.engines.llama import Decoder

        self._model = load_model(job["model"])
        self._decoder = Decoder.from_model(self._model, head="w8a8")
        self._state = self._decoder.start(max(len(job["short"]) + job["steps"] + 1, len(job["long"])))
        self.version = lowbit.__version__
        self.weight_bytes = _held(self._model, self._decoder.head)

    def prefill(self, ids: Sequence[int]) -> int:
        self._state.length = 0
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> int:
        self._last = self._state.feed(ids)[0].numpy()
        return int(self._last.argmax())


class Transformers(Engine):
    """The model's own forward, eager, with a growing cache: the linears of ``lowbit.load``, or torch's in ``dtype``."""

    def __init__(self, dtype: str, job: Job) -> None:
        import torch
        import transformers

        torch.set_grad_enabled(False)
        self.version = transformers.__version__
        if dtype:
            made: Any = transformers.AutoModelForCausalLM
            self._model = made.from_pretrained(job["source"], dtype=getattr(torch, dtype)).eval()
        else:
            import lowbit

            self._model = lowbit.load(job["model"])
        takes = inspect.signature(type(self._model).forward).parameters
        self._slot = "cache" if "cache" in takes else "past_key_values"
        self._tensor = torch.tensor
        self.weight_bytes = _held(self._model)

    def prefill(self, ids: Sequence[int]) -> int:
        self._cache = None
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> int:
        given = {"input_ids": self._tensor([list(ids)]), "use_cache": True, "logits_to_keep": 1}
        out = self._model(**given, **{self._slot: self._cache})
        self._cache = getattr(out, self._slot)
        self._last = out.logits[0, -1].float().numpy()
        return int(self._last.argmax())


def _held(*modules: Any) -> int:
    """Bytes of all parameters and buffers, shared ones once."""
    tensors = [t for module in modules for t in (*module.parameters(), *module.buffers())]
    return sum({(t.data_ptr(), t.nbytes): t.nbytes for t in tensors}.values())


# -- generators of other runtimes -------------------------------------------------------------------------------------


class Ort(Engine):
    """onnxruntime-genai; it picks the tokens itself."""

    def __init__(self, job: Job) -> None:
        import numpy
        import onnxruntime_genai as genai

        self._array, self._genai, self.version = numpy.array, genai, genai.__version__
        self._more = job["steps"] + 2
        chosen = genai.Config(str(job["ort"]))
        options = {"intra_op_num_threads": job["threads"]}
        chosen.overlay(json.dumps({"model": {"decoder": {"session_options": options}}}))
        self._model = genai.Model(chosen)
        config = json.loads((Path(job["ort"]) / "genai_config.json").read_text("utf-8"))
        self._vocabulary = config["model"]["vocab_size"]
        self.weight_bytes = sum(file.stat().st_size for file in Path(job["ort"]).glob("*.onnx*"))

    def prefill(self, ids: Sequence[int]) -> int:
        chosen, length = self._genai.GeneratorParams(self._model), len(ids) + self._more
        chosen.set_search_options(max_length=length, min_length=length, do_sample=False)
        self._generator = self._genai.Generator(self._model, chosen)
        self._generator.append_tokens(self._array([list(ids)], "int32"))
        return self.step(0)

    def step(self, token: int) -> int:
        self._generator.generate_next_token()
        return int(self._generator.get_next_tokens()[0])

    def logits(self) -> Any:
        """Of the last step that ran: after one token that is the prompt."""
        return self._generator.get_output("logits").reshape(-1, self._vocabulary)[-1].astype("float32")


class OpenVino(Engine):
    """openvino_genai.LLMPipeline: whole generations, whose token times it keeps itself."""

    def __init__(self, job: Job) -> None:
        import numpy
        import openvino
        import openvino_genai as genai

        self._array, self._tensor, self._genai = numpy.array, openvino.Tensor, genai
        self.version = openvino.__version__.split("-")[0]
        chosen = genai.SchedulerConfig()
        chosen.enable_prefix_caching = False  # else the second prefill of a prompt is free
        options = {"INFERENCE_NUM_THREADS": job["threads"], "scheduler_config": chosen}
        self._pipeline = genai.LLMPipeline(str(job["ov"]), "CPU", **options)
        self.weight_bytes = sum(file.stat().st_size for file in Path(job["ov"]).glob("openvino_model.bin"))

    def generate(self, ids: Sequence[int], count: int) -> tuple[list[int], list[float]]:
        chosen = self._genai.GenerationConfig()
        chosen.max_new_tokens, chosen.ignore_eos, chosen.do_sample = count, True, False
        chosen.apply_chat_template = False
        began = time.perf_counter()
        result = self._pipeline.generate(self._tensor(self._array([list(ids)], "int64")), chosen)
        spent = time.perf_counter() - began
        clock = [1e-3 * moment for moment in result.perf_metrics.raw_metrics.m_new_token_times]
        return list(result.tokens[0]), [spent - (clock[-1] - moment) for moment in clock]


# -- the rows ---------------------------------------------------------------------------------------------------------


class Row(NamedTuple):
    """``path``: the option that names its model; ``torch``: whether its memory is counted above torch."""

    name: str
    make: Callable[[Job], Engine]
    path: str
    install: str
    torch: bool = True


_SMALL = "pip install transformers"
_LLAMA = "npm pack @node-llama-cpp/linux-x64, unpack it, set GGML_DIR to its bins/linux-x64, pass --gguf FILE"
_ORT = (
    "pip install onnxruntime-genai onnx-ir, python -m onnxruntime_genai.models.builder -i HF_DIR -o ORT_DIR -p int4 "
    "-e cpu --extra_options int4_accuracy_level=4 int4_block_size=32, pass --ort ORT_DIR"
)
_OPENVINO = (
    "pip install openvino-genai, optimum-cli export openvino -m HF_DIR --task text-generation-with-past "
    "--weight-format int4 --sym --group-size 64 --ratio 1.0 OV_DIR (of optimum-intel), pass --ov OV_DIR"
)
PEERS = {
    "native": Row("lowbit native", Native, "model", "lowbit quantize HF_DIR DIR --scheme w4a8, pass --model DIR"),
    "transformers": Row("lowbit in transformers", partial(Transformers, ""), "model", f"{_SMALL}, pass --model DIR"),
    "float32": Row("torch float32", partial(Transformers, "float32"), "source", f"{_SMALL}, pass --source HF_DIR"),
    "bfloat16": Row("torch bfloat16", partial(Transformers, "bfloat16"), "source", f"{_SMALL}, pass --source HF_DIR"),
    "ggml": Row("llama.cpp Q4_0", Ggml, "gguf", _LLAMA, False),
    "ort": Row("onnxruntime-genai int4", Ort, "ort", _ORT, False),
    "openvino": Row("openvino-genai int4", OpenVino, "ov", _OPENVINO, False),
}
