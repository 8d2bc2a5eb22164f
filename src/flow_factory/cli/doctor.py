"""`flow-factory doctor`: whether this machine can run the toolkit, and what to do where it cannot."""

from __future__ import annotations

import textwrap
from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded

_LEVEL, _NAME = 9, 18  # widths of the first two columns


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
    width = console.width if console.is_terminal else None
    styles = {Level.OK: "green", Level.WARNING: "yellow", Level.PROBLEM: "bold red"}
    counts = dict.fromkeys(Level, 0)
    for finding in diagnose(loaded, distributed):
        counts[finding.level] += 1
        lines = _wrapped(finding.found, width)
        first = (f"{finding.level.value:<{_LEVEL}}", styles[finding.level]), f"{finding.name:<{_NAME}}"
        console.print(Text.assemble(*first, lines[0]))
        remedy = _wrapped(f"-> {finding.remedy}", width) if finding.remedy else []
        for line in [*lines[1:], *remedy]:
            console.print(Text(" " * (_LEVEL + _NAME) + line))
    warnings, problems = counts[Level.WARNING], counts[Level.PROBLEM]
    console.print(f"{problems} problem{'s' * (problems != 1)}, {warnings} warning{'s' * (warnings != 1)}")
    if problems:
        raise SystemExit(1)


def _wrapped(text: str, width: int | None) -> list[str]:
    """The lines of the third column; one line where nobody gave a width."""
    if width is None:
        return [text]
    return textwrap.wrap(text, max(20, width - _LEVEL - _NAME), break_long_words=False, break_on_hyphens=False) or [""]
