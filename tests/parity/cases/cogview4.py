"""CogView4: a time that is not 1000 sigma, texts of different lengths without a mask."""

from __future__ import annotations

from diffusers import CogView4Pipeline, CogView4Transformer2DModel, FlowMatchEulerDiscreteScheduler
from tokenizers.processors import TemplateProcessing
from transformers import GlmConfig, GlmModel, PreTrainedTokenizerFast

from tests.parity.case import Case, cfg_settings
from tests.parity.parts import autoencoder, qwen_text_config, qwen_tokenizer, seeded


def build() -> CogView4Pipeline:
    """Two blocks."""
    # GLM's tokenizer puts tokens of its own before every text, so that the empty one is not empty.
    backend = qwen_tokenizer().backend_tokenizer
    start = ("<|im_start|>", backend.token_to_id("<|im_start|>"))
    backend.post_processor = TemplateProcessing(single=f"{start[0]} $A", special_tokens=[start])
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token="<|endoftext|>", eos_token="<|endoftext|>", padding_side="left"
    )
    transformer = CogView4Transformer2DModel(
        patch_size=2,
        in_channels=4,
        out_channels=4,
        num_layers=2,
        attention_head_dim=16,
        num_attention_heads=2,
        text_embed_dim=16,
        time_embed_dim=16,
        condition_dim=8,
        pos_embed_max_size=32,
        sample_size=16,
        rope_axes_dim=(16, 16),
    )
    text = GlmConfig(**qwen_text_config(16, len(tokenizer)), head_dim=8, partial_rotary_factor=0.5)
    return CogView4Pipeline(
        tokenizer=tokenizer,
        text_encoder=GlmModel(text),
        vae=autoencoder(shift=None),
        transformer=transformer,
        scheduler=FlowMatchEulerDiscreteScheduler(
            use_dynamic_shifting=True, base_shift=0.25, max_shift=0.75, time_shift_type="linear"
        ),
    )


CASES = [
    Case(
        key="cogview4",
        build=seeded(build),
        settings=cfg_settings(3.5),
        # The first two share 16 tokens, the third has 32; of the negatives, two are longer than their prompts.
        prompts=("red dot", "blue bar", "a star between two clouds"),
        negatives=(None, "a blurred picture with noise", "blur"),
        alone=True,
        wrapped=2 * 6,
    )
]
