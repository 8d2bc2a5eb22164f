"""The run folder: what resuming means, and that nothing of an earlier run is written over."""

from __future__ import annotations

import fcntl
import os
import subprocess
import sys
from datetime import datetime
from pathlib import Path

import pytest

from flow_factory.checkpoints.checkpointer import Checkpointer
from flow_factory.errors import InputError
from flow_factory.hparams import load_config
from flow_factory.tracking import run_folder
from flow_factory.tracking.run_folder import prepare_run_folder, release_run_folder, resolve_resume


@pytest.fixture(autouse=True)
def release_locks():
    yield
    for folder in list(run_folder._locks):
        release_run_folder(folder)


def run_with_checkpoints(config, *steps):
    folder = prepare_run_folder(config)
    (folder / "metrics.jsonl").write_text("")
    for step in steps:
        Checkpointer(folder / "checkpoints").save(step, {"model": {}}, {"config": config.to_mapping()})
    return folder


def snapshot(folder: Path) -> dict[str, bytes]:
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.name != ".lock"}


def test_a_new_run_keeps_its_resolved_config(make_config, tmp_path):
    config = make_config()
    folder = prepare_run_folder(config)
    assert folder == tmp_path / "save" / "run"
    assert load_config(folder / "config.yaml") == config
    assert resolve_resume(config, folder) is None


def test_default_names_tell_trainer_model_and_time(make_config, tmp_path):
    config = make_config(log={"run_name": None})
    name = run_folder.default_run_name(config, datetime(2026, 1, 2, 3, 4, 5))
    assert name == "grpo-sd3-5-20260102-030405"
    first, second = prepare_run_folder(config), prepare_run_folder(config)
    assert first != second and first.parent == second.parent == tmp_path / "save"


@pytest.mark.parametrize("name", ["", " ", ".", "..", "a/b", "/abs", "a\\b", "a\nb", "x" * 256, "\0"])
def test_a_run_name_is_one_folder(make_config, name):
    with pytest.raises(InputError, match=r"log\.run_name"):
        prepare_run_folder(make_config(log={"run_name": name}))


def test_auto_goes_on_from_the_newest_checkpoint(make_config):
    """Pitfall 22: resuming is not a flag that is accepted and ignored."""
    config = make_config()
    folder = run_with_checkpoints(config, 1, 2)
    before = snapshot(folder)
    assert prepare_run_folder(config) == folder
    assert resolve_resume(config, folder) == folder / "checkpoints" / "checkpoint-000002"
    assert snapshot(folder) == before


def test_fields_that_may_change_may_change_and_the_former_config_is_kept(make_config):
    folder = run_with_checkpoints(make_config(), 1)
    former = (folder / "config.yaml").read_bytes()
    longer = make_config(train={"max_epochs": 9})
    prepare_run_folder(longer)
    assert load_config(folder / "config.yaml") == longer
    assert (folder / "config.1.yaml").read_bytes() == former


def test_a_changed_config_is_refused_with_keys_and_values(make_config):
    folder = run_with_checkpoints(make_config(), 1)
    before = snapshot(folder)
    changed = make_config(
        train={"learning_rate": 3e-4}, rewards=[{"name": "r", "reward_model": "jpeg_compressibility"}]
    )
    with pytest.raises(InputError) as caught:
        prepare_run_folder(changed)
    message = str(caught.value)
    assert "train.learning_rate: 1e-05 -> 0.0003" in message
    assert "rewards[0].reward_model: 'brightness' -> 'jpeg_compressibility'" in message
    assert "log.run_name" in message and "train.resume=never" in message
    assert snapshot(folder) == before
    assert not run_folder._locks  # a refused run does not keep the folder


def test_changed_weights_or_prompts_are_refused_by_name(make_config, tmp_path):
    """The configuration names files; what is in them belongs to the run too."""
    config = make_config()
    weights = tmp_path / "model" / "transformer" / "weights.safetensors"
    weights.parent.mkdir()
    weights.write_bytes(bytes(20 << 20))  # larger than what is hashed whole
    folder = run_with_checkpoints(config, 1)
    prepare_run_folder(config)
    with open(weights, "r+b") as handle:
        handle.seek((20 << 20) - 5)
        handle.write(b"x")
    (tmp_path / "data" / "train.txt").write_text("another prompt\n")
    (tmp_path / "data" / "test.txt").write_text("evaluation may change\n")
    (tmp_path / "model" / "README.md").write_text("so may this")
    with pytest.raises(InputError) as caught:
        prepare_run_folder(config)
    lines = str(caught.value).splitlines()
    assert lines[1:-1] == [
        "  data/default/train.txt has another content",
        "  model/transformer/weights.safetensors has another content",
    ]
    weights.unlink()
    with pytest.raises(InputError, match=r"weights\.safetensors is gone"):
        prepare_run_folder(make_config(train={"resume": str(folder)}, log={"run_name": "branch"}))


