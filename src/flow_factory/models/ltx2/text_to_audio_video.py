"""LTX-2 text to video with sound (`ltx2_t2av`): 2.0, 2.3 and 2.5.

Video and sound are two components of one trajectory on the same grid, and one network predicts both. Guidance, of three
kinds and with a weight of its own for either, is up to three forwards (see `guidance.py`). The pipeline can also
rewrite prompts, and guess from one how long it takes; here prompts are taken as they are, and `num_frames` is a field.

The audio VAE's latents are of mel spectrograms, and diffusers makes none of waveforms for it. So media that are stored
cannot be encoded, and trainers that learn from stored media are not for these models.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.ltx2.pipeline_ltx2 import LTX2Pipeline, calculate_shift
from diffusers.pipelines.ltx2.utils import conditioning_frame_rate
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from flow_factory.models.audio_video import AUDIO, VIDEO, AudioVideoAdapter, shared_grid, with_sound
from flow_factory.models.comfyui import Blocks, CheckpointNames, checkpoint_keys
from flow_factory.models.conditions import negative_texts
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.ltx2.conditions import JointPrompts, LTX2Condition
from flow_factory.models.ltx2.guidance import LTX2Guidance, Predictions
from flow_factory.models.ltx2.tokens import pack_audio, pack_video, unpack_audio, unpack_video
from flow_factory.models.shifted_grid import linear_sigmas
from flow_factory.models.videos import video_bytes
from flow_factory.samples import ComponentTimes, Grid, LatentState, VideoWithSound

_ATTENTIONS = ("attn1", "attn2", "audio_attn1", "audio_attn2", "audio_to_video_attn", "video_to_audio_attn")
_LAYERS = (
    *(f"{a}.{layer}" for a in _ATTENTIONS for layer in ("to_q", "to_k", "to_v", "to_out.0", "to_gate_logits")),
    *(f"{mlp}.{layer}" for mlp in ("ff", "audio_ff") for layer in ("net.0.proj", "net.2")),
)

SAVE_VIDEO = (
    "made = {call}",
    "encode_video(",
    '    made.frames[0], {frame_rate}, "video.mp4", audio=made.audio[0].float().cpu(),',
    "    audio_sample_rate=pipeline.vocoder.config.output_sampling_rate,",
    ")",
)
"""How a model card saves what the pipelines make."""


class LTX2Adapter(AudioVideoAdapter[LTX2Condition]):
    """A state of a video [B, C, f, h, w] and of a spectrogram [B, C, L, M], both as the pipeline normalises latents.

    The length of the sound follows from the number of frames and their rate, which positions in time are counted with,
    too. Encoded texts go through the pipeline's connectors once, before they are cached.
    """

    condition_class = LTX2Condition
    example_call = ExampleCall(("from diffusers.utils import encode_video",), (), SAVE_VIDEO)
    comfyui = CheckpointNames(  # a block's layers are called alike
        checkpoint_keys("convert_ltx2_transformer_to_diffusers"),
        (Blocks("transformer_blocks", "transformer_blocks", {name: name for name in _LAYERS}),),
    )

    def load_pipeline(self) -> Any:
        return self.load_diffusers(LTX2Pipeline)

    def frame_rate(self, generation: Any) -> float:
        return generation.frame_rate

    def guidance(self, guidance_scale: float, generation: Any = None) -> LTX2Guidance:
        fields = generation or self.config.train_generation
        # Null, and 0 as well, stands for the video's value: the pipeline says `audio_x or x`.
        return LTX2Guidance(
            scale=guidance_scale,
            rescale=fields.guidance_rescale,
            audio_scale=fields.audio_guidance_scale or guidance_scale,
            audio_rescale=fields.audio_guidance_rescale or fields.guidance_rescale,
            stg_scale=fields.stg_scale,
            audio_stg_scale=fields.audio_stg_scale or fields.stg_scale,
            modality_scale=fields.modality_scale,
            audio_modality_scale=fields.audio_modality_scale or fields.modality_scale,
            stg_blocks=tuple(fields.spatio_temporal_guidance_blocks or ()),
            cross_timestep=fields.use_cross_timestep,
        )

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> LTX2Condition:
        fields = generation or self.config.train_generation
        embeds, mask, negative_embeds, negative_mask = self.pipeline.encode_prompt(
            prompt=list(prompts),
            negative_prompt=negative_texts(negative_prompts, len(prompts)),
            do_classifier_free_guidance=need_negative,
            max_sequence_length=fields.max_sequence_length,
            device=self.device,
        )
        rate = conditioning_frame_rate(fields.frame_rate, fields.motion_speed)
        negative = self._connect(negative_embeds, negative_mask) if need_negative else ()
        rates = torch.full((len(prompts),), rate, device=self.device)
        return LTX2Condition(*self._connect(embeds, mask), rates, *negative)

    def _connect(self, embeds: Tensor, mask: Tensor) -> JointPrompts:
        connectors = self.pipeline.connectors
        side = self.pipeline.tokenizer.padding_side
        return JointPrompts(*connectors(embeds.to(connectors.dtype), mask, padding_side=side))

    def prepare_latents(
        self,
        condition: Any,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        fields = generation or self.config.train_generation
        pipeline, sound = self.pipeline, self.pipeline.audio_vae.config
        space, time = pipeline.vae_spatial_compression_ratio, pipeline.vae_temporal_compression_ratio
        video = ((fields.num_frames - 1) // time + 1, height // space, width // space)
        moments = audio_latents(pipeline, fields.num_frames, fields.frame_rate)
        audio = (moments, sound.mel_bins // pipeline.audio_vae_mel_compression_ratio)
        # The helpers draw the same, video first, and pack it.
        shapes = {VIDEO: (pipeline.transformer.config.in_channels, *video), AUDIO: (sound.latent_channels, *audio)}
        return LatentState(
            {
                name: randn_tensor((len(generators), *shape), list(generators), self.device, torch.float32)
                for name, shape in shapes.items()
            }
        )

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        config = self.pipeline.scheduler.config
        mu = calculate_shift(
            pack_video(self.pipeline, state[VIDEO][:1]).shape[1],
            config.get("base_image_seq_len", 1024),
            config.get("max_image_seq_len", 4096),
            config.get("base_shift", 0.95),
            config.get("max_shift", 2.05),
        )
        return {"sigmas": linear_sigmas(num_steps), "mu": mu}

    def sigma_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        return shared_grid(super().sigma_grid(num_steps, state, condition, generation))

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: LTX2Condition, guidance: GuidanceSpec
    ) -> LatentState:
        assert isinstance(guidance, LTX2Guidance)
        negative = perturbed = isolated = None
        if guidance.active(times):
            both = self._network(state, times, condition, condition.guided, guidance)
            count = state.batch_size
            negative, plain = both.map(lambda x: x[:count]), both.map(lambda x: x[count:])
        else:
            plain = self._network(state, times, condition, condition.positive, guidance)
        if guidance.needs_perturbed:
            blocks = list(guidance.stg_blocks)
            perturbed = self._network(
                state, times, condition, condition.positive, guidance, spatio_temporal_guidance_blocks=blocks
            )
        if guidance.needs_isolated:
            isolated = self._network(state, times, condition, condition.positive, guidance, isolate_modalities=True)
        others = (negative, perturbed, isolated)
        return LatentState(
            {
                name: guidance.guide(
                    name, x, times[name].sigma, Predictions(plain[name], *(o if o is None else o[name] for o in others))
                )
                for name, x in state.items()
            }
        )

    def _network(
        self,
        state: LatentState,
        times: ComponentTimes,
        condition: LTX2Condition,
        prompts: JointPrompts,
        guidance: LTX2Guidance,
        **variant: Any,
    ) -> LatentState:
        """Velocities, float32, of as many rows as there are prompts: the state's once, or twice over."""
        pipeline = self.pipeline
        video, audio = state[VIDEO], state[AUDIO]
        copies = len(prompts.mask) // state.batch_size

        def tiled(x: Tensor) -> Tensor:
            return x.repeat(copies, *([1] * (x.ndim - 1)))

        def given(x: Tensor) -> Tensor:
            return self.network_input("transformer", x)

        timestep, audio_timestep = tiled(times[VIDEO].timestep), tiled(times[AUDIO].timestep)
        frames, height, width = video.shape[-3:]
        predicted = self.network("transformer")(
            hidden_states=given(tiled(pack_video(pipeline, video))),
            audio_hidden_states=given(tiled(pack_audio(pipeline, audio))),
            encoder_hidden_states=given(prompts.video),
            audio_encoder_hidden_states=given(prompts.audio),
            encoder_attention_mask=prompts.mask,
            audio_encoder_attention_mask=prompts.mask,
            timestep=self._token_times(state, timestep, copies),
            audio_timestep=audio_timestep,
            sigma=timestep,
            audio_sigma=audio_timestep,
            num_frames=frames,
            height=height,
            width=width,
            fps=tiled(condition.frame_rate).view(-1, 1, 1),
            audio_num_frames=audio.shape[2],
            use_cross_timestep=guidance.cross_timestep,
            return_dict=False,
            **variant,
        )
        velocities = {
            VIDEO: unpack_video(pipeline, predicted[0].float(), video),
            AUDIO: unpack_audio(pipeline, predicted[1].float(), audio),
        }
        return LatentState(velocities)

    def _token_times(self, state: LatentState, timestep: Tensor, copies: int) -> Tensor:
        """Times [N] of the video, or [N, tokens], 0 where the state is pinned."""
        mask = state.masks.get(VIDEO)
        if mask is None:
            return timestep
        active = pack_video(self.pipeline, mask.to(timestep.dtype))[..., 0].repeat(copies, 1)
        return timestep[:, None] * active

    @torch.no_grad()
    def decode_latents(
        self, state: LatentState, generators: Sequence[torch.Generator] | None = None
    ) -> list[VideoWithSound]:
        pipeline, vae, audio_vae = self.pipeline, self.pipeline.vae, self.pipeline.audio_vae
        latents = pipeline._denormalize_latents(
            state[VIDEO], vae.latents_mean, vae.latents_std, vae.config.scaling_factor
        )
        # A VAE that reads a time gets the pipeline's default, 0, at which no noise is added to what it decodes.
        at = latents.new_zeros(len(latents), dtype=vae.dtype) if vae.config.timestep_conditioning else None
        frames = video_bytes(pipeline, vae.decode(latents.to(vae.dtype), at, return_dict=False)[0])

        tokens = pack_audio(pipeline, state[AUDIO])
        tokens = pipeline._denormalize_audio_latents(tokens, audio_vae.latents_mean, audio_vae.latents_std)
        spectrograms = unpack_audio(pipeline, tokens, state[AUDIO]).to(audio_vae.dtype)
        mel = audio_vae.decode(spectrograms, return_dict=False)[0]
        waveforms = pipeline.vocoder(mel.to(pipeline.vocoder.dtype))
        return with_sound(frames, waveforms, pipeline.vocoder.config.output_sampling_rate)


def audio_latents(pipeline: Any, num_frames: int, frame_rate: float) -> int:
    """Moments of latents that the sound of a video takes, as the pipeline's call computes them."""
    per_second = pipeline.audio_sampling_rate / pipeline.audio_hop_length
    return round(num_frames / frame_rate * (per_second / float(pipeline.audio_vae_temporal_compression_ratio)))
