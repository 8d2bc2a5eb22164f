"""Loaders: batches with collated conditions, workers that persist, evaluation without double counting."""

from __future__ import annotations

import multiprocessing
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from torch.utils.data import DataLoader

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.loaders import EvalLoader, build_eval_loader, build_eval_loaders, build_prompt_loaders
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetEvalSpec, DatasetTrainSpec
from tests.data_utils.helpers import FakeAdapter, dataset, geometry, run_config, write_jsonl, write_txt


@pytest.fixture
def one(tmp_path: Path) -> SimpleNamespace:
    """One dataset of 12 prompts; M = 6, K = 4, B = 2, groups on one rank."""
    write_txt(tmp_path / "a", "train", [f"{i} cats" for i in range(12)])
    return SimpleNamespace(
        source=dataset(tmp_path / "a", source_id=11),
        cache=tmp_path / "cache",
        numbers=geometry({"a": 6}, 4, 2, "group_contiguous"),
    )


def build(one: SimpleNamespace, adapter: FakeAdapter, numbers=None, comm: Comm | None = None, **data):
    config = run_config([one.source], one.cache, **data)
    return build_prompt_loaders(config, adapter, comm or Comm.single(), numbers or one.numbers)


def content(loader) -> list:
    return [
        ([r.prompt for r in b.records], b.members, {n: t.tolist() for n, t in b.condition.tensors().items()})
        for b in loader
    ]


def test_batches(one: SimpleNamespace) -> None:
    """Rows, members and condition fit together; all of a cycle's groups are complete."""
    loader, by_source = build(one, FakeAdapter())
    assert isinstance(loader, DataLoader) and len(loader) == 12 and list(by_source) == ["a"]
    loader.set_cycle(3)
    batches = list(loader)
    assert len(batches) == 12 and all(len(b) == 2 and b.source == "a" for b in batches)
    rows = [(r.group_id, m) for b in batches for r, m in zip(b.records, b.members, strict=True)]
    assert len(set(rows)) == 24 and len({g for g, _ in rows}) == 6
    for batch in batches:
        expected = FakeAdapter().encode_prompt([r.prompt for r in batch.records], None, False)
        assert torch.equal(batch.condition.embeds, expected.embeds)
        assert all(t.is_contiguous() for t in batch.condition.tensors().values())


def test_cycles_by_number(one: SimpleNamespace) -> None:
    """A cycle's batches depend on its number alone; without `set_cycle` an iteration repeats the same cycle."""
    loader, _ = build(one, FakeAdapter())
    walked = []
    for cycle in range(4):
        loader.set_cycle(cycle)
        walked.append(content(loader))
    fresh, _ = build(one, FakeAdapter())
    fresh.set_cycle(2)
    assert fresh.cycle == 2 and content(fresh) == walked[2] == content(fresh)
    assert walked[0] != walked[1]


def test_conditions_are_decoded_once_per_prompt(one: SimpleNamespace) -> None:
    """Pitfall 59: not once per row; batches inside a group share the collated condition, too."""
    build(one, FakeAdapter())
    adapter = FakeAdapter()
    loader, _ = build(one, adapter)
    list(loader)
    cache = loader.conditions.cache
    assert adapter.encoded == [] and cache.decoded_rows == 6
    assert adapter.collated == 6  # two batches of two rows per group of four
    list(loader)
    assert cache.decoded_rows == 6


def test_no_global_random_numbers(one: SimpleNamespace) -> None:
    """Iterating draws nothing from the global generator, which user code may depend on."""
    loader, _ = build(one, FakeAdapter())
    before = torch.get_rng_state()
    list(loader)
    assert torch.equal(before, torch.get_rng_state())


def test_workers_persist_and_give_the_same_batches(one: SimpleNamespace) -> None:
    """Pitfall 59: the same worker processes serve every cycle, and end with `close`."""
    plain, _ = build(one, FakeAdapter())
    loader, _ = build(one, FakeAdapter(), dataloader_num_workers=2)
    workers = []
    for cycle in range(3):
        plain.set_cycle(cycle)
        loader.set_cycle(cycle)
        assert content(loader) == content(plain)
        workers.append({p.pid for p in multiprocessing.active_children()})
    assert len(workers[0]) == 2 and workers[0] == workers[1] == workers[2]
    next(iter(loader))  # an interrupted cycle
    loader.set_cycle(1)
    plain.set_cycle(1)
    assert content(loader) == content(plain)
    loader.close()
    assert not workers[0] & {p.pid for p in multiprocessing.active_children()}


