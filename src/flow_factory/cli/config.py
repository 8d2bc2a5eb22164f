"""`flow-factory config`: the schema, a resolved configuration, a starter."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.train import ConfigPath, Overrides

config_app = typer.Typer(
    help="Show the schema, a resolved configuration, or write a starter.", no_args_is_help=True, rich_markup_mode=None
)
TrainerType = Annotated[str, typer.Option("--trainer-type", help="Trainer whose fields are shown.")]
ModelType = Annotated[str, typer.Option("--model-type", help="Model whose own fields are shown.")]


@config_app.command("schema")
@guarded
def schema(trainer_type: TrainerType = "grpo", model_type: ModelType = "sd3-5", debug: DebugOption = False) -> None:
    """Print the JSON Schema of the configuration, with help texts."""
    import json

    from flow_factory.hparams.schema import config_schema

    typer.echo(json.dumps(config_schema(trainer_type, model_type), indent=2))


@config_app.command("show")
@guarded
def show(config: ConfigPath, overrides: Overrides = None, debug: DebugOption = False) -> None:
    """Print a configuration with all defaults and overrides filled in, as YAML."""
    from flow_factory.hparams import load_config
    from flow_factory.hparams.saving import dump_yaml

    typer.echo(dump_yaml(load_config(config, overrides or []).to_mapping()), nl=False)


@config_app.command("init")
@guarded
def init(
    path: Annotated[
        Path | None, typer.Argument(metavar="[PATH]", help="File to write; none: print it.", show_default=False)
    ] = None,
    trainer_type: TrainerType = "grpo",
    model_type: ModelType = "sd3-5",
    debug: DebugOption = False,
) -> None:
    """Write a commented starter configuration. An existing file is never written over."""
    from flow_factory.errors import InputError
    from flow_factory.hparams.starter import starter_config

    text = starter_config(trainer_type, model_type)
    if path is None:
        typer.echo(text, nl=False)
        return
    try:
        with path.open("x", encoding="utf-8") as file:
            file.write(text)
    except FileExistsError as error:
        raise InputError(f"{path} exists and is not written over; choose another name or remove it.") from error
    except OSError as error:
        raise InputError(f"{path} cannot be written: {error.strerror}.") from error
    typer.echo(f"wrote {path}; look through it, then: flow-factory check {path}")
