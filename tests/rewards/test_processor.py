"""RewardProcessor: masks, batches, groups, failures, and what it says about wrong results."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Sequence

import numpy as np
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.rewards.abc import PointwiseRewardModel, RewardFailure
from flow_factory.rewards.processor import RewardProcessor
from flow_factory.rewards.smoke import smoke_reward
from flow_factory.samples import BaseSample, T2AVSample, T2VSample
from tests.rewards.helpers import PixelReward, RankReward, Returns, config, make_sample, returning


@pytest.mark.parametrize("batch_size", [1, 3, 4, 16])
def test_batch_size_is_honoured(batch_size: int) -> None:
    """Pitfall 33: no call sees more samples than `batch_size`, and all are scored in order."""
    model = PixelReward(config(batch_size=batch_size))
    samples = [make_sample(i, value=i) for i in range(10)]
    RewardProcessor(models=[model]).score(samples)
    assert model.calls == [batch_size] * (10 // batch_size) + ([10 % batch_size] if 10 % batch_size else [])
    assert [s.rewards["r"] for s in samples] == [float(i) for i in range(10)]


@pytest.mark.parametrize(
    "answer",
    [
        lambda s: [1, 2.5],
        lambda s: (1, 2.5),
        lambda s: torch.tensor([1, 2.5]),
        lambda s: np.array([1, 2.5]),
        lambda s: torch.tensor([1, 2.5], dtype=torch.bfloat16, requires_grad=True),
        lambda s: [torch.tensor(1), np.float32(2.5)],
    ],
)
def test_accepted_results(answer: object) -> None:
    """Lists, tensors and arrays of one number per sample."""
    samples = [make_sample(0), make_sample(1)]
    RewardProcessor(models=[returning(answer)]).score(samples)
    assert [s.rewards["r"] for s in samples] == [1.0, 2.5]
    assert all(type(s.rewards["r"]) is float for s in samples)


@pytest.mark.parametrize(
    ("answer", "said"),
    [
        (torch.zeros(2, 1), "shape (2, 1) for 2 samples; return shape (2,)"),
        (torch.zeros(()), "shape () for 2 samples"),
        (np.zeros(3), "shape (3,) for 2 samples"),
        ([1.0], "returned 1 scores for 2 samples"),
        ([1.0, 2.0, 3.0], "returned 3 scores for 2 samples"),
        (None, "returned NoneType for 2 samples"),
        (1.0, "returned float for 2 samples"),
        ("12", "returned str for 2 samples"),
        ({0: 1.0, 1: 2.0}, "returned dict for 2 samples"),
        (["1.0", "2.0"], "returned str for one sample"),
        ([[1.0], [2.0]], "returned list for one sample"),
        ([torch.zeros(1), torch.zeros(1)], "returned Tensor of shape (1,) for one sample"),
        ([1j, 2j], "returned complex for one sample"),
    ],
)
def test_wrong_results_are_named(answer: object, said: str) -> None:
    """A wrong shape, number or type stops the run and names class and shapes."""
    with pytest.raises(RunError) as caught:
        RewardProcessor(models=[returning(answer)]).score([make_sample(0), make_sample(1)])
    assert said in str(caught.value)
    assert "reward 'r' (tests.rewards.helpers.Returns)" in str(caught.value)


class Differentiable(PointwiseRewardModel):
    """Notes whether its network would keep activations."""

    seen: list[bool]

    def score(self, samples: Sequence[BaseSample]) -> list[float]:
        weight = torch.ones(3, requires_grad=True)
        self.seen = [(weight * 2).requires_grad, torch.is_grad_enabled()]
        with torch.enable_grad():
            (slope,) = torch.autograd.grad((weight**2).sum(), weight)
        return slope[: len(samples)].tolist()


class DifferentiableAsync(Differentiable):
    async def score(self, samples: Sequence[BaseSample]) -> list[float]:  # type: ignore[override]
        await asyncio.sleep(0)
        return Differentiable.score(self, samples)


@pytest.mark.parametrize("cls", [Differentiable, DifferentiableAsync])
def test_rewards_compute_without_gradients_unless_they_ask(cls: type[Differentiable]) -> None:
    model, samples = cls(config()), [make_sample(0), make_sample(1)]
    processor = RewardProcessor(models=[model])
    processor.score(samples)
    processor.close()
    assert model.seen == [False, False] and torch.is_grad_enabled()
    assert [s.rewards["r"] for s in samples] == [2.0, 2.0]


def test_a_failed_reward_is_not_zero() -> None:
    """Pitfall 29: a judge that fails leaves None, whether it says so for one sample or for a whole batch."""
    samples = [make_sample(i) for i in range(4)]
    RewardProcessor(models=[returning(lambda s: [0.0 if x.index else None for x in s])]).score(samples)
    assert [s.rewards["r"] for s in samples] == [None, 0.0, 0.0, 0.0]

    def down(batch: list) -> list:
        if batch[0].index == 2:
            raise RewardFailure("the judge timed out")
        return [7.0] * len(batch)

    RewardProcessor(models=[returning(down, batch_size=2)]).score(samples)
    assert [s.rewards["r"] for s in samples] == [7.0, 7.0, None, None]


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_non_finite_reward_stops_the_run_and_saves_the_sample(bad: float, tmp_path) -> None:
    """Pitfall 30: NaN never reaches a group; the error names reward, prompt and file, and the file is the picture."""
    samples = [make_sample(0, value=10), make_sample(1, value=200, prompt='a "quoted"/slashed cat')]
    processor = RewardProcessor(models=[returning([0.5, bad], name="fid/score")], artifact_dir=tmp_path / "failed")
    with pytest.raises(RunError) as caught:
        processor.score(samples)
    files = sorted(path.name for path in (tmp_path / "failed").iterdir())
    assert len(files) == 2 and files[1].endswith(".png")
    for part in ("'fid/score'", repr(samples[1].prompt), files[1], str(bad)):
        assert part in str(caught.value)
    with Image.open(tmp_path / "failed" / files[1]) as picture:
        assert picture.size == (8, 8) and picture.getpixel((3, 3)) == (200, 200, 200)
    facts = json.loads((tmp_path / "failed" / files[0]).read_text())
    assert facts["prompt"] == samples[1].prompt and facts["group_id"] == 1001
    assert all("fid/score" not in s.rewards for s in samples)


def test_an_exception_in_a_reward_names_it() -> None:
    """Other exceptions are not failures to shrug off: they stop the run with the reward's name."""
    with pytest.raises(RunError, match=r"reward 'r' .* raised ZeroDivisionError: by zero .*'prompt 0'"):
        RewardProcessor(models=[returning(ZeroDivisionError("by zero"))]).score([make_sample(0)])


