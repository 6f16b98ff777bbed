"""Quantize by GPTQModel's own code, on given samples, and write what its checkpoint dequantizes to by its own layer.

    python quantize_gptqmodel.py MODEL SAMPLES OUT [--no-sym] [--order static] [--mse 2.4]

``--order``: "gar", the tool's default (columns in the order of their activations within a group, groups as wholes);
"static", act-order with groups of neighbours; "free", act-order with groups of the sorted columns, whose group index
is stored; "none". ``--mse`` is the tool's search of a clip by |error|^mse; its default is none.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any

import torch
from common import Clock, device_name, parser, read_samples, stored_bits, versions, write_result
from safetensors.torch import load_file
from torch import Tensor

ORDERS = {
    "gar": {"desc_act": False, "act_group_aware": True},
    "static": {"desc_act": True, "act_group_aware": False, "static_groups": True},
    "free": {"desc_act": True, "act_group_aware": False},
    "none": {"desc_act": False, "act_group_aware": False},
}


def dequantize(folder: Path, config: Any) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Name -> W [N, K] float32 by the tool's torch layer, and name -> the group of every column."""
    from gptqmodel.nn_modules.qlinear.torch import TorchLinear
    from gptqmodel.utils.model import convert_gptq_v1_to_v2_format_module

    tensors: dict[str, Tensor] = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= load_file(path)
    weights, groups = {}, {}
    for name in [key.removesuffix(".qweight") for key in tensors if key.endswith(".qweight")]:
        own = {key.removeprefix(f"{name}."): t for key, t in tensors.items() if key.startswith(f"{name}.")}
        layer = TorchLinear(
            bits=config.bits,
            group_size=config.group_size,
            sym=config.sym,
            desc_act=config.desc_act,
            in_features=own["qweight"].shape[0] * 32 // config.bits,
            out_features=own["qweight"].shape[1],
            bias="bias" in own,
            pack_dtype=torch.int32,
            name=name,
            register_buffers=True,
        )
        missing = layer.load_state_dict(own, strict=False)
        assert not missing.unexpected_keys and not missing.missing_keys, missing
        layer.scales = layer.scales.float()
        layer.qzero_format(format=1)
        convert_gptq_v1_to_v2_format_module(layer, bits=config.bits, pack_dtype=torch.int32)
        weights[name] = layer.dequantize_weight().t().float()
        groups[name] = own["g_idx"].long()
    return weights, groups


def main() -> None:
    p = parser(__doc__)
    p.add_argument("--order", choices=ORDERS, default="gar")
    p.add_argument("--mse", type=float, default=0.0, metavar="POWER")
    p.add_argument("--damp", type=float, metavar="PART", help="of the mean diagonal (default: the tool's)")
    p.add_argument("--batch", type=int, default=1, metavar="SAMPLES")
    args = p.parse_args()
    if args.device == "cpu":
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        os.environ.setdefault("GPTQMODEL_CPU_WORKERS", "2")  # its default on two cores, one, is refused by itself
    if args.threads:
        torch.set_num_threads(args.threads)
    samples = read_samples(args.samples, args.nsamples)

    from gptqmodel import GPTQModel
    from gptqmodel.quantization import QuantizeConfig

    config = QuantizeConfig(
        bits=args.bits,
        group_size=args.group,
        sym=args.sym,
        mse=args.mse,
        damp_percent=args.damp,
        device=args.device,
        **ORDERS[args.order],
    )
    clock = Clock()
    model = GPTQModel.load(str(args.model), config, dtype=torch.float32)
    rows = [{"input_ids": row, "attention_mask": torch.ones_like(row)} for row in samples]
    model.quantize(rows, batch_size=args.batch)
    with tempfile.TemporaryDirectory() as folder:
        model.save(folder)
        seconds = clock.seconds()
        weights, groups = dequantize(Path(folder), config)
    settings = {
        "peer": "GPTQModel",
        **versions("gptqmodel", "torch", "transformers"),
        "bits": args.bits,
        "group": args.group,
        "symmetric": args.sym,
        "order": args.order,
        "mse": args.mse,
        "damp": config.damp_percent,
        "samples": len(samples),
        "sample_tokens": samples.shape[1],
        "batch": args.batch,
        "bits_per_weight": stored_bits(weights, args.bits, args.group, args.sym, args.order == "free"),
        **seconds,
        "beside": args.beside,
        "device": device_name(args.device),
    }
    write_result(args.model, args.out, weights, settings, bits=args.bits, group=args.group, order=groups)


if __name__ == "__main__":
    main()
