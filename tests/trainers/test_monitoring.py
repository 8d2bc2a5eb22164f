"""The monitor in a run: measured over complete groups, judged after the cycle, saved, and able to end the run."""

from __future__ import annotations

import json
import logging
import os
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.samples.measures import measure_samples
from flow_factory.samples.statistics import PICTURE_STATISTICS, group_diversity, picture_statistics, thumbnails
from flow_factory.tracking.metrics import read_metrics
from flow_factory.tracking.monitors import HackingMonitor
from flow_factory.trainers import monitoring
from flow_factory.trainers.abc import BaseTrainer
from flow_factory.trainers.monitoring import GroupTable, measure_dataset, measure_groups
from flow_factory.trainers.registry import _TRAINER_REGISTRY, get_trainer_class
from flow_factory.trainers.state import run_state
from tests.trainers.monitor_cases import SPLITS, WEIGHTS, make_cycle, measure
from tests.trainers.support import assert_same_tree, make_config, make_trainer

ROOT = Path(__file__).resolve().parents[2]
ALL = [*PICTURE_STATISTICS, "diversity", "diversity_relative"]


def test_a_table_has_a_row_per_group() -> None:
    samples = make_cycle()
    table = measure_groups(samples, Comm.single(), lambda _: WEIGHTS)
    assert list(table.statistics) == ALL
    # Sorted by dataset, then by group id: groups 4, 2, 0 of the first dataset and 3, 1 of the second.
    for row, group in enumerate([4, 2, 0, 3, 1]):
        members = samples[4 * group : 4 * group + 4]
        pictures = torch.stack([s.image for s in members])  # type: ignore[attr-defined]
        for column, name in enumerate(PICTURE_STATISTICS):
            expected = picture_statistics(pictures)[:, column].double().mean().item()
            assert table.statistics[name][row] == pytest.approx(expected, rel=1e-12)
        assert table.statistics["diversity"][row] == group_diversity(thumbnails(pictures))
        assert table.statistics["diversity_relative"][row] == group_diversity(thumbnails(pictures), "correlation")
        totals = [2 * s.rewards["match"] - 0.5 * s.rewards["calm"] for s in members if None not in s.rewards.values()]
        assert len(totals) == (3 if group in (1, 3) else 4)
        assert table.rewards[row] == pytest.approx(sum(totals) / len(totals), rel=1e-12)
    assert table.means()["monitor/brightness"] == pytest.approx(sum(table.statistics["brightness"]) / 5)


def test_videos_are_compared_frame_by_frame() -> None:
    """The same frames in another order are another video; what `eval` measures is the same."""
    from flow_factory.rewards.processor import RewardProcessor
    from flow_factory.rewards.smoke import make_sample
    from flow_factory.samples import T2VSample
    from flow_factory.trainers.benchmark import _picture_statistics
    from flow_factory.trainers.panels import PanelScorer

    frames = torch.arange(0, 250, 50, dtype=torch.uint8)[:, None, None, None].expand(5, 3, 16, 16)
    samples = [make_sample(T2VSample, frames[0], "p", "toy", member, {}) for member in range(2)]
    alike, other = frames, frames.flip(0)
    for second, moved in ((alike, False), (other, True)):
        samples[0].video, samples[1].video = frames, second  # type: ignore[attr-defined]
        table = measure_groups(samples, Comm.single()).statistics
        expected = ((frames - second.float()) / 255).square().mean().sqrt().item() if moved else 0.0
        assert table["diversity"] == pytest.approx([expected], abs=1e-6)
        assert table["diversity_relative"] == pytest.approx([2.0 if moved else 0.0], abs=1e-6)
        assert table["brightness"] == pytest.approx([frames.float().mean().item() / 255], abs=1e-6)
        scorer = PanelScorer(RewardProcessor(), "toy")
        scorer.add(samples)
        found = _picture_statistics(scorer.finish(), [thumbnails(s.frames).flatten() for s in samples])  # type: ignore[attr-defined]
        assert [s["picture/diversity"] for s in found] == [table["diversity"][0]] * 2


