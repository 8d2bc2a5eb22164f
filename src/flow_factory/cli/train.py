"""`flow-factory train`: run a configuration."""

from __future__ import annotations

from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded

ConfigPath = Annotated[str, typer.Argument(metavar="CONFIG", help="The YAML configuration.", show_default=False)]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="KEY=VALUE",
        help="Overrides such as train.learning_rate=1e-5 or rewards[0].weight=0.5.",
        show_default=False,
    ),
]


@guarded
def train(config: ConfigPath, overrides: Overrides = None, debug: DebugOption = False) -> None:
    """Train from a configuration. Starts num_processes workers, or runs in place under a launcher."""
    from flow_factory.cli.static_checks import check_statically
    from flow_factory.hparams import load_config

    given = overrides or []
    for warning in check_statically(load_config(config, given)).warnings:
        typer.echo(f"warning: {warning}", err=True)

    from flow_factory.launch import launch

    launch(config, given, debug)
