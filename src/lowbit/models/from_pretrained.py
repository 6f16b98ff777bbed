"""transformers' own ``from_pretrained`` with our kernels: a quantizer for its registry, and the switch that gives it the
methods that lowbit reads.

transformers builds the model on meta and asks the quantizer to prepare it; every linear that the file holds quantized then
becomes a place without tensors, so the loading of transformers passes it by. When the dense tensors are in, each place
takes its layer from the mapped file, read by ``lowbit.formats`` as in ``lowbit.load``. Saving goes the other way: the
packed layers give their tensors in the format that was read, so whoever wrote the checkpoint can read it again.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import Checkpoint, open_checkpoint
from lowbit.checkpoint.files import METADATA_KEY
from lowbit.formats import FORMATS, config_for
from lowbit.models import ranks
from lowbit.models.api import quantize, resolve_scheme
from lowbit.models.load import Trimmer, check_shape, first_line, local_directory, resolve_activation, untie
from lowbit.models.plan import Plan, check_names, format_of, make_plan
from lowbit.models.replace import get_linear, replace
from lowbit.models.save import dense_linears, described, parts_of
from lowbit.nn import QuantLinear
from lowbit.nn.shards import Half
from lowbit.types import Activation, FormatError, QuantizedWeight

_NEEDS = "lowbit.enable_transformers needs transformers 5.0 or newer (pip install lowbit[models])"
try:
    from transformers import __version__ as _found
    from transformers.quantizers import auto
    from transformers.quantizers.auto import register_quantization_config, register_quantizer
    from transformers.quantizers.base import HfQuantizer
    from transformers.utils.quantization_config import QuantizationConfigMixin
except ImportError as error:
    raise ImportError(f"{_NEEDS}: {first_line(error)}") from error
if int(_found.partition(".")[0]) < 5:
    raise ImportError(f"{_NEEDS}: found {_found}")

__all__ = ["LowbitConfig", "LowbitQuantizer", "disable_transformers", "enable_transformers"]

METHODS = ("gptq", "awq", "compressed-tensors", "auto-round")  # as transformers names what lowbit reads
NAME = "lowbit"


@register_quantization_config(NAME)
class LowbitConfig(QuantizationConfigMixin):
    """``quantization_config=`` of ``from_pretrained``: run this checkpoint's linears in lowbit's kernels.

    ``activation``: "group", "token" or "none" (float), as in ``lowbit.load``; None obeys the checkpoint. ``scheme``: what a
    checkpoint of plain weights is rounded to (to nearest, in the blocks; "w4a8", "w8a8", "w4a16"); a quantized one keeps
    its own. ``save_as``: the format that ``save_pretrained`` writes, a key of ``lowbit.formats.FORMATS``; None is the
    format that was read, "lowbit" where that was none. Raises FormatError for other values.
    """

    def __init__(self, activation: str | None = None, scheme: str = "w4a8", save_as: str | None = None) -> None:
        resolve_activation(activation)
        resolve_scheme(scheme)
        if save_as is not None and save_as not in FORMATS:
            raise FormatError(f"save_as: found {save_as!r}, accepted are {', '.join(FORMATS)}")
        self.quant_method = NAME  # type: ignore[assignment]
        self.activation, self.scheme, self.save_as = activation, scheme, save_as
        self.stored: dict[str, Any] = {"quant_method": NAME}  # what config.json says, or will say
        _install_merge()

    @classmethod
    def from_dict(
        cls, config_dict: Mapping[str, Any], return_unused_kwargs: bool = False, **kwargs: Any
    ) -> LowbitConfig | tuple[LowbitConfig, dict[str, Any]]:
        """The ``quantization_config`` of any checkpoint that lowbit reads; kept, and read when the file is. FormatError as above."""
        made = cls(**{key: kwargs.pop(key) for key in ("activation", "scheme", "save_as") if key in kwargs})
        made.stored = dict(config_dict)
        return (made, kwargs) if return_unused_kwargs else made

    def to_dict(self) -> dict[str, Any]:
        """What config.json says of the weights: the configuration of their format."""
        found: dict[str, Any] = json.loads(json.dumps(self.stored))
        return found


class _Place(nn.Module):
    """Where a quantized linear will be: its shape and no tensors, so that nothing is loaded into it or initialized."""

    def __init__(self, out_features: int, in_features: int) -> None:
        super().__init__()
        self.out_features, self.in_features = out_features, in_features
        self._is_hf_initialized = True  # transformers: leave it alone


@register_quantizer(NAME)
class LowbitQuantizer(HfQuantizer):
    """Puts QuantLinear where the checkpoint has quantized linears. Inference only."""

    requires_calibration = False
    quantization_config: LowbitConfig

    def __init__(self, quantization_config: LowbitConfig, **kwargs: Any) -> None:
        super().__init__(quantization_config, **kwargs)
        self.format: str | None = None  # of the file; None: plain weights
        self._source: tuple[Checkpoint, Plan] | None = None  # between the two halves of loading
        self._cut: ranks.Cut = ranks.whole
        self._ignored: Any = None

    def _process_model_before_weight_loading(self, model: Any, **kwargs: Any) -> None:
        checkpoint = open_checkpoint(_directory(model, kwargs.get("checkpoint_files")))
        self.format, _ = format_of(checkpoint)
        if self.format is None:
            if ranks.asked(model):
                where = f"{checkpoint.path}: found plain weights"
                raise FormatError(f"{where}, accepted with tp_plan are quantized ones (lowbit quantize)")
            return
        plan = make_plan(model, checkpoint)
        head = set() if model.get_output_embeddings() is not None else {"lm_head"}
        plan = plan._replace(layers={name: there for name, there in plan.layers.items() if name not in head})
        for name in (*plan.layers, *plan.halves):
            get_linear(model, name)  # refuses what is no linear, naming it
        if _is_whole(model):
            check_names(model, plan, checkpoint)
        waiting = [*plan.layers, *plan.halves]
        if any(model.get_submodule(name) is model.get_output_embeddings() for name in waiting):
            untie(model)
        for name in waiting:
            linear = get_linear(model, name)
            replace(model, name, _Place(linear.out_features, linear.in_features))
        self._source, self._cut = (checkpoint, plan), ranks.cutting(model, _Place)
        # their tensors are no surprise: transformers reports what it did not expect
        old = self._ignored = model._keys_to_ignore_on_load_unexpected
        names = "|".join(map(re.escape, {*waiting, *plan.layers.values(), *plan.halves.values()}))
        pattern = rf"(^|\.)({names})\.\w+$"
        if waiting:
            model._keys_to_ignore_on_load_unexpected = (
                {*old, pattern} if isinstance(old, set) else [*(old or ()), pattern]
            )

    def _process_model_after_weight_loading(self, model: Any, **kwargs: Any) -> Any:
        if self.format is None:
            quantize(model, self.quantization_config.scheme, "rtn", progress=False)
            chosen = resolve_activation(self.quantization_config.activation)
            if chosen is not None:
                for layer in _layers(model).values():
                    layer.activation = None if chosen.granularity == "none" else chosen.granularity
            return model
        assert self._source is not None
        checkpoint, plan = self._source
        self._source = None
        model._keys_to_ignore_on_load_unexpected = self._ignored
        chosen, trim = resolve_activation(self.quantization_config.activation), Trimmer()
        for name, source in plan.layers.items():
            place = model.get_submodule(name)
            q = _read(plan, checkpoint, name, source, place, chosen)
            q, link = self._cut(model, name, q)
            layer = QuantLinear.from_quantized(q)
            layer.link = link
            replace(model, name, layer.to(_device(model, name)))
            trim(2 * place.out_features * place.in_features)
        for name, source in plan.halves.items():
            bias = checkpoint[f"{source}.bias"] if f"{source}.bias" in checkpoint else None
            stored, link = self._cut(model, name, Half(checkpoint[f"{source}.weight"], bias))
            half = QuantLinear.from_half(*stored)
            half.link = link
            replace(model, name, half.to(_device(model, name)))
        self._cut = ranks.whole
        model.lowbit_made = {key: plan.config.get(key) for key in ("method", "base_sha256", "budget")}
        return model

    def get_state_dict_and_metadata(self, model: Any) -> tuple[dict[str, Tensor], dict[str, str]]:
        """What ``save_pretrained`` writes. Raises FormatError for a layer that the format cannot hold, naming it."""
        format = self.quantization_config.save_as or self.format or NAME
        parts, metadata = parts_of(model), {}
        inside = {*parts.layers, *parts.halves}
        state: dict[str, Tensor] = {}  # model.state_dict() would unpack every layer, to be thrown away
        for name, module in model.named_modules(remove_duplicate=False):
            if name not in inside:
                module._save_to_state_dict(state, f"{name}." if name else "", keep_vars=False)
        for name, half in parts.halves.items():
            weight, bias = half()
            state |= {f"{name}.weight": weight} | ({} if bias is None else {f"{name}.bias": bias})
        for name, layer in parts.layers.items():
            state |= FORMATS[format].write(layer(), name)
        if format == NAME:
            stored, notes = described(model, parts, getattr(model, "lowbit_made", {}))
            metadata[METADATA_KEY] = json.dumps(notes)
        else:
            stored = config_for(format, parts.shells, dense_linears(model, inside))
        self.quantization_config.stored = stored
        model.config.quantization_config = self.quantization_config
        return state, metadata

    def _dequantize(self, model: Any, dtype: torch.dtype | str | None = None) -> Any:
        dtype = getattr(torch, dtype) if isinstance(dtype, str) else dtype  # a saved config holds its name
        for name, layer in _layers(model).items():
            layer.refuse_part(name, "to be made float")
            linear = nn.Linear(layer.in_features, layer.out_features, layer.bias is not None, "meta")
            linear.weight = nn.Parameter(layer.dequantize().to(dtype or model.dtype), requires_grad=False)
            if layer.bias is not None:
                linear.bias = nn.Parameter(layer.bias.to(dtype or model.dtype), requires_grad=False)
            replace(model, name, linear)
        return model

    def is_serializable(self, *args: Any, **kwargs: Any) -> bool:
        return True

    @property
    def is_trainable(self) -> bool:
        return False

    @property
    def is_compileable(self) -> bool:
        return True


def _layers(model: nn.Module) -> dict[str, QuantLinear]:
    return {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}


def _is_whole(model: Any) -> bool:
    """Whether the file must hold all of the model: it is of the class that was saved. Of others (a classifier on a language
    model) transformers makes what is missing, and says so."""
    named, own = model.config.architectures, type(model).__name__
    return own in named if named else own.endswith("ForCausalLM")


def _directory(model: Any, files: Any) -> Path:
    """Where the checkpoint lies: beside the weight files that transformers found."""
    if files:
        return Path(os.path.abspath(files[0])).parent
    return local_directory(str(model.config._name_or_path))


def _read(
    plan: Plan, checkpoint: Checkpoint, name: str, source: str, place: nn.Module, chosen: Activation | None
) -> QuantizedWeight:
    assert plan.format is not None
    with torch.no_grad():
        q = plan.format.read(checkpoint, source, plan.config)
        check_shape(name, q, place)
        return q.with_(activation=chosen or q.activation or Activation(8, "group"))


def _device(model: nn.Module, name: str) -> torch.device:
    """Where a layer's neighbours were put: the nearest module above it that has a tensor."""
    while name:
        name = name.rpartition(".")[0]
        tensor = next(model.get_submodule(name).parameters(), None)
        if tensor is not None and not tensor.is_meta:
            return tensor.device
    return torch.device("cpu")


