"""Facts read from a local checkpoint folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from flow_factory.hparams.errors import FieldError


def component_config(folder: Path | None, component: str) -> dict[str, Any]:
    """A component's `config.json`; empty where the checkpoint is not local."""
    path = folder / component / "config.json" if folder is not None else None
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def pipeline_config(folder: Path, name: str) -> Any:
    """A value of the pipeline's own configuration in `model_index.json`; None where it has none."""
    return json.loads((folder / "model_index.json").read_text(encoding="utf-8")).get(name)


def check_frames(num_frames: int, factor: int) -> None:
    """Raises a FieldError on `num_frames` unless a causal video VAE can make that many.

    Args:
        num_frames: Frames of a video; the first one has latents of its own.
        factor: Frames that share their latents, of the others.
    """
    if (num_frames - 1) % factor:
        below = (num_frames - 1) // factor * factor + 1
        raise FieldError(
            "num_frames",
            f"is {num_frames}, but the VAE makes videos of 1 more than a multiple of {factor} frames; use {below} or "
            f"{below + factor}.",
        )


def vae_factor(folder: Path | None, component: str = "vae") -> int:
    """Downsampling of an AutoencoderKL: 2 for each block but the last; 8 for the published checkpoints."""
    return 2 ** (len(component_config(folder, component).get("block_out_channels", [1] * 4)) - 1)


def packed_size_factor(folder: Path | None) -> int:
    """VAE downsampling x 2, for models that pack 2 x 2 latents into a token; 16 for the published checkpoints."""
    return 2 * vae_factor(folder)
