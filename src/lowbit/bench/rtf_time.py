"""Times of whole utterances, stage by stage, engines in turns."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from types import MethodType
from typing import Any, NamedTuple

import torch

from lowbit.bench.rtf_set import Sample


class Take(NamedTuple):
    """One utterance by one engine; seconds. ``codec`` is everything but the post-processing."""

    loop: float
    codec: float
    total: float
    audio: Any  # float32 [samples]
    tokens: list[torch.Tensor]  # int64 [C, T] of each chunk, on the CPU
    first: float | None = None  # of the first chunk by itself, where the text came in several
    peak: int = 0  # bytes above what was there before


class Ear:
    """Notes when a model's own methods begin and end. ``close`` takes the notes off."""

    def __init__(self, model: Any, sync: Callable[[], None]) -> None:
        self.model, self._sync = model, sync
        self._depth = 0
        self._before: dict[str, Any] = {}
        self.clear()
        for name, stage in (
            ("_generate_iterative", "loop"),
            ("_generate_chunked", "loop"),
            ("_post_process_audio", "post"),
        ):
            self._wrap(name, stage)

    def clear(self) -> None:
        self.seconds = {"loop": 0.0, "post": 0.0}
        self.tokens: list[torch.Tensor] = []

    def _wrap(self, name: str, stage: str) -> None:
        call = getattr(self.model, name)
        self._before[name] = self.model.__dict__.get(name)

        def timed(_: Any, *args: Any, **kwargs: Any) -> Any:
            if self._depth:  # a chunk of a long text
                return call(*args, **kwargs)
            self._depth += 1
            self._sync()
            began = time.perf_counter()
            try:
                out = call(*args, **kwargs)
                self._sync()
            finally:
                self._depth -= 1
            self.seconds[stage] += time.perf_counter() - began
            if stage == "loop":
                rows = [row if isinstance(row, list) else [row] for row in out]
                self.tokens += [t for row in rows for t in row]
            return out

        self.model.__dict__[name] = MethodType(timed, self.model)

    def close(self) -> None:
        for name, before in self._before.items():
            if before is None:
                self.model.__dict__.pop(name, None)
            else:
                self.model.__dict__[name] = before


def synchronizer(device: torch.device) -> Callable[[], None]:
    if device.type == "cuda":
        return lambda: torch.cuda.synchronize(device)
    return lambda: None


def chunked(model: Any, sample: Sample, prompt: Any, settings: Mapping[str, Any]) -> str | None:
    """The first chunk of a text that the model takes apart, None of one that it does not."""
    from lowbit.engines.omnivoice_batch import home_of

    home = home_of(model)
    known = {k: v for k, v in settings.items() if k in home.OmniVoiceGenerationConfig.__dataclass_fields__}
    config = home.OmniVoiceGenerationConfig(**known)
    if sample.seconds <= config.audio_chunk_threshold:
        return None
    frames = sample.seconds * model.audio_tokenizer.config.frame_rate
    length = int(
        config.audio_chunk_duration * model.audio_tokenizer.config.frame_rate / (frames / len(sample.line.text))
    )
    found: list[str] = home.chunk_text_punctuation(text=sample.line.text, chunk_len=length, min_chunk_len=3)
    return found[0] if len(found) > 1 else None


def speak(model: Any, sample: Sample, prompt: Any, settings: Mapping[str, Any], text: str | None = None) -> Any:
    """Generate a sample, or ``text`` in its voice and at its pace; the audio, float32 [samples]."""
    line = sample.line
    duration = sample.seconds if text is None else sample.seconds * len(text) / len(line.text)
    return model.generate(
        text=line.text if text is None else text, language=line.language, voice_clone_prompt=prompt,
        duration=duration, **settings,
    )[0]  # fmt: skip


def take(ear: Ear, sample: Sample, prompt: Any, settings: Mapping[str, Any], seed: int, device: torch.device) -> Take:
    """One timed utterance behind a seed, and of a long one its first chunk by itself."""
    model, sync = ear.model, synchronizer(device)
    before = 0
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
    ear.clear()
    torch.manual_seed(seed)
    sync()
    began = time.perf_counter()
    audio = speak(model, sample, prompt, settings)
    sync()
    total = time.perf_counter() - began
    peak = torch.cuda.max_memory_allocated(device) - before if device.type == "cuda" else 0
    loop, post, tokens = ear.seconds["loop"], ear.seconds["post"], [t.cpu() for t in ear.tokens]
    first = None
    text = chunked(model, sample, prompt, settings)
    if text is not None:
        torch.manual_seed(seed)
        sync()
        began = time.perf_counter()
        speak(model, sample, prompt, settings, text)
        sync()
        first = time.perf_counter() - began
    return Take(loop, total - post, total, audio, tokens, first, peak)


def rounds(
    names: Sequence[str], run: Callable[[str], Any], count: int, tick: Callable[[], None] = lambda: None
) -> dict[str, list[Any]]:
    """``count`` rounds of every name, each round beginning with another one."""
    found: dict[str, list[Any]] = {name: [] for name in names}
    for number in range(count):
        for at in range(len(names)):
            name = names[(number + at) % len(names)]
            found[name].append(run(name))
            tick()
    return found


def percentile(values: Iterable[float], share: float) -> float:
    """The value at a share of the sorted values, between neighbours in proportion."""
    ordered = sorted(values)
    at = share * (len(ordered) - 1)
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])


def figures(takes: Sequence[Take], seconds: float) -> dict[str, Any]:
    """Milliseconds and real-time factors of one sample: medians over the rounds, p95 of the whole."""
    loop, codec, total = (statistics.median(getattr(t, key) for t in takes) for key in ("loop", "codec", "total"))
    first = statistics.median(t.total if t.first is None else t.first for t in takes)
    return {
        "loop_ms": 1e3 * loop, "codec_ms": 1e3 * codec, "total_ms": 1e3 * total,
        "p95_ms": 1e3 * percentile((t.total for t in takes), 0.95), "first_ms": 1e3 * first,
        "rtf_loop": loop / seconds, "rtf_codec": codec / seconds, "rtf": total / seconds,
        "peak_mib": max(t.peak for t in takes) / 2**20, "rounds": len(takes),
    }  # fmt: skip
