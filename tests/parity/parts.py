"""Parts that several tiny pipelines share, and weights for them."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from diffusers import AutoencoderKL
from safetensors.torch import load_file
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor, nn
from transformers import (
    CLIPTextConfig,
    CLIPTextModel,
    Qwen2Tokenizer,
    Qwen2VLImageProcessor,
    Qwen2VLVideoProcessor,
    T5Config,
    T5EncoderModel,
)

from tests.models.tiny_pipelines import CLIP_TOKENS

Build = Callable[[], Any]


def seeded(build: Build, seed: int = 0) -> Build:
    """A builder whose pipeline has every parameter drawn from its own name.

    diffusers starts some layers at zero (gates of adaptive norms) and leaves others uninitialised (pad tokens); a check
    that an input matters would be blind behind the former and random behind the latter.
    """

    def made() -> Any:
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            pipeline = build()
        for name, module in pipeline.components.items():
            if isinstance(module, nn.Module):
                initialise(module.eval(), f"{seed}/{name}")
        return pipeline

    return made


@torch.no_grad()
def initialise(module: nn.Module, label: str) -> None:
    """Matrices with variance 1 / fan-in, biases and embeddings of order 0.1 to 1, scales about 1."""
    for name, parameter in module.named_parameters():
        digest = hashlib.blake2b(f"{label}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest, "little") >> 1)
        noise = torch.randn(parameter.shape, generator=generator)
        if parameter.ndim >= 2:
            fan_in = parameter[0].numel()
            parameter.copy_(noise / fan_in**0.5)
        elif name.endswith("weight"):
            parameter.copy_(1.0 + 0.1 * noise)
        else:
            parameter.copy_(0.1 * noise)


def add_to_weights(convert: Callable[[dict[str, Tensor]], dict[str, Tensor]]) -> Callable[..., None]:
    """A `Case.load_comfyui` for names that diffusers reads in checkpoints but not in LoRAs.

    Args:
        convert: From a checkpoint's weights to those of diffusers; given what the LoRA adds to them.
    """

    def load(pipeline: Any, files: Mapping[str, Path]) -> None:
        lora = {key.removeprefix("diffusion_model."): value for key, value in load_file(files[""]).items()}
        modules = [key.removesuffix(".lora_A.weight") for key in lora if key.endswith(".lora_A.weight")]
        added = convert({f"{m}.weight": lora[f"{m}.lora_B.weight"] @ lora[f"{m}.lora_A.weight"] for m in modules})
        weights = pipeline.transformer.state_dict()
        for name, value in added.items():
            weights[name] += value

    return load


def clip_text_model(width: int, vocabulary: int) -> CLIPTextModel:
    """A CLIP text encoder without projection."""
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=2,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModel(config)


def t5_encoder(width: int, vocabulary: int) -> T5EncoderModel:
    """A T5 encoder of one layer."""
    return T5EncoderModel(T5Config(vocab_size=vocabulary, d_model=width, d_kv=8, d_ff=32, num_layers=1, num_heads=2))


def autoencoder(channels: int = 4, shift: float | None = 0.06, quant: bool = False, blocks: int = 2) -> AutoencoderKL:
    """An image VAE that halves the sides (`blocks` - 1 times)."""
    return AutoencoderKL(
        block_out_channels=(8,) * (blocks - 1) + (16,),
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=channels,
        norm_num_groups=4,
        sample_size=32,
        scaling_factor=0.6,
        shift_factor=shift,
        use_quant_conv=quant,
        use_post_quant_conv=quant,
    )


CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def qwen_tokenizer(**keywords: Any) -> Qwen2Tokenizer:
    """One token per byte, and the chat's special tokens."""
    letters = sorted(ByteLevel.alphabet())
    vocab = {"<|endoftext|>": 0, **{letter: i + 1 for i, letter in enumerate(letters)}}
    special = ["<|im_start|>", "<|im_end|>", "<|vision_start|>", "<|vision_end|>", "<|image_pad|>", "<|video_pad|>"]
    tokenizer = Qwen2Tokenizer(vocab=vocab, merges=[], additional_special_tokens=special, **keywords)
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def media_tokens(tokenizer: Any) -> dict[str, int]:
    """The special tokens of pictures and videos, as fields of a vision-language model's configuration."""
    names = {"image": "image_pad", "video": "video_pad", "vision_start": "vision_start", "vision_end": "vision_end"}
    return {f"{key}_token_id": tokenizer.convert_tokens_to_ids(f"<|{name}|>") for key, name in names.items()}


def qwen_processor(cls: type[Any], tokenizer: Any, pixels: tuple[int, int], **image: Any) -> Any:
    """A processor of a vision-language model, which brings pictures to between so many pixels."""
    images = Qwen2VLImageProcessor(min_pixels=pixels[0], max_pixels=pixels[1], **image)
    return cls(images, tokenizer, Qwen2VLVideoProcessor(), chat_template=tokenizer.chat_template)


def qwen_text_config(width: int, vocabulary: int) -> dict[str, Any]:
    """A language model of two layers."""
    return {
        "vocab_size": vocabulary,
        "hidden_size": width,
        "intermediate_size": 2 * width,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": 512,
        "pad_token_id": 0,
    }
