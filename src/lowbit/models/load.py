"""A checkpoint directory to a running model: built empty, then filled one layer at a time from the mapped file."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbit.checkpoint import Checkpoint, open_checkpoint
from lowbit.checkpoint.residency import drop_clean_pages
from lowbit.models.plan import Plan, check_names, listed, make_plan, tied_names
from lowbit.models.replace import get_linear, replace
from lowbit.nn import QuantLinear
from lowbit.ops_cuda import device_there
from lowbit.types import Activation, FormatError, QuantizedWeight

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ACTIVATIONS: dict[str, Activation] = {
    "group": Activation(8, "group"),
    "token": Activation(8, "token"),
    "none": Activation(16, "none"),
}


def load(
    path: str | os.PathLike[str],
    device: str | torch.device | None = None,
    activation: str | None = None,
    dtype: torch.dtype | None = torch.float32,
) -> PreTrainedModel:
    """A causal LM or an encoder-decoder (Whisper) of transformers from a directory (or a hub id that is already cached),
    its linears quantized.

    Reads GPTQ, AWQ, compressed-tensors, lowbit and plain weights. Quantized linears become QuantLinear, everything
    else is cast to ``dtype``; None leaves it as it is stored, mapped and not copied (for the native engine, which
    reads every type; a forward of transformers may refuse a mixture). ``activation`` is ``"group"``, ``"token"`` or
    ``"none"`` (float); None obeys what the checkpoint declares and takes ``"group"`` where it declares nothing. The
    model comes in eval mode, on ``device`` (CPU where None). While loading, anonymous memory stays below the finished model plus its largest layer in float32.
    Raises FormatError for anything malformed, before a weight is copied.
    """
    chosen = resolve_activation(activation)
    if device is not None:
        device = device_there(device)
    checkpoint = open_checkpoint(local_directory(path))
    model = build_empty(checkpoint.path, dtype or torch.float32)
    complete(model, checkpoint, chosen, dtype)
    generation_config(model, checkpoint.path)
    if device is not None:
        model.to(device)  # type: ignore[arg-type]
    return model


def complete(model: nn.Module, checkpoint: Checkpoint, chosen: Activation | None, dtype: torch.dtype | None) -> None:
    """Fill a model that was built empty, as ``load`` promises. Of a model of transformers it asks the names of its
    modules and parameters, ``get_expanded_tied_weights_keys`` and ``config.tie_word_embeddings``, no more."""
    plan = make_plan(model, checkpoint)
    for name in plan.layers:  # every refusal that needs no data comes first
        get_linear(model, name)
    check_names(model, plan, checkpoint)
    trim = Trimmer()
    for name in plan.layers:
        replace(model, name, _quantized(model, plan, checkpoint, name, chosen, trim))
    for name in plan.halves:
        replace(model, name, QuantLinear.from_linear(_dense_linear(model, plan, checkpoint, name), "fp16"))
    fill(model, plan, checkpoint, dtype)
    tie(model, plan)
    _refuse_meta(model, checkpoint)
    model.requires_grad_(False)
    model.train(False)
    model.name_or_path = str(checkpoint.path)  # type: ignore[assignment]
    model.lowbit_made = {key: plan.config.get(key) for key in ("method", "base_sha256", "budget")}  # type: ignore[assignment]
    drop_clean_pages(checkpoint.path)


def to_dtype(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast what is dense, in place, and leave the packed linears alone. What is shared stays shared."""
    made: dict[int, nn.Parameter] = {}
    for module in model.modules():
        if isinstance(module, QuantLinear):
            continue
        for key, parameter in module._parameters.items():
            if parameter is not None and parameter.is_floating_point():
                if id(parameter) not in made:
                    made[id(parameter)] = nn.Parameter(parameter.data.to(dtype), requires_grad=False)
                module._parameters[key] = made[id(parameter)]
        for key, buffer in module._buffers.items():
            if buffer is not None and buffer.is_floating_point() and key not in module._non_persistent_buffers_set:
                module._buffers[key] = buffer.to(dtype)


def exactly(model: nn.Module) -> int:
    """Simulate true 4-bit activations in every layer that declares them; returns how many do."""
    layers = [m for m in model.modules() if isinstance(m, QuantLinear) and m.declares().bits == 4]
    for layer in layers:
        layer.activation_bits = 4
    return len(layers)


