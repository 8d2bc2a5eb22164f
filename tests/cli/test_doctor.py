"""`doctor`: what it finds on this machine, and on machines that are made up."""

from __future__ import annotations

import os
import shutil
from collections import namedtuple
from importlib import metadata
from pathlib import Path

import pytest
import torch

from flow_factory.cli import diagnosis
from flow_factory.cli.diagnosis import Finding, Level
from tests.cli.invoke import invoke
from tests.hparams.test_models_and_builtins import make_folder
from tests.trainers.support import make_config

Usage = namedtuple("Usage", "total used free")


def test_this_machine_is_well(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    done = invoke(capsys, monkeypatch, "doctor", "--distributed")
    assert done.code == 0, done.out
    assert "the embedded pipeline drew a red circle" in done.out and "summed a number over gloo" in done.out
    assert f"torch {metadata.version('torch')}" in done.out and "0 problems" in done.out
    assert list(tmp_path.iterdir()) == []  # it leaves nothing


def test_a_problem_exits_with_1_and_says_what_to_do(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    findings = [Finding(Level.OK, "a", "fine"), Finding(Level.PROBLEM, "b", "broken [red]", "mend it")]
    monkeypatch.setattr(diagnosis, "diagnose", lambda config, distributed: iter(findings))
    done = invoke(capsys, monkeypatch, "doctor")
    assert done.code == 1 and "broken [red]" in done.out and "-> mend it" in done.out
    assert "1 problem, 0 warnings" in done.out and done.err == ""


def test_a_check_that_raises_is_a_problem_and_the_others_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    def check_picture() -> None:
        raise OSError("libcuda is broken")

    monkeypatch.setattr(diagnosis, "check_picture", check_picture)
    found = {f.name: f for f in diagnosis.diagnose()}
    assert found["picture"].level is Level.PROBLEM and "libcuda is broken" in found["picture"].found
    assert found["python"].level is Level.OK and "threads" in found


def test_packages_outside_their_range_and_missing_ones(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = {"torch": "2.0.0", "peft": None}
    real = diagnosis.installed_version
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: versions[name] if name in versions else real(name))
    found = {f.name: f for f in diagnosis.check_packages()}
    assert found["torch"].level is Level.PROBLEM and "2.0.0, outside the range >=" in found["torch"].found
    assert found["torch"].remedy.startswith('pip install -U "torch>=')
    assert found["peft"].level is Level.PROBLEM and found["peft"].found == "not installed"
    assert "diffusers" in found["packages"].found and "peft" not in found["packages"].found


def test_extras_have_their_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "installed_version", lambda name: None)
    (finding,) = diagnosis.check_extras()
    declared = metadata.metadata("flow-factory").get_all("Provides-Extra") or []
    assert all(extra in finding.found for extra in declared) and "installed: none" in finding.found
    assert f'pip install "flow-factory[{declared[0]}]"' in finding.remedy and finding.level is Level.OK


def test_the_configured_tracker(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    config = make_config(make_folder(tmp_path / "model"), tmp_path, {"log.logging_backend": "wandb"})
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    (finding,) = diagnosis.check_tracker(config)
    assert finding.level is Level.PROBLEM and 'pip install "flow-factory[wandb]"' in finding.remedy


@pytest.mark.parametrize(("free", "level"), [(0.5, Level.PROBLEM), (5, Level.WARNING), (500, Level.OK)])
def test_disk_space(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, free: float, level: Level) -> None:
    monkeypatch.setattr(shutil, "disk_usage", lambda path: Usage(1e12, 0, free * 1e9))
    finding = diagnosis.check_folder("log.save_dir", tmp_path / "not" / "yet", "log.save_dir")
    assert finding.level is level and (level is Level.OK or "log.save_dir" in finding.remedy)
    assert not (tmp_path / "not").exists()


def test_folders_that_cannot_be_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    finding = diagnosis.check_folder("x", tmp_path / "file" / "save", "TMPDIR")
    assert finding.level is Level.PROBLEM and "is not a folder" in finding.found

    def refuse(**kwargs: object) -> None:
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr(diagnosis.tempfile, "TemporaryFile", refuse)
    finding = diagnosis.check_folder("x", tmp_path, "TMPDIR")
    assert finding.level is Level.PROBLEM and "Permission denied" in finding.found and "TMPDIR" in finding.remedy


def test_more_threads_than_cores_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "usable_cores", lambda: 2)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 8)
    (finding,) = diagnosis.check_threads()
    assert finding.level is Level.WARNING and finding.remedy == "export OMP_NUM_THREADS=2"
    monkeypatch.setattr(torch, "get_num_threads", lambda: 2)
    (finding,) = diagnosis.check_threads()
    assert finding.level is Level.OK


def test_usable_cores_are_those_of_this_process() -> None:
    assert 1 <= diagnosis.usable_cores() <= (os.cpu_count() or 1)


def test_a_picture_of_something_else_is_a_problem(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a broken kernel looks like: the same prompt, a picture of another colour."""
    from flow_factory.data_utils import prompt_choice

    real = prompt_choice.choose_prompts
    monkeypatch.setattr(
        prompt_choice, "choose_prompts", lambda config, texts: real(config, ["a blue circle on a white background"])
    )
    (finding,) = diagnosis.check_picture()
    assert finding.level is Level.PROBLEM and "was asked for a red circle" in finding.found


def test_processes_that_cannot_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(diagnosis, "_PEER", "import sys; sys.exit('no route to host')")
    (finding,) = diagnosis.check_peers()
    assert finding.level is Level.PROBLEM and finding.found == "no route to host"
    assert "GLOO_SOCKET_IFNAME" in finding.remedy
