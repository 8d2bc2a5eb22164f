"""Metrics as JSON lines: `{"kind": "update", "cycle": 3, "step": 12, "time": ..., "loss": ...}`. Needs no torch.

`cycle` is the number of the cycle that the row belongs to (1 for the first, 0 before it), `step` the number of
optimizer steps taken so far, `time` seconds since the epoch. NaN and infinities are written as `{"$float": "nan"}`.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any

from flow_factory.checkpoints import values
from flow_factory.checkpoints.atomic import atomic_write_bytes
from flow_factory.errors import InputError

RESERVED = ("kind", "cycle", "step", "time")


class MetricsWriter:
    """Appends rows to one file; every row is on its way to the disk when `log` returns.

    A line that a kill cut short is removed when the file is opened again.

    Args:
        path: The `metrics.jsonl` of a run; created if it is missing.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        _drop_unfinished_line(self.path)
        self._handle = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()

    def log(self, metrics: Mapping[str, Any], step: int, kind: str, cycle: int = 0) -> None:
        """Writes one row.

        Args:
            metrics: Numbers (0-dim tensors and numpy scalars too), strings, booleans or None.
            step: Optimizer steps taken so far.
            kind: "update", "cycle", "eval" or another word.
            cycle: The cycle that the row belongs to.

        Raises:
            ValueError: If a metric has a reserved name.
            TypeError: If a value is not a scalar, naming the metric.
        """
        if taken := [name for name in metrics if name in RESERVED]:
            raise ValueError(f"metric {taken[0]!r} has a reserved name ({', '.join(RESERVED)})")
        row = {"kind": kind, "cycle": int(cycle), "step": int(step), "time": round(time.time(), 3)}
        row |= {name: _scalar(name, value) for name, value in metrics.items()}
        self._handle.write(values.dumps(row) + "\n")
        self._handle.flush()

    def truncate_after(self, cycle: int, step: int, evaluated_cycle: int | None = None) -> int:
        """Drops the rows that a run resumed from a checkpoint will write again.

        Rows of kind "cycle" are kept up to `cycle`, of kinds "eval" and "eval_monitor" up to `evaluated_cycle`, of
        kind "update" up to `cycle` or `step`; rows of other kinds are kept if they stand before the last kept one of
        those, or belong to a cycle up to `cycle`.

        Args:
            cycle: Finished cycles of the checkpoint.
            step: Optimizer steps of the checkpoint.
            evaluated_cycle: The last cycle evaluated before the checkpoint was saved; by default `cycle`.

        Returns:
            How many rows were dropped.
        """
        evaluated = cycle if evaluated_cycle is None else evaluated_cycle
        limits = {"cycle": cycle, "eval": evaluated, "eval_monitor": evaluated}
        self._handle.close()
        lines = self.path.read_bytes().splitlines(keepends=True)
        rows = [_parse(line, self.path, number) for number, line in enumerate(lines, 1)]

        def belongs(row: Mapping[str, Any]) -> bool | None:
            if row["kind"] in limits:
                return row["cycle"] <= limits[row["kind"]]
            # Rows of a role that is stepped more often than the first count its own, larger steps.
            return row["step"] <= step or row["cycle"] <= cycle if row["kind"] == "update" else None

        verdicts = [belongs(row) for row in rows]
        last = max((index for index, verdict in enumerate(verdicts) if verdict), default=-1)
        kept = [
            line
            for index, (line, row, verdict) in enumerate(zip(lines, rows, verdicts, strict=True))
            if verdict or (verdict is None and (index < last or row["cycle"] <= cycle))
        ]
        if len(kept) < len(lines):
            atomic_write_bytes(self.path, b"".join(kept))
        self._handle = open(self.path, "a", encoding="utf-8")  # noqa: SIM115 - closed by close()
        return len(lines) - len(kept)

    def close(self) -> None:
        """Forces the file to the disk and closes it; may be called twice."""
        if not self._handle.closed:
            self._handle.flush()
            os.fsync(self._handle.fileno())
            self._handle.close()

    def __enter__(self) -> MetricsWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()


def read_metrics(path: str | os.PathLike[str], kind: str | None = None) -> list[dict[str, Any]]:
    """The rows of a metrics file in order.

    Args:
        path: A `metrics.jsonl`, or the run folder that holds it. A last line without an end is ignored: a running or
            killed process has not finished it.
        kind: Only rows of this kind.

    Raises:
        InputError: If the file is missing or a finished line is not valid, naming file and line.
    """
    path = Path(path)
    if path.is_dir():
        path = path / "metrics.jsonl"
    try:
        content = path.read_bytes()
    except OSError as error:
        raise InputError(f"cannot read {path}: {error.strerror}") from error
    lines = content.split(b"\n")[:-1]
    rows = [_parse(line, path, number) for number, line in enumerate(lines, 1)]
    return [row for row in rows if kind is None or row["kind"] == kind]


def _parse(line: bytes, path: Path, number: int) -> dict[str, Any]:
    try:
        row = values.loads(line.decode("utf-8"))
    except (ValueError, KeyError, TypeError) as error:
        raise InputError(f"{path}:{number} is not a valid metrics line ({error}); remove that line.") from error
    if not isinstance(row, dict) or not {"kind", "cycle", "step"} <= row.keys():
        raise InputError(f"{path}:{number} is not a metrics line with kind, cycle and step; remove that line.")
    return row


def _scalar(name: str, value: Any) -> Any:
    if hasattr(value, "item") and callable(value.item):  # tensors and numpy scalars
        try:
            value = value.item()
        except (ValueError, RuntimeError) as error:
            raise TypeError(f"metric {name!r} is not a scalar: {error}") from error
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return float(value)
    raise TypeError(f"metric {name!r} is a {type(value).__name__}; metrics are numbers, strings, booleans or None")


def _drop_unfinished_line(path: Path) -> None:
    if not path.exists():
        return
    content = path.read_bytes()
    if content and not content.endswith(b"\n"):
        end = content.rfind(b"\n") + 1
        # A whole row may lack only its line end.
        try:
            json.loads(content[end:])
            atomic_write_bytes(path, content + b"\n")
        except ValueError:
            atomic_write_bytes(path, content[:end])
