"""The run of a model with everything at 8-bit activations, kept, and runs with some inputs at 4 against it.

A run for an input of block b starts at b, from kept hidden states, so that a sweep costs half a pass an input.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Container, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ..reference import divergence
from .calibration_inputs import Batch
from .recipes import blocks_of, recipe_for

TOKENS, WINDOW = 512, 128  # of the calibration text that a sweep runs over
EVERY = 4  # logits are compared at every fourth token: head and comparison would else be more than half of the time


def inputs_of(model: nn.Module, names: Container[str]) -> list[tuple[str, ...]]:
    """Those of ``names`` that read one input together, in the order of the model."""
    recipe = recipe_for(model)
    every = [
        [f"{prefix}.{local}" for local in group] for prefix, _ in blocks_of(model, recipe) for group in recipe.groups
    ]
    found = [tuple(name for name in group if name in names) for group in every]
    return [group for group in found if group]


class Sweep:
    """The run at 8 bits, kept: its logits, and the hidden states in front of every block.

    ``switch(names, bits)`` sets the activations of some linears to 4 bits, and back to 8.
    """

    def __init__(
        self, model: nn.Module, batches: Sequence[Batch], switch: Callable[[Sequence[str], int], None]
    ) -> None:
        self.model, self.batches, self.switch = model, batches, switch
        self.tokens = sum(batch.tokens for batch in batches)
        self.compared = 0  # rows of logits
        recipe = recipe_for(model)
        named = blocks_of(model, recipe)
        self.prefixes, self.blocks = [name for name, _ in named], [block for _, block in named]
        parameters = inspect.signature(model.forward).parameters
        self.extras = {"use_cache": False} if "use_cache" in parameters else {}
        self.sparse = "logits_to_keep" in parameters
        self.hidden: list[list[Tensor]] = []  # [batch][block]
        self.logits: list[Tensor] = []
        self.tuples = False  # whether a block answers with a tuple
        for batch in batches:
            with self._kept() as hidden:
                self.logits.append(self._run(batch))
            self.compared += self.logits[-1].shape[0]
            # Blocks that are called in another order, or twice, have no start of their own: run from the beginning.
            self.hidden.append([x for _, x in hidden] if [i for i, _ in hidden] == list(range(len(named))) else [])

    def loss(self, names: Sequence[str]) -> float:
        """KL a token of the logits with these linears at 4 bits, against none."""
        if not names:
            return 0.0
        first = min(next(i for i, p in enumerate(self.prefixes) if name.startswith(f"{p}.")) for name in names)
        total = 0.0
        try:
            self.switch(names, 4)
            for batch, hidden, want in zip(self.batches, self.hidden, self.logits, strict=True):
                with self._starting(first, hidden[first] if hidden else None):
                    total += float(divergence(want, self._run(batch)).sum())
        finally:
            self.switch(names, 8)
        return total / max(self.compared, 1)

    def _run(self, batch: Batch) -> Tensor:
        """Logits [rows, V] of a batch at every fourth position, less those of padding."""
        device = next(self.model.parameters()).device
        inputs = batch.on(device)
        ids = inputs.get("input_ids", inputs.get("inputs_embeds"))
        kept = None if ids is None or ids.shape[1] < EVERY else torch.arange(EVERY - 1, ids.shape[1], EVERY)
        few = {"logits_to_keep": kept.to(device)} if self.sparse and kept is not None else {}
        with torch.inference_mode():
            logits: Tensor = self.model(**{**self.extras, **few, **inputs}).logits
        if kept is not None and not few:
            logits = logits[:, kept]
        flat = logits.reshape(-1, logits.shape[-1])
        if batch.mask is None:
            return flat
        mask = batch.mask if kept is None else batch.mask[:, kept]
        return flat[mask.reshape(-1).to(flat.device)]

    @contextmanager
    def _kept(self) -> Iterator[list[tuple[int, Tensor]]]:
        """(block, what it is called with) of one run."""
        found: list[tuple[int, Tensor]] = []

        def before(index: int) -> Any:
            def hook(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
                found.append((index, args[0] if args else kwargs["hidden_states"]))

            return hook

        def after(module: nn.Module, args: Any, out: Any) -> None:
            self.tuples = isinstance(out, tuple)

        handles = [b.register_forward_pre_hook(before(i), with_kwargs=True) for i, b in enumerate(self.blocks)]
        handles += [b.register_forward_hook(after) for b in self.blocks]
        try:
            yield found
        finally:
            for handle in handles:
                handle.remove()

    @contextmanager
    def _starting(self, first: int, hidden: Tensor | None) -> Iterator[None]:
        """The model with the blocks in front of ``first`` left out, and it called with ``hidden``."""
        if hidden is None:
            yield
            return

        def passing(x: Any = None, *args: Any, hidden_states: Any = None, **kwargs: Any) -> Any:
            out = x if x is not None else hidden_states
            return (out,) if self.tuples else out

        real = self.blocks[first].forward

        def beginning(*args: Any, **kwargs: Any) -> Any:
            kwargs.pop("hidden_states", None)
            return real(hidden, *args[1:], **kwargs)

        try:
            for block in self.blocks[:first]:
                block.__dict__["forward"] = passing
            self.blocks[first].__dict__["forward"] = beginning
            yield
        finally:
            for block in self.blocks[: first + 1]:
                block.__dict__.pop("forward", None)
