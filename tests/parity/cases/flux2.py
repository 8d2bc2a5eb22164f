"""FLUX.2 and FLUX.2 klein: tokens standardised by a batch norm, references of several sizes, fused blocks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers import (
    AutoencoderKLFlux2,
    FlowMatchEulerDiscreteScheduler,
    Flux2KleinPipeline,
    Flux2Pipeline,
    Flux2Transformer2DModel,
)
from diffusers.pipelines.flux2.system_messages import SYSTEM_MESSAGE
from tokenizers import Tokenizer, models
from tokenizers.pre_tokenizers import ByteLevel
from torch import Tensor
from transformers import (
    Mistral3Config,
    Mistral3ForConditionalGeneration,
    PixtralImageProcessor,
    PixtralProcessor,
    PreTrainedTokenizerFast,
    Qwen3Config,
    Qwen3ForCausalLM,
)

from flow_factory.samples import LatentState, Media
from tests.parity.case import Case, Setting, cfg_settings
from tests.parity.cases.flux1 import unipc
from tests.parity.media import picture, pictures
from tests.parity.parts import qwen_text_config, qwen_tokenizer, seeded

WIDTH = 16  # of the text encoder
LAYERS = [1, 2]

MISTRAL_TEMPLATE = (
    "{{ bos_token }}{% for message in messages %}{% for part in message['content'] %}"
    "{% if message['role'] == 'system' %}[SYSTEM_PROMPT]{{ part['text'] }}[/SYSTEM_PROMPT]"
    "{% else %}[INST]{{ part['text'] }}[/INST]{% endif %}{% endfor %}{% endfor %}"
)


def mistral_processor() -> PixtralProcessor:
    """One token per byte; the pipeline's instruction, which is long, is one token."""
    special = ["[INST]", "[/INST]", "[SYSTEM_PROMPT]", "[/SYSTEM_PROMPT]", "[IMG]", "[IMG_BREAK]", "[IMG_END]"]
    names = ["<pad>", "<s>", "</s>", "<unk>", *special, *sorted(ByteLevel.alphabet())]
    letters = Tokenizer(models.BPE(vocab={name: i for i, name in enumerate(names)}, merges=[], unk_token="<unk>"))
    letters.pre_tokenizer = ByteLevel(add_prefix_space=False)  # type: ignore[assignment]
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=letters,
        pad_token="<pad>",
        bos_token="<s>",
        eos_token="</s>",
        unk_token="<unk>",
        additional_special_tokens=special,
    )
    tokenizer.add_tokens([SYSTEM_MESSAGE])
    return PixtralProcessor(PixtralImageProcessor(), tokenizer, chat_template=MISTRAL_TEMPLATE)


