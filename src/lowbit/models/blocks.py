"""The blocks of a model, one list or several, and the linears in them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from torch import nn

from ..types import FormatError, Scheme
from .recipes import block_lists, is_linear, matches


@dataclass(frozen=True)
class Block:
    name: str
    module: nn.Module
    linears: dict[str, nn.Linear]  # by full dotted name; each module in one block only


def find_blocks(model: nn.Module, paths: str, skip: Sequence[str]) -> list[Block]:
    """The blocks of every list and their linears less ``skip``. FormatError where there is no linear."""
    seen: set[int] = set()
    found: list[Block] = []
    for name, block in block_lists(model, paths):
        linears: dict[str, nn.Linear] = {}
        for local, module in block.named_modules():
            whole = f"{name}.{local}" if local else name
            if isinstance(module, nn.Linear) and is_linear(module) and id(module) not in seen:
                if not matches(whole, skip):
                    seen.add(id(module))
                    linears[whole] = module
        found.append(Block(name, block, linears))
    if not seen:
        raise FormatError(f"{paths}: found no linear to quantize, accepted is a list of blocks with nn.Linear in them")
    return found


def check_widths(blocks: Sequence[Block], scheme: Scheme, hadamard: int) -> None:
    """Refuse widths that the group or the Hadamard's block does not divide, all of them named."""
    size = scheme.group_size
    widths = [(n, m.in_features) for b in blocks for n, m in b.linears.items()]
    wrong = [f"{name} ({k})" for name, k in widths if size != -1 and k % size]
    if wrong:
        raise FormatError(
            f"group_size: found {size}, which does not divide the width of {', '.join(wrong)}; accepted are divisors, or -1"
        )
    wrong = [f"{name} ({k})" for name, k in widths if hadamard and k % hadamard]
    if wrong:
        raise FormatError(
            f"hadamard: found widths that {hadamard} does not divide: {', '.join(wrong)}; accepted is off"
        )


@contextmanager
def evaluating(model: nn.Module) -> Iterator[None]:
    """Every module in eval mode, and back as it was."""
    before = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        for module, training in before.items():
            module.training = training
