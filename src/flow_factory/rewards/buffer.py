"""Collects the samples of a cycle and scores them, asynchronous rewards while the rollout goes on."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Literal

import torch
from torch import Tensor

from flow_factory.rewards.abc import GroupwiseRewardModel
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample

Split = Literal["all", "pointwise", "groupwise"]


class RewardBuffer:
    """Between the rollout, which adds samples, and the feedback, which wants all their rewards.

    Rewards with `async_reward: true` are scored in `num_workers` threads of their own as soon as a batch (or a complete
    group) has been added; the others when `finalize` is called. Both get the same batches in the same order, so results
    do not depend on which is chosen or on what finishes first.

    Threads pay for rewards that wait (a server, a subprocess). Torch operations in extra threads take the cores from
    the rollout: on CPU keep such rewards synchronous. With `num_workers` above 1, `score` must be thread-safe.

    Args:
        processor: The rewards; also closed by `close`.
    """

    def __init__(self, processor: RewardProcessor) -> None:
        self.processor = processor
        self._samples: list[BaseSample] = []
        self._waiting: dict[str, list[BaseSample]] = {}
        self._futures: dict[str, list[tuple[list[BaseSample], Future[list[float | None]]]]] = {}
        self._pools: dict[str, ThreadPoolExecutor] = {}

    def __len__(self) -> int:
        return len(self._samples)

    def add(self, samples: Sequence[BaseSample]) -> None:
        """Takes freshly generated samples, with decoded media, in rollout order.

        Raises:
            RunError: If a reward has already failed on earlier samples; waiting for the end would waste the rollout.
        """
        self._samples.extend(samples)
        for name, model in self.processor.models.items():
            if model.config.async_reward:
                waiting = self._waiting.setdefault(name, [])
                waiting.extend(sample for sample in samples if self.processor.applies(name, sample.source))
                self._submit(name, flush=False)
        for _, future in (pair for futures in self._futures.values() for pair in futures):
            if future.done():
                future.result()

    def finalize(self, store_to_samples: bool = True, split: Split = "all") -> dict[str, Tensor]:
        """Waits for, or computes, the rewards of all samples added, and empties the buffer.

        Args:
            store_to_samples: Also fill `sample.rewards` (None where a reward failed; absent where it does not apply).
            split: Which kind of rewards; the other kind is dropped.

        Returns:
            Reward name to float64 [N], in the order of addition; NaN where the reward failed or does not apply.

        Raises:
            RunError: If a reward raised or returned something wrong. The buffer is empty afterwards.
        """
        try:
            scores = {name: self._collect(name) for name in self._names(split)}
        except BaseException:
            self.discard()
            raise
        samples, self._samples = self._samples, []
        self.discard()
        rewards = {}
        for name, of_sample in scores.items():
            column = torch.full((len(samples),), float("nan"), dtype=torch.float64)
            for row, sample in enumerate(samples):
                if id(sample) not in of_sample:
                    continue
                score = of_sample[id(sample)]
                if score is not None:
                    column[row] = score
                if store_to_samples:
                    sample.rewards[name] = score
            rewards[name] = column
        return rewards

    def discard(self) -> None:
        """Drops all samples and everything still to be scored; a call that is already running ends unheard."""
        for futures in self._futures.values():
            for _, future in futures:
                future.cancel()
        self._samples = []
        self._waiting.clear()
        self._futures.clear()

    def close(self, wait: bool = True) -> None:
        """Drops what is left, joins all threads and closes the rewards.

        Args:
            wait: Whether to wait for calls that are still running.
        """
        self.discard()
        for pool in self._pools.values():
            pool.shutdown(wait=wait, cancel_futures=True)
        self._pools.clear()
        self.processor.close()

    def _names(self, split: Split) -> list[str]:
        if split not in ("all", "pointwise", "groupwise"):
            raise ValueError(f"split {split!r} is not one of 'all', 'pointwise', 'groupwise'.")
        groupwise = {n for n, model in self.processor.models.items() if isinstance(model, GroupwiseRewardModel)}
        return [n for n in self.processor.models if split == "all" or (n in groupwise) == (split == "groupwise")]

    def _collect(self, name: str) -> dict[int, float | None]:
        """Scores of one reward by identity of the sample."""
        scores: dict[int, float | None] = {}
        if self.processor.models[name].config.async_reward:
            self._submit(name, flush=True)
            for chunk, future in self._futures.get(name, []):
                scores.update(zip(map(id, chunk), future.result(), strict=True))
        else:
            for chunk in self.processor.chunks(name, self._samples):
                scores.update(zip(map(id, chunk), self.processor.score_chunk(name, chunk), strict=True))
        return scores

    def _submit(self, name: str, *, flush: bool) -> None:
        """Hands complete batches or groups to the threads; with `flush`, also what is left over."""
        waiting = self._waiting.get(name, [])
        if not waiting:
            return
        model = self.processor.models[name]
        if flush:
            chunks, left = self.processor.chunks(name, waiting), []
        elif isinstance(model, GroupwiseRewardModel):
            chunks, left = self._complete_groups(waiting)
        else:
            size = model.config.batch_size
            full = len(waiting) - len(waiting) % size
            chunks, left = [waiting[i : i + size] for i in range(0, full, size)], waiting[full:]
        self._waiting[name] = left
        for chunk in chunks:
            future = self._pool(name).submit(self.processor.score_chunk, name, chunk)
            self._futures.setdefault(name, []).append((chunk, future))

    def _complete_groups(self, waiting: list[BaseSample]) -> tuple[list[list[BaseSample]], list[BaseSample]]:
        groups: dict[int, list[BaseSample]] = {}
        for sample in waiting:
            groups.setdefault(sample.group_id, []).append(sample)
        size = self.processor.group_size
        complete = {key for key, group in groups.items() if size is not None and len(group) == size}
        chunks = [sorted(groups[key], key=lambda sample: sample.member) for key in groups if key in complete]
        return chunks, [sample for sample in waiting if sample.group_id not in complete]

    def _pool(self, name: str) -> ThreadPoolExecutor:
        if name not in self._pools:
            workers = self.processor.models[name].config.num_workers
            self._pools[name] = ThreadPoolExecutor(max_workers=workers, thread_name_prefix=f"reward-{name}")
        return self._pools[name]
