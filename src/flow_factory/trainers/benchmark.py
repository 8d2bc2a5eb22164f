"""Rewards of a model on datasets, with confidence intervals; of a run also against its base model, from the same noise.

It samples as evaluations in training do (`panels.generate_panel`: same prompts, noise, batches and solver), so
member 0 shows what those show. Every row of a dataset counts once: nothing is padded.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flow_factory.data_utils.loaders import EvalLoader, build_eval_loader
from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.hparams import Arguments, DatasetArguments
from flow_factory.rewards.build import check_rewards, check_sample_class
from flow_factory.rewards.intervals import LEVEL, RESAMPLES, Interval, bootstrap_mean
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.samples import BaseSample
from flow_factory.samples.measures import columns_by_name
from flow_factory.samples.statistics import group_diversity, sample_frames, thumbnails
from flow_factory.trainers import setup
from flow_factory.trainers.inference import InferenceModel, Variant
from flow_factory.trainers.panels import PanelScorer, Scored, generate_panel, statistics_of

METHOD = (
    f"percentile bootstrap over prompts, {LEVEL:.0%}, {RESAMPLES} resamples, seed 0; all samples of a prompt are drawn "
    "together; differences are paired by prompt and noise"
)


@dataclass(frozen=True)
class BenchmarkPlan:
    """What to evaluate.

    Attributes:
        datasets: The datasets, with the split to read in their `eval` part.
        samples_per_prompt: K.
        seed: Seed of the noise, with the prompt's row and the member 0..K-1.
        variants: "base", "trained", or both for a comparison.
    """

    datasets: tuple[DatasetArguments, ...]
    samples_per_prompt: int
    seed: int
    variants: tuple[Variant, ...]


@dataclass
class Row:
    """One sample's scores.

    Attributes:
        index: Row of the prompt in its dataset.
        member: 0..K-1.
        group_id: Identity of the prompt: rows with the same prompt are one unit of the bootstrap.
        prompt: The text.
        scores: Reward to score, None where scoring failed; picture statistics beside them.
    """

    index: int
    member: int
    group_id: int
    prompt: str
    scores: dict[str, float | None] = field(default_factory=dict)


def build_processor(config: Arguments, comm: Comm) -> RewardProcessor:
    """The models of `eval_rewards`, or of `rewards` where there are none.

    Raises:
        InputError: If there are no rewards, or they cannot judge the model's output.
    """
    from flow_factory.models.registry import get_adapter_class

    section = config.eval_reward_args or config.reward_args
    if not len(section):
        raise InputError(
            "there is nothing to score with: the configuration has neither eval_rewards nor rewards. Add one, for "
            "example 'eval_rewards={reward_model: brightness}'."
        )
    sources = [source.name for source in config.data_args.sources()]
    check_rewards(section, sources)
    check_sample_class(section, get_adapter_class(config.model_args.model_type).sample_class)
    return RewardProcessor(section, comm, str(comm.device), sources=sources)


def run_benchmark(
    config: Arguments,
    model: InferenceModel,
    processor: RewardProcessor,
    plan: BenchmarkPlan,
    comm: Comm,
    advance: Callable[[int], None] = lambda count: None,
) -> dict[str, Any]:
    """Samples and scores every dataset. Called by all ranks.

    Args:
        config: `eval:` says how samples are made.
        model: With the weights of `plan.variants`.
        processor: Scores the samples.
        plan: What to evaluate.
        comm: Process group; ranks take different prompts.
        advance: Called with the number of new samples after each batch.

    Returns:
        Dataset name to its results as plain data, the same on every rank.

    Raises:
        RunError: If a reward fails for every sample.
    """
    results = {}
    for dataset in plan.datasets:
        loader = build_eval_loader(config, model.adapter, comm, dataset)
        rows: dict[Variant, list[Row]] = {}
        for variant in plan.variants:
            rows[variant] = _evaluate(config, model, processor, plan, loader, dataset.name, variant, comm, advance)
        results[dataset.name] = summarise(rows, processor.names_for(dataset.name), plan.samples_per_prompt)
    return results


def _evaluate(
    config: Arguments,
    model: InferenceModel,
    processor: RewardProcessor,
    plan: BenchmarkPlan,
    loader: EvalLoader,
    dataset: str,
    variant: Variant,
    comm: Comm,
    advance: Callable[[int], None],
) -> list[Row]:
    """All ranks' rows of one dataset under one variant, sorted by row and member."""
    rollout = setup.build_eval_plan(config, model.adapter, dataset)
    small: list[Tensor | None] = []

    def look(samples: Sequence[BaseSample]) -> None:
        frames = [sample_frames(sample) for sample in samples]
        small.extend(None if shown is None else thumbnails(shown).flatten() for shown in frames)

    scorer = PanelScorer(processor, dataset, look)
    with comm.together():
        with model.use(variant):
            for member in range(plan.samples_per_prompt):
                for samples in generate_panel(
                    model.adapter, loader, rollout, plan.seed, config.eval_args.solver, member=member
                ):
                    scorer.add(samples)
                    advance(len(samples))
        scored = scorer.finish()
    own = [
        [s.index, s.member, s.group_id, s.prompt, {**s.rewards, **extra}]
        for s, extra in zip(scored, _picture_statistics(scored, small), strict=True)
    ]
    rows = [Row(*entry) for rank in comm.gather_objects(own) for entry in rank]
    return sorted(rows, key=lambda row: (row.index, row.member))


