"""Identity of prompts: groups, duplicates and media contents."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from flow_factory.contracts import Modality
from flow_factory.data_utils.prompt_dataset import MediaFile, group_id_of, load_prompt_dataset, source_id_of
from flow_factory.errors import InputError
from tests.data_utils.helpers import dataset, write_jsonl, write_txt


def media(slot: str = "image", digest: str = "d") -> MediaFile:
    return MediaFile(slot, Modality.IMAGE, Path("x"), digest)


def test_everything_that_makes_a_group_changes_its_id() -> None:
    """Pitfall 13: the same prompt in two datasets is two groups; so are other negatives and other media."""
    ids = [
        group_id_of("a", "p", None),
        group_id_of("b", "p", None),
        group_id_of("a", "q", None),
        group_id_of("a", "p", ""),
        group_id_of("a", "p", "n"),
        group_id_of("a", "p", None, [media()]),
        group_id_of("a", "p", None, [media(digest="e")]),
        group_id_of("a", "p", None, [media(slot="mask")]),
        group_id_of("a", "p", None, [media(), media()]),
        group_id_of("ap", "", None),
        group_id_of("a", "pn", ""),
    ]
    assert len(set(ids)) == len(ids)


def test_the_same_file_as_two_datasets(tmp_path: Path) -> None:
    """Pitfall 13: loading keeps equal prompts of two datasets apart."""
    write_txt(tmp_path, "train", ["a", "b"])
    ids = [r.group_id for name in ("x", "y") for r in load_prompt_dataset(dataset(tmp_path, name), "train")]
    assert len(set(ids)) == 4


def test_group_ids_are_64_bit_end_to_end() -> None:
    """Pitfall 12: ids use all 64 bits, survive an int64 tensor, and would not survive a float."""
    ids = [group_id_of("a", f"prompt {i}", None) for i in range(500)]
    assert torch.tensor(ids, dtype=torch.int64).tolist() == ids
    assert min(ids) < 0 < max(ids) and max(ids) > 1 << 61
    assert any(int(torch.tensor(i, dtype=torch.float64).item()) != i for i in ids)


def test_ids_do_not_depend_on_the_process() -> None:
    """Pitfall 14: another PYTHONHASHSEED gives the same ids, so ranks agree."""
    code = (
        "from flow_factory.data_utils.prompt_dataset import group_id_of, source_id_of\n"
        "print(group_id_of('a', 'p', 'n'), source_id_of('a'), hash('a'))"
    )
    outputs = []
    for seed in ("1", "2"):
        environment = {**os.environ, "PYTHONHASHSEED": seed}
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, env=environment)
        outputs.append(done.stdout.split())
    assert outputs[0][:2] == outputs[1][:2] == [str(group_id_of("a", "p", "n")), str(source_id_of("a"))]
    assert outputs[0][2] != outputs[1][2], "the two processes were meant to hash strings differently"


def test_duplicates_are_dropped_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Equal prompts would share a group; the warning counts them. Evaluation keeps them."""
    rows = [
        {"prompt": "a"},
        {"prompt": "b"},
        {"prompt": "a"},
        {"prompt": "a", "n": 1},
        {"prompt": "a", "negative_prompt": "x"},
    ]
    write_jsonl(tmp_path, "train", rows)
    with caplog.at_level(logging.WARNING):
        found = load_prompt_dataset(dataset(tmp_path, source_id=5), "train")
    assert [(r.prompt, r.negative_prompt) for r in found] == [("a", None), ("b", None), ("a", "x")]
    assert [r.index for r in found] == [0, 1, 2] and found.duplicates == 2
    assert all(r.source == "a" and r.source_id == 5 for r in found)
    assert "dropped 2 duplicates" in caplog.text and "1 of them with other metadata" in caplog.text
    assert len(load_prompt_dataset(dataset(tmp_path), "train", drop_duplicates=False)) == 5


def test_max_size_counts_distinct_prompts(tmp_path: Path) -> None:
    """The first n prompts that are used."""
    write_txt(tmp_path, "train", ["a", "a", "b", "c"])
    assert [r.prompt for r in load_prompt_dataset(dataset(tmp_path), "train", max_size=2)] == ["a", "b"]


def test_media_are_identified_by_their_bytes(tmp_path: Path) -> None:
    """Pitfall 28: the same name with other bytes is another group; another name with the same bytes is not."""
    write_jsonl(tmp_path, "train", [{"prompt": "a", "image": "1.png"}])
    (tmp_path / "images").mkdir()
    (tmp_path / "images" / "1.png").write_bytes(b"one")
    before = load_prompt_dataset(dataset(tmp_path), "train")[0]
    (tmp_path / "images" / "1.png").write_bytes(b"two")
    after = load_prompt_dataset(dataset(tmp_path), "train")[0]
    assert before.group_id != after.group_id and before.media[0].digest != after.media[0].digest
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "1.png").write_bytes(b"one")
    moved = load_prompt_dataset(dataset(tmp_path, image_dir=str(tmp_path / "elsewhere")), "train")[0]
    assert moved.group_id == before.group_id


def test_missing_media_file(tmp_path: Path) -> None:
    """Names prompt file, line, the file and the field that says where media lie."""
    write_jsonl(tmp_path, "train", [{"prompt": "a"}, {"prompt": "b", "image": "no.png"}])
    with pytest.raises(
        InputError, match=r"train\.jsonl:2: image 'no\.png' is not a file under .*images .*data\.image_dir"
    ):
        load_prompt_dataset(dataset(tmp_path), "train")


def test_text_and_jsonl_datasets_mix(tmp_path: Path) -> None:
    """Pitfall 37: records of a .txt and of a .jsonl with media have the same fields, so the two can be mixed."""
    write_txt(tmp_path / "t", "train", ["a"])
    write_jsonl(tmp_path / "j", "train", [{"prompt": "a", "image": "1.png"}, {"prompt": "b"}])
    (tmp_path / "j" / "images").mkdir()
    (tmp_path / "j" / "images" / "1.png").write_bytes(b"one")
    records = [*load_prompt_dataset(dataset(tmp_path / "t", "t"), "train")]
    records += load_prompt_dataset(dataset(tmp_path / "j", "j"), "train")
    assert [len(r.media) for r in records] == [0, 1, 0]
    assert len({frozenset(vars(r)) for r in records}) == 1 and len({r.group_id for r in records}) == 3
