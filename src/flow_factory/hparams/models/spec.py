"""What is known of a model before it is loaded."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from flow_factory.contracts import PipelineIOContract, SoundFormat
from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import Section

# A number, or a function of the checkpoint's local folder (None when it is not local).
FolderFact = int | Callable[[Path | None], int]
GuidanceKind = Literal["cfg", "embedded", "none"]


@dataclass
class GenerationArguments(Section):
    """Base of the model-specific fields that `train:` and `eval:` accept beside their own. This one has none."""


@dataclass(frozen=True)
class ModelSpec:
    """Static facts of one adapter, importable without torch.

    Attributes:
        key: The `model.model_type` that selects it.
        adapter: Dotted path of the adapter class.
        pipeline_class: Name of the diffusers pipeline class in the checkpoint's index.
        io: Inputs and outputs.
        generation_arguments: Dataclass of the model-specific fields of `train:` and `eval:`.
        guidance: "cfg": two predictions above scale 1; "embedded": the scale is a network input; "none". Or a function
            of the checkpoint's folder that says which.
        size_factor: Height and width must be multiples of this.
        resolution_floor: Below this side length the model is known to give broken samples (a warning).
        default_lora_targets: Module name suffixes that `target_modules: all` stands for.
        dead_modules: Regular expressions of module names that can never get a gradient and are not wrapped; `{last}`
            stands for the index of the network's last block.
        required_components: Components of the pipeline that must be present; or a function of the checkpoint's folder.
        trainable_components: Components that can be trained.
        dynamics: Transitions that are defined for this model.
        max_batch: Largest batch a forward may have; None: any.
        workflow: Of a modular pipeline (`modular_model_index.json`): which of its workflows; None: another pipeline.
        uncounted_steps: By how many `num_inference_steps` exceeds the steps of a rollout; 1 where the end of the grid
            counts as one.
        share_field: Name of the model-specific field that says which share of the steps a rollout takes; None: all.
        check_fields: Raises a FieldError where the model-specific fields do not fit the checkpoint; takes them and its
            local folder (None when it is not local).
        other_classes: Further classes whose checkpoints hold the same components, and load as `pipeline_class`.
        sound: The sound of stored videos, of a model that is trained on them with their sound; takes what
            `check_fields` takes.
        no_stored_media: Why the model cannot be trained on stored media; None where it can.
    """

    key: str
    adapter: str
    pipeline_class: str
    io: PipelineIOContract
    generation_arguments: type = GenerationArguments
    guidance: GuidanceKind | Callable[[Path | None], GuidanceKind] = "cfg"
    size_factor: FolderFact = 16
    resolution_floor: FolderFact = 1
    default_lora_targets: tuple[str, ...] = ("to_q", "to_k", "to_v", "to_out.0")
    dead_modules: tuple[str, ...] = ()
    required_components: tuple[str, ...] | Callable[[Path], tuple[str, ...]] = ()
    trainable_components: tuple[str, ...] = ("transformer",)
    dynamics: tuple[str, ...] = ("Flow-SDE", "Dance-SDE", "CPS", "ODE")
    max_batch: int | None = None
    workflow: str | None = None
    uncounted_steps: int = 0
    share_field: str | None = None
    check_fields: Callable[[Any, Path | None], None] | None = None
    other_classes: tuple[str, ...] = ()
    sound: Callable[[Any, Path | None], SoundFormat] | None = None
    no_stored_media: str | None = None

    @property
    def index_file(self) -> str:
        """Name of the file in a checkpoint's folder that names its pipeline class and components."""
        return "model_index.json" if self.workflow is None else "modular_model_index.json"

    def size_multiple(self, folder: Path | None = None) -> int:
        """The number that height and width must be multiples of, for the checkpoint in `folder` if it is local."""
        return self.size_factor(folder) if callable(self.size_factor) else self.size_factor

    def guidance_kind(self, folder: Path | None = None) -> GuidanceKind:
        """How the checkpoint in `folder`, if it is local, is guided."""
        return self.guidance(folder) if callable(self.guidance) else self.guidance

    def needed_components(self, folder: Path) -> tuple[str, ...]:
        """Components that the checkpoint in `folder` must have."""
        needed = self.required_components
        return needed(folder) if callable(needed) else needed

    @property
    def modular_components(self) -> tuple[str, ...]:
        """Of a modular pipeline, the components of its workflow; the others of its repository are not loaded."""
        needed = self.required_components
        return () if self.workflow is None or callable(needed) else needed

    def floor(self, folder: Path | None = None) -> int:
        """The side length below which samples are known to be broken."""
        return self.resolution_floor(folder) if callable(self.resolution_floor) else self.resolution_floor

    def rollout_steps(self, num_inference_steps: int, fields: Any) -> int:
        """Steps of a rollout with these model-specific fields; below 1 where there is none."""
        return int(num_inference_steps * self._share(fields)) - self.uncounted_steps

    def fewest_steps(self, wanted: int, fields: Any) -> int:
        """The smallest num_inference_steps whose rollout has so many steps."""
        number = math.ceil((wanted + self.uncounted_steps) / self._share(fields))
        return number if self.rollout_steps(number, fields) >= wanted else number + 1

    def taken(self, fields: Any) -> str:
        """Which of num_inference_steps a rollout takes, for messages."""
        return f"{self.uncounted_steps} less" if self.share_field is None else f"{self._share(fields):g} of them"

    def _share(self, fields: Any) -> float:
        return 1.0 if self.share_field is None else getattr(fields, self.share_field)

    def generation_fields(self) -> tuple[str, ...]:
        """Names of the model-specific fields."""
        return tuple(f.name for f in dataclasses.fields(self.generation_arguments))

    def check_size(self, height: int, width: int, folder: Path | None = None) -> None:
        """Raises a FieldError on `resolution` if the size is not a multiple that the model can make."""
        multiple = self.size_multiple(folder)
        if height % multiple or width % multiple:
            near = [max(multiple, round(side / multiple) * multiple) for side in (height, width)]
            raise FieldError(
                "resolution", f"of {self.key} must be a multiple of {multiple} in height and width, e.g. {near}."
            )
