"""The stored examples of a run, checked against its trainer, model and batch sizes before any model is loaded."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flow_factory.contracts import SoundFormat
from flow_factory.data_utils.buckets import Size, assign_buckets, bucket_sizes
from flow_factory.data_utils.offline_files import OfflineExample, OfflineScan, raise_problems, scan_offline_dataset
from flow_factory.data_utils.video_files import SILENCE
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, DatasetTrainSpec, OfflineFlowMatchingTrainingArguments, Problem
from flow_factory.hparams.local_model import local_folder

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments

# 24000/1001 frames a second pass for 24.
_RATE_TOLERANCE = 0.002
_TRAINER_FOR = {"demonstration": "sft", "preference": "offline-dpo"}


@dataclass(frozen=True)
class OfflineEntry:
    """One visit of an epoch to an example.

    Attributes:
        example: The example.
        repeat: Which of the visits that the dataset's weight gives it, from 0.
        size: Height and width that its pictures are trained at.
        frames: Frames of its videos that are trained on, the first ones; None for pictures.
        sound: What the sound of its videos is brought to; None for a model that makes none.
    """

    example: OfflineExample
    repeat: int
    size: Size
    frames: int | None = None
    sound: SoundFormat | None = None


@dataclass(frozen=True)
class OfflinePlan:
    """What an epoch consists of.

    Attributes:
        entries: The visits, in file order; an epoch shuffles them.
        buckets: Training size to the positions of its entries.
        batch: B, examples per rank and batch.
        world_size: W, ranks.
        accumulation_steps: Batches per optimizer step.
        files: The files read, for messages.
    """

    entries: tuple[OfflineEntry, ...]
    buckets: dict[Size, tuple[int, ...]]
    batch: int
    world_size: int
    accumulation_steps: int
    files: tuple[str, ...]

    @property
    def global_batch(self) -> int:
        """W B, examples of one batch over all ranks."""
        return self.batch * self.world_size

    @property
    def batches_per_epoch(self) -> int:
        """Batches of each rank in an epoch. Of each bucket, what does not fill a global batch is left out."""
        return sum(len(positions) // self.global_batch for positions in self.buckets.values())

    @property
    def updates_per_epoch(self) -> int:
        """Optimizer steps of an epoch."""
        return self.batches_per_epoch // self.accumulation_steps

    @property
    def left_out(self) -> int:
        """Visits that each epoch leaves out, others each time: those that fill no global batch."""
        return len(self.entries) - self.batches_per_epoch * self.global_batch

    def describe(self) -> list[str]:
        """Lines for people."""
        examples = len({entry.example.example_id for entry in self.entries})
        left_out = f", {self.left_out} left out of each epoch (no full batch)" if self.left_out else ""
        lines = [
            f"stored examples: {examples} from {', '.join(self.files)}",
            f"epoch: {len(self.entries)} visits in {self.batches_per_epoch} batches of {self.batch} on each of "
            f"{self.world_size} processes{left_out}; {self.updates_per_epoch} optimizer steps",
        ]
        changed = sum(e.example.size is not None and e.example.size != e.size and e.repeat == 0 for e in self.entries)
        sizes = ", ".join(f"{h} x {w}: {len(rows)}" for (h, w), rows in self.buckets.items())
        lines.append(f"sizes (height x width): {sizes}; {changed} of {examples} are scaled or cut to them")
        return lines


def plan_offline_data(config: Arguments) -> OfflinePlan:
    """Reads and checks the stored examples of a run. The same on every rank; needs no model and no torch.

    Raises:
        InputError: Naming file, line and field of what is wrong, for all records at once.
    """
    arguments = config.training_args
    assert isinstance(arguments, OfflineFlowMatchingTrainingArguments), "settled by the execution contract"
    scans, visits, problems = [], [], []
    for source in config.data_args.train_sources():
        spec = source.train or DatasetTrainSpec()
        scan = scan_offline_dataset(source, spec.split, io=config.spec.io, max_size=spec.max_dataset_size)
        wrong_type = _wrong_type(scan, arguments)
        # Of records of the wrong type nothing else matters.
        problems += [wrong_type] if wrong_type else scan.problems
        scans.append(scan)
        visits += [(example, repeat) for example in scan.examples for repeat in range(spec.weight)]
    frames, sound = _frames(config), _sound(config)
    problems += [problem for scan in scans for problem in unfit_examples(config, scan)]
    raise_problems(problems)
    if not visits:
        raise InputError("data.datasets: no dataset is enabled for training; enable at least one.")

    global_batch = arguments.per_device_batch_size * config.num_processes
    files = tuple(str(scan.path) for scan in scans)
    if len(visits) < global_batch:
        raise _config_error(
            config,
            ("train", "per_device_batch_size"),
            f"{arguments.per_device_batch_size} x num_processes {config.num_processes} is a global batch of "
            f"{global_batch}, more than the {len(visits)} stored examples of {' and '.join(files)}; lower the batch "
            f"size or add examples.",
        )
    sizes = _training_sizes(config, arguments, [example for example, _ in visits], global_batch)
    entries = tuple(
        OfflineEntry(example, repeat, size, frames, sound)
        for (example, repeat), size in zip(visits, sizes, strict=True)
    )
    buckets: dict[Size, list[int]] = {}
    for position, entry in enumerate(entries):
        buckets.setdefault(entry.size, []).append(position)
    plan = OfflinePlan(
        entries=entries,
        buckets={size: tuple(buckets[size]) for size in sorted(buckets)},
        batch=arguments.per_device_batch_size,
        world_size=config.num_processes,
        accumulation_steps=int(arguments.gradient_accumulation_steps),
        files=files,
    )
    _check_accumulation(config, plan)
    return plan


def _wrong_type(scan: OfflineScan, arguments: OfflineFlowMatchingTrainingArguments) -> str | None:
    if scan.supervision in (None, arguments.supervision):
        return None
    return (
        f"{scan.path}: holds {scan.supervision}s, but trainer {arguments.trainer_type!r} learns from "
        f"{arguments.supervision}s; use train.trainer_type: {_TRAINER_FOR[scan.supervision]}, or another dataset."
    )


def unfit_examples(config: Arguments, scan: OfflineScan) -> list[str]:
    """What is wrong with good records for this configuration: videos too short, sounds that do not go with them."""
    return [*_too_short(scan, _frames(config)), *_unfit_sounds(scan, _sound(config))]


def _frames(config: Arguments) -> int | None:
    return getattr(config.train_generation, "num_frames", None)


def _sound(config: Arguments) -> SoundFormat | None:
    if config.spec.sound is None:
        return None
    return config.spec.sound(config.train_generation, local_folder(config.model_args.model_name_or_path))


def _too_short(scan: OfflineScan, frames: int | None) -> Iterator[str]:
    """Videos with fewer frames than training takes of each."""
    if frames is None:
        return
    for example in scan.examples:
        if example.frames is not None and example.frames < frames:
            yield (
                f"{example.place}: a video has {example.frames} frames, but train.num_frames is {frames}; remove the "
                f"record, or lower train.num_frames."
            )


def _unfit_sounds(scan: OfflineScan, sound: SoundFormat | None) -> Iterator[str]:
    """Videos whose sound does not last for the frames that training takes, or would not go with them."""
    if sound is None:
        return
    for example in scan.examples:
        for track in example.soundtracks:
            if abs(track.frame_rate / sound.frame_rate - 1) > _RATE_TOLERANCE:
                yield (
                    f"{example.place}: a video has {track.frame_rate:g} frames a second, but the model makes "
                    f"{sound.frame_rate:g}, with which its sound would not go; bring the video to that rate, or remove "
                    f"the record."
                )
            elif track.missing(sound.seconds) > SILENCE:
                yield (
                    f"{example.place}: a video has sound from {track.start:.2f} to {track.end:.2f} seconds, but "
                    f"training takes the first {sound.seconds:.2f}; remove the record, or lower train.num_frames."
                )


def _training_sizes(
    config: Arguments,
    arguments: OfflineFlowMatchingTrainingArguments,
    examples: list[OfflineExample],
    global_batch: int,
) -> list[Size]:
    height, width = arguments.resolution
    resolution = (height, width)
    if arguments.image_sizing == "crop":
        return [resolution] * len(examples)
    multiple = config.spec.size_multiple(local_folder(config.model_args.model_name_or_path))
    pictures = [example.size or resolution for example in examples]
    return assign_buckets(pictures, bucket_sizes(resolution, multiple), smallest=global_batch)


def _check_accumulation(config: Arguments, plan: OfflinePlan) -> None:
    batches, steps = plan.batches_per_epoch, plan.accumulation_steps
    if batches % steps == 0:
        return
    near = [n for n in range(1, batches + 1) if batches % n == 0]
    fewer = batches // steps * steps * plan.global_batch
    # Of one dataset visited once per epoch in one size, examples are visits and any number of them can be left out.
    plain = len(plan.files) == len(plan.buckets) == 1 and all(entry.repeat == 0 for entry in plan.entries)
    instead = f", or data.max_dataset_size: {fewer}" if fewer and plain else ""
    raise _config_error(
        config,
        ("train", "gradient_accumulation_steps"),
        f"{steps} does not divide the {batches} batches that a rank has in an epoch ({len(plan.entries)} visits to "
        f"examples of {' and '.join(plan.files)} in global batches of {plan.global_batch}), and no window is left "
        f"unfinished; use one of {_listed(near)}{instead}.",
    )


def _config_error(config: Arguments, path: tuple[str, ...], message: str) -> ConfigError:
    return ConfigError([Problem(path, message, config.origins.place(path))])


def _listed(numbers: list[int], limit: int = 12) -> str:
    shown = numbers if len(numbers) <= limit else [*numbers[: limit - 1], numbers[-1]]
    return ", ".join(map(str, shown))
