"""A resumed run equals the uninterrupted one, bit for bit: weights, EMA, optimizer, counters, every metric but time."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError, Interrupted
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.state import run_state
from tests.trainers.support import assert_same_tree, make_trainer, weights

FOUR = {
    "train.max_epochs": 4,
    "train.kl_beta": 0.01,
    "train.reference": "start",
    "log.save_freq": 2,
    "eval.eval_freq": 2,
}


def metrics(folder: Path) -> list[dict[str, Any]]:
    """All metric rows without wall-clock."""
    rows = map(json.loads, (folder / "save" / "run" / "metrics.jsonl").read_text().splitlines())
    return [
        {k: v for k, v in row.items() if not k.startswith(("time", "seconds", "images_per_second"))} for row in rows
    ]


def run(pipeline: Path, folder: Path, changes: dict[str, Any]) -> BaseTrainer:
    trainer = make_trainer(pipeline, folder, changes)
    trainer.start()
    return trainer


@pytest.fixture(scope="module")
def uninterrupted(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Any, list[dict[str, Any]]]:
    folder = tmp_path_factory.mktemp("four")
    trainer = run(tiny_sd3_dir, folder, FOUR)
    return run_state(trainer), metrics(folder)


def assert_equals(trainer: BaseTrainer, folder: Path, expected: tuple[Any, list[dict[str, Any]]]) -> None:
    assert_same_tree(run_state(trainer), expected[0])
    assert metrics(folder) == expected[1]


def test_two_and_two_cycles_equal_four(tiny_sd3_dir: Path, tmp_path: Path, uninterrupted: Any) -> None:
    """Pitfall 22."""
    run(tiny_sd3_dir, tmp_path, {**FOUR, "train.max_epochs": 2})
    trainer = make_trainer(tiny_sd3_dir, tmp_path, FOUR)
    result = trainer.start()
    assert result.counts["cycles"] == 2, "the second run must go on, not start over"
    assert_equals(trainer, tmp_path, uninterrupted)


def test_branch_off_from_an_earlier_checkpoint(tiny_sd3_dir: Path, tmp_path: Path, uninterrupted: Any) -> None:
    """By path into a new run: cycles 3 and 4 again; into the same run it would mix with what is there."""
    run(tiny_sd3_dir, tmp_path, FOUR)
    checkpoint = sorted((tmp_path / "save/run/checkpoints").glob("checkpoint-*"))[0]
    again = {**FOUR, "train.resume": str(checkpoint)}
    with pytest.raises(InputError, match="is not the newest checkpoint"):
        make_trainer(tiny_sd3_dir, tmp_path, again)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {**again, "log.run_name": "branch"})
    assert trainer.start().counts["cycles"] == 2
    assert_same_tree(run_state(trainer), uninterrupted[0])


def _interrupt_at(owner: Any, method: str, call: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Raises SIGTERM at the start of the given call of a method."""
    original: Callable[..., Any] = getattr(owner, method)
    calls = {"n": 0}

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        calls["n"] += 1
        if calls["n"] == call:
            signal.raise_signal(signal.SIGTERM)
        return original(*args, **kwargs)

    monkeypatch.setattr(owner, method, wrapped)


# (attribute of the trainer that owns the method, method, call number, cycles done when the state is saved)
PHASES = {
    "first rollout": ("adapter", "inference", 3, 0),
    "rollout": ("adapter", "inference", 4, 1),
    "scoring": ("reward_buffer", "finalize", 2, 1),
    "measuring": ("watch", "measure", 2, 1),
    "optimisation": ("adapter", "forward", 7, 1),
    "evaluation": ("evaluator", "run", 2, 2),
    "checkpoint": ("checkpointer", "save", 1, 2),
}


