"""Batches of stored examples: decoded pictures of one size with their encoded conditions.

Pictures are decoded when their batch is made, in the loader's workers if there are any, and encoded by the model's VAE
when the batch is trained on. Conditions come from the cache and are joined in the training process: a worker would keep
decoded rows of its own, and every tensor that it hands over costs about a millisecond.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset, DistributedSampler, Sampler

from flow_factory.contracts import Modality
from flow_factory.data_utils.conditions import Adapter, ConditionSource, build_conditions
from flow_factory.data_utils.loaders import BatchLoader
from flow_factory.data_utils.media_files import read_soundtrack, read_video
from flow_factory.data_utils.offline_media import Size, fit_image, read_image
from flow_factory.data_utils.offline_plan import OfflineEntry, OfflinePlan
from flow_factory.data_utils.prompt_dataset import PromptRecord
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.samples import Audio, Condition, VideosWithSound, VideoWithSound
from flow_factory.samples.noise import Purpose, derive_seed

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments

StoredMedia = Tensor | VideosWithSound
"""The media of a batch's rows: uint8 [B, C, H, W] for pictures, [B, F, C, H, W] for videos, or videos with sound."""


@dataclass(frozen=True)
class OfflineBatch:
    """B stored examples of one size.

    Attributes:
        entries: The visit that each row is.
        media: "target", or "chosen" and "rejected", to the media of all rows.
        condition: Their conditions, collated, batch B, on CPU. Not to be modified.
    """

    entries: tuple[OfflineEntry, ...]
    media: dict[str, StoredMedia]
    condition: Condition

    def __len__(self) -> int:
        return len(self.entries)


@dataclass(frozen=True)
class BadPicture:
    """What a worker hands over in the place of pictures: raised there, torch would wrap the error in a traceback.

    Attributes:
        message: The file, the line of its record, and what is wrong.
    """

    message: str


class PictureBatches(Dataset[tuple[Sequence[int], "dict[str, StoredMedia] | BadPicture"]]):
    """Decodes the pictures of a list of positions; runs in the loader's workers if there are any.

    Args:
        entries: The visits of an epoch.
    """

    def __init__(self, entries: Sequence[OfflineEntry]) -> None:
        self.entries = entries

    def __len__(self) -> int:
        return len(self.entries)

    def __getitem__(self, positions: Sequence[int]) -> tuple[Sequence[int], dict[str, StoredMedia] | BadPicture]:
        """The positions, and the stacked media of each arm, or why one of them cannot be decoded."""
        entries = [self.entries[position] for position in positions]
        # One tensor for an arm: each is handed over by a file descriptor of its own.
        arms = entries[0].example.arms
        try:
            return positions, {arm: _stacked([load_medium(entry, arm) for entry in entries]) for arm in arms}
        except InputError as error:
            return positions, BadPicture(str(error))


def load_medium(entry: OfflineEntry, arm: str) -> Tensor | VideoWithSound:
    """The picture of an arm at its training size, uint8 [3, H, W], or its video's first frames, [F, 3, H, W].

    A model that makes videos with their sound gets these frames with theirs.

    Raises:
        InputError: If it cannot be decoded, or has fewer frames or less sound than its header says.
    """
    (file,) = entry.example.arms[arm]
    place = entry.example.place
    if file.modality is not Modality.VIDEO:
        return _fitted(read_image(file.path, place), entry.size)
    frames = read_video(file.path, entry.frames, place).frames
    if entry.frames is not None and len(frames) < entry.frames:
        raise InputError(
            f"{place}: {file.path} ends after {len(frames)} of {entry.frames} frames; replace the file or remove its "
            f"record."
        )
    pictures = [Image.fromarray(frame.permute(1, 2, 0).contiguous().numpy()) for frame in frames]
    video = torch.stack([_fitted(picture, entry.size) for picture in pictures])
    return video if entry.sound is None else VideoWithSound(video, read_soundtrack(file.path, entry.sound, place))


def blank_medium(entry: OfflineEntry) -> Tensor | VideoWithSound:
    """What `load_medium` gives, in shape, without a file."""
    frames = () if entry.frames is None else (entry.frames,)
    visible = torch.zeros(*frames, 3, *entry.size, dtype=torch.uint8)
    if entry.sound is None:
        return visible
    silence = torch.zeros(entry.sound.channels, entry.sound.samples)
    return VideoWithSound(visible, Audio(silence, entry.sound.sample_rate))


def _stacked(media: Sequence[Tensor | VideoWithSound]) -> StoredMedia:
    videos = [medium for medium in media if isinstance(medium, VideoWithSound)]
    return VideosWithSound.stack(videos) if videos else torch.stack([m for m in media if isinstance(m, Tensor)])


def _fitted(image: Image.Image, size: Size) -> Tensor:
    return torch.from_numpy(np.array(fit_image(image, size))).permute(2, 0, 1)