# ---- the switch ------------------------------------------------------------------------------------------------------
_taken: dict[str, Any] = {}  # method -> the configuration class that transformers had there
_merge: list[Any] = []  # transformers' own merge_quantization_configs, while ours stands before it


def enable_transformers() -> None:
    """From now on ``from_pretrained`` of a GPTQ, AWQ, auto-round, compressed-tensors or lowbit checkpoint makes QuantLinear.

    Replaces four entries in transformers' table of configurations, which name the quantizer. Twice does no more than once. Raises
    ImportError in one line where transformers is absent or too old.
    """
    table = auto.AUTO_QUANTIZATION_CONFIG_MAPPING
    for method in METHODS:
        if method in table and table[method] is not LowbitConfig:
            _taken[method] = table[method]
            table[method] = LowbitConfig


def disable_transformers() -> None:
    """What ``enable_transformers`` and every ``LowbitConfig`` changed in transformers is as it was; models made keep their layers.

    The method "lowbit", which transformers never had, stays registered.
    """
    for method in list(_taken):
        auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = _taken.pop(method)
    if _merge:
        auto.AutoHfQuantizer.merge_quantization_configs = _merge.pop()  # type: ignore[method-assign]


def _install_merge() -> None:
    """transformers lets the configuration in the file win over the argument and refuses another class there; a LowbitConfig
    is not another method but another way to run this one, so it is asked first. All other classes go on as before."""
    if _merge:
        return
    original = auto.AutoHfQuantizer.__dict__["merge_quantization_configs"]

    def merge(cls: Any, quantization_config: Any, quantization_config_from_args: Any) -> Any:
        asked = quantization_config_from_args
        if not isinstance(asked, LowbitConfig):
            return original.__get__(None, cls)(quantization_config, asked)
        stored = quantization_config if isinstance(quantization_config, dict) else quantization_config.to_dict()
        return LowbitConfig.from_dict(stored, activation=asked.activation, scheme=asked.scheme, save_as=asked.save_as)

    _merge.append(original)
    auto.AutoHfQuantizer.merge_quantization_configs = classmethod(merge)  # type: ignore
