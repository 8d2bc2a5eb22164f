"""What a model says about itself: the hooks that an adapter fills in, with what most models have as defaults."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, ClassVar, Generic, TypeVar

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams import Arguments, ModelSpec
from flow_factory.models.comfyui import ComfyUINames
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.samples import (
    BaseSample,
    ComponentTimes,
    Condition,
    ConditionInputs,
    Grid,
    LatentState,
    T2ISample,
    condition_fields,
)
from flow_factory.scheduler.grid import pipeline_grid

ConditionT = TypeVar("ConditionT", bound=Condition)


class ModelHooks(ABC, Generic[ConditionT]):
    """Everything that may be peculiar to a model. `BaseAdapter` adds what all models share.

    Attributes:
        sample_class: The sample type of one example, and `media_field`, its field that holds the decoded media.
        condition_class: The type of encoded inputs.
        example_call: How a model card calls the pipeline; None: as follows from the model's inputs and outputs.
        comfyui: How ComfyUI names a LoRA of this family; None where it does not know the family.
        config: The configuration.
        device: Where tensors are.
        spec: The model's static facts.
        pipeline: The diffusers pipeline, for its helpers and configuration.
    """

    sample_class: ClassVar[type[BaseSample]] = T2ISample
    media_field: ClassVar[str] = "image"
    condition_class: ClassVar[type[Condition]] = Condition
    example_call: ClassVar[ExampleCall | None] = None
    comfyui: ClassVar[ComfyUINames | None] = None

    config: Arguments
    device: torch.device
    spec: ModelSpec
    pipeline: Any

    @abstractmethod
    def load_pipeline(self) -> Any:
        """The diffusers pipeline, on CPU; see `load_diffusers`."""

    @abstractmethod
    def predict_velocity(
        self, state: LatentState, times: ComponentTimes, condition: ConditionT, guidance: GuidanceSpec
    ) -> LatentState:
        """The guided velocity v = noise - data of the network; called inside autocast."""

    @abstractmethod
    def prepare_latents(
        self,
        condition: ConditionT,
        generators: Sequence[torch.Generator],
        height: int,
        width: int,
        generation: Any = None,
    ) -> LatentState:
        """Initial noise, float32 on the device, row i from `generators[i]` as the pipeline would draw it.

        Args:
            condition: Encoded inputs, or None where only the shape is asked for, which must not depend on them.
            generators: One per row.
            height: Pixels.
            width: Pixels.
            generation: The model-specific fields of `train:` or `eval:` (`num_frames`); None means `train:`.
        """

    @abstractmethod
    def decode_latents(self, state: LatentState, generators: Sequence[torch.Generator] | None = None) -> list[Any]:
        """One decoded medium per row, on CPU (uint8 [C, H, W] for images): what the pipeline's PIL output holds."""

    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> ConditionT:
        """Encodes prompts, and negative prompts (None = "") if they are needed; batch B, on the device.

        Args:
            prompts: B texts.
            negative_prompts: B texts, each may be None; None for all.
            need_negative: Whether to encode them.
            generation: The model-specific fields of `train:` or `eval:`; None means `train:`.
        """
        raise NotImplementedError(f"{type(self).__name__} takes no text.")

    def encode_inputs(
        self, inputs: Sequence[ConditionInputs], need_negative: bool = False, generation: Any = None
    ) -> ConditionT:
        """Encodes all that B examples are generated from; models that take condition media override it.

        Everything is encoded here, media by the VAE too, once per prompt: the result is cached, and shared by a group.

        Args:
            inputs: B examples.
            need_negative: Whether to encode negative prompts.
            generation: As in `encode_prompt`.
        """
        prompts, negatives = [i.prompt for i in inputs], [i.negative_prompt for i in inputs]
        return self.encode_prompt(prompts, negatives if need_negative else None, need_negative, generation)

    def grid_arguments(self, num_steps: int, state: LatentState, condition: Any) -> dict[str, Any]:
        """What the pipeline's `__call__` passes to `set_timesteps` besides the number: `sigmas`, `timesteps`, `mu`."""
        return {}

    def sigma_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        """The grid that the pipeline would walk from `state`, on the device.

        Args:
            num_steps: num_inference_steps.
            state: What `prepare_latents` gave.
            condition: Encoded inputs, or None where the grid is asked for without a prompt; it may not depend on them.
            generation: The model-specific fields of `train:` or `eval:` (`strength`); None means `train:`.
        """
        arguments = self.grid_arguments(num_steps, state, condition)
        return pipeline_grid(self.pipeline.scheduler, num_steps, device=self.device, **arguments)

    def component_scheduler(self, component: str) -> Any:
        """The pipeline's scheduler of a component (`solver: pipeline`), which is not changed."""
        return self.pipeline.scheduler

    def solver_grid(self, num_steps: int, state: LatentState, condition: Any, generation: Any = None) -> Grid:
        """The evaluations of the pipeline's own scheduler (`solver: pipeline`), where they are not `sigma_grid`'s."""
        return self.sigma_grid(num_steps, state, condition, generation)

    def initial_state(self, noise: LatentState, grid: Grid, condition: ConditionT) -> LatentState:
        """The state at the first point of the grid, from what `prepare_latents` drew."""
        return noise

    def timestep_for_sigma(self, sigma: Tensor, state: LatentState) -> Tensor:
        """The network's time input for a freely drawn sigma [B]; `state` tells the size, where times depend on it."""
        return 1000.0 * sigma

    def component_sigma(self, component: str, sigma: Tensor) -> Tensor:
        """A component's noise level [B] where that of the first is freely drawn: on the way that rollouts take."""
        return sigma

    def network_state(self, state: LatentState, condition: ConditionT) -> LatentState:
        """What the network sees of a state (composed first frames, appended references)."""
        return state

    def finalize_state(self, state: LatentState, condition: ConditionT, grid: Grid) -> LatentState:
        """The latents at the end of the grid as `decode_latents` takes them."""
        return state

    def scheduler_output(self, component: str, velocity: Tensor, state: Tensor, times: ComponentTimes) -> Tensor:
        """What the pipeline's scheduler takes as model output, from the toolkit's velocity (`solver: pipeline`)."""
        return velocity

    def to_scheduler(self, scheduler: Any, x: Tensor, sigma: Tensor) -> Tensor:
        """A state [B, ...] at sigma [B] in the coordinates of the pipeline's scheduler (`solver: pipeline`)."""
        return x

    def from_scheduler(self, scheduler: Any, x: Tensor, sigma: Tensor) -> Tensor:
        """The inverse of `to_scheduler`."""
        return x

    def guidance(self, guidance_scale: float, generation: Any = None) -> GuidanceSpec:
        """The guidance meant by `guidance_scale`.

        Args:
            guidance_scale: As the pipeline's argument of that name counts it.
            generation: The model-specific fields of `train:` or `eval:`; None means `train:`.
        """
        return GuidanceSpec(scale=guidance_scale)

    @classmethod
    def call_arguments(cls, guidance_scale: float, generation: Any) -> dict[str, Any]:
        """Arguments of the pipeline's `__call__` that mean the same as the configuration's guidance and own fields.

        By default all have the pipeline's names; a model overrides this where one is called otherwise, or where the
        pipeline has to be told what the adapter always does. Records and model cards are written with it.

        Args:
            guidance_scale: As in `guidance`.
            generation: The model-specific fields of `train:` or `eval:`.

        Returns:
            Argument name to a value that JSON can hold, beside prompt, size, steps and generator.
        """
        return {"guidance_scale": guidance_scale, **asdict(generation)}

    @classmethod
    def call_setup(cls, guidance_scale: float, generation: Any, size: tuple[int, int]) -> tuple[str, ...]:
        """Python statements to run before the pipeline's call, for what none of its arguments can mean.

        Args:
            guidance_scale: As in `guidance`.
            generation: The model-specific fields of `train:` or `eval:`.
            size: Height and width in pixels.
        """
        return ()

    @classmethod
    def size_arguments(cls, height: int, width: int) -> dict[str, Any]:
        """Arguments of the pipeline's `__call__` that give an output of a size in pixels, beside `call_arguments`."""
        return {"height": height, "width": width}

    def collate_conditions(self, conditions: Sequence[ConditionT]) -> ConditionT:
        """Joins conditions along the batch; models with ragged conditions pad here."""
        return type(conditions[0]).cat(list(conditions))

    def prepare_condition_state(self, condition: ConditionT) -> ConditionT:
        """Work done once per batch of rollout, replay or loss, on what `encode_inputs` gave."""
        return condition

    def offline_guidance(self) -> GuidanceSpec:
        """The guidance of losses on stored media: none, whatever rollouts use.

        Where the scale is an input of the network it is 1. What counts guidance from another number, or has a second
        kind of it in its own fields, is unguided as well.
        """
        return self.guidance(1.0).unguided()

    @property
    def supports_output_encoding(self) -> bool:
        """True if `encode_output_state` is implemented, which dataset-driven trainers need."""
        return type(self).encode_output_state is not ModelHooks.encode_output_state

    def encode_output_state(
        self, media: Sequence[Any], generators: Sequence[torch.Generator] | None = None
    ) -> LatentState:
        """Latents of given media, the inverse of `decode_latents`; a posterior sample if generators are given.

        What a rollout's state has beside these, pinned (the noise of given pictures), losses on stored media take from
        `prepare_latents`.
        """
        reason = "" if self.spec.no_stored_media is None else f": {self.spec.no_stored_media}"
        raise InputError(
            f"model.model_type {self.spec.key!r} cannot encode its output media for offline training{reason}."
        )

    @classmethod
    def comfyui_lora(cls, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """A LoRA in diffusers' layout (`transformer.<module>.lora_A.weight`), under the keys that ComfyUI reads.

        Returns:
            The contents of its files, by the model that they are for (see `ComfyUINames.convert`).

        Raises:
            InputError: If the names of this family, or of a module, are not known here.
        """
        if cls.comfyui is None:
            raise InputError(
                f"the keys under which ComfyUI reads a LoRA are not known here for {cls.__name__}. Use --format "
                "diffusers, or --format merged for a whole pipeline."
            )
        return cls.comfyui.convert(state)

    def media_fields(self, media: Any, generation: Any = None) -> dict[str, Any]:
        """The fields of `sample_class` that hold one decoded medium, as `decode_latents` gives it.

        Args:
            media: One of its items.
            generation: The model-specific fields that it was made with (`frame_rate`); None means `train:`.
        """
        return {self.media_field: media}

    def make_sample(
        self, *, media: Any, inputs: ConditionInputs | None = None, generation: Any = None, **fields: Any
    ) -> BaseSample:
        """One generated example.

        Args:
            media: One item of `decode_latents`.
            inputs: What it was generated from; its media become `condition_images` and the like, where they exist.
            generation: The model-specific fields that it was made with; None means `train:`.
            fields: The other fields of `sample_class`.
        """
        given = {} if inputs is None else condition_fields(self.sample_class, inputs)
        return self.sample_class(**self.media_fields(media, generation), **given, **fields)
