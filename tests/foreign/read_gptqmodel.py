"""Dequantize by GPTQModel's own torch layer, made for the layer as its loader makes it."""

from __future__ import annotations

import os
import sys
from typing import Any

os.environ.setdefault("CUDA_VISIBLE_DEVICES", "")

import torch
from compare import PREFIX, compare
from gptqmodel.nn_modules.qlinear.torch import TorchLinear
from gptqmodel.quantization import QuantizeConfig
from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module
from torch import Tensor


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    parsed = QuantizeConfig.from_quant_config(dict(config))
    bits = parsed.bits
    layer = TorchLinear(
        bits=bits,
        group_size=parsed.group_size,
        sym=parsed.sym,
        desc_act=parsed.desc_act,
        in_features=tensors["qweight"].shape[0] * 32 // bits,
        out_features=tensors["qweight"].shape[1],
        bias="bias" in tensors,
        pack_dtype=torch.int32,
        name=PREFIX,
        register_buffers=True,
    )
    missing = layer.load_state_dict(tensors, strict=False)
    assert not missing.unexpected_keys and not missing.missing_keys, missing
    layer.scales = layer.scales.float()
    if config["checkpoint_format"] == "gptq":
        layer.qzero_format(format=1)
        convert_gptq_v1_to_v2_format_module(layer, bits=bits, pack_dtype=torch.int32)
    return layer.dequantize_weight().t()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(compare(read))
