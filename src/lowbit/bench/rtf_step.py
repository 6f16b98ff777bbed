"""One decoding step: the 28 layers over M packed rows, engines in turns; milliseconds a call.

M packed rows are one utterance's conditional segment (c rows) and its unconditional one (u rows); stock runs the same
utterance as 2 x c padded rows. "step" is a whole step of ours: embedding, layers, heads, score, reveal.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from lowbit.bench.rtf_engines import captured, one_line
from lowbit.bench.rtf_time import rounds
from lowbit.engines.graphs import BUCKETS
from lowbit.engines.omnivoice import Engine, engine_of
from lowbit.engines.packed import turned
from lowbit.engines.packed_attention import ATTENTIONS, Spans, choose

TARGETS = {172: 75, 685: 250, 1890: 750}  # u of the published cases: 3 s, 5 s + 10 s, 10 s + 30 s
BASELINE = "packed-compile"
WHAT = "packed in plain torch, torch.compile a layer, in a CUDA graph where there is one"
Call = Callable[[], object]


def split(m: int) -> tuple[int, int]:
    """(c, u) of M packed rows."""
    u = TARGETS.get(m, round(0.37 * m))
    return m - u, u


class Packed:
    """The layers of a stack over packed rows, in plain torch: q, k, v side by side, gate and up too, one attention over
    the segments. What a careful user would write without kernels of their own; ``torch.compile`` makes a layer of it."""

    def __init__(self, stack: Any, compile: bool) -> None:
        self.stack = stack
        first = stack.layers[0].self_attn
        self.width = int(first.head_dim)
        self.weights = [
            (
                block.input_layernorm.weight,
                torch.cat([block.self_attn.q_proj.weight, block.self_attn.k_proj.weight, block.self_attn.v_proj.weight]),
                block.self_attn.q_norm.weight, block.self_attn.k_norm.weight, block.self_attn.o_proj.weight,
                block.post_attention_layernorm.weight,
                torch.cat([block.mlp.gate_proj.weight, block.mlp.up_proj.weight]), block.mlp.down_proj.weight,
            )
            for block in stack.layers
        ]  # fmt: skip
        self.heads = first.q_proj.out_features // self.width
        self.kv = first.k_proj.out_features // self.width
        self.eps, self.scale = float(stack.norm.variance_epsilon), float(first.scaling)
        self.layer: Callable[..., Any] = torch.compile(self._layer, dynamic=False) if compile else self._layer

    def _layer(
        self, residual: Tensor, y: Tensor, weights: tuple[Tensor, ...], cosines: Tensor, sines: Tensor, attend: Any
    ) -> tuple[Tensor, Tensor]:
        norm, qkv, q_norm, k_norm, o, post, gate_up, down = weights
        rms, linear = torch.nn.functional.rms_norm, torch.nn.functional.linear
        residual = residual + y
        parts = linear(rms(residual, residual.shape[-1:], norm, self.eps), qkv).view(len(y), -1, self.width)
        q = turned(rms(parts[:, : self.heads], (self.width,), q_norm, self.eps), cosines, sines)
        keys = parts[:, self.heads : self.heads + self.kv]
        k = turned(rms(keys, (self.width,), k_norm, self.eps), cosines, sines)
        residual = residual + linear(attend(q, k, parts[:, self.heads + self.kv :], self.scale).flatten(1), o)
        gate, up = linear(rms(residual, residual.shape[-1:], post, self.eps), gate_up).chunk(2, -1)
        return residual, linear(torch.nn.functional.silu(gate) * up, down)

    def __call__(self, x: Tensor, cosines: Tensor, sines: Tensor, spans: Spans) -> Tensor:
        attend = ATTENTIONS[choose(x.device, x.dtype, self.width, len(x), ours=False)](spans)
        residual, y = x, torch.zeros_like(x)
        for weights in self.weights:
            residual, y = self.layer(residual, y, weights, cosines, sines, attend)
        return torch.nn.functional.rms_norm(residual + y, x.shape[-1:], self.stack.norm.weight, self.eps)


def _replayed(call: Call, device: torch.device) -> Call:
    """A CUDA graph of a call; on a CPU the call itself."""
    if device.type != "cuda":
        return call
    graph, out = captured(call)
    return lambda: (graph.replay(), out, call)  # the graph reads what the call holds


def _packed_inputs(engine: Engine, m: int, size: int) -> tuple[Tensor, Any, Spans]:
    """x, angles and segments of M packed rows, padded to ``size`` as a bucket is: the rest is a segment of its own."""
    (c, u), b = split(m), engine.backbone
    bounds = torch.tensor([0, c, m, size], dtype=torch.int32, device=b.device)
    positions = torch.cat([torch.arange(c), torch.arange(u), torch.arange(size - m)])
    x = torch.randn(size, b.hidden, device=b.device).to(b.dtype)
    return x, b.angles(positions), Spans(bounds, max(c, size - m))


def backbone(engine: Engine, m: int, size: int | None = None) -> Call:
    """Our layers over M rows, or over the bucket of ``size`` that holds them."""
    x, rotation, spans = _packed_inputs(engine, m, size or m)
    return _replayed(lambda: engine.backbone(x, rotation, spans), engine.backbone.device)


def step(engine: Engine, m: int) -> Call:
    """A whole step of ours over M rows."""
    c, u = split(m)
    board = engine.step.board(m, 1, u, 3)
    board.bounds.copy_(torch.tensor([0, c, m, m], dtype=torch.int32))
    board.longest = c
    rows = torch.arange(u)
    board.rows.copy_(torch.stack([c - u + rows, c + rows])[:, None])
    return _replayed(lambda: engine.step(board), engine.backbone.device)


def stock(model: Any, m: int, graph: bool) -> Call:
    """Stock's layers over the same utterance, padded: 2 x c rows behind its mask."""
    (c, u), stack = split(m), model.llm
    where = next(stack.parameters())
    x = torch.randn(2, c, stack.config.hidden_size, device=where.device).to(where.dtype)
    mask = torch.zeros(2, 1, c, c, dtype=torch.bool, device=where.device)
    mask[0], mask[1, :, :u, :u] = True, True
    pad = torch.arange(u, c, device=where.device)
    mask[1, :, pad, pad] = True

    def call() -> object:
        return stack(inputs_embeds=x, attention_mask=mask, return_dict=True)[0]

    return _replayed(call, where.device) if graph else call


