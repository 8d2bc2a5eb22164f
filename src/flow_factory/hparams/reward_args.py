"""What judges the samples."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import Device, DType, PositiveInt, Section, option


@dataclass
class RewardArguments(Section):
    """One entry of `rewards:` or `eval_rewards:`."""

    name: str = option("default", "Name of the reward in metrics. Unique.")
    reward_model: str | None = option(
        None, "Key of the reward (`flow-factory list rewards`), or a dotted path to a reward class. Required."
    )
    weight: float | dict[str, float] = option(1.0, "Weight in the advantage: one number, or one per dataset name.")
    dtype: DType = option(
        "bfloat16", "dtype of the reward's own network, if it has one: fp32, bf16, fp16, or their long names."
    )
    device: Device = option("auto", "Device of the reward's own network; auto: that of the trainer.")
    batch_size: PositiveInt = option(16, "Samples scored together.")
    async_reward: bool = option(False, "Score while the rollout goes on. Needs a sampler that keeps groups on a rank.")
    num_workers: PositiveInt = option(1, "Threads that score when async_reward is true.")
    applicable_datasets: list[str] | None = option(None, "Names of the datasets this reward judges; null: all.")
    params: dict[str, Any] = option(factory=dict, help="Parameters specific to this reward.")

    def __post_init__(self) -> None:
        if not self.reward_model or not self.reward_model.strip():
            raise FieldError(
                "reward_model",
                "is required; give a key of `flow-factory list rewards` or a dotted path such as my_module.MyReward.",
            )
        if self.name == "total":
            raise FieldError("name", "is what the weighted sum of all rewards is called in metrics; choose another.")
        if self.applicable_datasets is not None and not self.applicable_datasets:
            raise FieldError("applicable_datasets", "is empty, so the reward would judge nothing; write null for all.")
        if isinstance(self.weight, dict) and not self.weight:
            raise FieldError("weight", "is empty; give a number or one weight per dataset.")

    def applies_to(self, dataset: str) -> bool:
        """True if this reward judges samples of `dataset`."""
        if isinstance(self.weight, dict) and dataset not in self.weight:
            return False
        return self.applicable_datasets is None or dataset in self.applicable_datasets

    def weight_for(self, dataset: str) -> float:
        """The weight for samples of `dataset`; 0.0 where the reward does not apply."""
        if not self.applies_to(dataset):
            return 0.0
        return float(self.weight[dataset] if isinstance(self.weight, dict) else self.weight)


@dataclass
class MultiRewardArguments(Section):
    """All rewards of a run."""

    reward_configs: list[RewardArguments] = option(factory=list, help="The rewards, in the order of their columns.")

    def __post_init__(self) -> None:
        names = [reward.name for reward in self.reward_configs]
        twice = sorted({name for name in names if names.count(name) > 1})
        if twice:
            raise FieldError("name", f"the reward name {twice[0]!r} is used twice; give each reward its own `name`.")

    def __len__(self) -> int:
        return len(self.reward_configs)
