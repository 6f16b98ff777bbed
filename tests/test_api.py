"""docs/api.md is what the docstrings say, and every public docstring says what it has to: shapes, dtypes, errors, sources."""

from __future__ import annotations

import importlib.util
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

pytest.importorskip("transformers")
ROOT = Path(__file__).parents[1]
_spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
assert _spec and _spec.loader
make_api = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(make_api)

# What computes by a method that somebody described: the docstring has a sentence "Source: ...".
ALGORITHMS = set(
    """lowbit.quantize QuantLinear.from_linear W4A4Linear quantize_activation w4a8_linear w8a8_linear from_gptq from_awq
    accelerate perplexity layer_errors rtn gptq svdquant channel_scales smoothing""".split()
)
SHAPE = re.compile(r"\[[^\]\n]*\b(?:N|K|G|M|R|T|V|B|rows|samples)\b[^\]\n]*\]|\[\.\.\.\]")
DTYPE = re.compile(r"\b(?:u?int8|int32|int64|float16|bfloat16|float32|float64|float|integers?|bool|dtype)\b")
UNITS = ("_seconds", "_ms", "_us", "_tokens", "_bytes")
ERRORS = re.compile(r"\w*Error\b|\b[Nn]othing is refused")


def public() -> Iterator[tuple[str, Any, str]]:
    """(name, what it is, the docstring of the class around it) of everything in docs/api.md."""
    for module, names in make_api.modules().items():
        for name, item in make_api.items(module, names):
            yield name, item, ""
            if isinstance(item, type):
                for member, value in make_api.members(item):
                    yield f"{name}.{member}", value, make_api.doc(item)


def lacks(name: str, item: Any, around: str = "") -> list[str]:
    """What a docstring does not say."""
    said = make_api.doc(item)
    if not said:
        return [f"{name}: no docstring"]
    found = [] if said.rstrip().endswith((".", ":", ")")) else [f"{name}: the docstring does not end with a full stop"]
    if ("lowbit.quantize" if name == "quantize" else name) in ALGORITHMS and "Source: " not in said:
        found.append(f"{name}: no 'Source: ...'")
    if isinstance(item, property):
        return found
    if isinstance(item, type):
        return found + _of_fields(name, item, said)
    parameters = [p for p in inspect.signature(item).parameters.values() if p.name not in ("self", "cls")]
    tensors = [p.name for p in parameters if _is_tensor(p.annotation)]
    missing = [t for t in tensors if not re.search(rf"\b{t}\b", said)]
    if missing:
        found.append(f"{name}: does not name {', '.join(missing)}")
    if tensors or _is_tensor(inspect.signature(item).return_annotation):
        found += [] if SHAPE.search(said) else [f"{name}: no shape in brackets"]
        found += [] if DTYPE.search(said) else [f"{name}: no dtype"]
    if parameters and not ERRORS.search(said):
        found.append(f"{name}: does not say which errors it raises, or that nothing is refused")
    return found


def _of_fields(name: str, item: type, said: str) -> list[str]:
    """A field is told of in the comment behind it, in the docstring, or by a unit in its name; a tensor's comment has shape and dtype."""
    wrong = []
    for field, kind, comment in make_api.fields(item):
        if not comment and not re.search(rf"\b{field}\b", said) and not field.endswith(UNITS):
            wrong.append(f"{name}.{field}: nothing says what it is")
        if _is_tensor(kind):
            wrong += [] if SHAPE.search(comment) else [f"{name}.{field}: no shape in brackets"]
            wrong += [] if DTYPE.search(comment) else [f"{name}.{field}: no dtype"]
    return wrong


def _is_tensor(annotation: Any) -> bool:
    return annotation is Tensor or bool(re.search(r"\bTensor\b", str(annotation)))


def test_the_page_is_up_to_date() -> None:
    assert (ROOT / "docs" / "api.md").read_text("utf-8") == make_api.page(), "run `make docs`"


@pytest.mark.parametrize("name", sorted({name.split(".")[0] for name, _, _ in public()}))
def test_a_public_docstring_says_shapes_dtypes_errors_and_sources(name: str) -> None:
    found = [line for full, item, _ in public() if full.split(".")[0] == name for line in lacks(full, item)]
    assert found == []


def test_every_algorithm_is_public() -> None:
    assert ALGORITHMS - {name for name, _, _ in public()} == {"lowbit.quantize"}


def test_the_page_has_what_is_public() -> None:
    import lowbit
    from lowbit import functional, omnivoice

    page = (ROOT / "docs" / "api.md").read_text("utf-8")
    names = {*lowbit.__all__, *functional.__all__, *omnivoice.__all__, "W4A8Linear", "W8A8Linear", "Fp16Linear"}
    assert [name for name in sorted(names) if f"### `{name}`" not in page] == []


def _bad() -> list[tuple[Any, str]]:
    def nothing(x: int) -> int:
        return x

    def no_errors(x: int) -> int:
        """Doubles x."""
        return 2 * x

    def no_shape(x: Tensor) -> Tensor:
        """Doubles x, float32. ValueError for more."""
        return 2 * x

    def no_dtype(x: Tensor) -> Tensor:
        """Doubles x [N, K]. ValueError for more."""
        return 2 * x

    def unnamed(x: Tensor, other: Tensor) -> Tensor:
        """Doubles x [N, K], float32. ValueError for more."""
        return 2 * x

    def gptq(x: Tensor) -> Tensor:
        """Doubles x [N, K], float32. ValueError for more."""
        return 2 * x

    return [
        (nothing, "no docstring"), (no_errors, "errors"), (no_shape, "no shape"), (no_dtype, "no dtype"),
        (unnamed, "does not name other"), (gptq, "Source"),
    ]  # fmt: skip


@pytest.mark.parametrize("function, word", _bad())
def test_a_docstring_that_lacks_something_is_found(function: Any, word: str) -> None:
    (said,) = lacks(function.__name__, function)
    assert word in said


def test_a_docstring_that_says_everything_passes() -> None:
    def gptq(x: Tensor) -> Tensor:
        """Doubles x [N, K], float32. ValueError for more. Source: nobody, 2026."""
        return 2 * x

    assert lacks("gptq", gptq) == []
