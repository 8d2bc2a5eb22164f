"""A user's file reaches every process: named in the YAML beside it, or on the command line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from flow_factory.errors import InputError
from flow_factory.hparams import load_config
from tests.trainers.support import base_mapping
from tests.trainers.test_coupled import PLUGIN

ROOT = Path(__file__).resolve().parents[2]


def write_run(pipeline: Path, folder: Path, name: str, **top: Any) -> Path:
    """A YAML file whose loss and estimator are in `<name>.py` beside it."""
    mapping = base_mapping(pipeline, folder) | top
    mapping["train"] |= {
        "policy_loss": f"loss-{name}", "advantage_aggregation": f"above-{name}", "max_epochs": 1,
    }  # fmt: skip
    mapping["rewards"] = [{"name": "jpeg", "reward_model": "jpeg_compressibility"}]
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name, result="agg_loss(terms, mask)"))
    (folder / "run.yaml").write_text(yaml.safe_dump(mapping))
    return folder / "run.yaml"


def command(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "flow_factory.cli.app", *arguments],
        cwd=cwd,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=300,
    )


def test_files_are_found_beside_the_configuration(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = write_run(tiny_sd3_dir, tmp_path, "beside_of_tests", plugins=["beside_of_tests.py"])
    monkeypatch.chdir("/")
    assert load_config(path).plugins == [str((tmp_path / "beside_of_tests.py").resolve())]


def test_errors_of_a_file_name_its_line(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    path = write_run(tiny_sd3_dir, tmp_path, "absent_of_tests", plugins=["broken_of_tests.py"])
    with pytest.raises(InputError, match=r"'broken_of_tests\.py' does not exist; it is looked for beside the config"):
        load_config(path)
    (tmp_path / "broken_of_tests.py").write_text("\n\nvalue = 1 / 0\n")
    with pytest.raises(InputError, match=r"broken_of_tests\.py:3 raised ZeroDivisionError"):
        load_config(path)
    (tmp_path / "broken_of_tests.py").write_text("\nvalue = (\n")
    with pytest.raises(InputError, match=r"broken_of_tests\.py:2 raised SyntaxError"):
        load_config(path)


def test_the_command_line_gives_a_file_to_all_workers(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    path = write_run(tiny_sd3_dir, tmp_path, "given_of_tests", num_processes=2)
    missing = command("check", str(path), cwd=tmp_path)
    assert missing.returncode == 2 and "'loss-given_of_tests' is not one of" in missing.stderr
    assert command("check", str(path), "--plugin", "given_of_tests.py", cwd=tmp_path).returncode == 0
    done = command("train", str(path), "--plugin", "given_of_tests.py", cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    folder = tmp_path / "save" / "run"
    assert json.loads((folder / "environment.json").read_text())["world_size"] == 2
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert any("default/drift" in row for row in rows)
    assert yaml.safe_load((folder / "config.yaml").read_text())["plugins"] == [
        str((tmp_path / "given_of_tests.py").resolve())
    ]


def test_parameters_are_checked_by_check(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    path = write_run(tiny_sd3_dir, tmp_path, "checked_of_tests")
    wrong = ["train.policy_loss_params={strenght: 1}", "train.advantage_params={margin: wide}"]
    done = command("check", str(path), *wrong, "--plugin", "checked_of_tests.py", cwd=tmp_path)
    assert done.returncode == 2
    assert "train.policy_loss_params.strenght" in done.stderr and "strength" in done.stderr
    assert "train.advantage_params.margin" in done.stderr and "'wide'" in done.stderr
