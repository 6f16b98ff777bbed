"""tokenizer.json read without transformers: the same tokens as AutoTokenizer's, or no answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

import samples
from lowbit.engines.decode import TextStream, encode
from lowbit.models.plain_tokenizer import PlainTokenizer, plain_tokenizer

transformers = pytest.importorskip("transformers")
tokenizers = pytest.importorskip("tokenizers")
TEXT = (
    "The quick brown fox doesn't jump over 12345 lazy dogs; I'LL SAY: \u00e9t\u00e9, e\u0301te\u0301, \u6f22\u5b57! "
    * 20
)
TEXTS = (
    "The quick brown fox", "", " ", "  two  spaces\n\nand lines \n", "Say<|endoftext|>it<|im_end|> again", "don't DON'T I'Ll",
    "12345 and 6", "\u00e9 e\u0301 \u6f22\u5b57 \U0001f389 \u200d", "<s>x</s> <|other|>y", "a" * 300,
)  # fmt: skip
SPECIAL = ("<|endoftext|>", "<|im_start|>", "<|im_end|>")
QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "unk_token": None, "add_prefix_space": False, "add_bos_token": False, "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"], "errors": "replace",
        "clean_up_tokenization_spaces": False}  # fmt: skip
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def core(kind: str) -> Any:
    """A BPE of bytes with some merges: "qwen" has the pipeline of Qwen2Tokenizer, "bos" puts a token in front, "gpt2" is
    bytes alone, "digits" splits digits first."""
    from tokenizers import (
        AddedToken,
        Regex,
        Tokenizer,
        decoders,
        models,
        normalizers,
        pre_tokenizers,
        processors,
        trainers,
    )

    made = Tokenizer(models.BPE())
    made.decoder = decoders.ByteLevel()
    words = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind != "qwen")
    made.pre_tokenizer = words
    if kind == "qwen":
        made.normalizer = normalizers.NFC()
        split = transformers.models.qwen2.tokenization_qwen2.PRETOKENIZE_REGEX
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(split), "isolated"), words])
        made.post_processor = processors.ByteLevel(trim_offsets=False)
    if kind == "digits":
        made.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), words])
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made.train_from_iterator(
        [TEXT], trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, show_progress=False)
    )
    made.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIAL])
    made.add_tokens([AddedToken("<|other|>", normalized=False)])
    if kind == "bos":
        bos = made.token_to_id("<|im_start|>")
        made.post_processor = processors.TemplateProcessing(
            single="<|im_start|> $A", pair="<|im_start|> $A $B", special_tokens=[("<|im_start|>", bos)]
        )
        made.enable_truncation(4)
        made.enable_padding(length=6)
    return made


def write(path: Path, family: str, kind: str, settings: dict[str, Any], listed: bool = False) -> Path:
    """A directory; with ``listed``, tokenizer_config.json repeats the added tokens, as most do."""
    path.mkdir()
    made = core(kind)
    made.save(str(path / "tokenizer.json"))
    if listed:
        rows = json.loads((path / "tokenizer.json").read_text())["added_tokens"]
        settings = {**settings, "added_tokens_decoder": {str(row.pop("id")): row for row in rows}}
    (path / "tokenizer_config.json").write_text(json.dumps(settings))
    (path / "config.json").write_text(json.dumps({"model_type": family}))
    return path


def same(path: Path) -> None:
    mine, want = plain_tokenizer(str(path)), transformers.AutoTokenizer.from_pretrained(path, local_files_only=True)
    assert isinstance(mine, PlainTokenizer)
    for text in TEXTS:
        ids = encode(want, text)
        assert encode(mine, text) == ids
        for skip in (True, False):
            assert mine.decode(ids, skip_special_tokens=skip) == want.decode(ids, skip_special_tokens=skip)


@pytest.mark.parametrize(
    ("family", "kind", "settings"),
    [
        ("llama", "gpt2", PLAIN), ("llama", "bos", PLAIN), ("llama", "digits", {**PLAIN, "tokenizer_class": "TokenizersBackend"}),
        ("llama", "bos", {**PLAIN, "tokenizer_class": "LlamaTokenizerFast", "add_bos_token": False, "add_eos_token": True}),
        ("mistral", "digits", {**PLAIN, "tokenizer_class": "LlamaTokenizer"}),
        ("mistral", "bos", {**PLAIN, "clean_up_tokenization_spaces": True}), ("qwen3", "digits", PLAIN),
        ("qwen3", "qwen", QWEN), ("qwen2", "qwen", QWEN), ("qwen2", "qwen", {**PLAIN, "tokenizer_class": "Qwen2TokenizerFast"}),
        ("llama", "gpt2", {**PLAIN, "extra_special_tokens": {"image_token": "<|im_start|>"}, "boi_token": "<|im_end|>"}),
    ],
)  # fmt: skip
@pytest.mark.parametrize("listed", [True, False])
def test_tokens_and_text_are_those_of_transformers(
    family: str, kind: str, settings: dict[str, Any], listed: bool, tmp_path: Path
) -> None:
    same(write(tmp_path / "t", family, kind, settings, listed))


def test_the_directory_that_transformers_saves(tmp_path: Path) -> None:
    samples.byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>").save_pretrained(tmp_path)
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    same(tmp_path)
    (tmp_path / "special_tokens_map.json").write_text('{"bos_token": {"content": "<s>", "lstrip": false}}')
    (tmp_path / "added_tokens.json").write_text('{"<pad>": 0}')
    same(tmp_path)


CHANGED: dict[str, tuple[str, str, dict[str, Any]]] = {
    "a class with a pipeline of its own": ("llama", "digits", {**PLAIN, "tokenizer_class": "GPT2Tokenizer"}),
    "no class": ("llama", "gpt2", {"bos_token": "<|im_start|>"}),
    "another pipeline than Qwen's": ("qwen3", "digits", QWEN),
    "another pipeline than Qwen's, by family": ("qwen2", "gpt2", PLAIN),
    "Qwen with a space in front": ("qwen3", "qwen", {**QWEN, "add_prefix_space": True}),
    "a token that is not there": ("llama", "gpt2", {**PLAIN, "pad_token": "<pad>"}),
    "a token that is not special": ("llama", "gpt2", {**PLAIN, "pad_token": "<|other|>"}),
    "an extra token": ("llama", "gpt2", {**PLAIN, "additional_special_tokens": ["<new>"]}),
    "a listed token": ("llama", "gpt2", {**PLAIN, "added_tokens_decoder": {"999": {"content": "<new>"}}}),
    "code": ("llama", "gpt2", {**PLAIN, "auto_map": {"AutoTokenizer": ["a.b", None]}}),
    "special tokens split": ("llama", "gpt2", {**PLAIN, "split_special_tokens": True}),
    "another family": ("phi", "gpt2", PLAIN),
    "nonsense": ("llama", "gpt2", {**PLAIN, "added_tokens_decoder": [1]}),
}


@pytest.mark.parametrize("name", CHANGED)
def test_there_is_no_answer_where_transformers_does_something_of_its_own(name: str, tmp_path: Path) -> None:
    assert plain_tokenizer(str(write(tmp_path / "t", *CHANGED[name]))) is None


@pytest.mark.parametrize(
    ("file", "text"),
    [
        ("tokenizer.json", "{"), ("tokenizer_config.json", "{"), ("tokenizer_config.json", None), ("config.json", "[]"),
        ("tokenizer.json", None), ("special_tokens_map.json", '{"pad_token": "<pad>"}'), ("added_tokens.json", '{"<new>": 9}'),
        ("tekken.json", "{}"),
    ],
)  # fmt: skip
def test_there_is_no_answer_from_other_or_malformed_files(file: str, text: str | None, tmp_path: Path) -> None:
    path = write(tmp_path / "t", "llama", "gpt2", PLAIN)
    assert plain_tokenizer(str(path)) is not None
    if text is None:
        (path / file).unlink()
    else:
        (path / file).write_text(text)
    assert plain_tokenizer(str(path)) is None


def test_text_comes_in_whole_characters(tmp_path: Path) -> None:
    mine = plain_tokenizer(str(write(tmp_path / "t", "llama", "gpt2", PLAIN)))
    assert mine is not None
    parts: list[str] = []
    stream = TextStream(mine, parts.append)
    for token in encode(mine, "fox \U0001f389!"):
        stream(token)
    stream.close()
    assert "".join(parts) == "fox \U0001f389!" and all("\ufffd" not in part for part in parts)
