"""What `CONFIG|RUN` means to the commands that use a model: a configuration, or a run folder with its weights."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from flow_factory.errors import InputError

if TYPE_CHECKING:
    from flow_factory.checkpoints.selection import SavedWeights
    from flow_factory.hparams import Arguments

SourcePath = Annotated[
    str,
    typer.Argument(metavar="CONFIG|RUN", help="A configuration file, or the folder of a run.", show_default=False),
]
RunPath = Annotated[str, typer.Argument(metavar="RUN", help="The folder of a run.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides such as eval.num_inference_steps=20 eval.guidance_scale=4.",
        show_default=False,
    ),
]
Checkpoint = Annotated[
    str | None,
    typer.Option(
        "--checkpoint", metavar="N|PATH", help="Number or folder of the checkpoint; the newest.", show_default=False
    ),
]
Averaged = Annotated[
    bool | None,
    typer.Option("--ema/--live", help="Averaged or live weights; averaged if the run keeps them.", show_default=False),
]


@dataclass(frozen=True)
class Source:
    """A model as it was named on the command line.

    Attributes:
        config: The configuration, overrides applied.
        name: For file names: of the run's folder, or of the configuration file.
        run: The run folder, or None.
        weights: The run's trained weights, or None for a configuration.
    """

    config: Arguments
    name: str
    run: Path | None = None
    weights: SavedWeights | None = None

    @property
    def trained(self) -> Path | None:
        """Where the trained weights are: the run's, or those at `model.resume_path`; None: the base model alone.

        Full weights beneath a LoRA belong to the base.
        """
        if self.weights is not None:
            return self.weights.folder
        model = self.config.model_args
        same = model.resume_path is not None and model.resume_kind == model.finetune_type
        return Path(str(model.resume_path)) if same else None

    def describe(self, variants: Sequence[str]) -> str:
        """One line that says whose weights are used, for "base", "trained" or both."""
        base = self.config.model_args.model_name_or_path
        if self.weights is not None:
            trained = f"run {self.name}, {self.weights.label}"
        else:
            trained = f"{base} with {self.trained}"
        return " and ".join(f"{base} (base model)" if variant == "base" else trained for variant in variants)


def open_source(
    given: str,
    overrides: Sequence[str] | None = None,
    checkpoint: str | None = None,
    averaged: bool | None = None,
    need_run: bool = False,
    evaluates: bool = False,
) -> Source:
    """Reads a configuration or a run folder, and finds the run's weights. Imports nothing heavy.

    Args:
        given: The path: a YAML file, a run folder, or a checkpoint in it.
        overrides: `key=value` strings.
        checkpoint: As `--checkpoint`.
        averaged: As `--ema` (True) and `--live` (False).
        need_run: Whether a configuration file is not enough.
        evaluates: Whether samples are made as `eval:` says, so that it is checked even where training never evaluates.

    Raises:
        InputError: If the path is neither, or the run has no such weights.
    """
    from flow_factory.checkpoints.selection import select_weights
    from flow_factory.hparams import load_config
    from flow_factory.tracking.run_folder import CONFIG

    def load(file: Path) -> Arguments:
        config = load_config(file, overrides or [])
        if evaluates and not config.eval_args.eval_freq:
            return load_config(file, [*(overrides or []), "eval.eval_freq=1"])
        return config

    path = Path(given).expanduser()
    if not path.is_dir():
        if need_run or not path.exists():
            what = "the folder of a run" if need_run else "a configuration file or the folder of a run"
            state = "is a file" if path.exists() else "does not exist"
            raise InputError(f"{given!r} {state}; give {what} (<log.save_dir>/<log.run_name>).")
        if checkpoint is not None or averaged is not None:
            raise InputError(
                f"--checkpoint, --ema and --live choose among the weights of a run, and {given!r} is a configuration. "
                f"Give the run's folder, or name weights with model.resume_path=PATH."
            )
        return Source(load(path), path.stem)
    if (path / "manifest.json").is_file() and (path.parent.parent / CONFIG).is_file():
        checkpoint = checkpoint if checkpoint is not None else str(path)
        path = path.parent.parent
    if not (path / CONFIG).is_file():
        raise InputError(
            f"{given!r} is not the folder of a run: it has no {CONFIG}. Runs are in log.save_dir (save/ by default), "
            f"one folder each."
        )
    config = load(path / CONFIG)
    weights = select_weights(path, checkpoint, averaged)
    if weights.kind != config.model_args.finetune_type:
        raise InputError(
            f"{weights.checkpoint} holds {weights.kind} weights, but model.finetune_type of {path / CONFIG} is "
            f"{config.model_args.finetune_type}; give a checkpoint of the run itself."
        )
    if weights.average_is_the_start:
        typer.echo(
            f"warning: the moving average in {weights.checkpoint} was not updated yet (train.ema_update_interval "
            f"{config.training_args.ema_update_interval}): these are the weights that the run started from. --live "
            f"takes the trained ones.",
            err=True,
        )
    return Source(config, path.absolute().name, path, weights)


def check_model(config: Arguments) -> None:
    """Checks the model folder as far as it is local, before anything heavy is imported.

    Raises:
        ConfigError: Naming the field.
    """
    from flow_factory.hparams import ConfigError
    from flow_factory.hparams.local_model import inspect_local_model

    problems = inspect_local_model(config).problems
    if problems:
        raise ConfigError(problems)
