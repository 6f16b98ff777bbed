"""Text decoding over a causal LM, through the native step where it fits, else through transformers: greedy or sampled."""

from __future__ import annotations

import inspect
import os
import time
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from lowbit.engines.llama import native, refuses
from lowbit.models.load import load, to_dtype
from lowbit.models.skeleton import SkeletonForCausalLM, as_transformers, load_skeleton
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

    from lowbit.models.plain_tokenizer import PlainTokenizer

    CausalLM = PreTrainedModel | SkeletonForCausalLM
    Tokenizer = PreTrainedTokenizerBase | PlainTokenizer

OnToken = Callable[[int], None]
ENGINES = ("auto", "native", "transformers")


class Decoded(NamedTuple):
    """The new tokens of one run and what they took. The first new token belongs to the prefill; making the native
    decoder belongs to neither. ``reason`` says why "auto" did not run the native engine."""

    tokens: list[int]
    prompt_tokens: int
    prefill_seconds: float
    decode_seconds: float
    engine: str = "transformers"
    reason: str = ""

    @property
    def prefill_rate(self) -> float:
        """Prompt tokens per second."""
        return self.prompt_tokens / self.prefill_seconds if self.prefill_seconds > 0 else 0.0

    @property
    def decode_rate(self) -> float:
        """New tokens per second after the first; 0.0 where there was only one."""
        steps = len(self.tokens) - 1
        return steps / self.decode_seconds if steps > 0 and self.decode_seconds > 0 else 0.0


def load_model(
    path: str | os.PathLike[str],
    activation: str | None = None,
    dtype: torch.dtype = torch.float32,
    engine: str = "auto",
) -> CausalLM:
    """``lowbit.load`` for decoding on the CPU. FormatError as there.

    Where the native step will run, the result is a skeleton (models/skeleton.py): the weights without transformers,
    what is dense as it is stored and mapped (an embedding in float16 takes half, and only the rows that are looked up).
    Elsewhere it is a model of transformers, what is dense in ``dtype``; so too with ``engine`` "transformers".
    """
    if engine == "transformers":
        return load(path, activation=activation, dtype=dtype)
    bare = load_skeleton(path, activation)
    if bare is not None:
        return bare if refuses(bare) is None else as_transformers(bare, dtype)
    model = load(path, activation=activation, dtype=None)
    if refuses(model) is not None:
        to_dtype(model, dtype)
    return model


@torch.inference_mode()
def decode(
    model: CausalLM,
    ids: Tensor | Sequence[int],
    max_new_tokens: int = 64,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    seed: int = 0,
    stop: Iterable[int] | None = None,
    on_token: OnToken | None = None,
    engine: str = "auto",
    head: str = "w8a8",
) -> Decoded:
    """Continue ``ids`` (int64 [T] or [1, T], T ≥ 1) by up to ``max_new_tokens`` tokens.

    ``temperature`` 0 is greedy; above 0 it samples from the ``top_k`` likeliest (0: all) within ``top_p`` of
    probability, from a generator of its own seeded with ``seed``. Ends after a token in ``stop`` (None: the end
    tokens of the model's generation config), which is kept. ``on_token`` is called with every new token as it comes.
    ``engine``: "native" (lowbit.engines.llama; FormatError where the model does not fit), "transformers", or "auto",
    which is native where it fits. ``head``: what the native engine makes of a float output head, "w8a8" or "float".
    Raises ValueError for an empty prompt, a negative count, or sampling arguments out of range.
    """
    prompt = torch.as_tensor(ids, dtype=torch.long, device=model.device).reshape(1, -1)
    if prompt.shape[1] == 0:
        raise ValueError("prompt: found 0 tokens, accepted is at least 1")
    if max_new_tokens < 0:
        raise ValueError(f"max_new_tokens: found {max_new_tokens}, accepted is 0 or more")
    if temperature < 0 or top_k < 0 or not 0 < top_p <= 1:
        found = f"temperature {temperature}, top_k {top_k}, top_p {top_p}"
        raise ValueError(f"sampling: found {found}, accepted are temperature >= 0, top_k >= 0, 0 < top_p <= 1")
    ends = set(end_tokens(model) if stop is None else stop)
    if engine not in ENGINES:
        raise FormatError(f"engine: found {engine!r}, accepted are {', '.join(ENGINES)}")
    step, reason = _native(model, prompt.shape[1] + max_new_tokens, head) if engine != "transformers" else (None, "")
    if step is None and engine == "native":
        raise FormatError(reason)
    name = "transformers" if step is None else "native"
    step = step or _transformers(as_transformers(model) if isinstance(model, SkeletonForCausalLM) else model)
    generator = torch.Generator().manual_seed(seed)
    tokens: list[int] = []
    began = prefilled = time.perf_counter()
    while len(tokens) < max_new_tokens and not (tokens and tokens[-1] in ends):
        logits = step(prompt if not tokens else torch.tensor([tokens[-1:]], device=prompt.device))
        token = pick(logits, temperature, top_k, top_p, generator)
        tokens.append(token)
        if len(tokens) == 1:
            prefilled = time.perf_counter()
        if on_token is not None:
            on_token(token)
    return Decoded(tokens, prompt.shape[1], prefilled - began, time.perf_counter() - prefilled, name, reason)


