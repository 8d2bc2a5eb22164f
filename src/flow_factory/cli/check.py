"""`flow-factory check`: everything that can be found wrong without loading the model, in about a second."""

from __future__ import annotations

from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.train import ConfigPath, Overrides, PluginOption


@guarded
def check(
    config: ConfigPath,
    overrides: Overrides = None,
    plugin: PluginOption = None,
    dry_run: Annotated[
        bool,
        typer.Option("--dry-run", help="Also build everything and run one tiny cycle.", show_default=False),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Validate a configuration and the files it names; print what a run would do."""
    from flow_factory.cli.static_checks import check_statically
    from flow_factory.hparams import load_config

    loaded = load_config(config, overrides or [], plugin or [])
    report = check_statically(loaded)
    for line in report.lines:
        typer.echo(line)
    for warning in report.warnings:
        typer.echo(f"warning: {warning}", err=True)
    if dry_run:
        from flow_factory.cli.dry_run import run_dry

        typer.echo("dry run: loading the model, trying the rewards and running one tiny cycle")
        result = run_dry(loaded)
        if result.first_ratio_deviation is not None:
            typer.echo(f"first ratio: max |rho - 1| = {result.first_ratio_deviation:.3g}")
        typer.echo(f"update: parameters moved by {result.param_change_norm:.3g} (L2 norm)")
        if result.rollout_change is not None:
            typer.echo(f"rollout: latents of the same noise changed by {result.rollout_change:.3g} (largest element)")
        for name, scores in result.rewards.items():
            typer.echo(
                f"reward {name}: {', '.join('failed' if s is None else f'{s:.4g}' for s in scores)} (blank, noise)"
            )
        if result.tied_rewards:
            typer.echo(
                "warning: the tiny groups had equal rewards; the update was tried with made-up advantages.", err=True
            )
    if report.unseen is not None and not dry_run:
        typer.echo(f"ok, but not looked at: {report.unseen} (`plan` reads its configurations, --dry-run loads it)")
        return
    typer.echo("ok")
