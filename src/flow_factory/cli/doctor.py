"""`flow-factory doctor`: whether this machine can run the toolkit, and what to do where it cannot."""

from __future__ import annotations

from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded


@guarded
def doctor(
    config: Annotated[
        str | None,
        typer.Argument(metavar="[CONFIG]", help="Also check what this configuration needs.", show_default=False),
    ] = None,
    distributed: Annotated[
        bool,
        typer.Option("--distributed", help="Also start two processes that exchange numbers.", show_default=False),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Check Python, engines, devices, threads, disk and folders, and make one picture. Exits with 1 on a problem."""
    from flow_factory.hparams import load_config

    loaded = load_config(config) if config is not None else None

    from rich.console import Console
    from rich.text import Text

    from flow_factory.cli.diagnosis import Level, diagnose

    console = Console(highlight=False, soft_wrap=True)
    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
    counts = dict.fromkeys(Level, 0)
    for finding in diagnose(loaded, distributed):
        counts[finding.level] += 1
        console.print(
            Text.assemble((f"{finding.level.value:<8}", styles[finding.level]), f"{finding.name:<22}", finding.found)
        )
        if finding.remedy:
            console.print(Text(f"{'':8}{'':22}-> {finding.remedy}"))
    warnings, problems = counts[Level.WARNING], counts[Level.PROBLEM]
    console.print(f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    if problems:
        raise SystemExit(1)
