"""Evaluations score as they go: the calls that rewards get, what is kept, and what is let go."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from flow_factory.hparams import RewardArguments
from flow_factory.rewards.abc import BaseRewardModel, GroupwiseRewardModel, PointwiseRewardModel
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample
from flow_factory.samples.measures import columns_by_name
from flow_factory.trainers.panels import PanelScorer, statistics_of
from tests.tracking.media import clip, video_sample
from tests.trainers.support import make_trainer


class Calls(PointwiseRewardModel):
    """Writes down which rows it is asked about, and answers with them."""

    required_fields = ("frames",)

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        self.calls = [*getattr(self, "calls", []), [sample.index for sample in samples]]
        return [float(sample.index) for sample in samples]


class Together(GroupwiseRewardModel):
    """The size of the group."""

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        return [float(len(samples))] * len(samples)


def reward(name: str, batch_size: int, kind: type[BaseRewardModel] = Calls, **more: Any) -> Any:
    return kind(RewardArguments(name=name, reward_model="x.Y", batch_size=batch_size, **more))


def videos(count: int) -> list[BaseSample]:
    samples = [video_sample(frames=clip(5, seed=index)) for index in range(count)]
    for index, sample in enumerate(samples):
        sample.index = sample.group_id = index
    return samples


def pass_through(scorer: PanelScorer, samples: list[BaseSample], batch: int) -> list[Any]:
    while samples:
        scorer.add(samples[:batch])
        del samples[:batch]
    return scorer.finish()


@pytest.mark.parametrize("batch", [1, 2, 5, 13])
def test_rewards_get_the_calls_that_they_would_get_for_all_samples(batch: int) -> None:
    models = [reward("a", 4), reward("b", 6)]
    processor = RewardProcessor(models=models)
    assert processor.window("toy") == 12
    scored = pass_through(PanelScorer(processor, "toy"), videos(13), batch)
    assert [one.rewards for one in scored] == [{"a": float(i), "b": float(i)} for i in range(13)]
    assert [len(call) for call in models[0].calls] == [4, 4, 4, 1] and [len(c) for c in models[1].calls] == [6, 6, 1]
    assert [i for call in models[0].calls for i in call] == list(range(13))
    everything = RewardProcessor(models=[reward("a", 4), reward("b", 6)])
    once = PanelScorer(everything, "toy")
    once.add(videos(13))
    assert columns_by_name(statistics_of(scored)) == columns_by_name(statistics_of(once.finish())) != {}


def test_only_a_window_of_media_is_held() -> None:
    """200 videos of 81 frames of 480 x 832 would be 19 GB."""
    held: list[int] = []
    alive: list[weakref.ref[Any]] = []
    scorer = PanelScorer(RewardProcessor(models=[reward("a", 2), reward("b", 4)]), "toy")
    for start in range(0, 24, 3):
        made = videos(3)
        for offset, sample in enumerate(made):
            sample.index = start + offset
            alive.append(weakref.ref(sample.video))  # type: ignore[attr-defined]
        scorer.add(made)
        del made, sample
        gc.collect()
        held.append(sum(reference() is not None for reference in alive))
    assert max(held) <= 3 and len(scorer.finish()) == 24
    gc.collect()
    assert not any(reference() is not None for reference in alive)


def test_groups_are_scored_when_they_are_complete() -> None:
    processor = RewardProcessor(models=[reward("a", 2), reward("pair", 1, Together)])
    assert processor.window("toy") is None
    samples = videos(6)
    for number, sample in enumerate(samples):
        sample.group_id = number % 3  # its second member comes a panel later
    scored = pass_through(PanelScorer(processor, "toy"), samples, 2)
    assert [one.rewards["pair"] for one in scored] == [2.0] * 6


def test_rewards_of_other_datasets_and_none_at_all_do_not_count() -> None:
    only = reward("a", 6, applicable_datasets=["other"])
    assert RewardProcessor(models=[only, reward("b", 4)]).window("toy") == 4
    assert RewardProcessor(models=[only]).window("toy") == 1 and RewardProcessor(models=[]).window("toy") == 1


def test_a_stopped_evaluation_scores_no_more(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flow_factory.trainers.drivers import CycleDropped

    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"eval.eval_freq": 1, "eval.per_device_batch_size": 1})
    seen: list[int] = []
    monkeypatch.setattr(trainer.evaluator.processor, "score", lambda samples: seen.append(len(samples)))
    asked = iter([False, False, True, True])
    with pytest.raises(CycleDropped):
        trainer.evaluator.run(0, 0, lambda: next(asked))
    assert seen == []  # two of three prompts, below the window of sixteen
    trainer._close()
