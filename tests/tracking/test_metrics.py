"""Metrics as JSON lines."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.tracking.metrics import MetricsWriter, read_metrics


def test_rows_are_readable_at_once_and_exact(tmp_path):
    path = tmp_path / "metrics.jsonl"
    with MetricsWriter(path) as writer:
        writer.log(
            {
                "a": 1 / 3,
                "nan": math.nan,
                "inf": -math.inf,
                "tensor": torch.tensor(0.1),
                "np": np.float64(0.1),
                "n": 2**60 + 1,
                "text": "ü\n",
                "none": None,
            },
            step=5,
            kind="update",
            cycle=2,
        )
        (row,) = read_metrics(tmp_path)
    assert math.isnan(row.pop("nan")) and row.pop("time") > 1e9
    assert row == {
        "kind": "update",
        "cycle": 2,
        "step": 5,
        "a": 1 / 3,
        "inf": -math.inf,
        "tensor": torch.tensor(0.1).item(),
        "np": 0.1,
        "n": 2**60 + 1,
        "text": "ü\n",
        "none": None,
    }
    json.loads(path.read_text(), parse_constant=lambda word: pytest.fail(f"{word} is not JSON"))


def test_bad_metrics_are_named(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer:
        with pytest.raises(ValueError, match="'step'"):
            writer.log({"step": 1}, 1, "update")
        with pytest.raises(TypeError, match="'x'"):
            writer.log({"x": torch.ones(2)}, 1, "update")
        with pytest.raises(TypeError, match="'y'"):
            writer.log({"y": [1]}, 1, "update")
    assert read_metrics(tmp_path / "m") == []


def write_cycles(writer: MetricsWriter, first: int, last: int) -> None:
    """Two updates a cycle, with a row of the algorithm's own before each, and an evaluation every second cycle."""
    for cycle in range(first, last + 1):
        for update in (1, 2):
            step = 2 * (cycle - 1) + update
            writer.log({"x": step}, step - 1, "data", cycle)
            writer.log({"loss": step / 7}, step, "update", cycle)
        writer.log({"reward": cycle / 3}, 2 * cycle, "cycle", cycle)
        if cycle % 2 == 0:
            writer.log({"accuracy": cycle / 9}, 2 * cycle, "eval", cycle)


def without_time(path):
    return [{k: v for k, v in row.items() if k != "time"} for row in read_metrics(path)]


@pytest.mark.parametrize("cycle", [0, 1, 2, 3])
def test_resumed_metrics_equal_uninterrupted_ones(tmp_path, cycle):
    """Pitfall 22: metrics after a kill and a resume are those of the uninterrupted run, no row twice."""
    with MetricsWriter(tmp_path / "straight") as writer:
        write_cycles(writer, 1, 4)
    with MetricsWriter(tmp_path / "killed") as writer:
        write_cycles(writer, 1, 3)
        writer.log({"x": 7}, 6, "data", 4)  # cycle 4 had begun
    with open(tmp_path / "killed", "a") as handle:
        handle.write('{"kind": "upda')  # the kill came in the middle of a line
    with MetricsWriter(tmp_path / "killed") as writer:
        writer.truncate_after(cycle, 2 * cycle)
        write_cycles(writer, cycle + 1, 4)
    assert without_time(tmp_path / "killed") == without_time(tmp_path / "straight")


def test_a_checkpoint_inside_a_cycle_keeps_the_rows_up_to_its_step(tmp_path):
    """A dataset trainer can be stopped inside a data epoch: cycle 3 had made one of its two updates."""
    with MetricsWriter(tmp_path / "m") as writer:
        write_cycles(writer, 1, 4)
        writer.truncate_after(2, 5)
    rows = [(row["kind"], row["cycle"], row["step"]) for row in read_metrics(tmp_path / "m")]
    assert rows[-3:] == [("eval", 2, 4), ("data", 3, 4), ("update", 3, 5)]


def test_rows_of_a_role_with_more_steps_than_the_first_are_kept(tmp_path):
    """Five updates of one role for each of the first: its rows count its own steps, but belong to a kept cycle."""
    with MetricsWriter(tmp_path / "m") as writer:
        for cycle in (1, 2):
            for fake in range(5):
                writer.log({"fake/loss": 1.0}, 5 * (cycle - 1) + fake + 1, "update", cycle)
            writer.log({"generator/loss": 1.0}, cycle, "update", cycle)
            writer.log({"loss": 1.0}, cycle, "cycle", cycle)
        assert writer.truncate_after(1, 1) == 7
    assert len(read_metrics(tmp_path / "m")) == 7


def test_nothing_is_dropped_when_nothing_is_newer(tmp_path):
    with MetricsWriter(tmp_path / "m") as writer:
        write_cycles(writer, 1, 2)
        before = (tmp_path / "m").read_bytes()
        assert writer.truncate_after(2, 4) == 0
    assert (tmp_path / "m").read_bytes() == before


def test_a_cut_last_line_is_ignored_and_others_are_named(tmp_path):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        writer.log({"a": 1}, 1, "update")
    whole = path.read_text()
    path.write_text(whole + whole[:-20])
    assert len(read_metrics(path)) == 1
    path.write_text(whole + "not json\n" + whole)
    with pytest.raises(InputError, match=r"m:2 is not a valid"):
        read_metrics(path)
    path.write_text(whole + "[]\n")
    with pytest.raises(InputError, match=r"m:2 is not a metrics line"):
        read_metrics(path)
    with pytest.raises(InputError, match="cannot read"):
        read_metrics(tmp_path / "absent")


def test_a_line_that_lacks_only_its_end_is_kept(tmp_path):
    path = tmp_path / "m"
    with MetricsWriter(path) as writer:
        writer.log({"a": 1}, 1, "update")
    path.write_text(path.read_text()[:-1])
    with MetricsWriter(path) as writer:
        writer.log({"a": 2}, 2, "update")
    assert [row["a"] for row in read_metrics(path)] == [1, 2]
