"""Which models the native step of engines/llama.py runs: their parts, or the first reason why not."""

from __future__ import annotations

from typing import Any, NamedTuple

from torch import Tensor, nn

from lowbit import native, ops
from lowbit.models import families
from lowbit.nn import QuantLinear
from lowbit.types import FormatError

FAMILIES = tuple(families.FAMILIES)
FIXED_ROPE = ("default", "linear", "llama3", "yarn")  # one table of angles for every length
_LINEARS = ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj",
            "mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")  # fmt: skip
_NORMS = ("input_layernorm", "post_attention_layernorm", "self_attn.q_norm", "self_attn.k_norm")


def refuses(model: nn.Module) -> str | None:
    """None where the native step runs ``model`` (a causal LM of transformers, or its skeleton), else the first reason why it does not."""
    try:
        collect(model)
    except FormatError as error:
        return str(error)
    return None


class Parts(NamedTuple):
    """What a model consists of, checked."""

    embedding: Tensor
    norm: Tensor
    layers: list[tuple[list[Tensor | None], list[QuantLinear]]]  # norms, linears
    head: nn.Module
    rotary: nn.Module
    sizes: list[int]  # layers, heads, kv_heads, head_dim, intermediate
    eps: float
    scale: float
    window: int | None

    def tensors(self) -> list[Tensor]:
        """Everything that a decoder is made from; two models with the same have the same decoder."""
        found = [self.embedding, self.norm, *self.head.parameters(), *self.head.buffers()]
        for norms, linears in self.layers:
            found += [t for t in norms if t is not None]
            found += [t for linear in linears for t in linear.buffers()]
        return found


def _refuse(where: str, found: object, accepted: str) -> FormatError:
    return FormatError(f"{where}: found {found}, accepted by the native engine is {accepted}")


def collect(model: Any) -> Parts:
    """Raises FormatError with the reason where the model does not fit."""
    if not native.COMPILED:
        raise _refuse("lowbit", "no compiled kernels", "an installation with them")
    config: Any = getattr(model, "config", None)
    family = getattr(config, "model_type", None)
    if family not in FAMILIES or not type(model).__name__.endswith("ForCausalLM"):
        raise _refuse("model", f"{family!r} ({type(model).__name__})", f"a causal LM of {', '.join(FAMILIES)}")
    if config.hidden_act != "silu":
        raise _refuse("hidden_act", repr(config.hidden_act), "'silu'")
    body = model.model
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
    if kind not in FIXED_ROPE:
        raise _refuse("rope_type", repr(kind), ", ".join(FIXED_ROPE))
    layers: list[tuple[list[Tensor | None], list[QuantLinear]]] = []
    for index, block in enumerate(body.layers):
        norms = [_norm(block, name, f"model.layers.{index}", config) for name in _NORMS]
        layers.append((norms, [_linear(block, name, f"model.layers.{index}") for name in _LINEARS]))
    attention = body.layers[0].self_attn
    head_dim, intermediate = int(attention.head_dim), layers[0][1][4].out_features
    q, k = layers[0][1][0], layers[0][1][1]
    hidden = q.in_features
    for name, size in (("hidden_size", hidden), ("head_dim", head_dim), ("intermediate_size", intermediate)):
        if size % 16:
            raise _refuse(name, size, "a multiple of 16")
    head = model.lm_head
    if isinstance(head, QuantLinear):
        _runs("lm_head", head)
    if not isinstance(head, QuantLinear) and type(head) is not nn.Linear:
        raise _refuse("lm_head", type(head).__name__, "Linear or QuantLinear")
    for name, module in model.named_modules():
        if module._forward_hooks or module._forward_pre_hooks or "forward" in module.__dict__:
            raise _refuse(name or "model", "a forward hook", "a model without any")
    windows = [int(w) for w in (_window(block.self_attn, config) for block in body.layers) if w is not None]
    sizes = [len(layers), q.out_features // head_dim, k.out_features // head_dim, head_dim, intermediate]
    embedding = body.embed_tokens.weight
    if embedding.dtype not in ops.DTYPES:
        raise _refuse("model.embed_tokens", embedding.dtype, "float32, bfloat16, float16")
    norm = _norm(body, "norm", "model", config)
    assert norm is not None
    parts = Parts(
        embedding, norm, layers, head, body.rotary_emb, sizes, float(config.rms_norm_eps),
        float(attention.scaling), min(windows) if windows else None,
    )  # fmt: skip
    for tensor in parts.tensors():
        if tensor.device.type != "cpu":
            raise _refuse("model", f"a tensor on {tensor.device}", "a model on the CPU")
    return parts


def _window(attention: Any, config: Any) -> int | None:
    """The sliding window of one layer, None where it sees everything."""
    if hasattr(attention, "sliding_window"):
        found: int | None = attention.sliding_window
        return found
    window: int | None = getattr(config, "sliding_window", None) if config.model_type == "mistral" else None
    return window


def _linear(block: nn.Module, name: str, prefix: str) -> QuantLinear:
    linear = block.get_submodule(name)
    if not isinstance(linear, QuantLinear):
        raise _refuse(f"{prefix}.{name}", type(linear).__name__, "QuantLinear")
    _runs(f"{prefix}.{name}", linear)
    return linear


def _runs(name: str, linear: QuantLinear) -> None:
    linear.refuse_part(name, "by the native engine")
    if linear.plain is not None:
        raise _refuse(name, "a layer without a kernel", "packed weights")
    if linear.activation_bits == 4:
        raise _refuse(name, "activations simulated in 4 bits", "activations of 8 bits, or float")


def _norm(block: nn.Module, name: str, prefix: str, config: Any) -> Tensor | None:
    try:
        norm: Any = block.get_submodule(name)
    except AttributeError:
        if name.endswith(("q_norm", "k_norm")):
            return None
        raise _refuse(prefix, f"no {name}", "a layer with two RMSNorms") from None
    if not type(norm).__name__.endswith("RMSNorm") or norm.variance_epsilon != config.rms_norm_eps:
        raise _refuse(f"{prefix}.{name}", type(norm).__name__, "an RMSNorm with rms_norm_eps")
    weight: Tensor = norm.weight
    return weight
