"""FLUX.2, text and any number of references to a picture (`flux2`), and what it shares with FLUX.2 klein.

The network sees one token for each 2 x 2 latents, standardised by the running statistics of the VAE's batch norm. The
state is these tokens in their places, [B, 4 C, h, w]. References are kept likewise; their tokens follow the state's,
told apart by the first coordinate of their positions (10, 20, ...). They are given anew at every step: no noise is
added to them, and what is predicted for them is dropped.

The pipeline gives one list of references to all prompts of a call. Here each row has its own, as in a call of its own.
Its rewriting of prompts (`caption_upsample_temperature`) draws from the global generator and is left out.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.flux2.pipeline_flux2 import Flux2Pipeline, compute_empirical_mu
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.models.flux2 import check_layers
from flow_factory.models.comfyui import Blocks, CheckpointNames, Fusion, checkpoint_keys
from flow_factory.models.conditions import Prompts
from flow_factory.models.flux.packing import flatten, unflatten
from flow_factory.models.guidance import GuidanceSpec, guide_apart
from flow_factory.models.images import posterior_latents, to_bytes, to_pil, to_pixels
from flow_factory.models.references import ReferenceCondition, predict_by_shape
from flow_factory.models.shifted_grid import flow_sigmas
from flow_factory.models.text_to_image import TextToImageAdapter
from flow_factory.samples import ComponentTimes, ConditionInputs, I2ISample, LatentState

_LARGEST_REFERENCE = 1024 * 1024  # pixels; larger ones are scaled to it, as in the pipeline


class Flux2FamilyAdapter(TextToImageAdapter):
    """Rows whose references agree in number and sizes share a forward. A subclass gives `load_pipeline`."""

    sample_class = I2ISample
    condition_class = ReferenceCondition
    comfyui = CheckpointNames(
        checkpoint_keys("convert_flux2_transformer_checkpoint_to_diffusers"),
        (
            Blocks(
                "transformer_blocks",
                "double_blocks",
                {
                    "attn.to_out.0": "img_attn.proj",
                    "attn.to_add_out": "txt_attn.proj",
                    "ff.linear_in": "img_mlp.0",
                    "ff.linear_out": "img_mlp.2",
                    "ff_context.linear_in": "txt_mlp.0",
                    "ff_context.linear_out": "txt_mlp.2",
                },
                {
                    "img_attn.qkv": Fusion(("attn.to_q", "attn.to_k", "attn.to_v")),
                    "txt_attn.qkv": Fusion(("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj")),
                },
            ),
            Blocks(
                "single_transformer_blocks",
                "single_blocks",
                {"attn.to_qkv_mlp_proj": "linear1", "attn.to_out": "linear2"},
            ),
        ),
    )

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> ReferenceCondition:
        # The pipelines take no negative prompt: where they guide with one, it is empty.
        texts = self.encode_prompt([given.prompt for given in inputs], None, need_negative, generation)
        references = [[self._encode_reference(image) for image in given.images("image")] for given in inputs]
        return ReferenceCondition.with_references(texts, references)

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        try:
            check_layers(generation, self.checkpoint)  # which was perhaps not local when the configuration was checked
        except FieldError as error:
            raise InputError(str(error)) from error
        embeds, _ = self.pipeline.encode_prompt(
            prompt=texts,
            device=self.device,
            max_sequence_length=generation.max_sequence_length,
            text_encoder_out_layers=tuple(generation.text_encoder_out_layers),
        )
        return Prompts(embeds)

    def _encode_reference(self, picture: Tensor) -> Tensor:
        """A picture as the pipeline reads it, standardised, [4 C, h, w]."""
        pipeline, image = self.pipeline, to_pil(picture)
        processor = pipeline.image_processor
        try:
            processor.check_image_input(image)
        except ValueError as error:
            raise InputError(
                f"a reference of {self.spec.key} cannot be used: {error}. Give another `image`."
            ) from error
        if image.width * image.height > _LARGEST_REFERENCE:
            image = processor._resize_to_target_area(image, _LARGEST_REFERENCE)
        multiple = 2 * pipeline.vae_scale_factor
        height, width = (side // multiple * multiple for side in (image.height, image.width))
        pixels = processor.preprocess(image, height=height, width=width, resize_mode="crop")
        return pipeline._encode_vae_image(image=pixels.to(self.device, pipeline.vae.dtype), generator=None)[0]

    def prepare_latents(
        self,
        condition: Any,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        tokens, _ = self.pipeline.prepare_latents(
            batch_size=len(generators),
            num_latents_channels=self.pipeline.transformer.config.in_channels // 4,
            height=height,
            width=width,
            dtype=torch.float32,
            device=self.device,
            generator=list(generators),
        )
        factor = 2 * self.pipeline.vae_scale_factor
        return LatentState.single(unflatten(tokens, height // factor, width // factor))

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        height, width = state.only.shape[-2:]
        mu = compute_empirical_mu(image_seq_len=height * width, num_steps=num_steps)
        return {"mu": mu, **flow_sigmas(self.pipeline.scheduler, num_steps)}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: Any, guidance: GuidanceSpec
    ) -> LatentState:
        return predict_by_shape(state, times, condition, lambda s, t, c: self._predict_alike(s, t, c, guidance))

    def _predict_alike(
        self, state: LatentState, times: ComponentTimes, condition: ReferenceCondition, guidance: GuidanceSpec
    ) -> LatentState:
        """The prediction for rows whose references agree."""
        places, references = state.only, condition.stacked
        batch, (height, width) = len(places), places.shape[-2:]
        # The network reads the positions of the first row for all of them.
        positions = self.pipeline._prepare_latent_ids(places[:1])
        if references:
            further = self.pipeline._prepare_image_ids([reference[:1] for reference in references])
            positions = torch.cat([positions, further], dim=1)
        positions = positions.to(places.device)
        tokens = torch.cat([flatten(places), *(flatten(reference).to(places.dtype) for reference in references)], dim=1)
        tokens = self.network_input("transformer", tokens)
        scale = guidance.embedded
        embedded = None if scale is None else torch.full((batch,), scale, device=places.device)

        def network(prompts: Prompts) -> Tensor:
            predicted = self.network("transformer")(
                hidden_states=tokens,
                timestep=times.only.timestep / 1000,
                guidance=embedded,
                encoder_hidden_states=self.network_input("transformer", prompts.embeds),
                txt_ids=self.pipeline._prepare_text_ids(prompts.embeds[:1]).to(places.device),
                img_ids=positions,
                return_dict=False,
            )[0]
            return predicted[:, : height * width]

        return LatentState.single(unflatten(guide_apart(guidance, times, condition, network), height, width))

    def _statistics(self, like: Tensor) -> tuple[Tensor, Tensor]:
        """Mean and standard deviation, [1, 4 C, 1, 1], that latents are standardised with."""
        vae = self.pipeline.vae
        std = torch.sqrt(vae.bn.running_var + vae.config.batch_norm_eps)
        mean, std = (x.view(1, -1, 1, 1).to(like.device, like.dtype) for x in (vae.bn.running_mean, std))
        return mean, std

    @torch.no_grad()
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Tensor]:
        vae = self.pipeline.vae
        mean, std = self._statistics(state.only)
        latents = self.pipeline._unpatchify_latents(state.only * std + mean)
        return to_bytes(self.pipeline, vae.decode(latents.to(vae.dtype), return_dict=False)[0])

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        pixels = to_pixels(self.pipeline, media, self.device)
        latents = posterior_latents(self.pipeline.vae.encode(pixels).latent_dist, generators)
        places = self.pipeline._patchify_latents(latents)
        mean, std = self._statistics(places)
        return LatentState.single((places - mean) / std)


class Flux2Adapter(Flux2FamilyAdapter):
    """Guidance is an input of the network: one forward a step."""

    def load_pipeline(self) -> Any:
        return self.load_diffusers(Flux2Pipeline)

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        return GuidanceSpec(embedded=guidance_scale)
