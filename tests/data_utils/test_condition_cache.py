"""The condition cache: every part of its key, exact values, corruption, concurrency."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from flow_factory.contracts import Modality
from flow_factory.data_utils.condition_cache import ConditionCache
from flow_factory.data_utils.prompt_dataset import MediaFile, PromptRecord
from flow_factory.errors import InputError, RunError
from tests.data_utils.helpers import FakeAdapter, FakeCondition

IDENTITY = {"encoder": "e1", "dtype": "bf16", "max_length": "77"}


def record(prompt: str = "a cat", **fields) -> PromptRecord:
    fields = {"source": "a", "source_id": 0, "index": 0, "group_id": 0, **fields}
    return PromptRecord(prompt=prompt, **fields)


def make_cache(
    folder: Path, adapter: FakeAdapter, *, identity=None, need_negative: bool = True, **options
) -> ConditionCache:
    def encode(records: Sequence[PromptRecord]) -> FakeCondition:
        return adapter.encode_prompt([r.prompt for r in records], [r.negative_prompt for r in records], need_negative)

    return ConditionCache(
        folder,
        identity or IDENTITY,
        condition_class=FakeCondition,
        encode=encode,
        need_negative=need_negative,
        **options,
    )


def same(a: FakeCondition, b: FakeCondition) -> bool:
    left, right = a.tensors(), b.tensors()
    return left.keys() == right.keys() and all(
        left[n].dtype == right[n].dtype and torch.equal(left[n], right[n]) for n in left
    )


def media(digest: str) -> tuple[MediaFile, ...]:
    return (MediaFile("image", Modality.IMAGE, Path("images/1.png"), digest),)


BASE = record(negative_prompt="ugly", media=media("d1"))


@pytest.mark.parametrize(
    ("what", "changed", "identity", "need_negative", "noticed"),
    [
        ("nothing", BASE, {}, True, False),
        ("the prompt", replace(BASE, prompt="a dog"), {}, True, True),
        ("the negative prompt", replace(BASE, negative_prompt="blurry"), {}, True, True),
        ("no negative prompt", replace(BASE, negative_prompt=None), {}, True, True),
        ("whether negatives are encoded", BASE, {}, False, True),
        ("a media file's bytes", replace(BASE, media=media("d2")), {}, True, True),
        ("the media's slot", replace(BASE, media=(replace(BASE.media[0], slot="mask"),)), {}, True, True),
        ("the encoder", BASE, {"encoder": "e2"}, True, True),
        ("the dtype", BASE, {"dtype": "fp32"}, True, True),
        ("the maximum length", BASE, {"max_length": "128"}, True, True),
        ("the media's folder", replace(BASE, media=(replace(BASE.media[0], path=Path("x/2.png")),)), {}, True, False),
        ("the dataset's name", replace(BASE, source="b", source_id=9, group_id=5, index=3), {}, True, False),
        ("the metadata", replace(BASE, metadata={"n": 1}), {}, True, False),
    ],
)
def test_key(what: str, changed: PromptRecord, identity: dict, need_negative: bool, noticed: bool, tmp_path) -> None:
    """Pitfall 28: a change of anything the values depend on encodes again; a change of anything else does not."""
    first, second = FakeAdapter(), FakeAdapter()
    make_cache(tmp_path, first).prepare([BASE])
    cache = make_cache(tmp_path, second, identity={**IDENTITY, **identity}, need_negative=need_negative)
    cache.prepare([changed])
    assert bool(second.encoded) is noticed, what
    expected = second.encode_prompt([changed.prompt], [changed.negative_prompt], need_negative)
    assert same(cache.row(changed), expected)


def test_negatives_of_rows_without_a_negative_prompt(tmp_path: Path) -> None:
    """Pitfall 28: an entry encoded without negatives is not taken where negatives are needed."""
    make_cache(tmp_path, FakeAdapter(), need_negative=False).prepare([record()])
    cache = make_cache(tmp_path, FakeAdapter(), need_negative=True)
    cache.prepare([record()])
    assert cache.row(record()).negative is not None


def test_unused_negative_prompts_do_not_matter(tmp_path: Path) -> None:
    """Where negatives are not encoded, another negative prompt is the same entry."""
    make_cache(tmp_path, FakeAdapter(), need_negative=False).prepare([record(negative_prompt="x")])
    adapter = FakeAdapter()
    make_cache(tmp_path, adapter, need_negative=False).prepare([record(negative_prompt="y")])
    assert adapter.encoded == []


def test_values_are_exact_and_encoded_in_batches(tmp_path: Path) -> None:
    """What comes back is what was encoded, in every dtype; equal prompts of two datasets are encoded once."""
    adapter = FakeAdapter()
    records = [record(f"prompt {i}", negative_prompt=f"no {i}" if i % 2 else None) for i in range(11)]
    cache = make_cache(tmp_path, adapter, batch_size=4, shard_rows=8)
    cache.prepare([*records, record("prompt 3", negative_prompt="no 3", source="b")])
    assert [len(batch) for batch in adapter.encoded] == [4, 4, 3]
    assert len(list(cache.folder.glob("*.safetensors"))) == 2 and not list(cache.folder.glob(".*"))
    again = make_cache(tmp_path, FakeAdapter())
    again.prepare(records)
    for r in records:
        assert same(again.row(r), FakeAdapter().encode_prompt([r.prompt], [r.negative_prompt], True))
        assert again.row(r).batch_size == 1


def test_only_what_is_missing_is_encoded(tmp_path: Path) -> None:
    """A longer dataset encodes its new prompts."""
    make_cache(tmp_path, FakeAdapter()).prepare([record("a"), record("b")])
    adapter = FakeAdapter()
    make_cache(tmp_path, adapter).prepare([record("a"), record("c"), record("b")])
    assert adapter.encoded == [["c"]]


def test_a_row_is_decoded_once(tmp_path: Path) -> None:
    """Pitfall 59: a group's members share one decoded row."""
    make_cache(tmp_path, FakeAdapter()).prepare([record("a"), record("b")])
    cache = make_cache(tmp_path, FakeAdapter())
    cache.prepare([record("a"), record("b")])
    rows = [cache.row(record("a")) for _ in range(8)] + [cache.row(record("b"))]
    assert cache.decoded_rows == 2 and all(row is rows[0] for row in rows[:8])


