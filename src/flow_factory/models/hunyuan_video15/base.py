"""What the HunyuanVideo 1.5 pipelines share: two text encoders, a guider, a causal video VAE, and their network."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flow_factory.models.comfyui import LORA_KEYS, Blocks, CheckpointNames, Fusion
from flow_factory.models.conditions import negative_texts
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.hunyuan_video15.conditions import GlyphCondition, Texts, collate_texts, without_padding
from flow_factory.models.hunyuan_video15.guidance import guider_spec
from flow_factory.models.images import posterior_latents
from flow_factory.models.video import VideoAdapter
from flow_factory.samples import ComponentTimes, LatentState


class HunyuanVideo15Adapter(VideoAdapter):
    """HunyuanVideo 1.5.

    Guidance. The pipelines have no `guidance_scale`: a component, the guider, holds it. Here the scale is the
    configuration's and the rest the checkpoint's guider's: rescaling, the steps that are guided, and which of its two
    formulas the scale is counted in. A guider that stops before the end remembers it, so that a second call of the
    pipeline finds its negative prompts not encoded; the statement in `call_setup` makes a new one for each call.

    Texts. The network reads neither padded tokens nor, without a picture, image tokens; it takes no part of them into
    the tokens that it reads. The pipelines give it 1000, 256 and 729 in every forward, here texts are padded to the
    longest of a batch, rounded up, and there are no image tokens without a picture.

    Videos. The VAE of diffusers 0.42 fails on a batch of more than one (its attention mask lacks an axis), unless it is
    told to slice it, as it is here.
    """

    condition_class = GlyphCondition
    comfyui = CheckpointNames(
        f"{LORA_KEYS}, with the names in "
        "https://github.com/comfyanonymous/ComfyUI/blob/master/comfy/ldm/hunyuan_video/model.py",
        (
            Blocks(
                "transformer_blocks",
                "double_blocks",
                {
                    "attn.to_out.0": "img_attn.proj",
                    "attn.to_add_out": "txt_attn.proj",
                    "ff.net.0.proj": "img_mlp.0",
                    "ff.net.2": "img_mlp.2",
                    "ff_context.net.0.proj": "txt_mlp.0",
                    "ff_context.net.2": "txt_mlp.2",
                },
                {
                    "img_attn.qkv": Fusion(("attn.to_q", "attn.to_k", "attn.to_v")),
                    "txt_attn.qkv": Fusion(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
                },
            ),
            Blocks(
                "context_embedder.token_refiner.refiner_blocks",
                "txt_in.individual_token_refiner.blocks",
                {"attn.to_out.0": "self_attn.proj", "ff.net.0.proj": "mlp.0", "ff.net.2": "mlp.2"},
                {"self_attn.qkv": Fusion(("attn.to_q", "attn.to_k", "attn.to_v"))},
            ),
        ),
    )

    def load_sliced(self, cls: type[Any]) -> Any:
        """The pipeline of a class, whose VAE takes rows one by one."""
        pipeline = self.load_diffusers(cls)
        pipeline.vae.enable_slicing()
        return pipeline

    def frame_rate(self, generation: Any) -> float:
        return 24.0

    @property
    def latent_channels(self) -> int:
        return self.pipeline.num_channels_latents

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        return guider_spec(self.pipeline.guider, guidance_scale)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        return {"num_frames": generation.num_frames}

    @classmethod
    def call_setup(cls, guidance_scale: float, generation: Any, size: tuple[int, int]) -> tuple[str, ...]:
        given, default = asdict(generation), asdict(type(generation)())
        length = given["max_sequence_length"]
        cut = (f"pipeline.tokenizer_max_length = {length}",) if length != default["max_sequence_length"] else ()
        return (f"pipeline.guider = pipeline.guider.new(guidance_scale={guidance_scale!r})", *cut)

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> GlyphCondition:
        length = (generation or self.config.train_generation).max_sequence_length
        positive = self._encode(list(prompts), length)
        negatives = negative_texts(negative_prompts, len(prompts)) if need_negative else None
        negative = None if negatives is None else self._encode(negatives, length)
        return self.collate_conditions([GlyphCondition.of_texts(positive, negative)])

    def _encode(self, texts: list[str], length: int) -> Texts:
        pipeline = self.pipeline
        prompts = pipeline._get_mllm_prompt_embeds(
            text_encoder=pipeline.text_encoder,
            tokenizer=pipeline.tokenizer,
            prompt=list(texts),
            device=self.device,
            tokenizer_max_length=length,
            system_message=pipeline.system_message,
            crop_start=pipeline.prompt_template_encode_start_idx,
        )
        glyphs = pipeline._get_byt5_prompt_embeds(
            tokenizer=pipeline.tokenizer_2,
            text_encoder=pipeline.text_encoder_2,
            prompt=list(texts),
            device=self.device,
            tokenizer_max_length=pipeline.tokenizer_2_max_length,
        )
        return Texts(without_padding(*prompts), without_padding(*glyphs))

    def collate_conditions(self, conditions: Sequence[Any]) -> Any:
        return collate_texts(conditions)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        return {"sigmas": np.linspace(1.0, 0.0, num_steps + 1)[:-1]}

    @abstractmethod
    def network_extras(self, times: ComponentTimes, condition: Any) -> dict[str, Tensor]:
        """Further inputs of the network: `image_embeds`, and others of some checkpoints."""

    def embeds_input(self, embeds: Tensor) -> Tensor:
        """Embeddings in the dtype of the network's weights: norms read them first, which not every autocast casts."""
        return embeds.to(self._dtype_of("transformer"))

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
    ) -> LatentState:
        def network(texts: Texts) -> Tensor:
            return self.network("transformer")(
                hidden_states=latents,
                timestep=timestep,
                encoder_hidden_states=self.embeds_input(texts.prompts.embeds),
                encoder_attention_mask=texts.prompts.mask,
                encoder_hidden_states_2=self.embeds_input(texts.glyphs.embeds),
                encoder_attention_mask_2=texts.glyphs.mask,
                return_dict=False,
                **extras,
            )[0]

        latents = self.network_input("transformer", state.only)
        # The embedding of time is cast to the dtype of the time, which some schedulers give as an integer.
        timestep = self.network_input("transformer", times.only.timestep.float())
        extras = self.network_extras(times, condition)
        positive = network(condition.texts)
        if not guidance.active(times):
            return LatentState.single(positive)
        return LatentState.single(guidance.combine(positive, network(condition.negative_texts), times))

    def decode_pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(latents.to(vae.dtype) / vae.config.scaling_factor, return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        vae = self.pipeline.vae
        return posterior_latents(vae.encode(pixels).latent_dist, generators) * vae.config.scaling_factor
