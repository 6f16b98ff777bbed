"""The weights of a Llama-like model under their names, for the native engine: no forward pass, no transformers.

Importing a model of transformers brings torch._dynamo, sympy and torch.distributed along: 116 MB and seconds, none of it
used by an engine that runs native code. So the tree of modules is made here, from config.json alone, and filled by the
loader that fills every model. ``as_transformers`` gives the same tensors to a model of transformers where one is needed.
"""

from __future__ import annotations

import math
import os
import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbit.checkpoint import open_checkpoint
from lowbit.checkpoint.files import json_file
from lowbit.models.families import Config, is_tokens, read
from lowbit.models.load import (
    build_empty,
    complete,
    generation_config,
    local_directory,
    resolve_activation,
    to_dtype,
    untie,
)  # fmt: skip
from lowbit.models.replace import replace
from lowbit.nn import QuantLinear
from lowbit.types import FormatError

if TYPE_CHECKING:
    from transformers import PreTrainedModel


class Rotary(nn.Module):
    """The angles of rotary position embeddings: Su et al. 2021; "linear" divides the frequencies by a factor, "llama3"
    those of long waves only, with a ramp between (Llama 3.1). The bits of transformers' own modules."""

    inv_freq: Tensor

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.register_buffer("inv_freq", frequencies(config.rope_parameters, config.head_dim), persistent=False)

    def forward(self, x: Tensor, position_ids: Tensor) -> tuple[Tensor, Tensor]:
        """cos and sin [B, T, head_dim / 2] in the dtype of ``x``, for positions [B, T]."""
        angles = position_ids[..., None].float() * self.inv_freq
        return angles.cos().to(x.dtype), angles.sin().to(x.dtype)


def frequencies(rope: dict[str, Any], head_dim: int) -> Tensor:
    """float32 [head_dim / 2], radians a position."""
    found: Tensor = (rope["rope_theta"] ** (torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim)).reciprocal()
    if rope["rope_type"] == "default":
        return found
    factor = rope["factor"]
    if rope["rope_type"] == "linear":
        return found.div_(factor)
    low, high, old = rope["low_freq_factor"], rope["high_freq_factor"], rope["original_max_position_embeddings"]
    wave = (2 * math.pi) / found  # positions a turn
    part = (old / wave - low) / (high - low)  # 0 at the long end of the ramp, 1 at the short one
    between = (1 - part) * found / factor + part * found
    return torch.where(wave > old / low, found / factor, torch.where(wave < old / high, found, between))


class RMSNorm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = _unfilled(size)
        self.variance_epsilon = eps


