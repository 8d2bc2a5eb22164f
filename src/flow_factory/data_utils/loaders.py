"""Loaders: batches of prompts with their encoded conditions, for rollouts and for evaluation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, Dataset, Sampler

from flow_factory.data_utils.conditions import (
    Adapter,
    ConditionSource,
    PromptBatch,
    build_conditions,
    needs_negative,
)
from flow_factory.data_utils.prompt_dataset import PromptDataset, load_prompt_dataset
from flow_factory.data_utils.prompt_files import has_split
from flow_factory.data_utils.samplers import Draw, GroupSampler, SourceShare
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetEvalSpec, DatasetTrainSpec

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments, DataArguments, DatasetArguments
    from flow_factory.hparams.geometry import Geometry


class _DrawnBatches(Dataset[PromptBatch]):
    """Turns a list of draws into a batch; runs in the loader's workers if there are any."""

    def __init__(self, datasets: Mapping[str, PromptDataset], conditions: ConditionSource) -> None:
        self._datasets = datasets
        self._conditions = conditions

    def __getitem__(self, draws: Any) -> PromptBatch:
        records = [self._datasets[draw.source][draw.index] for draw in draws]
        return self._conditions.batch(records, [draw.member for draw in draws])


class _CycleSampler(Sampler[list[Draw]]):
    """Yields the batches of draws of the current cycle of one rank."""

    def __init__(self, sampler: GroupSampler, rank: int, source: str | None) -> None:
        self._sampler = sampler
        self._rank = rank
        self._source = source
        self.cycle = 0

    def draws(self) -> list[list[Draw]]:
        """The batches of the current cycle."""
        batches = self._sampler.cycle(self.cycle, self._rank)
        return [batch for batch in batches if self._source is None or batch[0].source == self._source]

    def __iter__(self) -> Iterator[list[Draw]]:
        return iter(self.draws())

    def __len__(self) -> int:
        return len(self.draws())


class BatchLoader(DataLoader):
    """A loader whose dataset makes whole batches, of what its sampler yields.

    With `num_workers` 0 batches are made in this process. Workers, if asked for, are started once and persist: starting
    them again in every cycle costs more than they save.

    Args:
        dataset: Makes a batch from one item of the sampler.
        sampler: What each batch of an iteration consists of.
        conditions: Where conditions come from.
        num_workers: Worker processes.
        seed: Run seed.
    """

    def __init__(
        self, dataset: Dataset[Any], sampler: Sampler[Any], conditions: ConditionSource, *, num_workers: int, seed: int
    ) -> None:
        self.conditions = conditions
        super().__init__(
            dataset,
            batch_size=None,
            sampler=sampler,
            collate_fn=_unchanged,
            num_workers=num_workers,
            persistent_workers=num_workers > 0,
            # Forked, so that the adapter reaches the workers without being pickled.
            multiprocessing_context="fork" if num_workers else None,
            # A DataLoader draws a seed per iteration; taken from the global generator, that would change other draws.
            generator=torch.Generator().manual_seed(seed % (1 << 63)),
        )

    def __iter__(self) -> Any:  # DataLoader's own iterator type is private
        self.conditions.start_cycle()
        return super().__iter__()

    def close(self) -> None:
        """Ends the workers, if there are any."""
        iterator, self._iterator = self._iterator, None
        shutdown = getattr(iterator, "_shutdown_workers", None)
        if shutdown is not None:
            shutdown()


class RolloutLoader(BatchLoader):
    """One cycle of prompts per iteration: call `set_cycle`, then iterate over `PromptBatch`.

    Args:
        sampler: The schedule.
        rank: This rank.
        datasets: The prompts by source.
        conditions: Where conditions come from.
        source: Only the batches of this dataset; None for all.
        num_workers: Worker processes; conditions encoded on the fly need 0.
    """

    def __init__(
        self,
        sampler: GroupSampler,
        rank: int,
        datasets: Mapping[str, PromptDataset],
        conditions: ConditionSource,
        *,
        source: str | None = None,
        num_workers: int = 0,
    ) -> None:
        if num_workers and conditions.on_the_fly:
            raise InputError(
                f"data.dataloader_num_workers {num_workers} with data.enable_preprocess false: the encoders run in the "
                "training process; set dataloader_num_workers: 0, or enable_preprocess: true."
            )
        self._draws = _CycleSampler(sampler, rank, source)
        super().__init__(
            _DrawnBatches(datasets, conditions),
            self._draws,
            conditions,
            num_workers=num_workers,
            seed=sampler.seed,
        )

    @property
    def cycle(self) -> int:
        """The cycle that the next iteration gives."""
        return self._draws.cycle

    def set_cycle(self, cycle: int) -> None:
        """Chooses the cycle that the next iteration gives; any order is allowed."""
        self._draws.cycle = cycle


