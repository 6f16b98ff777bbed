"""Quantize a causal LM of transformers block by block: run, measure, quantize, replace, run on.

The inputs of a block are the outputs of the blocks before it *as quantized*. Only one block's statistics exist at a
time, linears that read one tensor share one Hessian, and nothing records gradients.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import nn
from tqdm import tqdm

from ..quantize import BLOCK, InputStats, Method, Options, Recipe, Row, Scales, effective, quantize_linears, scheme_for
from ..types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme
from .calibration_inputs import TOKENS, WINDOW, Batch, Calibration, digest, read_calibration
from .overrides import activations_of
from .recipes import is_linear, matches, recipe_for
from .resume import Finished, WorkDirectory, weights_digest
from .walk import Trace, capture, collect

if TYPE_CHECKING:
    from .sensitivity import Budget

Progress = bool | Callable[[int, int, str], None]


@dataclass
class Report:
    """What was done: one row per linear, in the order of the model."""

    scheme: Scheme
    method: str
    rows: list[Row] = field(default_factory=list)
    calibration_tokens: int = 0
    seconds: float = 0.0
    budget: Budget | None = None  # where the activations of some linears were chosen by measurement

    def __str__(self) -> str:
        lines = [f"{'layer':44} {'method':12} {'damp':>6} {'tokens':>7} {'rtn err':>8} {'error':>8}  notes"]
        for r in self.rows:
            damp = "-" if r.damping is None else f"{r.damping:g}"
            errors = f"{r.error_before:8.4f} {r.error_after:8.4f}"
            lines.append(f"{r.name:44} {r.method:12} {damp:>6} {r.tokens:7} {errors}  {'; '.join(r.notes)}")
        return "\n".join(lines)

    def to_dict(self) -> dict[str, Any]:
        """The same as JSON takes it."""
        budget = None if self.budget is None else self.budget.to_dict()
        return {**asdict(self), "rows": [r._asdict() for r in self.rows], "budget": budget}


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
) -> tuple[dict[str, QuantizedWeight], Report]:
    """Quantize every nn.Linear of the model's blocks (less ``skip``) to 4 or 8 bits; names are the model's dotted names.

    The weights of the model are REPLACED in place by what the quantized ones stand for (in the model's dtype): it then
    computes as the quantized model does with float activations. Linears outside the block list are left alone.

    ``calibration``: see ``read_calibration``; None is accepted with method "rtn" alone, which then has no channel
    scales. ``inputs``: a block is measured on what the blocks before it give as "quantized" (two passes a block), or as
    they were in "float" (one pass, so about two thirds of the time). ``blocks`` is the dotted path of the block list, else the family's (recipes.py). ``missing`` says what
    becomes of a linear that saw no token: "rtn" rounds it to nearest with a warning, "error" refuses.
    Method "svdquant" alone looks at ``rank`` (0, 16, 32, 64), ``recipe`` and ``hadamard``; see quantize/svdquant.py.
    ``scales`` "two-level" and "channel" are for INT8 tensor cores. ``overrides`` {name: "a4", "a8", "a8-token" or
    "a16"} chooses the activations of some linears (whole dotted names, beginnings or ends; the last match counts).
    ``resume_dir`` keeps finished blocks; a rerun from the same original model and settings ends in the same bytes.
    ``progress``: True draws a bar with an estimate, or a function (done, total, label).

    FormatError, before any work: a width that the group size does not divide (all such layers are named), an empty
    calibration, an unknown scheme or method. Later: non-finite activations, with layer and sample.
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
    rotates = method == "svdquant" and recipe == "default" and hadamard
    plan = _plan(model, path, skip, scheme_for(scheme, scales), BLOCK if rotates else 0)
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

    finished: Finished = {}
    with torch.no_grad(), _evaluating(model), _reporter(progress, len(plan)) as tell:
        traces = capture(model, [b.module for b in plan], batches)
        for step, index in _schedule(traces, len(plan)):
            block = plan[index]
            advanced = step is None or step + 1 == len(traces[0].calls)  # nothing comes after the last
            if block.linears and not finished.keys() >= block.linears.keys():
                part = work.load(index, block.linears) if work else None
                if part is None:
                    before = weights_digest(block.linears) if work else ""
                    early = inputs == "float" and not advanced
                    part = _quantize_block(block, traces, step, scheme, options, chosen, missing, seed, advance=early)
                    advanced = advanced or early
                    if work:
                        work.save(index, before, part)
                elif inputs == "float" and not advanced:
                    _advance(traces, block, step)
                    advanced = True
                for name, linear in block.linears.items():
                    linear.weight.copy_(effective(part[name][0]))
                finished |= part
                tell(block.name)
            if not advanced:
                _advance(traces, block, step)
    result = {}
    for block in plan:
        for name, linear in block.linears.items():
            q, row = finished[name]
            bias = None if linear.bias is None else linear.bias.detach().float().cpu().clone()
            result[name] = q.with_(bias=bias)
            report.rows.append(row)
    report.seconds = time.monotonic() - started
    return result, report


@dataclass(frozen=True)
class _Block:
    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]  # by full dotted name; each module in one block only


