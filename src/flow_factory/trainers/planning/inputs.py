"""What a plan reads of a run's data: how many prompts, what they are encoded into, and who starts from which noise."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any

from flow_factory.data_utils.conditions import needs_negative
from flow_factory.data_utils.loaders import eval_sources
from flow_factory.data_utils.media_files import load_media
from flow_factory.data_utils.offline_plan import OfflinePlan, plan_offline_data
from flow_factory.data_utils.prompt_dataset import PromptRecord, load_prompt_dataset
from flow_factory.data_utils.samplers import GroupSampler, SourceShare
from flow_factory.hparams import Arguments, DatasetEvalSpec, DatasetTrainSpec
from flow_factory.hparams.geometry import Geometry
from flow_factory.models.shapes.runner import ShapeRuns, UnknownShapesError
from flow_factory.samples import Condition, ConditionInputs
from flow_factory.trainers.planning.report import MemoryPart, unknown_part

_SAMPLED = 32  # prompts of a dataset whose encodings are measured; their lengths may differ


@dataclass(frozen=True)
class PromptSet:
    """Prompts that are encoded alike.

    Attributes:
        name: The dataset, for messages.
        records: The prompts.
        size: Height and width of the output.
        need_negative: Whether negative prompts are encoded too.
        generation: The model-specific fields of `train:` or `eval:`.
        training: Whether it is trained on.
    """

    name: str
    records: Sequence[PromptRecord]
    size: tuple[int, int]
    need_negative: bool
    generation: Any
    training: bool

    def cache_keys(self) -> set[Any]:
        """What the cache tells encodings apart by; datasets that agree in all of it share them."""
        settings = (self.need_negative, repr(self.generation))
        return {
            (
                *settings,
                r.prompt,
                r.negative_prompt if self.need_negative else None,
                r.media,
                self.size if r.media else 0,
            )
            for r in self.records
        }

    def inputs(self, count: int) -> list[ConditionInputs]:
        """What the first `count` examples are generated from."""
        return [
            ConditionInputs(r.prompt, self.size, r.negative_prompt, load_media(r.media))
            for r in islice(self.records, count)
        ]


def read_prompts(config: Arguments, adapter: Any) -> list[PromptSet]:
    """The prompts that a run trains on and evaluates.

    Raises:
        InputError: If a file is missing or a row cannot be used.
    """
    found = []
    train = config.training_args
    scales = (getattr(train, "guidance_scale", 1.0), train.get_preprocess_guidance_scale())
    negative = needs_negative(adapter, *scales, generation=config.train_generation)
    for source in config.data_args.train_sources() if train.execution_contract.generates else []:
        spec = source.train or DatasetTrainSpec()
        dataset = load_prompt_dataset(source, spec.split, io=config.spec.io, max_size=spec.max_dataset_size)
        found.append(PromptSet(source.name, dataset.records, train.resolution, negative, config.train_generation, True))
    if config.eval_args.eval_freq:
        found += [_evaluation(config, adapter, source) for source in eval_sources(config.data_args)]
    return found


def _evaluation(config: Arguments, adapter: Any, source: Any) -> PromptSet:
    spec = source.eval or DatasetEvalSpec()
    dataset = load_prompt_dataset(
        source, spec.split, io=config.spec.io, max_size=spec.max_dataset_size, drop_duplicates=False
    )
    scale = config.eval_args.guidance_scale if spec.guidance_scale is None else spec.guidance_scale
    negative = needs_negative(adapter, scale, generation=config.eval_generation)
    size = spec.resolution or config.eval_args.resolution
    return PromptSet(source.name, dataset.records, size, negative, config.eval_generation, False)


def read_stored_examples(config: Arguments) -> tuple[OfflinePlan, PromptSet] | None:
    """The stored examples of a dataset trainer and their prompts; None for a trainer that reads data of its own.

    Raises:
        InputError: If a record cannot be used.
    """
    if getattr(config.training_args, "supervision", None) is None:
        return None
    plan = plan_offline_data(config)
    records = [entry.example.record for entry in plan.entries if entry.repeat == 0]
    size = max(plan.buckets, key=lambda size: size[0] * size[1])
    return plan, PromptSet("stored examples", records, size, False, config.train_generation, True)


class Encodings:
    """Shapes of encoded prompts, as the run's encoders would give them: the first prompts of each set, asked once.

    Args:
        runs: The skeleton.
        batch: Prompts that are encoded together.

    Attributes:
        problem: Why they are not known, if an encoder needs numbers.
    """

    def __init__(self, runs: ShapeRuns, batch: int) -> None:
        self._runs, self._batch = runs, batch
        self._rows: dict[int, list[Condition] | None] = {}
        self.problem = ""

    def rows(self, prompts: PromptSet) -> list[Condition] | None:
        """One condition for each of the first prompts of a set; None if they are not known."""
        if id(prompts) not in self._rows:
            try:
                self._rows[id(prompts)] = self._encode(prompts)
            except UnknownShapesError as error:
                self.problem = str(error)
                self._rows[id(prompts)] = None
        return self._rows[id(prompts)]

    def _encode(self, prompts: PromptSet) -> list[Condition]:
        inputs = prompts.inputs(_SAMPLED)
        rows: list[Condition] = []
        for start in range(0, len(inputs), self._batch):
            part = inputs[start : start + self._batch]
            condition = self._runs.encode(part, prompts.need_negative, prompts.generation)
            rows += [condition.row(i) for i in range(len(part))]
            if len(part) > 1 and len(set(map(condition_bytes, rows))) == 1:
                # Padded to one length, of the model or of the batch: the others are about as large, and a large encoder
                # takes a minute for a batch.
                break
        return rows

    def working_part(self) -> MemoryPart:
        """One batch of prompts in the encoders, which is done before the training starts."""
        if self.problem:
            return unknown_part("encoding prompts", self.problem)
        note = f"{self._batch} prompts at a time, in one encoder after the other"
        return MemoryPart("encoding prompts", self._runs.encoding_peak, always=False, estimate=True, note=note)

    def cache_part(self, sets: Sequence[PromptSet]) -> MemoryPart:
        """Encoded prompts on disk: distinct prompts x the mean size of the first ones."""
        seen: set[Any] = set()
        total, sampled = 0.0, 0
        for prompts in sets:
            rows = self.rows(prompts)
            if rows is None:
                return MemoryPart("condition cache", None, "disk", estimate=True, note=f"not known: {self.problem}")
            fresh = prompts.cache_keys() - seen
            seen |= fresh
            sampled = max(sampled, len(rows))
            total += len(fresh) * sum(map(condition_bytes, rows)) / len(rows)
        note = f"{len(seen)} encoded prompts, sizes of the first {sampled}"
        return MemoryPart("condition cache", round(total), "disk", estimate=True, note=note)


def condition_bytes(condition: Condition) -> int:
    """Bytes of a condition's tensors, as they are stored."""
    return sum(t.numel() * t.element_size() for t in condition.tensors().values())


class Starts:
    """How many different starts the rollouts of a cycle have where a group shares its initial noise.

    Args:
        config: The configuration.
        geometry: The numbers of a cycle.
        datasets: The training prompts.
    """

    def __init__(self, config: Arguments, geometry: Geometry, datasets: Sequence[PromptSet]) -> None:
        self._world = geometry.world_size
        self._sampler = GroupSampler(
            geometry.sampler,
            [
                SourceShare(d.name, d.records[0].source_id, len(d.records), geometry.per_source[d.name])
                for d in datasets
            ],
            group_size=geometry.group_size,
            batch_size=geometry.batch,
            world_size=geometry.world_size,
            seed=config.training_args.seed,
        )

    def in_cycle(self, cycle: int) -> int:
        """The prompts that each rank has samples of, summed over ranks: a rank evaluates a start once."""
        return sum(
            len({(draw.source, draw.index) for batch in self._sampler.cycle(cycle, rank) for draw in batch})
            for rank in range(self._world)
        )
