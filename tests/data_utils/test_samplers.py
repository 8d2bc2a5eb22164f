"""Schedules: complete groups, equal and disjoint ranks, weights, and no memory but the cycle's number."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections import Counter

import pytest

from flow_factory.data_utils.samplers import Draw, GroupSampler, PromptSequence, SourceShare, is_rank_local
from flow_factory.errors import InputError

KINDS = ("distributed_k_repeat", "group_contiguous", "group_distributed", "contiguous_shard")


def sampler(kind: str, m: int, k: int, b: int, w: int, n: int = 40, seed: int = 7) -> GroupSampler:
    return GroupSampler(kind, [SourceShare("a", 3, n, m)], group_size=k, batch_size=b, world_size=w, seed=seed)


def possible(kind: str) -> list[tuple[int, int, int, int]]:
    """Every (M, K, B, W) of a small range that the kind accepts."""
    found = []
    for m, k, b, w in itertools.product(range(1, 9), (1, 2, 3, 4, 6, 8), (1, 2, 3, 4), (1, 2, 3)):
        try:
            sampler(kind, m, k, b, w)
        except InputError:
            continue
        found.append((m, k, b, w))
    return found


@pytest.mark.parametrize("kind", KINDS)
def test_groups_are_complete_and_ranks_equal(kind: str) -> None:
    """Every geometry that a kind accepts: M groups of members 0..K-1, equal numbers of batches of B rows."""
    geometries = possible(kind)
    assert len(geometries) > 100
    for m, k, b, w in geometries:
        schedule = sampler(kind, m, k, b, w)
        ranks = [schedule.cycle(2, rank) for rank in range(w)]
        assert {len(batches) for batches in ranks} == {schedule.batches_per_cycle} == {m * k // (w * b)}
        assert all(len(batch) == b for batches in ranks for batch in batches)
        counts = Counter(draw for batches in ranks for batch in batches for draw in batch)
        assert set(counts.values()) == {1}, "a draw on two ranks, or twice on one"
        prompts = {draw.index for draw in counts}
        assert len(prompts) == m
        assert set(counts) == {Draw("a", p, member) for p in prompts for member in range(k)}


def test_rank_local_keeps_groups_on_a_rank_in_consecutive_rows() -> None:
    """What groupwise rewards and shared conditions rely on."""
    for m, k, b, w in possible("rank_local"):
        for rank in range(w):
            rows = [draw for batch in sampler("rank_local", m, k, b, w).cycle(0, rank) for draw in batch]
            groups = [list(rows[i : i + k]) for i in range(0, len(rows), k)]
            assert all([d.member for d in g] == list(range(k)) and len({d.index for d in g}) == 1 for g in groups)
    assert is_rank_local("group_contiguous") and not is_rank_local("distributed_k_repeat")


def test_global_batch_gives_every_rank_the_same_prompts() -> None:
    """K / W members of each prompt on every rank, the same prompts in the same slot."""
    for m, k, b, w in possible("global_batch"):
        ranks = [sampler("global_batch", m, k, b, w).cycle(1, rank) for rank in range(w)]
        for batches in zip(*ranks, strict=True):
            assert len({tuple(d.index for d in batch) for batch in batches}) == 1
        per_rank = Counter(d.index for batch in ranks[0] for d in batch)
        assert set(per_rank.values()) == {k // w}


@pytest.mark.parametrize("kind", ["distributed_k_repeat", "group_contiguous", "group_distributed"])
def test_a_slot_of_all_ranks_does_not_depend_on_the_number_of_ranks(kind: str) -> None:
    """1 rank x 4 rows and 2 ranks x 2 rows see the same samples between two optimizer steps."""
    one = sampler(kind, 8, 4, 4, 1).cycle(3, 0)
    two = [sampler(kind, 8, 4, 2, 2).cycle(3, rank) for rank in range(2)]
    step = 2  # two slots of rank_local hold two whole groups
    for i in range(0, len(one), step):
        joined = sorted((d.index, d.member) for batches in two for batch in batches[i : i + step] for d in batch)
        assert joined == sorted((d.index, d.member) for batch in one[i : i + step] for d in batch)


@pytest.mark.parametrize(("n", "m"), [(5, 2), (5, 4), (5, 5), (7, 3), (12, 5), (40, 8), (3, 1), (9, 8)])
def test_prompts_are_visited_pass_by_pass(n: int, m: int) -> None:
    """No repetition inside a cycle, every prompt once per pass over the dataset, another order in each pass."""
    sequence = PromptSequence(n, m, seed=1, source_id=0)
    cycles = [sequence.cycle(c) for c in range(6 * n)]
    assert all(len(set(cycle)) == m for cycle in cycles)
    stream = [p for cycle in cycles for p in cycle]
    passes = [stream[i : i + n] for i in range(0, len(stream) - n + 1, n)]
    assert all(sorted(p) == list(range(n)) for p in passes)
    if n > 3:
        assert len({tuple(p) for p in passes}) > len(passes) // 2


def test_random_access() -> None:
    """Resume asks for cycle 17 first: the same as walking there, in any order of calls."""
    walked = [sampler("distributed_k_repeat", 6, 4, 4, 2, n=10).cycle(c, 1) for c in range(30)]
    fresh = sampler("distributed_k_repeat", 6, 4, 4, 2, n=10)
    for c in (17, 3, 29, 0, 18, 17):
        assert fresh.cycle(c, 1) == walked[c]


def test_seed_and_cycle_matter() -> None:
    """Other seeds and other cycles draw other prompts."""
    base = sampler("group_contiguous", 4, 2, 2, 1)
    assert base.cycle(0, 0) != base.cycle(1, 0)
    assert base.cycle(0, 0) != sampler("group_contiguous", 4, 2, 2, 1, seed=8).cycle(0, 0)


def several(kind: str, w: int = 2) -> GroupSampler:
    shares = [SourceShare("a", 0, 30, 6), SourceShare("b", 1, 9, 4), SourceShare("c", 2, 50, 2)]
    return GroupSampler(kind, shares, group_size=4, batch_size=4, world_size=w, seed=3)


@pytest.mark.parametrize("kind", KINDS)
def test_several_datasets(kind: str) -> None:
    """Shares hold exactly in every cycle, a batch has one source, and a slot has the same source on every rank."""
    schedule = several(kind)
    orders = []
    for cycle in range(5):
        ranks = [schedule.cycle(cycle, rank) for rank in range(2)]
        sources = [[{d.source for d in batch} for batch in batches] for batches in ranks]
        assert all(len(s) == 1 for batches in sources for s in batches)
        assert sources[0] == sources[1]
        drawn = {(d.source, d.index) for batches in ranks for batch in batches for d in batch}
        assert Counter(source for source, _ in drawn) == {"a": 6, "b": 4, "c": 2}
        orders.append([next(iter(s)) for s in sources[0]])
    assert len({tuple(o) for o in orders}) > 1, "sources are mixed anew in every cycle"


def test_a_source_is_drawn_as_if_it_were_alone() -> None:
    """Another dataset beside it does not change which prompts a dataset draws."""
    alone = GroupSampler("rank_local", [SourceShare("b", 1, 9, 4)], group_size=4, batch_size=4, world_size=2, seed=3)
    for cycle in range(4):
        together = [batch for batch in several("rank_local").cycle(cycle, 1) if batch[0].source == "b"]
        assert together == alone.cycle(cycle, 1)


def test_the_schedule_does_not_depend_on_pythonhashseed() -> None:
    """Pitfall 14: a process with another PYTHONHASHSEED computes the same schedule."""
    code = (
        "import json\nfrom tests.data_utils.test_samplers import several\n"
        "print(json.dumps([[[ [d.source, d.index, d.member] for d in b] for b in several('global_random').cycle(2, r)]"
        " for r in range(2)]))"
    )
    schedule = several("global_random")
    mine = [[[[d.source, d.index, d.member] for d in b] for b in schedule.cycle(2, r)] for r in range(2)]
    environment = {**os.environ, "PYTHONHASHSEED": "12345", "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
    assert json.loads(done.stdout) == mine


@pytest.mark.parametrize(
    ("kind", "m", "k", "b", "w", "said"),
    [
        ("distributed_k_repeat", 50, 4, 4, 1, "has 40 prompts, but a cycle draws 50"),
        ("distributed_k_repeat", 3, 2, 4, 1, "use a multiple of 2 for train.unique_sample_num_per_epoch"),
        ("group_contiguous", 3, 4, 2, 2, "group_contiguous keeps groups on one rank; use a multiple of 2"),
        ("group_contiguous", 6, 2, 4, 2, "use a multiple of 4"),
        ("group_distributed", 4, 3, 3, 2, "needs group_size divisible by the ranks"),
        ("contiguous_shard", 1, 2, 4, 1, "must be a multiple"),
        ("distributed_k_repeat", 0, 2, 4, 1, "must be at least 1"),
    ],
)
def test_geometry_that_cannot_hold(kind: str, m: int, k: int, b: int, w: int, said: str) -> None:
    """Nothing is padded: the message has the numbers and what would hold."""
    with pytest.raises(InputError) as caught:
        sampler(kind, m, k, b, w)
    assert said in str(caught.value) and "'a'" in str(caught.value)


def test_unknown_sampler() -> None:
    """Names the value and the choices."""
    with pytest.raises(InputError, match="sampler_type 'global_tile' has no sampler; use one of global_random"):
        sampler("global_tile", 2, 2, 2, 1)
