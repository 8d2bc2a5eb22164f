"""What to export of a run, and what can be said of it before anything heavy is imported. Needs no torch."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.errors import InputError
from flow_factory.hparams import Arguments

Format = Literal["diffusers", "comfyui", "merged"]


@dataclass(frozen=True)
class ExportRequest:
    """What to export.

    Attributes:
        config: The run's configuration.
        run: Its folder.
        weights: Which of its weights.
        format: "diffusers": a LoRA folder for `load_lora_weights`, or of a full fine-tuning the pipeline folder;
            "comfyui": a LoRA file for ComfyUI; "merged": the pipeline folder with the weights in place.
        dtype: Of the trained components' weights in a pipeline folder; None keeps that of the checkpoint (of a full
            fine-tuning: of the trained weights).
    """

    config: Arguments
    run: Path
    weights: SavedWeights
    format: Format
    dtype: str | None = None

    @property
    def is_pipeline(self) -> bool:
        """Whether the result is a whole pipeline folder."""
        return self.format == "merged" or self.weights.kind == "full"


def check_export(request: ExportRequest) -> None:
    """What can be said before anything is read.

    Raises:
        InputError: If the run has no such thing, or an option has no effect.
    """
    if request.format == "comfyui" and request.weights.kind == "full":
        raise InputError(
            "--format comfyui writes a LoRA, but this run trained all weights (model.finetune_type: full). Use "
            "--format diffusers for the whole pipeline."
        )
    if request.dtype is not None and not request.is_pipeline:
        raise InputError("--dtype is for whole pipelines; a LoRA is written in float32, and readers cast it.")
