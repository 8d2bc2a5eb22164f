"""Where prompts come from and how they are drawn."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import NonNegativeFloat, NonNegativeInt, PositiveInt, Resolution, Section, option

SamplerName = Literal[
    "auto",
    "distributed_k_repeat",
    "group_contiguous",
    "group_distributed",
    "global_random",
    "rank_local",
    "global_batch",
    "contiguous_shard",
]
CanonicalSampler = Literal["distributed_k_repeat", "group_contiguous", "group_distributed", "contiguous_shard"]
SAMPLER_ALIASES: dict[str, CanonicalSampler] = {
    "global_random": "distributed_k_repeat",
    "rank_local": "group_contiguous",
    "global_batch": "group_distributed",
    "distributed_k_repeat": "distributed_k_repeat",
    "group_contiguous": "group_contiguous",
    "group_distributed": "group_distributed",
    "contiguous_shard": "contiguous_shard",
}


@dataclass
class DatasetTrainSpec(Section):
    """How one dataset takes part in training."""

    enabled: bool = option(True, "Whether this dataset is trained on.")
    split: str = option("train", "File to read: `<dataset_dir>/<split>.txt` or `<split>.jsonl`.")
    weight: PositiveInt = option(
        1,
        "Integer share of the cycle's prompts, relative to the other datasets' weights. Of stored examples: how often "
        "an epoch visits each.",
    )
    max_dataset_size: PositiveInt | None = option(None, "Use only the first so many prompts; null: all.")
    unique_sample_num_per_epoch: PositiveInt | None = option(
        None, "Prompts of this dataset per cycle. Give it for all datasets (weights are then ignored) or for none."
    )
    num_batches_per_epoch: PositiveInt | None = option(
        None, "Batches of this dataset per cycle; derived. If given, it is checked against the derived number."
    )


@dataclass
class DatasetEvalSpec(Section):
    """How one dataset takes part in evaluation."""

    enabled: bool = option(True, "Whether this dataset is evaluated.")
    split: str = option("test", "File to read: `<dataset_dir>/<split>.txt` or `<split>.jsonl`.")
    max_dataset_size: PositiveInt | None = option(None, "Use only the first so many prompts; null: all.")
    resolution: Resolution | None = option(None, "Height and width; null: that of `eval:`.")
    num_inference_steps: PositiveInt | None = option(None, "Steps; null: that of `eval:`.")
    guidance_scale: NonNegativeFloat | None = option(None, "Guidance; null: that of `eval:`.")


@dataclass
class DatasetArguments(Section):
    """One dataset of several."""

    name: str = option("default", "Name that rewards refer to (`applicable_datasets`, `weight`). Unique.")
    dataset_dir: str = option("data", "Folder with the split files, or `builtin/<name>`.")
    image_dir: str | None = option(None, "Folder of condition images; null: `<dataset_dir>/images`.")
    video_dir: str | None = option(None, "Folder of condition videos; null: `<dataset_dir>/videos`.")
    audio_dir: str | None = option(None, "Folder of condition audio; null: `<dataset_dir>/audios`.")
    train: DatasetTrainSpec | None = option(None, "Part in training; null: the defaults.")
    eval: DatasetEvalSpec | None = option(None, "Part in evaluation; null: split `test` if that file exists.")
    source_id: NonNegativeInt | None = option(None, "64-bit id of the source; null: the position in the list.")


@dataclass
class DataArguments(Section):
    """The `data:` section."""

    dataset_dir: str = option("data", "Folder with `train.txt|jsonl` and `test.txt|jsonl`, or `builtin/<name>`.")
    cache_dir: str = option("~/.cache/flow_factory/datasets", "Where encoded prompts and media are kept between runs.")
    image_dir: str | None = option(None, "Folder of condition images; null: `<dataset_dir>/images`.")
    video_dir: str | None = option(None, "Folder of condition videos; null: `<dataset_dir>/videos`.")
    audio_dir: str | None = option(None, "Folder of condition audio; null: `<dataset_dir>/audios`.")
    preprocessing_batch_size: PositiveInt = option(8, "Prompts encoded together.")
    dataloader_num_workers: NonNegativeInt = option(0, "Worker processes that read data; 0 reads in the main process.")
    enable_preprocess: bool = option(True, "Encode all prompts before training; false encodes each on first use.")
    force_reprocess: bool = option(False, "Encode again even if the cache has the same content.")
    max_dataset_size: PositiveInt | None = option(None, "Use only the first so many prompts; null: all.")
    preprocess_parallelism: Literal["global", "local"] = option(
        "local", "global: ranks of all machines share the encoding; local: each machine encodes for itself."
    )
    sampler_type: SamplerName = option(
        "auto",
        "How a cycle's groups are dealt to ranks. distributed_k_repeat (global_random): samples shuffled over all "
        "ranks; group_contiguous (rank_local): a group stays on one rank; group_distributed (global_batch): every "
        "rank draws the same prompts; contiguous_shard: groups in order, cut into one "
        "piece per rank. auto: group_contiguous where it fits, else distributed_k_repeat.",
    )
    datasets: list[DatasetArguments] | None = option(None, "Several weighted datasets, instead of `dataset_dir`.")

    def __post_init__(self) -> None:
        names = [dataset.name for dataset in self.datasets or []]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FieldError("datasets", f"the dataset name {twice[0]!r} is used twice; give each its own `name`.")
        if self.datasets is not None and not self.datasets:
            raise FieldError("datasets", "is an empty list; list at least one dataset, or remove it.")
        if self.datasets and self.dataset_dir != DataArguments.dataset_dir:
            raise FieldError(
                "dataset_dir", "has no effect beside `datasets:`; give each dataset its own dataset_dir, or remove one."
            )

    def sources(self) -> list[DatasetArguments]:
        """All datasets with ids and inherited fields filled in; the single-folder form is a dataset named `default`."""
        if self.datasets is None:
            single = DatasetArguments(dataset_dir=self.dataset_dir)
            given = [single]
        else:
            given = self.datasets
        filled = []
        for index, dataset in enumerate(given):
            train = dataset.train or DatasetTrainSpec()
            if train.max_dataset_size is None:
                train = dataclasses.replace(train, max_dataset_size=self.max_dataset_size)
            filled.append(
                dataclasses.replace(
                    dataset,
                    train=train,
                    image_dir=dataset.image_dir or self.image_dir,
                    video_dir=dataset.video_dir or self.video_dir,
                    audio_dir=dataset.audio_dir or self.audio_dir,
                    source_id=index if dataset.source_id is None else dataset.source_id,
                )
            )
        return filled

    def evaluations(self) -> dict[int, DatasetEvalSpec]:
        """What listed datasets say of their own evaluation, by position in `datasets`."""
        listed = enumerate(self.datasets or [])
        return {index: dataset.eval for index, dataset in listed if dataset.eval is not None and dataset.eval.enabled}

    def train_sources(self) -> list[DatasetArguments]:
        """The datasets that are trained on."""
        return [dataset for dataset in self.sources() if dataset.train is not None and dataset.train.enabled]