def test_a_reward_that_exits_names_itself() -> None:
    """`sys.exit()` inside a judge does not end the run in silence with the judge's exit code."""
    with pytest.raises(RunError, match=r"reward 'r' .* raised SystemExit: 3"):
        RewardProcessor(models=[returning(SystemExit(3))]).score([make_sample(0)])


def test_a_video_that_cannot_be_scored_is_saved_whole_and_to_be_looked_at(tmp_path) -> None:
    sound = 0.1 * torch.randn(2, 100, generator=torch.Generator().manual_seed(0))
    frames = torch.arange(81, dtype=torch.uint8)[:, None, None, None].expand(81, 3, 8, 12)
    media = {"video": frames, "audio": sound, "fps": 24.0, "sample_rate": 16000}
    sample = T2AVSample(**{**{k: v for k, v in vars(make_sample()).items() if k != "image"}, **media})
    with pytest.raises(RunError, match="returned nan"):
        RewardProcessor(models=[returning([float("nan")])], artifact_dir=tmp_path).score([sample])
    facts, picture, tensors = sorted(tmp_path.iterdir(), key=lambda path: path.suffix)
    saved = load_file(tensors)
    assert torch.equal(saved["video"], frames) and torch.equal(saved["audio"], sound)
    facts = json.loads(facts.read_text())
    assert (facts["fps"], facts["sample_rate"], facts["prompt"]) == (24.0, 16000, "prompt 0")
    with Image.open(picture) as opened:
        assert opened.size == (8 * 12, 8), "eight of the frames, side by side"
        assert [opened.getpixel((12 * i, 0))[0] for i in (0, 7)] == [0, 80]


def test_applicable_datasets_and_weights() -> None:
    """Masks: a reward that does not apply is absent, not None and not 0; weights may differ by dataset."""
    only_b = PixelReward(config("only_b", applicable_datasets=["b"], weight=3.0))
    both = PixelReward(config("both", weight={"a": 0.5, "b": 2.0}))
    processor = RewardProcessor(models=[only_b, both], sources=["a", "b"])
    samples = [make_sample(0, source="a", value=1), make_sample(1, source="b", value=2)]
    processor.score(samples)
    assert samples[0].rewards == {"both": 1.0}
    assert samples[1].rewards == {"only_b": 2.0, "both": 2.0}
    assert processor.weights_for(samples[0]) == {"both": 0.5}
    assert processor.weights_for(samples[1]) == {"only_b": 3.0, "both": 2.0}
    assert processor.names_for("a") == ["both"]


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"applicable_datasets": ["c"]}, "no dataset 'c'; the datasets are a, b"),
        ({"weight": {"a": 1.0, "z": 1.0}}, "rewards[r].weight: there is no dataset 'z'"),
        ({"weight": {"a": 1.0}, "applicable_datasets": ["a", "b"]}, "rewards[r].weight has no entry for 'b'"),
    ],
)
def test_dataset_names_are_checked(fields: dict, said: str) -> None:
    """Names of datasets that do not exist are errors, not masks that never match."""
    with pytest.raises(InputError) as caught:
        RewardProcessor(models=[PixelReward(config(**fields))], sources=["a", "b"])
    assert said in str(caught.value)


