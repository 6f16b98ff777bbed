"""One row per model family: where its blocks are, and which linears of a block read one and the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lowbit.types import FormatError


class Recipe(NamedTuple):
    """How a family is laid out.

    ``blocks`` is the dotted path of the block list. ``groups`` names the linears of one block, in the order they run;
    those in one group read the same input, so they share one Hessian and one channel scale. ``skip`` names linears
    (whole dotted names) that stay dense unless asked for.
    """

    blocks: str
    groups: tuple[tuple[str, ...], ...]
    skip: tuple[str, ...] = ("lm_head",)

    @property
    def linears(self) -> tuple[str, ...]:
        """Every linear of one block, in running order."""
        return tuple(name for group in self.groups for name in group)


_QKV = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj")
_GATED = (_QKV, ("self_attn.o_proj",), ("mlp.gate_proj", "mlp.up_proj"), ("mlp.down_proj",))
_FUSED = (("self_attn.qkv_proj",), ("self_attn.o_proj",), ("mlp.gate_up_proj",), ("mlp.down_proj",))
# Phi runs attention and MLP side by side on one normalized input.
_PARALLEL = ((*_QKV, "mlp.fc1"), ("self_attn.dense",), ("mlp.fc2",))

RECIPES: dict[str, Recipe] = {  # key: config.model_type
    "llama": Recipe("model.layers", _GATED),
    "mistral": Recipe("model.layers", _GATED),
    "qwen2": Recipe("model.layers", _GATED),
    "qwen3": Recipe("model.layers", _GATED),
    "gemma3_text": Recipe("model.layers", _GATED),
    "gemma3": Recipe("model.language_model.layers", _GATED),
    "phi": Recipe("model.layers", _PARALLEL),
    "phi3": Recipe("model.layers", _FUSED),
}


def recipe_for(model: nn.Module) -> Recipe:
    """The row for a model: by ``model.config.model_type``, else guessed from its longest list of equal blocks.

    A guessed row puts every linear in a group of its own, which is right for any model and only a little slower.
    Raises FormatError where the model has no list of blocks that hold linears.
    """
    kind = getattr(getattr(model, "config", None), "model_type", None)
    if kind in RECIPES:
        return RECIPES[kind]
    best: tuple[int, str, tuple[str, ...]] = (0, "", ())
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and len(module) > best[0]:
            linears = tuple(name for name, child in module[0].named_modules() if is_linear(child))
            if linears:
                best = (len(module), path, linears)
    if not best[1]:
        raise FormatError(f"model type: found {kind!r} without a list of blocks, accepted are {', '.join(RECIPES)}")
    return Recipe(best[1], tuple((name,) for name in best[2]))


def blocks_of(model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Module]]:
    """The blocks of a model with their dotted names, in order."""
    try:
        blocks = model.get_submodule(recipe.blocks)
    except AttributeError as error:
        raise FormatError(f"{type(model).__name__}: found no module {recipe.blocks!r} (recipe.blocks)") from error
    return [(f"{recipe.blocks}.{index}", block) for index, block in enumerate(blocks.children())]


def linear_names(model: nn.Module, recipe: Recipe, skip: Sequence[str] = ()) -> list[str]:
    """Dotted names of the linears to quantize: those of every block, less ``skip`` (whole or trailing dotted names)."""
    names = []
    for prefix, block in blocks_of(model, recipe):
        for local in recipe.linears:
            if is_linear(_child(block, local)) and not matches(f"{prefix}.{local}", skip):
                names.append(f"{prefix}.{local}")
    return names


def matches(name: str, patterns: Sequence[str]) -> bool:
    """True where a pattern is the whole dotted name, its beginning, or its end (at dots)."""
    return any(f".{pattern}." in f".{name}." and _at_end(name, pattern) for pattern in patterns)


def _at_end(name: str, pattern: str) -> bool:
    return name == pattern or name.startswith(f"{pattern}.") or name.endswith(f".{pattern}")


def _child(module: nn.Module, name: str) -> nn.Module | None:
    try:
        return module.get_submodule(name)
    except AttributeError:
        return None


def is_linear(module: object) -> bool:
    """True for a dense nn.Linear with its weight (not for a subclass that stores something else)."""
    return isinstance(module, nn.Linear) and type(module).forward is nn.Linear.forward
