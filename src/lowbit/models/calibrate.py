"""Quantize a model block by block: run, measure, quantize, replace, run on.

The inputs of a block are the outputs of the blocks before it *as quantized*. Only one block's statistics exist at a
time, linears that read one tensor share one Hessian, and nothing records gradients. The weights of a block may come
from a file and be let go again (``present``); then results are kept in the work directory alone.
"""

from __future__ import annotations

import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ..quantize import BLOCK, InputStats, Method, Options, Recipe, Row, Scales, effective, quantize_linears, scheme_for
from ..types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme
from .blocks import Block, check_widths, evaluating, find_blocks
from .calibration_inputs import TOKENS, WINDOW, Batch, Calibration, digest, read_calibration
from .collect import collect
from .memory import estimate, free_on, open_solvers, told, workers_that_fit
from .overrides import activations_of
from .recipes import recipe_for
from .report import Progress, Report, reporter
from .resume import Finished, Stored, WorkDirectory, weights_digest
from .walk import Present, Trace, Walk


def quantize_model(
    model: nn.Module,
    scheme: Scheme | str,
    method: Method = "gptq",
    calibration: Calibration | None = None,
    tokenizer: Any = None,
    *,
    channel_scales: bool = True,
    skip: Sequence[str] = ("lm_head",),
    blocks: str | None = None,
    tokens: int = TOKENS,
    window: int = WINDOW,
    batch_tokens: int = 2048,
    act_order: bool = True,
    clip: bool = True,
    damp: float = 0.01,
    scales: Scales = "group",
    rank: int = 16,
    recipe: Recipe = "default",
    hadamard: bool = True,
    overrides: Mapping[str, str | Activation] | None = None,
    inputs: Literal["quantized", "float"] = "quantized",
    missing: Literal["rtn", "error"] = "rtn",
    resume_dir: str | Path | None = None,
    progress: Progress = True,
    seed: int = 0,
    present: Present | None = None,
) -> tuple[Mapping[str, QuantizedWeight], Report]:
    """Quantize every nn.Linear of the model's blocks (less ``skip``) to 4 or 8 bits; names are the model's dotted names.

    The weights of the model are REPLACED in place by what the quantized ones stand for (in the model's dtype): it then
    computes as the quantized model does with float activations. Linears outside the block list are left alone.

    ``blocks`` is the dotted path of the block list, or of several with commas between them
    ("encoder.layers,decoder.layers"); the model's own calls decide which comes first; None takes the family's
    (recipes.py). ``calibration``: see ``read_calibration``; None is accepted with method "rtn" alone, which then has no
    channel scales. ``inputs``: a block is measured on what the blocks before it give as "quantized" (two passes a block), or as
    they were in "float" (one pass, so about two thirds of the time). ``missing`` says what becomes of a linear that saw
    no token: "rtn" rounds it to nearest with a warning, "error" refuses.
    Method "svdquant" alone looks at ``rank`` (0, 16, 32, 64), ``recipe`` and ``hadamard``; see quantize/svdquant.py.
    ``scales`` "two-level" and "channel" are for INT8 tensor cores. ``overrides`` {name: "a4", "a8", "a8-token" or
    "a16"} chooses the activations of some linears (whole dotted names, beginnings or ends; the last match counts).
    ``resume_dir`` keeps finished blocks; a rerun from the same original model and settings ends in the same bytes.
    ``progress``: True draws a bar with an estimate, or a function (done, total, label).
    On a CUDA device the memory that is needed is worked out first (memory.py) and printed beside the bar.
    ``present`` (block) is a context in which the weights of a block are in memory, elsewhere they may be on meta; what
    comes back then reads one block at a time from ``resume_dir``, which it needs.

    FormatError, before any work: a width that the group size does not divide (all such layers are named), an empty
    calibration, an unknown scheme or method, a CUDA device whose memory cannot hold the work. Later: non-finite activations, with layer and sample.
    """
    started = time.monotonic()
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise FormatError(f"scheme: found {scheme!r}, accepted are {', '.join(SCHEMES)}")
        scheme = SCHEMES[scheme]
    options = Options(method, channel_scales, act_order, clip, damp, scales, rank, recipe, hadamard)
    scheme_for(scheme, scales)
    if missing not in ("rtn", "error"):
        raise FormatError(f"missing: found {missing!r}, accepted are rtn, error")
    if inputs not in ("quantized", "float"):
        raise FormatError(f"inputs: found {inputs!r}, accepted are quantized, float")
    path = blocks or recipe_for(model).blocks
    plan = find_blocks(model, path, skip)
    rotates = method == "svdquant" and recipe == "default" and hadamard
    check_widths(plan, scheme_for(scheme, scales), BLOCK if rotates else 0)
    chosen = activations_of([name for block in plan for name in block.linears], overrides or {})
    report = Report(scheme, method)
    if calibration is None:
        if method != "rtn":
            raise FormatError(f"calibration: found None, accepted for method {method} is text or inputs")
        batches: list[Batch] = []
    else:
        batches = read_calibration(
            calibration, tokenizer, tokens=tokens, window=window, batch_tokens=batch_tokens, seed=seed
        )
        report.calibration_tokens = sum(b.tokens for b in batches)
    work: WorkDirectory | None = None
    if resume_dir is not None:
        settings = {
            "scheme": asdict(scheme),
            "options": asdict(options),
            "seed": seed,
            "skip": list(skip),
            "blocks": path,
            "activations": chosen,
        }
        work = WorkDirectory(
            resume_dir, {**settings, "calibration": digest(batches), "missing": missing, "inputs": inputs}
        )
    elif present is not None:
        raise FormatError("resume_dir: found None, accepted with weights that stay on disk is a directory for results")

    workers = torch.get_num_threads()
    device = next((p.device for p in model.parameters() if not p.is_meta), torch.device("cpu"))
    if device.type == "cuda":
        need = estimate(
            plan, recipe_for(model).groups if blocks is None else (), report.calibration_tokens, batch_tokens,
            on_disk=present is not None, hessian=method != "rtn",
        )  # fmt: skip
        free = free_on(device)
        workers = workers_that_fit(need, free, workers, device)
        open_solvers(device)
        if progress is True:
            print(
                f"memory on {device}: {need.total(workers) / 1e9:.2f} of {free / 1e9:.2f} GB free ({told(need, workers)})",
                file=sys.stderr,
            )

    finished: Finished = {}
    stored = None if present is None or work is None else Stored(work)
    rows: dict[str, Row] = {}
    biases: dict[str, Tensor | None] = {}
    with torch.no_grad(), evaluating(model), reporter(progress, len(plan)) as tell:
        steps = _steps(Walk(model, [b.module for b in plan], batches, present or nullcontext), len(plan))
        for traces, step, index, last in steps:
            block = plan[index]
            advanced = step is None or last  # nothing comes after the last
            with (present or nullcontext)(block.module):
                if block.linears and not rows.keys() >= block.linears.keys():
                    part = work.load(index, block.linears) if work else None
                    if part is None:
                        before = weights_digest(block.linears) if work else ""
                        early = inputs == "float" and not advanced
                        part = _quantize_block(
                            block, traces, step, scheme, options, chosen, missing, seed, early, workers
                        )
                        advanced = advanced or early
                        if work:
                            work.save(index, before, part)
                    elif inputs == "float" and not advanced:
                        _advance(traces, block, step)
                        advanced = True
                    for name, linear in block.linears.items():
                        rows[name] = part[name][1]
                        biases[name] = None if linear.bias is None else linear.bias.detach().float().cpu().clone()
                    if stored is None:
                        finished |= part
                    else:
                        stored.add(index, block.linears)
                    _put(block, part)
                    tell(block.name)
                elif stored is not None and block.linears:  # a block that comes again, read again from its file
                    _put(block, stored.block(index))
                if not advanced:
                    _advance(traces, block, step)
    report.rows += [rows[name] for block in plan for name in block.linears]
    report.seconds = time.monotonic() - started
    if stored is not None:
        return stored.with_biases(biases), report
    order = [name for block in plan for name in block.linears]
    return {name: finished[name][0].with_(bias=biases[name]) for name in order}, report


