"""Encoded conditions for batches, from the cache or on the fly; a prompt is decoded once, whatever its group's size."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, Protocol
from weakref import WeakKeyDictionary

from flow_factory.data_utils.condition_cache import ConditionCache
from flow_factory.data_utils.media_files import load_media
from flow_factory.data_utils.prompt_dataset import PromptRecord
from flow_factory.distributed import Comm
from flow_factory.samples import Condition, ConditionInputs

if TYPE_CHECKING:
    from flow_factory.contracts import PipelineIOContract
    from flow_factory.hparams import Arguments

# Cache folders that `data.force_reprocess` has dropped for an adapter, which stands for a run.
_DROPPED: WeakKeyDictionary[Any, set[Path]] = WeakKeyDictionary()


Size = tuple[int, int]
"""Height and width in pixels."""
InputsReader = Callable[[PromptRecord], ConditionInputs]


class ConditionEncoder(Protocol):
    """The part of an adapter that loaders use."""

    condition_class: ClassVar[type[Condition]]
    """The adapter's condition type."""

    def encode_inputs(self, inputs: list[ConditionInputs], need_negative: bool, generation: Any) -> Condition:
        """Encodes inputs into a condition with one row each, with the model-specific fields of `train:` or `eval:`."""
        ...

    def collate_conditions(self, conditions: list[Any]) -> Any:
        """Joins rows into one batch."""
        ...

    def encoder_identity(self, generation: Any) -> str:
        """Text that changes whenever the encoders would give other values."""
        ...


class _Spec(Protocol):
    @property
    def io(self) -> PipelineIOContract: ...


class _Guidance(Protocol):
    def needs_negative(self) -> bool: ...


class Adapter(ConditionEncoder, Protocol):
    """The part of an adapter that building loaders needs."""

    @property
    def spec(self) -> _Spec:
        """The model's static facts."""
        ...

    def guidance(self, guidance_scale: float, generation: Any = None) -> _Guidance:
        """The guidance of a scale (and the model-specific fields), which knows whether it needs negatives."""
        ...


@dataclass(frozen=True)
class PromptBatch:
    """B rows to generate from; all of one source.

    Attributes:
        records: The prompt of each row.
        members: Index of each row inside its group.
        condition: Their conditions, collated, batch B. Batches over the same prompts may share it: not to be modified.
        inputs: What was encoded, with decoded condition media, where records have any; else None.
    """

    records: tuple[PromptRecord, ...]
    members: tuple[int, ...]
    condition: Condition
    inputs: tuple[ConditionInputs, ...] | None = None

    def __len__(self) -> int:
        return len(self.records)

    @property
    def source(self) -> str:
        """Name of the dataset that all rows come from."""
        return self.records[0].source


class ConditionSource:
    """Conditions of records: from the cache, or encoded once per prompt and cycle, then collated.

    Args:
        cache: The cache (its files are used only if `prepare` was called on it).
        encoder: The adapter.
        inputs_of: Reads what a record is generated from, media included.
        on_the_fly: Forget everything at `start_cycle`, so that each prompt is encoded once per cycle.
    """

    def __init__(
        self,
        cache: ConditionCache,
        encoder: ConditionEncoder,
        inputs_of: InputsReader | None = None,
        on_the_fly: bool = False,
    ) -> None:
        self.cache = cache
        self.encoder = encoder
        self.inputs_of = inputs_of
        self.on_the_fly = on_the_fly
        self._last: tuple[tuple[str, ...], Condition] | None = None

    def start_cycle(self) -> None:
        """Called when a loader starts a cycle."""
        if self.on_the_fly:
            self.cache.close()
            self._last = None

    def batch(self, records: Sequence[PromptRecord], members: Sequence[int]) -> PromptBatch:
        """Builds a batch. A prompt is decoded once; consecutive batches over the same prompts share the condition."""
        keys = tuple(self.cache.key(record) for record in records)
        if self._last is None or self._last[0] != keys:
            rows = {key: self.cache.row(record, key) for key, record in dict(zip(keys, records, strict=True)).items()}
            self._last = (keys, self.encoder.collate_conditions([rows[key] for key in keys]))
        return PromptBatch(tuple(records), tuple(members), self._last[1], self._inputs(records))

    def _inputs(self, records: Sequence[PromptRecord]) -> tuple[ConditionInputs, ...] | None:
        if self.inputs_of is None or not any(record.media for record in records):
            return None
        read = {record.group_id: self.inputs_of(record) for record in records}  # a group's media are decoded once
        return tuple(read[record.group_id] for record in records)

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_last": None}


