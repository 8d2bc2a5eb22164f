"""A model from elsewhere on the `PseudoPipeline` seam: one network that reads words and draws pixels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from diffusers import FlowMatchEulerDiscreteScheduler
from torch import Tensor

from tests.models.tiny_pipelines import t5_tokenizer
from tests.outside.tiny_pixels import TinyPixelsModel, TinyPixelsPipeline
from tests.parity.case import Case, cfg_settings
from tests.parity.parts import seeded


def build() -> TinyPixelsPipeline:
    """Two blocks of six linear layers."""
    tokens = t5_tokenizer()
    return TinyPixelsPipeline(
        transformer=TinyPixelsModel(vocab_size=len(tokens), max_side=32),
        tokenizer=tokens,
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0),
    )


def load_lora(pipeline: Any, file: Path) -> None:
    """The pipeline has no loader of its own, the network has."""
    pipeline.transformer.load_lora_adapter(str(file.parent), weight_name=file.name, prefix="transformer")


def unchanged(pipeline: Any, pixels: Tensor) -> Tensor:
    """There is no VAE."""
    return pixels


CASES = [
    Case(
        key="tiny-pixels",
        build=seeded(build),
        settings=cfg_settings(3.0),
        wrapped=2 * 6,
        load_lora=load_lora,
        autoencode=unchanged,
        deterministic_encoders=frozenset({"latent"}),
    )
]