def test_videos_that_freeze_while_the_reward_rises_raise_an_alarm() -> None:
    """No single frame shows it."""
    from tests.tracking.media import sounding_sample

    monitor, messages, table = HackingMonitor(3.5), [], GroupTable({}, [])
    generator = torch.Generator().manual_seed(2)
    for cycle in range(12):
        samples = []
        for group in range(16):
            frames = torch.randint(90, 110, (9, 3, 8, 8), dtype=torch.uint8, generator=generator)
            frozen = frames[:1].expand_as(frames).contiguous()
            sample = sounding_sample(frames=frozen if cycle > 3 else frames)
            sample.group_id, sample.rewards = group, {"steady": 0.1 * cycle + 0.01 * group}
            samples.append(sample)
        table = measure_groups(samples, Comm.single(), lambda _: {"steady": 1.0})
        messages += [alarm.message for alarm in monitor.observe(table.statistics, table.rewards)]
    assert {"motion", "loudness"} <= table.statistics.keys()
    (message,) = messages
    assert message.startswith("motion") and "are they frozen" in message


def test_the_order_of_the_samples_does_not_matter() -> None:
    samples = make_cycle()
    expected = measure(samples, Comm.single())
    random.Random(0).shuffle(samples)
    assert measure(samples, Comm.single()) == expected


def test_a_group_without_scores_has_no_reward_and_no_rewards_no_table_of_them() -> None:
    samples = make_cycle()
    for sample in samples[:4]:
        sample.rewards["match"] = None
    assert len(measure_groups(samples, Comm.single(), lambda _: WEIGHTS).rewards) == 4
    assert measure_groups(samples, Comm.single()).rewards == []


def test_single_members_have_no_diversity_and_no_pictures_nothing() -> None:
    samples = make_cycle()
    assert list(measure_groups(samples[::4], Comm.single()).statistics) == list(PICTURE_STATISTICS)
    for sample in samples:
        sample.image = None  # type: ignore[attr-defined]
    assert measure_groups(samples, Comm.single(), lambda _: WEIGHTS) == GroupTable({}, [])
    assert measure_dataset("toy", measure_samples(samples), Comm.single()) == {}


def test_two_processes_measure_what_one_does_to_the_last_bit(tmp_path: Path) -> None:
    """Also where groups are divided between them, and where one of them has nothing."""
    procs = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.trainers.monitor_cases", str(rank), str(tmp_path)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        for rank in range(2)
    ]
    try:
        assert [proc.wait(timeout=120) for proc in procs] == [0, 0]
    finally:
        for proc in procs:
            if proc.poll() is None:
                proc.kill()
    expected = measure(make_cycle(), Comm.single())
    for rank in range(2):
        results = json.loads((tmp_path / f"measured-{rank}.json").read_text())
        assert {split: results[split] == expected for split in SPLITS} == dict.fromkeys(SPLITS, True)


# ------------------------------------------------------------------------------------------------------ runs


def rows(folder: Path, kind: str) -> list[dict[str, Any]]:
    return read_metrics(folder / "save" / "run", kind)


