"""Guidance of LTX-2: three kinds at once, each weighted for the video and for the sound."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from torch import Tensor

from flow_factory.models.audio_video import AUDIO
from flow_factory.models.guidance import GuidanceSpec


class Predictions(NamedTuple):
    """Velocities of one component, [B, ...] each.

    Attributes:
        plain: With the prompt.
        negative: With the negative prompt; None where text does not guide.
        perturbed: With self-attention skipped in some blocks; None where that does not guide.
        isolated: Without attention between video and sound; None where that does not guide.
    """

    plain: Tensor
    negative: Tensor | None = None
    perturbed: Tensor | None = None
    isolated: Tensor | None = None


class Weights(NamedTuple):
    """What one component is guided with; see `LTX2Guidance`."""

    text: float
    stg: float
    modality: float
    rescale: float


@dataclass(frozen=True)
class LTX2Guidance(GuidanceSpec):
    """How predictions of video and sound are guided; `scale` and `rescale` are the video's.

    Away from what a negative prompt gives (`scale`, off at 1), from a network whose self-attention is perturbed
    ("Spatiotemporal Skip Guidance", Hyung et al., arXiv 2411.18664; `stg_scale`, off at 0), and from one in which
    neither component sees the other (`modality_scale`, off at 1). A kind that is on for one component is evaluated for
    both. All are inputs of one frozen value, so that a step remembers nothing.

    Attributes:
        audio_scale: `scale` of the sound.
        audio_rescale: `rescale` of the sound.
        stg_scale: Weight against the perturbed prediction, of the video.
        audio_stg_scale: The same of the sound.
        modality_scale: Weight against the isolated prediction, of the video, counted as `scale`.
        audio_modality_scale: The same of the sound.
        stg_blocks: Indices of the blocks whose self-attention is perturbed.
        cross_timestep: Whether layers between video and sound read the time of the other component. This is no
            guidance, but an input of every prediction, as `embedded` is.
    """

    audio_scale: float = 1.0
    audio_rescale: float = 0.0
    stg_scale: float = 0.0
    audio_stg_scale: float = 0.0
    modality_scale: float = 1.0
    audio_modality_scale: float = 1.0
    stg_blocks: tuple[int, ...] = ()
    cross_timestep: bool = True

    def needs_negative(self) -> bool:
        return max(self.scale, self.audio_scale) > 1.0

    def unguided(self) -> LTX2Guidance:
        return replace(
            self,
            scale=1.0,
            audio_scale=1.0,
            stg_scale=0.0,
            audio_stg_scale=0.0,
            modality_scale=1.0,
            audio_modality_scale=1.0,
        )

    @property
    def needs_perturbed(self) -> bool:
        """True if every step asks for a prediction with perturbed self-attention."""
        return max(self.stg_scale, self.audio_stg_scale) > 0.0

    @property
    def needs_isolated(self) -> bool:
        """True if every step asks for a prediction without attention between the components."""
        return max(self.modality_scale, self.audio_modality_scale) > 1.0

    def weights(self, component: str) -> Weights:
        """Those of a component."""
        if component == AUDIO:
            return Weights(self.audio_scale, self.audio_stg_scale, self.audio_modality_scale, self.audio_rescale)
        return Weights(self.scale, self.stg_scale, self.modality_scale, self.rescale)

    def guide(self, component: str, sample: Tensor, sigma: Tensor, predictions: Predictions) -> Tensor:
        """The guided velocity of a component.

        The pipeline adds up differences of clean samples x0 = x - sigma v, which are -sigma times differences of
        velocities, so the sum is the same of either. Only the rescaling (Lin et al., arXiv 2305.08891, equation 16) is
        a matter of x0: of its standard deviation over all elements of a row, pinned ones included.

        Args:
            component: Its name.
            sample: The noised x, [B, ...].
            sigma: Its noise level, [B], above 0.
            predictions: The velocities that were evaluated.
        """
        text, stg, modality, rescale = self.weights(component)
        plain, *others = predictions
        guided = plain
        for weight, other in zip((text - 1.0, stg, modality - 1.0), others, strict=True):
            if other is not None:
                guided = guided + weight * (plain - other)
        if guided is plain or rescale == 0.0:
            return guided
        sigma = sigma.view(-1, *([1] * (sample.ndim - 1)))
        clean, guided_clean = sample - sigma * plain, sample - sigma * guided
        dims = tuple(range(1, sample.ndim))
        ratio = clean.std(dim=dims, keepdim=True) / guided_clean.std(dim=dims, keepdim=True)
        rescaled = rescale * (guided_clean * ratio) + (1.0 - rescale) * guided_clean
        return (sample - rescaled) / sigma
