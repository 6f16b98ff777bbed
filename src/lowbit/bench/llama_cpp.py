"""llama.cpp through the C interface of libllama, for ``lowbit bench models``."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from lowbit.bench.engine import Engine, Job


class _Parameters(ctypes.Structure):
    """Any of llama.h's parameter structs, of which only leading words are touched."""

    _fields_ = (("word", ctypes.c_uint32 * 128),)


class _Batch(ctypes.Structure):
    _fields_ = (("count", ctypes.c_int32), ("pointers", ctypes.c_void_p * 6))


class _Llama:
    """libllama of one folder; ``self(name, result, arguments)`` is a function of it."""

    def __init__(self, folder: str) -> None:
        found = sorted(Path(folder).glob("libllama.*"))
        if not found:
            raise FileNotFoundError(f"no libllama in {folder}")
        ctypes.CDLL(str(Path(folder) / "libggml-base.so"), mode=ctypes.RTLD_GLOBAL)
        ggml = ctypes.CDLL(str(next(Path(folder).glob("libggml.*"))), mode=ctypes.RTLD_GLOBAL)
        self._library = ctypes.CDLL(str(found[0]), mode=ctypes.RTLD_GLOBAL)
        log = ctypes.CFUNCTYPE(None, ctypes.c_int, ctypes.c_char_p, ctypes.c_void_p)
        self._silence = log(lambda level, text, data: None)
        self("llama_log_set", None, log, ctypes.c_void_p)(self._silence, None)
        ggml.ggml_backend_load_all_from_path(folder.encode())  # takes the best tier of this CPU
        self("llama_backend_init", None)()
        self.version = found[0].name.removeprefix("libllama.").removesuffix("so").strip(".") or "?"

    def __call__(self, name: str, result: Any, *arguments: Any) -> Callable[..., Any]:
        function = getattr(self._library, name)
        function.restype, function.argtypes = result, list(arguments)
        bound: Callable[..., Any] = function
        return bound

    def defaults(self, kind: str) -> _Parameters:
        found: _Parameters = self(f"llama_{kind}_default_params", _Parameters)()
        return found


def requantize(folder: str, source: str, target: str) -> None:
    """A GGUF file as Q4_0, its embedding (and so a tied head) in Q8_0."""
    llama = _Llama(folder)
    chosen = llama.defaults("model_quantize")
    chosen.word[1], chosen.word[3] = 2, 8  # file type Q4_0, embedding Q8_0
    chosen.word[4] |= 1  # allow_requantize
    run = llama("llama_model_quantize", ctypes.c_uint32, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
    if run(source.encode(), target.encode(), ctypes.addressof(chosen)):
        raise RuntimeError(f"llama_model_quantize refused {source}")


class Ggml(Engine):
    """llama.cpp through its C interface."""

    def __init__(self, job: Job) -> None:
        import numpy

        self._view = numpy.ctypeslib.as_array
        llama = _Llama(job["ggml"])
        self.version, self.weight_bytes = llama.version, Path(job["gguf"]).stat().st_size
        pointer, whole, floats = ctypes.c_void_p, ctypes.c_int, ctypes.POINTER(ctypes.c_float)
        load = llama("llama_model_load_from_file", pointer, ctypes.c_char_p, _Parameters)
        model = load(str(job["gguf"]).encode(), llama.defaults("model"))
        if not model:
            raise RuntimeError(f"llama.cpp cannot read {job['gguf']}")
        chosen = llama.defaults("context")
        if (chosen.word[0], chosen.word[7], chosen.word[8]) != (512, 4, 4):
            raise RuntimeError(
                "llama_context_params is laid out otherwise than in v0.5.0: look up n_threads in llama.h"
            )
        longest = max(len(job["short"]) + job["steps"] + 1, len(job["long"]))
        chosen.word[0] = -(-longest // 256) * 256  # n_ctx
        chosen.word[7] = chosen.word[8] = job["threads"]
        self._context = llama("llama_init_from_model", pointer, pointer, _Parameters)(model, chosen)
        assert llama("llama_n_threads", whole, pointer)(self._context) == job["threads"]
        vocabulary = llama("llama_model_get_vocab", pointer, pointer)(model)
        self._size = llama("llama_vocab_n_tokens", whole, pointer)(vocabulary)
        self._memory = llama("llama_get_memory", pointer, pointer)(self._context)
        self._clear = llama("llama_memory_clear", None, pointer, ctypes.c_bool)
        self._batch = llama("llama_batch_get_one", _Batch, pointer, whole)
        self._decode = llama("llama_decode", whole, pointer, _Batch)
        self._logits = llama("llama_get_logits_ith", floats, pointer, whole)
        self._ids = (ctypes.c_int32 * longest)()

    def prefill(self, ids: Sequence[int]) -> int:
        self._clear(self._memory, True)
        return self._run(ids)

    def step(self, token: int) -> int:
        return self._run([token])

    def _run(self, ids: Sequence[int]) -> int:
        self._ids[: len(ids)] = list(ids)
        if self._decode(self._context, self._batch(ctypes.addressof(self._ids), len(ids))):
            raise RuntimeError("llama_decode failed")
        self._last = self._view(self._logits(self._context, -1), (self._size,))
        return int(self._last.argmax())