class EvalLoader:
    """A rank's share of an evaluation dataset, every prompt exactly once over all ranks.

    Rank r takes prompts r, r + W, ...; the last batch may be short, and ranks may have different numbers of batches:
    nothing is padded, so nothing is counted twice.

    Args:
        dataset: The prompts.
        conditions: Where conditions come from.
        batch_size: B.
        rank: This rank.
        world_size: W.
    """

    def __init__(
        self, dataset: PromptDataset, conditions: ConditionSource, batch_size: int, rank: int = 0, world_size: int = 1
    ) -> None:
        self.dataset = dataset
        self.conditions = conditions
        self.batch_size = batch_size
        self._indices = range(rank, len(dataset), world_size)

    @property
    def num_local(self) -> int:
        """How many prompts this rank has."""
        return len(self._indices)

    def __len__(self) -> int:
        return -(-len(self._indices) // self.batch_size)

    def __iter__(self) -> Iterator[PromptBatch]:
        self.conditions.start_cycle()
        for start in range(0, len(self._indices), self.batch_size):
            records = [self.dataset[i] for i in self._indices[start : start + self.batch_size]]
            yield self.conditions.batch(records, [0] * len(records))


def build_prompt_loaders(
    config: Arguments, adapter: Adapter, comm: Comm, geometry: Geometry
) -> tuple[RolloutLoader, dict[str, RolloutLoader]]:
    """The rollout loader of all training datasets, and one per dataset with that dataset's batches only.

    Encodes all prompts first (`data.enable_preprocess`), as far as the cache does not hold them. Called by all ranks.

    Args:
        config: The run's configuration.
        adapter: The model; its encoders are used.
        comm: This rank's view of the process group.
        geometry: The numbers of a cycle.

    Raises:
        InputError: If a dataset cannot be used or the numbers do not fit it.
        RunError: If another rank fails.
    """
    datasets: dict[str, PromptDataset] = {}
    for source in config.data_args.train_sources():
        spec = source.train or DatasetTrainSpec()
        datasets[source.name] = load_prompt_dataset(
            source, spec.split, io=adapter.spec.io, max_size=spec.max_dataset_size
        )
    if not datasets:
        raise InputError("data.datasets: no dataset has train.enabled; enable at least one.")
    train = config.training_args
    sampler = GroupSampler(
        geometry.sampler,
        [SourceShare(d.name, d.source_id, len(d), geometry.per_source[d.name]) for d in datasets.values()],
        group_size=geometry.group_size,
        batch_size=geometry.batch,
        world_size=comm.world_size,
        seed=train.seed,
    )
    scales = (train.guidance_scale, train.get_preprocess_guidance_scale())
    need_negative = needs_negative(adapter, *scales, generation=config.train_generation)
    conditions = build_conditions(
        config, adapter, comm, list(datasets.values()), need_negative, config.train_generation, train.resolution
    )
    workers = config.data_args.dataloader_num_workers

    def make(source: str | None) -> RolloutLoader:
        return RolloutLoader(sampler, comm.rank, datasets, conditions, source=source, num_workers=workers)

    return make(None), {name: make(name) for name in datasets}


def build_eval_loader(config: Arguments, adapter: Adapter, comm: Comm, dataset: DatasetArguments) -> EvalLoader:
    """The evaluation loader of one dataset, with its prompts encoded. Called by all ranks.

    Args:
        config: The run's configuration.
        adapter: The model; its encoders are used.
        comm: This rank's view of the process group.
        dataset: The dataset; its `eval` spec says which split, how many prompts, and the guidance scale.

    Raises:
        InputError: If the dataset cannot be used.
        RunError: If another rank fails.
    """
    spec = dataset.eval or DatasetEvalSpec()
    evaluation = config.eval_args
    loaded = load_prompt_dataset(
        dataset, spec.split, io=adapter.spec.io, max_size=spec.max_dataset_size, drop_duplicates=False
    )
    scale = evaluation.guidance_scale if spec.guidance_scale is None else spec.guidance_scale
    need_negative = needs_negative(adapter, scale, generation=config.eval_generation)
    size = spec.resolution or evaluation.resolution
    conditions = build_conditions(config, adapter, comm, [loaded], need_negative, config.eval_generation, size)
    return EvalLoader(loaded, conditions, evaluation.per_device_batch_size, comm.rank, comm.world_size)


def build_eval_loaders(config: Arguments, adapter: Adapter, comm: Comm) -> dict[str, EvalLoader]:
    """The evaluation loaders of all datasets that take part in evaluation, by name. Called by all ranks."""
    return {source.name: build_eval_loader(config, adapter, comm, source) for source in eval_sources(config.data_args)}


def eval_sources(data: DataArguments) -> list[DatasetArguments]:
    """The datasets that are evaluated: an enabled `eval` spec, or none and a file for the default split."""
    found = []
    for source in data.sources():
        if source.eval is not None:
            found += [source] if source.eval.enabled else []
        elif has_split(source.dataset_dir, DatasetEvalSpec().split):
            found.append(source)
    return found


def _unchanged(batch: Any) -> Any:
    return batch