def test_cycles_and_evaluations_are_measured(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    make_trainer(tiny_sd3_dir, tmp_path, {"eval.eval_freq": 2}).start()
    cycles = rows(tmp_path, "cycle")
    assert len(cycles) == 2
    for row in cycles:
        assert {f"monitor/{name}" for name in ALL} <= row.keys() and row["seconds/monitor"] > 0
        assert 0 < row["monitor/brightness"] < 1 and row["monitor/diversity"] > 0
        # The training reward of this run is the mean of the red channel, hence the brightness's own neighbour.
        assert abs(row["monitor/brightness"] - row["reward/red/mean"]) < 0.5
    bands, refined = rows(tmp_path, "monitor_band")  # four prompts a cycle: the second helps to know their spread
    assert (bands["cycle"], refined["cycle"]) == (1, 2)
    middles = [(row["monitor/contrast/low"] + row["monitor/contrast/high"]) / 2 for row in (bands, refined)]
    assert middles == pytest.approx([cycles[0]["monitor/contrast"]] * 2)
    assert bands["monitor/brightness/low"] < cycles[0]["monitor/brightness"] < bands["monitor/brightness/high"]
    evaluations = rows(tmp_path, "eval_monitor")
    assert [row["cycle"] for row in evaluations] == [0, 2]
    for row in evaluations:
        names = {name for name in row if "/" in name}
        assert names == {f"toy/monitor/{name}" for name in PICTURE_STATISTICS}
    assert not any("monitor" in name for row in rows(tmp_path, "eval") for name in row)


def test_a_decoupled_trainer_is_measured_too(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    make_trainer(tiny_sd3_dir, tmp_path, {"train.trainer_type": "nft", "train.max_epochs": 1}).start()
    (row,) = rows(tmp_path, "cycle")
    assert {f"monitor/{name}" for name in ALL} <= row.keys()


@pytest.mark.parametrize("key", _TRAINER_REGISTRY.keys())
def test_no_trainer_leaves_the_cycle_in_which_it_is_measured(key: str) -> None:
    assert get_trainer_class(key)._run_training_step is BaseTrainer._run_training_step


def test_the_monitor_can_be_switched_off_and_on_again(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"log.monitor": False, "eval.eval_freq": 2, "train.max_epochs": 1})
    trainer.start()
    assert not any("monitor" in name for row in rows(tmp_path, "cycle") for name in row)
    assert not rows(tmp_path, "monitor_band") and not rows(tmp_path, "eval_monitor")
    assert run_state(trainer)["trainer"]["monitor"] is None
    again = make_trainer(tiny_sd3_dir, tmp_path, {"eval.eval_freq": 2})
    again.start()
    (bands,) = rows(tmp_path, "monitor_band")
    assert bands["cycle"] == 2, "the first cycle that is measured defines the bands"


def _darkening(monkeypatch: pytest.MonkeyPatch) -> None:
    """From the third measured cycle on, the reward is up and the pictures are dark."""
    real = monitoring.measure_groups

    def measured(samples: Any, comm: Comm, weights_of: Any = None) -> GroupTable:
        table = real(samples, comm, weights_of)
        if samples[0].key.cycle < 2:
            return table
        dark = dict(table.statistics, brightness=[-9.0] * len(table.statistics["brightness"]))
        return replace(table, statistics=dark, rewards=[reward + 9 for reward in table.rewards])

    monkeypatch.setattr(monitoring, "measure_groups", measured)


def test_an_alarm_is_logged_once(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _darkening(monkeypatch)
    with caplog.at_level(logging.WARNING, logger="flow_factory"):
        make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 5}).start()
    (alarm,) = rows(tmp_path, "alarm")
    assert (alarm["statistic"], alarm["cycle"]) == ("brightness", 3)
    assert alarm["value"] < alarm["low"] < alarm["first"] and alarm["reward"] > alarm["reward_first"]
    (warning,) = [r.getMessage() for r in caplog.records if "possible reward hacking" in r.getMessage()]
    assert alarm["message"] in warning and "brightness" in warning


def test_monitor_stop_saves_and_the_run_can_go_on_as_if_never_stopped(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _darkening(monkeypatch)
    five = {"train.max_epochs": 5, "log.save_freq": 2}
    (tmp_path / "whole").mkdir()
    whole = make_trainer(tiny_sd3_dir, tmp_path / "whole", five)
    whole.start()
    stopping = {**five, "log.monitor_stop": True}
    (tmp_path / "stopped").mkdir()
    stopped = make_trainer(tiny_sd3_dir, tmp_path / "stopped", stopping)
    with pytest.raises(RunError, match=r"after cycle 3 by log\.monitor_stop.*checkpoint-000003") as error:
        stopped.start()
    assert error.value.exit_code == 1
    again = make_trainer(tiny_sd3_dir, tmp_path / "stopped", stopping)
    assert again.start().counts["cycles"] == 2
    assert_same_tree(run_state(again), run_state(whole))
    assert [r["cycle"] for r in rows(tmp_path / "stopped", "cycle")] == [1, 2, 3, 4, 5]
    assert len(rows(tmp_path / "stopped", "alarm")) == 1


def test_an_alarm_in_the_last_cycle_ends_a_run_that_is_finished(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _darkening(monkeypatch)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 3, "log.monitor_stop": True})
    assert trainer.start().counts["cycles"] == 3
    assert len(rows(tmp_path, "alarm")) == 1


def test_one_prompt_per_cycle_is_said(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    _darkening(monkeypatch)
    one = {"train.unique_sample_num_per_epoch": 1, "train.group_size": 4, "train.max_epochs": 4}
    with caplog.at_level(logging.WARNING, logger="flow_factory"):
        make_trainer(tiny_sd3_dir, tmp_path, one).start()
    said = [r.getMessage() for r in caplog.records if "unique_sample_num_per_epoch" in r.getMessage()]
    assert len(said) == 1 and not rows(tmp_path, "alarm") and not rows(tmp_path, "monitor_band")
    assert all("monitor/brightness" in row for row in rows(tmp_path, "cycle"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"log.monitor": False, "log.monitor_stop": True}, r"log\.monitor_stop"),
        ({"log.monitor_band": 0}, r"log\.monitor_band"),
        ({"log.monitor_band": 60}, r"log\.monitor_band"),
    ],
)
def test_settings_that_mean_nothing_are_refused(
    tiny_sd3_dir: Path, tmp_path: Path, changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(InputError, match=message):
        make_config(tiny_sd3_dir, tmp_path, changes)
