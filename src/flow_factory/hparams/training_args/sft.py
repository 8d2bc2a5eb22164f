"""Arguments of supervised fine-tuning."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from flow_factory.hparams.training_args._offline import OfflineFlowMatchingTrainingArguments
from flow_factory.hparams.types import option


@dataclass
class SFTTrainingArguments(OfflineFlowMatchingTrainingArguments):
    """Supervised fine-tuning: flow matching (Lipman et al. 2022, arXiv:2210.02747) on demonstrations."""

    supervision: ClassVar[Literal["demonstration", "preference"] | None] = "demonstration"

    trainer_type: Literal["sft"] = option("sft", "Key of the trainer.")
