"""Advantage estimators against Python's own statistics."""

from __future__ import annotations

import math
import statistics

import pytest
import torch

from flow_factory.advantage import get_adv_estimator, list_adv_estimators, register_adv_estimator
from flow_factory.advantage.estimators import (
    best_of_advantages,
    gdpo_advantages,
    rank_advantages,
    rloo_advantages,
    sum_advantages,
)
from flow_factory.advantage.groups import Components, Groups, population_std, weighted_totals
from flow_factory.errors import InputError


def table(rewards, groups, sources=None, weights=None, mask=None) -> tuple[torch.Tensor, Groups]:
    """The arguments of an estimator: totals and groups."""
    r = torch.tensor(rewards, dtype=torch.float64)
    r = r.view(-1, 1) if r.dim() == 1 else r
    w = torch.ones_like(r) if weights is None else torch.tensor(weights, dtype=torch.float64).expand_as(r)
    m = torch.ones_like(r, dtype=torch.bool) if mask is None else torch.tensor(mask)
    components = Components(tuple(f"r{k}" for k in range(r.shape[1])), torch.where(m, r, 0.0), w, m)
    ids = torch.tensor(groups, dtype=torch.int64)
    source_ids = torch.tensor(sources if sources is not None else [0] * len(groups), dtype=torch.int64)
    return weighted_totals(r, w, m), Groups(ids, source_ids, torch.arange(len(groups)), m.any(dim=1), components)


REWARDS = [0.1, 0.7, 0.4, 0.2, 0.9, 0.3]
GROUPS = [5, 5, 5, 8, 8, 8]


def group_sum(rewards, groups):
    return sum_advantages(rewards, groups, global_std=False)


RELATIVE = [sum_advantages, group_sum, gdpo_advantages, rloo_advantages, best_of_advantages, rank_advantages]


def test_sum_with_the_groups_std():
    got = sum_advantages(*table(REWARDS, GROUPS), global_std=False).tolist()
    expected = []
    for group in (REWARDS[:3], REWARDS[3:]):
        mean, std = statistics.fmean(group), statistics.pstdev(group)  # ddof 0
        expected += [(r - mean) / std for r in group]
    assert got == pytest.approx(expected, rel=1e-12)


def test_sum_with_the_sources_std():
    sources = [1, 1, 1, 2, 2, 2]
    got = sum_advantages(*table(REWARDS, GROUPS, sources), global_std=True).tolist()
    one_source = sum_advantages(*table(REWARDS, GROUPS), global_std=True).tolist()
    for values, stds in (
        (got, [statistics.pstdev(REWARDS[:3])] * 3 + [statistics.pstdev(REWARDS[3:])] * 3),
        (one_source, [statistics.pstdev(REWARDS)] * 6),
    ):
        means = [statistics.fmean(REWARDS[:3])] * 3 + [statistics.fmean(REWARDS[3:])] * 3
        assert values == pytest.approx([(r - m) / s for r, m, s in zip(REWARDS, means, stds, strict=True)], rel=1e-12)


def test_sum_weighs_rewards_and_leaves_out_those_that_do_not_apply():
    rewards = [[1.0, 10.0], [2.0, 40.0], [4.0, 99.0], [3.0, 77.0]]
    mask = [[True, True], [True, True], [True, False], [True, False]]
    got = sum_advantages(*table(rewards, [1, 1, 2, 2], weights=[2.0, 0.5], mask=mask), global_std=False)
    # Totals 7 and 24, then 8 and 6: in a pair each deviates by one standard deviation.
    assert got.tolist() == pytest.approx([-1.0, 1.0, 1.0, -1.0])
    wide = sum_advantages(*table(rewards, [1, 1, 2, 2], weights=[2.0, 0.5], mask=mask), global_std=True)
    std = statistics.pstdev([7.0, 24.0, 8.0, 6.0])
    assert wide.tolist() == pytest.approx([-8.5 / std, 8.5 / std, 1 / std, -1 / std])


def test_gdpo_by_hand():
    a, b = [0.0, 1.0, 0.5, 0.2], [10.0, 10.0, 30.0, 50.0]
    groups, weights = [1, 1, 2, 2], [1.0, 0.25]
    got = gdpo_advantages(*table(list(zip(a, b, strict=True)), groups, weights=weights)).tolist()
    # z of a: -1 +1 | +1 -1; z of b: 0 0 (constant) | -1 +1. C: -1 +1 | 0.75 -0.75.
    combined = [-1.0, 1.0, 0.75, -0.75]
    std = statistics.pstdev(combined)
    assert got == pytest.approx([c / std for c in combined], rel=1e-12)


