"""Facts read from a local checkpoint folder, without torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


def component_config(folder: Path | None, component: str) -> dict[str, Any]:
    """A component's `config.json`; empty where the checkpoint is not local."""
    path = folder / component / "config.json" if folder is not None else None
    return json.loads(path.read_text(encoding="utf-8")) if path is not None and path.is_file() else {}


def vae_factor(folder: Path | None, component: str = "vae") -> int:
    """Downsampling of an AutoencoderKL: 2 for each block but the last; 8 for the published checkpoints."""
    return 2 ** (len(component_config(folder, component).get("block_out_channels", [1] * 4)) - 1)


def packed_size_factor(folder: Path | None) -> int:
    """VAE downsampling x 2, for models that pack 2 x 2 latents into a token; 16 for the published checkpoints."""
    return 2 * vae_factor(folder)
