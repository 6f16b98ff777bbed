"""4- and 8-bit linear layers under PyTorch: quantize, pack, run, prove.

Everything public is below and is imported when first used, so that ``import lowbit`` stays quick and needs no
transformers. ``lowbit.functional`` and the other modules are imported by their own names.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

from lowbit.native import warn_if_plain as _warn_if_plain

if TYPE_CHECKING:
    from lowbit.models.api import explain as explain
    from lowbit.models.api import quantize as quantize
    from lowbit.models.from_pretrained import LowbitConfig as LowbitConfig
    from lowbit.models.from_pretrained import disable_transformers as disable_transformers
    from lowbit.models.from_pretrained import enable_transformers as enable_transformers
    from lowbit.models.load import load as load
    from lowbit.models.parallel import parallelize as parallelize
    from lowbit.models.save import save as save
    from lowbit.nn import QuantLinear as QuantLinear
    from lowbit.nn.parallel import ColwiseQuant as ColwiseQuant
    from lowbit.nn.parallel import RowwiseQuant as RowwiseQuant
    from lowbit.types import FormatError as FormatError
    from lowbit.types import QuantizedWeight as QuantizedWeight

__version__ = "0.1.0"

_WHERE = {
    "quantize": "lowbit.models.api",
    "load": "lowbit.models.load",
    "save": "lowbit.models.save",
    "explain": "lowbit.models.api",
    "parallelize": "lowbit.models.parallel",
    "enable_transformers": "lowbit.models.from_pretrained",
    "disable_transformers": "lowbit.models.from_pretrained",
    "LowbitConfig": "lowbit.models.from_pretrained",
    "QuantLinear": "lowbit.nn",
    "ColwiseQuant": "lowbit.nn.parallel",
    "RowwiseQuant": "lowbit.nn.parallel",
    "QuantizedWeight": "lowbit.types",
    "FormatError": "lowbit.types",
}

__all__ = [
    "ColwiseQuant", "FormatError", "LowbitConfig", "QuantLinear", "QuantizedWeight", "RowwiseQuant",
    "disable_transformers", "enable_transformers", "explain", "load", "parallelize", "quantize", "save",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name == "omnivoice":
        return import_module("lowbit.omnivoice")
    if name not in _WHERE:
        raise AttributeError(f"module 'lowbit' has no attribute {name!r}")
    value = getattr(import_module(_WHERE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


class _Package(ModuleType):
    """``lowbit.quantize`` is the function, although importing the package of that name would put itself there."""

    @property
    def quantize(self) -> Any:
        return import_module(_WHERE["quantize"]).quantize

    @quantize.setter
    def quantize(self, _: ModuleType) -> None:
        """The import system binds the subpackage here; it stays reachable as ``from lowbit.quantize import ...``."""


sys.modules[__name__].__class__ = _Package
_warn_if_plain()