def test_gdpo_keeps_apart_what_a_sum_merges():
    """Rewards (1, 0) and (0, 1) have equal sums; GDPO's z of a rare and a common success differ."""
    rewards = [[1.0, 0.0], [0.0, 1.0], [0.0, 1.0], [0.0, 1.0]]
    assert sum_advantages(*table(rewards, [3] * 4), global_std=False).tolist() == [0.0] * 4
    weighted = gdpo_advantages(*table(rewards, [3] * 4, weights=[2.0, 1.0]))
    assert weighted[0] > 1 and bool((weighted[1:] < 0).all())


def test_gdpo_masks_per_reward():
    rewards = [[0.0, 5.0], [1.0, 5.0], [0.0, 3.0], [1.0, 4.0]]
    mask = [[True, False], [True, False], [True, True], [True, True]]
    got = gdpo_advantages(*table(rewards, [1, 1, 2, 2], mask=mask)).tolist()
    combined = [-1.0, 1.0, -2.0, 2.0]
    assert got == pytest.approx([c / statistics.pstdev(combined) for c in combined])


@pytest.mark.parametrize("estimator", RELATIVE)
def test_groups_without_a_difference_are_exactly_zero(estimator):
    """0.1 + 0.1 + 0.1 is not 0.3 in floating point: the mean of equal rewards need not equal them."""
    rewards = [0.1, 0.1, 0.1, 0.7, 0.7, 0.7, 0.2, 0.4, 0.9, 0.3]
    got = estimator(*table(rewards, [1, 1, 1, 2, 2, 2, 3, 3, 3, 3]))
    assert got[:6].tolist() == [0.0] * 6
    assert bool((got[6:] != 0).all())
    assert estimator(*table([0.1] * 6, [1, 1, 1, 2, 2, 2])).tolist() == [0.0] * 6


@pytest.mark.parametrize("estimator", RELATIVE)
def test_unusable_rows_touch_nothing(estimator):
    """A failed sample is out of every statistic; a group left with one member says nothing."""
    rewards, groups = [0.1, 0.7, 0.4, 99.0, 0.3, -55.0], [5, 5, 5, 5, 8, 8]
    mask = [[True], [True], [True], [False], [True], [False]]
    got = estimator(*table(rewards, groups, mask=mask))
    assert got[3:].tolist() == [0.0] * 3
    usable = [0, 1, 2, 4]
    alone = estimator(*table([rewards[i] for i in usable], [groups[i] for i in usable]))
    assert got[usable].tolist() == alone.tolist()


def test_two_pass_variance():
    """Pitfall 11: E[x^2] - E[x]^2 in float32 goes negative for large offsets; two passes in float64 do not."""
    values = torch.tensor([100.0, 100.01, 100.02])
    naive = (values**2).mean() - values.mean() ** 2
    expected = statistics.pstdev(values.tolist())
    assert float(naive) < 0  # the fault is there to be seen
    assert population_std(values) == pytest.approx(expected, rel=1e-9)
    rewards = [1e6 + d for d in (0.0, 1e-3, 2e-3)]
    got = sum_advantages(*table(rewards, [1, 1, 1]), global_std=False)
    assert got.tolist() == pytest.approx([-math.sqrt(1.5), 0.0, math.sqrt(1.5)], rel=1e-6, abs=1e-6)


def test_ids_of_64_bits_stay_apart():
    """Pitfall 12: through float32 (or float64, above 2^53) these groups merge."""
    base = 2**62
    groups = [base, base, base + 1, base + 1, -(2**63), -(2**63), -(2**63) + 1, -(2**63) + 1]
    assert float(groups[0]) == float(groups[2]) and float(groups[4]) == float(groups[6])
    rewards = [0.0, 1.0, 10.0, 12.0, -5.0, -5.5, 100.0, 130.0]
    for estimator in (group_sum, gdpo_advantages):
        got = estimator(*table(rewards, groups))
        assert got.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0, 1.0, -1.0, -1.0, 1.0])


def test_equal_ids_in_two_datasets_are_two_groups():
    """Pitfall 13: the same prompt in two datasets must not share a group."""
    rewards, sources = [0.0, 1.0, 10.0, 12.0], [0, 0, 1, 1]
    for estimator in (group_sum, gdpo_advantages):
        got = estimator(*table(rewards, [7] * 4, sources))
        assert got.tolist() == pytest.approx([-1.0, 1.0, -1.0, 1.0])


