"""The engines that ``lowbit bench rtf`` sets side by side. Each is a twin of one model: equal weights, held once."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from types import MethodType
from typing import Any, NamedTuple

import torch

from lowbit.bench.rtf_model import twin
from lowbit.omnivoice import accelerate, restore
from lowbit.types import FormatError


class Settings(NamedTuple):
    """What engines are made with. ``weights``: {engine: a checkpoint}; without one the live weights are rounded."""

    device: torch.device
    weights: Mapping[str, str] = {}
    buckets: tuple[int, ...] | str | None = None
    progress: bool = False


class Kind(NamedTuple):
    """``make(model, name, settings)`` gives an instance whose ``generate`` is the engine, or raises with the reason."""

    what: str
    make: Callable[[Any, str, Settings], Any]
    ours: bool = False


class Replay:
    """A model's own forward, padded as it comes, one CUDA graph for every shape, captured when the shape is first seen."""

    def __init__(self, model: Any) -> None:
        self._forward = MethodType(type(model).forward, model)
        self._known: dict[tuple[int, ...], tuple[list[torch.Tensor], Any, Any]] = {}
        self._seen: dict[tuple[int, ...], tuple[Any, Any]] = {}
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, input_ids: Any, audio_mask: Any, attention_mask: Any) -> Any:
        shape = tuple(input_ids.shape)
        if shape not in self._known:
            self._known[shape] = self._capture([t.clone() for t in (input_ids, audio_mask, attention_mask)])
        buffers, graph, out = self._known[shape]
        buffers[0].copy_(input_ids)
        masks = (audio_mask, attention_mask)
        if any(a is not b for a, b in zip(self._seen.get(shape, (None, None)), masks)):  # the same all through a loop
            buffers[1].copy_(audio_mask)
            buffers[2].copy_(attention_mask)
            self._seen[shape] = masks
        graph.replay()
        return out

    def _capture(self, buffers: list[torch.Tensor]) -> tuple[list[torch.Tensor], Any, Any]:
        def call() -> Any:
            return self._forward(input_ids=buffers[0], audio_mask=buffers[1], attention_mask=buffers[2])

        graph, out = captured(call, self._pool)
        return buffers, graph, out


def captured(call: Callable[[], Any], pool: Any = None) -> tuple[Any, Any]:
    """(a CUDA graph of ``call``, what it gives), after two calls to warm up."""
    side = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        call()
        call()
    side.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=pool, stream=side):
        out = call()
    torch.cuda.current_stream().wait_stream(side)
    return graph, out


def _stock(model: Any, name: str, settings: Settings) -> Any:
    return twin(model)


def _stock_graph(model: Any, name: str, settings: Settings) -> Any:
    if settings.device.type != "cuda":
        raise FormatError("CUDA graphs need a CUDA device")
    found = twin(model)
    found.__dict__["forward"] = Replay(found)
    return found


def _float(model: Any, name: str, settings: Settings) -> Any:
    return accelerate(twin(model), buckets=settings.buckets, progress=settings.progress)


def _integer(model: Any, name: str, settings: Settings) -> Any:
    return accelerate(
        twin(model), settings.weights.get(name), name, buckets=settings.buckets, progress=settings.progress
    )


def _flashinfer(model: Any, name: str, settings: Settings) -> Any:
    try:
        from omnivoice.models.omnivoice_flashinfer import apply_flashinfer
    except ImportError as error:
        raise FormatError(f"this omnivoice has no apply_flashinfer, or flashinfer is missing ({error})") from error
    found = copy.deepcopy(model)  # it changes modules, which twins share
    return apply_flashinfer(found, enable_cuda_graph=settings.device.type == "cuda")


ENGINES: dict[str, Kind] = {
    "stock": Kind("OmniVoice as it is, eager, padded", _stock),
    "stock-graph": Kind("its forward, padded, replayed by a CUDA graph a shape", _stock_graph),
    "fp16": Kind("lowbit packed, the model's own dtype", _float, ours=True),
    "w8a8": Kind("lowbit packed, 8-bit weights and activations", _integer, ours=True),
    "w4a8": Kind("lowbit packed, 4-bit weights, 8-bit activations", _integer, ours=True),
    "w4a4": Kind(
        "lowbit packed, 4-bit weights; 4-bit activations where the chip has INT4, else 8", _integer, ours=True
    ),
    "flashinfer": Kind("upstream's apply_flashinfer with CUDA graphs", _flashinfer),
}
DEFAULT = ("stock", "stock-graph", "fp16", "w8a8", "w4a8", "w4a4", "flashinfer")


def order(names: list[str]) -> list[str]:
    """``fp16`` is made before the others of ours: it lays sibling weights side by side, which they would take for a change."""
    return sorted(names, key=lambda name: (name != "stock", name != "fp16", list(ENGINES).index(name)))


def close(models: Mapping[str, Any]) -> None:
    """Give the weights back as they were, the last made first."""
    for model in reversed(list(models.values())):
        restore(model)


def one_line(error: BaseException) -> str:
    """Why an engine is not there."""
    text = " ".join(str(error).split())[:200]
    return text if isinstance(error, FormatError) else f"{type(error).__name__}: {text}"
