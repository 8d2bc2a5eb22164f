"""What an epoch of stored examples consists of, and the numbers that cannot hold."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from flow_factory.data_utils.offline_plan import OfflinePlan, plan_offline_data
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError
from tests.trainers.offline_support import make_dataset, offline_config, write_records


def plan(folder: Path, trainer: str = "sft", **changes: Any) -> OfflinePlan:
    dotted = {name.replace("__", "."): value for name, value in changes.items()}
    return plan_offline_data(offline_config(Path("builtin/tiny-sd3-shapes"), folder, folder, trainer, dotted))


def test_counts_of_an_epoch(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=9)
    found = plan(tmp_path)
    assert found.buckets == {(32, 32): tuple(range(9))}
    assert (found.batches_per_epoch, found.updates_per_epoch, found.left_out) == (4, 2, 1)
    assert found.describe() == [
        f"stored examples: 9 from {tmp_path / 'train.jsonl'}",
        "epoch: 9 visits in 4 batches of 2 on each of 1 processes, 1 left out of each epoch (no full batch); 2 "
        "optimizer steps",
        "sizes (height x width): 32 x 32: 9; 0 of 9 are scaled or cut to them",
    ]
    two = plan(tmp_path, num_processes=2, train__gradient_accumulation_steps=1)
    assert (two.batches_per_epoch, two.global_batch, two.left_out) == (2, 4, 1)


def test_a_dataset_smaller_than_one_global_batch(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=3)
    expected = re.escape(
        f"train.per_device_batch_size (the test): 2 x num_processes 2 is a global batch of 4, more than the 3 stored "
        f"examples of {tmp_path / 'train.jsonl'}; lower the batch size or add examples."
    )
    with pytest.raises(ConfigError, match=f"^{expected}$"):
        plan(tmp_path, num_processes=2, train__gradient_accumulation_steps=1)


def test_accumulation_that_does_not_divide_the_batches(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=11)
    with pytest.raises(InputError, match=r"accumulation_steps \(the test\): 2 does not divide the 5") as caught:
        plan(tmp_path)
    assert f"11 visits to examples of {tmp_path / 'train.jsonl'} in global batches of 2" in str(caught.value)
    assert "use one of 1, 5, or data.max_dataset_size: 8" in str(caught.value)
    assert plan(tmp_path, data__max_dataset_size=8).updates_per_epoch == 2, "the remedy is one"
    assert plan(tmp_path, train__gradient_accumulation_steps=5).updates_per_epoch == 1


def test_remedies_for_accumulation_are_remedies(tmp_path: Path) -> None:
    """Examples that are visited several times, or lie in several datasets, are not what an epoch counts."""
    make_dataset(tmp_path / "one", count=5)
    make_dataset(tmp_path / "two", count=5)
    sources: list[dict[str, Any]] = [
        {"name": name, "dataset_dir": str(tmp_path / name), "train": {"weight": 1}} for name in ("one", "two")
    ]
    for given in (sources, [{**sources[0], "train": {"weight": 2}}]):
        with pytest.raises(ConfigError, match=r"use one of 1, 5\.$"):
            plan(tmp_path, data={"datasets": given})


def test_a_trainer_refuses_the_other_supervision(tmp_path: Path) -> None:
    make_dataset(tmp_path, "preference")
    message = "holds preferences, but trainer 'sft' learns from demonstrations; use train.trainer_type: offline-dpo"
    with pytest.raises(InputError, match=re.escape(message)):
        plan(tmp_path)
    assert len(plan(tmp_path, "offline-dpo").entries) == 8


def test_problems_of_several_datasets_come_together(tmp_path: Path) -> None:
    sources = []
    for name in ("one", "two"):
        make_dataset(tmp_path / name, count=2)
        write_records(tmp_path / name, ["{"])
        sources.append({"name": name, "dataset_dir": str(tmp_path / name)})
    with pytest.raises(InputError) as caught:
        plan(tmp_path, data={"datasets": sources})
    assert str(caught.value).count("malformed JSON") == 2
    assert all(f"{tmp_path / name / 'train.jsonl'}:1" in str(caught.value) for name in ("one", "two"))


def test_weights_are_visits_and_keep_examples_apart(tmp_path: Path) -> None:
    sources = []
    for name, weight in (("one", 1), ("two", 3)):
        make_dataset(tmp_path / name, count=2)
        sources.append({"name": name, "dataset_dir": str(tmp_path / name), "train": {"weight": weight}})
    found = plan(tmp_path, data={"datasets": sources})
    visits = [(e.example.record.source, e.example.record.index, e.repeat) for e in found.entries]
    assert visits == [("one", 0, 0), ("one", 1, 0)] + [("two", i, r) for i in (0, 1) for r in (0, 1, 2)]
    assert len({e.example.example_id for e in found.entries}) == 4


def test_one_bad_type_among_several_datasets(tmp_path: Path) -> None:
    make_dataset(tmp_path / "one", count=2)
    make_dataset(tmp_path / "two", "preference", count=2)
    sources = [{"name": name, "dataset_dir": str(tmp_path / name)} for name in ("one", "two")]
    with pytest.raises(InputError, match=r"two.train\.jsonl: holds preferences"):
        plan(tmp_path, data={"datasets": sources})


def test_sizes_are_cut_or_sorted_into_buckets(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=8, sizes=((64, 64), (64, 64), (64, 64), (40, 160)))
    cut = plan(tmp_path, train__resolution=64)
    assert list(cut.buckets) == [(64, 64)] and "2 of 8 are scaled or cut" in cut.describe()[2]
    sorted_in = plan(tmp_path, train__resolution=64, train__image_sizing="buckets")
    assert {size: len(rows) for size, rows in sorted_in.buckets.items()} == {(64, 64): 6, (32, 128): 2}
    alone = plan(tmp_path, train__resolution=64, train__image_sizing="buckets", train__per_device_batch_size=4)
    assert list(alone.buckets) == [(64, 64)], "two pictures fill no batch of four"


def test_fields_that_deal_prompts_are_refused(tmp_path: Path) -> None:
    make_dataset(tmp_path)
    with pytest.raises(InputError, match=r"data\.sampler_type.*deals prompts to rollouts, and trainer 'sft' makes"):
        plan(tmp_path, data__sampler_type="group_contiguous")
    source = {"name": "a", "dataset_dir": str(tmp_path), "train": {"unique_sample_num_per_epoch": 4}}
    with pytest.raises(InputError, match=r"data\.datasets\[0\]\.train\.unique_sample_num_per_epoch"):
        plan(tmp_path, data={"datasets": [source]})
    with pytest.raises(InputError, match="takes no rewards; remove them, or use eval_rewards"):
        plan(tmp_path, rewards={"reward_model": "brightness"})