class BucketBatchSampler(Sampler[list[int]]):
    """The batches of one rank in an epoch, each of one bucket; slot i has the same bucket on every rank.

    Each bucket is shuffled and dealt to the ranks by a `DistributedSampler` of its own, which drops what is left over
    (`drop_last`); the rank's share is cut into batches, and the last short one is dropped too. So all ranks have
    equally many batches, and batch i of all ranks together is a run of W B examples of the bucket's shuffled order.

    Args:
        buckets: Positions of each bucket's entries.
        batch_size: B.
        rank: This rank.
        world_size: W.
        seed: Run seed.
    """

    def __init__(
        self, buckets: Sequence[Sequence[int]], batch_size: int, *, rank: int = 0, world_size: int = 1, seed: int = 0
    ) -> None:
        self.batch_size = batch_size
        self.seed = seed
        self.epoch = 0
        self._skipped = 0
        self._buckets = buckets
        self._samplers = [
            DistributedSampler(
                bucket,  # type: ignore[arg-type]  # only its length is used
                num_replicas=world_size,
                rank=rank,
                shuffle=True,
                seed=derive_seed(seed, Purpose.DATA, group_id=number) >> 1,  # the sampler adds the epoch to it
                drop_last=True,
            )
            for number, bucket in enumerate(buckets)
        ]

    def set_epoch(self, epoch: int) -> None:
        """Chooses the order of the next iteration; any order of epochs is allowed."""
        self.epoch = epoch
        for sampler in self._samplers:
            sampler.set_epoch(epoch)

    def skip(self, batches: int) -> None:
        """Leaves out the first batches of the next iteration, to go on inside an epoch."""
        self._skipped = batches

    def __len__(self) -> int:
        return sum(len(sampler) // self.batch_size for sampler in self._samplers)

    def __iter__(self) -> Iterator[list[int]]:
        batches = self._batches()
        skipped, self._skipped = self._skipped, 0
        return iter(batches[skipped:])

    def _batches(self) -> list[list[int]]:
        queues = []
        for bucket, sampler in zip(self._buckets, self._samplers, strict=True):
            share = [bucket[index] for index in sampler]
            full = len(share) // self.batch_size * self.batch_size
            queues.append([share[i : i + self.batch_size] for i in range(0, full, self.batch_size)])
        slots = [number for number, queue in enumerate(queues) for _ in queue]
        if len(queues) > 1:
            random.Random(derive_seed(self.seed, Purpose.SHUFFLE, cycle=self.epoch)).shuffle(slots)
        waiting = [iter(queue) for queue in queues]
        return [next(waiting[number]) for number in slots]


class OfflineLoader(BatchLoader):
    """An epoch of `OfflineBatch` per iteration: call `sampler.set_epoch`, then iterate.

    A picture that cannot be decoded raises an InputError with its file and the line of its record.

    Args:
        entries: The visits of an epoch.
        conditions: Where conditions come from.
        sampler: The batches of each epoch.
        num_workers: Worker processes that decode pictures.
    """

    def __init__(
        self,
        entries: Sequence[OfflineEntry],
        conditions: ConditionSource,
        sampler: BucketBatchSampler,
        *,
        num_workers: int = 0,
    ) -> None:
        self.entries = entries
        self.batches = sampler
        super().__init__(PictureBatches(entries), sampler, conditions, num_workers=num_workers, seed=sampler.seed)

    def __len__(self) -> int:
        return len(self.batches)

    def __iter__(self) -> Iterator[OfflineBatch]:
        return itertools.starmap(self._join, super().__iter__())

    def batch(self, positions: Sequence[int]) -> OfflineBatch:
        """The batch of these positions, made in this process.

        Raises:
            InputError: If a picture cannot be decoded, with the file and the line of its record.
        """
        return self._join(*self.dataset[positions])  # type: ignore[index]  # positions are the dataset's indices

    def skip_batches(self, count: int) -> None:
        """Leaves out the first batches of the next iteration without making them."""
        self.batches.skip(count)

    def _join(self, positions: Sequence[int], media: dict[str, StoredMedia] | BadPicture) -> OfflineBatch:
        if isinstance(media, BadPicture):
            raise InputError(media.message)
        entries = tuple(self.entries[position] for position in positions)
        prompts = self.conditions.batch([entry.example.record for entry in entries], [0] * len(entries))
        return OfflineBatch(entries, media, prompts.condition)


def build_offline_train_dataloader(
    config: Arguments, adapter: Adapter, comm: Comm, plan: OfflinePlan
) -> tuple[OfflineLoader, dict[str, Any]]:
    """The training loader over stored examples, with all conditions encoded first. Called by all ranks.

    Args:
        config: The run's configuration.
        adapter: The model; its encoders are used.
        comm: This rank's view of the process group.
        plan: The examples, as `plan_offline_data` read and checked them.

    Returns:
        The loader, and an empty mapping in the place of loaders per dataset, which stored examples have none of.

    Raises:
        RunError: If another rank fails.
    """
    records = [entry.example.record for entry in plan.entries if entry.repeat == 0]
    # Losses on stored examples are never guided, so no negative conditions are needed.
    sizes = {(e.example.record.source_id, e.example.record.index): e.size for e in plan.entries}

    def size_of(record: PromptRecord) -> tuple[int, int]:
        return sizes[record.source_id, record.index]

    conditions = build_conditions(config, adapter, comm, [records], False, config.train_generation, size_of)
    sampler = BucketBatchSampler(
        list(plan.buckets.values()),
        plan.batch,
        rank=comm.rank,
        world_size=comm.world_size,
        seed=config.training_args.seed,
    )
    workers = config.data_args.dataloader_num_workers
    return OfflineLoader(plan.entries, conditions, sampler, num_workers=workers), {}
