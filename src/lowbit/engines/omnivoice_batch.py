"""What one call of OmniVoice's decoding is about: its items packed, its schedule, and its noise drawn ahead."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from importlib import import_module
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lowbit.engines.omnivoice_step import Board
from lowbit.engines.packed import Backbone
from lowbit.types import FormatError


class Item(NamedTuple):
    """One utterance: its prompt [style | text | reference | masks], and what is revealed at each step."""

    ids: Tensor  # int64 [C, c]
    audio: Tensor  # bool [c]
    frames: int  # T, the last T of c
    counts: list[int]


def items_of(model: Any, task: Any, config: Any) -> list[Item]:
    """The items of a GenerationTask, by the model's own prompt. FormatError for what cannot be spoken."""
    for i, text in enumerate(task.texts):
        if not text or not text.strip():
            raise FormatError(f"text[{i}]: found {text!r}, accepted is a text with something to say")
        reference = task.ref_audio_tokens[i]
        if reference is not None and reference.shape[-1] == 0:
            raise FormatError(f"ref_audio[{i}]: found 0 frames, accepted is a reference that is heard")
        loudness = task.ref_rms[i]
        if reference is not None and loudness is not None and not 0 < loudness < math.inf:
            raise FormatError(f"ref_audio[{i}]: found loudness {loudness}, accepted is a reference that is heard")
    found = []
    for i, frames in enumerate(task.target_lens):
        prompt = model._prepare_inference_inputs(
            task.texts[i], frames, task.ref_texts[i], task.ref_audio_tokens[i], task.langs[i], task.instructs[i],
            config.denoise,
        )  # fmt: skip
        counts = reveal_counts(model, int(model.config.num_audio_codebook) * frames, config)
        found.append(Item(prompt["input_ids"][0], prompt["audio_mask"][0], frames, counts))
    return found


def reveal_counts(model: Any, slots: int, config: Any) -> list[int]:
    """Slots revealed at each step: the step's share of all, rounded up; at the last step what is left."""
    times = home_of(model)._get_time_steps(
        t_start=0.0, t_end=1.0, num_step=config.num_step, t_shift=config.t_shift
    ).tolist()  # fmt: skip
    counts, left = [], slots
    for step, (start, end) in enumerate(zip(times, times[1:])):
        last = step == config.num_step - 1
        counts.append(left if last else min(math.ceil(slots * (end - start)), left))
        left -= counts[-1]
    return counts


def home_of(model: Any) -> Any:
    """The module that defines the model's class OmniVoice."""
    kind = next(c for c in type(model).__mro__ if c.__name__ == "OmniVoice")
    return import_module(kind.__module__)


def draw(groups: Iterable[Sequence[Item]], steps: int, device: torch.device) -> list[Tensor]:
    """Uniform numbers of every item, float32 [steps, C, T], 0 in steps that reveal nothing.

    Drawn in the order in which the model itself draws: group by group, of a group step by step, of a step item by item.
    """
    drawn: list[Tensor] = []
    for group in groups:
        rows = [torch.zeros(steps, item.ids.shape[0], item.frames, device=device) for item in group]
        for step in range(steps):
            for item, row in zip(group, rows, strict=True):
                if item.counts[step] > 0:
                    row[step].uniform_()
        drawn += rows
    return drawn


class Batch:
    """Items as M packed rows: [conditional_0 | unconditional_0 | conditional_1 | ...].

    An unconditional segment holds the targets alone. Without ``guidance`` there are none, and the conditional rows stand
    for both.
    """

    def __init__(self, model: Any, items: Sequence[Item], guidance: bool) -> None:
        self.items = list(items)
        self.frames = max(item.frames for item in items)
        ids, audio, positions, self.ends = [], [], [], [0]
        starts: list[list[int]] = [[], []]  # first target row of each item, conditional and unconditional
        for item in items:
            c = item.ids.shape[1]
            for begin in (0, c - item.frames) if guidance else (0,):
                ids.append(item.ids[:, begin:])
                audio.append(item.audio[begin:])
                positions.append(torch.arange(c - begin))
                self.ends.append(self.ends[-1] + c - begin)
                starts[begin > 0 or (guidance and len(starts[0]) > len(starts[1]))].append(self.ends[-1] - item.frames)
        if not guidance:
            starts[1] = starts[0]
        self.m, self.starts = self.ends[-1], starts
        self.positions = torch.cat(positions)
        self.prefix = model._prepare_embed_inputs(torch.cat(ids, 1)[None], torch.cat(audio)[None])[0]

    @property
    def size(self) -> int:
        """Rows that a board must have; its frames may be up to half of them."""
        return max(self.m, 2 * self.frames)

    def write(self, board: Board, backbone: Backbone, config: Any, mask_id: int) -> None:
        """Everything of the board that does not change from step to step. Rows behind M are a segment of their own."""
        size, (b, _, t) = board.x.shape[0] - 1, board.valid.shape
        board.x[: self.m] = self.prefix
        board.x[self.m :].zero_()
        for there, here in zip(board.rotation, backbone.angles(self.positions), strict=True):
            there[: self.m] = here
        bounds = [*self.ends, *[size] * (len(board.bounds) - len(self.ends))]
        board.bounds.copy_(torch.tensor(bounds, dtype=torch.int32))
        rows = torch.full((2, b, t), size)
        valid = torch.zeros(b, 1, t, dtype=torch.bool)
        for i, item in enumerate(self.items):
            valid[i, :, : item.frames] = True
            for side in range(2):
                rows[side, i, : item.frames] = self.starts[side][i] + torch.arange(item.frames)
        board.rows.copy_(rows)
        board.valid.copy_(valid)
        board.tokens.fill_(mask_id)
        board.noise.zero_()
        board.k.zero_()
        layers = torch.arange(len(board.penalty))[:, None]
        board.penalty.copy_(layers * config.layer_penalty_factor)
        warm = config.position_temperature > 0
        board.temperature.fill_(config.position_temperature if warm else 1.0)
        board.guidance.fill_(config.guidance_scale)

    def schedule(self, device: torch.device) -> Tensor:
        """int64 [steps, B]: slots to reveal."""
        return torch.tensor([item.counts for item in self.items], device=device).T.contiguous()

    def noise(self, drawn: Sequence[Tensor]) -> Tensor:
        """Gumbel noise float32 [steps, B, C, T] from what ``draw`` gave for the items, by the model's formula."""
        if len(drawn) == 1:
            u = drawn[0][:, None]
        else:
            u = torch.stack([torch.nn.functional.pad(d, (0, self.frames - d.shape[-1])) for d in drawn], 1)
        return -torch.log(-torch.log(u + 1e-10) + 1e-10)


class Later:
    """Stands for the tokens of a chunk while a text is taken apart."""

    def __init__(self, group: int, at: int) -> None:
        self.group, self.at = group, at


def portions(items: Sequence[Item], limit: int | None) -> list[tuple[int, int]]:
    """Ranges of items of at most ``limit`` packed tokens, each of at least one item."""
    found, begin, rows = [], 0, 0
    for i, item in enumerate(items):
        own = item.ids.shape[1] + item.frames
        if limit is not None and i > begin and rows + own > limit:
            found.append((begin, i))
            begin, rows = i, 0
        rows += own
    return [*found, (begin, len(items))]