def baseline(model: Any, m: int, engine: Engine, known: dict[str, Packed]) -> Call:
    """The packed stack of plain torch, compiled, in a graph."""
    if BASELINE not in known:
        known[BASELINE] = Packed(model.llm, compile=True)
    packed = known[BASELINE]
    x, rotation, spans = _packed_inputs(engine, m, m)
    spans = Spans(spans.bounds[:3], spans.longest)
    cosines, sines = (torch.cat([t, t], -1).to(x.dtype)[:, None] for t in rotation)
    return _replayed(lambda: packed(x, cosines, sines, spans), x.device)


def clock(call: Call, device: torch.device, eager: bool) -> float:
    """Milliseconds a call: on CUDA by events around some, on a CPU of one."""
    if device.type != "cuda":
        began = time.perf_counter()
        call()
        return 1e3 * (time.perf_counter() - began)
    count = 3 if eager else 20
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
    torch.cuda.synchronize(device)
    start.record()
    for _ in range(count):
        call()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / count


def _clock_of(calls: Mapping[str, Call], device: torch.device, key: str) -> float:
    return clock(calls[key], device, key == "stock")


@torch.inference_mode()
def lines(
    models: Mapping[str, Any], sizes: Sequence[int], count: int, device: torch.device, compiled: bool
) -> Iterator[dict[str, Any]]:
    """A line an engine and M, as they are measured: ``ms`` of the layers, ``bucket_ms`` in the bucket that ``generate`` takes, ``step_ms``."""
    known: dict[str, Packed] = {}
    engines = {name: engine_of(model) for name, model in models.items() if not name.startswith(("stock", "flashinfer"))}
    buckets = next((engine.graphs.buckets for engine in engines.values()), BUCKETS)
    for m in sizes:
        calls: dict[str, Call] = {}
        why: dict[str, str] = {}

        def add(key: str, make: Callable[[], Call], calls: dict[str, Call] = calls, why: dict[str, str] = why) -> None:
            try:
                made = make()
                made()  # what fails, fails before the turns
                calls[key] = made
            except Exception as error:
                why[key] = one_line(error)

        bucket = next((size for size in buckets if size >= m), m)
        for name in models:
            if name in ("stock", "stock-graph"):
                add(name, partial(stock, models[name], m, name != "stock"))
        for name, engine in engines.items():
            add(name, partial(backbone, engine, m))
            add(f"{name}/step", partial(step, engine, m))
            if device.type == "cuda":
                add(f"{name}/bucket", partial(backbone, engine, m, bucket))
        if compiled and engines:
            plain = engines.get("fp16") or next(iter(engines.values()))
            add(BASELINE, partial(baseline, plain.model, m, plain, known))
        taken = rounds(list(calls), partial(_clock_of, calls, device), count)
        ms = {key: statistics.median(values) for key, values in taken.items()}
        for name in [*models, *([BASELINE] if compiled and engines else [])]:
            if name in ms or name in why:
                line: dict[str, Any] = {"kind": "step", "engine": name, "m": m, "c": split(m)[0], "u": split(m)[1]}
                line |= {"ms": ms[name], "min_ms": min(taken[name])} if name in ms else {"why": why[name]}
                line |= {
                    k: ms[f"{name}/{p}"]
                    for k, p in (("bucket_ms", "bucket"), ("step_ms", "step"))
                    if f"{name}/{p}" in ms
                }
                yield line | {"bucket": bucket, "rounds": count, "what": WHAT if name == BASELINE else ""}