def _plan(model: nn.Module, path: str, skip: Sequence[str], scheme: Scheme, hadamard: int) -> list[_Block]:
    """The blocks and their linears; refuses widths that the group or the Hadamard's block does not divide."""
    try:
        container = model.get_submodule(path)
    except AttributeError as error:
        raise FormatError(f"blocks: found no module {path!r} in {type(model).__name__}") from error
    seen: set[int] = set()
    plan: list[_Block] = []
    for index, block in enumerate(container._modules.values()):  # children() would leave out one that comes twice
        assert block is not None
        linears: dict[str, nn.Linear] = {}
        for local, module in block.named_modules():
            name = f"{path}.{index}.{local}" if local else f"{path}.{index}"
            if (
                isinstance(module, nn.Linear)
                and is_linear(module)
                and id(module) not in seen
                and not matches(name, skip)
            ):
                seen.add(id(module))
                linears[name] = module
        plan.append(_Block(f"{path}.{index}", block, linears))
    if not seen:
        raise FormatError(f"{path}: found no linear to quantize, accepted is a list of blocks with nn.Linear in them")
    size = scheme.group_size
    widths = [(n, m.in_features) for b in plan for n, m in b.linears.items()]
    wrong = [f"{name} ({k})" for name, k in widths if size != -1 and k % size]
    if wrong:
        raise FormatError(
            f"group_size: found {size}, which does not divide the width of {', '.join(wrong)}; accepted are divisors, or -1"
        )
    wrong = [f"{name} ({k})" for name, k in widths if hadamard and k % hadamard]
    if wrong:
        raise FormatError(
            f"hadamard: found widths that {hadamard} does not divide: {', '.join(wrong)}; accepted is off"
        )
    return plan


def _schedule(traces: list[Trace], blocks: int) -> Iterator[tuple[int | None, int]]:
    """(step, block) in the order the model calls them, then (None, block) for those it never calls."""
    called = [call.block for call in traces[0].calls] if traces else []
    yield from enumerate(called)
    yield from ((None, index) for index in range(blocks) if index not in called)


def _advance(traces: list[Trace], block: _Block, step: int | None) -> None:
    for trace in traces:
        trace.advance(block.module, step or 0)


def _quantize_block(
    block: _Block,
    traces: list[Trace],
    step: int | None,
    scheme: Scheme,
    options: Options,
    activations: Mapping[str, Activation],
    missing: str,
    seed: int,
    advance: bool,
) -> Finished:
    """All linears of a block. Without traces (no calibration) they are rounded to nearest."""
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
        with ThreadPoolExecutor(min(threads, max(len(jobs), 1))) as pool:
            done = {name: found for part in pool.map(solve, jobs) for name, found in part.items()}
    finally:
        torch.set_num_threads(threads)
    return {name: done[name] for name in block.linears}


@contextmanager
def _evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training


@contextmanager
def _reporter(progress: Progress, total: int) -> Iterator[Callable[[str], None]]:
    """What to call after each block."""
    done = 0
    with tqdm(total=total, unit="block", desc="quantizing", disable=progress is not True) as bar:

        def tell(label: str) -> None:
            nonlocal done
            done += 1
            bar.set_postfix_str(label)
            bar.update()
            if callable(progress):
                progress(done, total, label)

        yield tell
