"""One run of ``lowbit bench rtf``: engines made, samples in turns, a line a sample and engine as soon as it is measured."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from lowbit.bench import rtf_engines, rtf_judges, rtf_quality
from lowbit.bench.rtf_engines import ENGINES, Settings, one_line
from lowbit.bench.rtf_set import Sample, voices
from lowbit.bench.rtf_time import Ear, Take, figures, percentile, rounds, synchronizer, take
from lowbit.omnivoice import engine_of

Said = dict[str, dict[str, Any]]  # sample -> engine -> float32 [samples]
Write = Callable[[Mapping[str, Any]], None]


class Made(NamedTuple):
    """The engines; why the others are not there; of each the MiB and the seconds that making it took."""

    models: dict[str, Any]
    broken: dict[str, str]
    memory: dict[str, float]
    seconds: dict[str, float]
    base: float  # MiB of the model itself


class Plan(NamedTuple):
    samples: Sequence[Sample]
    steps: int
    seed: int
    rounds: int
    trained: bool
    quality: bool = True
    asr: str | None = None


def make(model: Any, names: Sequence[str], settings: Settings) -> Made:
    """Every engine by name; one that cannot be made is left out with the reason."""
    made = Made({}, {}, {}, {}, _reserved(settings.device))
    sync = synchronizer(settings.device)
    for name in rtf_engines.order(list(names)):
        before, began = _reserved(settings.device), time.perf_counter()
        try:
            made.models[name] = ENGINES[name].make(model, name, settings)
            sync()
        except Exception as error:
            made.broken[name] = one_line(error)
        made.seconds[name] = time.perf_counter() - began
        made.memory[name] = _reserved(settings.device) - before
    return made


def _reserved(device: torch.device) -> float:
    """MiB that torch holds of the device."""
    if device.type != "cuda":
        return 0.0
    torch.cuda.empty_cache()
    return torch.cuda.memory_reserved(device) / 2**20


def utterances(model: Any, made: Made, plan: Plan, device: torch.device, write: Write) -> Said:
    """Warm up, time in turns, compare: lines of kind "sample" and "engine". What was said comes back."""
    from tqdm import tqdm

    prompts, how = voices(model, list(plan.samples)), {"num_step": plan.steps}
    pairs = list(zip(plan.samples, prompts, strict=True))
    total = len(made.models) * len(pairs) * (1 + plan.rounds)
    bar = tqdm(total=total, desc="utterances", unit="", disable=None, leave=False)
    ears: dict[str, Ear] = {}
    first: dict[str, list[Take]] = {}
    for (
        name,
        mine,
    ) in made.models.items():  # a first time each, untimed: what fails, fails here; tokens and sound are kept
        before, ear = _reserved(device), Ear(mine, synchronizer(device))
        try:
            takes = []
            for sample, prompt in pairs:
                takes.append(take(ear, sample, prompt, how, plan.seed, device))
                bar.update()
        except Exception as error:
            made.broken[name] = one_line(error)
            ear.close()
            continue
        ears[name], first[name] = ear, takes
        made.memory[name] += _reserved(device) - before
    lines: dict[str, list[dict[str, Any]]] = {name: [] for name in ears}
    for sample, prompt in pairs:

        def run(name: str, sample: Sample = sample, prompt: Any = prompt) -> Take:
            return take(ears[name], sample, prompt, how, plan.seed, device)

        for name, takes in rounds(list(ears), run, plan.rounds, bar.update).items():
            line = {"kind": "sample", "engine": name, "sample": sample.name, "seconds": sample.seconds}
            lines[name].append(line | figures(takes, sample.seconds))
            write(lines[name][-1])
    bar.close()
    for ear in ears.values():
        ear.close()
    quality = _quality(made.models, first, prompts, plan) if plan.quality else {}
    for name, measured in lines.items():
        write(_summary(name, measured, made, device) | quality.get(name, {}))
    for name, why in made.broken.items():
        write({"kind": "engine", "engine": name, "what": ENGINES[name].what, "why": why})
    return {s.name: {name: takes[i].audio for name, takes in first.items()} for i, s in enumerate(plan.samples)}


def _summary(name: str, mine: Sequence[Mapping[str, Any]], made: Made, device: torch.device) -> dict[str, Any]:
    line: dict[str, Any] = {"kind": "engine", "engine": name, "what": ENGINES[name].what, "samples": len(mine)}
    for key in ("rtf_loop", "rtf_codec", "rtf", "first_ms"):
        line[key] = statistics.fmean(x[key] for x in mine)
    line["p50_ms"] = statistics.median(x["total_ms"] for x in mine)
    line["p95_ms"] = percentile([x["p95_ms"] for x in mine], 0.95)
    line["made_s"] = made.seconds[name]
    if device.type == "cuda":  # the model, what the engine holds beside it, and the most that a call took
        line["memory_mib"] = made.base + made.memory[name] + max(x["peak_mib"] for x in mine)
    return line


def _quality(
    models: Mapping[str, Any], first: Mapping[str, Sequence[Take]], prompts: Sequence[Any], plan: Plan
) -> dict[str, dict[str, Any]]:
    """Of every engine: tokens, KL and top-1 against ``fp16`` where it is there, and the judges. What fails is a reason."""
    found: dict[str, dict[str, Any]] = {name: {} for name in first}
    if "fp16" in first:
        short = [i for i, s in enumerate(plan.samples) if s.seconds <= 30][:3]
        engine = engine_of(models["fp16"])
        paths = [rtf_quality.path_of(engine, plan.samples[i], prompts[i], plan.steps, plan.seed) for i in short]
        for name, takes in first.items():
            found[name]["reference"] = name == "fp16"
            same = [rtf_quality.agreement(a.tokens, b.tokens) for a, b in zip(takes, first["fp16"], strict=True)]
            found[name]["tokens_same"] = statistics.fmean(same)
            if paths and name != "flashinfer":  # it has no forward of its own to ask
                found[name] |= _divergence(models[name], name.startswith("stock"), paths)
    for name, takes in first.items():
        said = [rtf_judges.Said(s, t.audio) for s, t in zip(plan.samples, takes, strict=True)]
        found[name] |= rtf_judges.judge(said, plan.asr) if plan.trained else rtf_judges.untrained()
    return found


def _divergence(model: Any, stock: bool, paths: Sequence[rtf_quality.Path]) -> dict[str, Any]:
    try:
        judged = [
            rtf_quality.of_stock(model, p) if stock else rtf_quality.of_engine(engine_of(model), p) for p in paths
        ]
    except Exception as error:  # the times stand all the same
        return {"kl_why": one_line(error)}
    slots = sum(q.slots for q in judged)
    return {
        "kl": sum(q.kl * q.slots for q in judged) / slots, "top1": sum(q.top1 * q.slots for q in judged) / slots,
        "slots": slots,
    }  # fmt: skip
