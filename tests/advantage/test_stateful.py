"""Estimators with a memory: what they remember, and that a dropped or repeated cycle leaves no trace in it."""

from __future__ import annotations

import json
import statistics

import pytest
import torch

from flow_factory.advantage import AdvantageProcessor
from flow_factory.advantage.stateful import MovingAverageBaseline, PerPromptStatistics
from flow_factory.errors import InputError
from tests.advantage.cases import WEIGHTS, make_cycle
from tests.advantage.test_estimators import table

CYCLES = [[0.1, 0.5, 0.9, 0.2], [0.3, 0.3, 0.8, 0.6], [1.0, 0.0, 0.4, 0.7]]


def test_the_baseline_is_that_of_earlier_cycles():
    estimator = MovingAverageBaseline(decay=0.75)
    baseline = None
    for rewards in CYCLES:
        got = estimator(*table(rewards, [1, 1, 2, 2])).tolist()
        mean = statistics.fmean(rewards)
        baseline = mean if baseline is None else baseline
        assert got == pytest.approx([r - baseline for r in rewards], rel=1e-12, abs=1e-15)
        baseline = 0.75 * baseline + 0.25 * mean


def test_each_dataset_has_its_own_baseline_and_failures_are_in_none():
    estimator = MovingAverageBaseline()
    estimator(*table([1.0, 3.0, 10.0, 99.0], [1, 1, 2, 2], [0, 0, 1, 1], mask=[[True], [True], [True], [False]]))
    assert estimator.state_dict() == {"baselines": {"0": 2.0, "1": 10.0}}


def test_per_prompt_statistics_take_over_once_there_are_enough():
    estimator = PerPromptStatistics(buffer_size=5, min_count=4)
    seen: dict[int, list[float]] = {1: [], 2: []}
    for number, rewards in enumerate(CYCLES):
        got = estimator(*table(rewards, [1, 1, 2, 2])).tolist()
        expected = []
        for group, values in ((1, rewards[:2]), (2, rewards[2:])):
            seen[group] = (seen[group] + values)[-5:]
            known = seen[group] if number >= 1 else rewards  # two rewards are too few: those of everybody
            expected += [(r - statistics.fmean(known)) / statistics.pstdev(known) for r in values]
        assert got == pytest.approx(expected, rel=1e-12)


@pytest.mark.parametrize("kind", [MovingAverageBaseline, PerPromptStatistics])
def test_a_memory_survives_json_to_the_last_bit(kind):
    estimator, again = kind(), kind()
    estimator(*table(CYCLES[0], [1, 1, 2, 2]))
    again.load_state_dict(json.loads(json.dumps(estimator.state_dict())))
    arguments = table(CYCLES[1], [1, 1, 2, 2])
    assert torch.equal(estimator(*arguments), again(*arguments))
    assert estimator.state_dict() == again.state_dict()


@pytest.mark.parametrize(("name", "params"), [("reinforce", {}), ("per_prompt", {"min_count": 5})])
def test_a_cycle_moves_the_memory_once(name, params):
    """A dropped cycle is saved as if it had not begun; one that is computed again does not count twice."""
    processor = AdvantageProcessor(name, params=params)
    other = make_cycle()
    for sample in other:
        sample.rewards["match"] = sample.rewards["match"] ** 2 + 0.1
    first = processor.compute(make_cycle(), None, WEIGHTS, cycle=0)
    assert not any(processor.state_dict(cycle=0).popitem()[1].values()), "an unfinished cycle must not be remembered"
    after = processor.state_dict(cycle=1)
    assert torch.equal(processor.compute(make_cycle(), None, WEIGHTS, cycle=0), first)
    assert processor.state_dict(cycle=1) == after
    second = processor.compute(other, None, WEIGHTS, cycle=1)
    fresh = AdvantageProcessor(name, params=params).compute(other, None, WEIGHTS, cycle=1)
    assert not torch.equal(second, fresh), "the memory makes no difference"
    resumed = AdvantageProcessor(name, params=params)
    resumed.load_state_dict(after)
    assert torch.equal(resumed.compute(other, None, WEIGHTS, cycle=1), second)


def test_the_memory_of_another_estimator_is_refused():
    with pytest.raises(InputError, match=r"no memory of the advantage estimator 'per_prompt'.*advantage_aggregation"):
        AdvantageProcessor("per_prompt").load_state_dict({"baselines": {}})
    assert AdvantageProcessor("sum").state_dict(cycle=0) == {}


def test_params_are_checked_like_fields():
    with pytest.raises(InputError, match=r"train\.advantage_params\.min_cuont \(run\.yaml:7\).*min_count"):
        AdvantageProcessor("per_prompt", params={"min_cuont": 3}, place="run.yaml:7")
    with pytest.raises(InputError, match=r"train\.advantage_params\.decay.*1\.5.*less than 1"):
        AdvantageProcessor("reinforce", params={"decay": 1.5})
    with pytest.raises(InputError, match=r"train\.advantage_params\.global_std.*3"):
        AdvantageProcessor("sum", params={"global_std": 3})
    assert AdvantageProcessor("sum", global_std=False).estimator.keywords == {"global_std": False}  # type: ignore[attr-defined]
    given = AdvantageProcessor("sum", global_std=False, params={"global_std": True})
    assert given.estimator.keywords == {"global_std": True}  # type: ignore[attr-defined]
    with pytest.raises(InputError, match=r"takes 1 positional arguments; it is called with \(rewards, groups\)"):
        AdvantageProcessor(lambda rewards: rewards)  # type: ignore[arg-type]
