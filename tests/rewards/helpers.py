"""Samples and rewards made up for tests."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch

from flow_factory.hparams.reward_args import RewardArguments
from flow_factory.rewards.abc import GroupwiseRewardModel, PointwiseRewardModel
from flow_factory.samples import Condition, Grid, NoiseKey, T2ISample, T2VSample, Trajectory


def make_sample(index: int = 0, member: int = 0, *, source: str = "a", value: int = 0, prompt: str = "") -> T2ISample:
    """An 8 x 8 picture of one gray value, of group `index`."""
    grid = Grid.single(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    return T2ISample(
        prompt=prompt or f"prompt {index}",
        source=source,
        source_id=0,
        index=index,
        group_id=1000 + index,
        member=member,
        key=NoiseKey(0, 0, 1000 + index, member),
        condition=Condition(),
        trajectory=Trajectory(grid, (0.0,)),
        image=torch.full((3, 8, 8), value, dtype=torch.uint8),
    )


def make_video(frames: torch.Tensor) -> T2VSample:
    """A video of uint8 frames [F, C, H, W]."""
    fields = {**vars(make_sample()), "video": frames, "fps": 8.0}
    del fields["image"]
    return T2VSample(**fields)


def config(name: str = "r", **fields: Any) -> RewardArguments:
    """An entry of `rewards:`."""
    fields.setdefault("reward_model", "tests.rewards.helpers.PixelReward")
    return RewardArguments(name=name, **fields)


class PixelReward(PointwiseRewardModel):
    """The gray value; remembers the sizes of its calls."""

    required_fields = ("image",)

    def __init__(self, config: RewardArguments) -> None:
        super().__init__(config)
        self.calls: list[int] = []

    def score(self, samples: Any) -> Any:
        self.calls.append(len(samples))
        return [float(s.image[0, 0, 0]) for s in samples]


class Returns(PointwiseRewardModel):
    """Returns whatever it is told to, or raises it."""

    answer: Any = None

    def score(self, samples: Any) -> Any:
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer(samples) if callable(self.answer) else self.answer


class RankReward(GroupwiseRewardModel):
    """Rank of each sample's gray value in its group; remembers the members of its calls."""

    def __init__(self, config: RewardArguments) -> None:
        super().__init__(config)
        self.calls: list[list[int]] = []

    def score(self, samples: Any) -> Any:
        self.calls.append([s.member for s in samples])
        values = [int(s.image[0, 0, 0]) for s in samples]
        return torch.tensor([sorted(values).index(v) for v in values], dtype=torch.float32)


@dataclass
class SizeParams:
    """Settings of `WithParams`."""

    scale: float
    level: int = 1
    flag: bool = False
    names: list[str] = field(default_factory=list)


class WithParams(PixelReward):
    """A reward with settings of its own."""

    Params = SizeParams


def returning(answer: Any, name: str = "r", **fields: Any) -> Returns:
    """A reward that gives `answer`."""
    model = Returns(config(name, **fields))
    model.answer = answer
    return model
