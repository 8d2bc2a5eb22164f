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
PluginOption = Annotated[
    list[str] | None,
    typer.Option(
        "--plugin",
        metavar="FILE",
        help="A .py file or dotted module to import first, beside the configuration's `plugins`; may be repeated.",
        show_default=False,
    ),
]


@guarded
def train(
    config: ConfigPath, overrides: Overrides = None, plugin: PluginOption = None, debug: DebugOption = False
) -> None:
    """Train from a configuration. Starts num_processes workers, or runs in place under a launcher."""
    import json

    from flow_factory.cli.static_checks import check_statically
    from flow_factory.hparams import load_config

    given = overrides or []
    loaded = load_config(config, given, plugin or [])
    if plugin:
        given = [*given, f"plugins={json.dumps(loaded.plugins)}"]  # how the workers are told
    for warning in check_statically(loaded).warnings:
        typer.echo(f"warning: {warning}", err=True)

    from flow_factory.launch import launch

    launch(config, given, debug)
