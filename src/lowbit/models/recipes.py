"""One row per model family: where its blocks are, and which linears of a block read one and the same input."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import nn

from lowbit.types import FormatError


class Recipe(NamedTuple):
    """How a family is laid out.

    ``blocks`` is the dotted path of the block list, or of several with commas between them. ``groups`` names the linears of one block, in the order they run;
    those in one group read the same input, so they share one Hessian and one channel scale. ``skip`` names linears
    (whole dotted names) that stay dense unless asked for.
    Empty groups: every linear, and nothing is known of what they share.
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
    """The row for a model: by ``model.config.model_type``, else guessed from its lists of blocks that hold linears.

    Of an encoder-decoder every list counts, in the order of the modules (the encoder first); of other models the
    longest. A guessed row has no groups: which linears share an input is seen when the model runs.
    Raises FormatError where the model has no list of blocks that hold linears.
    """
    config = getattr(model, "config", None)
    kind = getattr(config, "model_type", None)
    if kind in RECIPES:
        return RECIPES[kind]
    lists: dict[str, int] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.ModuleList) and not any(path.startswith(f"{outer}.") for outer in lists):
            if any(is_linear(child) for child in module.modules()):
                lists[path] = len(module)
    if not lists:
        raise FormatError(f"model type: found {kind!r} without a list of blocks, accepted are {', '.join(RECIPES)}")
    every = getattr(config, "is_encoder_decoder", False)
    return Recipe(",".join(lists) if every else max(lists, key=lambda path: lists[path]), (), (_head(model),))


def _head(model: nn.Module) -> str:
    """The dotted name of the output head, where transformers knows it."""
    ask = getattr(model, "get_output_embeddings", None)
    head = None if ask is None else ask()
    return next((name for name, module in model.named_modules() if module is head), "lm_head")


def block_lists(model: nn.Module, paths: str) -> list[tuple[str, nn.Module]]:
    """The blocks of one list, or of several (dotted paths, commas between them), with their names, in order."""
    found: list[tuple[str, nn.Module]] = []
    for path in paths.split(","):
        try:
            container = model.get_submodule(path.strip())
        except AttributeError as error:
            raise FormatError(
                f"blocks: found no module {path!r} in {type(model).__name__}, accepted are dotted paths of lists of blocks"
            ) from error
        # children() would leave out one that comes twice
        found += [(f"{path.strip()}.{key}", block) for key, block in container._modules.items() if block is not None]
    return found


def blocks_of(model: nn.Module, recipe: Recipe) -> list[tuple[str, nn.Module]]:
    """The blocks of a model with their dotted names, in order."""
    return block_lists(model, recipe.blocks)


def linear_names(model: nn.Module, recipe: Recipe, skip: Sequence[str] = ()) -> list[str]:
    """Dotted names of the linears to quantize: those of every block, less ``skip`` (whole or trailing dotted names)."""
    names: list[str] = []
    seen: set[int] = set()
    for prefix, block in blocks_of(model, recipe):
        for local in recipe.linears or [name for name, _ in block.named_modules()]:
            module, name = _child(block, local), f"{prefix}.{local}" if local else prefix
            if is_linear(module) and id(module) not in seen and not matches(name, skip):
                seen.add(id(module))
                names.append(name)
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