def test_no_workers_means_no_processes(one: SimpleNamespace) -> None:
    """Pitfall 59: the default reads in this process."""
    loader, _ = build(one, FakeAdapter())
    list(loader)
    assert multiprocessing.active_children() == []
    loader.close()


def test_on_the_fly(one: SimpleNamespace) -> None:
    """Without preprocessing each prompt is encoded once per cycle, one by one, and nothing is written."""
    adapter = FakeAdapter()
    loader, _ = build(one, adapter, enable_preprocess=False)
    assert adapter.encoded == []
    first = content(loader)
    assert len(adapter.encoded) == 6 and all(len(batch) == 1 for batch in adapter.encoded)
    assert content(loader) == first and len(adapter.encoded) == 12
    assert not one.cache.exists()
    cached, _ = build(one, FakeAdapter())
    assert content(cached) == first
    with pytest.raises(InputError, match=r"dataloader_num_workers 1 .*enable_preprocess"):
        build(one, adapter, enable_preprocess=False, dataloader_num_workers=1)


def test_ranks_share_a_cycle(one: SimpleNamespace) -> None:
    """Two ranks: equal numbers of batches, disjoint samples, complete groups on each."""
    build(one, FakeAdapter())  # fills the cache, so that no rank has to
    numbers = geometry({"a": 6}, 4, 2, "group_contiguous", 2)
    seen = []
    for rank in range(2):
        comm = FakeComm(rank)
        loader, _ = build(one, FakeAdapter(), numbers, comm)
        seen.append([(r.group_id, m) for b in loader for r, m in zip(b.records, b.members, strict=True)])
    assert len(seen[0]) == len(seen[1]) == 12 and not set(seen[0]) & set(seen[1])


class FakeComm(Comm):
    """A rank of two that meets nobody."""

    def __init__(self, rank: int) -> None:
        super().__init__(rank, 2)

    def barrier(self) -> None:
        pass

    def raise_together(self, error: BaseException | None) -> None:
        if error is not None:
            raise error


@pytest.mark.parametrize(
    ("scale", "optimizer_scale", "encoded"), [(1.0, 1.0, False), (4.5, 4.5, True), (1.0, 4.5, True)]
)
def test_negatives_are_encoded_when_anything_needs_them(
    one: SimpleNamespace, scale: float, optimizer_scale: float, encoded: bool
) -> None:
    """Pitfall 35: guidance that only the optimizer uses needs negatives, too; rows without a negative prompt work."""
    write_jsonl(Path(one.source.dataset_dir), "two", [{"prompt": "a"}, {"prompt": "b", "negative_prompt": "ugly"}])
    one.source.train = DatasetTrainSpec(split="two")
    slots = (MediaSlot(Modality.TEXT, "prompt"), MediaSlot(Modality.TEXT, "negative_prompt", required=False))
    adapter = FakeAdapter(io=PipelineIOContract(slots, (Modality.IMAGE,)))
    loader, _ = build(
        one,
        adapter,
        geometry({"a": 2}, 2, 2, "group_contiguous"),
        guidance_scale=scale,
        preprocess_guidance_scale=optimizer_scale,
    )
    (batch, _) = sorted(loader, key=lambda b: b.records[0].prompt)
    assert (batch.condition.negative is not None) is encoded
    assert adapter.negatives == [[None, "ugly"] if encoded else None]


def test_several_datasets(tmp_path: Path) -> None:
    """Weighted datasets of both formats: one source per batch, and a loader for each."""
    write_txt(tmp_path / "t", "train", [f"t{i}" for i in range(5)])
    write_jsonl(tmp_path / "j", "train", [{"prompt": f"j{i}", "n": i} for i in range(6)])
    sources = [
        dataset(tmp_path / "t", "t"),
        dataset(tmp_path / "j", "j", train=DatasetTrainSpec(weight=2)),
        dataset(tmp_path / "nowhere", "off", train=DatasetTrainSpec(enabled=False)),
    ]
    config = run_config(sources, tmp_path / "cache")
    numbers = geometry({"t": 2, "j": 4}, 2, 2, "distributed_k_repeat")
    loader, by_source = build_prompt_loaders(config, FakeAdapter(), Comm.single(), numbers)
    batches = list(loader)
    assert all({r.source for r in b.records} == {b.source} for b in batches)
    assert sorted(b.source for b in batches) == ["j"] * 4 + ["t"] * 2
    assert {r.source_id for b in batches for r in b.records} == {0, 1}
    assert {name: len(part) for name, part in by_source.items()} == {"t": 2, "j": 4}
    assert content(by_source["j"]) == [c for c, b in zip(content(loader), batches, strict=True) if b.source == "j"]
    assert {r.metadata.get("n") for b in batches if b.source == "j" for r in b.records} <= set(range(6))


