"""The model that ``lowbit bench rtf`` times: one of a directory, or the real class with random weights, made on the spot."""

from __future__ import annotations

import copy
import re
import zlib
from importlib import import_module
from types import SimpleNamespace
from typing import Any

import torch

from lowbit.models.omnivoice import RATE, package

# vocabulary, and the Qwen3 stack; "full" is the published shape
SIZES: dict[str, dict[str, int]] = {
    "tiny": dict(vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16),
    "deep": dict(vocab_size=2048, hidden_size=64, intermediate_size=128, num_hidden_layers=28, num_attention_heads=4,
                 num_key_value_heads=2, head_dim=16),
    "full": dict(vocab_size=151676, hidden_size=1024, intermediate_size=3072, num_hidden_layers=28,
                 num_attention_heads=16, num_key_value_heads=8, head_dim=128),
}  # fmt: skip
RATIOS = [8, 5, 4, 2, 3]


class Pieces:
    """Stands in for the text tokenizer: special words whole, else four bytes a token, which is about the rate of the real
    one. What a token means does not matter to random weights."""

    def __init__(self, vocabulary: int) -> None:
        self.vocabulary = vocabulary

    def __call__(self, text: str, return_tensors: str | None = None, **_: Any) -> SimpleNamespace:
        pieces: list[bytes] = []
        for word in re.findall(r"<\|\w+\|>|(?:(?!<\|\w+\|>).)+", text, re.DOTALL):
            data = word.encode()
            pieces += [data] if word.startswith("<|") else [data[i : i + 4] for i in range(0, len(data), 4)]
        ids = [zlib.crc32(piece) % self.vocabulary for piece in pieces]
        return SimpleNamespace(input_ids=torch.tensor([ids]) if return_tensors else ids)


def random_model(size: str, device: str | torch.device, dtype: torch.dtype, seed: int = 0) -> Any:
    """OmniVoice's own class and codec with random weights, made on ``device``; no file is read. The codec is float32."""
    transformers: Any = import_module("transformers")
    from omnivoice.utils.duration import RuleDurationEstimator

    home = package()
    torch.manual_seed(seed)
    shape = SIZES[size]
    stack = transformers.Qwen3Config(
        max_position_embeddings=40960, rms_norm_eps=1e-6, rope_parameters={"rope_type": "default", "rope_theta": 1e6},
        tie_word_embeddings=True, attention_bias=False, hidden_act="silu", **shape,
    )  # fmt: skip
    with torch.device(device):
        model = home.OmniVoice(home.OmniVoiceConfig(llm_config=stack)).eval()
        for parameter in model.parameters():  # buffers stay: the angles are float32 in a 16-bit model too
            parameter.data = parameter.data.to(dtype)
        model.audio_tokenizer = _codec(size != "full").eval()
    _louder(model.audio_tokenizer)
    model.requires_grad_(False)
    model.text_tokenizer = Pieces(shape["vocab_size"])
    model.feature_extractor = SimpleNamespace(sampling_rate=RATE)
    model.sampling_rate = RATE
    model.duration_estimator = RuleDurationEstimator()
    return model


@torch.no_grad()
def _louder(codec: Any, loudness: float = 0.1) -> None:
    """Scale the decoder's last convolution so that it is heard: of silence the post-processing would leave nothing."""
    last: Any = [m for m in codec.acoustic_decoder.modules() if isinstance(m, torch.nn.Conv1d)][-1]
    codes = torch.arange(8 * 25, device=codec.device).mul(37).remainder(1024).view(1, 8, 25)
    last.bias.zero_()
    rms = codec.decode(codes).audio_values.float().square().mean().sqrt().clamp_min(1e-9)
    last.weight.mul_(loudness / rms)


def _codec(small: bool) -> Any:
    transformers: Any = import_module("transformers")
    codec = transformers.HiggsAudioV2TokenizerModel(
        transformers.HiggsAudioV2TokenizerConfig(
            target_bandwidths=[0.5, 1, 1.5, 2], sample_rate=RATE, semantic_sample_rate=16000, downsample_factor=320,
            codebook_size=1024, codebook_dim=64, kernel_size=3, unit_kernel_size=3, channel_ratios=[1, 1], strides=[1, 1],
            block_dilations=[1, 1],
            acoustic_model_config=transformers.DacConfig(
                encoder_hidden_size=8 if small else 64, decoder_hidden_size=32 if small else 1024,
                hidden_size=16 if small else 256, downsampling_ratios=RATIOS, upsampling_ratios=RATIOS, n_codebooks=9,
                codebook_size=1024, codebook_dim=8, sampling_rate=RATE,
            ).to_dict(),
            semantic_model_config=transformers.HubertConfig(
                hidden_size=32 if small else 768, intermediate_size=64 if small else 3072,
                num_hidden_layers=1 if small else 12, num_attention_heads=2 if small else 12,
                conv_dim=[16 if small else 512] * 7, mask_time_prob=0.0,
            ).to_dict(),
        )
    )  # fmt: skip
    for quantizer in codec.quantizer.quantizers:  # all zero as they are made
        quantizer.codebook.embed.normal_()
    return codec


def twin(model: Any) -> Any:
    """Another instance of the same weights, to be patched by itself."""
    return copy.copy(model)
