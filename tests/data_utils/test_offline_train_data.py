"""Batches of stored examples: which examples, in which order, on which rank; and what a batch holds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.data_utils.offline_plan import plan_offline_data
from flow_factory.data_utils.offline_train_data import (
    BucketBatchSampler,
    OfflineBatch,
    OfflineLoader,
    build_offline_train_dataloader,
)
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from tests.data_utils.helpers import FakeAdapter
from tests.trainers.offline_support import make_dataset, offline_config

ONE = [tuple(range(24))]
MIXED = [tuple(range(11)), tuple(range(11, 24)), tuple(range(24, 29))]


def order(buckets: list[tuple[int, ...]], batch: int, world: int = 1, rank: int = 0, epoch: int = 0, seed: int = 3):
    sampler = BucketBatchSampler(buckets, batch, rank=rank, world_size=world, seed=seed)
    sampler.set_epoch(epoch)
    assert len(sampler) == len(list(sampler))
    return list(sampler)


@pytest.mark.parametrize("buckets", [ONE, MIXED])
@pytest.mark.parametrize(("batch", "world"), [(4, 1), (2, 2), (1, 4)])
def test_batches_have_one_bucket_and_no_example_twice(buckets: list[tuple[int, ...]], batch: int, world: int) -> None:
    ranks = [order(buckets, batch, world, rank) for rank in range(world)]
    for slot in zip(*ranks, strict=True):
        assert all(len(rows) == batch for rows in slot)
        homes = {n for rows in slot for row in rows for n, bucket in enumerate(buckets) if row in bucket}
        assert len(homes) == 1, "all ranks have the same size at the same time"
    seen = [row for rank in ranks for rows in rank for row in rows]
    assert len(seen) == len(set(seen)) == sum(len(b) // (batch * world) * batch * world for b in buckets)


@pytest.mark.parametrize("buckets", [ONE, MIXED])
def test_global_batches_do_not_depend_on_the_number_of_ranks(buckets: list[tuple[int, ...]]) -> None:
    alone = [set(rows) for rows in order(buckets, 4, epoch=2)]
    for batch, world in ((2, 2), (1, 4)):
        ranks = [order(buckets, batch, world, rank, epoch=2) for rank in range(world)]
        assert [set().union(*slot) for slot in zip(*ranks, strict=True)] == alone


def test_accumulated_windows_do_not_depend_on_how_they_are_cut() -> None:
    """Of one size: batches of 2 accumulated twice hold the examples of batches of 4."""
    small = order(ONE, 2, epoch=1)
    assert [set(a) | set(b) for a, b in zip(small[::2], small[1::2], strict=True)] == [
        set(rows) for rows in order(ONE, 4, epoch=1)
    ]


def test_epochs_differ_and_repeat() -> None:
    assert order(MIXED, 2, epoch=0) != order(MIXED, 2, epoch=1)
    assert order(MIXED, 2, epoch=5) == order(MIXED, 2, epoch=5)
    assert order(MIXED, 2, seed=3) != order(MIXED, 2, seed=4)
    left_out = [set(range(24)) - {row for rows in order(ONE, 5, epoch=e) for row in rows} for e in range(4)]
    assert all(len(rows) == 4 for rows in left_out) and len({frozenset(rows) for rows in left_out}) > 1


def test_skipping_goes_on_inside_an_epoch_once() -> None:
    sampler = BucketBatchSampler(MIXED, 2, seed=3)
    whole = list(sampler)
    sampler.skip(3)
    assert list(sampler) == whole[3:]
    assert list(sampler) == whole


def loader(tmp_path: Path, adapter: FakeAdapter, *, workers: int = 0, preprocess: bool = True) -> OfflineLoader:
    if not (tmp_path / "train.jsonl").exists():
        make_dataset(tmp_path, "preference", 8, ((32, 32), (24, 40)))
    changes = {"data.dataloader_num_workers": workers, "data.enable_preprocess": preprocess}
    config = offline_config(Path("builtin/tiny-sd3-shapes"), tmp_path, tmp_path, "offline-dpo", changes)
    built, sources = build_offline_train_dataloader(config, adapter, Comm.single(), plan_offline_data(config))
    assert sources == {}
    return built


def test_a_batch_holds_pictures_of_one_size_and_their_conditions(tmp_path: Path) -> None:
    adapter = FakeAdapter()
    batches = list(loader(tmp_path, adapter))
    assert len(batches) == 4 and all(isinstance(batch, OfflineBatch) and len(batch) == 2 for batch in batches)
    for batch in batches:
        assert set(batch.media) == {"chosen", "rejected"}
        for row, entry in enumerate(batch.entries):
            for arm, media in batch.media.items():
                assert media.dtype == torch.uint8 and media.shape == (2, 3, 32, 32)
                if entry.example.size == (32, 32):
                    pixels = np.asarray(Image.open(entry.example.arms[arm][0].path))
                    assert np.array_equal(media[row].permute(1, 2, 0).numpy(), pixels)
        expected = adapter.encode_prompt([e.example.record.prompt for e in batch.entries], None, False)
        assert torch.equal(batch.condition.tensors()["embeds"], expected.embeds)
        assert "negative" not in batch.condition.tensors()


def test_conditions_are_encoded_once_and_targets_on_demand(tmp_path: Path) -> None:
    adapter = FakeAdapter()
    made = loader(tmp_path, adapter)
    encoded = sum(map(len, adapter.encoded))
    assert encoded == 8 and len(list(made)) == len(list(made)) == 4
    assert sum(map(len, adapter.encoded)) == encoded


def test_workers_make_the_same_batches(tmp_path: Path) -> None:
    here = list(loader(tmp_path, FakeAdapter()))
    made = loader(tmp_path, FakeAdapter(), workers=2)
    try:
        there = list(made)
        made.skip_batches(2)
        assert [b.entries for b in made] == [b.entries for b in here[2:]]
    finally:
        made.close()
    for a, b in zip(here, there, strict=True):
        assert a.entries == b.entries
        assert all(torch.equal(a.media[arm], b.media[arm]) for arm in a.media)


@pytest.mark.parametrize("workers", [0, 2])
def test_conditions_encoded_on_the_fly_are_those_of_the_cache(tmp_path: Path, workers: int) -> None:
    """The encoders run in the training process, whoever decodes the pictures."""
    cached = list(loader(tmp_path, FakeAdapter()))
    adapter = FakeAdapter()
    made = loader(tmp_path, adapter, workers=workers, preprocess=False)
    assert adapter.encoded == []
    try:
        fresh = list(made)
    finally:
        made.close()
    assert sum(map(len, adapter.encoded)) == 8, "each prompt once"
    for a, b in zip(cached, fresh, strict=True):
        assert a.entries == b.entries
        assert torch.equal(a.condition.tensors()["embeds"], b.condition.tensors()["embeds"])


@pytest.mark.parametrize("workers", [0, 2])
def test_a_picture_that_breaks_later_reaches_no_batch(tmp_path: Path, workers: int) -> None:
    """The message is the same, whoever decodes."""
    made = loader(tmp_path, FakeAdapter(), workers=workers)
    path = tmp_path / "images" / "3-1.png"
    path.write_bytes(path.read_bytes()[:90])
    message = (
        rf"^{tmp_path}/train\.jsonl:4: \S*3-1\.png cannot be decoded: [^\n]*; replace the file or remove its record\.$"
    )
    try:
        with pytest.raises(InputError, match=message):
            list(made)
    finally:
        made.close()


def test_a_batch_can_be_asked_for_by_positions(tmp_path: Path) -> None:
    made = loader(tmp_path, FakeAdapter())
    batch = made.batch([5, 0])
    assert [entry.example.record.index for entry in batch.entries] == [5, 0]
    assert torch.equal(batch.media["chosen"][1], made.batch([0]).media["chosen"][0])
