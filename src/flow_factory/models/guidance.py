"""Classifier-free guidance as a value: pure, frozen, and without memory between steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TypeVar

import torch
from torch import Tensor

from flow_factory.models.conditions import PromptCondition, Prompts
from flow_factory.samples import ComponentTimes

GuidanceT = TypeVar("GuidanceT", bound="GuidanceSpec")


@dataclass(frozen=True)
class GuidanceSpec:
    """How positive and negative predictions are combined.

    Attributes:
        scale: Guidance weight w of "Classifier-Free Diffusion Guidance" (Ho and Salimans, arXiv 2207.12598) as the
            diffusers pipelines count it: 1 is the positive prediction alone. Guidance is active when scale > 1.
        sigma_window: (low, high), inclusive: guide only where sigma lies inside; None = everywhere.
        step_window: (low, high) fractions of the grid: guide only steps that lie inside, low <= index / T and
            (index + 1) / T <= high; None = all. Off the grid (sigma drawn freely) the window does not apply.
        rescale: phi of "Common Diffusion Noise Schedules and Sample Steps are Flawed" (Lin et al., arXiv 2305.08891,
            equation 16): share of the guided prediction rescaled to the positive prediction's std; 0 = off.
        embedded: The scale that a guidance-distilled network takes as an input of its own; None where it takes none.
        keep_token_norm: Rescale each token (the last dimension) to the norm it has in the positive prediction.
        norm_limit: Shrink the guided prediction of a row to at most this times the positive prediction's norm; 0 = off.
        low_noise_scale: The scale of a second expert, which predicts at low noise; None = `scale`, which alone decides
            whether there is guidance.
    """

    scale: float = 1.0
    sigma_window: tuple[float, float] | None = None
    step_window: tuple[float, float] | None = None
    rescale: float = 0.0
    embedded: float | None = None
    keep_token_norm: bool = False
    norm_limit: float = 0.0
    low_noise_scale: float | None = None

    def needs_negative(self) -> bool:
        """True if some step may ask for a negative prediction."""
        return self.scale > 1.0

    def unguided(self: GuidanceT) -> GuidanceT:
        """The positive prediction alone, with the same inputs of the network; a subclass turns off what it adds."""
        return replace(self, scale=1.0)

    def rows(self, times: ComponentTimes) -> Tensor | None:
        """Which rows are guided, bool [B]; None stands for all of them (there is no window)."""
        if self.sigma_window is None and self.step_window is None:
            return None
        sigma = next(iter(times.components.values())).sigma
        guided = torch.ones_like(sigma, dtype=torch.bool)
        if self.sigma_window is not None:
            guided &= (sigma >= self.sigma_window[0]) & (sigma <= self.sigma_window[1])
        if self.step_window is not None and times.index is not None and times.length is not None:
            start, end = times.index.double() / times.length, (times.index + 1).double() / times.length
            guided &= (start >= self.step_window[0]) & (end <= self.step_window[1])
        return guided

    def active(self, times: ComponentTimes) -> bool:
        """True if at least one row of this step needs a negative prediction."""
        if not self.needs_negative():
            return False
        rows = self.rows(times)
        return rows is None or bool(rows.any())

    def combine(self, positive: Tensor, negative: Tensor, times: ComponentTimes) -> Tensor:
        """The guided prediction, [B, ...]; rows outside a window are the positive prediction bit for bit.

        Half precision is promoted to float32 first: the difference of two predictions that nearly agree is what `scale`
        multiplies, and norms and deviations of a whole row have more digits than 8 bits hold.
        """
        positive, negative = (x.to(torch.promote_types(x.dtype, torch.float32)) for x in (positive, negative))
        guided = negative + self.scale * (positive - negative)
        if self.rescale > 0.0:
            dims = tuple(range(1, positive.ndim))
            ratio = positive.std(dim=dims, keepdim=True) / guided.std(dim=dims, keepdim=True)
            guided = self.rescale * (guided * ratio) + (1.0 - self.rescale) * guided
        if self.keep_token_norm:
            guided = guided * (positive.norm(dim=-1, keepdim=True) / guided.norm(dim=-1, keepdim=True))
        if self.norm_limit > 0.0:
            rows_shape = (-1, *([1] * (positive.ndim - 1)))
            norms = [x.flatten(1).norm(dim=1).view(rows_shape) for x in (positive, guided)]
            guided = guided * (self.norm_limit * norms[0] / norms[1]).clamp(max=1.0)
        rows = self.rows(times)
        if rows is None:
            return guided
        return torch.where(rows.view(-1, *([1] * (positive.ndim - 1))), guided, positive)


def guide_together(
    guidance: GuidanceSpec,
    times: ComponentTimes,
    condition: PromptCondition,
    latents: Tensor,
    timestep: Tensor,
    network: Callable[[Tensor, Tensor, Prompts], Tensor],
) -> Tensor:
    """The guided prediction of pipelines that run both predictions as one batch of 2B rows, negatives first.

    Args:
        guidance: How predictions are combined.
        times: Of this step.
        condition: Encoded prompts, batch B.
        latents: [B, ...].
        timestep: The network's time input, [B].
        network: (latents, timestep, prompts) to a prediction like the latents.
    """
    if not guidance.active(times):
        return network(latents, timestep, condition.positive)
    both = network(torch.cat([latents, latents]), torch.cat([timestep, timestep]), condition.guided)
    negative, positive = both.chunk(2)
    return guidance.combine(positive, negative, times)


def guide_apart(
    guidance: GuidanceSpec, times: ComponentTimes, condition: PromptCondition, network: Callable[[Prompts], Tensor]
) -> Tensor:
    """The guided prediction of pipelines that run two forwards, for which texts need not have equal lengths."""
    positive = network(condition.positive)
    if not guidance.active(times):
        return positive
    return guidance.combine(positive, network(condition.negative), times)
