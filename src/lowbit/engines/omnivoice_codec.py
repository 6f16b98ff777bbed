"""OmniVoice's codec over several items at a time: each gets the samples that it would get alone, to rounding.

The decoder sees what lies beside an item through its convolutions, and alone that is nothing: zeros. So behind every
convolution the rows of an item that are past its end are set to zero again. (Zeros stay zeros in between: x + sin² x / a.)
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn


def decode(codec: Any, codes: Sequence[Tensor], frames: int) -> list[NDArray[np.float32]]:
    """Codes int64 [C, T_i] -> float32 [1, samples_i] on the CPU; up to ``frames`` frames, padding counted, at a time."""
    order = sorted(range(len(codes)), key=lambda i: -codes[i].shape[-1])  # alike beside alike
    done: dict[int, NDArray[np.float32]] = {}
    while order:
        longest = codes[order[0]].shape[-1]
        portion, order = order[: max(1, frames // longest)], order[max(1, frames // longest) :]
        lengths = [codes[i].shape[-1] for i in portion]
        together = torch.stack([nn.functional.pad(codes[i], (0, longest - n)) for i, n in zip(portion, lengths)])
        with _ends(codec.acoustic_decoder, lengths, longest):
            audio: NDArray[np.float32] = codec.decode(together.to(codec.device)).audio_values.cpu().numpy()
        for row, i, n in zip(audio, portion, lengths, strict=True):
            done[i] = row[:, : row.shape[-1] * n // longest]
    return [done[i] for i in range(len(codes))]


@contextmanager
def _ends(decoder: nn.Module, lengths: Sequence[int], longest: int) -> Iterator[None]:
    """While it lasts, nothing is heard past an item's end inside the decoder."""
    if all(n == longest for n in lengths):
        yield
        return

    frames = torch.tensor(lengths, device=next(decoder.parameters()).device)

    def cut(x: Tensor) -> Tensor:
        ends = frames * x.shape[-1] // longest
        return x.masked_fill(torch.arange(x.shape[-1], device=x.device) >= ends[:, None, None], 0)

    hooks = [decoder.register_forward_pre_hook(lambda _, args: (cut(args[0]), *args[1:]))]
    for module in decoder.modules():
        if isinstance(module, (nn.Conv1d, nn.ConvTranspose1d)):
            hooks.append(module.register_forward_hook(lambda _, args, out: cut(out)))
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()