class Attention(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.head_dim: int = c.head_dim
        self.scaling: float = c.head_dim**-0.5
        self.sliding_window: int | None = c.windows[layer]
        wide, narrow = c.num_attention_heads * c.head_dim, c.num_key_value_heads * c.head_dim
        self.q_proj = _linear(c.hidden_size, wide, c.qkv_bias)
        self.k_proj = _linear(c.hidden_size, narrow, c.qkv_bias)
        self.v_proj = _linear(c.hidden_size, narrow, c.qkv_bias)
        self.o_proj = _linear(wide, c.hidden_size, c.o_bias)
        if c.model_type == "qwen3":
            self.q_norm = RMSNorm(c.head_dim, c.rms_norm_eps)
            self.k_norm = RMSNorm(c.head_dim, c.rms_norm_eps)


class MLP(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = _linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.up_proj = _linear(c.hidden_size, c.intermediate_size, c.mlp_bias)
        self.down_proj = _linear(c.intermediate_size, c.hidden_size, c.mlp_bias)


class Block(nn.Module):
    def __init__(self, c: Config, layer: int) -> None:
        super().__init__()
        self.self_attn = Attention(c, layer)
        self.mlp = MLP(c)
        self.input_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.post_attention_layernorm = RMSNorm(c.hidden_size, c.rms_norm_eps)


class Body(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(c.vocab_size, c.hidden_size, _weight=_unfilled(c.vocab_size, c.hidden_size))
        self.layers = nn.ModuleList(Block(c, layer) for layer in range(c.num_hidden_layers))
        self.norm = RMSNorm(c.hidden_size, c.rms_norm_eps)
        self.rotary_emb = Rotary(c)


class SkeletonForCausalLM(nn.Module):
    """What the loader and the native engine ask of a model. Whatever else it is asked for, it says what it is."""

    name_or_path: str
    generation_config: Config

    def __init__(self, config: Config) -> None:
        super().__init__()
        self.config = config
        self.model = Body(config)
        self.lm_head = _linear(config.hidden_size, config.vocab_size, False)

    @property
    def device(self) -> torch.device:
        return self.model.embed_tokens.weight.device

    def get_expanded_tied_weights_keys(self, all_submodels: bool = False) -> dict[str, str]:
        """{name: the name it shares storage with}, as transformers answers."""
        return {"lm_head.weight": "model.embed_tokens.weight"} if self.config.tie_word_embeddings else {}

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise FormatError(_ONLY_WEIGHTS.format("forward"))

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            raise AttributeError(_ONLY_WEIGHTS.format(name)) from None


_ONLY_WEIGHTS = "{}: found a model loaded for the native engine, accepted is one of lowbit.load(path)"


def _unfilled(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.empty(shape, device="meta"), requires_grad=False)


def _linear(k: int, n: int, bias: bool) -> nn.Linear:
    """An nn.Linear on meta past its constructor, which draws weights: on meta that alone imports sympy (4 s)."""
    linear = nn.Linear.__new__(nn.Linear)
    nn.Module.__init__(linear)
    linear.in_features, linear.out_features, linear.weight = k, n, _unfilled(n, k)
    linear.register_parameter("bias", _unfilled(n) if bias else None)
    return linear


def load_skeleton(path: str | os.PathLike[str], activation: str | None = None) -> SkeletonForCausalLM | None:
    """``lowbit.load`` for the native engine, everything dense as it is stored; None for a model that it does not run.
    Raises as ``lowbit.load``."""
    chosen = resolve_activation(activation)
    checkpoint = open_checkpoint(local_directory(path))
    config = read(checkpoint.config)
    if config is None:
        return None
    model = SkeletonForCausalLM(config)
    complete(model, checkpoint, chosen, None)
    ends = (json_file(checkpoint.path, "generation_config.json") or {}).get("eos_token_id")
    if not is_tokens(ends):
        where = checkpoint.path / "generation_config.json"
        raise FormatError(f"{where}: eos_token_id: found {ends!r}, accepted is a token or a list of tokens")
    model.generation_config = Config(eos_token_id=ends)
    return model


_full: weakref.WeakKeyDictionary[SkeletonForCausalLM, tuple[object, PreTrainedModel]] = weakref.WeakKeyDictionary()


def as_transformers(model: SkeletonForCausalLM, dtype: torch.dtype = torch.float32) -> PreTrainedModel:
    """The model of transformers with the very quantized linears of a skeleton, its dense tensors cast to ``dtype``. Made
    once and again where a module or tensor was replaced; the directory it was loaded from must still be there."""
    quantized = {name: module for name, module in model.named_modules() if isinstance(module, QuantLinear)}
    mark: object = (dtype, [id(module) for module in quantized.values()], [id(p) for p in model.parameters()])
    known = _full.get(model)
    if known is not None and known[0] == mark:
        return known[1]
    path = Path(model.name_or_path)
    full = build_empty(path, dtype)
    for name, module in model.named_modules():
        if name in quantized:
            replace(full, name, module)
        elif module._parameters:
            full.get_submodule(name)._parameters.update(module._parameters)
    to_dtype(full, dtype)
    if not model.config.tie_word_embeddings:
        untie(full)
    generation_config(full, path)
    full.requires_grad_(False)
    full.train(False)
    full.name_or_path = model.name_or_path
    full.lowbit_made = model.lowbit_made
    _full[model] = mark, full
    return full
