"""Files of stored examples: everything that is wrong is named, with file, line and field, before a model is loaded."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.offline_files import SHOWN_PROBLEMS, OfflineScan, scan_offline_dataset
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetArguments, get_model_spec
from tests.trainers.offline_support import make_dataset, picture, record, write_records

SD3 = get_model_spec("sd3-5").io
EDIT = PipelineIOContract(
    (
        MediaSlot(Modality.TEXT, "prompt"),
        MediaSlot(Modality.IMAGE, "first", required=True),
        MediaSlot(Modality.IMAGE, "last", required=False),
    ),
    (Modality.IMAGE,),
)


def scan(folder: Path, io: PipelineIOContract | None = SD3, **arguments: Any) -> OfflineScan:
    return scan_offline_dataset(DatasetArguments(name="toy", dataset_dir=str(folder)), "train", io=io, **arguments)


def one(folder: Path, row: Any, io: PipelineIOContract | None = SD3) -> list[str]:
    """Problems of a file with one good record and `row`, without the place."""
    (folder / "images").mkdir(exist_ok=True)
    picture(folder / "images" / "a.png", 1)
    path = write_records(folder, [record("demonstration", "ok", "a.png"), "", row])
    found = scan(folder, io)
    assert all(problem.startswith(f"{path}:3: ") for problem in found.problems), found.problems
    return [problem[len(f"{path}:3: ") :] for problem in found.problems]


def test_good_records_become_examples(tmp_path: Path) -> None:
    found = scan(make_dataset(tmp_path, "preference", 3, ((32, 32), (24, 40))))
    assert found.problems == [] and found.supervision == "preference"
    first, second, third = found.examples
    assert first.size == (32, 32) == third.size and second.size == (24, 40)
    assert [file.path.name for file in second.arms["rejected"]] == ["1-1.png"]
    assert second.place == f"{tmp_path / 'train.jsonl'}:2" and second.record.index == 1
    assert len({example.example_id for example in found.examples}) == 3


def test_identity_depends_on_dataset_and_row_alone(tmp_path: Path) -> None:
    found = scan(make_dataset(tmp_path, count=3)).examples
    rows = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    write_records(tmp_path, [*rows[:2], rows[0], rows[2]])
    again = scan(tmp_path).examples
    assert [e.example_id for e in again[:2]] == [e.example_id for e in found[:2]]
    assert again[2].record.group_id == again[0].record.group_id and again[2].example_id != again[0].example_id


def test_one_supervision_type_per_file(tmp_path: Path) -> None:
    assert one(tmp_path, record("preference", "x", "a.png", "a.png")) == [
        "supervision.type: is 'preference', but 'demonstration' in line 1; a file has one type: split it in two."
    ]


def test_missing_and_truncated_media_are_named(tmp_path: Path) -> None:
    (message,) = one(tmp_path, record("demonstration", "x", "b.png"))
    assert message.startswith("supervision.target.media[0].path: 'b.png' is not a file under ")
    assert "data.image_dir" in message
    whole = (tmp_path / "images" / "a.png").read_bytes()
    (tmp_path / "images" / "b.png").write_bytes(whole[:20])
    (message,) = one(tmp_path, record("demonstration", "x", "b.png"))
    assert message.startswith("supervision.target.media[0].path: ") and "b.png" in message
    assert "cannot be decoded" in message or "no picture" in message


def test_arms_of_different_shape(tmp_path: Path) -> None:
    (tmp_path / "images").mkdir()
    picture(tmp_path / "images" / "wide.png", 2, (32, 64))
    picture(tmp_path / "images" / "large.png", 3, (64, 128))
    picture(tmp_path / "images" / "tall.png", 4, (64, 32))
    path = write_records(
        tmp_path,
        [
            record("preference", "x", "wide.png", "large.png"),  # another size of one shape is scaled
            record("preference", "x", "wide.png", "tall.png"),
        ],
    )
    found = scan(tmp_path)
    assert len(found.examples) == 1
    assert found.problems == [
        f"{path}:2: supervision: chosen is 32 x 64 pixels (height x width) and rejected 64 x 32: arms of different "
        "shape cannot share their noise. Crop one of them."
    ]


def test_media_that_the_model_does_not_take(tmp_path: Path) -> None:
    row = record("demonstration", "x", "a.png")
    row["input"]["media"] = [{"type": "image", "path": "a.png"}]
    assert one(tmp_path, row) == ["input.media[0]: the model takes no image; remove it."]
    assert one(tmp_path, row, io=None) == []


def test_a_negative_prompt_for_a_model_that_takes_none(tmp_path: Path) -> None:
    row = record("demonstration", "x", "a.png")
    row["input"]["negative_prompt"] = "blur"
    assert one(tmp_path, row) == []
    takes_none = PipelineIOContract((MediaSlot(Modality.TEXT, "prompt"),), (Modality.IMAGE,))
    assert one(tmp_path, row, takes_none) == ["input.negative_prompt: the model takes none; remove it."]


def test_wrong_missing_and_repeated_slots(tmp_path: Path) -> None:
    def complaints(*slots: str | None, io: PipelineIOContract = EDIT) -> list[str]:
        row = record("demonstration", "x", "a.png")
        row["input"]["media"] = [{"type": "image", "path": "a.png", "slot": slot} for slot in slots]
        (tmp_path / "images").mkdir(exist_ok=True)
        picture(tmp_path / "images" / "a.png", 1)
        path = write_records(tmp_path, [row])
        return [problem.removeprefix(f"{path}:1: ") for problem in scan(tmp_path, io).problems]

    assert complaints("first", "last") == []
    assert complaints("first", "middle") == [
        "input.media[1].slot: the model has no image input 'middle'; use 'first', 'last'."
    ]
    assert complaints("last") == ["input.media: nothing fills the model's image input 'first'; add it."]
    assert "input.media[0].slot: is missing; this image could fill 'first', 'last'." in complaints(None)
    optional = tuple(replace(slot, required=False) for slot in EDIT.inputs)
    either = replace(EDIT, inputs=optional, one_of=("first", "last"))
    assert complaints("last", io=either) == []
    assert complaints(io=either) == ["input.media: fills none of 'first', 'last'; the model needs at least one."]
    assert complaints("first", "first") == ["input.media[1]: the input 'first' takes at most 1 file(s)."]


def test_outputs_must_be_what_the_model_gives(tmp_path: Path) -> None:
    row = record("demonstration", "x", "a.png")
    row["supervision"]["target"]["media"][0]["type"] = "video"
    assert one(tmp_path, row) == ["supervision.target.media: holds video; the model gives image."]
    row["supervision"]["target"]["media"] = [{"type": "image", "path": "a.png"}] * 2
    assert one(tmp_path, row) == ["supervision.target.media: holds image, image; the model gives image."]
    row["supervision"]["target"]["media"] = [{"type": "image", "path": "a.png", "slot": "image"}]
    assert one(tmp_path, row) == ["supervision.target.media[0].slot: an output fills no input; remove it."]


def test_sound_is_known_and_not_decoded(tmp_path: Path) -> None:
    (tmp_path / "audios").mkdir()
    (tmp_path / "audios" / "a.wav").write_bytes(b"x")
    row = record("demonstration", "x", "a.wav")
    row["supervision"]["target"]["media"][0] |= {"type": "audio", "sample_rate": 16000}
    io = PipelineIOContract(SD3.inputs, (Modality.AUDIO,))
    path = write_records(tmp_path, [row])
    (message,) = scan(tmp_path, io).problems
    assert message == (
        f"{path}:1: supervision.target.media[0]: audio cannot be decoded by this version; it decodes: image, video."
    )


def test_all_bad_records_are_named_at_once_up_to_a_limit(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=2)
    good = [json.loads(line) for line in (tmp_path / "train.jsonl").read_text().splitlines()]
    bad = [{**good[0], "schema_version": 1}] * (SHOWN_PROBLEMS + 5)
    path = write_records(tmp_path, [good[0], *bad, "{", good[1]])
    found = scan(tmp_path)
    assert len(found.examples) == 2 and len(found.problems) == SHOWN_PROBLEMS + 6
    with pytest.raises(InputError) as caught:
        found.raise_problems()
    text = str(caught.value)
    assert text.startswith(f"{SHOWN_PROBLEMS + 6} problems") and f"{path}:2: schema_version" in text
    assert f"{path}:{SHOWN_PROBLEMS + 1}:" in text and f"{path}:{SHOWN_PROBLEMS + 2}:" not in text
    assert "and 6 more (flow-factory data validate lists them all)" in text


def test_size_limit_and_blank_lines(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=4)
    text = (tmp_path / "train.jsonl").read_text()
    (tmp_path / "train.jsonl").write_text(text.replace("\n", "\n\n") + "{ this line is not reached")
    assert len(scan(tmp_path, max_size=3).examples) == 3 and scan(tmp_path, max_size=3).problems == []
    assert len(scan(tmp_path).problems) == 1


def test_files_that_hold_something_else(tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a prompt\n")
    assert scan(tmp_path).problems == [
        f"{tmp_path / 'train.txt'}: holds prompts; stored examples are read from a .jsonl file."
    ]
    (tmp_path / "train.txt").unlink()
    write_records(tmp_path, ["", " "])
    assert scan(tmp_path).problems == [f"{tmp_path / 'train.jsonl'}: holds no records; write one JSON object a line."]
    with pytest.raises(InputError, match=r"has no valid\.txt or valid\.jsonl; it has train\.jsonl"):
        scan_offline_dataset(DatasetArguments(dataset_dir=str(tmp_path)), "valid")
    with pytest.raises(InputError, match="does not exist"):
        scan(tmp_path / "nowhere")
