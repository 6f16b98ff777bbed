"""Dequantize by compressed-tensors' own decompressors, with the scheme its own configuration classes make of ours."""

from __future__ import annotations

import sys
from typing import Any

import compressed_tensors
import torch
from compare import PREFIX, compare
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationConfig
from torch import Tensor


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    parsed = QuantizationConfig.model_validate(config)
    (scheme,) = parsed.config_groups.values()
    label = getattr(scheme, "format", None) or config["format"]
    compressor = BaseCompressor.get_value_from_registry(getattr(label, "value", label))
    tensors = {name: t.float() if name == "weight_scale" else t for name, t in tensors.items()}
    if isinstance(vars(BaseCompressor).get("decompress"), classmethod):  # since 0.14: per module
        return compressor.decompress(tensors, scheme)["weight"]
    names = {f"{PREFIX}.{name}": tensor for name, tensor in tensors.items()}
    instance = compressor(config=parsed) if callable(compressor) else compressor
    found = dict(instance.decompress_from_state_dict(names, {PREFIX: scheme}))
    return found[PREFIX]["weight"]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"  compressed_tensors {compressed_tensors.__version__}")
    sys.exit(compare(read))
