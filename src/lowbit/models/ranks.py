"""What ``from_pretrained`` asks about several processes, without importing torch.distributed where there is one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

Cut = Callable[[nn.Module, str, Any], tuple[Any, Any]]  # (model, name, plain weight) -> (what is kept of it, its link)


def asked(model: Any) -> bool:
    """Whether the model is being loaded with a tensor-parallel plan."""
    config = getattr(model.config, "distributed_config", None)
    return config is not None and config.tp_size > 1


def whole(_: nn.Module, __: str, plain: Any) -> tuple[Any, None]:
    """Of a model in one process: everything."""
    return plain, None


def cutting(model: Any, place: type[nn.Module]) -> Cut:
    """What is kept of the plain weight that belongs to each ``place`` of the model: all, or this process's part."""
    if not asked(model):
        return whole
    from lowbit.models.parallel import cutting

    return cutting(model, place)
