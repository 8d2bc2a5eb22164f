"""Wan video to video (`wan2_v2v`): a noised video, denoised from a later point of the grid."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan_video2video import WanVideoToVideoPipeline

from flow_factory.errors import InputError
from flow_factory.hparams.models.folder import pipeline_config
from flow_factory.models.images import posterior_latents
from flow_factory.models.latent_statistics import standardise
from flow_factory.models.videos import to_pil_frames
from flow_factory.models.wan.base import WanAdapter, require_ftfy
from flow_factory.models.wan.conditions import VideoCondition
from flow_factory.samples import BaseSample, ConditionInputs, Grid, LatentState, V2VSample


class WanVideoToVideoAdapter(WanAdapter):
    """The first `num_frames` frames of a video, brought to the output's size, as far as `strength` changes them.

    The pipeline takes the number of frames from the video. Here it is a field, since the shape of the latents may not
    depend on a prompt.
    """

    sample_class = V2VSample
    condition_class = VideoCondition

    def load_pipeline(self) -> WanVideoToVideoPipeline:
        require_ftfy(self.spec.key)
        for name in ("boundary_ratio", "expand_timesteps"):
            if pipeline_config(self.checkpoint, name):
                raise InputError(
                    f"{self.checkpoint} has {name} {pipeline_config(self.checkpoint, name)}, which the pipeline from "
                    f"video to video does not heed; use a Wan 2.1 checkpoint."
                )
        return self.load_diffusers(WanVideoToVideoPipeline)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        arguments = super().call_arguments(guidance_scale, generation)
        del arguments["num_frames"]
        return arguments

    def make_sample(self, *, inputs: ConditionInputs | None = None, **fields: Any) -> BaseSample:
        sample = super().make_sample(inputs=inputs, **fields)
        if inputs is not None and isinstance(sample, V2VSample):
            sample.fps = inputs.videos()[0].fps  # frame by frame the same video
        return sample

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> VideoCondition:
        fields = generation or self.config.train_generation
        texts = super().encode_inputs(inputs, need_negative, fields)
        latents = [self._encode_video(given, fields.num_frames) for given in inputs]
        return VideoCondition(**texts.tensors(), video=torch.cat(latents))

    def _encode_video(self, given: ConditionInputs, num_frames: int) -> torch.Tensor:
        """Latents [1, C, f, h, w] of a row's video."""
        videos = given.videos()
        if len(videos) != 1:
            raise InputError(f"{self.spec.key} takes one video, but {len(videos)} came with {given.prompt!r}.")
        frames = videos[0].frames
        if len(frames) < num_frames:
            raise InputError(
                f"the video of the prompt {given.prompt!r} has {len(frames)} frames, but num_frames is {num_frames}; "
                f"give a longer video, or lower num_frames."
            )
        pipeline = self.pipeline
        height, width = given.size
        pixels = pipeline.video_processor.preprocess_video(
            to_pil_frames(frames[:num_frames]), height=height, width=width
        )
        posterior = pipeline.vae.encode(pixels.to(self.device, pipeline.vae.dtype)).latent_dist
        return standardise(pipeline.vae, posterior_latents(posterior, None))

    def sigma_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        """The end of the scheduler's grid, from where the video is noised to."""
        fields = generation or self.config.train_generation
        grid = super().sigma_grid(num_steps, state, condition, fields)
        timesteps, _ = self.pipeline.get_timesteps(
            num_steps, grid.timesteps["latent"], fields.strength, device=self.device
        )
        if len(timesteps) == 0:
            raise InputError(
                f"strength {fields.strength} of {num_steps} steps is none: int(num_inference_steps x strength) must be "
                f"at least 1."
            )
        return Grid.single(grid.primary[grid.length - len(timesteps) :], timesteps)

    def initial_state(self, noise: LatentState, grid: Grid, condition: Any) -> LatentState:
        sigma = grid.primary[0]
        return LatentState.single((1 - sigma) * condition.video + sigma * noise.only)
