"""Which linears take other activations than the scheme's: "down_proj=a8" and the like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..types import Activation, FormatError
from .recipes import matches

PRECISIONS: dict[str, Activation] = {
    "a4": Activation(4, "group"),
    "a8": Activation(8, "group"),
    "a8-token": Activation(8, "token"),
    "a16": Activation(16, "none"),
}


def parse(text: str) -> tuple[str, Activation]:
    """NAME=PRECISION -> (name, activation). FormatError for anything else."""
    name, equals, word = text.partition("=")
    if not name or not equals or word not in PRECISIONS:
        raise FormatError(f"override: found {text!r}, accepted is NAME=PRECISION with {', '.join(PRECISIONS)}")
    return name, PRECISIONS[word]


def activations_of(names: Sequence[str], overrides: Mapping[str, str | Activation]) -> dict[str, Activation]:
    """{linear: its activation} for those that an override names (whole dotted name, beginning or end); the last match
    counts. FormatError for an override that names none."""
    found: dict[str, Activation] = {}
    for pattern, value in overrides.items():
        activation = parse(f"{pattern}={value}")[1] if isinstance(value, str) else value
        hits = [name for name in names if matches(name, (pattern,))]
        if not hits:
            raise FormatError(
                f"override: found {pattern!r}, which names no quantized linear; accepted are dotted names or their ends"
            )
        found |= dict.fromkeys(hits, activation)
    return found