def resolve_activation(name: str | None) -> Activation | None:
    """The Activation of a public name; None stays None. Raises FormatError for a word that is none of the three."""
    if name is None:
        return None
    if name not in ACTIVATIONS:
        raise FormatError(f"activation: found {name!r}, accepted are {', '.join(ACTIVATIONS)}")
    return ACTIVATIONS[name]


def local_directory(path: str | os.PathLike[str]) -> Path:
    """The directory itself, or the cached snapshot of a hub id (never downloads). FormatError where neither is there."""
    found = Path(path)
    if found.is_dir():
        if not (found / "config.json").exists():
            raise FormatError(f"{found}: found no config.json, accepted is the directory of a transformers model")
        return found
    if found.exists():
        raise FormatError(f"{found}: found a file, accepted is a directory with config.json and *.safetensors")
    name = os.fspath(path)
    if name.count("/") == 1 and not name.startswith((".", "/", "~")):
        from huggingface_hub import snapshot_download

        try:
            return Path(snapshot_download(name, local_files_only=True))
        except (OSError, ValueError):
            pass
    raise FormatError(f"{name}: found no such directory and no cached hub model, accepted is either")


class _EmptyOnMeta(TorchFunctionMode):
    """Sends ``torch.empty`` to meta: parameters get no memory, while computed buffers (inv_freq, masks) are real."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = dict(kwargs or {})
        if func is torch.empty:
            kwargs["device"] = "meta"
        return func(*args, **kwargs)


def build_empty(path: Path, dtype: torch.dtype) -> PreTrainedModel:
    """The model of config.json with every parameter on meta and every non-persistent buffer computed.

    ``quantization_config`` is dropped first, so transformers builds plain linears. A causal LM where the config's type
    has one; encoder-decoders and other models are built as ``architectures`` says. Raises FormatError where it can be
    neither.
    """
    from transformers import AutoConfig, AutoModelForCausalLM

    try:
        config = AutoConfig.from_pretrained(path, local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, KeyError) as error:
        raise FormatError(f"{path / 'config.json'}: {first_line(error)}") from error
    for part in (config, *(getattr(config, key, None) for key in config.sub_configs)):
        if part is not None and "quantization_config" in part.__dict__:
            del part.quantization_config
    try:
        with _EmptyOnMeta(), quiet_transformers():
            named = _named_class(config)
            model: PreTrainedModel = (
                AutoModelForCausalLM.from_config(config, dtype=dtype)  # type: ignore[no-untyped-call]
                if named is None
                else named._from_config(config, dtype=dtype)
            )
    except (ValueError, KeyError, AttributeError) as error:
        raise FormatError(f"{path / 'config.json'}: {first_line(error)}") from error
    for module in model.modules():  # small parameters made by ones() or zeros() are placeholders as well
        for key, parameter in module._parameters.items():
            if parameter is not None and not parameter.is_meta:
                module._parameters[key] = nn.Parameter(parameter.to("meta"), requires_grad=False)
    return model


def _named_class(config: Any) -> Any:
    """The class that ``architectures`` names, for types that are not simply causal LMs; None for those."""
    import transformers
    from transformers import MODEL_FOR_CAUSAL_LM_MAPPING

    if type(config) in MODEL_FOR_CAUSAL_LM_MAPPING and not config.is_encoder_decoder:
        return None
    name = next(iter(config.architectures or ()), None)
    found = getattr(transformers, str(name), None) if name and str(name).isidentifier() else None
    if not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ValueError(f"architectures: found {name!r}, accepted is the name of a model of transformers")
    return found


def first_line(error: BaseException) -> str:
    """An exception's first line (other libraries write paragraphs)."""
    return (str(error).strip() or type(error).__name__).splitlines()[0]


@contextmanager
def quiet_transformers() -> Iterator[None]:
    """Warnings of transformers held back while it builds a model that we fill ourselves."""
    from transformers.utils import logging

    level = logging.get_verbosity()
    logging.set_verbosity(40)  # errors only
    try:
        yield
    finally:
        logging.set_verbosity(level)


class Trimmer:
    """Gives freed heap back to the system now and then: between the packed weights that stay, what was read and freed
    would otherwise pile up. Does nothing where the C library has no malloc_trim."""

    def __init__(self, every: int = 4_000_000) -> None:
        self._trim = getattr(ctypes.CDLL(None), "malloc_trim", None) if os.name == "posix" else None
        self._since, self._every = 0, every

    def __call__(self, freed: int) -> None:
        self._since += freed
        if self._trim is not None and self._since >= self._every:
            self._since = 0
            self._trim(0)


