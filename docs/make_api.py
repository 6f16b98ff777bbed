"""docs/api.md from the docstrings: ``make docs``. Signature, text, fields with their comments, public methods."""

from __future__ import annotations

import inspect
import re
import sys
import textwrap
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

ROOT = Path(__file__).parents[1]
LAYERS = "quant_matmul.layers"
# module -> its public names; None: all of its __all__. Modules of src/lowbit with an __all__ that are not named here come last.
SURFACE: dict[str, tuple[str, ...] | None] = {
    "lowbit": None,
    "lowbit.types": ("Activation", "LowRank", "Scheme"),
    "lowbit.nn": ("W4A4Linear",),
    "lowbit.functional": None,
    LAYERS: None,
    "lowbit.omnivoice": None,
    "lowbit.engines.decode": ("load_model", "encode", "decode", "Decoded", "TextStream"),
    "lowbit.prove.compare": ("perplexity", "Perplexity", "layer_errors", "LayerError"),
    "lowbit.prove.profile": ("profile", "of_file", "Profile"),
    "lowbit.quantize": ("rtn", "gptq", "svdquant", "channel_scales", "smoothing"),
    "lowbit.doctor": ("examine", "page", "Row"),
}
# What parts of the package call on one another, and torch's own hooks.
INTERNAL = {"Held": {"packed_anew", "half_anew", "hold", "refuse_part", "extra_repr"}, "QuantLinear": {"packed_anew", "half_anew", "alone", "compute"}, "ColwiseQuant": {"check", "cut"}, "RowwiseQuant": {"check", "cut"}, "Kept": {"keep"},
            "Engine": {"patch", "keep", "close"}}  # fmt: skip
HEAD = """# API

Made by `make docs` from the docstrings; `tests/test_api.py` holds it to them. N is the number of out features, K of in features, G of
groups, M of rows of x, R the rank; shapes are in brackets. "float" without a width is float32, bfloat16 or float16. `FormatError`
is a `ValueError` of one line: what was found, and what is accepted.
"""


def modules() -> dict[str, tuple[str, ...]]:
    """Every public module and its names."""
    found = dict(SURFACE)
    for file in sorted((ROOT / "src" / "lowbit").glob("*.py")):
        if not file.stem.startswith("_") and re.search(r"^__all__ =", file.read_text("utf-8"), re.MULTILINE):
            found.setdefault(f"lowbit.{file.stem}", None)
    return {name: tuple(load(name).__all__) if names is None else names for name, names in found.items()}


def load(name: str) -> ModuleType:
    """A module of the package, or the layers of the `kernels` artifact, which has the package inside as `_lowbit`."""
    if name == LAYERS and name not in sys.modules:
        parent = ModuleType("quant_matmul")
        parent.__path__ = [str(ROOT / "hub" / "quant-matmul")]
        import lowbit.functional

        sys.modules |= {"quant_matmul": parent, "quant_matmul._lowbit": lowbit}
    return import_module(name)


def items(name: str, names: tuple[str, ...]) -> Iterator[tuple[str, Any]]:
    """The names of a module with what they are; one that another module has shown already is left out."""
    seen = {n for other, ns in list(modules().items()) if other != name and other == "lowbit" for n in ns}
    for item in names:
        if name == "lowbit" or item not in seen:
            yield item, getattr(load(name), item)


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties that a class has of our own code, nearest class first, up to a base that has an entry itself."""
    shown: set[str] = set()
    for base in kind.__mro__:
        if base is not kind and base.__name__ in load("lowbit").__all__:
            return
        if base.__module__.split(".")[0] not in ("lowbit", "quant_matmul"):
            continue
        shown |= INTERNAL.get(base.__name__, set())
        for name, value in vars(base).items():
            inner = value.__func__ if isinstance(value, (classmethod, staticmethod)) else value
            if not name.startswith("_") and name not in shown and isinstance(inner, (FunctionType, property)):
                shown.add(name)
                yield name, inner


def doc(item: Any) -> str:
    """The docstring, without the signature that the standard library writes where there is none."""
    text = inspect.cleandoc(vars(item).get("__doc__") or "" if isinstance(item, type) else item.__doc__ or "")
    return "" if isinstance(item, type) and text.startswith(f"{item.__name__}(") else text


def signature(name: str, function: Any) -> str:
    """``name(x: Tensor, …) -> Tensor`` over as many lines as it needs."""
    found = inspect.signature(function)
    parts, star = [], False
    for p in found.parameters.values():
        if p.name in ("self", "cls"):
            continue
        if p.kind is p.KEYWORD_ONLY and not star:
            parts, star = [*parts, "*"], True
        star = star or p.kind is p.VAR_POSITIONAL
        sign = {p.VAR_POSITIONAL: "*", p.VAR_KEYWORD: "**"}.get(p.kind, "")
        kind = "" if p.annotation is p.empty else f": {_type(p.annotation)}"
        value = "..." if " at 0x" in repr(p.default) else repr(p.default)  # an address is another one in every process
        default = "" if p.default is p.empty else f"{' = ' if kind else '='}{value}"
        parts.append(f"{sign}{p.name}{kind}{default}")
    back = "" if found.return_annotation is found.empty else f" -> {_type(found.return_annotation)}"
    line = f"{name}({', '.join(parts)}){back}"
    return line if len(line) <= 110 else f"{name}(\n    " + ",\n    ".join(parts) + f",\n){back}"


def _type(annotation: Any) -> str:
    if isinstance(annotation, str):
        return annotation
    return getattr(annotation, "__forward_arg__", None) or getattr(annotation, "__name__", str(annotation))


def fields(kind: type) -> list[tuple[str, str, str]]:
    """(name, type, comment) of a NamedTuple, a dataclass or a layer that names its attributes."""
    names = getattr(kind, "_fields", None) or tuple(kind.__dict__.get("__annotations__", ()))
    source = textwrap.dedent(inspect.getsource(kind))
    rows = []
    for name in names:
        found = re.search(rf"^    {name}: ([^#=\n]+?)(?: = [^#\n]+?)?(?:  # (.*))?$", source, re.MULTILINE)
        if found is not None and not name.startswith("_"):
            rows.append((name, found[1].strip(), (found[2] or "").strip()))
    return rows


def show(name: str, item: Any) -> Iterator[str]:
    """One name: heading, signature, text; of a class its fields and members too."""
    yield f"### `{name}`"
    value = isinstance(item, type) and (hasattr(item, "_fields") or "__init__" in vars(item))
    made = not isinstance(item, type) or value and not issubclass(item, Exception)
    shown = signature(name, item) if made else f"class {name}({', '.join(b.__name__ for b in item.__bases__)})"
    yield f"```text\n{shown}\n```"
    yield doc(item)
    if not isinstance(item, type):
        return
    rows = fields(item)
    if rows:
        yield "\n".join(
            ["| field | type | |", "|---|---|---|", *(f"| `{n}` | `{_cell(t)}` | {_cell(c)} |" for n, t, c in rows)]
        )
    for member, value in members(item):
        head = member if isinstance(value, property) else signature(f"{name}.{member}", value)
        yield f"#### `{name}.{member}`"
        if not isinstance(value, property):
            yield f"```text\n{head}\n```"
        yield doc(value)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")


def page() -> str:
    """The whole of docs/api.md."""
    parts = [HEAD.strip()]
    for name, names in modules().items():
        parts += [f"## `{name}`", doc(load(name))]
        for item, value in items(name, names):
            parts += [part for part in show(item, value) if part]
    return "\n\n".join(parts) + "\n"


if __name__ == "__main__":
    (ROOT / "docs" / "api.md").write_text(page(), "utf-8")