def test_tiny_differences_are_limited_by_the_floor():
    got = sum_advantages(*table([0.0, 1e-9], [1, 1]), global_std=False)
    assert got.tolist() == pytest.approx([-5e-4, 5e-4])  # 5e-10 / 1e-6, not -1 and 1


@pytest.mark.parametrize("estimator", RELATIVE)
def test_order_of_rows_does_not_matter(estimator):
    generator = torch.Generator().manual_seed(0)
    rewards = torch.rand(24, 2, generator=generator, dtype=torch.float64).tolist()
    groups = (torch.arange(24) % 4).tolist()
    sources = [g % 2 for g in groups]
    order = torch.randperm(24, generator=generator).tolist()
    plain = estimator(*table(rewards, groups, sources, weights=[1.0, 3.0]))
    mixed = estimator(
        *table([rewards[i] for i in order], [groups[i] for i in order], [sources[i] for i in order], weights=[1.0, 3.0])
    )
    torch.testing.assert_close(mixed, plain[order], rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("estimator", [e for e in RELATIVE if e is not rloo_advantages])
def test_scale_and_offset_of_a_single_reward_drop_out(estimator):
    generator = torch.Generator().manual_seed(1)
    rewards = torch.rand(24, generator=generator, dtype=torch.float64)
    groups = (torch.arange(24) % 4).tolist()
    torch.testing.assert_close(
        estimator(*table((7 * rewards - 3).tolist(), groups)),
        estimator(*table(rewards.tolist(), groups)),
        rtol=1e-10,
        atol=1e-12,
    )


def test_rloo_is_the_mean_of_the_others():
    got = rloo_advantages(*table(REWARDS, GROUPS)).tolist()
    expected = [
        r - statistics.fmean(o for j, o in enumerate(group) if j != i)
        for group in (REWARDS[:3], REWARDS[3:])
        for i, r in enumerate(group)
    ]
    assert got == pytest.approx(expected, rel=1e-12)


def test_best_of_is_the_group_relative_advantage_of_an_indicator():
    rewards, groups = [0.1, 0.9, 0.4, 0.4, 5.0, 1.0, 1.0, 0.0], [1, 1, 1, 1, 2, 2, 2, 2]
    one = best_of_advantages(*table(rewards, groups))
    indicator = [0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 0.0, 0.0]
    std = statistics.pstdev(indicator[:4])
    assert one.tolist() == pytest.approx([(b - 0.25) / std for b in indicator])
    two = best_of_advantages(*table(rewards, groups), num_best=2)
    shared = [0.0, 1.0, 0.5, 0.5, 1.0, 0.5, 0.5, 0.0]  # ties share the last place
    std = statistics.pstdev(shared[:4])
    assert two.tolist() == pytest.approx([(b - 0.5) / std for b in shared])
    best_only = best_of_advantages(*table(rewards, groups), negatives=False)
    assert torch.equal(best_only, one.clamp(min=0))
    assert best_of_advantages(*table(rewards, groups), num_best=4).tolist() == [0.0] * 8


def test_ranks_are_utilities_of_unit_deviation():
    got = rank_advantages(*table([0.3, 7.0, -1.0, 0.2], [1] * 4)).tolist()
    ranks = [2.0, 3.0, 0.0, 1.0]
    assert got == pytest.approx([(r - 1.5) / statistics.pstdev(ranks) for r in ranks], rel=1e-12)
    tied = rank_advantages(*table([1.0, 1.0, 2.0, 0.0], [1] * 4)).tolist()
    assert tied == pytest.approx([0.0, 0.0, 1.5 / statistics.pstdev(ranks), -1.5 / statistics.pstdev(ranks)])


def test_registry():
    assert {"sum", "gdpo", "rloo", "best_of", "rank", "reinforce", "per_prompt"} <= set(list_adv_estimators())
    assert get_adv_estimator("SUM") is sum_advantages
    assert get_adv_estimator("gdpo") is gdpo_advantages
    assert get_adv_estimator("flow_factory.advantage.estimators.sum_advantages") is sum_advantages

    @register_adv_estimator("halves-of-tests")
    def halves(rewards, groups):
        return rewards / 2

    assert get_adv_estimator("halves-of-tests") is halves
    with pytest.raises(InputError, match=r"unknown advantage estimator 'gdop' .*'gdpo'"):
        get_adv_estimator("gdop")
    with pytest.raises(InputError, match="already registered"):
        register_adv_estimator("sum")(halves)
