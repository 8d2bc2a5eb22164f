"""What the adapters of MiniMax-H3 share: two noise schedules, one sequence, blocks of a modular pipeline.

The network predicts data - noise at times that run from 0 (noise) to 1 (data), and has no guidance. A sequence holds
one sample; batches have one row.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from typing import Any, ClassVar

import torch
from diffusers.modular_pipelines.minimax_h3.decoders import MiniMaxH3AudioDecodeStep, MiniMaxH3VideoDecodeStep
from diffusers.modular_pipelines.minimax_h3.modular_pipeline import (
    MiniMaxH3ModularPipeline,
    audio_latent_num_frames,
    video_latent_num_frames,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams.models.folder import component_config
from flow_factory.models.audio_video import AUDIO, VIDEO, AudioVideoAdapter, with_sound
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.minimax_h3.comfyui import NAMES
from flow_factory.models.minimax_h3.conditions import PackedCondition, PackedText
from flow_factory.models.minimax_h3.encoding import encode_sounds, encode_videos
from flow_factory.models.minimax_h3.layout import Built, Layout, pack_audio, pack_video, unpack_audio, unpack_video
from flow_factory.models.modular import run_blocks
from flow_factory.samples import ComponentTimes, ConditionInputs, Grid, LatentState, VideoWithSound
from flow_factory.scheduler.grid import pipeline_grid
from flow_factory.scheduler.training_times import shift_sigma

GIVEN = "given"
"""Name of the component that holds the noise of given pictures and videos, in states and grids of models with such."""


SAVE_VIDEO = (
    "made = {call}",
    'frames, sound = made.get("videos")[0], made.get("audio")[0]',
    "encode_video(",
    '    frames, pipeline.fps, "video.mp4", audio=sound, audio_sample_rate=made.get("sampling_rate")',
    ")",
)
"""How a model card saves what the pipelines make."""


class MiniMaxH3Adapter(AudioVideoAdapter[PackedCondition]):
    """A state of video latents [B, C, f, h, w], sound latents [B, 2, C', L] (stereo), and the noise of what is given.

    Pictures and videos that a sample is made from are noised a little (to time 0.999), each sample's by its own
    generator, before its own noise is drawn. That noise, [B, rows, C p], is a component that is wholly pinned: it takes
    no part in steps, log-probabilities or losses, and wherever a state is replayed or noised again it is still there.
    """

    condition_class = PackedCondition
    comfyui = NAMES
    network_name: ClassVar[str] = "transformer"
    components: ClassVar[tuple[str, ...]] = (VIDEO, AUDIO)

    def load_pipeline(self) -> MiniMaxH3ModularPipeline:
        layers = component_config(self.checkpoint, "text_encoder").get("text_config", {}).get("num_hidden_layers")
        read = MiniMaxH3ModularPipeline(workflow=self.spec.workflow).text_encoder_layer
        if layers is not None and layers <= read:
            raise InputError(
                f"the text encoder of {self.checkpoint} has {layers} layers, but MiniMax-H3 reads what layer {read} "
                f"gives, which may not be the last; use a checkpoint with at least {read + 1}."
            )
        return self.load_diffusers(MiniMaxH3ModularPipeline)

    @abstractmethod
    def encode_row(self, given: ConditionInputs, generation: Any) -> PackedText:
        """One row of the condition."""

    @abstractmethod
    def build_layout(self, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
        """Places the rows; `shape` is frames, height and width of the video's latents, and length of the sound's."""

    # Encoding and decoding -----------------------------------------------------------------------------------------

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> PackedCondition:
        fields = generation or self.config.train_generation
        return PackedCondition(tuple(self.encode_row(given, fields) for given in inputs)).to(self.device)

    @torch.no_grad()
    def decode_latents(
        self, state: LatentState, generators: Sequence[torch.Generator] | None = None
    ) -> list[VideoWithSound]:
        made: list[VideoWithSound] = []
        for row in range(state.batch_size):
            out = run_blocks(
                self.pipeline,
                MiniMaxH3VideoDecodeStep(),
                MiniMaxH3AudioDecodeStep(),
                latents=state[VIDEO][row : row + 1],
                audio_latents=state[AUDIO][row],
                output_type="pt",
            )
            # Rounded as the pipeline's own PIL output is.
            frames = (out["videos"].float() * 255).round().to(torch.uint8).cpu()
            made += with_sound(list(frames), out["audio"], out["sampling_rate"])
        return made

    @torch.no_grad()
    def encode_output_state(
        self, media: Sequence[VideoWithSound], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of videos with their sounds, all as the model makes them; see `encoding`."""
        videos = encode_videos(self.pipeline, [medium.frames for medium in media], generators, self.device)
        sounds = [medium.sound for medium in media]
        return LatentState(
            {VIDEO: videos, AUDIO: encode_sounds(self.pipeline, sounds, len(media[0].frames), self.device)}
        )

    def frame_rate(self, generation: Any) -> float:
        return float(self.pipeline.fps)

    # Noise and grids -----------------------------------------------------------------------------------------------

    def prepare_latents(
        self,
        condition: PackedCondition | None,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        fields = generation or self.config.train_generation
        frames, sound = self._lengths(fields.num_frames)
        ratio = self.pipeline.vae_spatial_compression_ratio
        shape = (1, self.pipeline.vae_latent_channels, frames, height // ratio, width // ratio)
        rows = (self.pipeline.audio_channels * sound, self.pipeline.audio_latent_channels)
        texts = [None] * len(generators) if condition is None else condition.texts
        states = []
        for text, generator in zip(texts, generators, strict=True):
            # In the pipeline's order.
            given = list(self._given_noise(text, generator))
            parts = {VIDEO: self._normal(shape, generator), AUDIO: unpack_audio(self._normal(rows, generator))}
            if given:
                parts[GIVEN] = torch.cat(given)[None]
            masks = {GIVEN: torch.zeros(1, 1, 1, dtype=torch.bool, device=self.device)} if given else {}
            states.append(LatentState(parts, masks))
        return LatentState.cat(states)

    def _given_noise(self, text: PackedText | None, generator: torch.Generator) -> Iterator[Tensor]:
        """Rows of noise for each given picture and video."""
        for one in () if text is None else text.conditioning:
            if one.latents is not None:
                yield pack_video(self._normal(one.latents.shape, generator), self.pipeline.patch_size)

    def _normal(self, shape: Sequence[int], generator: torch.Generator) -> Tensor:
        return randn_tensor(tuple(shape), generator=generator, device=self.device, dtype=torch.float32)

    def _lengths(self, num_frames: int) -> tuple[int, int]:
        """Frames of the video's latents, and length of the sound's."""
        pipeline = self.pipeline
        frames = video_latent_num_frames(num_frames, pipeline.vae_frames_per_chunk, pipeline.vae_latents_per_chunk)
        return frames, audio_latent_num_frames(num_frames)

    def sigma_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        if num_steps < 2:
            raise InputError(
                f"num_inference_steps is {num_steps}; MiniMax-H3 counts the end of its grid: use 2 or more."
            )
        video, audio = (
            pipeline_grid(self.component_scheduler(name), num_steps, device=self.device) for name in (VIDEO, AUDIO)
        )
        if video.length != audio.length:
            raise InputError(
                f"the schedules of video and sound have {video.length} and {audio.length} steps: with "
                f"num_inference_steps {num_steps}, some noise levels round to the same number. Take fewer."
            )
        grids = {name: audio if name == AUDIO else video for name in self.components}
        return Grid(
            {name: grid.primary for name, grid in grids.items()},
            {name: next(iter(grid.timesteps.values())) for name, grid in grids.items()},
        )

    def component_scheduler(self, component: str) -> Any:
        return self.pipeline.audio_scheduler if component == AUDIO else self.pipeline.scheduler

    def scheduler_output(self, component: str, velocity: Tensor, state: Tensor, times: ComponentTimes) -> Tensor:
        return -velocity

    def timestep_for_sigma(self, sigma: Tensor, state: LatentState) -> Tensor:
        return 1.0 - sigma

    def component_sigma(self, component: str, sigma: Tensor) -> Tensor:
        """Both schedules shift one schedule u, by k u / (1 + (k - 1) u): the sound's from the video's, by way of u."""
        if component != AUDIO:
            return sigma
        shift, own = self.pipeline.scheduler.shift, self.pipeline.audio_scheduler.shift
        unshifted = sigma / (shift - (shift - 1.0) * sigma)
        return shift_sigma(unshifted, own)

    # The network ---------------------------------------------------------------------------------------------------

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        if guidance_scale > 1:
            raise InputError(f"guidance_scale is {guidance_scale}, but MiniMax-H3 has no guidance; use 1.")
        return GuidanceSpec()

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        return {"num_frames": generation.num_frames}

    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: PackedCondition, guidance: GuidanceSpec
    ) -> LatentState:
        pipeline, patch = self.pipeline, self.pipeline.patch_size
        layout = self._layout(condition, state)
        video_rows, audio_rows = pack_video(state[VIDEO], patch), pack_audio(state[AUDIO])
        if layout.given_video is not None:
            given = pipeline.scheduler.scale_noise(layout.given_video, pipeline.keyframe_noise_aug, state[GIVEN][0])
            video_rows = torch.cat([given, video_rows])
        if layout.given_audio is not None:
            audio_rows = torch.cat([layout.given_audio, audio_rows])
        video, audio = self.network(self.network_name)(
            hidden_states=video_rows[None],
            audio_hidden_states=audio_rows[None],
            encoder_hidden_states=condition.only.embeds,
            timestep=layout.timesteps(times[VIDEO].timestep, times[AUDIO].timestep, pipeline.keyframe_noise_aug),
            **layout.inputs,
            return_dict=False,
        )
        velocity = {
            VIDEO: -unpack_video(video[0, _count(layout.given_video) :], state[VIDEO], patch),
            AUDIO: -unpack_audio(audio[0, _count(layout.given_audio) :]),
        }
        if GIVEN in state.components:
            velocity[GIVEN] = torch.zeros_like(state[GIVEN])
        return LatentState(velocity)

    def _layout(self, condition: PackedCondition, state: LatentState) -> Layout:
        *_, frames, height, width = state[VIDEO].shape
        shape = (frames, height, width, state[AUDIO].shape[-1])
        if shape not in condition.layouts:
            text = condition.only
            built = self.build_layout(text, shape)
            condition.layouts[shape] = Layout.of(text, built, self.pipeline.patch_size, self.device)
        return condition.layouts[shape]


def _count(rows: Tensor | None) -> int:
    return 0 if rows is None else len(rows)
