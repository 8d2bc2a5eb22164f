"""Does the picture show what its caption asks for? Exact, for captions of the shapes world; no network involved.

The reward that goes with the embedded pipeline and its prompts (`builtin/shapes`, `builtin/singles`, ...): the caption
is parsed into a scene, and the pixels are compared with it. See `prompt_scoring` for what is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, cast

from flow_factory.errors import InputError
from flow_factory.rewards.abc import PointwiseRewardModel

if TYPE_CHECKING:
    from flow_factory.samples import BaseSample, ImageSample


@dataclass
class PromptMatchParams:
    """Settings of `prompt_match`."""

    strict: bool = field(
        default=False,
        metadata={
            "help": "Score 1 if everything asked for is right and else 0, instead of the graded score in [0, 1]."
        },
    )


class PromptMatch(PointwiseRewardModel):
    """Graded score in [0, 1]: the product of background, colour, shape or number, and count; or strict 0 or 1.

    Raises:
        InputError: by `score`, if a prompt is not a caption of the shapes world.
    """

    required_fields = ("image",)
    Params = PromptMatchParams

    def score(self, samples: Sequence[BaseSample]) -> list[float | None]:
        """One number per sample."""
        from flow_factory.rewards.prompt_scoring import score
        from flow_factory.rewards.shapes_world import parse_caption

        values: list[float | None] = []
        for sample in samples:
            try:
                scene = parse_caption(sample.prompt or "")
            except ValueError as error:
                raise InputError(f"reward {self.name!r} (prompt_match) cannot judge a prompt: {error}") from error
            result = score(cast("ImageSample", sample).pil, scene)
            values.append(result.strict if self.params.strict else result.graded)
        return values
