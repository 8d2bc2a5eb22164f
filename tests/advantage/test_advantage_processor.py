"""From samples to advantages in one process: masks, weights, failures, groups, metrics."""

from __future__ import annotations

import math
import re
import statistics

import pytest
import torch

from flow_factory.advantage import AdvantageProcessor
from flow_factory.advantage.estimators import sum_advantages
from flow_factory.advantage.table import signed64
from flow_factory.errors import InputError, RunError
from tests.advantage.cases import WEIGHTS, make_cycle, make_sample


def samples_with(*rewards: dict, groups: list[int] | None = None) -> list:
    samples = []
    for i, row in enumerate(rewards):
        sample = make_sample(groups[i] if groups else 1, i)
        sample.rewards = row
        samples.append(sample)
    return samples


def processor(**fields) -> AdvantageProcessor:
    return AdvantageProcessor(fields.pop("aggregation", "sum"), **{"global_std": False, **fields})


def test_advantages_by_hand():
    samples = samples_with({"a": 0.0, "b": 4.0}, {"a": 1.0, "b": 2.0}, {"a": 5.0, "b": 3.0})
    got = processor().compute(samples, None, {"a": 2.0, "b": 0.5})
    totals = [2.0, 3.0, 11.5]
    mean, std = statistics.fmean(totals), statistics.pstdev(totals)
    assert got.dtype == torch.float64
    assert got.tolist() == pytest.approx([(t - mean) / std for t in totals])


def test_the_three_ways_to_pass_rewards_agree():
    samples = make_cycle()
    stored = processor().compute(samples, None, WEIGHTS)
    listed = processor().compute(samples, [dict(s.rewards) for s in samples], WEIGHTS)
    # A column has NaN where the reward failed or does not apply, as RewardBuffer.finalize returns it.
    columns = {}
    for name in ("match", "bright", "ocr"):
        scores = [s.rewards.get(name) for s in samples]
        columns[name] = torch.tensor([math.nan if v is None else v for v in scores], dtype=torch.float64)
    by_column = processor().compute(samples, columns, WEIGHTS)
    assert torch.equal(stored, listed) and torch.equal(stored, by_column)
    function = processor().compute(
        samples, None, lambda s: {n: w[s.source] if isinstance(w, dict) else w for n, w in WEIGHTS.items()}
    )
    assert torch.equal(stored, function)


def test_order_of_samples_does_not_change_a_bit():
    samples = make_cycle()
    for aggregation in ("sum", "gdpo"):
        straight = processor(aggregation=aggregation).compute(samples, None, WEIGHTS)
        order = torch.randperm(len(samples), generator=torch.Generator().manual_seed(3)).tolist()
        mixed = processor(aggregation=aggregation).compute([samples[i] for i in order], None, WEIGHTS)
        assert mixed.tolist() == [straight[i].item() for i in order]


def test_weights_per_source():
    """The "numbers" samples weigh `bright` by 0.25, the "shapes" samples by 0.5."""
    samples = make_cycle()
    numbers = [s for s in samples if s.source == "numbers"]
    got = processor(global_std=True).compute(samples, None, WEIGHTS)
    totals = {
        id(s): s.rewards["match"] + 0.25 * s.rewards["bright"] + 2 * s.rewards["ocr"]
        for s in numbers
        if s.rewards["ocr"] is not None
    }
    std = statistics.pstdev(totals.values())
    for i, sample in enumerate(samples):
        if sample.source == "numbers" and sample.rewards["ocr"] is not None:
            group = [totals[id(s)] for s in numbers if s.group_id == sample.group_id and id(s) in totals]
            assert got[i].item() == pytest.approx((totals[id(sample)] - statistics.fmean(group)) / std, rel=1e-10)


def test_a_failed_reward_is_not_a_zero():
    """Pitfalls 29 and 30: the sample is left out; its group's statistics are those of the others."""
    good = samples_with({"a": 0.2, "b": 1.0}, {"a": 0.8, "b": 1.0}, {"a": 0.5, "b": 3.0})
    broken = make_sample(1, 9)
    broken.rewards = {"a": 0.9, "b": None}
    p = processor(group_size=4)
    got = p.compute([*good, broken], None, {"a": 1.0, "b": 1.0})
    alone = processor().compute(good, None, {"a": 1.0, "b": 1.0})
    assert got.tolist() == [*alone.tolist(), 0.0]
    metrics = p.pop_advantage_metrics()
    assert metrics["reward/failed_ratio"] == 0.25
    # What was scored is reported: four values of a, three of b, three totals.
    assert metrics["reward/a/mean"] == pytest.approx(statistics.fmean([0.2, 0.8, 0.5, 0.9]))
    assert metrics["reward/b/mean"] == pytest.approx(5 / 3)
    assert metrics["reward/total/mean"] == pytest.approx(statistics.fmean([1.2, 1.8, 3.5]))


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf, 1e308, -1e200])
def test_rewards_that_are_no_numbers_to_average_stop_the_run(value):
    """Pitfall 30: a NaN must not poison a group in silence."""
    samples = samples_with({"a": 0.2}, {"a": value})
    with pytest.raises(RunError, match=rf"reward 'a' is {re.escape(str(value))} for prompt 'prompt 1' \(member 1\)"):
        processor().compute(samples, None, {"a": 1.0})
    with pytest.raises(RunError, match="reward 'a' is"):
        processor().compute(samples, {"a": torch.tensor([0.2, value])}, {"a": 1.0})


