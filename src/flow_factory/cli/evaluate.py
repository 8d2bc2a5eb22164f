"""`flow-factory eval`: rewards on datasets, with confidence intervals."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.outputs import Force, choose_file
from flow_factory.cli.sources import Averaged, Checkpoint, Overrides, Source, SourcePath, check_model, open_source

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments, DatasetArguments
    from flow_factory.hparams.reward_args import MultiRewardArguments
    from flow_factory.trainers.inference import Variant

_FORMAT = "flow-factory evaluation"
_PICTURE = "picture/"  # how picture statistics are named beside the rewards


@guarded
def evaluate(
    source: SourcePath,
    overrides: Overrides = None,
    dataset: Annotated[
        str | None,
        typer.Option("--dataset", metavar="NAME", help="One dataset; all that are evaluated.", show_default=False),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", metavar="S", help="File of the dataset; that of its eval part.", show_default=False),
    ] = None,
    checkpoint: Checkpoint = None,
    ema: Averaged = None,
    samples_per_prompt: Annotated[
        int, typer.Option("--samples-per-prompt", min=1, metavar="K", help="Samples of each prompt.")
    ] = 1,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the noise; that of evaluations.", show_default=False)
    ] = None,
    compare: Annotated[
        bool,
        typer.Option(
            "--compare", help="The base model too, from the same noise, and the difference.", show_default=False
        ),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="FILE", help="JSON file to write; eval-<name>.json.", show_default=False),
    ] = None,
    force: Force = False,
    debug: DebugOption = False,
) -> None:
    """Score a run, or the base model of a configuration, on its evaluation sets, with 95 % confidence intervals.

    Samples are made as evaluations in training make them and scored with eval_rewards (or rewards). Intervals are a
    bootstrap over prompts. With several samples per prompt their diversity is measured, too.
    """
    from flow_factory.errors import InputError

    opened = open_source(source, overrides, checkpoint, ema, evaluates=True)
    if compare and opened.trained is None:
        raise InputError(
            f"{source!r} has no trained weights to compare with; give the folder of a run, or model.resume_path=PATH."
        )
    check_model(opened.config)
    _check_secrets(opened.config)
    datasets = choose_datasets(opened.config, dataset, split)
    place = functools.partial(choose_file, output, f"eval-{opened.name}.json", _FORMAT, force)
    place()  # a mistake in it is known before anything is sampled
    variants: tuple[Variant, ...] = (
        ("base", "trained") if compare else ("base" if opened.trained is None else "trained",)
    )
    _run(opened, datasets, samples_per_prompt, opened.config.eval_seed if seed is None else seed, variants, place)


def choose_datasets(config: Arguments, name: str | None, split: str | None) -> list[DatasetArguments]:
    """The datasets to evaluate, their files read once so that a mistake in them is known now.

    Raises:
        InputError: If there are none, a name or split is unknown, or no reward applies to one of them.
    """
    from flow_factory.data_utils.prompt_files import find_prompt_file, has_split, read_prompts
    from flow_factory.errors import InputError
    from flow_factory.hparams import DatasetEvalSpec

    sources = config.data_args.sources()
    if name is not None and name not in [s.name for s in sources]:
        raise InputError(f"--dataset {name!r}: the datasets are {', '.join(s.name for s in sources)}.")
    chosen = []
    for source in sources:
        spec = source.eval or DatasetEvalSpec()
        wanted = source.name == name or (name is None and spec.enabled)
        asked_for = source.eval is not None or name is not None or split is not None
        if not wanted or not (asked_for or has_split(source.dataset_dir, spec.split)):
            continue
        spec = dataclasses.replace(spec, split=split or spec.split, enabled=True)
        if not read_prompts(find_prompt_file(source.dataset_dir, spec.split), config.spec.io):
            raise InputError(f"dataset {source.name!r} has no prompts in its split {spec.split!r}.")
        section, field = _scoring(config)
        if len(section) and not any(reward.applies_to(source.name) for reward in section.reward_configs):
            raise InputError(
                f"no reward applies to the dataset {source.name!r}, so its samples would get no score. Add it to "
                f"{field}[i].applicable_datasets (and .weight, if that names datasets), or evaluate others with "
                f"--dataset NAME."
            )
        chosen.append(dataclasses.replace(source, eval=spec))
    if not chosen:
        raise InputError(
            "there is no dataset to evaluate: none has a test split, or all have eval.enabled: false. Name one with "
            "--dataset NAME, or another file of it with --split S."
        )
    return chosen


def _scoring(config: Arguments) -> tuple[MultiRewardArguments, str]:
    """The rewards that score evaluations, and the name of their section."""
    if config.eval_reward_args:
        return config.eval_reward_args, "eval_rewards"
    return config.reward_args, "rewards"


def _check_secrets(config: Arguments) -> None:
    """A run's config.yaml keeps no keys; a reward that needs one gets it on the command line.

    Raises:
        InputError: Naming the field.
    """
    from flow_factory.checkpoints.redaction import REDACTED
    from flow_factory.errors import InputError

    section, field = _scoring(config)
    for index, reward in enumerate(section.reward_configs):
        for place, value in _leaves(reward.params, f"{field}[{index}].params"):
            if value == REDACTED:
                raise InputError(f"{place} is not kept in the run's config.yaml; give it again: {place}=...")


def _leaves(value: Any, place: str) -> Iterator[tuple[str, Any]]:
    """Everything in nested mappings and lists with its place as an override names it: `params.servers[0].token`."""
    if isinstance(value, Mapping):
        for key, item in value.items():
            yield from _leaves(item, f"{place}.{key}")
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from _leaves(item, f"{place}[{index}]")
    else:
        yield place, value


def _run(
    opened: Source,
    datasets: list[DatasetArguments],
    samples_per_prompt: int,
    seed: int,
    variants: tuple[Variant, ...],
    place: Callable[[], Path],
) -> None:
    import json
    import os

    if os.environ.get("RANK", "0") == "0":  # said at once: what follows imports torch and loads a model
        typer.echo(f"weights: {opened.describe(variants)}")

    from flow_factory.checkpoints.atomic import atomic_write_text
    from flow_factory.cli.progress import counting
    from flow_factory.trainers import setup
    from flow_factory.trainers.benchmark import METHOD, BenchmarkPlan, build_processor, run_benchmark
    from flow_factory.trainers.inference import build_inference_model

    config = opened.config
    comm = setup.build_comm(setup.build_accelerator(config))
    processor = build_processor(config, comm)
    if config.num_processes > 1 and comm.world_size == 1:
        typer.echo(
            "in one process; the results are those of several (torchrun --nproc_per_node N -m flow_factory eval)"
        )
    plan = BenchmarkPlan(tuple(datasets), samples_per_prompt, seed, variants)
    try:
        model = build_inference_model(config, comm, opened.trained, variants)
        with counting("eval", _count(config, plan), _unit(config)) as advance:
            results = run_benchmark(config, model, processor, plan, comm, lambda n: advance(n * comm.world_size))
    finally:
        processor.close()
    if not comm.is_main:
        return
    record: dict[str, Any] = {
        "format": _FORMAT,
        "format_version": 1,
        "name": opened.name,
        "model": config.model_args.model_name_or_path,
        "trained_weights": None if opened.trained is None else str(opened.trained),
        "seed": seed,
        "solver": config.eval_args.solver,
        "intervals": METHOD,
        "datasets": {d.name: {"split": d.eval.split if d.eval else None, **results[d.name]} for d in datasets},
    }
    _print_tables(record["datasets"], variants, _unit(config))
    typer.echo(f"intervals: {METHOD}")
    target = place()  # once more: that was minutes ago, and what has come there since stays
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_text(target, json.dumps(record, indent=1, ensure_ascii=False) + "\n")
    typer.echo(f"wrote {target}")


def _unit(config: Arguments) -> str:
    from flow_factory.contracts import Modality

    return "videos" if Modality.VIDEO in config.spec.io.outputs else "pictures"


def _count(config: Arguments, plan: Any) -> int:
    from flow_factory.data_utils.prompt_files import find_prompt_file, read_prompts

    prompts = 0
    for dataset in plan.datasets:
        rows = len(read_prompts(find_prompt_file(dataset.dataset_dir, dataset.eval.split), config.spec.io))
        prompts += min(rows, dataset.eval.max_dataset_size or rows)
    return prompts * plan.samples_per_prompt * len(plan.variants)


def _print_tables(datasets: dict[str, Any], variants: tuple[Variant, ...], unit: str) -> None:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = [*variants, *(["difference"] if len(variants) > 1 else [])]
    for name, result in datasets.items():
        per_prompt = result["samples_per_prompt"]
        samples = f", {per_prompt} samples each" if per_prompt > 1 else ""
        typer.echo(f"\n{name} ({result['split']}): {result['prompts']} prompts{samples}; mean and 95 % interval")
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        table.add_column("", no_wrap=True)
        for column in columns:
            table.add_column(column, justify="right", no_wrap=True)
        metrics = list(result[columns[0]])
        rewards = [metric for metric in metrics if not metric.startswith(_PICTURE)]
        for metric in metrics:
            if metric.startswith(_PICTURE) and metric == metrics[len(rewards)]:
                table.add_row(f"[dim]in the {unit}[/]")
            cells = [_cell(result[column][metric], column == "difference", len(columns) > 1) for column in columns]
            table.add_row(metric.removeprefix(_PICTURE), *cells, end_section=metric == rewards[-1])
        Console().print(table)
        for metric in rewards:
            count = max(result[variant][metric]["failed"] for variant in variants)
            if count:
                typer.echo(f"{metric}: scoring failed on {count} samples, which are left out", err=True)


def _cell(entry: dict[str, Any] | None, signed: bool, stacked: bool) -> str:
    if entry is None:
        return "-"
    sign = "+" if signed else ""
    text = f"{entry['mean']:{sign}.4f}"
    if entry["low"] is None:
        return text
    return f"{text}{chr(10) if stacked else ' '}\\[{entry['low']:{sign}.3f}, {entry['high']:{sign}.3f}]"
