"""Reading a run folder for its report: whatever is there, and words for whatever is not. Needs no torch.

A report is asked for while a run goes on, after it was killed, and of folders that lost files on their way here. So
nothing in a run folder is an error, except that it is no run folder: each thing that cannot be read becomes a sentence
in `RunRecord.problems`, and the page is made of the rest.
"""

from __future__ import annotations

import io
import json
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from flow_factory.checkpoints import values
from flow_factory.checkpoints.manifest import list_checkpoints
from flow_factory.errors import InputError
from flow_factory.tracking.report.players import PlayFile, read_players
from flow_factory.tracking.report.series import is_number
from flow_factory.tracking.run_folder import CHECKPOINTS, CONFIG, METRICS, OVERRIDES, RESULT, SAMPLES, is_in_use

Status = Literal["finished", "running", "interrupted", "failed", "unfinished"]

_GRID = re.compile(r"^cycle-(\d+)\.png$")
_ENVIRONMENT = "environment.json"
_RESOLVED = "resolved.json"
# Pictures of the first evaluation, with their prompts in the file's header (trainers/evaluation.py writes it).
_FIRST_PICTURES = "first.safetensors"
_HEADER_LIMIT = 16 * 2**20
_SHOWN_BAD_LINES = 3
# What parsers raise on content that they do not expect: besides ValueError, what is tagged as a date or a number and
# is none (AttributeError, IndexError), a tag with a payload of another type (KeyError, TypeError), endless nesting.
_UNREADABLE = (ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError)
_MAX_DEPTH = 60
_MAX_BITS = 4096
_LAST_TIME = 253_402_214_400.0  # the last day of the year 9999, in seconds since the epoch
_BOOKKEEPING = frozenset({"kind", "cycle", "step", "time"})


@dataclass(frozen=True)
class GridFile:
    """A contact sheet of one evaluation.

    Attributes:
        cycle: Finished cycles when it was made.
        path: The PNG file; it has been seen to decode.
        size: Width and height in pixels.
        players: Videos and sounds that belong to it.
    """

    cycle: int
    path: Path
    size: tuple[int, int]
    players: tuple[PlayFile, ...] = ()


@dataclass
class RunRecord:
    """What could be read of a run; its rows are not changed once one of them has been asked for.

    Attributes:
        folder: The run folder.
        name: Its name; made unique where several runs are compared.
        rows: All rows of `metrics.jsonl` that could be read, in order.
        status: How the run stands; "unfinished" is one that neither runs nor said how it ended: it was killed.
        message: What the run said when it was interrupted or failed.
        config: The resolved configuration.
        overridden: Dotted names of the values given on the command line; None if that is not known.
        environment: `environment.json`.
        resolved: `resolved.json`.
        result: `result.json`.
        grids: Dataset name to its contact sheets by cycle.
        captions: Dataset name to the prompts of its contact sheets.
        checkpoints: Names of the checkpoints, oldest first.
        problems: Sentences about what is missing or damaged.
    """

    folder: Path
    name: str
    rows: list[dict[str, Any]] = field(default_factory=list)
    status: Status = "unfinished"
    message: str = ""
    config: dict[str, Any] = field(default_factory=dict)
    overridden: frozenset[str] | None = None
    environment: dict[str, Any] = field(default_factory=dict)
    resolved: dict[str, Any] = field(default_factory=dict)
    result: dict[str, Any] = field(default_factory=dict)
    grids: dict[str, list[GridFile]] = field(default_factory=dict)
    captions: dict[str, list[str]] = field(default_factory=dict)
    checkpoints: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def of_kind(self, kind: str) -> list[dict[str, Any]]:
        """The rows of one kind."""
        return self._by_kind.get(kind, [])

    def numbers_of(self, kind: str) -> list[str]:
        """Names of the metrics that are numbers somewhere in the rows of a kind, in the order of their appearance."""
        if kind not in self._numbers:
            found: dict[str, None] = {}
            for row in self.of_kind(kind):
                if not row.keys() <= found.keys() | _BOOKKEEPING:  # most rows bring nothing new
                    found |= {key: None for key, value in row.items() if key not in _BOOKKEEPING and is_number(value)}
            self._numbers[kind] = list(found)
        return self._numbers[kind]

    @cached_property
    def _by_kind(self) -> dict[str, list[dict[str, Any]]]:
        by_kind: dict[str, list[dict[str, Any]]] = {}
        for row in self.rows:
            by_kind.setdefault(row["kind"], []).append(row)
        return by_kind

    @cached_property
    def _numbers(self) -> dict[str, list[str]]:
        return {}

    @property
    def cycles(self) -> int:
        """Finished cycles."""
        return max((row["cycle"] for row in self.of_kind("cycle")), default=0)

    def setting(self, dotted: str, default: Any = None) -> Any:
        """A value of the configuration, such as `train.trainer_type`."""
        node: Any = self.config
        for part in dotted.split("."):
            if not isinstance(node, Mapping) or part not in node:
                return default
            node = node[part]
        return node


