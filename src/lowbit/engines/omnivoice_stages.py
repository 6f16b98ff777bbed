"""Precision by decoding step: which backbone runs each step, and several backbones over one model's weights.

Early steps decide the structure of an utterance and late ones fill in the bulk: ``[(16, "fp16"), (None, "w4a8")]`` is 16 steps in
float and the rest in integers.
"""

from __future__ import annotations

import warnings
from collections import defaultdict
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from typing import Any

import torch

from lowbit.engines.packed import Backbone
from lowbit.engines.packed_linears import FLOATS, INTEGERS
from lowbit.engines.packed_originals import Originals
from lowbit.engines.packed_siblings import share, shared_by, unshare
from lowbit.engines.packed_stack import GROUPS, Precision, linears_of, resolve
from lowbit.types import FormatError, QuantizedWeight

Stages = Sequence[tuple[int | None, Precision]]


class Plan:
    """``precisions``: each that is asked for, once. ``of(n)``: which of them runs each of n steps."""

    def __init__(self, precision: Precision | Stages) -> None:
        self.precisions: list[Precision] = []
        self.stages: list[tuple[int | None, int]] = []  # steps, and the number of the precision
        if precision is None or isinstance(precision, (str, Mapping)):
            precision = [(None, precision)]
        for stage in precision:
            if not isinstance(stage, (tuple, list)) or len(stage) != 2:
                raise _refuse(stage)
            steps, asked = stage
            whole = isinstance(steps, int) and not isinstance(steps, bool) and steps > 0
            if not (asked is None or isinstance(asked, (str, Mapping))) or not (steps is None or whole):
                raise _refuse(stage)
            if self.stages and self.stages[-1][0] is None:
                raise _refuse(stage, " after one of all other steps")
            if asked not in self.precisions:
                self.precisions.append(asked)
            self.stages.append((steps, self.precisions.index(asked)))
        if not self.stages:
            raise _refuse("no stage")

    def of(self, steps: int) -> list[int]:
        """The number of the precision of each step. FormatError for a schedule that leaves a stage, or a step, out."""
        counted = sum(n for n, _ in self.stages if n is not None)
        open_ended = self.stages[-1][0] is None
        if steps != counted if not open_ended else steps <= counted:
            raise FormatError(
                f"num_step: found {steps}, accepted with a precision by step that counts {counted} steps is "
                f"{'more than ' if open_ended else ''}{counted}"
            )
        return [at for n, at in self.stages for _ in range(steps - counted if n is None else n)]


def backbones_of(
    stack: Any,
    plan: Plan,
    weights: Mapping[str, QuantizedWeight],
    attention: str | None,
    free_originals: bool,
    undo: ExitStack,
) -> list[Backbone]:
    """A Backbone of each precision of the plan. What they do to the stack goes onto ``undo``.

    ``free_originals``: weights that are integers in all of them are put away, layer by layer, when the last one has
    read them.
    """
    linears = linears_of(stack)
    device = next(iter(linears.values())).weight.device
    words = [resolve(precision, linears, weights, device) for precision in plan.precisions]
    unread = {name for name in linears if all(found[name] in INTEGERS for found in words)}
    if free_originals and not unread:
        raise FormatError(
            "free_originals: found every linear in float at some step, accepted is a precision of integers"
        )
    if len(words) > 1:
        _join(stack, words, undo)
    originals = Originals()
    undo.callback(originals.close)

    def put_away(index: int) -> None:
        for name in unread:
            if name.startswith(f"layers.{index}."):
                originals.put_away(linears[name])

    found: list[Backbone] = []
    for precision in plan.precisions:
        last = free_originals and len(found) == len(plan.precisions) - 1
        found.append(Backbone(stack, precision, weights, attention, after_layer=put_away if last else None))
        undo.callback(found[-1].close)
    for backbone in found:
        backbone.remember()
    return found


def _join(stack: Any, words: Sequence[Mapping[str, str]], undo: ExitStack) -> None:
    """Siblings that some backbone reads as one float weight, before any of them is made: all then read the same memory."""
    with torch.inference_mode(False), torch.no_grad():
        for index, block in enumerate(stack.layers):
            for names in GROUPS.values():
                if any(all(found[f"layers.{index}.{name}"] in FLOATS for name in names) for found in words):
                    weights = [block.get_submodule(name).weight for name in names]
                    if shared_by(weights) is None:
                        share(weights)
                        undo.callback(_apart, weights)


def _apart(weights: Sequence[torch.Tensor]) -> None:
    with torch.inference_mode(False), torch.no_grad():
        unshare(weights)


def warn_of_floats(backbones: Sequence[Backbone]) -> None:
    """One line where integer weights run in float, since the device's tiles do not take them: which, and why."""
    places: defaultdict[str, list[str]] = defaultdict(list)
    for backbone in backbones:
        for name, why in backbone.in_float.items():
            if name not in places[why]:
                places[why].append(name)
    if not places:
        return
    told = []
    for why, names in places.items():
        more = f" and {len(names) - 2} more" if len(names) > 2 else ""
        told.append(f"{', '.join(names[:2])}{more} ({why})")
    products = len({name for names in places.values() for name in names})
    warnings.warn(
        f"{products} of {len(backbones[0].kinds)} products cannot run the integer tiles of {backbones[0].device} and take "
        f"the slower float path: {'; '.join(told)}. engine_of(model).explain() names all",
        stacklevel=3,
    )


def explained(plan: Plan, backbones: Sequence[Backbone]) -> dict[str, str]:
    """{"layers.0.qkv": what runs there, and in which steps where not in all}."""
    if len(plan.stages) == 1:
        return dict(backbones[0].kinds)
    begin, spans = 1, []
    for steps, at in plan.stages:
        spans.append((f"from step {begin}" if steps is None else f"steps {begin} to {begin + steps - 1}", at))
        begin += steps or 0
    return {
        name: "; ".join(f"{backbones[at].kinds[name]} ({span})" for span, at in spans) for name in backbones[0].kinds
    }


def _refuse(found: object, where: str = "") -> FormatError:
    return FormatError(
        f"precision: found {found!r}{where}, accepted by step are (steps, precision), the last one's steps None for the "
        'rest: [(16, "fp16"), (None, "w4a8")]'
    )
