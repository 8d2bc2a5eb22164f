"""Whole checkpoints: round trip, retention, damage, and what a kill at any moment leaves."""

from __future__ import annotations

import hashlib
import json
import math
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flow_factory.checkpoints import manifest as manifest_module
from flow_factory.checkpoints.checkpointer import Checkpointer
from flow_factory.checkpoints.manifest import find_damage, newest_checkpoint
from flow_factory.errors import InputError
from tests.checkpoints.save_script import export, state

SCRIPT = Path(__file__).parent / "save_script.py"


def names(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir())


def test_round_trip_of_parts_and_meta(tmp_path):
    keeper = Checkpointer(tmp_path / "checkpoints")
    meta = {"progress": {"optimizer_step": 2**60 + 1}, "config": {"clip": (-1e-4, 1e-4), "x": math.inf, "n": None}}
    path = keeper.save(12, state(12), meta, export)
    assert path == tmp_path / "checkpoints" / "checkpoint-000012" == keeper.latest()
    parts, loaded = keeper.load(path, require=("model", "optimizer"))
    assert loaded == meta
    assert torch.equal(parts["model"]["w"], state(12)["model"]["w"])
    assert parts["optimizer"]["step"] == 12
    assert (path / "lora" / "weights.bin").read_bytes() == b"x" * 1000
    listed = json.loads((path / "manifest.json").read_text())
    assert listed["format_version"] == 1
    assert set(listed["files"]) == {
        "meta.json",
        "model.json",
        "model.safetensors",
        "optimizer.json",
        "optimizer.safetensors",
        "lora/weights.bin",
    }


def test_only_safetensors_and_json_are_written(tmp_path):
    path = Checkpointer(tmp_path).save(1, state(1), {})
    assert {p.suffix for p in path.rglob("*") if p.is_file()} == {".json", ".safetensors"}


def test_retention_keeps_the_newest(tmp_path):
    keeper = Checkpointer(tmp_path, total_limit=2)
    for step in (1, 2, 3, 10, 1_000_000):
        keeper.save(step, state(step), {})
    assert names(tmp_path) == ["checkpoint-000010", "checkpoint-1000000"]
    assert Checkpointer(tmp_path).list() == [
        (10, tmp_path / "checkpoint-000010"),
        (1_000_000, tmp_path / "checkpoint-1000000"),
    ]
    # One that was just saved is kept whatever its number.
    Checkpointer(tmp_path, total_limit=1).save(3, state(3), {})
    assert names(tmp_path) == ["checkpoint-000003"]
    with pytest.raises(InputError, match="save_total_limit"):
        Checkpointer(tmp_path, total_limit=0)


def test_a_failed_save_leaves_everything_as_it_was(tmp_path):
    keeper = Checkpointer(tmp_path, total_limit=1)
    keeper.save(1, state(1), {})

    def broken(folder: Path) -> None:
        raise OSError("no space left on device")

    with pytest.raises(OSError, match="no space"):
        keeper.save(2, state(2), {}, broken)
    assert names(tmp_path) == ["checkpoint-000001"]
    assert find_damage(tmp_path / "checkpoint-000001") is None


def test_saving_a_step_again(tmp_path):
    keeper = Checkpointer(tmp_path)
    path = keeper.save(5, state(5), {"config": 1})
    before = (path / "manifest.json").stat().st_ino
    keeper.save(5, state(5), {"config": 1})
    assert (path / "manifest.json").stat().st_ino == before  # the same content is left alone
    keeper.save(5, state(5, way=1), {"config": 2})
    parts, meta = keeper.load(path)
    assert meta == {"config": 2} and torch.equal(parts["model"]["w"], state(5, way=1)["model"]["w"])
    assert names(tmp_path) == ["checkpoint-000005"]


