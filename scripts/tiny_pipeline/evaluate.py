"""Measure a pipeline folder with the world's own scorer, and draw a grid to look at.

python scripts/tiny_pipeline/evaluate.py --pipeline FOLDER [--prompts 48] [--steps 8] [--guidance 1 3] [--grid grid.png]
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
import torch
from diffusers import StableDiffusion3Pipeline
from diffusers.utils import logging
from PIL import Image

from flow_factory.rewards.prompt_scoring import Score, score
from flow_factory.rewards.shapes_world import IMAGE_SIZE, Kind, Scene, format_caption, sample_scene

KINDS: tuple[Kind, ...] = ("single", "count", "number")


def generate(
    pipeline: StableDiffusion3Pipeline, captions: list[str], steps: int, guidance: float, seed: int, tokens: int = 16
) -> list[Image.Image]:
    """One picture a caption, in batches of 32, from the seeds `seed`, `seed + 1`, ..."""
    pictures: list[Image.Image] = []
    for start in range(0, len(captions), 32):
        chunk = captions[start : start + 32]
        generators = [torch.Generator().manual_seed(seed + start + i) for i in range(len(chunk))]
        output = pipeline(
            chunk,
            num_inference_steps=steps,
            guidance_scale=guidance,
            generator=generators,
            max_sequence_length=tokens,
            height=IMAGE_SIZE,
            width=IMAGE_SIZE,
        )
        pictures.extend(output.images)
    return pictures


def panel(kind: Kind, size: int, seed: int) -> list[Scene]:
    """Fixed scenes of a kind, from both sides of the split."""
    rng = np.random.default_rng(seed)
    return [sample_scene(rng, kind) for _ in range(size)]


def summary(scores: list[Score]) -> str:
    names = ("strict", "graded", "background", "colour", "shape", "count", "number")
    return "  ".join(f"{name} {np.mean([getattr(item, name) for item in scores]):.3f}" for name in names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--pipeline", type=Path, required=True)
    parser.add_argument("--prompts", type=int, default=48, help="of each kind")
    parser.add_argument("--steps", type=int, default=8)
    parser.add_argument("--guidance", type=float, nargs="+", default=[1.0, 3.0])
    parser.add_argument("--shift", type=float, default=None, help="instead of the saved scheduler's")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--tokens", type=int, default=16, help="max_sequence_length")
    parser.add_argument("--grid", type=Path, default=None, help="PNG of the first 8 pictures of each kind and guidance")
    arguments = parser.parse_args()

    torch.set_num_threads(arguments.threads)
    logging.disable_progress_bar()
    pipeline = StableDiffusion3Pipeline.from_pretrained(arguments.pipeline, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    if arguments.shift is not None:
        pipeline.scheduler = type(pipeline.scheduler).from_config(pipeline.scheduler.config, shift=arguments.shift)
    rows: list[list[Image.Image]] = []
    for guidance in arguments.guidance:
        for kind in KINDS:
            scenes = panel(kind, arguments.prompts, arguments.seed + 100)
            captions = [format_caption(scene) for scene in scenes]
            pictures = generate(pipeline, captions, arguments.steps, guidance, arguments.seed, arguments.tokens)
            scores = [score(picture, scene) for picture, scene in zip(pictures, scenes, strict=True)]
            sys.stdout.write(f"guidance {guidance:g} {kind:6s} {summary(scores)}\n")
            rows.extend([pictures[:8], pictures[8:16]])
    if arguments.grid is not None:
        pitch = IMAGE_SIZE + 2
        grid = Image.new("RGB", (8 * pitch, len(rows) * pitch), (90, 90, 90))
        for y, row in enumerate(rows):
            for x, picture in enumerate(row):
                grid.paste(picture, (x * pitch + 1, y * pitch + 1))
        grid.save(arguments.grid)


if __name__ == "__main__":
    main()
