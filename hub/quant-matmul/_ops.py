"""The operators of this copy, under a namespace of its own: two copies with one namespace would end the process."""

import torch

from ._lowbit import dispatch as _dispatch  # noqa: F401  (registers them, the plain ones too)
from ._lowbit.native import OPS

ops = getattr(torch.ops, OPS)


def add_op_namespace_prefix(op_name: str) -> str:
    return f"{OPS}::{op_name}"
