"""Wan from a first frame, or a first and a last one, to a video (`wan2_i2v`)."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from diffusers.pipelines.wan.pipeline_wan_i2v import WanImageToVideoPipeline
from PIL import Image
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams.models.folder import component_config, pipeline_config
from flow_factory.models.images import to_pil
from flow_factory.models.wan.base import WanAdapter, require_ftfy
from flow_factory.models.wan.conditions import FramesCondition
from flow_factory.samples import ConditionInputs, I2VSample, LatentState


class WanImageToVideoAdapter(WanAdapter):
    """Wan 2.1 I2V and FLF2V, Wan 2.2 TI2V 5B, Wan 2.2 I2V A14B.

    The 5B network has the first frame in its state, at time 0, so those latents are pinned: they take no part in noise,
    log-probabilities or losses. The others read the given frames as further channels, and Wan 2.1 also as tokens of an
    image encoder.

    A last frame is taken by A14B, where it is optional, and by FLF2V, which needs it. Of the other checkpoints, the
    pipeline drops it without a word (5B) or fails (2.1 I2V); here it is an error.
    """

    sample_class = I2VSample
    condition_class = FramesCondition

    def load_pipeline(self) -> WanImageToVideoPipeline:
        require_ftfy(self.spec.key)
        channels = component_config(self.checkpoint, "transformer").get("in_channels")
        in_state = pipeline_config(self.checkpoint, "expand_timesteps")
        if not in_state and channels == component_config(self.checkpoint, "vae").get("z_dim"):
            raise InputError(
                f"{self.checkpoint} goes from text to a video: its network has no channels for given frames. Use "
                f"model_type wan2_t2v, or another checkpoint."
            )
        return self.load_diffusers(WanImageToVideoPipeline)

    @torch.no_grad()
    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> FramesCondition:
        fields = generation or self.config.train_generation
        texts = super().encode_inputs(inputs, need_negative, fields)
        encoded = [self._encode_frames(given, fields.num_frames) for given in inputs]
        embeds = [embeds for _, embeds in encoded if embeds is not None]
        return FramesCondition(
            **texts.tensors(),
            frames=torch.cat([frames for frames, _ in encoded]),
            image_embeds=torch.stack(embeds) if embeds else None,
        )

    def _encode_frames(self, given: ConditionInputs, num_frames: int) -> tuple[Tensor, Tensor | None]:
        """`frames` [1, ...] and `image_embeds` [n, L, P] of a row."""
        pipeline = self.pipeline
        pictures = self._pictures(given)
        height, width = given.size
        pixels = [
            pipeline.video_processor.preprocess(picture, height=height, width=width).to(self.device, torch.float32)
            for picture in pictures
        ]
        # The helper would draw noise as well; it keeps latents that it is given, of which it reads device and dtype.
        frames = pipeline.prepare_latents(
            pixels[0],
            batch_size=1,
            num_channels_latents=self.latent_channels,
            height=height,
            width=width,
            num_frames=num_frames,
            dtype=torch.float32,
            device=self.device,
            latents=torch.zeros(1),
            last_image=pixels[1] if len(pixels) > 1 else None,
        )[1]
        return frames, pipeline.encode_image(pictures, self.device) if self._reads_image else None

    @property
    def _reads_image(self) -> bool:
        return self.pipeline.transformer.config.image_dim is not None

    def _pictures(self, given: ConditionInputs) -> list[Image.Image]:
        """The first frame, and the last one if there is any.

        Raises:
            InputError: If they are not what the checkpoint takes.
        """
        first, last = given.images("first_frame"), given.images("last_frame")
        for name, images, least in (("first_frame", first, 1), ("last_frame", last, 0)):
            if not least <= len(images) <= 1:
                raise InputError(
                    f"{self.spec.key} takes one {name}, but {len(images)} came with the prompt {given.prompt!r}."
                )
        takes_both = self._reads_image and self.pipeline.transformer.config.pos_embed_seq_len is not None
        if takes_both and not last:
            raise InputError(
                f"this checkpoint goes from a first to a last frame, but the prompt {given.prompt!r} has no last_frame."
            )
        if last and (self.has_token_times or (self._reads_image and not takes_both)):
            raise InputError(
                f"this checkpoint takes a first frame alone, but a last_frame came with the prompt {given.prompt!r}; "
                f"use an FLF2V or A14B checkpoint, or leave it out."
            )
        return [to_pil(image) for image in (*first, *last)]

    def prepare_latents(
        self,
        condition: Any,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        fields = generation or self.config.train_generation
        state = self._pinned(self.draw_noise(generators, height, width, fields.num_frames))
        return state if condition is None else self._with_first_frame(state, condition)

    def encode_output_state(
        self, media: Sequence[Tensor], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        return self._pinned(super().encode_output_state(media, generators).only)

    def network_state(self, state: LatentState, condition: Any) -> LatentState:
        if self.has_token_times:
            return self._with_first_frame(state, condition)
        return LatentState.single(torch.cat([state.only, condition.frames], dim=1))

    def network_extras(self, name: str, condition: Any) -> dict[str, Any]:
        if condition.image_embeds is None:
            return {}
        return {"encoder_hidden_states_image": self.network_input(name, condition.image_embeds.flatten(0, 1))}

    def _pinned(self, latents: Tensor) -> LatentState:
        """A state whose first frame is inactive, in the checkpoint that has it in its state."""
        if not self.has_token_times:
            return LatentState.single(latents)
        mask = torch.ones_like(latents[:, :1], dtype=torch.bool)
        mask[:, :, 0] = False
        return LatentState.single(latents, mask)

    def _with_first_frame(self, state: LatentState, condition: FramesCondition) -> LatentState:
        if not self.has_token_times:
            return state
        assert condition.frames is not None
        mask = state.masks["latent"]
        return LatentState.single(torch.where(mask, state.only, condition.frames), mask)