def build_conditions(
    config: Arguments,
    adapter: ConditionEncoder,
    comm: Comm,
    datasets: Sequence[Iterable[PromptRecord]],
    need_negative: bool,
    generation: Any,
    size: Size | Callable[[PromptRecord], Size],
) -> ConditionSource:
    """Conditions of the datasets' prompts, encoded now unless `data.enable_preprocess` is false. All ranks call it.

    Args:
        config: The run's configuration.
        adapter: The model; its encoders are used.
        comm: This rank's view of the process group.
        datasets: The prompts, in one or several collections.
        need_negative: Whether negative prompts are encoded too.
        generation: The model-specific fields of `train:` or `eval:`, whichever the prompts are for.
        size: Height and width of the output, of all or of each.
    """
    data = config.data_args
    size_of = size if callable(size) else lambda record: size

    def inputs_of(record: PromptRecord) -> ConditionInputs:
        return ConditionInputs(record.prompt, size_of(record), record.negative_prompt, load_media(record.media))

    def encode(records: Sequence[PromptRecord]) -> Condition:
        return adapter.encode_inputs([inputs_of(record) for record in records], need_negative, generation)

    cache = ConditionCache(
        data.cache_dir,
        cache_identity(config, adapter, generation)
        if data.enable_preprocess
        else {},  # hashing the encoders takes a while
        condition_class=adapter.condition_class,
        encode=encode,
        need_negative=need_negative,
        size_of=size_of,
        batch_size=data.preprocessing_batch_size,
    )
    if data.enable_preprocess:
        # Once per run: the evaluation sets share the folder, and must not drop what training has just encoded.
        dropped = _DROPPED.setdefault(adapter, set())
        force = data.force_reprocess and cache.folder not in dropped
        dropped.add(cache.folder)
        records = [record for dataset in datasets for record in dataset]
        cache.prepare(records, comm, share=_share(data.preprocess_parallelism, comm), force=force)
    return ConditionSource(cache, adapter, inputs_of, on_the_fly=not data.enable_preprocess)


def cache_identity(config: Arguments, adapter: ConditionEncoder, generation: Any) -> dict[str, str]:
    """What encoded values depend on besides the prompt: too much only encodes again, too little reads stale values."""
    return {
        "encoder": adapter.encoder_identity(generation),
        "condition": f"{adapter.condition_class.__module__}.{adapter.condition_class.__qualname__}",
        "dtype": f"{config.model_args.frozen_parameters_dtype} {config.mixed_precision}",
        "max_length": str(getattr(generation, "max_sequence_length", None)),
    }


def needs_negative(adapter: Adapter, *guidance_scales: float, generation: Any = None) -> bool:
    """Whether any of the scales (rollout, optimisation, evaluation) needs negative conditions."""
    return any(adapter.guidance(scale, generation).needs_negative() for scale in guidance_scales)


def _share(parallelism: str, comm: Comm) -> tuple[int, int]:
    """This rank's place among those that fill one folder: all ranks, or those of its node ("local")."""
    if parallelism == "global" or comm.world_size == 1:
        return comm.rank, comm.world_size
    return int(os.environ.get("LOCAL_RANK", comm.rank)), int(os.environ.get("LOCAL_WORLD_SIZE", comm.world_size))
