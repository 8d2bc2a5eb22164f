"""What the pipelines of the Qwen-Image family have in common: masks, a VAE of videos for single frames, references."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import torch
from diffusers.pipelines.qwenimage.pipeline_qwenimage_edit_plus import calculate_dimensions
from PIL import Image
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.conditions import Prompts, trim_condition
from flow_factory.models.images import posterior_latents
from flow_factory.models.latent_statistics import destandardise, standardise
from flow_factory.models.references import ReferenceCondition

Self = TypeVar("Self", bound="UnpaddedCondition")

_NARROWEST = 200  # of the image processors of Qwen2-VL and its successors


@dataclass(frozen=True)
class UnpaddedCondition(ReferenceCondition):
    """Texts with references whose rows share a forward only if their texts agree in length too, so that none is padded.

    Masks are nonzero at tokens, which padding follows.
    """

    def lengths(self, row: int) -> tuple[int, ...]:
        """Tokens of the row's prompt, and of its negative prompt if there is one."""
        masks = (mask for mask in (self.prompt_mask, self.negative_prompt_mask) if mask is not None)
        return tuple(int(mask[row].count_nonzero()) for mask in masks)

    def layout(self, row: int) -> Hashable:
        return (super().layout(row), self.lengths(row))

    def together(self: Self, rows: Sequence[int]) -> Self:
        return trim_condition(super().together(rows), *self.lengths(rows[0]))


def masked(embeds: Tensor, mask: Tensor | None) -> Prompts:
    """What `encode_prompt` gives, which leaves the mask out where nothing is padded."""
    if mask is None:
        mask = torch.ones(embeds.shape[:2], dtype=torch.long, device=embeds.device)
    return Prompts(embeds, mask=mask)


def true_cfg_arguments(arguments: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a pipeline that has `guidance_scale` under the name of `true_cfg_scale`."""
    scale = arguments["guidance_scale"]
    others = {name: value for name, value in arguments.items() if name != "guidance_scale"}
    # Without a negative prompt the pipelines leave guidance out; the adapters take the empty one.
    return {**others, "true_cfg_scale": scale} | ({"negative_prompt": ""} if scale > 1.0 else {})


def decode_frame(vae: Any, latents: Tensor) -> Tensor:
    """Pixels [B, C, H, W] in about [-1, 1] of standardised latents [B, c, h, w]."""
    return vae.decode(destandardise(vae, latents.unsqueeze(2)), return_dict=False)[0][:, :, 0]


def encode_frame(vae: Any, pixels: Tensor, generators: Sequence[torch.Generator] | None) -> Tensor:
    """The inverse of `decode_frame`, float32: the posterior's mode, or a sample, row i from `generators[i]`."""
    latents = posterior_latents(vae.encode(pixels.unsqueeze(2)).latent_dist, generators)
    return standardise(vae, latents).squeeze(2)


def reference_size(picture: Image.Image, area: int, field: str) -> tuple[int, int]:
    """Height and width to which the pipelines bring a reference: its proportions, about `area` pixels, multiples of 32.

    Args:
        picture: The reference.
        area: In pixels.
        field: Where the area comes from, for messages.

    Raises:
        InputError: If the picture is so narrow that a side would vanish, or that the vision-language model refuses it.
    """
    width, height = calculate_dimensions(area, picture.width / picture.height)
    if max(height, width) > _NARROWEST * min(height, width):
        raise InputError(
            f"a reference of {picture.height} x {picture.width} pixels (height x width) is too narrow: brought to "
            f"{area} pixels ({field}) it would have {height} x {width}, and sides may differ by a factor of "
            f"{_NARROWEST} at most. Crop it, or put it on a wider canvas."
        )
    return height, width


def resized(pipeline: Any, picture: Image.Image, area: int, field: str) -> Image.Image:
    """A reference as the vision-language model reads it; arguments as for `reference_size`."""
    return pipeline.image_processor.resize(picture, *reference_size(picture, area, field))


def encode_reference(pipeline: Any, picture: Image.Image, area: int, field: str, device: torch.device) -> Tensor:
    """Standardised latents [C, h, w], the posterior's mode, of a reference; arguments as for `reference_size`."""
    pixels = pipeline.image_processor.preprocess(picture, *reference_size(picture, area, field))
    return pipeline._encode_vae_image(pixels.unsqueeze(2).to(device, pipeline.vae.dtype), generator=None)[0, :, 0]