def read_run(folder: Path) -> RunRecord:
    """Reads a run folder.

    Args:
        folder: The run folder; it may be of a run that is going on, was killed, or lost files.

    Raises:
        InputError: If this is no run folder.
    """
    _check_is_run(folder)
    run = RunRecord(folder, folder.resolve().name)
    run.config = _read_yaml(folder / CONFIG, run.problems)
    run.environment = _read_json(folder / _ENVIRONMENT, run.problems)
    run.resolved = _read_json(folder / _RESOLVED, run.problems)
    run.overridden = _read_overrides(folder / OVERRIDES, run.problems)
    run.rows = _read_rows(folder / METRICS, run.problems)
    if (folder / RESULT).exists():
        run.result = _read_json(folder / RESULT, run.problems)
    _settle_status(run)
    _read_samples(run)
    run.checkpoints = [path.name for _, path in list_checkpoints(folder / CHECKPOINTS)]
    if run.rows and not run.cycles:
        run.problems.append("no cycle has been finished yet, so there are no training curves")
    return run


def name_apart(runs: Sequence[RunRecord]) -> None:
    """Gives runs of the same name the parts of their paths that tell them apart."""
    paths = [run.folder.resolve().parts for run in runs]
    for index, run in enumerate(runs):
        for depth in range(1, len(paths[index]) + 1):
            run.name = "/".join(paths[index][-depth:])
            if all(other[-depth:] != paths[index][-depth:] for i, other in enumerate(paths) if i != index):
                break


# ------------------------------------------------------------------------------------------------------- the folder
def _check_is_run(folder: Path) -> None:
    expected = (
        f"A run folder holds {CONFIG}, {METRICS} and {SAMPLES}/, as `flow-factory train` leaves it in log.save_dir"
    )
    if not folder.exists():
        raise InputError(f"{folder}: there is no such folder. {expected}.")
    if not folder.is_dir():
        hint = f" Did you mean {folder.parent}?" if _looks_like_run(folder.parent) else ""
        raise InputError(f"{folder} is a file, not a run folder.{hint} {expected}.")
    if not _looks_like_run(folder):
        inside = sorted(entry.name for entry in folder.iterdir() if entry.is_dir() and _looks_like_run(entry))
        hint = f" It holds runs, though: {', '.join(str(folder / name) for name in inside[:5])}." if inside else ""
        raise InputError(f"{folder} holds no run.{hint} {expected}.")


def _looks_like_run(folder: Path) -> bool:
    if any((folder / name).is_file() for name in (METRICS, RESULT)) or list_checkpoints(folder / CHECKPOINTS):
        return True
    if any((folder / SAMPLES).glob("*/cycle-*.png")):
        return True
    # A run that failed while its model was loading; a config.yaml alone may be anything.
    return (folder / CONFIG).is_file() and (folder / _ENVIRONMENT).is_file()


