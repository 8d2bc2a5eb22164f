"""Runs on stored examples that ended early go on as if they had not: after a signal, and after a bad picture."""

from __future__ import annotations

import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from flow_factory.errors import InputError, Interrupted
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.state import run_state
from tests.trainers.offline_support import KINDS, make_dataset, offline_trainer, trainer_for
from tests.trainers.support import assert_same_tree
from tests.trainers.test_resume import metrics


@pytest.mark.parametrize("key", KINDS)
def test_resume_inside_an_epoch_is_exact(tiny_sd3_dir: Path, tmp_path: Path, key: str) -> None:
    """Pitfall 22: the exact batch, bit for bit; mixed sizes, EMA and several times included."""
    changes: dict[str, Any] = {
        "train__image_sizing": "buckets", "train__num_train_timesteps": 2, "train__reference": "start",
        "train__lr_scheduler": "cosine", "train__lr_warmup_steps": 2,
        "train__signal_deadline_s": 3600.0,  # however slow the machine is
    }  # fmt: skip
    data = make_dataset(tmp_path / "data", KINDS[key], 16, ((32, 32), (32, 64)))
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    whole = offline_trainer(tiny_sd3_dir, tmp_path / "whole", data, key, dotted)
    whole.start()
    first = offline_trainer(tiny_sd3_dir, tmp_path / "parts", data, key, dotted)
    # The third of eight in the second epoch; its window of two is finished.
    _before_batch(first, 11, lambda: signal.raise_signal(signal.SIGINT))
    with pytest.raises(Interrupted, match="the epoch was left before batch 4"):
        first.start()
    assert 0 < first.step < whole.step and first.driver.next_batch > 0  # type: ignore[attr-defined]
    second = offline_trainer(tiny_sd3_dir, tmp_path / "parts", data, key, dotted)
    made: list[int] = []
    original = second.optimize_batch

    def counted(batch: Any) -> None:
        made.append(len(batch))
        original(batch)

    second.optimize_batch = counted  # type: ignore[method-assign]
    second.start()
    assert len(made) == 16 - 12, "batches that were trained on are not made again"
    assert_same_tree(run_state(second), run_state(whole))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")


def _before_batch(trainer: BaseTrainer, number: int, act: Callable[[], Any]) -> None:
    """Calls `act` before the trainer's batch of that number, from 1."""
    original, seen = trainer.optimize_batch, [0]

    def acting(batch: Any) -> None:
        seen[0] += 1
        if seen[0] == number:
            act()
        original(batch)

    trainer.optimize_batch = acting  # type: ignore[method-assign]


def test_a_failing_batch_leaves_the_epoch(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = trainer_for(tiny_sd3_dir, tmp_path)
    (tmp_path / "data" / "images" / "5-0.png").write_bytes(b"broken")  # after the checks
    before = trainer.progress
    with pytest.raises(InputError, match=rf"{tmp_path}/data/train\.jsonl:6: .*5-0\.png is no picture"):
        trainer.start()
    assert trainer.progress == before and trainer.progress.data_epoch == 0


def test_a_run_goes_on_once_the_picture_that_ended_it_is_repaired(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The epoch that it broke is trained again from its start, and the one before is not."""
    data = make_dataset(tmp_path / "data")
    changes = {"log.save_freq": 1}
    whole = offline_trainer(tiny_sd3_dir, tmp_path / "whole", data, "sft", changes)
    whole.start()
    picture = data / "images" / "5-0.png"
    kept = picture.read_bytes()
    first = offline_trainer(tiny_sd3_dir, tmp_path / "parts", data, "sft", changes)
    _before_batch(first, 4, lambda: picture.write_bytes(kept[:50]))  # the last of the first epoch
    with pytest.raises(InputError, match=r"train\.jsonl:6: "):
        first.start()
    assert first.progress.data_epoch == 1
    with pytest.raises(InputError, match=r"media of data/default/train\.jsonl, lines 1 to 8 has another content"):
        offline_trainer(tiny_sd3_dir, tmp_path / "parts", data, "sft", changes).start()
    picture.write_bytes(kept)
    second = offline_trainer(tiny_sd3_dir, tmp_path / "parts", data, "sft", changes)
    second.start()
    assert_same_tree(run_state(second), run_state(whole))
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
