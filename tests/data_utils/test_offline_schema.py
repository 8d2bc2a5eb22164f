"""The schema of stored examples: what is read, and how each mistake is named."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from typing import Any

import pytest

from flow_factory.data_utils.offline_schema import parse_example
from flow_factory.data_utils.offline_writer import example_line
from flow_factory.errors import InputError

GOOD: dict[str, Any] = {
    "schema_version": 2,
    "input": {"prompt": " a red dot ", "negative_prompt": "blur"},
    "supervision": {"type": "demonstration", "target": {"media": [{"type": "image", "path": "a.png"}]}},
    "metadata": {"author": "me", "n": [1, None]},
}
PAIR: dict[str, Any] = {
    "schema_version": 2,
    "input": {"prompt": "a"},
    "supervision": {
        "type": "preference",
        "chosen": {"media": [{"type": "image", "path": "a.png"}]},
        "rejected": {"media": [{"type": "image", "path": "b.png"}]},
    },
}


def test_a_demonstration_is_read() -> None:
    example = parse_example(json.dumps(GOOD), "f.jsonl:1")
    assert example.input.prompt == "a red dot" and example.input.negative_prompt == "blur"
    assert [m.path for m in example.supervision.arms["target"]] == ["a.png"]
    assert example.metadata == {"author": "me", "n": [1, None]}


def test_a_preference_is_read() -> None:
    arms = parse_example(json.dumps(PAIR), "f.jsonl:1").supervision.arms
    assert list(arms) == ["chosen", "rejected"] and arms["rejected"][0].path == "b.png"


def test_what_is_written_is_read_back() -> None:
    arms = {"chosen": "x.png", "rejected": "y.png"}
    line = example_line("preference", "rot\u2028\u00e4 \u4e00", arms, negative_prompt="", metadata={"k": 1.5})
    example = parse_example(line, "f.jsonl:1")
    assert "\n" not in line and example.input.prompt == "rot\u2028\u00e4 \u4e00" and example.input.negative_prompt == ""
    assert {arm: media[0].path for arm, media in example.supervision.arms.items()} == arms
    with pytest.raises(InputError, match=r"input\.prompt: is empty"):
        example_line("demonstration", " ", {"target": "x.png"})


def _media(row: dict[str, Any]) -> dict[str, Any]:
    return row["supervision"]["target"]["media"][0]


BAD: list[tuple[str, Callable[[dict[str, Any]], Any]]] = [
    ("schema_version: is missing; write 2.", lambda r: r.pop("schema_version")),
    ("schema_version: is 1; this version reads 2.", lambda r: r.update(schema_version=1)),
    ("schema_version: is '2'; this version reads 2.", lambda r: r.update(schema_version="2")),
    ("input: is missing.", lambda r: r.pop("input")),
    ("input: is a list; write an object.", lambda r: r.update(input=[])),
    ("input.prompt: is missing.", lambda r: r["input"].pop("prompt")),
    ("input.prompt: is empty.", lambda r: r["input"].update(prompt="  ")),
    ("input.prompt: 3: input should be a valid string.", lambda r: r["input"].update(prompt=3)),
    ("input.promt: unknown key; did you mean 'prompt'?", lambda r: r["input"].update(promt="x")),
    ("extra: unknown key; known here: schema_version, input, supervision, metadata.", lambda r: r.update(extra=1)),
    (
        "supervision.type: is missing; write 'demonstration' or 'preference'.",
        lambda r: r["supervision"].pop("type"),
    ),
    (
        "supervision.type: 'demo' is neither 'demonstration' nor 'preference'. Did you mean 'demonstration'?",
        lambda r: r["supervision"].update(type="demo"),
    ),
    (
        "supervision.chosen: unknown key; known here: type, target.",
        lambda r: r["supervision"].update(chosen={"media": []}),
    ),
    (
        "supervision.target.media: is an empty list; name at least one file.",
        lambda r: r["supervision"]["target"].update(media=[]),
    ),
    ("supervision.target.media[0].path: is empty.", lambda r: _media(r).update(path="")),
    ("supervision.target.media[0].typ: unknown key; did you mean 'type'?", lambda r: _media(r).update(typ="image")),
    (
        "supervision.target.media[0].type: 'gif': input should be 'image', 'video' or 'audio'.",
        lambda r: _media(r).update(type="gif"),
    ),
    ("supervision.target.media[0]: fps belongs to a video, not to an image.", lambda r: _media(r).update(fps=8.0)),
    ("metadata: is a list; write an object.", lambda r: r.update(metadata=[1])),
]  # fmt: skip


@pytest.mark.parametrize(("message", "spoil"), BAD, ids=[message[:48] for message, _ in BAD])
def test_each_mistake_names_place_field_and_remedy(message: str, spoil: Callable[[dict[str, Any]], Any]) -> None:
    row = copy.deepcopy(GOOD)
    spoil(row)
    with pytest.raises(InputError) as caught:
        parse_example(json.dumps(row), "data/train.jsonl:7")
    assert str(caught.value) == f"data/train.jsonl:7: {message}"


def test_all_wrong_fields_of_a_record_are_named_together() -> None:
    row = copy.deepcopy(GOOD)
    row["schema_version"], row["input"]["prompt"], row["note"] = 3, "", 1
    with pytest.raises(InputError) as caught:
        parse_example(json.dumps(row), "f:2")
    lines = str(caught.value).split("\n")
    assert len(lines) == 3 and all(line.startswith("f:2: ") for line in lines)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "malformed JSON"),
        ("[1]", "a list instead of an object"),
        ('{"schema_version": 2, "schema_version": 2}', '"schema_version" is given twice'),
        ('{"metadata": {"x": NaN}}', "NaN is not JSON"),
        (json.dumps({**GOOD, "input": {"prompt": "\ud800"}}), "surrogate pair"),
    ],
)
def test_what_is_no_clean_json_is_refused(text: str, message: str) -> None:
    with pytest.raises(InputError, match=f"^f:1: .*{message}"):
        parse_example(text, "f:1")
