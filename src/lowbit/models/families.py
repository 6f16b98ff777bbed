"""What config.json says of the four families that the native engine runs, completed as transformers completes it.

Knows every field that decides the weights, the angles and the window. Where a value is none that it knows, or transformers
would refuse it, there is no answer: such a model takes the way over transformers, which words the refusal too.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any


class Config(SimpleNamespace):
    """The fields as attributes, named as in transformers, and ``qkv_bias``, ``o_bias``, ``mlp_bias``, ``windows``."""

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(f"config.{name}: not kept for the native engine; lowbit.load(path) makes a whole model")


def _size(value: object) -> bool:
    return type(value) is int and value > 0


def _size_or_none(value: object) -> bool:
    return value is None or _size(value)


def _number(value: object) -> bool:
    return type(value) in (int, float)


def _flag(value: object) -> bool:
    return type(value) is bool


def is_tokens(value: object) -> bool:
    """Whether it can be an ``eos_token_id``: a token, a list of them, or None."""
    return value is None or all(type(token) is int for token in (value if isinstance(value, list) else [value]))


_FIELDS: dict[str, Callable[[Any], bool]] = {
    "vocab_size": _size, "hidden_size": _size, "intermediate_size": _size, "num_hidden_layers": _size,
    "num_attention_heads": _size, "num_key_value_heads": _size_or_none, "head_dim": _size_or_none,
    "max_position_embeddings": _size, "hidden_act": lambda value: value == "silu",
    "rms_norm_eps": lambda value: type(value) is float and value > 0, "tie_word_embeddings": _flag,
    "attention_bias": _flag, "mlp_bias": _flag, "use_sliding_window": _flag, "sliding_window": _size_or_none,
    "max_window_layers": lambda value: type(value) is int and value >= 0,
    "layer_types": lambda value: value is None or isinstance(value, list),
    "eos_token_id": is_tokens, "pad_token_id": lambda value: value is None or type(value) is int,
}  # fmt: skip
_COMMON: dict[str, Any] = {
    "hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32, "head_dim": None, "hidden_act": "silu",
    "rms_norm_eps": 1e-6, "tie_word_embeddings": False, "pad_token_id": None,
}  # fmt: skip
_QWEN: dict[str, Any] = {
    **_COMMON, "vocab_size": 151936, "intermediate_size": 22016, "num_key_value_heads": 32,
    "max_position_embeddings": 32768, "use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28,
    "layer_types": None, "eos_token_id": None,
}  # fmt: skip
FAMILIES: dict[str, dict[str, Any]] = {
    "llama": {
        **_COMMON, "vocab_size": 32000, "intermediate_size": 11008, "num_key_value_heads": None,
        "max_position_embeddings": 2048, "attention_bias": False, "mlp_bias": False, "eos_token_id": 2,
    },
    "mistral": {
        **_COMMON, "vocab_size": 32000, "intermediate_size": 14336, "num_key_value_heads": 8,
        "max_position_embeddings": 131072, "sliding_window": 4096, "eos_token_id": 2,
    },
    "qwen2": _QWEN,
    "qwen3": {**_QWEN, "head_dim": 128, "attention_bias": False},
}  # fmt: skip
# Fields that change the model elsewhere in transformers.
_FOREIGN = ("auto_map", "per_layer_config", "text_config", "original_max_position_embeddings")
_NOT_NULL = {("mistral", "num_key_value_heads"), ("qwen2", "head_dim"), ("qwen3", "head_dim")}


def read(raw: Mapping[str, Any]) -> Config | None:
    """The config of a config.json's content; None where the native engine or this file does not know it."""
    family = raw.get("model_type")
    if not isinstance(family, str) or family not in FAMILIES or any(key in raw for key in _FOREIGN):
        return None
    values = {key: raw.get(key, default) for key, default in FAMILIES[family].items()}
    if not all(_FIELDS[key](value) for key, value in values.items()):
        return None
    if any(family == one and raw.get(key, 0) is None for one, key in _NOT_NULL):
        return None
    c = Config(model_type=family, **values)
    c.num_key_value_heads = c.num_key_value_heads or c.num_attention_heads
    c.head_dim = c.head_dim or c.hidden_size // c.num_attention_heads
    c.rope_parameters = _rope(raw, c.max_position_embeddings)
    c.windows = _windows(c, raw)
    c.qkv_bias = family == "qwen2" or values.get("attention_bias", False)
    c.o_bias = values.get("attention_bias", False)
    c.mlp_bias = values.get("mlp_bias", False)
    fits = (
        c.num_attention_heads % c.num_key_value_heads == 0
        and c.head_dim % 2 == 0
        and (family != "llama" or c.hidden_size % c.num_attention_heads == 0)
        and (c.pad_token_id is None or -c.vocab_size <= c.pad_token_id < c.vocab_size)
    )
    return None if c.rope_parameters is None or c.windows is None or not fits else c


def _windows(c: Config, raw: Mapping[str, Any]) -> list[int | None] | None:
    """The sliding window of every layer, None for one that sees everything."""
    count = c.num_hidden_layers
    if not c.model_type.startswith("qwen"):
        window = c.sliding_window if c.model_type == "mistral" else None
        return None if "layer_types" in raw else [window] * count
    c.sliding_window = c.sliding_window if c.use_sliding_window else None
    if c.layer_types is None:
        first = count if c.sliding_window is None else c.max_window_layers
        c.layer_types = ["sliding_attention" if layer >= first else "full_attention" for layer in range(count)]
    known = all(kind in ("full_attention", "sliding_attention") for kind in c.layer_types)
    if len(c.layer_types) != count or not known:
        return None
    return [c.sliding_window if kind == "sliding_attention" else None for kind in c.layer_types]


_ROPE: dict[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings"),
}


def _rope(raw: Mapping[str, Any], positions: int) -> dict[str, Any] | None:
    """``rope_parameters`` from any of the spellings of a config.json; None for angles that are not made here."""
    given = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    if not isinstance(given, dict) or any(isinstance(value, (dict, list)) for value in given.values()):
        return None
    found: dict[str, Any] = {"rope_theta": raw.get("rope_theta", 10000.0), **given}
    found.setdefault("rope_type", found.get("type", "default"))
    if found["rope_type"] not in _ROPE:
        return None
    if found["rope_type"] == "llama3":
        found.setdefault("original_max_position_embeddings", positions)
    needed = _ROPE[found["rope_type"]]
    numbers = all(_number(found.get(key)) for key in ("rope_theta", *needed))
    if not numbers or found["rope_theta"] <= 0 or (needed and found["factor"] < 1):
        return None
    if found["rope_type"] == "llama3":
        low, high, old = (found[key] for key in needed[1:])
        if not 0 < low < high or not 0 < old < positions:
            return None
    whole = all(holder.get("partial_rotary_factor", 1) == 1 for holder in (found, raw))
    return found if whole else None