def test_never_does_not_touch_an_existing_run(make_config):
    folder = run_with_checkpoints(make_config(), 1)
    before = snapshot(folder)
    with pytest.raises(InputError, match=r"nothing is written over.*log\.run_name.*train\.resume=auto"):
        prepare_run_folder(make_config(train={"resume": "never"}))
    assert snapshot(folder) == before
    other = prepare_run_folder(make_config(train={"resume": "never"}, log={"run_name": "other"}))
    assert resolve_resume(make_config(train={"resume": "never"}), other) is None


def test_an_attempt_without_a_checkpoint_is_set_aside(make_config):
    config = make_config()
    folder = prepare_run_folder(config)
    for number in (1, 2):
        (folder / "metrics.jsonl").write_text(f"attempt {number}\n")
        (folder / "samples").mkdir()
        (folder / "samples" / "grid.png").write_text(f"picture {number}")
        (folder / "notes.txt").write_text("the user's own")
        assert prepare_run_folder(config) == folder
        assert (folder / f"attempt-{number}" / "metrics.jsonl").read_text() == f"attempt {number}\n"
        assert (folder / f"attempt-{number}" / "samples" / "grid.png").read_text() == f"picture {number}"
        assert not (folder / "metrics.jsonl").exists() and not (folder / "samples").exists()
        assert (folder / "notes.txt").exists() and load_config(folder / "config.yaml") == config


def test_a_damaged_former_config_is_kept_and_does_not_matter(make_config):
    """The checkpoint holds the configuration that counts; the file beside it may be anything."""
    folder = run_with_checkpoints(make_config(), 1)
    (folder / "config.yaml").write_bytes(b"\xff\xfe not text")
    prepare_run_folder(make_config())
    assert load_config(folder / "config.yaml") == make_config()
    assert (folder / "config.1.yaml").read_bytes() == b"\xff\xfe not text"


def test_an_attempt_that_failed_while_loading_leaves_nothing_to_set_aside(make_config):
    folder = prepare_run_folder(make_config())
    (folder / "metrics.jsonl").write_text("")
    prepare_run_folder(make_config())
    prepare_run_folder(make_config(train={"resume": "never", "learning_rate": 1e-3}))
    assert sorted(p.name for p in folder.iterdir()) == [
        ".lock",
        "config.1.yaml",
        "config.yaml",
        "inputs.json",
        "metrics.jsonl",
        "overrides.json",
    ]


def test_a_folder_with_only_other_things_is_used(make_config, tmp_path):
    (tmp_path / "save" / "run").mkdir(parents=True)
    (tmp_path / "save" / "run" / "slurm.out").write_text("log")
    folder = prepare_run_folder(make_config())
    assert (folder / "slurm.out").read_text() == "log" and (folder / "config.yaml").exists()


def test_a_path_resumes_in_place_or_branches_off(make_config, tmp_path):
    folder = run_with_checkpoints(make_config(), 1, 2)
    older, newest = (folder / "checkpoints" / f"checkpoint-00000{n}" for n in (1, 2))
    assert prepare_run_folder(make_config(train={"resume": str(newest)})) == folder
    with pytest.raises(InputError, match=r"not the newest.*checkpoint-000002.*log\.run_name"):
        prepare_run_folder(make_config(train={"resume": str(older)}))

    branch = make_config(train={"resume": str(older)}, log={"run_name": "branch"})
    assert prepare_run_folder(branch) == tmp_path / "save" / "branch"
    assert resolve_resume(branch, tmp_path / "save" / "branch") == older
    with pytest.raises(InputError, match=r"train\.learning_rate"):
        prepare_run_folder(make_config(train={"resume": str(older), "learning_rate": 1.0}, log={"run_name": "changed"}))
    assert not (tmp_path / "save" / "changed").exists()

    (prepare_run_folder(make_config(log={"run_name": "foreign"})) / "metrics.jsonl").write_text("{}\n")
    with pytest.raises(InputError, match="belongs to another"):
        prepare_run_folder(make_config(train={"resume": str(older)}, log={"run_name": "foreign"}))


def test_a_branch_that_is_started_again_goes_on_with_itself(make_config, tmp_path):
    folder = run_with_checkpoints(make_config(), 1, 2)
    older = folder / "checkpoints" / "checkpoint-000001"
    config = make_config(train={"resume": str(older)}, log={"run_name": "branch"})
    branch = prepare_run_folder(config)
    (branch / "metrics.jsonl").write_text("killed before its first checkpoint\n")
    assert prepare_run_folder(config) == branch and resolve_resume(config, branch) == older
    assert (branch / "attempt-1" / "metrics.jsonl").exists()
    Checkpointer(branch / "checkpoints").save(2, {}, {"config": config.to_mapping()})
    assert prepare_run_folder(config) == branch
    assert resolve_resume(config, branch) == branch / "checkpoints" / "checkpoint-000002"


