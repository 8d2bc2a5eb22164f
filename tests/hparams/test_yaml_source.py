"""Reading YAML: plain values, places, duplicate keys, overrides."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from flow_factory.errors import InputError
from flow_factory.hparams.errors import ConfigError
from flow_factory.hparams.yaml_source import Origins, apply_overrides, parse_yaml, read_yaml_file, resolve_plain


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("no", "no"),
        ("on", "on"),
        ("Yes", "Yes"),
        ("y", "y"),
        ("12:30", "12:30"),
        ("1:02:03", "1:02:03"),
        ("2024-01-31", "2024-01-31"),
        ("010", "010"),
        ("1e-4", 1e-4),
        ("1E+4", 1e4),
        ("-1.5e3", -1500.0),
        (".5", 0.5),
        ("3.", 3.0),
        ("0", 0),
        ("-7", -7),
        ("1_000", 1000),
        ("0x1F", 31),
        ("true", True),
        ("False", False),
        ("null", None),
        ("~", None),
        ("", None),
        ("-", "-"),
        ("1.2.3", "1.2.3"),
        (".inf", math.inf),
        ("-.INF", -math.inf),
        ("e5", "e5"),
    ],
)
def test_plain_scalars_follow_yaml_1_2(text: str, value: object) -> None:
    """Pitfall 53: `no`, `on` and `12:30` stay text; 1e-4 is a number."""
    got = resolve_plain(text)
    assert got == value and type(got) is type(value)


def test_nan_is_a_number_to_be_refused_later() -> None:
    assert math.isnan(resolve_plain(".nan"))


def test_quoted_scalars_are_text() -> None:
    value, _ = parse_yaml("a: \"1e-4\"\nb: 'true'\nc: |\n  5\n", "f")
    assert value == {"a": "1e-4", "b": "true", "c": "5\n"}


def test_origins_name_the_line_of_the_key() -> None:
    _, entries = parse_yaml("a:\n  b: 1\n  c:\n    - x\n    - {d: 2e-3}\n", "run.yaml")
    assert entries[("a", "b")].place == "run.yaml:2"
    assert entries[("a", "c")].place == "run.yaml:3"
    assert entries[("a", "c", 1, "d")].place == "run.yaml:5"
    assert entries[("a", "c", 1, "d")].text == "2e-3"


def test_duplicate_keys_are_refused_with_both_lines() -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml("train:\n  seed: 1\n  group_size: 2\n  seed: 2\nmodel: 1\ntrain: 3\n", "run.yaml")
    text = str(caught.value)
    assert "train.seed (run.yaml:4): the key 'seed' is given twice, first at run.yaml:2" in text
    assert "train (run.yaml:6): the key 'train' is given twice, first at run.yaml:1" in text


def test_anchors_and_merge_keys() -> None:
    value, _ = parse_yaml("a: &x {p: 1, q: 2}\nb: *x\nc:\n  <<: *x\n  q: 3\n", "f")
    assert value == {"a": {"p": 1, "q": 2}, "b": {"p": 1, "q": 2}, "c": {"p": 1, "q": 3}}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a: [1, 2\nb: 3\n", ["run.yaml:2", "not valid YAML"]),
        ("a: 1\n\tb: 2\n", ["run.yaml:2", "not valid YAML"]),
        ("a: !!python/object/apply:os.system ['true']\n", ["run.yaml:1", "not plain data"]),
        ("a: !mine 3\n", ["run.yaml:1", "!mine"]),
        ("a: &x [*x]\n", ["run.yaml:1", "contains itself"]),
        ("? [1, 2]\n: 3\n", ["run.yaml:1", "keys must be plain words"]),
        ("a: *nothing\n", ["run.yaml:1", "not valid YAML"]),
        ("a: &x {<<: *x}\n", ["run.yaml", "nested too deeply"]),
        ("a: " + "[" * 3000 + "]" * 3000, ["run.yaml", "nested too deeply"]),
        (
            "a: &a [1, 2, 3, 4, 5, 6, 7, 8, 9]\n"
            + "".join(f"{n}: &{n} [{', '.join([f'*{m}'] * 9)}]\n" for m, n in zip("abcdefgh", "bcdefghi", strict=True)),
            ["run.yaml", "more than 100000 values"],
        ),
    ],
)
def test_what_is_not_plain_data_is_refused(text: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        parse_yaml(text, "run.yaml")
    for word in words:
        assert word in str(caught.value)


def test_unreadable_files_are_input_errors(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"nope\.yaml' does not exist"):
        read_yaml_file(tmp_path / "nope.yaml")
    with pytest.raises(InputError, match="is a folder"):
        read_yaml_file(tmp_path)
    (tmp_path / "list.yaml").write_text("- 1\n")
    with pytest.raises(InputError, match="must be a mapping of sections, not a list"):
        read_yaml_file(tmp_path / "list.yaml")
    (tmp_path / "latin.yaml").write_bytes(b"a: \xe4\n")
    with pytest.raises(InputError, match="not UTF-8"):
        read_yaml_file(tmp_path / "latin.yaml")
    (tmp_path / "empty.yaml").write_text("# nothing\n")
    assert read_yaml_file(tmp_path / "empty.yaml")[0] == {}


def test_overrides_set_values_and_become_their_origin() -> None:
    values, entries = parse_yaml("train: {seed: 1, clip: [1, 2]}\nrewards: [{weight: 1}]\nsingle: {w: 1}\n", "run.yaml")
    origins = Origins(entries)
    apply_overrides(
        values,
        origins,
        [
            "train.seed=2",
            "rewards[0].weight=0.5",
            "rewards.0.name=a=b",
            "new.deep.key={x: [1e-4, no]}",
            "single[0].w=3",
            "train.clip=null",
            "train.seed=7",
        ],
    )
    assert values == {
        "train": {"seed": 7, "clip": None},
        "rewards": [{"weight": 0.5, "name": "a=b"}],
        "new": {"deep": {"key": {"x": [1e-4, "no"]}}},
        "single": {"w": 3},
    }
    assert origins.place(("train", "seed")) == "override 'train.seed=7'"
    assert origins.place(("new", "deep", "key", "x", 1)) == "override 'new.deep.key={x: [1e-4, no]}'"
    assert ("train", "clip", 0) not in origins.entries


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("train.seed", ["'train.seed'", "key=value"]),
        ("=3", ["'=3'", "key=value"]),
        ("train..seed=3", ["key=value"]),
        ("train.seed.deeper=3", ["train.seed is the value 1"]),
        ("rewards.weight=3", ["rewards is a list of 1", "rewards[0]"]),
        ("rewards[4].weight=3", ["rewards is a list of 1"]),
        ("train[1].seed=3", ["train is not a list"]),
        ("train.seed=[1", ["override 'train.seed=[1'", "not valid YAML"]),
    ],
)
def test_wrong_overrides_name_themselves_and_the_remedy(override: str, words: list[str]) -> None:
    values, entries = parse_yaml("train: {seed: 1}\nrewards: [{weight: 1}]\n", "run.yaml")
    with pytest.raises(InputError) as caught:
        apply_overrides(values, Origins(entries), [override])
    for word in words:
        assert word in str(caught.value)
