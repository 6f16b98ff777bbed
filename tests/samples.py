"""Inputs for the tests: random and extreme weights, activations, and the named patterns of the case list."""

from __future__ import annotations

import json
import wave
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbit import reference
from lowbit.nn import QuantLinear
from lowbit.nn.shards import row_shard
from lowbit.types import Activation, LowRank, QuantizedWeight

ROWS = (0, 1, 2, 3, 4, 5, 7, 8, 9, 15, 16, 17, 31, 33, 64, 129)
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
FILLS = ("random", "low", "high", "spread")


def generator(*key: object) -> torch.Generator:
    """A generator that depends on the key alone, the same in every process."""
    return torch.Generator().manual_seed(zlib.crc32(repr(key).encode()))


def weight(
    n: int,
    k: int,
    group_size: int,
    *,
    bits: int = 4,
    zeros: bool = True,
    fill: str = "random",
    perm: bool = False,
    smooth: bool = False,
    bias: bool = False,
    scale_dtype: torch.dtype = torch.float16,
    activation: Activation | None = None,
) -> QuantizedWeight:
    """Codes [n, k]: random, all lowest, all highest with zero 0, or the two extremes in turn; scales of both signs."""
    g = generator(n, k, group_size, bits, zeros, fill, perm, smooth, bias)
    group_size = k if group_size == -1 else group_size
    groups = -(-k // group_size)
    low, high = (0, 2**bits - 1) if zeros else (-(2 ** (bits - 1)), 2 ** (bits - 1) - 1)
    codes = torch.randint(low, high + 1, (n, k), generator=g)
    z = torch.randint(0, 2**bits, (n, groups), generator=g)
    if fill == "low":
        codes, z = torch.full_like(codes, low), torch.full_like(z, 2**bits - 1)
    elif fill == "high":
        codes, z = torch.full_like(codes, high), torch.zeros_like(z)
    elif fill == "spread":
        codes = torch.where((torch.arange(n)[:, None] + torch.arange(k)[None, :]) % 2 == 0, low, high)
        z = torch.where(torch.arange(n)[:, None] % 2 == torch.zeros(1, groups, dtype=torch.long), 0, 2**bits - 1)
    scales = (
        (torch.rand(n, groups, generator=g) + 0.1) * torch.where(torch.rand(n, groups, generator=g) < 0.3, -1, 1) / 64
    )
    return QuantizedWeight(
        codes=codes.to(torch.uint8 if zeros else torch.int8),
        scales=scales.to(scale_dtype),
        group_size=group_size,
        bits=bits,
        zeros=z.to(torch.uint8) if zeros else None,
        perm=torch.randperm(k, generator=g).to(torch.int32) if perm else None,
        smooth=(torch.rand(k, generator=g) * 2 + 0.25).half() if smooth else None,
        bias=torch.randn(n, generator=g) if bias else None,
        activation=activation,
    )


def rows(m: int, k: int, dtype: torch.dtype = torch.float32, fill: str = "random") -> Tensor:
    """x [m, k]: Gaussian with a wide spread of row sizes, or ±c everywhere so that every int8 value is ±127."""
    g = generator(m, k, fill)
    if fill == "random":
        return (torch.randn(m, k, generator=g) * torch.exp(torch.randn(m, 1, generator=g))).to(dtype)
    if fill == "low":
        return torch.full((m, k), -3.0, dtype=dtype)
    if fill == "high":
        return torch.full((m, k), 3.0, dtype=dtype)
    sign = torch.where((torch.arange(m)[:, None] + torch.arange(k)[None, :]) % 2 == 0, 3.0, -3.0)
    return sign.to(dtype)


def awkward(case: str) -> Tensor:
    """Inputs [*, 128] of case QNT-01, whose Hessian is not, or hardly, positive definite."""
    x = torch.randn(512, 128)
    if case == "rank 1":
        return x[:1].repeat(512, 1)
    if case == "3 samples":
        return x[:3]
    if case == "twins":
        x[:, 7] = x[:, 90]
    elif case == "spread":
        x = x * torch.logspace(-6, 6, 128)
    elif case == "dead":
        x[:, ::3] = 0
    elif case == "zero":
        x = x * 0
    else:
        raise ValueError(case)
    return x


def byte_tokenizer(**special: str) -> Any:
    """A fast tokenizer of 259 tokens: <pad>, <s>, </s> and every byte; ``special`` says what it takes them for."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = ["<pad>", "<s>", "</s>", *sorted(pre_tokenizers.ByteLevel.alphabet())]
    tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(alphabet)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special)


def flat(n: int, k: int, group_size: int, scales: Tensor, perm: Tensor | None = None) -> QuantizedWeight:
    """FLAT of the case list: code 9, zero 8, so that w is its scale. scales [G] (the same for every n) or [n, G]."""
    groups = -(-k // group_size)
    s = (scales if scales.dim() == 2 else scales[None, :].expand(n, -1)).contiguous()
    return QuantizedWeight(
        codes=torch.full((n, k), 9, dtype=torch.uint8),
        scales=s,
        group_size=group_size,
        bits=4,
        zeros=torch.full((n, groups), 8, dtype=torch.uint8),
        perm=perm,
    )


def ramp(n: int = 8, k: int = 32, group_size: int = 32, scale: float = 0.5, zero: int = 8) -> QuantizedWeight:
    """RAMP of the case list: code (k + n) mod 16; with x = 1 and zero 8, y = -8 for each 32 inputs."""
    groups = -(-k // group_size)
    return QuantizedWeight(
        codes=((torch.arange(k)[None, :] + torch.arange(n)[:, None]) % 16).to(torch.uint8),
        scales=torch.full((n, groups), scale).half(),
        group_size=group_size,
        bits=4,
        zeros=torch.full((n, groups), zero, dtype=torch.uint8),
    )


def words(nibbles: Tensor, dim: int) -> Tensor:
    """Values 0..15 along ``dim``, eight to an int32 word, the first in the low nibble (as GPTQ packs)."""
    v = nibbles.long().movedim(dim, -1)
    v = v.reshape(*v.shape[:-1], -1, 8)
    out = (v << (4 * torch.arange(8))).sum(-1)
    return torch.where(out >= 2**31, out - 2**32, out).to(torch.int32).movedim(-1, dim)


def word(value: int) -> int:
    """An unsigned 32-bit pattern as the int32 that has it."""
    return value - 2**32 if value >= 2**31 else value


AWQ_ORDER = [0, 2, 4, 6, 1, 3, 5, 7]  # nibble p of a word holds column AWQ_ORDER[p]


def awq_words(values: Tensor) -> Tensor:
    """[R, N] values 0..15 to AutoAWQ's int32 [R, N / 8]."""
    r, n = values.shape
    return words(values.reshape(r, n // 8, 8)[:, :, AWQ_ORDER].reshape(r, n), 1)


def whisper(folder: Path, seed: int = 0) -> Path:
    """A random Whisper of width 64 with feature extractor and byte tokenizer, that listens to one second."""
    from transformers import GenerationConfig, WhisperConfig, WhisperFeatureExtractor, WhisperForConditionalGeneration

    tokenizer = byte_tokenizer(bos_token="<s>", eos_token="</s>", pad_token="<pad>")
    tokenizer.save_pretrained(folder)
    WhisperFeatureExtractor(feature_size=16, chunk_length=1).save_pretrained(folder)
    torch.manual_seed(seed)
    config = WhisperConfig(
        vocab_size=len(tokenizer), num_mel_bins=16, d_model=64, encoder_layers=2, decoder_layers=2,
        encoder_attention_heads=2, decoder_attention_heads=2, encoder_ffn_dim=128, decoder_ffn_dim=128,
        max_source_positions=50, max_target_positions=64, pad_token_id=0, bos_token_id=1, eos_token_id=2,
        decoder_start_token_id=1, init_std=0.2,
    )  # fmt: skip
    model = WhisperForConditionalGeneration(config)
    model.generation_config = GenerationConfig(
        decoder_start_token_id=1, bos_token_id=1, eos_token_id=2, pad_token_id=0, max_length=64
    )
    model.save_pretrained(folder)
    return folder


def wav(path: Path, seconds: float = 0.5, rate: int = 16000, channels: int = 1, seed: int = 0) -> Path:
    """16-bit noise."""
    noise = torch.randn(int(seconds * rate) * channels, generator=generator("wav", seed)) * 3000
    with wave.open(str(path), "wb") as file:
        file.setnchannels(channels)
        file.setsampwidth(2)
        file.setframerate(rate)
        file.writeframes(noise.to(torch.int16).numpy().tobytes())
    return path


def speech(folder: Path, texts: Sequence[str] = ("one fox", "two lazy dogs", "and a third line")) -> Path:
    """A speech file with one clip of noise a text."""
    rows = [
        {"audio": wav(folder / f"{i}.wav", 0.4 + 0.1 * i, seed=i).name, "text": text} for i, text in enumerate(texts)
    ]
    path = folder / "speech.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def random_decoder(family: str, scheme: str, **sizes: Any) -> Any:
    """A causal LM of transformers, every bias and norm random too, its linears quantized (the head not)."""
    import transformers

    from lowbit.models.replace import replace
    from lowbit.nn import QuantLinear

    config = transformers.AutoConfig.for_model(family, **sizes)
    model: Any = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
    with torch.no_grad():
        for key, parameter in model.named_parameters():
            scale = 0.2 if parameter.dim() == 1 else 0.12
            parameter.copy_(torch.randn_like(parameter) * scale + ("norm" in key))
    for key, module in list(model.named_modules()):
        if isinstance(module, torch.nn.Linear) and key != "lm_head":
            replace(model, key, QuantLinear.from_linear(module, scheme))
    return model


def json_of(capsys: Any, *arguments: object) -> dict[str, Any]:
    """What the command line prints with ``--json``."""
    from lowbit.cli import main

    capsys.readouterr()
    assert main([*map(str, arguments), "--json"]) == 0
    found: dict[str, Any] = json.loads(capsys.readouterr().out)
    return found


CUTTABLE = (
    "zeros", "order", "order inside", "svdquant", "order behind hadamard", "channel", "eight", "two levels",
)  # fmt: skip


def cuttable(kind: str, n: int, k: int) -> QuantizedWeight:
    """A weight [n, k] of what a checkpoint can hold, to be cut for several devices; groups of 32, of 64 behind a Hadamard."""
    g = generator(kind, n, k)
    if kind == "zeros":
        return weight(n, k, 32, smooth=True, bias=True)
    if kind == "order":  # activation order: a group has columns from everywhere
        return weight(n, k, 32, perm=True, bias=True)
    if (
        kind == "order inside"
    ):  # of blocks of 64 columns, and these the other way round: no group has columns of two ranks
        blocks = torch.arange(k // 64).flip(0) * 64
        perm = torch.cat([block + torch.randperm(64, generator=g) for block in blocks])
        return weight(n, k, 32, smooth=True).with_(perm=perm.to(torch.int32))
    if kind == "channel":  # 8 bits, one scale a row
        return weight(n, k, -1, bits=8, zeros=False, bias=True, activation=Activation(8, "token"))
    if kind == "eight":
        return weight(n, k, 64, bits=8, zeros=False, perm=True, smooth=True)
    q = weight(n, k, 64, zeros=False, smooth=True, bias=True, perm=kind == "order behind hadamard")
    if kind == "two levels":
        steps = torch.randint(1, 16, q.scales.shape, generator=g)
        return q.with_(scales=(torch.rand(n, 1, generator=g).half().float() + 0.5) / 64 * steps)
    branch = LowRank(torch.randn(k, 16, generator=g).half() / 16, torch.randn(n, 16, generator=g).half() / 16)
    return q.with_(hadamard=64, low_rank=branch, activation=Activation(4, "group"))


def part_alone(q: QuantizedWeight, x: Tensor, rank: int, ranks: int, activation: Activation | None = None) -> Tensor:
    """y of one row-wise part, made in one process of the x that the part reads; of the reference where an activation is
    given, else of the kernel (float32 on the CPU, whatever x is)."""
    weight_, inputs = row_shard(q, rank, ranks)
    width = weight_.k
    if inputs is None:
        x_ = x[..., rank * width : (rank + 1) * width]
    else:
        x_ = reference.inside(x, inputs.smooth, inputs.hadamard)[..., inputs.columns]
    if activation is not None:
        return reference.linear(x_, weight_, activation)
    whole = QuantLinear.from_quantized(q)
    part = QuantLinear.from_quantized(weight_, whole.activation)
    part.activation_bits = whole.activation_bits  # 4 on a chip with INT4 tensor cores
    return part(x_.to(x.dtype) if x.is_cuda else x_.float())
