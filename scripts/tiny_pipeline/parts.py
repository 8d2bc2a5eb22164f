"""The parts of the tiny StableDiffusion3 pipeline except the autoencoder, and how they are saved together."""

from __future__ import annotations

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers import AutoencoderKL, FlowMatchEulerDiscreteScheduler, SD3Transformer2DModel, StableDiffusion3Pipeline
from tokenizers import Tokenizer, trainers
from transformers import (
    CLIPTextConfig,
    CLIPTextModelWithProjection,
    CLIPTokenizer,
    T5Config,
    T5EncoderModel,
    T5TokenizerFast,
)

from flow_factory.rewards.shapes_world import BACKGROUNDS, COLOURS, COUNT_WORDS, PLURALS, format_caption, scenes

CAPTION_TOKENS = 16
"""Tokens of a caption, padded; the longest caption has 12 with its two ends."""
TEXT_WIDTH = 64
VOCABULARY = Path(__file__).with_name("tokenizer.json")
BOS, EOS, UNKNOWN = "<|startoftext|>", "<|endoftext|>", "<|unknown|>"


@dataclass
class Parts:
    """What is trained together: two text encoders and the transformer. The tokenizer is shared by both encoders."""

    tokenizer: CLIPTokenizer
    text_encoder: CLIPTextModelWithProjection
    text_encoder_2: CLIPTextModelWithProjection
    transformer: SD3Transformer2DModel

    def modules(self) -> dict[str, torch.nn.Module]:
        return {
            "text_encoder": self.text_encoder,
            "text_encoder_2": self.text_encoder_2,
            "transformer": self.transformer,
        }


def all_captions() -> list[str]:
    """Every caption of the world, and "" first: what guidance and a default negative prompt use."""
    return [""] + [format_caption(scene) for kind in ("single", "count", "number") for scene in scenes(kind)]


def build_tokenizer() -> CLIPTokenizer:
    """Byte-pair tokenizer in which every word of the grammar is one token and digits stay single.

    It is read from `tokenizer.json` beside this file: training one again (`train_tokenizer`) numbers the tokens
    differently in every process, and embeddings belong to numbers.
    """
    return _from_backend(VOCABULARY.read_text(encoding="utf-8"))


def train_tokenizer() -> CLIPTokenizer:
    """Trains the tokenizer on all captions; how `tokenizer.json` was made."""
    empty = CLIPTokenizer(
        vocab={UNKNOWN: 0, BOS: 1, EOS: 2}, merges=[], unk_token=UNKNOWN, bos_token=BOS, eos_token=EOS
    )
    backend: Tokenizer = Tokenizer.from_str(empty.backend_tokenizer.to_str())
    trainer = trainers.BpeTrainer(
        vocab_size=1000,  # far above what the words need: merging stops when every word is whole
        min_frequency=1,
        special_tokens=[UNKNOWN, BOS, EOS],
        end_of_word_suffix="</w>",
        show_progress=False,
    )
    backend.train_from_iterator(sorted(all_captions()), trainer)
    return _from_backend(backend.to_str())


def _from_backend(text: str) -> CLIPTokenizer:
    model = json.loads(text)["model"]
    return CLIPTokenizer(
        vocab=model["vocab"],
        merges=[tuple(merge) for merge in model["merges"]],
        unk_token=UNKNOWN,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=EOS,
        model_max_length=CAPTION_TOKENS,
    )


def build_text_encoder(tokenizer: CLIPTokenizer) -> CLIPTextModelWithProjection:
    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=len(tokenizer),
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=CAPTION_TOKENS,
            hidden_act="quick_gelu",
            bos_token_id=tokenizer.bos_token_id,
            eos_token_id=tokenizer.eos_token_id,
            pad_token_id=tokenizer.pad_token_id,
        )
    )


def build_parts(seed: int) -> Parts:
    torch.manual_seed(seed)
    tokenizer = build_tokenizer()
    transformer = SD3Transformer2DModel(
        sample_size=16,
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=5,
        attention_head_dim=32,
        num_attention_heads=4,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=128,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=16,
        qk_norm="rms_norm",
    )
    with torch.no_grad():  # adaLN-Zero: every block starts as the identity and the first prediction is zero
        for block in transformer.transformer_blocks:
            for norm in (block.norm1, block.norm1_context):
                norm.linear.weight.zero_()
                norm.linear.bias.zero_()
        transformer.norm_out.linear.weight.zero_()
        transformer.norm_out.linear.bias.zero_()
        transformer.proj_out.weight.zero_()
        transformer.proj_out.bias.zero_()
    return Parts(tokenizer, build_text_encoder(tokenizer), build_text_encoder(tokenizer), transformer)


