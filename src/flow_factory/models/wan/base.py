"""What the Wan pipelines share: a causal video VAE, UMT5, one network (or two experts), guidance by two forwards."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from diffusers.utils.import_utils import is_ftfy_available
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.comfyui import Blocks, CheckpointNames, checkpoint_keys
from flow_factory.models.conditions import PromptCondition, Prompts
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.images import posterior_latents
from flow_factory.models.latent_statistics import destandardise, standardise
from flow_factory.models.video import VideoAdapter
from flow_factory.samples import ComponentTimes, LatentState


def _attention(own: str, theirs: str) -> dict[str, str]:
    """ComfyUI's names of an attention's layers."""
    layers = {"to_q": "q", "to_k": "k", "to_v": "v", "to_out.0": "o"}
    return {f"{own}.{layer}": f"{theirs}.{name}" for layer, name in layers.items()}


class WanAdapter(VideoAdapter):
    """Wan 2.1 and 2.2, with whatever their checkpoints have of these:

    * two experts (A14B): `transformer` predicts at timesteps from `boundary_ratio` on, `transformer_2` below, which has
      a guidance scale of its own. Rows of a batch may be at times of either; each expert runs once, for its rows.
    * a time for each token (5B, `expand_timesteps`), which is 0 where the state is pinned.

    Texts are padded to one length, and the network reads the padding as zeros.
    """

    comfyui = CheckpointNames(
        checkpoint_keys("convert_wan_transformer_to_diffusers"),
        (
            Blocks(
                "blocks",
                "blocks",
                {
                    **_attention("attn1", "self_attn"),
                    **_attention("attn2", "cross_attn"),
                    "attn2.add_k_proj": "cross_attn.k_img",
                    "attn2.add_v_proj": "cross_attn.v_img",
                    "ffn.net.0.proj": "ffn.0",
                    "ffn.net.2": "ffn.2",
                },
            ),
        ),
        models={"transformer": "high_noise", "transformer_2": "low_noise"},
    )

    def frame_rate(self, generation: Any) -> float:
        return 24.0 if self.has_token_times else 16.0

    @property
    def has_token_times(self) -> bool:
        """True for the 5B checkpoint, whose VAE compresses more and whose videos have 24 frames a second."""
        return bool(self.pipeline.config.get("expand_timesteps", False))

    @property
    def latent_channels(self) -> int:
        return self.pipeline.vae.config.z_dim

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        fields = generation or self.config.train_generation
        return GuidanceSpec(scale=guidance_scale, low_noise_scale=getattr(fields, "guidance_scale_2", None))

    @torch.no_grad()
    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        embeds, _ = self.pipeline.encode_prompt(
            prompt=texts,
            do_classifier_free_guidance=False,
            max_sequence_length=generation.max_sequence_length,
            device=self.device,
        )
        return Prompts(embeds)

    def draw_noise(self, generators: Sequence[torch.Generator], height: int, width: int, num_frames: int) -> Tensor:
        # The other pipelines' helpers also encode a picture or a video.
        spatial, temporal = self.pipeline.vae_scale_factor_spatial, self.pipeline.vae_scale_factor_temporal
        size = ((num_frames - 1) // temporal + 1, height // spatial, width // spatial)
        shape = (len(generators), self.latent_channels, *size)
        return randn_tensor(shape, generator=list(generators), device=self.device, dtype=torch.float32)

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        experts = self._experts(times.only.timestep)
        if len(experts) == 1:
            return self._predict(next(iter(experts)), state, times, condition, guidance)
        parts = [
            self._predict(name, state.take(rows), times.take(rows), _rows(self, condition, rows), guidance)
            for name, rows in experts.items()
        ]
        return LatentState.rejoin(parts, list(experts.values()))

    def network_extras(self, name: str, condition: Any) -> dict[str, Any]:
        """Further inputs of the network."""
        return {}

    def _experts(self, timestep: Tensor) -> dict[str, list[int]]:
        """The networks that rows at these timesteps [B] need, to their rows."""
        boundary = self.pipeline.config.get("boundary_ratio")
        if boundary is None:
            return {"transformer": list(range(len(timestep)))}
        high = (timestep >= boundary * self.pipeline.scheduler.config.num_train_timesteps).tolist()
        experts = {
            "transformer": [row for row, is_high in enumerate(high) if is_high],
            "transformer_2": [row for row, is_high in enumerate(high) if not is_high],
        }
        return {name: rows for name, rows in experts.items() if rows}

    def _predict(
        self, name: str, state: LatentState, times: ComponentTimes, condition: PromptCondition, guidance: GuidanceSpec
    ) -> LatentState:
        """The prediction of one network."""

        def network(prompts: Prompts) -> Tensor:
            return self.network(name)(
                hidden_states=self.network_input(name, state.only),
                timestep=timestep,
                encoder_hidden_states=self.network_input(name, prompts.embeds),
                return_dict=False,
                **extras,
            )[0]

        timestep = self._network_time(state, times.only.timestep)
        extras = self.network_extras(name, condition)
        positive = network(condition.positive)
        if not guidance.active(times):
            return LatentState.single(positive)
        if name == "transformer_2" and guidance.low_noise_scale is not None:
            guidance = replace(guidance, scale=guidance.low_noise_scale)
        return LatentState.single(guidance.combine(positive, network(condition.negative), times))

    def _network_time(self, state: LatentState, timestep: Tensor) -> Tensor:
        """Times [B], or [B, tokens], 0 where the state is pinned. The pipeline, too, takes tokens for 2 x 2 latents."""
        if not self.has_token_times:
            return timestep
        latents = state.only
        mask = state.masks.get("latent")
        active = torch.ones_like(latents[:, :1]) if mask is None else mask.to(latents.dtype)
        return active[:, 0, :, ::2, ::2].flatten(1) * timestep[:, None]

    def decode_pixels(self, latents: Tensor) -> Tensor:
        vae = self.pipeline.vae
        return vae.decode(destandardise(vae, latents), return_dict=False)[0]

    def encode_pixels(self, pixels: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
        vae = self.pipeline.vae
        return standardise(vae, posterior_latents(vae.encode(pixels).latent_dist, generators))


def require_ftfy(key: str) -> None:
    """Raises an InputError where ftfy is missing, which most of the pipelines clean prompts with."""
    if not is_ftfy_available():
        raise InputError(f'model type {key!r} cleans prompts with ftfy: pip install "flow-factory[video]".')


def _rows(adapter: WanAdapter, condition: PromptCondition, rows: Sequence[int]) -> PromptCondition:
    return adapter.collate_conditions([condition.row(row) for row in rows])
