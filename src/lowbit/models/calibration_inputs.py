"""Calibration inputs of every accepted form -> a list of batches: keyword arguments for the model."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ..types import FormatError
from .speech import Listener

CHARACTERS_PER_TOKEN = 32  # how much text is read for a token that is wanted: enough to choose windows from
Calibration = str | Path | Iterable[str] | Iterable[Tensor] | Iterable[Mapping[str, Any]]

TOKENS, WINDOW = 32768, 256  # what a run reads unless told otherwise


@dataclass(frozen=True)
class Batch:
    """What the model is called with once. ``mask`` [B, T] is False at padding, ``decoder_mask`` the same of a decoder
    beside an encoder; ``first`` numbers its first sample."""

    inputs: dict[str, Any]
    mask: Tensor | None
    first: int
    samples: int
    tokens: int
    decoder_mask: Tensor | None = None

    def on(self, device: torch.device) -> dict[str, Any]:
        """The inputs, tensors on a device."""
        return {k: v.to(device) if isinstance(v, Tensor) else v for k, v in self.inputs.items()}

    def mask_of(self, rows: int) -> Tensor | None:
        """Which of ``rows`` rows are no padding, None for all. Where both masks have that size, what both say: a row too
        few does less harm to statistics than one of padding."""
        fitting = [m.reshape(-1) for m in (self.mask, self.decoder_mask) if m is not None and m.numel() == rows]
        return None if not fitting else fitting[0] & fitting[-1]


def read_calibration(
    calibration: Calibration,
    tokenizer: Any = None,
    *,
    tokens: int = TOKENS,
    window: int = WINDOW,
    batch_tokens: int = 2048,
    seed: int = 0,
) -> list[Batch]:
    """Batches with about ``tokens`` tokens in all. FormatError where there is none.

    * A path: a text file, or ``.jsonl`` with a field "text" a line. An iterable of strings. All become one stream of
      tokens, without special tokens, cut into windows, of which the seed chooses (all, where there are few enough).
    * A path to ``.jsonl`` with fields "audio" and "text" a line, where ``tokenizer`` is a ``speech.Listener``: each line
      is a batch of its own, and the tokens counted are those of the transcripts.
    * An iterable of integer tensors [T] or [B, T]: one sample a row, whole; equal lengths in a row share a batch.
    * An iterable of mappings: keyword arguments for the model, one batch each; a 2-D ``attention_mask`` is respected.
    """
    if tokens < 1 or window < 1:
        raise FormatError(f"calibration: found tokens {tokens}, window {window}; accepted are values > 0")
    if isinstance(calibration, (str, Path)) and isinstance(tokenizer, Listener):
        return _nonempty(_clips(tokenizer, Path(calibration), tokens))
    if isinstance(calibration, (str, Path)):
        texts = _file(Path(calibration), tokens * CHARACTERS_PER_TOKEN)
        return _nonempty(_batched(_windows(texts, tokenizer, tokens, window, seed), batch_tokens))
    items = iter(calibration)
    first = next(items, None)
    rest: Iterator[Any] = chain([] if first is None else [first], items)
    if first is None or isinstance(first, str):
        return _nonempty(_batched(_windows(rest, tokenizer, tokens, window, seed), batch_tokens))
    if isinstance(first, Mapping):
        return _nonempty(_mappings(rest, tokens))
    return _nonempty(_batched(_rows(rest, tokens), batch_tokens))


def digest(batches: list[Batch]) -> str:
    """sha256 over every tensor the model will be called with."""
    h = hashlib.sha256()
    for batch in batches:
        for key in sorted(batch.inputs):
            value = batch.inputs[key]
            h.update(key.encode())
            if isinstance(value, Tensor):
                h.update(f"{value.dtype}{list(value.shape)}".encode())
                h.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
            else:
                h.update(repr(value).encode())
    return h.hexdigest()


def _file(path: Path, limit: int) -> Iterator[str]:
    """The texts of a file, no more than about ``limit`` characters."""
    if not path.is_file():
        raise FormatError(f"calibration: found no file {path}, accepted is a text or .jsonl file, or an iterable")
    try:
        with path.open(encoding="utf-8") as f:
            if path.suffix != ".jsonl":
                yield f.read(limit)
                return
            for number, line in enumerate(f, 1):
                if not line.strip():
                    continue
                try:
                    text = json.loads(line)["text"]
                except (ValueError, KeyError, TypeError) as error:
                    raise FormatError(
                        f'{path}, line {number}: accepted is a JSON object with a field "text"'
                    ) from error
                if not isinstance(text, str):
                    raise FormatError(f"{path}, line {number}: text: found {type(text).__name__}, accepted is a string")
                yield text
                limit -= len(text)
                if limit <= 0:
                    return
    except UnicodeDecodeError as error:
        raise FormatError(f"{path}: found byte {error.object[error.start]:#x}, accepted is UTF-8 text") from error


def _windows(texts: Iterable[str], tokenizer: Any, tokens: int, window: int, seed: int) -> Iterator[Tensor]:
    if tokenizer is None:
        raise FormatError("tokenizer: found None, accepted is a tokenizer wherever the calibration is text")
    ids: list[int] = []
    limit = tokens * CHARACTERS_PER_TOKEN
    for text in texts:
        if not isinstance(text, str):
            raise FormatError(f"calibration: found {type(text).__name__} among strings")
        ids += tokenizer(text[:limit], add_special_tokens=False, verbose=False)["input_ids"]
        limit -= len(text)
        if limit <= 0:
            break
    stream = torch.tensor(ids, dtype=torch.long)
    if not 0 < stream.numel() >= window:
        if stream.numel():
            yield stream
        return
    count = stream.numel() // window
    wanted = max(tokens // window, 1)
    chosen = torch.randperm(count, generator=torch.Generator().manual_seed(seed))[:wanted].sort().values
    for i in chosen.tolist():
        yield stream[i * window : (i + 1) * window]


def _rows(items: Iterable[Any], tokens: int) -> Iterator[Tensor]:
    """Samples [T] out of tensors (or lists) of token ids, until ``tokens`` are had."""
    for item in items:
        ids = torch.as_tensor(item)
        if ids.numel() == 0:
            continue
        if ids.ndim not in (1, 2) or ids.is_floating_point() or ids.dtype == torch.bool:
            raise FormatError(f"calibration: found {ids.dtype} {list(ids.shape)}, accepted are integer [T] or [B, T]")
        for row in ids.reshape(-1, ids.shape[-1]).long():
            yield row
            tokens -= row.numel()
            if tokens <= 0:
                return


def _batched(samples: Iterable[Tensor], batch_tokens: int) -> Iterator[Batch]:
    """Neighbours of equal length together, at most ``batch_tokens`` tokens a batch: nothing is ever padded."""
    group: list[Tensor] = []
    first = 0
    for sample in chain(samples, [None]):
        full = bool(group) and (len(group) + 1) * group[0].numel() > batch_tokens
        if group and (sample is None or full or sample.numel() != group[0].numel()):
            ids = torch.stack(group)
            yield Batch({"input_ids": ids}, None, first, len(group), ids.numel())
            first += len(group)
            group = []
        if sample is not None:
            group.append(sample)


def _mappings(items: Iterable[Any], tokens: int) -> Iterator[Batch]:
    first = 0
    for item in items:
        if not isinstance(item, Mapping):
            raise FormatError(f"calibration: found {type(item).__name__} among mappings")
        inputs = dict(item)
        mask, decoder_mask = _mask(inputs, "attention_mask"), _mask(inputs, "decoder_attention_mask")
        keys = ("input_ids", "inputs_embeds", "decoder_input_ids", "decoder_inputs_embeds")
        main = next((key for key in keys if inputs.get(key) is not None), None)
        if main is None:
            samples, count = 1, 1
        else:
            shape, counted = inputs[main].shape, decoder_mask if main.startswith("decoder") else mask
            samples, count = shape[0], int(counted.sum()) if counted is not None else shape[0] * shape[1]
        if count == 0:
            continue
        yield Batch(inputs, mask, first, samples, count, decoder_mask)
        first += samples
        tokens -= count
        if tokens <= 0:
            return


def _clips(listener: Listener, path: Path, tokens: int) -> Iterator[Batch]:
    for number, (inputs, mask) in enumerate(listener.inputs(path)):
        count = inputs["decoder_input_ids"].numel()
        yield Batch(inputs, mask, number, 1, count)
        tokens -= count
        if tokens <= 0:
            return


def _mask(inputs: Mapping[str, Any], key: str) -> Tensor | None:
    found = inputs.get(key)
    return found.bool() if isinstance(found, Tensor) and found.ndim == 2 else None


def _nonempty(batches: Iterable[Batch]) -> list[Batch]:
    found = list(batches)
    if not found:
        raise FormatError("calibration: found 0 tokens, accepted is at least 1")
    return found
