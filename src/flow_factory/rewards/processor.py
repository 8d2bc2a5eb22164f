"""Scores samples with all rewards of a section: masks, batches, groups, failures and the checking of results."""

from __future__ import annotations

import copy
import inspect
import logging
import math
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flow_factory.errors import FlowFactoryError, InputError, RunError
from flow_factory.rewards.abc import BaseRewardModel, GroupwiseRewardModel, RewardFailure
from flow_factory.rewards.build import build_reward_models, check_sources
from flow_factory.rewards.event_loop import EventLoopThread
from flow_factory.rewards.results import check_scores, class_path
from flow_factory.samples import BaseSample

if TYPE_CHECKING:
    from flow_factory.distributed import Comm
    from flow_factory.hparams import MultiRewardArguments

logger = logging.getLogger(__name__)


class RewardProcessor:
    """Owns the reward models of one section (`rewards:` or `eval_rewards:`).

    Args:
        config: The section; ignored where `models` is given.
        comm: This rank's view of the process group. Scoring itself is local: nothing is exchanged.
        device: This rank's device, for rewards whose device is `auto` or `cuda`.
        artifact_dir: Where samples with a non-finite score are saved; None saves nothing.
        sources: Names of the run's datasets, to check those that the rewards mention; empty skips the check.
        groups_are_local: Whether all samples of a prompt are generated on one rank (see `samplers.is_rank_local`).
        group_size: K, to check that groupwise rewards see complete groups; None accepts any.
        models: Ready-made models instead of `config`.

    Raises:
        InputError: If an entry is wrong, or a groupwise reward would see groups that are split over ranks.
    """

    def __init__(
        self,
        config: MultiRewardArguments | None = None,
        comm: Comm | None = None,
        device: str = "cpu",
        *,
        artifact_dir: Path | str | None = None,
        sources: Iterable[str] = (),
        groups_are_local: bool = True,
        group_size: int | None = None,
        models: Sequence[BaseRewardModel] | None = None,
    ) -> None:
        sources = list(sources)
        if models is None:
            models = [] if config is None else build_reward_models(config, str(device), sources)
        else:
            for model in models:
                check_sources(model.config, sources)
        self.models: dict[str, BaseRewardModel] = {model.name: model for model in models}
        self.artifact_dir = None if artifact_dir is None else Path(artifact_dir)
        self.group_size = group_size
        self._loop = EventLoopThread()
        world_size = 1 if comm is None else comm.world_size
        for model in models:
            if isinstance(model, GroupwiseRewardModel) and world_size > 1 and not groups_are_local:
                raise InputError(
                    f"rewards[{model.name}]: {class_path(model)} compares the samples of a prompt, but the sampler "
                    "splits groups over ranks. Set data.sampler_type: group_contiguous (or auto)."
                )

    @property
    def names(self) -> tuple[str, ...]:
        """Reward names in the order of the configuration."""
        return tuple(self.models)

    def names_for(self, source: str) -> list[str]:
        """Names of the rewards that judge samples of dataset `source`."""
        return [name for name in self.models if self.applies(name, source)]

    def applies(self, name: str, source: str) -> bool:
        """Whether reward `name` judges samples of dataset `source`."""
        return self.models[name].config.applies_to(source)

    def weights_for(self, sample: BaseSample) -> dict[str, float]:
        """Weights of the rewards that apply to `sample`, by name."""
        return {name: self.models[name].config.weight_for(sample.source) for name in self.names_for(sample.source)}

    def score(self, samples: Sequence[BaseSample]) -> None:
        """Scores samples with every applicable reward and stores the results in `sample.rewards` (None: failed).

        Raises:
            RunError: If a reward raises, or returns something that is not one finite number per sample.
        """
        for name in self.models:
            for chunk in self.chunks(name, samples):
                for sample, value in zip(chunk, self.score_chunk(name, chunk), strict=True):
                    sample.rewards[name] = value

    def chunks(self, name: str, samples: Sequence[BaseSample]) -> list[list[BaseSample]]:
        """Splits the samples a reward applies to into the calls it gets: batches of its `batch_size`, or groups.

        Raises:
            RunError: If a groupwise reward would get an incomplete group.
        """
        model = self.models[name]
        mine = [sample for sample in samples if self.applies(name, sample.source)]
        if not isinstance(model, GroupwiseRewardModel):
            size = model.config.batch_size
            return [mine[i : i + size] for i in range(0, len(mine), size)]
        groups: dict[int, list[BaseSample]] = {}
        for sample in mine:
            groups.setdefault(sample.group_id, []).append(sample)
        for group in groups.values():
            if self.group_size is not None and len(group) != self.group_size:
                raise RunError(
                    f"reward {name!r} ({class_path(model)}) needs complete groups: it got {len(group)} of "
                    f"{self.group_size} samples of the prompt {group[0].prompt!r}."
                )
            group.sort(key=lambda sample: sample.member)
        return list(groups.values())

    def window(self, source: str) -> int | None:
        """How many samples of dataset `source` can be scored apart from the others with the calls they all would get.

        Returns:
            The smallest common multiple of the batch sizes; None if a groupwise reward judges the dataset.
        """
        models = [self.models[name] for name in self.names_for(source)]
        if any(isinstance(model, GroupwiseRewardModel) for model in models):
            return None
        return math.lcm(*(model.config.batch_size for model in models))

    def score_chunk(self, name: str, samples: Sequence[BaseSample]) -> list[float | None]:
        """One call of one reward; touches no sample. Callable from several threads.

        Returns:
            One float per sample, None where scoring failed.

        Raises:
            RunError: If the reward raises something other than RewardFailure, or returns something wrong.
        """
        model = self.models[name]
        self._check_fields(model, samples)
        try:
            with torch.no_grad():  # scores are data; an author's network would keep its activations otherwise
                returned: Any = model.score(samples)
            if inspect.iscoroutine(returned):
                returned = self._loop.run(returned)
        except RewardFailure as failure:
            logger.warning("reward %r failed on %d samples: %s", name, len(samples), failure)
            return [None] * len(samples)
        except FlowFactoryError:
            raise
        except (Exception, SystemExit) as error:  # a judge that calls sys.exit() must not end the run without a word
            raise RunError(
                f"reward {name!r} ({class_path(model)}) raised {type(error).__name__}: {error} (while scoring "
                f"{len(samples)} samples, first prompt {samples[0].prompt!r})."
            ) from error
        scores = check_scores(model, samples, returned, self.artifact_dir)
        failed = sum(score is None for score in scores)
        if failed:
            logger.warning("reward %r failed on %d of %d samples", name, failed, len(samples))
        return scores

    def without_groups(self) -> RewardProcessor:
        """The same models on the same event loop, for samples that are not in complete groups (evaluation).

        Models and loop stay this processor's: the other one is not to be closed.
        """
        other = copy.copy(self)
        other.group_size = None
        return other

    def close_loop(self) -> None:
        """Ends the thread that ran coroutines, if there is one; the models stay usable."""
        self._loop.close()

    def close(self) -> None:
        """Closes the models and ends the thread that ran coroutines."""
        for model in self.models.values():
            model.close()
        self.close_loop()

    @staticmethod
    def _check_fields(model: BaseRewardModel, samples: Sequence[BaseSample]) -> None:
        for sample in samples:
            for field in model.required_fields:
                if getattr(sample, field, None) is None:
                    raise InputError(
                        f"rewards[{model.name}]: {class_path(model)} reads {field!r}, which a {type(sample).__name__} "
                        f"of dataset {sample.source!r} does not have. Use a reward for this kind of output, or limit "
                        "it through applicable_datasets."
                    )