def test_a_run_with_a_made_up_name_goes_on_from_its_own_config(make_config):
    folder = run_with_checkpoints(make_config(log={"run_name": None}), 1)
    again = load_config(folder / "config.yaml")
    assert prepare_run_folder(again) == folder
    assert resolve_resume(again, folder) == folder / "checkpoints" / "checkpoint-000001"


def test_a_path_may_be_a_run_folder(make_config):
    folder = run_with_checkpoints(make_config(), 1, 2)
    for given in (folder, folder / "checkpoints"):
        branch = make_config(train={"resume": str(given)}, log={"run_name": "branch"})
        assert resolve_resume(branch, folder) == folder / "checkpoints" / "checkpoint-000002"


def test_bad_resume_paths(make_config, tmp_path):
    with pytest.raises(InputError, match="no such folder"):
        prepare_run_folder(make_config(train={"resume": str(tmp_path / "nowhere")}))
    with pytest.raises(InputError, match=r"manifest\.json is missing"):
        prepare_run_folder(make_config(train={"resume": str(tmp_path / "data")}))
    assert not (tmp_path / "save").exists()


def test_a_damaged_newest_checkpoint_is_an_error(make_config):
    folder = run_with_checkpoints(make_config(), 1, 2)
    (folder / "checkpoints" / "checkpoint-000002" / "model.json").unlink()
    with pytest.raises(InputError, match=r"model\.json is missing.*train\.resume=.*checkpoint-000001"):
        prepare_run_folder(make_config())


def test_a_run_folder_that_is_a_file_or_cannot_be_made(make_config, tmp_path):
    (tmp_path / "save").mkdir()
    (tmp_path / "save" / "run").write_text("")
    with pytest.raises(InputError, match="is a file"):
        prepare_run_folder(make_config())
    with pytest.raises(InputError, match=r"log\.save_dir"):
        prepare_run_folder(make_config(log={"save_dir": str(tmp_path / "save" / "run")}))


def test_secrets_are_not_written(make_config):
    rewards = [
        {
            "name": "r",
            "reward_model": "my_rewards.Judge",
            "params": {"api_key": "sk-12345", "headers": {"Authorization": "Bearer abc"}, "max_tokens": 7, "token": ""},
        }
    ]
    config = make_config(rewards=rewards)
    folder = run_with_checkpoints(config, 1)
    everything = b"".join(snapshot(folder).values())
    assert b"sk-12345" not in everything and b"Bearer" not in everything
    assert b"max_tokens: 7" in everything
    # A secret is no reason to refuse a resume, whether it is given again or changed.
    rewards[0]["params"]["api_key"] = "sk-67890"
    prepare_run_folder(make_config(rewards=rewards))


def test_a_second_process_is_kept_out(make_config, tmp_path):
    config = make_config()
    folder = prepare_run_folder(config)
    (folder / "metrics.jsonl").write_text("{}\n")
    code = (
        "import sys; from flow_factory.tracking.run_folder import prepare_run_folder\n"
        "from flow_factory.hparams import load_config; from flow_factory.errors import InputError\n"
        "try: prepare_run_folder(load_config(sys.argv[1]))\n"
        "except InputError as error: print(error)\n"
        "else: print('entered')"
    )
    command = [sys.executable, "-c", code, str(folder / "config.yaml")]

    def try_it() -> str:
        return subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ).stdout

    assert "another process is running" in try_it()
    assert (folder / "metrics.jsonl").exists()
    release_run_folder(folder)
    assert try_it() == "entered\n"


def test_a_report_that_looks_at_the_lock_keeps_no_run_out(tmp_path, monkeypatch):
    """`is_in_use` holds a shared lock for an instant."""
    (tmp_path / ".lock").touch()
    report = (tmp_path / ".lock").open("rb")
    fcntl.flock(report, fcntl.LOCK_SH)
    pauses = []

    def pause(seconds: float) -> None:
        pauses.append(seconds)
        if len(pauses) == 2:
            report.close()

    monkeypatch.setattr(run_folder.time, "sleep", pause)
    run_folder.lock_run_folder(tmp_path)
    assert len(pauses) == 2
    release_run_folder(tmp_path)
    with (tmp_path / ".lock").open("rb") as writer:
        fcntl.flock(writer, fcntl.LOCK_EX)
        with pytest.raises(InputError, match="another process is running"):
            run_folder.lock_run_folder(tmp_path)
    assert sum(pauses[2:]) == pytest.approx(0.5), "half a second is enough for any look"


def test_preparing_a_folder_needs_no_torch():
    code = (
        "import sys, flow_factory.tracking.run_folder, flow_factory.tracking.metrics; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