def _picture_statistics(scored: Sequence[Scored], small: Sequence[Tensor | None]) -> list[dict[str, float]]:
    """Brightness and the like of each sample, and the diversity of its prompt's samples; empty without pictures.

    All samples of a prompt are on one rank.

    Args:
        scored: The samples.
        small: Their thumbnails; None for a sample without pictures.
    """
    columns = columns_by_name(statistics_of(scored))
    found = [{f"picture/{name}": values[number] for name, values in columns.items()} for number in range(len(scored))]
    groups: dict[int, list[tuple[int, Tensor]]] = defaultdict(list)
    for number, (sample, shown) in enumerate(zip(scored, small, strict=True)):
        if shown is not None:
            groups[sample.index].append((number, shown))
    for members in groups.values():
        if len(members) > 1:
            diversity = group_diversity(
                torch.stack([shown for _, shown in members])
            )  # as the monitor of a run measures
            for number, _ in members:
                found[number]["picture/diversity"] = diversity
    return found


def summarise(rows: Mapping[Variant, Sequence[Row]], rewards: Sequence[str], samples_per_prompt: int) -> dict[str, Any]:
    """Means with intervals of each variant and, of two, of their paired differences.

    Args:
        rows: Variant to its rows, in the same order.
        rewards: Names of the rewards; the other scores are picture statistics.
        samples_per_prompt: K.

    Returns:
        Plain data for JSON.

    Raises:
        RunError: If a reward failed for every sample.
    """
    first = next(iter(rows.values()))
    names = [*rewards, *(name for name in first[0].scores if name not in rewards)]
    result: dict[str, Any] = {
        "prompts": len({row.group_id for row in first}),
        "rows": len({row.index for row in first}),
        "samples_per_prompt": samples_per_prompt,
    }
    for variant, variant_rows in rows.items():
        result[variant] = {name: _mean(variant_rows, name, name in rewards) for name in names}
    if len(rows) == 2:
        before, after = rows["base"], rows["trained"]
        result["difference"] = {name: _difference(before, after, name) for name in names}
    result["samples"] = [
        {
            "row": row.index,
            "member": row.member,
            "prompt": row.prompt,
            **{variant: variant_rows[number].scores for variant, variant_rows in rows.items()},
        }
        for number, row in enumerate(first)
    ]
    return result


def _mean(rows: Sequence[Row], name: str, is_reward: bool) -> dict[str, Any]:
    scored = [(row.scores[name], row.group_id) for row in rows if row.scores.get(name) is not None]
    if not scored:
        raise RunError(f"reward {name!r} failed on all {len(rows)} samples; see the warnings above.")
    values = [float(value) for value, _ in scored if value is not None]
    interval = bootstrap_mean(values, [group for _, group in scored])
    return {**interval.to_mapping(), **({"failed": len(rows) - len(scored)} if is_reward else {})}


def _difference(before: Sequence[Row], after: Sequence[Row], name: str) -> dict[str, Any] | None:
    """Trained minus base over the samples that both scored; None if there are none."""
    values, units = [], []
    for a, b in zip(before, after, strict=True):
        old, new = a.scores.get(name), b.scores.get(name)
        if old is not None and new is not None:
            values.append(new - old)
            units.append(a.group_id)
    interval: Interval | None = bootstrap_mean(values, units) if values else None
    return None if interval is None else interval.to_mapping()
