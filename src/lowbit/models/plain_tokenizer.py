"""The tokenizer of a model directory through the ``tokenizers`` library alone, where that is what transformers would run.

AutoTokenizer reads the model's config, which imports torch.distributed and sympy (90 MB, seconds). For most directories it
then runs tokenizer.json as it stands; for some it builds a pipeline of its own over the vocabulary, adds tokens, or
takes another class. Only the first case, proven from the files, is answered here.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from lowbit.checkpoint.files import json_file
from lowbit.models.families import FAMILIES
from lowbit.models.load import local_directory
from lowbit.types import FormatError


class PlainTokenizer:
    """tokenizer.json as it stands: no padding, no truncation."""

    def __init__(self, core: Any) -> None:
        core.no_padding()
        core.no_truncation()
        self._core = core

    def __call__(self, text: str) -> dict[str, list[int]]:
        return {"input_ids": self._core.encode(text).ids}

    def decode(self, token_ids: Sequence[int], skip_special_tokens: bool = False) -> str:
        return str(self._core.decode(token_ids, skip_special_tokens=skip_special_tokens))


def plain_tokenizer(directory: str) -> PlainTokenizer | None:
    """None where transformers has to decide, or where a file is malformed (it words the error)."""
    path = local_directory(directory)
    try:
        config, settings = json_file(path, "config.json"), json_file(path, "tokenizer_config.json")
        side = [json_file(path, name) or {} for name in ("special_tokens_map.json", "added_tokens.json")]
        from tokenizers import Tokenizer

        core = Tokenizer.from_file(str(path / "tokenizer.json"))
    except (FormatError, ImportError):
        return None
    except Exception:  # the library raises nothing narrower
        return None
    if not config or not settings or (path / "tekken.json").exists():
        return None
    try:
        same = _runs_the_file(config, settings, core) and _knows_every_token(settings, side, core)
    except (TypeError, ValueError, AttributeError, KeyError):  # a value of a type that none of this expects
        return None
    return PlainTokenizer(core) if same else None


# Settings under which transformers does something of its own.
_FOREIGN = ("auto_map", "fast_tokenizer_files", "split_special_tokens", "fix_mistral_regex", "tokenizer_file",
            "clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output")  # fmt: skip
_PLAIN = ("TokenizersBackend", "PreTrainedTokenizer")


def _runs_the_file(config: Mapping[str, Any], settings: Mapping[str, Any], core: Any) -> bool:
    """Whether the class that transformers picks (its models/auto/tokenization_auto.py) keeps to tokenizer.json."""
    family, name = config.get("model_type"), settings.get("tokenizer_class")
    if family not in FAMILIES or not isinstance(name, str) or any(settings.get(key) for key in _FOREIGN):
        return False
    if type(core.model).__name__ != "BPE":
        return False
    name = name.removesuffix("Fast")
    if family == "mistral":  # above that size it looks for a known bad pattern
        return int(core.get_vocab_size()) <= 100_000
    if family == "qwen2" or (family == "qwen3" and name == "Qwen2Tokenizer"):
        return not settings.get("add_prefix_space") and _is_qwen(core)
    if family == "llama" and name == "LlamaTokenizer":
        return any("ByteLevel" in str(_state(getattr(core, part))) for part in ("pre_tokenizer", "decoder"))
    return name in _PLAIN


def _state(part: Any) -> Any:
    """The JSON of one stage of a pipeline."""
    return None if part is None else json.loads(part.__getstate__())


_QWEN_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


def _is_qwen(core: Any) -> bool:
    """Whether tokenizer.json holds the pipeline that Qwen2Tokenizer builds whatever the file says."""
    model, words = core.model, _state(core.pre_tokenizer) or {}
    stages = words.get("pretokenizers") or [{}, {}]
    split = {"type": "Split", "pattern": {"Regex": _QWEN_WORDS}, "behavior": "Isolated", "invert": False}
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False}
    added = sorted(index for index in core.get_added_tokens_decoder())
    first = core.get_vocab_size(with_added_tokens=False)
    return (
        len(stages) == 2
        and stages[0] == split
        and {key: stages[1].get(key) for key in bytes_} == bytes_
        and (_state(core.normalizer) or {}).get("type") == "NFC"
        and (_state(core.decoder) or {}).get("type") == "ByteLevel"
        and not any((model.dropout, model.unk_token, model.fuse_unk, model.byte_fallback, model.ignore_merges))
        and not (model.continuing_subword_prefix or model.end_of_word_suffix)
        and added == list(range(first, first + len(added)))
    )


def _knows_every_token(settings: Mapping[str, Any], side: Sequence[Mapping[str, Any]], core: Any) -> bool:
    """Whether each token that the side files name is one of tokenizer.json already, so that none will be added."""
    from tokenizers import AddedToken

    added = core.get_added_tokens_decoder()
    rows = settings.get("added_tokens_decoder")
    if rows is None:  # only then are special_tokens_map.json and added_tokens.json read
        sources = [settings, side[0]]
        if any(index not in added or added[index].content != text for text, index in side[1].items()):
            return False
    else:
        sources = [settings]
        if {int(index): repr(AddedToken(**row)) for index, row in rows.items()} != {
            index: repr(token) for index, token in added.items()
        }:
            return False
    used: list[Any] = []
    for source in sources:
        used += [value for key, value in source.items() if key.endswith("_token") and not key.startswith("add_")]
        for key in ("extra_special_tokens", "additional_special_tokens"):
            extra = source.get(key) or ()
            used += extra.values() if isinstance(extra, dict) else extra
    if settings["tokenizer_class"].startswith("Qwen2"):  # its own defaults
        used += [settings.get(key, "<|endoftext|>") for key in ("unk_token", "eos_token", "pad_token")]
    texts = [value["content"] if isinstance(value, dict) else value for value in used if value is not None]
    return set(texts) <= {token.content for token in added.values() if token.special}
