"""What a run reads is known by its content: pictures of stored examples and condition media too."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from flow_factory.errors import InputError
from flow_factory.hparams import Arguments
from flow_factory.tracking.inputs import changed_inputs, describe_inputs
from flow_factory.tracking.run_folder import prepare_run_folder, release_run_folder
from tests.tracking.test_run_folder import run_with_checkpoints
from tests.trainers.offline_support import make_dataset, picture, write_records


@pytest.fixture
def sft(make_config: Any, tmp_path: Path) -> Arguments:
    """A run on 250 stored examples, of whose pictures there are three."""
    data = make_dataset(tmp_path / "stored", count=3)
    lines = (data / "train.jsonl").read_text().splitlines()
    write_records(data, [json.loads(lines[n % 3 if n < 200 else 0]) for n in range(250)])
    stored = {"trainer_type": "sft", "max_epochs": 3}
    return make_config(train=stored, data={"dataset_dir": str(data)}, rewards=[])


def changes(config: Arguments, change: Any) -> list[str]:
    """What is said to have changed by calling `change`."""
    before = describe_inputs(config)
    change()
    return changed_inputs(before, describe_inputs(config))


def media_of(first: int, last: int) -> str:
    return f"media of data/default/train.jsonl, lines {first} to {last} has another content"


def test_a_picture_that_was_replaced_is_noticed_and_found(sft: Arguments, tmp_path: Path) -> None:
    images = tmp_path / "stored" / "images"
    assert changes(sft, lambda: picture(images / "1-0.png", 77)) == [media_of(1, 100), media_of(101, 200)]
    assert changes(sft, lambda: picture(images / "0-0.png", 78))[-1] == media_of(201, 250)
    assert changes(sft, lambda: (images / "2-0.png").unlink()) == [media_of(1, 100), media_of(101, 200)]
    other = "an unused picture"
    assert changes(sft, lambda: picture(images / f"{other}.png", 3)) == []


def test_the_same_content_is_the_same_whenever_it_was_written(sft: Arguments, tmp_path: Path) -> None:
    path = tmp_path / "stored" / "images" / "1-0.png"

    def rewrite() -> None:
        content = path.read_bytes()
        path.unlink()
        path.write_bytes(content)
        os.utime(path, (1, 1))

    assert changes(sft, rewrite) == []


@pytest.mark.parametrize("size", [(16, 16), (400, 400)])
def test_pixels_of_pictures_of_one_size_are_seen(sft: Arguments, tmp_path: Path, size: tuple[int, int]) -> None:
    """Small files are read whole; of large ones three pieces, which compression makes depend on what comes before."""
    path, rng = tmp_path / "stored" / "images" / "1-0.jpg", np.random.default_rng(0)
    pixels = rng.integers(0, 256, (*size, 3), dtype=np.uint8)
    Image.fromarray(pixels).save(path, quality=95)
    rows = [json.loads(line) for line in (tmp_path / "stored" / "train.jsonl").read_text().splitlines()]
    rows[0]["supervision"]["target"]["media"][0]["path"] = path.name
    write_records(tmp_path / "stored", rows)

    def retouch() -> None:
        third = size[0] // 3
        pixels[third : third + 8, third : third + 8] = 0
        Image.fromarray(pixels).save(path, quality=95)

    assert changes(sft, retouch) == [media_of(1, 100)]


def test_condition_media_and_other_folders_count(make_config: Any, tmp_path: Path) -> None:
    (tmp_path / "elsewhere" / "sub").mkdir(parents=True)
    shown = tmp_path / "elsewhere" / "sub" / "a.png"
    picture(shown, 1)
    (tmp_path / "data" / "train.txt").unlink()
    long = "x" * 5000
    rows: list[Any] = [
        {"prompt": long, "note": "\u0000", "reference": {"pictures": [["sub/a.png"], 3]}},
        {"prompt": "b", "image": str(shown)},
        "{ malformed",
    ]
    write_records(tmp_path / "data", rows)
    config = make_config(data={"dataset_dir": str(tmp_path / "data"), "image_dir": str(tmp_path / "elsewhere")})
    assert changes(config, lambda: picture(shown, 2)) == [media_of(1, 3)]
    absolute = make_config(data={"dataset_dir": str(tmp_path / "data")})
    assert changes(absolute, lambda: picture(shown, 3)) == [media_of(1, 3)]
    write_records(tmp_path / "data", [{"prompt": "a"}])
    assert list(describe_inputs(config))[-1] == "data/default/train.jsonl", "no media, no entry"


def test_a_run_does_not_go_on_with_other_pictures(sft: Arguments, tmp_path: Path) -> None:
    folder = run_with_checkpoints(sft, 1)
    prepare_run_folder(sft)
    release_run_folder(folder)
    kept = (tmp_path / "stored" / "images" / "1-0.png").read_bytes()
    picture(tmp_path / "stored" / "images" / "1-0.png", 99)
    with pytest.raises(InputError) as caught:
        prepare_run_folder(sft)
    assert f"  {media_of(1, 100)}\n  {media_of(101, 200)}\n" in str(caught.value)
    assert "Restore these files" in str(caught.value)
    (tmp_path / "stored" / "images" / "1-0.png").write_bytes(kept)
    prepare_run_folder(sft)
    release_run_folder(folder)


def test_a_long_list_of_changes_is_cut(sft: Arguments, tmp_path: Path) -> None:
    data = tmp_path / "stored"
    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    write_records(data, [rows[0]] * 2500)
    run_with_checkpoints(sft, 1)
    picture(data / "images" / "0-0.png", 99)
    with pytest.raises(InputError) as caught:
        prepare_run_folder(sft)
    lines = str(caught.value).splitlines()
    assert len(lines) == 1 + 20 + 1 + 1 and lines[-2] == "  and 5 more"