def test_groupwise_rewards_see_complete_groups_in_member_order() -> None:
    """Members arrive shuffled and interleaved; the reward sees whole groups, ordered, and results go home."""
    model = RankReward(config())
    order = [(1, 2), (0, 1), (1, 0), (0, 2), (0, 0), (1, 1)]
    samples = [make_sample(i, m, value=10 * i + 5 - m) for i, m in order]
    RewardProcessor(models=[model], group_size=3).score(samples)
    assert model.calls == [[0, 1, 2], [0, 1, 2]]
    assert [s.rewards["r"] for s in samples] == [2.0 - m for _, m in order]


def test_incomplete_group_is_an_error() -> None:
    """A groupwise reward never compares a part of a group."""
    with pytest.raises(RunError, match=r"needs complete groups: it got 2 of 3 samples of the prompt 'prompt 0'"):
        RewardProcessor(models=[RankReward(config())], group_size=3).score([make_sample(0, m) for m in range(2)])


def test_groupwise_reward_with_split_groups_is_refused_at_build() -> None:
    """Groups split over ranks: said before the run, with the sampler that helps."""
    two = Comm(rank=0, world_size=2)
    with pytest.raises(InputError, match=r"data\.sampler_type: group_contiguous"):
        RewardProcessor(comm=two, groups_are_local=False, models=[RankReward(config())])
    RewardProcessor(comm=two, groups_are_local=True, models=[RankReward(config())])
    RewardProcessor(comm=two, groups_are_local=False, models=[PixelReward(config())])


def test_missing_field_is_named() -> None:
    """A reward for images on a video: an input error, not an AttributeError."""
    image = make_sample()
    fields = {k: v for k, v in vars(image).items() if k != "image"}
    with pytest.raises(InputError, match=r"reads 'image', which a T2VSample of dataset 'a' does not have"):
        RewardProcessor(models=[PixelReward(config())]).score([T2VSample(**fields)])


class AsyncReward(PointwiseRewardModel):
    """Remembers the loop and the thread it ran on."""

    def __init__(self, config) -> None:
        super().__init__(config)
        self.loops: list[asyncio.AbstractEventLoop] = []
        self.threads: set[str] = set()
        self.lock: asyncio.Lock | None = None

    async def score(self, samples):
        # A client, as a lock: bound to the loop it is first waited for on.
        self.lock = self.lock or asyncio.Lock()
        async with self.lock:
            await asyncio.sleep(0.001)
        self.loops.append(asyncio.get_running_loop())
        self.threads.add(threading.current_thread().name)
        return [float(s.index) for s in samples]


def test_async_rewards_share_one_event_loop() -> None:
    """Pitfall 32: a client of an async reward always meets the loop it is bound to, from any calling thread."""
    model = AsyncReward(config(batch_size=1))
    processor = RewardProcessor(models=[model])
    smoke_reward(model, processor=processor)
    processor.score([make_sample(i) for i in range(3)])
    thread = threading.Thread(target=processor.score_chunk, args=("r", [make_sample(4)]))
    thread.start()
    thread.join()
    assert len(set(map(id, model.loops))) == 1 and len(model.loops) == 6
    assert model.threads == {"reward-event-loop"}
    processor.close()
    assert "reward-event-loop" not in {t.name for t in threading.enumerate()}


def test_smoke_scores_blank_and_noise_and_applies_the_checks() -> None:
    """What `check --dry-run` calls: two values; wrong results are refused as in a run."""
    blank, noise = smoke_reward(PixelReward(config(applicable_datasets=["b"])))
    assert blank == 128.0 and noise is not None and noise != 128.0
    assert smoke_reward(RankReward(config())) != []
    with pytest.raises(RunError, match="shape"):
        smoke_reward(returning(torch.zeros(2, 2)))
    assert smoke_reward(returning(RewardFailure("down"))) == [None, None]


def test_no_samples_is_no_call() -> None:
    """An empty cycle asks nothing of a reward."""
    model = Returns(config())
    model.answer = AssertionError("called")
    RewardProcessor(models=[model]).score([])
