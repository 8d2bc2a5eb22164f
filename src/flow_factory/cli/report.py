"""`flow-factory report`: a run, or several compared, as one HTML page."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded

RunFolders = Annotated[
    list[Path],
    typer.Argument(metavar="RUN...", help="Run folders; several are compared.", show_default=False),
]
Output = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        metavar="FILE",
        help="The page to write; RUN/report.html, or comparison.html for several runs.",
        show_default=False,
    ),
]


@guarded
def report(runs: RunFolders, output: Output = None, debug: DebugOption = False) -> None:
    """Make the report of a run as one HTML page, or compare several. A run may be going on, killed or damaged."""
    from flow_factory.tracking.report import write_report

    written = write_report(runs, output)
    for name, problem in written.problems:
        typer.echo(f"note: {name}: {problem}", err=True)
    size = written.path.stat().st_size
    typer.echo(f"wrote {written.path} ({size / 1e6:.1f} MB)")
