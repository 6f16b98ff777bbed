"""Swap modules of a model by dotted name."""

from __future__ import annotations

from torch import nn

from lowbit.types import FormatError


def get_linear(model: nn.Module, name: str) -> nn.Linear:
    """The nn.Linear of that dotted name. Raises FormatError naming the layer where it is absent or something else."""
    try:
        module = model.get_submodule(name)
    except AttributeError as error:
        raise FormatError(
            f"{name}: found no such module in {type(model).__name__}, accepted is an nn.Linear"
        ) from error
    if not isinstance(module, nn.Linear):
        raise FormatError(f"{name}: found {type(module).__name__}, accepted is nn.Linear")
    return module


def replace(model: nn.Module, name: str, module: nn.Module) -> None:
    """Put ``module`` where ``name`` is, in the parent's attribute; keeps the training flag of the old one."""
    parent_name, _, leaf = name.rpartition(".")
    parent = model.get_submodule(parent_name)
    old = getattr(parent, leaf)
    module.train(old.training)
    setattr(parent, leaf, module)
