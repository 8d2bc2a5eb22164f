"""`report.html`: a run, or several compared, as one page that needs nothing but itself. Needs no torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flow_factory.checkpoints.atomic import atomic_write_bytes
from flow_factory.errors import InputError
from flow_factory.tracking.report.page import MARK, render_page
from flow_factory.tracking.report.read import name_apart, read_run

REPORT = "report.html"
COMPARISON = "comparison.html"


@dataclass(frozen=True)
class Report:
    """A report that was written.

    Attributes:
        path: The page.
        problems: Run name and sentence: what was missing or damaged.
    """

    path: Path
    problems: tuple[tuple[str, str], ...]


def write_report(folders: Sequence[str | os.PathLike[str]], output: str | os.PathLike[str] | None = None) -> Report:
    """Writes the report of a run, or the comparison of several.

    Args:
        folders: Run folders; a run may be going on, killed or damaged.
        output: The page to write, or an existing folder for it. By default `report.html` in the folder of the one run,
            or `comparison.html` in the present folder. A former report there is replaced.

    Raises:
        InputError: If a folder is no run, is given twice, or the page cannot be written there.
    """
    paths = [Path(folder).expanduser() for folder in folders]
    if not paths:
        raise InputError("no run was given; name at least one run folder.")
    known = [path.resolve() for path in paths]
    for index, path in enumerate(known):
        if path in known[:index]:
            raise InputError(f"{paths[index]} is given twice; a run is compared with others.")
    runs = [read_run(path) for path in paths]
    target = _target(paths, output)
    if len(runs) > 1:
        name_apart(runs)
    page = render_page(runs, target.parent)
    try:
        atomic_write_bytes(target, _storable(page).encode("utf-8"))
    except OSError as error:
        raise InputError(
            f"{target} cannot be written: {error.strerror or error}. Give another place (--output)."
        ) from error
    return Report(target, tuple((_storable(run.name), _storable(problem)) for run in runs for problem in run.problems))


def _target(paths: Sequence[Path], output: str | os.PathLike[str] | None) -> Path:
    name = REPORT if len(paths) == 1 else COMPARISON
    if output is None:
        target = paths[0] / name if len(paths) == 1 else Path(name)
    else:
        target = Path(output).expanduser()
        target = target / name if target.is_dir() else target
    if not target.parent.is_dir():
        raise InputError(f"{target} cannot be written: there is no folder {target.parent}; make it first.")
    if target.exists() and not _is_report(target):
        raise InputError(f"{target} exists and is no report, so it is not written over; give another name (--output).")
    return target


def _storable(text: str) -> str:
    """The text with a question mark for each half of a surrogate pair, which JSON can hold and UTF-8 cannot."""
    return text.encode("utf-8", errors="replace").decode("utf-8")


def _is_report(path: Path) -> bool:
    with path.open("rb") as file:
        head = file.read(2000)
    return not head or MARK.encode("utf-8") in head


__all__ = ["COMPARISON", "REPORT", "Report", "write_report"]