def _settle_status(run: RunRecord) -> None:
    if is_in_use(run.folder):
        run.status = "running"
        return
    ended = run.result.get("ended")
    last = run.rows[-1].get("time") if run.rows else None
    if not isinstance(ended, (int, float)):
        return
    # A finished run that was gone on with and killed still has the result of its first end.
    if not isinstance(last, (int, float)) or ended >= last - 1.0:
        status = run.result.get("status")
        run.status = status if status in ("finished", "interrupted", "failed") else "unfinished"
        run.message = str(run.result.get("message") or "")


# ------------------------------------------------------------------------------------------------------- its files
def _read_rows(path: Path, problems: list[str]) -> list[dict[str, Any]]:
    try:
        content = path.read_bytes()
    except OSError as error:
        problems.append(f"{path.name} cannot be read ({_reason(error)}): there are no curves")
        return []
    rows: list[dict[str, Any]] = []
    bad: list[int] = []
    lines = content.split(b"\n")
    unfinished = lines.pop()
    for number, line in enumerate(lines, 1):
        row = _row(line)
        if row is None:
            bad.append(number)
        else:
            rows.append(row)
    if unfinished:
        row = _row(unfinished)  # a whole row may lack only its line end
        if row is None:
            problems.append(f"the last line of {path.name} is cut off (line {len(lines) + 1}) and is left out")
        else:
            rows.append(row)
    if bad:
        named = ", ".join(map(str, bad[:_SHOWN_BAD_LINES])) + (", ..." if len(bad) > _SHOWN_BAD_LINES else "")
        verb = "lines cannot" if len(bad) > 1 else "line cannot"
        problems.append(
            f"{len(bad)} {verb} be read in {path.name} and {'are' if len(bad) > 1 else 'is'} left out: {named}"
        )
    if not rows:
        problems.append(f"{path.name} holds no rows: there are no curves yet")
    return rows


def _row(line: bytes) -> dict[str, Any] | None:
    try:
        row = values.loads(line.decode("utf-8"))
    except _UNREADABLE:
        return None
    if not isinstance(row, dict) or not isinstance(row.get("kind"), str):
        return None
    if not all(type(row.get(counter)) is int for counter in ("cycle", "step")):
        return None
    if any(type(value) is int and not is_number(value) for value in row.values()):
        return None
    # The time is told as a date, which years have four digits for.
    when = row.get("time")
    return row if not isinstance(when, (int, float)) or 0 <= when < _LAST_TIME else None


def _read_json(path: Path, problems: list[str]) -> dict[str, Any]:
    try:
        value = values.loads(path.read_text(encoding="utf-8"))
        _check_showable(value)
    except (OSError, *_UNREADABLE) as error:
        problems.append(f"{path.name} cannot be read ({_reason(error)})")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no mapping and is left out")
        return {}
    return value


def _read_yaml(path: Path, problems: list[str]) -> dict[str, Any]:
    import yaml

    try:
        value = yaml.safe_load(path.read_text(encoding="utf-8"))
        _check_showable(value)
    except (OSError, yaml.YAMLError, *_UNREADABLE) as error:
        problems.append(f"{path.name} cannot be read ({_reason(error)}): the settings are not shown")
        return {}
    if not isinstance(value, dict):
        problems.append(f"{path.name} holds no mapping: the settings are not shown")
        return {}
    return {str(key): item for key, item in value.items()}


def _check_showable(value: Any, depth: int = 0) -> None:
    """Raises ValueError for what no table can hold: nesting without end, as of a YAML alias to itself, and integers
    that Python refuses to write out."""
    if depth > _MAX_DEPTH:
        raise ValueError(f"nested more than {_MAX_DEPTH} levels deep")
    if type(value) is int and value.bit_length() > _MAX_BITS:
        raise ValueError(f"an integer of {value.bit_length()} bits")
    if isinstance(value, Mapping):
        for key, item in value.items():
            _check_showable(key, depth + 1)
            _check_showable(item, depth + 1)
    elif isinstance(value, (list, tuple)):
        for item in value:
            _check_showable(item, depth + 1)


