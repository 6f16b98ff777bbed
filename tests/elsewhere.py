"""A second device without a second device: tensors that say they are on it, and a mode that refuses to mix them.

The data lie on the CPU. An operator that gets tensors of both devices (a CPU scalar beside others is fine, as it is
for CUDA) raises, and so does whatever reads memory without asking for the CPU first.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_flatten, tree_map

DEVICE = torch.device("privateuseone", 0)
CROSSING = (torch.ops.aten._to_copy.default, torch.ops.aten.copy_.default)


class _Hook(torch._C._acc.PrivateUse1Hooks):  # type: ignore[misc, name-defined]
    """There is no such accelerator for whoever asks torch what it has."""

    def is_available(self) -> bool:
        return False

    def has_primary_context(self, _: int) -> bool:
        return False

    def is_built(self) -> bool:
        return False


def register() -> None:
    """Let torch know the device's name, and no more of it."""
    from torch.utils.backend_registration import _setup_privateuseone_for_python_backend as setup

    setup(hook=_Hook())


class Elsewhere(torch.Tensor):
    """A tensor on the other device."""

    inner: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Elsewhere:
        made: Elsewhere = torch.Tensor._make_wrapper_subclass(  # type: ignore[attr-defined]
            cls, inner.shape, strides=inner.stride(), storage_offset=inner.storage_offset(), dtype=inner.dtype,
            device=DEVICE, requires_grad=False,
        )  # fmt: skip
        made.inner = inner
        return made

    def __repr__(self, **_: Any) -> str:  # type: ignore[override]
        return f"Elsewhere({list(self.shape)})"

    def tolist(self) -> Any:
        return self.inner.tolist()  # torch refuses it of every subclass

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def run(func: Any, args: Any, kwargs: dict[str, Any]) -> Any:
    leaves = [t for t in tree_flatten((args, kwargs))[0] if isinstance(t, Tensor)]
    far = [t for t in leaves if isinstance(t, Elsewhere)]
    near = [t for t in leaves if not isinstance(t, Elsewhere) and t.dim() > 0]
    target = kwargs.pop("device", None)
    if far and near and func not in CROSSING:
        raise AssertionError(f"{func}: found tensors of two devices: {[list(t.shape) for t in leaves]}")
    there = bool(far) if target is None else torch.device(target).type == DEVICE.type
    if func is torch.ops.aten.copy_.default:
        there = isinstance(args[0], Elsewhere)
    if target is not None:
        kwargs["device"] = "cpu"
    plain_args, plain_kwargs = tree_map(lambda t: t.inner if isinstance(t, Elsewhere) else t, (args, kwargs))
    out = func(*plain_args, **plain_kwargs)
    same = {id(t.inner): t for t in far}  # what works in place answers with its argument

    def wrapped(t: Any) -> Any:
        if not isinstance(t, Tensor):
            return t
        return same[id(t)] if id(t) in same else Elsewhere(t) if there else t

    return tree_map(wrapped, out)


class TwoDevices(TorchDispatchMode):
    """Catches what makes tensors on the other device out of nothing."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return run(func, args, dict(kwargs or {}))


def move(model: nn.Module) -> nn.Module:
    """Every parameter and buffer there."""
    moved: dict[int, nn.Parameter] = {}
    for module in model.modules():
        for key, parameter in module._parameters.items():
            if parameter is not None:
                if id(parameter) not in moved:
                    moved[id(parameter)] = nn.Parameter(Elsewhere(parameter.detach().clone()), requires_grad=False)
                module._parameters[key] = moved[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None:
                module._buffers[key] = Elsewhere(buffer.clone())
    return model


class OneThread:
    """Instead of a ThreadPoolExecutor: a dispatch mode is a matter of one thread."""

    def __init__(self, *_: Any) -> None: ...

    def __enter__(self) -> OneThread:
        return self

    def __exit__(self, *_: object) -> None: ...

    def map(self, function: Any, jobs: Any) -> Iterator[Any]:
        return map(function, jobs)