@pytest.mark.parametrize("phase", PHASES)
def test_sigterm_in_each_phase(
    tiny_sd3_dir: Path, tmp_path: Path, uninterrupted: Any, phase: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall 43: the signal ends the run with 128 + 15, and going on equals never having stopped."""
    owner, method, call, cycles = PHASES[phase]
    trainer = make_trainer(tiny_sd3_dir, tmp_path, FOUR)
    _interrupt_at(getattr(trainer, owner), method, call, monkeypatch)
    with pytest.raises(Interrupted) as stopped:
        trainer.start()
    assert stopped.value.exit_code == 128 + signal.SIGTERM
    assert trainer.epoch == cycles
    assert "Run the same command again" in str(stopped.value)
    monkeypatch.undo()
    again = make_trainer(tiny_sd3_dir, tmp_path, FOUR)
    again.start()
    assert_equals(again, tmp_path, uninterrupted)


def test_deadline_leaves_the_newest_checkpoint(
    tiny_sd3_dir: Path, tmp_path: Path, uninterrupted: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An optimisation phase that outlives `signal_deadline_s` is lost; the checkpoint before it is what resumes."""
    changes = {**FOUR, "log.save_freq": 1, "train.signal_deadline_s": 0.0}
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    _interrupt_at(trainer.adapter, "forward", 12, monkeypatch)
    with pytest.raises(Interrupted, match="did not finish within"):
        trainer.start()
    assert trainer.epoch == 1
    assert trainer.result.checkpoint is not None and trainer.result.checkpoint.name.endswith("000001")
    monkeypatch.undo()
    again = make_trainer(tiny_sd3_dir, tmp_path, FOUR)
    again.start()
    assert_equals(again, tmp_path, uninterrupted)


def test_resume_into_a_changed_config_names_the_keys(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    run(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1})
    before = sorted(p.name for p in (tmp_path / "save/run").rglob("*"))
    with pytest.raises(InputError, match=r"train\.learning_rate.*0\.001.*0\.002"):
        make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2, "train.learning_rate": 2e-3})
    assert sorted(p.name for p in (tmp_path / "save/run").rglob("*")) == before


def test_never_into_an_existing_run_is_refused(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    run(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1})
    with pytest.raises(InputError, match="run_name"):
        make_trainer(tiny_sd3_dir, tmp_path, {"train.resume": "never"})


def test_corrupted_checkpoint_names_the_file(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 23, 26: a damaged newest checkpoint is said, not skipped and not loaded."""
    trainer = run(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1})
    assert trainer.result.checkpoint is not None
    victim = next(p for p in sorted(trainer.result.checkpoint.rglob("*.safetensors")) if p.stat().st_size > 200)
    data = bytearray(victim.read_bytes())
    data[-1] ^= 1
    victim.write_bytes(bytes(data))
    with pytest.raises(InputError, match=victim.name):
        make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2}).start()


def test_a_decaying_learning_rate_fixes_the_end(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Another end is another schedule: going on would be neither the old run nor the new one."""
    cosine = {"train.lr_scheduler": "cosine", "train.max_epochs": 1}
    run(tiny_sd3_dir, tmp_path, cosine)
    with pytest.raises(InputError, match=r"train\.max_epochs"):
        make_trainer(tiny_sd3_dir, tmp_path, {**cosine, "train.max_epochs": 2})


def test_weights_alone_are_no_state_to_resume_from(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = run(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1, "log.save_model_only": True})
    assert trainer.result.checkpoint is not None
    assert not list(trainer.result.checkpoint.glob("optimizer*"))
    assert (trainer.result.checkpoint / "lora" / "pytorch_lora_weights.safetensors").exists()
    with pytest.raises(InputError, match=r"save_model_only.*model\.resume_path"):
        make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2}).start()
    again = {"log.run_name": "second", "model.resume_path": str(trainer.result.checkpoint / "lora")}
    second = make_trainer(tiny_sd3_dir, tmp_path, {**again, "train.max_epochs": 1})
    start, end = weights(second), weights(trainer)
    assert all(torch.equal(start[name], end[name]) for name in end)  # alpha / rank is 2: folding is exact


def test_a_hanging_reward_is_left_by_the_first_signal(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 43: nothing is waited for, and the state at the cycle's start is saved."""
    rewards = [{"name": "hangs", "reward_model": "tests.trainers.rewards.Hangs"}]
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"rewards": rewards})
    # The reward itself sets the timer once it waits; SIGALRM stands for the person who loses patience.
    former = signal.signal(signal.SIGALRM, lambda *_: signal.raise_signal(signal.SIGTERM))
    try:
        with pytest.raises(Interrupted) as stopped:
            trainer.start()
    finally:
        signal.signal(signal.SIGALRM, former)
    assert stopped.value.exit_code == 143 and trainer.epoch == 0
    assert trainer.result.checkpoint is not None and trainer.result.checkpoint.name.endswith("000000")


def test_sigkill_during_a_save(tiny_sd3_dir: Path, tmp_path: Path, uninterrupted: Any) -> None:
    """Pitfall 26: the checkpoint before it is whole, and going on from there equals never having been killed."""
    command = [sys.executable, "-m", "tests.trainers.killed_save", str(tiny_sd3_dir), str(tmp_path), json.dumps(FOUR)]
    root = Path(__file__).resolve().parents[2]
    killed = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=240)
    assert killed.returncode == -signal.SIGKILL, killed.stdout + killed.stderr
    folder = tmp_path / "save" / "run" / "checkpoints"
    assert [p.name for p in folder.glob("checkpoint-*")] == ["checkpoint-000002"]
    trainer = make_trainer(tiny_sd3_dir, tmp_path, FOUR)
    assert trainer.start().counts["cycles"] == 2
    assert_equals(trainer, tmp_path, uninterrupted)
