"""Shared by the reader scripts: walk the cases, compare what the tool says with what lowbit said."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from torch import Tensor

PREFIX = "model.layers.0.mlp.up_proj"
Reader = Callable[[dict[str, Tensor], dict[str, Any]], Tensor]


def compare(read: Reader) -> int:
    """``read(tensors, config)`` gives W [N, K] float32 of one layer. 0 if every case agrees to the last bit."""
    folder, wrong, count = Path(sys.argv[1]), 0, 0
    for case in sorted(entry for entry in folder.iterdir() if entry.is_dir()):
        config = json.loads((case / "config.json").read_text())["quantization_config"]
        tensors = {
            name.removeprefix(PREFIX + "."): tensor for name, tensor in load_file(case / "model.safetensors").items()
        }
        expected = load_file(case / "expected" / "model.safetensors")["weight"]
        found = read(tensors, config)
        assert found.shape == expected.shape, (case.name, found.shape, expected.shape)
        difference = float((found.float() - expected).abs().max())
        print(f"  {case.name:32} max abs difference {difference:g}")
        wrong += difference != 0.0
        count += 1
    print(f"  {count - wrong} of {count} layers the same")
    return 1 if wrong or not count else 0
