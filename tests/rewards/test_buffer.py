"""RewardBuffer: asynchronous equals synchronous, errors come early, and no thread is left."""

from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch

from flow_factory.errors import RunError
from flow_factory.rewards.abc import PointwiseRewardModel, RewardFailure
from flow_factory.rewards.buffer import RewardBuffer
from flow_factory.rewards.processor import RewardProcessor
from tests.rewards.helpers import PixelReward, RankReward, config, make_sample, returning


class SlowFirst(PointwiseRewardModel):
    """Earlier batches take longer, so that batches finish in the opposite order; the answer depends on the batch."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.order: list[int] = []
        self.batches: list[list[int]] = []

    def score(self, samples: Any) -> Any:
        first = samples[0].index
        time.sleep(max(0.0, 0.15 - 0.03 * first))
        self.order.append(first)
        self.batches.append([s.index for s in samples])
        return [s.index + 100.0 * first for s in samples]


class Blocked(PointwiseRewardModel):
    """Waits until it is let go."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.gate = threading.Event()
        self.started = threading.Event()

    def score(self, samples: Any) -> Any:
        self.started.set()
        assert self.gate.wait(10)
        return [1.0] * len(samples)


def reward_threads() -> list[str]:
    return [t.name for t in threading.enumerate() if t.name.startswith("reward-")]


def rollout(buffer: RewardBuffer, samples: list, size: int = 2) -> None:
    for i in range(0, len(samples), size):
        buffer.add(samples[i : i + size])


def test_async_results_do_not_depend_on_completion_order() -> None:
    """Four workers finish in another order than one worker or no worker: same batches, same rewards."""
    found = {}
    for mode in ({}, {"async_reward": True}, {"async_reward": True, "num_workers": 4}):
        model = SlowFirst(config(batch_size=3, **mode))
        buffer = RewardBuffer(RewardProcessor(models=[model]))
        samples = [make_sample(i) for i in range(8)]
        rollout(buffer, samples)
        rewards = buffer.finalize()
        buffer.close()
        found[str(mode)] = (rewards["r"].tolist(), [s.rewards["r"] for s in samples], sorted(model.batches))
        if mode.get("num_workers") == 4:
            assert model.order != sorted(model.order), "the batches were meant to finish out of order"
    assert len({repr(v) for v in found.values()}) == 1
    assert reward_threads() == []


def test_scoring_goes_on_during_the_rollout() -> None:
    """A complete batch is scored before the rollout ends; an incomplete one waits for finalize."""
    model = Blocked(config(batch_size=2, async_reward=True))
    buffer = RewardBuffer(RewardProcessor(models=[model]))
    buffer.add([make_sample(0)])
    assert not model.started.wait(0.05)
    buffer.add([make_sample(1), make_sample(2)])
    assert model.started.wait(5)
    model.gate.set()
    assert buffer.finalize()["r"].tolist() == [1.0, 1.0, 1.0]
    buffer.close()


def test_a_complete_group_is_scored_during_the_rollout() -> None:
    """Groupwise and asynchronous: the call comes with the group's last member."""
    model = RankReward(config(async_reward=True))
    buffer = RewardBuffer(RewardProcessor(models=[model], group_size=2))
    buffer.add([make_sample(0, 1, value=5), make_sample(1, 0, value=9)])
    buffer.add([make_sample(0, 0, value=7)])
    deadline = time.monotonic() + 5
    while not model.calls and time.monotonic() < deadline:
        time.sleep(0.005)
    assert model.calls == [[0, 1]]
    buffer.add([make_sample(1, 1, value=1)])
    assert buffer.finalize()["r"].tolist() == [0.0, 1.0, 1.0, 0.0]
    buffer.close()


def test_errors_surface_in_add_and_in_finalize() -> None:
    """A reward that fails early stops the rollout at the next batch, and at the end at the latest."""
    buffer = RewardBuffer(RewardProcessor(models=[returning([float("nan")], batch_size=1, async_reward=True)]))
    with pytest.raises(RunError, match="returned nan"):
        buffer.add([make_sample(0)])
        for _ in range(200):
            buffer.add([])
            time.sleep(0.01)
    with pytest.raises(RunError, match="returned nan"):
        buffer.finalize()
    assert len(buffer) == 0
    buffer.close()
    assert reward_threads() == []


def test_discard_drops_everything() -> None:
    """After a signal the unfinished cycle leaves nothing: the next cycle's rewards are its own."""
    model = Blocked(config(batch_size=1, async_reward=True))
    buffer = RewardBuffer(RewardProcessor(models=[model]))
    old = [make_sample(0), make_sample(1)]
    buffer.add(old)
    assert model.started.wait(5)
    buffer.discard()
    model.gate.set()
    assert len(buffer) == 0
    new = [make_sample(2)]
    buffer.add(new)
    assert buffer.finalize()["r"].tolist() == [1.0]
    assert [s.rewards for s in old] == [{}, {}] and new[0].rewards == {"r": 1.0}
    buffer.close()
    assert reward_threads() == []


def test_failed_and_masked_are_nan_in_columns_and_told_apart_in_samples() -> None:
    """Failed is None in the sample, not applicable is absent; both are NaN, never 0, in the column."""
    failing = returning(RewardFailure("down"), name="judge")
    only_b = PixelReward(config("only_b", applicable_datasets=["b"]))
    buffer = RewardBuffer(RewardProcessor(models=[failing, only_b]))
    samples = [make_sample(0, source="a"), make_sample(1, source="b", value=4)]
    buffer.add(samples)
    rewards = buffer.finalize()
    assert torch.isnan(rewards["judge"]).all()
    assert torch.isnan(rewards["only_b"][0]) and rewards["only_b"][1] == 4.0
    assert samples[0].rewards == {"judge": None} and samples[1].rewards == {"judge": None, "only_b": 4.0}


def test_split_and_store() -> None:
    """`split` chooses the kind; without `store_to_samples` the samples stay untouched."""
    models = [PixelReward(config("point")), RankReward(config("group"))]
    buffer = RewardBuffer(RewardProcessor(models=models))
    for split, names in (("pointwise", ["point"]), ("groupwise", ["group"]), ("all", ["point", "group"])):
        sample = make_sample(0)
        buffer.add([sample])
        assert list(buffer.finalize(store_to_samples=False, split=split)) == names
        assert sample.rewards == {}
    with pytest.raises(ValueError, match="split 'each'"):
        buffer.finalize(split="each")  # type: ignore[arg-type]


def test_buffer_is_empty_after_finalize_and_usable_after_close() -> None:
    """Cycles do not leak into each other."""
    buffer = RewardBuffer(RewardProcessor(models=[PixelReward(config(async_reward=True))]))
    for value in (3, 4):
        buffer.add([make_sample(0, value=value)])
        assert buffer.finalize()["r"].tolist() == [float(value)]
    assert buffer.finalize()["r"].shape == (0,)
    buffer.close()
    buffer.close()
    assert reward_threads() == []
