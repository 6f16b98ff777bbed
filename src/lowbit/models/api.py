"""Quantize a model where it stands, and say which kernels it runs."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace as changed
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, nn

from lowbit.models import sensitivity, sweep
from lowbit.models.calibrate import quantize_model
from lowbit.models.calibration_inputs import read_calibration
from lowbit.models.load import resolve_activation, untie
from lowbit.models.overrides import activations_of
from lowbit.models.recipes import Recipe, linear_names, matches, recipe_for
from lowbit.models.replace import get_linear, replace
from lowbit.models.report import Progress, Report
from lowbit.models.save import save
from lowbit.models.speech import Listener, takes_speech
from lowbit.nn import QuantLinear
from lowbit.quantize import METHODS, Method, Row, rtn
from lowbit.types import SCHEMES, Activation, FormatError, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

__all__ = ["Explanation", "Report", "explain", "quantize", "resolve_scheme", "save"]


def resolve_scheme(
    scheme: str | Scheme, group_size: int | None = None, symmetric: bool | None = None, activation: str | None = None
) -> Scheme:
    """A Scheme by name, with what the arguments change. FormatError for what no scheme has."""
    if isinstance(scheme, str):
        if scheme not in SCHEMES:
            raise FormatError(f"scheme: found {scheme!r}, accepted are {', '.join(SCHEMES)}")
        scheme = SCHEMES[scheme]
    if group_size is not None:
        if group_size != -1 and group_size < 1:
            raise FormatError(f"group_size: found {group_size}, accepted are -1 (one group a row) and 1 or more")
        scheme = changed(scheme, group_size=group_size)
    if symmetric is not None:
        scheme = changed(scheme, symmetric=symmetric)
    chosen = resolve_activation(activation)
    if chosen is not None:
        if scheme.bits == 16 and chosen.granularity != "none":
            raise FormatError(f"activation: found {activation!r}, accepted with scheme {scheme.name} is 'none'")
        scheme = changed(scheme, activation=chosen)
    return scheme


def default_method(scheme: Scheme) -> Method:
    """What quantizes a scheme unless another is named: svdquant where activations have 4 bits, else gptq."""
    return "svdquant" if scheme.activation.bits == 4 else "gptq"


def quantize(
    model: nn.Module,
    scheme: str | Scheme = "w4a8",
    method: str | None = None,
    calibration: str | os.PathLike[str] | Iterable[Any] | None = None,
    *,
    tokenizer: PreTrainedTokenizerBase | Listener | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    activation: str | None = None,
    skip: Sequence[str] | None = None,
    blocks: str | None = None,
    channel_scales: bool = True,
    tokens: int | None = None,
    budget: float | None = None,
    resume_dir: str | os.PathLike[str] | None = None,
    progress: Progress = True,
    **options: Any,
) -> Report:
    """Turn the linears of every block into QuantLinear, in place, and report on each.

    ``model``: of transformers, or any module with a list of blocks, or several: ``blocks`` then names them
    ("encoder.layers,decoder.layers"); None finds them.
    ``scheme``: "w4a8", "w8a8", "w4a16", "w4a4", "fp16" or a Scheme; ``group_size``, ``symmetric`` and ``activation`` ("group",
    "token", "none") change it. ``method``: "rtn" (needs no calibration), "gptq" or "svdquant" (GPTQ with
    smoothing, Hadamard and a low rank); None is svdquant where activations have 4 bits, else gptq. ``calibration``: a text or JSONL
    file, token ids, texts or keyword arguments for the model; text needs a ``tokenizer``; about ``tokens`` tokens
    are used. Lines of speech {"audio", "text"} need a ``speech.Listener`` there; None makes one of the directory that
    the model came from. ``skip`` names linears (whole dotted names, beginnings or ends) that stay dense, by default the output
    head; ``skip=()`` rounds the head too, to nearest, and unties it from the embedding, which keeps every bit.
    ``budget`` (scheme "w4a4" alone): bits of activations on average over the weights, 4 .. 8; the inputs that lose
    most at 4 bits, as measured on calibration text, run at 8 (models/sensitivity.py), and the report says which.
    Finished blocks are kept in ``resume_dir``: after an interruption the same call goes on there. ``options`` go to
    ``models.calibrate.quantize_model``. Raises FormatError before anything is changed for arguments that do not fit.
    Source: Frantar et al., "GPTQ", 2022; Li et al., "SVDQuant", 2024; docs/accuracy.md has every formula and what it is worth.
    """
    job = settle(model, resolve_scheme(scheme, group_size, symmetric, activation), method, skip, blocks)
    calibration, fixed = prepare_budget(model, job, calibration, budget, options.get("overrides") or {})
    base = sha256_of(get_linear(model, name).weight for name in job.names + job.heads)
    made: dict[str, Any] = {"method": job.method, "base_sha256": base}
    if job.scheme.bits == 16:
        report = Report(job.scheme, "fp16")
        for name in job.names + job.heads:
            half, row = to_half(name, get_linear(model, name), job.scheme)
            replace(model, name, half)
            report.rows.append(row)
    else:
        if tokens is not None:
            options["tokens"] = tokens
        if tokenizer is None and takes_speech(model) and isinstance(calibration, (str, os.PathLike)):
            tokenizer = Listener.of(model, str(getattr(model, "name_or_path", "")))
        quantized, report = quantize_model(
            model, job.scheme, job.method, calibration, tokenizer, channel_scales=channel_scales, skip=job.leave,  # type: ignore[arg-type]
            blocks=job.blocks, resume_dir=None if resume_dir is None else os.fspath(resume_dir), progress=progress,
            **options,
        )  # fmt: skip
        waiting = dict(quantized)
        del quantized
        for name in job.heads:
            waiting[name], row = head_of(name, get_linear(model, name), job.scheme)
            report.rows.append(row)
        for name in list(waiting):  # each let go when it is packed
            device = get_linear(model, name).weight.device
            replace(model, name, QuantLinear.from_quantized(waiting.pop(name).to(device)))
    if job.heads:
        untie(model)
    if budget is not None and calibration is not None:
        report.budget = spend_budget(model, calibration, tokenizer, budget, fixed, options.get("seed", 0), progress)
        made["budget"] = report.budget.to_dict()
    model.lowbit_made = made  # type: ignore[assignment]
    return report


def prepare_budget(
    model: nn.Module, job: Job, calibration: Any, budget: float | None, overrides: Mapping[str, str | Activation]
) -> tuple[Any, dict[str, Activation]]:
    """The calibration, so that it can be read twice, and the linears whose activations are fixed already; both untouched
    and empty without a budget. FormatError for one that cannot be met."""
    if budget is None:
        return calibration, {}
    if calibration is not None and not isinstance(calibration, (str, os.PathLike)):
        calibration = list(calibration)
    fixed = activations_of(job.names, overrides)
    sizes = {name: get_linear(model, name).weight.numel() for name in job.names}
    sensitivity.refuse(sizes, job.scheme, calibration, budget, fixed)
    return calibration, fixed


def spend_budget(
    model: Any, calibration: Any, tokenizer: Any, budget: float, fixed: Iterable[str], seed: int, progress: Progress
) -> sensitivity.Budget:
    """Measure a quantized model on calibration text, and give 8 bits to the inputs that lose most at 4."""
    text = read_calibration(calibration, tokenizer, tokens=sweep.TOKENS, window=sweep.WINDOW, seed=seed)
    return sensitivity.spend(model, text, budget, list(fixed), progress is True)


class Job(NamedTuple):
    """What is to be done, all of it checked. ``names`` are the linears of the blocks, ``heads`` those outside."""

    scheme: Scheme
    method: str
    blocks: str
    leave: tuple[str, ...]
    names: list[str]
    heads: list[str]


def settle(model: nn.Module, scheme: Scheme, method: str | None, skip: Sequence[str] | None, blocks: str | None) -> Job:
    """Method, blocks and linears of a model. FormatError for a method that there is not, and for blocks."""
    method = method or default_method(scheme)
    if method not in METHODS:
        raise FormatError(f"method: found {method!r}, accepted are {', '.join(METHODS)}")
    recipe = Recipe(blocks, (), ("lm_head",)) if blocks else recipe_for(model)
    leave = recipe.skip if skip is None else tuple(skip)
    names = linear_names(model, recipe, leave)
    heads = [name for name in recipe.skip if not matches(name, leave) and _has_linear(model, name)]
    return Job(scheme, "fp16" if scheme.bits == 16 else method, recipe.blocks, leave, names, heads)


def _has_linear(model: nn.Module, name: str) -> bool:
    try:
        return isinstance(model.get_submodule(name), nn.Linear)
    except AttributeError:
        return False


def to_half(name: str, linear: nn.Linear, scheme: Scheme) -> tuple[QuantLinear, Row]:
    """A linear in float16, and its row: the error is that of the weight."""
    half = QuantLinear.from_linear(linear, scheme)
    error = _relative(linear.weight.detach(), half.dequantize())
    return half, Row(name, "fp16", None, 0, error, error, ("error of the weight",))


def head_of(name: str, linear: nn.Linear, scheme: Scheme) -> tuple[QuantizedWeight, Row]:
    """An output head rounded to nearest, and its row."""
    q = rtn(linear.weight, scheme).to("cpu")
    q = q.with_(bias=None if linear.bias is None else linear.bias.detach().cpu(), activation=scheme.activation)
    return q, Row(name, "rtn", None, 0, float("nan"), float("nan"), ("outside the blocks",))


def _relative(want: Tensor, got: Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp_min(1e-300))


def sha256_of(weights: Iterable[Tensor]) -> str:
    """sha256 of weights rounded to float16, row-major, in this order."""
    digest = hashlib.sha256()
    for weight in weights:
        half = weight.detach().to("cpu", torch.float16).contiguous()
        digest.update(half.reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


class Explanation(NamedTuple):
    """One row per quantized layer: what `QuantLinear.explain` says, with the layer's name and shape."""

    rows: list[dict[str, Any]]
    dense: list[str]  # linears that stayed dense

    def table(self) -> tuple[list[str], list[list[object]]]:
        """Column names and cells."""
        columns = ["layer", "shape", "kernel", "tier", "activation", "bits", "group", "bytes"]
        keys = ("name", "shape", "kernel", "tier", "activation", "bits", "group_size", "bytes")
        return columns, [[row.get(key) for key in keys] for row in self.rows]

    def why_not(self) -> list[str]:
        """Each faster kernel or tier that was passed over and the reason, once, with the number of layers."""
        counts: dict[tuple[str, str], int] = {}
        for row in self.rows:
            for name, reason in row.get("passed_over", ()):
                counts[name, reason] = counts.get((name, reason), 0) + 1
        return [f"{name}: not used by {count} layers: {reason}" for (name, reason), count in counts.items()]

    def __str__(self) -> str:
        columns, cells = self.table()
        lines = [columns, *([str(cell) for cell in row] for row in cells)]
        widths = [max(len(line[i]) for line in lines) for i in range(len(columns))]
        shown = ["  ".join(c.ljust(w) for c, w in zip(line, widths, strict=True)).rstrip() for line in lines]
        dense = [f"dense: {', '.join(self.dense)}"] if self.dense else []
        return "\n".join([*shown, *self.why_not(), *dense])


def explain(model: nn.Module) -> Explanation:
    """For every layer: the kernel that runs it, the tier, and why the faster ones do not. Prints as a table. Nothing is refused: a
    model without quantized layers gives no rows."""
    rows: list[dict[str, Any]] = []
    for name, module in model.named_modules():
        if isinstance(module, QuantLinear):
            rows.append({"name": name, "shape": f"{module.out_features}x{module.in_features}", **module.explain()})
    return Explanation(rows, [name for name, module in model.named_modules() if isinstance(module, nn.Linear)])
