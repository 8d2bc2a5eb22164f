"""What a pipeline's guider does, as a value without memory."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.samples import ComponentTimes


@dataclass(frozen=True)
class GuiderSpec(GuidanceSpec):
    """Guidance as diffusers' `ClassifierFreeGuidance` counts it.

    Unlike the pipelines with a `guidance_scale` of their own, it guides at every scale but 1, also below: at 0 the
    prediction is the negative one.

    Attributes:
        guided_steps: (start, stop) fractions of the grid: of T steps those with int(start T) <= index < int(stop T) are
            guided; None = all. Off the grid (sigma drawn freely) they all are.
    """

    guided_steps: tuple[float, float] | None = None

    def needs_negative(self) -> bool:
        return not math.isclose(self.scale, 1.0)

    def rows(self, times: ComponentTimes) -> Tensor | None:
        guided = super().rows(times)
        if self.guided_steps is None or times.index is None or times.length is None:
            return guided
        start, stop = (int(fraction * times.length) for fraction in self.guided_steps)
        inside = (times.index >= start) & (times.index < stop)
        return inside if guided is None else guided & inside


def guider_spec(guider: Any, guidance_scale: float) -> GuiderSpec:
    """What a guider of class `ClassifierFreeGuidance` does at a scale, whatever its own scale is.

    Args:
        guider: The pipeline's component.
        guidance_scale: As `guider.new(guidance_scale=...)` takes it: the prediction alone is 1, or 0 in the original
            formulation, where the weight is that of what is added to the positive prediction.

    Raises:
        InputError: If the guider is disabled, and the scale asks for guidance.
    """
    config = guider.config
    scale = guidance_scale + 1.0 if config.use_original_formulation else guidance_scale
    if not guider._enabled:
        if guidance_scale > 1.0:
            raise InputError(
                f"guidance_scale is {guidance_scale:g}, but the checkpoint's guider is disabled, so there is no "
                f"guidance; use 1, or enable it in guider/guider_config.json."
            )
        return GuiderSpec(scale=1.0)
    steps = (float(config.start), float(config.stop))
    return GuiderSpec(
        scale=scale,
        rescale=config.guidance_rescale,
        guided_steps=None if steps == (0.0, 1.0) else steps,
    )
