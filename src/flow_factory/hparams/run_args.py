"""Evaluation and logging."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import Field

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Resolution, Section, option

# Fields of `eval:` that take the value of `train:` when they are not given.
INHERITED_BY_EVAL = ("resolution", "guidance_scale", "per_device_batch_size")


def settle_resolution(args: Any) -> None:
    """Makes `resolution`, `height` and `width` of an arguments object agree; height and width win where given."""
    height, width = args.resolution
    args.height = height if args.height is None else args.height
    args.width = width if args.width is None else args.width
    args.resolution = (args.height, args.width)


@dataclass
class EvaluationArguments(Section):
    """The `eval:` section. Fields that the model declares (e.g. max_sequence_length) may be given here too."""

    resolution: Resolution = option((512, 512), "Height and width, or one number for both; not given: train's.")
    height: PositiveInt | None = option(None, "Overrides the height of resolution.")
    width: PositiveInt | None = option(None, "Overrides the width of resolution.")
    per_device_batch_size: PositiveInt = option(1, "Samples generated together on one device; not given: train's.")
    seed: int | None = option(None, "Seed of the evaluation noise, the same at every evaluation; null: train.seed.")
    guidance_scale: NonNegativeFloat = option(3.5, "Guidance scale of the evaluation; not given: train's.")
    num_inference_steps: PositiveInt = option(30, "Denoising steps of the evaluation.")
    eval_freq: NonNegativeInt = option(10, "Evaluate every so many cycles; 0: never.")
    solver: Literal["pipeline", "dynamics"] = option(
        "pipeline", "pipeline: steps of the checkpoint's own scheduler; dynamics: deterministic steps of the toolkit."
    )
    num_grid_images: NonNegativeInt = option(
        16, "Pictures or videos on the sheet that each evaluation saves; 0: no sheet."
    )

    def __post_init__(self) -> None:
        settle_resolution(self)


@dataclass
class LogArguments(Section):
    """The `log:` section."""

    run_name: str | None = option(
        None, "Name of the run's folder in save_dir; null: made from the trainer, the model and the time."
    )
    project: str = option("Flow-Factory", "Project name for experiment trackers.")
    logging_backend: Literal["tensorboard", "wandb", "swanlab", "trackio", "mlflow", "none"] | None = option(
        None,
        "Experiment tracker beside the metrics.jsonl that every run writes: tensorboard, wandb, swanlab, trackio or "
        "mlflow; none or null: no tracker.",
    )
    save_dir: str = option("save", "Folder of the runs.")
    save_freq: NonNegativeInt = option(10, "Save a checkpoint every so many cycles; 0: only at the end.")
    save_total_limit: PositiveInt | None = option(None, "Keep only so many newest checkpoints; null: all.")
    save_model_only: bool = option(False, "Save weights without the state that exact resume needs.")
    monitor: bool = option(
        True, "Measure the samples of each cycle and warn where a statistic leaves its band while the reward rises."
    )
    monitor_band: Annotated[float, Field(gt=0, le=6)] = option(
        3.5, "Half-width of the bands in standard errors of a smoothed mean over prompts; a wider one alarms less."
    )
    monitor_stop: bool = option(False, "End the run, with a checkpoint, after a cycle that raises such an alarm.")
    verbose: bool = option(True, "Show lines of cycles and phases, and a live display on a terminal.")

    def __post_init__(self) -> None:
        if self.monitor_stop and not self.monitor:
            raise FieldError("monitor_stop", "can stop a run only with log.monitor: true, which raises the alarms.")
