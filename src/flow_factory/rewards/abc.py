"""What a reward model is: samples in, one number per sample out.

A reward model declares what it reads (`required_fields`) and its own settings (`Params`), and implements `score`.
Batching, dataset masks, failures, threads and the checking of what comes back belong to `RewardProcessor` and
`RewardBuffer`, so a reward is mostly its own measurement:

    class Redness(PointwiseRewardModel):
        required_fields = ("image",)

        def score(self, samples):
            return [s.image[0].float().mean().item() / 255 for s in samples]

This module imports no torch, so that `check` can validate the parameters of light rewards quickly.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

from flow_factory.rewards.params import parse_params

if TYPE_CHECKING:
    import numpy as np
    import torch

    from flow_factory.hparams import RewardArguments
    from flow_factory.samples import BaseSample

    Scores: TypeAlias = Sequence[float | None] | torch.Tensor | np.ndarray


class RewardFailure(Exception):
    """Raised by `score` when it could not judge the samples it was given (a judge timed out, a server is down).

    Those samples count as *failed*: they get no reward and no advantage. A failure is never a score of 0.
    """


class BaseRewardModel(ABC):
    """Base of both kinds of reward model; subclass `PointwiseRewardModel` or `GroupwiseRewardModel`.

    Args:
        config: One entry of `rewards:`. `config.params` is validated against `Params`.

    Attributes:
        required_fields: Names of sample attributes that must be present and not None: "image", "video", "audio", or
            "frames", which pictures (as one) and videos have alike.
        Params: A stdlib dataclass with this reward's own settings, or None if it has none.
        config: The entry this model was built from.
        name: The reward's name in logs and in `sample.rewards`.
        params: An instance of `Params`, or None.

    Raises:
        InputError: If `config.params` has unknown keys or wrong values.
    """

    required_fields: ClassVar[tuple[str, ...]] = ()
    Params: ClassVar[type | None] = None

    def __init__(self, config: RewardArguments) -> None:
        self.config = config
        self.name: str = config.name
        self.params: Any = parse_params(self.Params, config.params, reward=config.name)

    @property
    def device(self) -> str:
        """Where this reward computes ("cpu", "cuda:0"); `auto` has been resolved by the builder."""
        return "cpu" if self.config.device == "auto" else self.config.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype this reward's own network computes in."""
        import torch

        name: str = self.config.dtype
        aliases = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}
        return getattr(torch, aliases.get(name, name))

    @abstractmethod
    def score(self, samples: Sequence[BaseSample]) -> Scores | Awaitable[Scores]:
        """Scores samples; see the two subclasses. May be `async def`: it then runs on one owned event loop.

        It is called without gradients; a measurement that differentiates enables them itself (`torch.enable_grad()`).
        """

    def close(self) -> None:  # noqa: B027 - optional hook
        """Releases clients, servers and memory; called once when the run ends."""


class PointwiseRewardModel(BaseRewardModel):
    """Scores every sample by itself."""

    @abstractmethod
    def score(self, samples: Sequence[BaseSample]) -> Scores | Awaitable[Scores]:
        """Scores a batch of samples.

        Args:
            samples: At most `config.batch_size` samples, all with the `required_fields`. Not to be modified.

        Returns:
            One number per sample, in order: a sequence of floats, a tensor or an array of shape [len(samples)].
            None in a sequence marks that sample as failed.

        Raises:
            RewardFailure: If none of the samples could be judged.
        """


class GroupwiseRewardModel(BaseRewardModel):
    """Scores the samples of one prompt against each other (rankings, diversity, win rates)."""

    @abstractmethod
    def score(self, samples: Sequence[BaseSample]) -> Scores | Awaitable[Scores]:
        """Scores one complete group.

        Args:
            samples: All K samples of one prompt, ordered by member. Not to be modified.

        Returns:
            One number per sample, in order: a sequence of floats, a tensor or an array of shape [len(samples)].
            None in a sequence marks that sample as failed.

        Raises:
            RewardFailure: If the group could not be judged.
        """
