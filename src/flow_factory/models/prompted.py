"""What adapters share whose texts are encoded by one helper, without other inputs."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.conditions import PromptCondition, Prompts, negative_texts


class PromptedAdapter(BaseAdapter[PromptCondition]):
    """Encodes prompts and negative prompts alike. A subclass gives `encode_texts`, or the whole of `encode_prompt`."""

    condition_class = PromptCondition

    def encode_texts(self, texts: list[str], generation: Any) -> Prompts:
        """Encodes B texts; `texts` may be written to. `generation` holds the model-specific fields."""
        raise NotImplementedError(f"{type(self).__name__} has neither encode_texts nor encode_prompt.")

    @torch.no_grad()
    def encode_prompt(
        self,
        prompts: Sequence[str],
        negative_prompts: Sequence[str | None] | None = None,
        need_negative: bool = False,
        generation: Any = None,
    ) -> PromptCondition:
        fields = generation or self.config.train_generation
        positive = self.encode_texts(list(prompts), fields)
        negatives = negative_texts(negative_prompts, len(prompts)) if need_negative else None
        negative = None if negatives is None else self.encode_texts(negatives, fields)
        return self.collate_conditions([PromptCondition.of(positive, negative)])
