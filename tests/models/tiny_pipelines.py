"""Tiny random pipelines, built offline in well under a second: every kind of layer of the real ones, no knowledge."""

from __future__ import annotations

import string

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

CLIP_TOKENS = 12
WIDTHS = (16, 24)
T5_WIDTH = 40  # at least the sum of both CLIP widths, or the pipeline cannot pad them to it


def clip_tokenizer() -> CLIPTokenizer:
    """One token per letter."""
    vocab = {"<|startoftext|>": 0, "<|endoftext|>": 1}
    for letter in string.ascii_lowercase + string.digits:
        vocab[letter] = len(vocab)
        vocab[letter + "</w>"] = len(vocab)
    return CLIPTokenizer(vocab=vocab, merges=[], model_max_length=CLIP_TOKENS)


def t5_tokenizer() -> T5TokenizerFast:
    """One token per letter."""
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -2.0)]
    vocab += [(letter, -3.0) for letter in string.ascii_lowercase + string.digits]
    return T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=64)


def clip_encoder(width: int, vocabulary: int) -> CLIPTextModelWithProjection:
    """Three layers, so that the pipeline's second-to-last hidden state is not the embedding."""
    config = CLIPTextConfig(
        vocab_size=vocabulary,
        hidden_size=width,
        intermediate_size=2 * width,
        projection_dim=width,
        num_hidden_layers=3,
        num_attention_heads=2,
        max_position_embeddings=CLIP_TOKENS,
        bos_token_id=0,
        eos_token_id=1,
        pad_token_id=1,
    )
    return CLIPTextModelWithProjection(config)


def build_tiny_sd3(seed: int = 0, shift: float = 3.0, positions: int = 16) -> StableDiffusion3Pipeline:
    """An SD3.5-M in small: three text encoders, dual attention in the first block, qk RMS norm, 2x VAE.

    Its pictures have at most `positions` tokens along a side.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        clip_tokens, t5_tokens = clip_tokenizer(), t5_tokenizer()
        t5 = T5EncoderModel(
            T5Config(vocab_size=len(t5_tokens), d_model=T5_WIDTH, d_kv=8, d_ff=32, num_layers=1, num_heads=2)
        )
        transformer = SD3Transformer2DModel(
            sample_size=16,
            patch_size=2,
            in_channels=4,
            out_channels=4,
            num_layers=3,
            attention_head_dim=16,
            num_attention_heads=2,
            joint_attention_dim=T5_WIDTH,
            caption_projection_dim=32,
            pooled_projection_dim=sum(WIDTHS),
            pos_embed_max_size=positions,
            dual_attention_layers=(0,),
            qk_norm="rms_norm",
        )
        vae = AutoencoderKL(
            block_out_channels=(8, 16),
            down_block_types=("DownEncoderBlock2D", "DownEncoderBlock2D"),
            up_block_types=("UpDecoderBlock2D", "UpDecoderBlock2D"),
            layers_per_block=1,
            latent_channels=4,
            norm_num_groups=4,
            sample_size=32,
            scaling_factor=1.5,
            shift_factor=0.06,
            use_quant_conv=False,
            use_post_quant_conv=False,
        )
        return StableDiffusion3Pipeline(
            transformer=transformer.eval(),
            scheduler=FlowMatchEulerDiscreteScheduler(shift=shift),
            vae=vae.eval(),
            text_encoder=clip_encoder(WIDTHS[0], len(clip_tokens)).eval(),
            tokenizer=clip_tokens,
            text_encoder_2=clip_encoder(WIDTHS[1], len(clip_tokens)).eval(),
            tokenizer_2=clip_tokens,
            text_encoder_3=t5.eval(),
            tokenizer_3=t5_tokens,
        )