def mistral(vocabulary: int) -> Mistral3ForConditionalGeneration:
    """Mistral Small 3 in small."""
    text = {"model_type": "mistral", **qwen_text_config(WIDTH, vocabulary), "head_dim": 8}
    vision = {"model_type": "pixtral", "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 1}
    vision |= {"num_attention_heads": 2, "head_dim": 4, "image_size": 32, "patch_size": 16}
    return Mistral3ForConditionalGeneration(Mistral3Config(text_config=text, vision_config=vision, image_token_index=8))


def flux2_parts(guidance_embeds: bool) -> dict[str, Any]:
    """Two joint and two single-stream blocks, a VAE of factor 4 with statistics, and the scheduler."""
    transformer = Flux2Transformer2DModel(
        in_channels=16,
        num_layers=2,
        num_single_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        joint_attention_dim=WIDTH * len(LAYERS),
        timestep_guidance_channels=16,
        axes_dims_rope=(4, 4, 4, 4),
        guidance_embeds=guidance_embeds,
    )
    blocks = 3
    vae = AutoencoderKLFlux2(
        block_out_channels=(8,) * (blocks - 1) + (16,),
        down_block_types=("DownEncoderBlock2D",) * blocks,
        up_block_types=("UpDecoderBlock2D",) * blocks,
        layers_per_block=1,
        latent_channels=4,
        norm_num_groups=4,
        sample_size=32,
    )
    assert vae.bn.running_mean is not None and vae.bn.running_var is not None
    vae.bn.running_mean.copy_(0.3 * torch.randn(16))
    vae.bn.running_var.copy_(0.5 + torch.rand(16))
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    return {"transformer": transformer, "vae": vae, "scheduler": scheduler}


def build() -> Flux2Pipeline:
    """FLUX.2 dev in small."""
    processor = mistral_processor()
    return Flux2Pipeline(
        tokenizer=processor, text_encoder=mistral(len(processor.tokenizer)), **flux2_parts(guidance_embeds=True)
    )


def build_klein(is_distilled: bool) -> Flux2KleinPipeline:
    """FLUX.2 klein in small."""
    tokenizer = qwen_tokenizer()
    return Flux2KleinPipeline(
        tokenizer=tokenizer,
        text_encoder=Qwen3ForCausalLM(Qwen3Config(**qwen_text_config(WIDTH, len(tokenizer)), head_dim=8)),
        is_distilled=is_distilled,
        **flux2_parts(guidance_embeds=False),
    )


def token_layout(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    """[B, C, h, w] to [B, h w, C]."""
    return {"latent": torch.einsum("bchw->bhwc", state.only).flatten(1, 2)}


def latent_layout(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    """What the VAE decodes: the statistics undone, and each token's channels dealt out to its 2 x 2 places."""
    vae = pipeline.vae
    std = (vae.bn.running_var + vae.config.batch_norm_eps).sqrt()
    raw = state.only * std[:, None, None] + vae.bn.running_mean[:, None, None]
    batch, channels, height, width = raw.shape
    cells = torch.einsum("bcijhw->bchiwj", raw.view(batch, channels // 4, 2, 2, height, width))
    return {"latent": cells.reshape(batch, channels // 4, 2 * height, 2 * width)}


def media_call(rows: Sequence[Media]) -> dict[str, Any]:
    """The references of the one row of a call, if it has any."""
    (media,) = rows
    return {"image": pictures(media)} if media else {}


# The pipeline refuses sides below 64; 70 is cut to 64. Rows 0 and 1 go through the network together.
REFERENCES: tuple[Media, ...] = (
    {"image": (picture(1, (64, 64)), picture(2, (64, 72)))},
    {"image": (picture(3, (70, 64)), picture(4, (64, 72)))},
    {},
)
FIELDS = {"max_sequence_length": 20, "text_encoder_out_layers": LAYERS}
NO_NEGATIVE = frozenset({"negative_prompt"})

TEXT = Case(
    key="flux2",
    variant="text",
    build=seeded(build),
    settings=(Setting("embedded", 2.0, {}, {"guidance_scale": 2.0}, NO_NEGATIVE),),
    generation=FIELDS,
    call=FIELDS,
    takes_negative=False,
    negatives=(None, None, None),
    layout=token_layout,
    schedulers={"unipc": unipc()},
    # Two joint blocks with 8 projections and 4 MLP layers each; two single-stream blocks with one layer in and one out.
    wrapped=2 * (8 + 4) + 2 * 2,
)
BASE = replace(
    TEXT,
    key="flux2-klein",
    variant="base",
    build=seeded(lambda: build_klein(is_distilled=False)),
    settings=tuple(replace(s, inert=NO_NEGATIVE) for s in cfg_settings(3.0)),
    layout=latent_layout,
    schedulers={},
)
CASES = [
    TEXT,
    replace(TEXT, variant="references", media=REFERENCES, media_call=media_call, alone=True, schedulers={}),
    replace(BASE, media=REFERENCES, media_call=media_call, alone=True),
    replace(
        BASE,
        variant="distilled",
        build=seeded(lambda: build_klein(is_distilled=True)),
        settings=(Setting("unguided", 1.0, {}, {"guidance_scale": 1.0}, NO_NEGATIVE),),
    ),
]
