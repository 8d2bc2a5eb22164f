"""`flow-factory`: the command line."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

from flow_factory.cli.check import check
from flow_factory.cli.config import config_app
from flow_factory.cli.data import data_app
from flow_factory.cli.doctor import doctor
from flow_factory.cli.errors import DebugOption
from flow_factory.cli.evaluate import evaluate
from flow_factory.cli.export import export
from flow_factory.cli.listing import list_names
from flow_factory.cli.plan import plan
from flow_factory.cli.report import report
from flow_factory.cli.sample import sample
from flow_factory.cli.train import train

app = typer.Typer(
    name="flow-factory",
    help="Fine-tune diffusion and flow-matching generators with online RL, preference data and distillation.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _print_version(value: bool) -> None:
    if value:
        from flow_factory import __version__

        typer.echo(__version__)
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Print the version and exit.")
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Fine-tune diffusion and flow-matching generators with online RL, preference data and distillation."""


app.command("train")(train)
app.command("check")(check)
app.command("plan")(plan)
app.command("sample")(sample)
app.command("eval")(evaluate)
app.command("export")(export)
app.command("report")(report)
app.command("doctor")(doctor)
app.command("list")(list_names)
app.add_typer(config_app, name="config")
app.add_typer(data_app, name="data")


def main() -> None:
    """Entry point of the `flow-factory` script. Usage errors and wrong input exit with 2, failed runs with 1.

    The present folder is searched for modules, last of all: a reward or a trainer in `my_rewards.py` beside the YAML is
    found as `my_rewards.Redness`, and cannot hide an installed package.
    """
    if os.getcwd() not in sys.path and "" not in sys.path:
        sys.path.append(os.getcwd())
    app()


if __name__ == "__main__":
    main()