Step = Callable[[Tensor], Tensor]  # token ids [1, T] -> float32 logits [V] of the last, on the CPU


def _native(model: CausalLM, length: int, head: str) -> tuple[Step | None, str]:
    """The native step, or the reason why it does not run this model or a sequence of ``length``."""
    try:
        decoder = native(model, head)
    except FormatError as error:
        return None, str(error)
    if decoder.limit is not None and length > decoder.limit:
        return None, f"length: found {length}, accepted by the native engine is {decoder.limit} (sliding window)"
    state = decoder.start(length)
    return (lambda ids: state.feed(ids[0])[0]), ""


def _transformers(model: PreTrainedModel) -> Step:
    last_only: dict[str, Any] = {"logits_to_keep": 1} if _takes(model, "logits_to_keep") else {}
    slot = "cache" if _takes(model, "cache") else "past_key_values"  # renamed in transformers 5
    cache = None

    def step(ids: Tensor) -> Tensor:
        nonlocal cache
        out: Any = model(input_ids=ids, use_cache=True, **{slot: cache}, **last_only)
        cache = getattr(out, slot)
        logits: Tensor = out.logits[0, -1].float().cpu()
        return logits

    return step


def pick(logits: Tensor, temperature: float, top_k: int, top_p: float, generator: torch.Generator) -> int:
    """One token of ``logits`` (float32 [V], CPU). Greedy takes the first of equal maxima."""
    if temperature == 0:
        return int(logits.numpy().argmax())  # 5 us of 49152, torch's takes 55
    scaled = logits / temperature
    if 0 < top_k < scaled.numel():
        scaled = scaled.masked_fill(scaled < torch.topk(scaled, top_k).values[-1], float("-inf"))
    probability, order = torch.sort(torch.softmax(scaled, -1), descending=True)
    before = torch.cumsum(probability, -1) - probability
    probability = probability.masked_fill(before >= top_p, 0.0)  # the likeliest always stays: before = 0
    return int(order[torch.multinomial(probability, 1, generator=generator)])


def end_tokens(model: CausalLM) -> list[int]:
    """The end tokens of the generation config, else of the config, else none."""
    for source in (getattr(model, "generation_config", None), model.config):
        found = getattr(source, "eos_token_id", None)
        if found is not None:
            return [int(token) for token in found] if isinstance(found, (list, tuple)) else [int(found)]
    return []


def _takes(model: PreTrainedModel, name: str) -> bool:
    return name in inspect.signature(type(model).forward).parameters


def encode(tokenizer: Tokenizer, prompt: str, chat: bool = False) -> list[int]:
    """Token ids of a prompt; with ``chat``, wrapped as one user turn by the chat template of a transformers tokenizer (ValueError of
    transformers where it has none)."""
    if not chat:
        return [int(token) for token in tokenizer(prompt)["input_ids"]]
    full: Any = tokenizer
    turns = [{"role": "user", "content": prompt}]
    text = full.apply_chat_template(turns, add_generation_prompt=True, tokenize=False)
    return [int(token) for token in full(text, add_special_tokens=False)["input_ids"]]


class TextStream:
    """Turns tokens into text as they come: call it with each token; whole characters only go to ``write``."""

    def __init__(self, tokenizer: Tokenizer, write: Callable[[str], object]) -> None:
        self._tokenizer = tokenizer
        self._write = write
        self._tokens: list[int] = []
        self._shown = ""

    def __call__(self, token: int) -> None:
        self._tokens.append(token)
        text = self.text()
        if not text.endswith("\ufffd"):  # half a character: wait for the rest
            self._emit(text)

    def text(self) -> str:
        """All text so far, special tokens left out."""
        return str(self._tokenizer.decode(self._tokens, skip_special_tokens=True))

    def close(self) -> None:
        """Write what was held back."""
        self._emit(self.text())

    def _emit(self, text: str) -> None:
        if len(text) > len(self._shown):
            self._write(text[len(self._shown) :])
            self._shown = text