def _quantized(
    model: nn.Module, plan: Plan, checkpoint: Checkpoint, name: str, chosen: Activation | None, trim: Trimmer
) -> QuantLinear:
    """One linear, read, checked against the place it takes, and packed. What was read is dropped on return."""
    assert plan.format is not None
    q: QuantizedWeight = plan.format.read(checkpoint, plan.layers[name], plan.config)
    check_shape(name, q, get_linear(model, name))
    q = q.with_(activation=chosen or q.activation or ACTIVATIONS["group"])
    trim(q.n * q.k)
    layer = QuantLinear.from_quantized(q)
    trim(q.n * q.k)
    return layer


def check_shape(name: str, q: QuantizedWeight, place: nn.Module) -> None:
    """Refuse a weight that does not fit the place, a linear or what stands for one."""
    want = [place.out_features, place.in_features]
    if [q.n, q.k] != want:
        raise FormatError(f"{name}: found shape {[q.n, q.k]}, accepted is {want} (config.json)")


def _dense_linear(model: nn.Module, plan: Plan, checkpoint: Checkpoint, name: str) -> nn.Linear:
    linear = get_linear(model, name)
    for part in ("weight", "bias"):
        if getattr(linear, part) is not None:
            data = checkpoint[plan.dense[f"{name}.{part}"]]
            setattr(linear, part, nn.Parameter(data, requires_grad=False))
    return linear


def fill(
    model: nn.Module, plan: Plan, checkpoint: Checkpoint, dtype: torch.dtype | None, leave: Collection[int] = ()
) -> None:
    """Put the dense tensors in, one at a time; floating point ones in ``dtype`` (mapped still where it is theirs).
    Modules whose id is in ``leave`` get none."""
    for module_name, module in model.named_modules():
        if isinstance(module, QuantLinear) or module_name in plan.halves or id(module) in leave:
            continue
        prefix = f"{module_name}." if module_name else ""
        for table in (module._parameters, module._buffers):
            for key, old in list(table.items()):
                source = plan.dense.get(prefix + key)
                if old is None or source is None or key in module._non_persistent_buffers_set:
                    continue
                data: Tensor = checkpoint[source]
                data = data.to(dtype) if dtype is not None and data.is_floating_point() else data
                table[key] = nn.Parameter(data, requires_grad=False) if isinstance(old, nn.Parameter) else data


def tie(model: nn.Module, plan: Plan) -> None:
    """Share storage where the config ties and the file agrees; elsewhere say in the config that nothing is tied."""
    tied = tied_names(model)
    if not tied:
        return
    for target, source in tied.items():
        head = target.rpartition(".")[0]
        apart = head in plan.layers or head in plan.halves
        if not apart and target in plan.dense and source in plan.dense:
            apart = not torch.equal(model.get_parameter(target), model.get_parameter(source))
        if apart:
            untie(model)
            return
    for target, source in tied.items():
        if source not in plan.dense:  # the file holds the head only
            source, target = target, source
        parent, _, leaf = target.rpartition(".")
        setattr(model.get_submodule(parent), leaf, model.get_parameter(source))


def untie(model: nn.Module) -> None:
    """Say in every config of the model that the head is its own, so that ``tie_weights()`` leaves it alone."""
    for module in model.modules():
        config = getattr(module, "config", None)
        if getattr(config, "tie_word_embeddings", False):
            config.tie_word_embeddings = False  # type: ignore[union-attr]
        if hasattr(module, "all_tied_weights_keys"):
            module.all_tied_weights_keys = {}  # type: ignore[assignment]


def _refuse_meta(model: nn.Module, checkpoint: Checkpoint) -> None:
    left = [name for name, tensor in (*model.named_parameters(), *model.named_buffers()) if tensor.is_meta]
    if left:
        raise FormatError(f"{checkpoint.path}: found no data for {listed(left)}, accepted is a complete model")


def generation_config(model: PreTrainedModel, path: Path) -> None:
    from transformers import GenerationConfig

    if (path / "generation_config.json").is_file() and model.can_generate():
        try:
            model.generation_config = GenerationConfig.from_pretrained(path, local_files_only=True)
        except (OSError, ValueError) as error:
            raise FormatError(f"{path / 'generation_config.json'}: {first_line(error)}") from error