def test_incomplete_groups_are_errors_unless_allowed():
    samples = samples_with({"a": 0.0}, {"a": 1.0}, {"a": 2.0}, groups=[1, 1, 2])
    with pytest.raises(RunError, match=r"group 2 of dataset 'shapes' has 1 samples .* train.group_size is 2"):
        processor(group_size=2).compute(samples, None, {"a": 1.0})
    assert processor().compute(samples, None, {"a": 1.0}).tolist() == [-1.0, 1.0, 0.0]


def test_same_prompt_in_two_datasets():
    """Pitfall 13: even with one group id, two sources are two groups."""
    samples = [make_sample(7, m, source) for source in ("shapes", "numbers") for m in range(2)]
    for sample, reward in zip(samples, (0.0, 1.0, 10.0, 30.0), strict=True):
        sample.rewards = {"a": reward}
    got = processor(group_size=2).compute(samples, None, {"a": 1.0})
    assert got.tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_unsigned_ids_keep_their_64_bits():
    """Pitfall 12."""
    assert signed64(2**64 - 1) == -1 and signed64(2**63) == -(2**63) and signed64(2**63 - 1) == 2**63 - 1
    samples = [make_sample(2**64 - 1 - g, m) for g in range(2) for m in range(2)]
    for sample, reward in zip(samples, (0.0, 1.0, 10.0, 30.0), strict=True):
        sample.rewards = {"a": reward}
    assert processor(group_size=2).compute(samples, None, {"a": 1.0}).tolist() == [-1.0, 1.0, -1.0, 1.0]


def test_metrics_by_hand():
    samples = samples_with({"a": 0.0}, {"a": 2.0}, {"a": 3.0}, {"a": 3.0}, groups=[1, 1, 2, 2])
    p = processor(global_std=True)
    p.compute(samples, None, {"a": 10.0})
    metrics = p.pop_advantage_metrics()
    assert metrics == {
        "reward/a/mean": 2.0,
        "reward/a/std": pytest.approx(statistics.pstdev([0, 2, 3, 3])),
        "reward/total/mean": 20.0,
        "reward/total/std": pytest.approx(10 * statistics.pstdev([0, 2, 3, 3])),
        "reward/group_std": 5.0,
        "reward/zero_std_ratio": 0.5,
        "reward/failed_ratio": 0.0,
        "advantage/abs_mean": pytest.approx(10 / statistics.pstdev([0, 20, 30, 30]) / 2),
    }
    assert p.pop_advantage_metrics() == {}


def test_metrics_per_source_where_there_are_several():
    samples = make_cycle()
    p = processor()
    p.compute(samples, None, WEIGHTS)
    metrics = p.pop_advantage_metrics()
    ocr = [s.rewards["ocr"] for s in samples if s.rewards.get("ocr") is not None]
    assert metrics["numbers/reward/ocr/mean"] == pytest.approx(statistics.fmean(ocr))
    assert metrics["reward/ocr/mean"] == pytest.approx(statistics.fmean(ocr))
    assert "shapes/reward/ocr/mean" not in metrics
    assert metrics["shapes/reward/zero_std_ratio"] == pytest.approx(1 / 3)
    assert metrics["numbers/reward/failed_ratio"] == pytest.approx(1 / 12)


def test_a_callable_replaces_the_estimator():
    def ranks(rewards, groups):
        return (rewards > rewards.mean()).float() * 2 - 1

    samples = samples_with({"a": 0.0}, {"a": 1.0})
    assert processor(aggregation=ranks).compute(samples, None, {"a": 1.0}).tolist() == [-1.0, 1.0]
    dotted = processor(aggregation="flow_factory.advantage.estimators.sum_advantages")
    assert dotted.estimator.func is sum_advantages and dotted.estimator.keywords == {"global_std": False}


@pytest.mark.parametrize("result", [torch.zeros(3), torch.zeros(2, 1), torch.tensor([0.0, math.nan])])
def test_wrong_results_of_an_estimator_are_named(result):
    def broken(rewards, groups):
        return result

    where = r"'broken', .*broken \(.*test_advantage_processor.py:\d+\),"
    with pytest.raises(RunError, match=rf"advantage estimator {where} returned shape .* expected \(2,\)"):
        processor(aggregation=broken).compute(samples_with({"a": 0.0}, {"a": 1.0}), None, {"a": 1.0})


def test_input_errors():
    samples = samples_with({"a": 0.0}, {"a": 1.0})
    with pytest.raises(InputError, match=r"reward 'a' has no weight for dataset 'shapes' \(rewards\[\]\.weight\)"):
        processor().compute(samples, None, {"b": 1.0})
    with pytest.raises(InputError, match="has no weight for dataset 'shapes'"):
        processor().compute(samples, None, {"a": {"numbers": 1.0}})
    with pytest.raises(InputError, match="no reward applies to dataset 'shapes'"):
        processor().compute(samples_with({"a": 1.0}, {}), None, {"a": 1.0})
    with pytest.raises(RunError, match="reward 'a' has 1 scores for 2 samples"):
        processor().compute(samples, {"a": [1.0]}, {"a": 1.0})
    with pytest.raises(RunError, match="rewards has 1 rows for 2 samples"):
        processor().compute(samples, [{"a": 1.0}], {"a": 1.0})
