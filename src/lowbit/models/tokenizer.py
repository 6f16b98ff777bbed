"""The tokenizer of a model directory."""

from __future__ import annotations

from typing import TYPE_CHECKING

from lowbit.models.load import first_line, local_directory
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


def tokenizer_of(directory: str) -> PreTrainedTokenizerBase:
    """FormatError naming the directory where it has none that loads."""
    from transformers import AutoTokenizer

    path = local_directory(directory)
    try:
        return AutoTokenizer.from_pretrained(path, local_files_only=True)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path}: found no tokenizer that loads ({first_line(error)})") from error