def _put(block: Block, part: Finished) -> None:
    """Replace the weights of a block by what the quantized ones stand for."""
    for name, linear in block.linears.items():
        linear.weight.copy_(effective(part[name][0].to(linear.weight.device)))


def _steps(walk: Walk, blocks: int) -> Iterator[tuple[list[Trace], int | None, int, bool]]:
    """(traces, step, block, whether it is the last call) in the order the model calls them, then step None for blocks
    that it never calls. Every trace must be advanced at each step but the last."""
    called: set[int] = set()
    traces: list[Trace] = []
    while (run := walk.next_run()) is not None:
        traces, length = run.traces, 0
        for step, index in enumerate(run.order):
            called.add(index)
            length = step + 1
            yield traces, step, index, not run.more and length == len(run.order)
            if any(trace.diverged for trace in traces):
                break
        walk.close(run, length)
    yield from ((traces, None, index, False) for index in range(blocks) if index not in called)


def _advance(traces: list[Trace], block: Block, step: int | None) -> None:
    for trace in traces:
        trace.advance(block.module, step or 0)


def _quantize_block(
    block: Block,
    traces: list[Trace],
    step: int | None,
    scheme: Scheme,
    options: Options,
    activations: Mapping[str, Activation],
    missing: str,
    seed: int,
    advance: bool,
    workers: int,
) -> Finished:
    """All linears of a block, of ``workers`` inputs at a time. Without traces (no calibration) they are rounded to nearest."""
    measured: list[tuple[list[str], InputStats | None]] = [([name], None) for name in block.linears]
    if step is not None:
        hessian = options.method != "rtn"
        measured = [*collect(block.module, block.linears, traces, step, hessian=hessian, seed=seed, advance=advance)]
    jobs: list[tuple[list[str], InputStats | None]] = []
    for names, stats in measured:
        if traces and (stats is None or stats.tokens == 0):
            told = f"{', '.join(names)}: saw no token in calibration"
            if missing == "error":
                raise FormatError(f"{told}; accepted is at least 1, or missing='rtn'")
            how = "quantized for white inputs" if options.method == "svdquant" else "rounded to nearest"
            warnings.warn(f"{told}: {how}", stacklevel=4)
            stats = stats or InputStats(block.linears[names[0]].in_features, hessian=False)
        jobs.append((names, stats))

    def solve(job: tuple[list[str], InputStats | None]) -> Finished:
        try:
            with torch.no_grad():
                torch.set_num_threads(1)
                own = {n: activations[n] for n in job[0] if n in activations}
                return quantize_linears({n: block.linears[n].weight for n in job[0]}, job[1], scheme, options, own)
        except FormatError as error:
            raise FormatError(f"{', '.join(job[0])}: {error}") from error

    # Many small steps: one thread a job, widest first, beats threads inside a step. Bytes do not depend on the count.
    threads = torch.get_num_threads()
    jobs.sort(key=lambda job: -block.linears[job[0][0]].in_features)
    try:
        with ThreadPoolExecutor(min(workers, max(len(jobs), 1))) as pool:
            done = {name: found for part in pool.map(solve, jobs) for name, found in part.items()}
    finally:
        torch.set_num_threads(threads)
    return {name: done[name] for name in block.linears}