def test_more_prompts_than_the_dataset_has(one: SimpleNamespace) -> None:
    """M larger than the dataset names both numbers."""
    with pytest.raises(InputError, match="dataset 'a' has 12 prompts, but a cycle draws 16"):
        build(one, FakeAdapter(), geometry({"a": 16}, 4, 2, "group_contiguous"))


@pytest.mark.parametrize("world", [1, 2, 3, 8])
def test_evaluation_counts_every_prompt_once(one: SimpleNamespace, world: int) -> None:
    """Pitfall 19: no padding; over all ranks every prompt appears exactly once, in batches of at most B."""
    folder = Path(one.source.dataset_dir)
    write_txt(folder, "test", [f"t{i % 6}" for i in range(7)])  # a repeated prompt is evaluated twice
    built = build_eval_loader(run_config([one.source], one.cache), FakeAdapter(), Comm.single(), one.source)
    seen = []
    for rank in range(world):
        loader = EvalLoader(built.dataset, built.conditions, 2, rank, world)
        batches = list(loader)
        assert len(batches) == len(loader) and all(1 <= len(b) <= 2 for b in batches)
        assert sum(map(len, batches)) == loader.num_local
        seen += [r.index for b in batches for r in b.records]
    assert sorted(seen) == list(range(7))


def test_each_loader_encodes_with_its_own_section(one: SimpleNamespace) -> None:
    """`eval.max_sequence_length` is not `train.max_sequence_length`."""
    write_txt(Path(one.source.dataset_dir), "test", ["only for evaluation"])
    config, adapter = run_config([one.source], one.cache), FakeAdapter()
    build_eval_loader(config, adapter, Comm.single(), one.source)
    assert {g.max_sequence_length for g in adapter.generations} == {55}
    adapter.generations.clear()
    build(one, adapter, geometry({"a": 4}, 4, 2, "group_contiguous"))
    assert {g.max_sequence_length for g in adapter.generations} == {77}


def test_which_datasets_are_evaluated(tmp_path: Path) -> None:
    """An enabled spec, or no spec and a test file; a spec without its file is an error."""
    for name in ("both", "off", "other"):
        write_txt(tmp_path / name, "train", ["a"])
        write_txt(tmp_path / name, "test", ["b"])
    write_txt(tmp_path / "other", "held_out", ["c", "d", "e"])
    write_txt(tmp_path / "train_only", "train", ["a"])
    sources = [
        dataset(tmp_path / "both", "both"),
        dataset(tmp_path / "off", "off", eval=DatasetEvalSpec(enabled=False)),
        dataset(tmp_path / "other", "other", eval=DatasetEvalSpec(split="held_out", max_dataset_size=2)),
        dataset(tmp_path / "train_only", "train_only"),
    ]
    loaders = build_eval_loaders(run_config(sources, tmp_path / "cache"), FakeAdapter(), Comm.single())
    assert {n: [r.prompt for b in x for r in b.records] for n, x in loaders.items()} == {
        "both": ["b"],
        "other": ["c", "d"],
    }
    sources[3].eval = DatasetEvalSpec()
    with pytest.raises(InputError, match=r"no test\.txt or test\.jsonl"):
        build_eval_loaders(run_config(sources, tmp_path / "cache"), FakeAdapter(), Comm.single())


def test_evaluation_guidance_decides_its_negatives(one: SimpleNamespace) -> None:
    """The dataset's own guidance scale over that of `eval:`."""
    write_txt(Path(one.source.dataset_dir), "test", ["t"])
    for spec, scale, encoded in ((None, 1.0, False), (None, 3.0, True), (1.0, 3.0, False), (2.0, 1.0, True)):
        one.source.eval = DatasetEvalSpec(guidance_scale=spec)
        config = run_config([one.source], one.cache, eval_guidance_scale=scale)
        (batch,) = build_eval_loader(config, FakeAdapter(), Comm.single(), one.source)
        assert (batch.condition.negative is not None) is encoded