def test_memory_is_bounded(tmp_path: Path) -> None:
    """Beyond the limit the least recently used row leaves and is decoded again when asked for."""
    size = sum(t.numel() * t.element_size() for t in FakeAdapter().encode_prompt(["a"], None, True).tensors().values())
    cache = make_cache(tmp_path, FakeAdapter(), memory_bytes=2 * size)
    cache.prepare([record(p) for p in "abc"])
    for prompt, decoded in (("a", 1), ("b", 2), ("a", 2), ("c", 3), ("a", 3), ("b", 4)):
        cache.row(record(prompt))
        assert cache.decoded_rows == decoded, prompt


def damage(path: Path, how: str) -> None:
    data = bytearray(path.read_bytes())
    if how == "truncated":
        path.write_bytes(data[: len(data) // 2])
    elif how == "empty":
        path.write_bytes(b"")
    elif how == "not safetensors":
        path.write_bytes(b"x" * 64)
    else:  # one bit of the values
        data[-1] ^= 1
        path.write_bytes(data)


@pytest.mark.parametrize("how", ["truncated", "empty", "not safetensors", "one bit"])
def test_corrupted_shard(how: str, tmp_path: Path) -> None:
    """Names the file and the remedy; `force_reprocess` is the remedy."""
    cache = make_cache(tmp_path, FakeAdapter())
    cache.prepare([record("a")])
    (shard,) = cache.folder.glob("*.safetensors")
    damage(shard, how)
    with pytest.raises(InputError) as caught:
        broken = make_cache(tmp_path, FakeAdapter())
        broken.prepare([record("a")])
        broken.row(record("a"))
    assert str(shard) in str(caught.value) and "data.force_reprocess: true" in str(caught.value)
    adapter = FakeAdapter()
    mended = make_cache(tmp_path, adapter)
    mended.prepare([record("a")], force=True)
    assert adapter.encoded == [["a"]] and same(mended.row(record("a")), FakeAdapter().encode_prompt(["a"], None, True))


def test_force_encodes_again(tmp_path: Path) -> None:
    """`force_reprocess` does not trust what is there."""
    make_cache(tmp_path, FakeAdapter()).prepare([record("a")])
    adapter = FakeAdapter()
    make_cache(tmp_path, adapter).prepare([record("a")], force=True)
    assert adapter.encoded == [["a"]]


def test_an_interrupted_write_leaves_nothing_half(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure between write and rename leaves no shard, and what was written before stays."""
    import flow_factory.data_utils.condition_cache as module

    cache = make_cache(tmp_path, FakeAdapter(), batch_size=1, shard_rows=1)
    cache.prepare([record("a")])
    monkeypatch.setattr(module.os, "replace", lambda *_: (_ for _ in ()).throw(OSError("disk full")))
    with pytest.raises(RunError, match=r"disk full.*data\.cache_dir"):
        cache.prepare([record("a"), record("b")])
    monkeypatch.undo()
    assert len(list(cache.folder.iterdir())) == 2  # the first shard and identity.json
    adapter = FakeAdapter()
    make_cache(tmp_path, adapter).prepare([record("a"), record("b")])
    assert adapter.encoded == [["b"]]


def test_a_folder_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    """The path of the cache leads through a file: the field and the remedy, not the operating system's words alone."""
    (tmp_path / "file").write_text("")
    cache = make_cache(tmp_path / "file" / "cache", FakeAdapter())
    with pytest.raises(InputError, match=r"condition cache .*cannot be written: Not a directory.*data\.cache_dir"):
        cache.prepare([record()])


def test_foreign_files_are_not_read(tmp_path: Path) -> None:
    """A safetensors file without an index is named, not taken for a shard; temporary leftovers are ignored."""
    cache = make_cache(tmp_path, FakeAdapter())
    cache.prepare([record("a")])
    (cache.folder / ".left.safetensors.123.tmp").write_bytes(b"half")
    make_cache(tmp_path, FakeAdapter()).prepare([record("a")])
    (shard,) = cache.folder.glob("*.safetensors")
    from safetensors.torch import save_file

    save_file(load_file(shard), cache.folder / "z.safetensors")
    with pytest.raises(InputError, match=r"z\.safetensors is unreadable \(it has no index\)"):
        make_cache(tmp_path, FakeAdapter()).prepare([record("a")])


def test_wrong_row_count_is_an_error(tmp_path: Path) -> None:
    """An adapter that returns another number of rows than prompts."""
    cache = make_cache(tmp_path, FakeAdapter(), batch_size=2)
    cache._encode = lambda records: FakeAdapter().encode_prompt(["only one"], None, True)
    with pytest.raises(ValueError, match="encode returned 1 rows for 2 prompts"):
        cache.prepare([record("a"), record("b")])


def test_encoding_is_announced_and_without_gradients(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The long part of a start is logged; nothing records a graph."""
    cache = make_cache(tmp_path, FakeAdapter())
    grads = []
    encode = cache._encode
    cache._encode = lambda records: (grads.append(torch.is_grad_enabled()), encode(records))[1]
    with caplog.at_level(logging.INFO):
        cache.prepare([record("a")])
    assert "encoding 1 of 1 prompts" in caplog.text and grads == [False]
