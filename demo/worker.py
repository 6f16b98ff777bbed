"""One process that holds one model. Reads a JSON command a line, answers JSON lines: {"progress": [done, total, what]} …
and last {"result": ...}. A process of its own so that memory is that model's alone; the demo lets several take turns.
"""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRANSFORMERS_VERBOSITY", "error")
os.environ.setdefault("HF_HUB_DISABLE_PROGRESS_BARS", "1")

import torch
from torch import Tensor
from torch.nn import functional
from torch.overrides import TorchFunctionMode

import lowbit


class Bfloat16ByFloat32(TorchFunctionMode):
    """bfloat16 linears on a CPU without bfloat16 instructions: float32 products of the bfloat16 values, rounded once.

    What such instructions compute, up to the order of the float32 sums. torch's own fallback is several times slower and
    sums in another order: perplexity 20.08 against 20.03 here on 511 wiki tokens. Never used where time is measured.
    """

    def __init__(self) -> None:
        super().__init__()
        self.wide: dict[int, Tensor] = {}

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is functional.linear and not kwargs and args[1].dtype == torch.bfloat16:
            x, weight, bias = (*args, None)[:3]
            if id(weight) not in self.wide:
                self.wide[id(weight)] = weight.float()
            y = functional.linear(x.float(), self.wide[id(weight)], None if bias is None else bias.float())
            return y.bfloat16()
        return func(*args, **(kwargs or {}))


class Worker:
    """The commands, as methods; `tell(done, total, what)` reports progress."""

    def __init__(self, tell: Callable[[int, int, str], None]) -> None:
        self.tell = tell
        self.model: Any = None
        self.tokenizer: Any = None

    def quantize(self, source: str, out: str, text: str, tokens: int, scheme: str, method: str) -> dict[str, Any]:
        """Quantize the model in `source`, calibrated on a text file, and save it. The float weights are not kept."""
        from transformers import AutoTokenizer

        model = lowbit.load(source)
        report = lowbit.quantize(
            model,
            scheme,
            method,
            text if method != "rtn" else None,
            tokenizer=AutoTokenizer.from_pretrained(source),
            group_size=64,
            symmetric=True,
            rank=0,  # smoothing and Hadamard, no low rank
            tokens=tokens,
            progress=self.tell,
        )
        lowbit.save(model, out, dtype=torch.float16)
        layers = [{"name": r.name, "error": r.error_after, "rtn_error": r.error_before} for r in report.rows]
        return {"seconds": report.seconds, "layers": layers}

    def load(self, path: str, dtype: str | None) -> dict[str, Any]:
        """Load (with lowbit, or with transformers where a dtype is named), run a few tokens, and say what it takes."""
        from transformers import AutoModelForCausalLM, AutoTokenizer

        import lowbit.nn  # noqa: F401  (imports are not the model's memory)

        self.tokenizer = AutoTokenizer.from_pretrained(path)
        AutoModelForCausalLM._model_mapping  # noqa: B018
        torch.ones(256, 256) @ torch.ones(256, 256)
        before = resident()
        if dtype is None:
            self.model = lowbit.load(path)
        else:
            self.model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype)).eval()
        self.decode(list(range(100, 132)), 8)
        after = resident()
        disk = sum(file.stat().st_size for file in Path(path).glob("*.safetensors"))
        quantized = [m for m in self.model.modules() if isinstance(m, lowbit.QuantLinear)]
        return {
            "disk": disk,
            "anonymous": after["RssAnon"] - before["RssAnon"],
            "resident": sum(after.values()) - sum(before.values()),
            "quantized": len(quantized),
            "kernel": kernel_of(quantized),
        }

    def decode(self, prompt: list[int], new: int) -> Any:
        from lowbit.engines.decode import decode

        return decode(self.model, prompt, new, stop=())

    def speed(self, prompt: list[int], decoded: int) -> dict[str, float]:
        """Tokens/s of one prefill of the prompt, and of decoding after its first 32 tokens."""
        prefill = self.decode(prompt, 1).prefill_rate
        return {"prefill": prefill, "decode": self.decode(prompt[:32], decoded).decode_rate}

    def perplexity(self, ids: list[int], context: int, by_float32: bool) -> dict[str, Any]:
        from lowbit.prove.compare import perplexity

        def run() -> Any:
            return perplexity(
                self.model, ids, context=context, progress=lambda done, total: self.tell(done, total, "windows")
            )

        if not by_float32:
            return dict(run()._asdict())
        with Bfloat16ByFloat32():
            return dict(run()._asdict())

    def generate(self, prompt: str, new: int) -> dict[str, Any]:
        from lowbit.engines.decode import decode, encode

        ids = encode(self.tokenizer, prompt, chat=True)
        return {"text": self.tokenizer.decode(decode(self.model, ids, new).tokens, skip_special_tokens=True)}


def kernel_of(quantized: list[Any]) -> str:
    """Kernel and tier of the quantized layers, as they say themselves; more than one is said too."""
    found = {f"{facts['kernel']} {facts['tier']}" for facts in (layer.explain() for layer in quantized)}
    return ", ".join(sorted(found)) if found else "torch"


def resident() -> dict[str, int]:
    """Bytes of this process in memory: anonymous, and mapped from files."""
    status = Path("/proc/self/status").read_text()
    return {key: 1024 * int(re.search(rf"{key}:\s+(\d+)", status)[1]) for key in ("RssAnon", "RssFile", "RssShmem")}  # type: ignore[index]


def main() -> None:
    torch.set_num_threads(int(sys.argv[1]))
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is not an answer

    def answer(**line: Any) -> None:
        print(json.dumps(line), file=answers, flush=True)

    worker = Worker(lambda done, total, what: answer(progress=[done, total, what]))
    for line in sys.stdin:
        command = json.loads(line)
        answer(result=getattr(worker, command.pop("do"))(**command))


if __name__ == "__main__":
    main()