def _read_overrides(path: Path, problems: list[str]) -> frozenset[str] | None:
    if not path.exists():
        return None
    names = _read_json(path, problems).get("overridden")
    return frozenset(map(str, names)) if isinstance(names, list) else None


def _reason(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}".rstrip(": ")


# ------------------------------------------------------------------------------------------------------- pictures
def _read_samples(run: RunRecord) -> None:
    root = run.folder / SAMPLES
    datasets = sorted(entry for entry in root.iterdir() if entry.is_dir()) if root.is_dir() else []
    for folder in datasets:
        grids: list[GridFile] = []
        for path in sorted(folder.iterdir()):
            match = _GRID.match(path.name)
            if match is None:
                continue
            size = _decoded_size(path)
            if size is None:
                run.problems.append(f"{SAMPLES}/{folder.name}/{path.name} is no whole picture and is left out")
            else:
                players, damaged = read_players(path.with_suffix(""))
                grids.append(GridFile(int(match[1]), path, size, players))
                place = f"{SAMPLES}/{folder.name}/{path.stem}"
                run.problems += [f"{place}/{name} is no whole file and is left out" for name in damaged]
        grids = _without_dropped(run, folder.name, grids)
        if grids:
            run.grids[folder.name] = sorted(grids, key=lambda grid: grid.cycle)
            run.captions[folder.name] = _captions(folder / _FIRST_PICTURES)
    for name, cycles in _evaluated(run).items():
        missing = sorted(cycles - {grid.cycle for grid in run.grids.get(name, [])})
        if missing and run.setting("eval.num_grid_images", 1) != 0:
            which = ", ".join(map(str, missing[:5])) + (", ..." if len(missing) > 5 else "")
            run.problems.append(f"{SAMPLES}/{name} holds no picture of the evaluation after cycle {which}")


def _without_dropped(run: RunRecord, dataset: str, grids: list[GridFile]) -> list[GridFile]:
    """The sheets of evaluations that are in the rows: a run that was resumed dropped the rows of later ones.

    Where no row speaks of the dataset, the rows are lost or tell no rewards, and all sheets stay.
    """
    known = _evaluated(run).get(dataset, set())
    dropped = sorted({grid.cycle for grid in grids} - known) if known else []
    if dropped:
        which = ", ".join(map(str, dropped[:5])) + (", ..." if len(dropped) > 5 else "")
        run.problems.append(
            f"{SAMPLES}/{dataset} holds pictures after cycle {which} of which {METRICS} knows no evaluation; "
            f"they are left out"
        )
    return [grid for grid in grids if grid.cycle not in dropped]


def _evaluated(run: RunRecord) -> dict[str, set[int]]:
    """Dataset name to the cycles at which it was evaluated."""
    evaluated: dict[str, set[int]] = {}
    for row in run.of_kind("eval"):
        for key in row:
            dataset, slash, _ = key.rpartition("/")
            if slash:
                evaluated.setdefault(dataset, set()).add(row["cycle"])
    return evaluated


def _decoded_size(path: Path) -> tuple[int, int] | None:
    """Width and height of a picture that decodes to its end, else None."""
    from PIL import Image, UnidentifiedImageError

    try:
        with Image.open(io.BytesIO(path.read_bytes())) as picture:
            picture.load()
            return picture.size
    except (OSError, UnidentifiedImageError, SyntaxError, ValueError, Image.DecompressionBombError):
        return None


def _captions(path: Path) -> list[str]:
    """The prompts in the header of a safetensors file, by index; none if they cannot be read."""
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(min(length, _HEADER_LIMIT)))
        captions = json.loads(header["__metadata__"]["captions"])
        return [str(captions[index]) for index in sorted(captions, key=int)]
    except (OSError, struct.error, *_UNREADABLE):
        return []  # the pictures carry their captions too; the list only repeats them as text