@pytest.mark.parametrize(
    "name", ["model.safetensors", "model.json", "meta.json", "optimizer.safetensors", "lora/weights.bin"]
)
@pytest.mark.parametrize("damage", ["flip", "truncate", "remove"])
def test_damage_names_the_file_and_the_older_checkpoint(tmp_path, name, damage):
    """Pitfall 23: a missing or damaged file is an error that names it, never only a log line."""
    keeper = Checkpointer(tmp_path)
    keeper.save(1, state(1), {}, export)
    path = keeper.save(2, state(2), {}, export) / name
    content = bytearray(path.read_bytes())
    if damage == "flip":
        content[len(content) // 2] ^= 1
        path.write_bytes(content)
    elif damage == "truncate":
        path.write_bytes(content[:-1])
    else:
        path.unlink()
    for attempt in (keeper.latest, lambda: keeper.load(tmp_path / "checkpoint-000002")):
        with pytest.raises(InputError) as caught:
            attempt()
        assert str(path) in str(caught.value)
        assert f"train.resume={tmp_path / 'checkpoint-000001'}" in str(caught.value)
    keeper.load(tmp_path / "checkpoint-000001")


def test_bad_manifests(tmp_path):
    keeper = Checkpointer(tmp_path)
    assert keeper.latest() is None
    with pytest.raises(InputError, match="no checkpoint at"):
        keeper.load(tmp_path / "checkpoint-000007")
    path = keeper.save(1, state(1), {}) / "manifest.json"
    whole = json.loads(path.read_text())
    for content, said in [
        ("{", "cannot be read"),
        ("[]", "not the manifest"),
        (json.dumps(whole | {"format_version": 99}), "version 99"),
        (json.dumps(whole | {"files": {"meta.json": {}}}), "lacks"),
        (None, "is missing"),
    ]:
        path.unlink() if content is None else path.write_text(content)
        with pytest.raises(InputError, match=said) as caught:
            keeper.latest()
        assert "checkpoint-000001" in str(caught.value) and "log.run_name" in str(caught.value)


def test_a_required_part_that_was_not_saved(tmp_path):
    keeper = Checkpointer(tmp_path)
    path = keeper.save(1, {"model": state(1)["model"]}, {})
    with pytest.raises(InputError, match=r"holds no optimizer.*save_model_only"):
        keeper.load(path, require=("model", "optimizer"))


def test_foreign_entries_are_no_checkpoints(tmp_path):
    keeper = Checkpointer(tmp_path, total_limit=1)
    (tmp_path / "checkpoint-best").mkdir(parents=True)
    (tmp_path / "checkpoint-000099").write_text("a file")
    (tmp_path / ".checkpoint-000098.tmp-0123abcd").mkdir()
    (tmp_path / ".checkpoint-000097.removed-0123abcd").mkdir()
    assert keeper.latest() is None
    keeper.save(1, state(1), {})
    assert names(tmp_path) == ["checkpoint-000001", "checkpoint-000099", "checkpoint-best"]
    with pytest.raises(ValueError, match="manifest"):
        keeper.save(2, {"manifest": {}}, {})


def run_killed(folder: Path, steps: str, way: int, points: list[int]) -> list[tuple[str, str]]:
    """Label and outcome per kill point, each in its own copy of `folder`/<point>."""
    command = [sys.executable, str(SCRIPT), str(folder), steps, str(way), *map(str, points)]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    output = subprocess.run(command, capture_output=True, text=True, check=True, env=environment).stdout
    lines = [line.split("\t") for line in output.splitlines()]
    return [(label, outcome) for label, _, outcome in lines]


@pytest.mark.parametrize("kind", ["next", "again"])
def test_a_kill_at_every_moment_of_a_save_leaves_a_whole_newest_checkpoint(tmp_path, kind):
    """Pitfall 26: SIGKILL after every change of the disk, also while old ones are removed or one is replaced."""
    seed = tmp_path / "seed"
    keeper = Checkpointer(seed, total_limit=2)
    keeper.save(1, state(1), {"way": 0}, export)
    keeper.save(2, state(2), {"way": 0}, export)
    steps, way = {"next": ("3", 0), "again": ("2", 1)}[kind]
    points = list(range(1, 18))
    for point in points:
        shutil.copytree(seed, tmp_path / "runs" / str(point))
    outcomes = run_killed(tmp_path / "runs", steps, way, points)
    labels = [label for label, outcome in outcomes if outcome == "killed"]
    assert len(labels) >= 12 and outcomes[-1][1] == "0", outcomes  # every point was met, and past the last none
    assert {"wrote manifest.json", "renamed", "rename is durable", "renamed for removal", "removed"} <= set(labels)
    if kind == "again":
        assert "set the former folder aside" in labels

    for point, (label, _) in zip(points, outcomes, strict=True):
        folder = tmp_path / "runs" / str(point)
        reader = Checkpointer(folder, total_limit=2)
        latest = reader.latest()
        assert latest is not None, label
        parts, meta = reader.load(latest)
        step = int(latest.name[-6:])
        written_by = meta["config"]["way"] if "config" in meta else 0
        assert torch.equal(parts["model"]["w"], state(step, written_by)["model"]["w"]), label
        assert step >= 2, label
        # The next save goes through and leaves nothing behind.
        reader.save(4, state(4), {}, export)
        assert len(names(folder)) == 2 and names(folder)[-1] == "checkpoint-000004", label
        assert all(find_damage(folder / name) is None for name in names(folder)), label


def test_newest_checkpoint_from_outside_settles_nothing(tmp_path):
    Checkpointer(tmp_path).save(1, state(1), {})
    (tmp_path / ".checkpoint-000002.tmp-0123abcd").mkdir()
    assert newest_checkpoint(tmp_path) == tmp_path / "checkpoint-000001"
    assert (tmp_path / ".checkpoint-000002.tmp-0123abcd").is_dir()


def test_looking_at_checkpoints_needs_no_torch():
    code = (
        "import sys, flow_factory.checkpoints.manifest, flow_factory.checkpoints.signals\n"
        "assert not {'torch', 'numpy', 'safetensors'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_hash_reads_in_pieces(tmp_path):
    path = tmp_path / "file"
    path.write_bytes(b"a" * (3 << 20))
    assert manifest_module.sha256_of(path) == hashlib.sha256(b"a" * (3 << 20)).hexdigest()
