"""Dequantize by AutoAWQ's own unpacking; the one file it is in is loaded without the package, whose rest needs a GPU."""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from typing import Any

import torch
from compare import compare
from torch import Tensor

package = importlib.util.find_spec("awq")
assert package is not None and package.submodule_search_locations
path = Path(package.submodule_search_locations[0]) / "utils" / "packing_utils.py"
spec = importlib.util.spec_from_file_location("packing_utils", path)
assert spec is not None and spec.loader is not None
packing_utils = importlib.util.module_from_spec(spec)
spec.loader.exec_module(packing_utils)


def read(tensors: dict[str, Tensor], config: dict[str, Any]) -> Tensor:
    group = config["group_size"] if config["group_size"] != -1 else tensors["qweight"].shape[0]
    weight: Tensor = packing_utils.dequantize_gemm(
        tensors["qweight"], tensors["qzeros"], tensors["scales"].float(), config["bits"], group
    )
    return weight.t()


if __name__ == "__main__":
    torch.set_num_threads(1)
    sys.exit(compare(read))
