"""What is said of a model so that the checks can run."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flow_factory.samples import LatentState, Media


@dataclass(frozen=True)
class Setting:
    """One way to guide.

    Attributes:
        name: For messages.
        scale: `guidance_scale` of the configuration.
        generation: Model-specific fields of the configuration, beside the case's.
        call: The same as arguments of `pipeline(...)`.
        inert: Inputs that this setting must ignore ("negative_prompt", "guidance"); all others must matter.
    """

    name: str
    scale: float
    generation: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    inert: frozenset[str] = frozenset()


def cfg_settings(scale: float = 4.5, off: float = 1.0, argument: str = "guidance_scale") -> tuple[Setting, Setting]:
    """Without and with classifier-free guidance, for pipelines where one argument decides."""
    return (
        Setting("unguided", off, {}, {argument: off}, frozenset({"negative_prompt"})),
        Setting("guided", scale, {}, {argument: scale}),
    )


def _only(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    return {"latent": state.only}


def packed_layout(pipeline: Any, state: LatentState) -> dict[str, Tensor]:
    """Tokens of 2 x 2 latents, written out here once more: [B, C, 2 h, 2 w] to [B, h w, 4 C]."""
    batch, channels, height, width = state.only.shape
    cells = state.only.reshape(batch, channels, height // 2, 2, width // 2, 2)
    tokens = torch.einsum("bchiwj->bhwcij", cells)
    return {"latent": tokens.reshape(batch, (height // 2) * (width // 2), 4 * channels)}


def video_frames(out: Any) -> Any:
    """The result of a video pipeline, for `Case.output`."""
    return out.frames


def video_with_sound(out: Any) -> Any:
    """The result of a joint pipeline, for `Case.output`: latents by component, or (frames, waveform) of each row."""
    if isinstance(out.frames, Tensor):
        return {"video": out.frames, "audio": out.audio}
    return list(zip(out.frames, out.audio, strict=True))


def _call(pipeline: Any, **arguments: Any) -> Any:
    return pipeline(**arguments)


def _scheduler_grid(scheduler: Any) -> tuple[Tensor, Tensor]:
    return scheduler.sigmas, scheduler.timesteps


def _through_vae(pipeline: Any, pixels: Tensor) -> Tensor:
    return pipeline.vae.decode(pipeline.vae.encode(pixels).latent_dist.mode()).sample


def _load_lora(pipeline: Any, file: Path) -> None:
    pipeline.load_lora_weights(str(file.parent), weight_name=file.name)


def _load_comfyui(pipeline: Any, files: Mapping[str, Path]) -> None:
    _load_lora(pipeline, files[""])


@dataclass(frozen=True)
class Case:
    """A model under test.

    Attributes:
        key: `model.model_type`.
        build: Makes the tiny pipeline.
        variant: Tells apart several cases of one key.
        settings: Ways to guide: at least one with and one without, where the model has both.
        generation: Model-specific fields of `train:` and `eval:`.
        call: Arguments of `pipeline(...)` that stand for them.
        varied: Names of model-specific fields whose change must change the result, to the changed value.
        size: Height and width in pixels, not square.
        steps: num_inference_steps of parity checks.
        grid_steps: num_inference_steps that grids are compared for.
        prompts, negatives: One per row, of different lengths; a negative may be None.
        media: Condition media of each row by slot; none for models of text alone.
        media_call: The same for some rows as arguments of `pipeline(...)`.
        invoke: How the pipeline is called; takes it and its arguments, of which `prompt` and `generator` are lists.
        prepare: Called with the pipeline and the setting before each call, for what no argument says: a guider's scale.
        calling: Entered around each call of `pipeline(...)`, for fields that it has as constants of its module.
        takes_negative: Whether `pipeline(...)` has a negative prompt.
        layout: Named latents as `pipeline(output_type="latent")` returns them, from what the adapter decodes.
        output: The pipeline's result, from its output object.
        schedulers: Further schedulers that the pipeline is used with, beside its own.
        grid: (sigmas [T + 1], timesteps [T]) in flow coordinates, from a scheduler that the pipeline has used.
        euler: The scheduler whose steps are the ODE's Euler steps, from one that the pipeline has used; None: a
            flow-matching Euler scheduler on its sigmas and timesteps.
        wrapped: Number of LoRA layers of the default targets, counted by hand.
        uncovered: Patterns (fullmatch) of linear layers inside blocks that are left alone on purpose.
        autoencode: The VAE alone: decoded pixels [B, C, (F,) H, W] from pixels, with the posterior's mode between.
        autoencode_sound: The same of sounds [B, channels, samples], of a model that encodes them.
        load_lora: Loads an exported LoRA, of which the main file is given, into a pipeline.
        load_comfyui: Loads a LoRA of ComfyUI's names into a pipeline, from its files by the model they are for.
        train: Changes to the configuration of trainer cycles, as dotted paths.
        components: What is trained.
        alone: The pipeline's rows depend on their batch (on the longest text); its reference is single calls.
        deterministic_encoders: Components that no posterior is sampled for.
    """

    key: str
    build: Callable[[], Any]
    settings: tuple[Setting, ...]
    wrapped: int
    variant: str = ""
    generation: Mapping[str, Any] = field(default_factory=dict)
    call: Mapping[str, Any] = field(default_factory=dict)
    varied: Mapping[str, Any] = field(default_factory=dict)
    size: tuple[int, int] = (32, 48)
    steps: int = 4
    grid_steps: tuple[int, ...] = (1, 4, 10)
    prompts: Sequence[str] = ("red dot", "blue bar", "star")
    negatives: Sequence[str | None] = (None, "blur", "blur")
    media: Sequence[Media] = ({}, {}, {})
    media_call: Callable[[Sequence[Media]], dict[str, Any]] = lambda rows: {}
    invoke: Callable[..., Any] = _call
    prepare: Callable[[Any, Setting], None] = lambda pipeline, setting: None
    calling: Callable[[], AbstractContextManager[Any]] = nullcontext
    takes_negative: bool = True
    layout: Callable[[Any, LatentState], dict[str, Tensor]] = _only
    output: Callable[[Any], Any] = lambda out: out.images
    schedulers: Mapping[str, Any] = field(default_factory=dict)
    grid: Callable[[Any], tuple[Tensor, Tensor]] = _scheduler_grid
    euler: Callable[[Any], Any] | None = None
    uncovered: tuple[str, ...] = ()
    autoencode: Callable[[Any, Tensor], Tensor] = _through_vae
    autoencode_sound: Callable[[Any, Tensor], Tensor] | None = None
    load_lora: Callable[[Any, Path], None] = _load_lora
    load_comfyui: Callable[[Any, Mapping[str, Path]], None] = _load_comfyui
    train: Mapping[str, Any] = field(default_factory=dict)
    components: tuple[str, ...] = ("transformer",)
    alone: bool = False
    deterministic_encoders: frozenset[str] = frozenset()

    @property
    def name(self) -> str:
        """For test ids and file names."""
        return f"{self.key}-{self.variant}" if self.variant else self.key

    def setting(self, name: str) -> Setting:
        """The setting of that name."""
        return next(setting for setting in self.settings if setting.name == name)