def caption_ids(tokenizer: CLIPTokenizer, captions: list[str]) -> torch.Tensor:
    """Token ids as the pipeline makes them: (N, 16), padded with the end token."""
    return tokenizer(
        captions, padding="max_length", max_length=CAPTION_TOKENS, truncation=True, return_tensors="pt"
    ).input_ids


def encode_captions(parts: Parts, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Sequence (B, 16, 128) and pooled (B, 128) embeddings, put together as StableDiffusion3Pipeline does."""
    outputs = [encoder(ids, output_hidden_states=True) for encoder in (parts.text_encoder, parts.text_encoder_2)]
    sequence = torch.cat([output.hidden_states[-2] for output in outputs], dim=-1)
    return sequence, torch.cat([output.text_embeds for output in outputs], dim=-1)


def build_silent_t5() -> tuple[T5EncoderModel, T5TokenizerFast]:
    """A T5 encoder whose output is exactly zero, with a tokenizer that knows the words of the grammar.

    The format wants a third text encoder: without one a plain `from_pretrained` fails. Zeros are what the pipeline
    itself puts in its place when it has none. Its width is that of both CLIP encoders together, or the pipeline's
    padding breaks.
    """
    words = sorted(
        {
            "the",
            "number",
            "in",
            "on",
            "a",
            "background",
            *BACKGROUNDS,
            *COLOURS,
            *COUNT_WORDS,
            *PLURALS,
            *PLURALS.values(),
        }
        | {str(number) for number in range(100)}
    )
    vocab = [("<pad>", 0.0), ("</s>", 0.0), ("<unk>", -20.0), ("▁", -10.0)] + [("▁" + word, -1.0) for word in words]
    tokenizer = T5TokenizerFast(vocab=vocab, extra_ids=0, model_max_length=256)
    encoder = T5EncoderModel(
        T5Config(
            vocab_size=len(vocab),
            d_model=2 * TEXT_WIDTH,
            d_kv=8,
            d_ff=8,
            num_layers=1,
            num_heads=1,
            feed_forward_proj="relu",
        )
    )
    with torch.no_grad():
        for parameter in encoder.parameters():
            parameter.zero_()
    return encoder, tokenizer


def save_pipeline(parts: Parts, vae: AutoencoderKL, folder: Path, shift: float) -> None:
    """Write a StableDiffusion3Pipeline folder; an older one of that name is replaced once the new one is complete.

    The transformer and the autoencoder are stored in half precision, the text encoders in fp32: transformers would load
    them in the stored precision, and a plain load of the folder would then mix precisions.
    """
    t5, t5_tokenizer = build_silent_t5()
    pipeline = StableDiffusion3Pipeline(
        transformer=parts.transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift),
        vae=vae,
        text_encoder=parts.text_encoder,
        tokenizer=parts.tokenizer,
        text_encoder_2=parts.text_encoder_2,
        tokenizer_2=parts.tokenizer,
        text_encoder_3=t5,
        tokenizer_3=t5_tokenizer,
    )
    fresh = folder.with_name(folder.name + ".new")
    shutil.rmtree(fresh, ignore_errors=True)
    pipeline.save_pretrained(fresh, safe_serialization=True)
    for name, module in (("transformer", parts.transformer), ("vae", vae)):
        half = type(module).from_config(module.config).half()
        half.load_state_dict({key: value.half() for key, value in module.state_dict().items()})
        half.save_pretrained(fresh / name, safe_serialization=True)
    for path in fresh.rglob("*.safetensors"):
        path.chmod(0o644)
    for path in fresh.rglob("config.json"):  # diffusers notes from where a part was loaded
        entries = json.loads(path.read_text())
        if entries.pop("_name_or_path", None) is not None:
            path.write_text(json.dumps(entries, indent=2) + "\n")
    if folder.exists():
        if (folder / "README.md").exists():  # the model card is written by hand
            shutil.copy(folder / "README.md", fresh / "README.md")
        shutil.rmtree(folder)
    fresh.rename(folder)
