"""A complete OmniVoice checkpoint of random weights, small enough to be made for a test, that the real class loads.

Bytes are its text tokens: 256 letters and the special words of Qwen3 and OmniVoice. Its speech is noise.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from lowbit.models.speech import write_wav

SPECIAL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|denoise|>"]
SPECIAL += [f"<|{word}_{end}|>" for word in ("lang", "instruct", "text") for end in ("start", "end")]
TEXT = "Seven grey geese crossed the river before sunrise."
SIZES = dict(hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
             head_dim=16)  # fmt: skip


def package() -> Any:
    """The package omnivoice; the test is skipped with the reason where it cannot be imported."""
    try:
        import omnivoice
    except (ImportError, OSError) as error:  # torchaudio's own libraries need another build of torch
        pytest.skip(f"omnivoice cannot be imported: {error}")
    return omnivoice


def letters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary."""
    shown = [*range(33, 127), *range(161, 173), *range(174, 256)]
    hidden = [b for b in range(256) if b not in shown]
    return [chr(b) if b in shown else chr(256 + hidden.index(b)) for b in range(256)]


def write(folder: Path, seed: int = 0, **sizes: int) -> Path:
    """Write the checkpoint; ``sizes`` change the Qwen3 stack."""
    import transformers

    omnivoice = package()
    torch.manual_seed(seed)
    text = transformers.Qwen2Tokenizer(vocab={letter: i for i, letter in enumerate(letters())}, merges=[])
    text.add_special_tokens({"additional_special_tokens": SPECIAL})
    assert len(text) <= 1100  # codes of the audio, below 1025, are looked up among the words too
    stack = transformers.Qwen3Config(
        vocab_size=1100, max_position_embeddings=4096, tie_word_embeddings=True, attention_bias=False,
        rope_parameters={"rope_type": "default", "rope_theta": 1e6}, hidden_act="silu", **{**SIZES, **sizes},
    )  # fmt: skip
    omnivoice.OmniVoice(omnivoice.OmniVoiceConfig(llm_config=stack)).save_pretrained(folder)
    text.save_pretrained(folder)
    ratios = [8, 5, 4, 2, 3]
    codec = transformers.HiggsAudioV2TokenizerModel(
        transformers.HiggsAudioV2TokenizerConfig(
            target_bandwidths=[0.5, 1, 1.5, 2], sample_rate=24000, semantic_sample_rate=16000, downsample_factor=320,
            codebook_size=1024, codebook_dim=64, kernel_size=3, unit_kernel_size=3, channel_ratios=[1, 1], strides=[1, 1],
            block_dilations=[1, 1],
            acoustic_model_config=transformers.DacConfig(
                encoder_hidden_size=8, decoder_hidden_size=32, hidden_size=16, downsampling_ratios=ratios,
                upsampling_ratios=ratios, n_codebooks=9, codebook_size=1024, codebook_dim=8, sampling_rate=24000,
            ).to_dict(),
            semantic_model_config=transformers.HubertConfig(
                hidden_size=32, intermediate_size=64, num_hidden_layers=1, num_attention_heads=2, conv_dim=[16] * 7,
                mask_time_prob=0.0,
            ).to_dict(),
        )
    ).eval()  # fmt: skip
    for quantizer in codec.quantizer.quantizers:  # all zero as they are made
        quantizer.codebook.embed.normal_()
    codec.save_pretrained(folder / "audio_tokenizer")
    transformers.DacFeatureExtractor(feature_size=1, sampling_rate=24000, hop_length=960).save_pretrained(
        folder / "audio_tokenizer"
    )
    return folder


def load(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    return package().OmniVoice.from_pretrained(str(folder), device_map=device, dtype=dtype)


def voice(seconds: float = 2.0, rate: int = 24000) -> torch.Tensor:
    """A buzz that rises and falls, float32 [1, samples]."""
    t = np.arange(int(seconds * rate)) / rate
    phase = 2 * np.pi * (140 * t + 4 * np.sin(2 * np.pi * 2 * t))
    wave = sum(np.sin(n * phase) / n for n in range(1, 9)) * (0.6 + 0.4 * np.sin(2 * np.pi * 3 * t))
    noise = np.random.default_rng(0).standard_normal(len(t))
    return torch.from_numpy((0.08 * wave + 0.004 * noise).astype(np.float32))[None]


def prompt(model: Any) -> Any:
    return model.create_voice_clone_prompt((voice(), 24000), ref_text="The harbour was quiet.")


def ready(folder: Path, device: str = "cpu", dtype: torch.dtype = torch.float32) -> Any:
    """The model of a checkpoint with its voice beside it, as ``voice``."""
    found = load(folder, device, dtype)
    found.voice = prompt(found)
    return found


def place(folder: Path, name: str, rows: list[dict[str, Any]]) -> Path:
    """``folder`` with a checkpoint in model, a voice in voice.wav, and ``rows`` in a JSONL file of that name."""
    write(folder / "model")
    write_wav(folder / "voice.wav", voice()[0].numpy(), 24000)
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return folder
