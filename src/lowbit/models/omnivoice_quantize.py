"""Quantize the linears of OmniVoice's stack: calibrated on what they see while the model really decodes prompts.

prompts ─ stock generate ─► inputs of the stack at five steps of the loop, conditional and unconditional rows apart,
without padding ─► calibrate.quantize_model over ``model.llm.layers`` ─► a checkpoint of those linears alone
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from tqdm import tqdm

from lowbit.checkpoint import write_checkpoint
from lowbit.formats import FORMATS, config_for, lowbit
from lowbit.models.api import default_method, resolve_scheme, sha256_of
from lowbit.models.blocks import find_blocks
from lowbit.models.calibrate import quantize_model
from lowbit.models.calibration_inputs import TOKENS
from lowbit.models.load import local_directory
from lowbit.models.omnivoice import Line, load_omnivoice, read_lines, voice_of
from lowbit.models.report import Progress, Report
from lowbit.quantize import METHODS, Scales
from lowbit.types import Activation, FormatError, Scheme

LICENCE = (
    "Made from OmniVoice's weights, which are CC-BY-NC, behind a codec under the Higgs Audio 2 Community License: a "
    "derivative of both, for whoever made it. lowbit does not redistribute weights."
)
STEPS = 32
# Shares of the loop: the first steps decide the structure of an utterance, the last ones reveal most of it.
MOMENTS = (0.0, 0.25, 0.5, 0.75, 1.0)


def moments(steps: int) -> list[int]:
    """The steps of a loop at which inputs are kept."""
    return sorted({round(share * (steps - 1)) for share in MOMENTS})


@torch.inference_mode()
def decoding_inputs(
    model: Any,
    lines: Sequence[Line],
    tokens: int = TOKENS,
    *,
    steps: int = STEPS,
    seed: int = 0,
    progress: bool = False,
) -> list[dict[str, Tensor]]:
    """Calls of ``model.llm`` (inputs_embeds [1, M, H] and a mask of ones) from the decoding of lines, until ``tokens``
    positions are had. Rows of a padded batch come apart, each as long as it is."""
    if not lines:
        raise FormatError("calibration: found no prompt, accepted is at least 1")
    wanted, found, had = moments(steps), list[dict[str, Tensor]](), 0
    share = max(1, -(-tokens // len(lines)))  # of one line, so that all voices are heard

    for number, line in enumerate(tqdm(lines, desc="prompts", unit="prompt", disable=not progress, leave=False)):
        if had >= tokens:
            break
        seen, mine = 0, list[dict[str, Tensor]]()

        def keep(_: nn.Module, __: Any, call: dict[str, Any], mine: list[dict[str, Tensor]] = mine) -> None:
            nonlocal seen
            now, seen = seen, seen + 1
            if now % steps not in wanted:
                return
            for row, mask in zip(call["inputs_embeds"], call["attention_mask"], strict=True):
                length = int(mask[0, 0].sum())  # a row sees itself whole, and nothing of the padding behind it
                ones = torch.ones(1, 1, length, length, dtype=torch.bool, device=row.device)
                mine.append({"inputs_embeds": row[None, :length].clone(), "attention_mask": ones})

        hook = model.llm.register_forward_pre_hook(keep, with_kwargs=True)
        try:
            torch.manual_seed(seed + number)
            model.generate(
                text=line.text, language=line.language, voice_clone_prompt=voice_of(model, line),
                duration=line.duration, num_step=steps, postprocess_output=False,
            )  # fmt: skip
        finally:
            hook.remove()
        budget = min(share, tokens - had) if number < len(lines) - 1 else tokens - had
        for call in _spread(mine, budget, seed + number):
            found.append(call)
            had += call["inputs_embeds"].shape[1]
    return found


def _spread(calls: list[dict[str, Tensor]], tokens: int, seed: int) -> Iterator[dict[str, Tensor]]:
    """Calls of a line until ``tokens`` positions are had, drawn, so that every step and both kinds of rows are there."""
    order = torch.randperm(len(calls), generator=torch.Generator().manual_seed(seed)).tolist()
    for at in order:
        yield calls[at]
        tokens -= calls[at]["inputs_embeds"].shape[1]
        if tokens <= 0:
            return


def quantize_omnivoice(
    source: str | os.PathLike[str],
    out: str | os.PathLike[str],
    scheme: str | Scheme = "w4a8",
    method: str | None = None,
    calibration: str | os.PathLike[str] | Sequence[Line] | None = None,
    *,
    resume_dir: str | os.PathLike[str] | None = None,
    group_size: int | None = None,
    symmetric: bool | None = None,
    activation: str | None = None,
    scales: Scales | None = None,
    skip: Sequence[str] = (),
    tokens: int | None = None,
    steps: int = STEPS,
    device: str | torch.device = "cpu",
    progress: Progress = True,
    **options: Any,
) -> Report:
    """Write the quantized linears of ``model.llm.layers`` (196 of the published model) to ``out``, nothing else: the
    checkpoint that ``lowbit.omnivoice.accelerate(model, out)`` reads, with the sha256 of the weights that it was made of.

    ``calibration``: a .jsonl of lines {"text", "ref_audio", "ref_text"} (text alone: the model picks a voice), a text
    file of one text a line, or Lines. The stock model decodes them in ``steps`` steps, in float32, and what its stack is
    called with at the first, the last and three steps between is what the linears are measured on. Where nothing else is
    said, 4-bit weights are signed with two-level scales, and 8-bit activations have one scale a row: what the INT8 tensor
    cores read, and every CPU too. ``options`` go to ``calibrate.quantize_model``. FormatError before work for what does
    not fit.
    """
    chosen = resolve_scheme(scheme, group_size, symmetric, activation)
    if chosen.bits == 4:
        by_row = chosen.activation.bits == 8 and activation is None
        chosen = replace(
            chosen, symmetric=True if symmetric is None else symmetric,
            activation=Activation(8, "token") if by_row else chosen.activation,
        )  # fmt: skip
        scales = scales or ("two-level" if chosen.symmetric and chosen.group_size != -1 else "group")
    if chosen.bits == 16:
        raise FormatError("--scheme: found fp16, accepted for an OmniVoice are w4a4, w4a8, w8a8 and w4a16")
    method = method or default_method(chosen)
    if method not in METHODS:
        raise FormatError(f"method: found {method!r}, accepted are {', '.join(METHODS)}")
    lines = read_lines(calibration) if isinstance(calibration, (str, os.PathLike)) else calibration
    folder, target = local_directory(source), Path(out)
    model = load_omnivoice(folder, device, torch.float32)
    inputs = None
    if lines is not None:
        inputs = decoding_inputs(
            model, lines, TOKENS if tokens is None else tokens, steps=steps, progress=progress is True
        )
    stack = model.llm
    linears = {n: m for block in find_blocks(stack, "layers", skip) for n, m in block.linears.items()}
    base = sha256_of(linear.weight for linear in linears.values())
    with torch.inference_mode(False):
        quantized, report = quantize_model(
            stack, chosen, method, inputs, blocks="layers", skip=skip, progress=progress,
            scales=scales or "group",
            resume_dir=None if resume_dir is None else os.fspath(resume_dir), tokens=10**12, **options,
        )  # fmt: skip
    named = {f"llm.{name}": q for name, q in quantized.items()}
    rows = {name: lowbit.describe(q) for name, q in named.items()}
    rank = max((q.low_rank.down.shape[1] for q in named.values() if q.low_rank is not None), default=0)
    metadata = {**lowbit.metadata(rows, method, rank=rank, base_sha256=base), "licence": LICENCE}
    config = json.loads((folder / "config.json").read_text("utf-8"))
    config["quantization_config"] = config_for("lowbit", named, [])
    tensors = ((key, t) for name, q in named.items() for key, t in FORMATS["lowbit"].write(q, name).items())
    write_checkpoint(target, tensors, config, metadata)
    return report
