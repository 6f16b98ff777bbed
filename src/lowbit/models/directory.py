"""A directory to a quantized directory, block by block: what ``lowbit quantize`` does."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn

from lowbit.models.api import head_of, prepare_budget, resolve_scheme, settle, sha256_of, spend_budget, to_half
from lowbit.models.calibrate import quantize_model
from lowbit.models.disk import DiskModel, weights_of
from lowbit.models.load import load, untie
from lowbit.models.recipes import recipe_for
from lowbit.models.replace import get_linear
from lowbit.models.report import Progress, Report
from lowbit.models.save import Parts, write_model
from lowbit.models.speech import Listener, takes_speech
from lowbit.models.tokenizer import tokenizer_of
from lowbit.nn import QuantLinear
from lowbit.types import Activation, QuantizedWeight, Scheme

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def quantize_directory(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: str | Scheme = "w4a8",
    method: str | None = None,
    calibration: Any = None,
    *,
    resume_dir: str | os.PathLike[str],
    tokenizer: PreTrainedTokenizerBase | Listener | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    activation: str | None = None,
    skip: Sequence[str] = (),
    head: bool = False,
    blocks: str | None = None,
    tokens: int | None = None,
    budget: float | None = None,
    dense_dtype: torch.dtype | None = None,
    device: str | torch.device = "cpu",
    progress: Progress = True,
    **options: Any,
) -> Report:
    """Quantize the plain model of ``source`` into ``out`` without ever holding it: the same bytes as ``load``,
    ``quantize`` and ``save``, whose arguments these are. ``skip`` comes on top of the output head, which ``head`` takes
    in. Without a ``tokenizer`` that of the directory reads text, and a ``speech.Listener`` of it speech. In memory are what lies outside the blocks, one block (two while its results are made), the statistics, and
    the hidden states of the calibration inputs; finished blocks wait in ``resume_dir``. A ``budget`` alone is measured on
    the whole quantized model, read back from ``out``.
    """
    chosen = resolve_scheme(scheme, group_size, symmetric, activation)
    disk = DiskModel(source, blocks or (lambda model: recipe_for(model).blocks), device=device)
    model = disk.model
    job = settle(model, chosen, method, [*skip, *(() if head else recipe_for(model).skip)], blocks)
    calibration, fixed = prepare_budget(model, job, calibration, budget, options.get("overrides") or {})
    base = sha256_of(weights_of(disk, job.names + job.heads))
    made: dict[str, Any] = {"method": job.method, "base_sha256": base}
    layers: dict[str, Any] = {}
    halves: dict[str, Any] = {}
    shells: dict[str, QuantizedWeight] = {}
    if chosen.bits == 16:
        report = Report(chosen, "fp16")
        for name in job.names + job.heads:
            with disk.present(get_linear(model, name)):
                report.rows.append(to_half(name, get_linear(model, name), chosen)[1])
            halves[name] = lambda name=name: _half(disk, get_linear(model, name))
    else:
        if tokens is not None:
            options["tokens"] = tokens
        if tokenizer is None and isinstance(calibration, (str, os.PathLike)):
            tokenizer = Listener.of(model, disk.path) if takes_speech(model) else tokenizer_of(str(disk.path))
        found, report = quantize_model(
            model, chosen, job.method, calibration, tokenizer, skip=job.leave, blocks=job.blocks,  # type: ignore[arg-type]
            resume_dir=os.fspath(resume_dir), progress=progress, present=disk.present, **options,
        )  # fmt: skip
        layers = {name: lambda name=name: found[name] for name in found}
        shells = {name: found[name].to("meta") for name in found}
        for name in job.heads:
            q, row = head_of(name, get_linear(model, name), chosen)
            layers[name], shells[name] = lambda q=q: q, q.to("meta")
            report.rows.append(row)
    if job.heads:
        untie(model)
    shells = {name: shells[name] for name, _ in model.named_modules() if name in shells}  # the order of ``save``
    halves = {name: halves[name] for name, _ in model.named_modules() if name in halves}
    parts = Parts(layers, shells, halves, disk.read)
    write_model(model, Path(out), parts, made, dense_dtype)
    if budget is not None:
        seed, measured = options.get("seed", 0), load(out)
        report.budget = spend_budget(measured, calibration, tokenizer, budget, fixed, seed, progress)
        made["budget"] = report.budget.to_dict()
        runs = {name: cast(QuantLinear, measured.get_submodule(name)).declares() for name in shells}
        write_model(model, Path(out), _running(parts, runs), made, dense_dtype)
    return report


def _running(parts: Parts, runs: Mapping[str, Activation]) -> Parts:
    """The same weights with other activations declared."""

    def layer(name: str) -> Callable[[], QuantizedWeight]:
        return lambda: parts.layers[name]().with_(activation=runs[name])

    shells = {name: shell.with_(activation=runs[name]) for name, shell in parts.shells.items()}
    return parts._replace(layers={name: layer(name) for name in parts.layers}, shells=shells)


def _half(disk: DiskModel, linear: nn.Linear) -> tuple[Tensor, Tensor | None]:
    with disk.present(linear):
        bias = None if linear.bias is None else linear.bias.detach().float().cpu()
        return linear.weight.detach().half().cpu(), bias
