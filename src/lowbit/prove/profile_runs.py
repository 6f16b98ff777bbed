"""What ``lowbit profile`` runs: decoding of a causal language model, or OmniVoice's own ``generate``."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from lowbit.models.omnivoice import RATE, made_up_voice
from lowbit.prove.trace import GENERATION
from lowbit.types import FormatError

TEXT = "Seven grey geese crossed the river before sunrise."


class Run(NamedTuple):
    """``call`` does ``steps`` steps (tokens, or decoding steps of an utterance); ``what`` says so in words."""

    call: Callable[[], object]
    steps: int
    what: str


def text(
    path: str | os.PathLike[str],
    prompt: str | None = None,
    tokens: int = 16,
    *,
    device: str = "cpu",
    engine: str = "auto",
    activation: str | None = None,
    dtype: torch.dtype = torch.float32,
) -> Run:
    """Greedy decoding of ``tokens`` tokens after ``prompt`` (None: 32 fixed token ids, and no tokenizer is read).

    A step is a token; the first is the prefill. On a GPU transformers runs the model.
    """
    from lowbit.engines import decode
    from lowbit.models.load import load

    if tokens < 1:
        raise FormatError(f"--tokens: found {tokens}, accepted is 1 or more")
    if device != "cpu":
        if engine == "native":
            raise FormatError(f"--engine: found native with --device {device}, accepted is auto or transformers")
        engine = "transformers"
        model: Any = load(path, device, activation, dtype)
    else:
        model = decode.load_model(path, activation, dtype, engine)
    if prompt is None:
        ids = [1 + i % (int(model.config.vocab_size) - 1) for i in range(32)]
    else:
        from lowbit.models.plain_tokenizer import plain_tokenizer
        from lowbit.models.tokenizer import tokenizer_of

        ids = decode.encode(plain_tokenizer(str(path)) or tokenizer_of(str(path)), prompt)
    first = decode.decode(model, ids, 1, engine=engine)  # says which engine it is, and packs what it packs
    what = f"{tokens} tokens after {len(ids)}, engine {first.engine}"
    return Run(lambda: decode.decode(model, ids, tokens, stop=(), engine=engine), tokens, what)


def omnivoice(
    path: str | os.PathLike[str] | None,
    words: str = TEXT,
    audio: float = 2.0,
    steps: int = 32,
    *,
    device: str = "cpu",
    dtype: torch.dtype = torch.float32,
    prepare: Callable[[Any], object] | None = None,
    made: Callable[[], Any] | None = None,
) -> Run:
    """The stock model's voice clone of ``audio`` seconds behind 3 s of a made-up reference, waveform included, its
    post-processing (silence trimming on the CPU) not. ``prepare`` is called with the model first, to accelerate it; ``made`` gives
    the model where there is no path. The decoding loop is marked in the trace.

    FormatError where the package ``omnivoice`` is not installed.
    """
    try:
        from omnivoice import OmniVoice
    except ImportError as error:
        raise FormatError(
            f"--omnivoice: found no package omnivoice ({error}), accepted after pip install omnivoice"
        ) from error
    if steps < 1 or not audio > 0:
        raise FormatError(
            f"--omnivoice: found {steps} steps of {audio:g} s, accepted is 1 step or more of more than 0 s"
        )
    model = OmniVoice.from_pretrained(str(path), device_map=device, dtype=dtype) if made is None else made()
    if prepare is not None:
        prepare(model)
    prompt = model.create_voice_clone_prompt((made_up_voice(3.0), RATE), ref_text="The harbour was quiet.")

    decode = model._generate_iterative

    def marked(*args: Any, **kwargs: Any) -> Any:
        with torch.profiler.record_function(GENERATION):
            return decode(*args, **kwargs)

    model._generate_iterative = marked

    def call() -> object:
        torch.manual_seed(0)
        return model.generate(
            text=words,
            language="en",
            voice_clone_prompt=prompt,
            num_step=steps,
            duration=audio,
            postprocess_output=False,
        )

    how = "stock generate" if prepare is None else "accelerated"
    return Run(call, steps, f"{audio:g} s of speech in {steps} steps, {how}")
