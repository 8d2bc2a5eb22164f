"""What a reward returned, checked: one finite number or None per sample, or an error that shows the sample."""

from __future__ import annotations

import json
import logging
import math
import numbers
import re
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from flow_factory.errors import RunError
from flow_factory.samples import BaseSample
from flow_factory.samples.statistics import sample_frames

if TYPE_CHECKING:
    from flow_factory.rewards.abc import BaseRewardModel

logger = logging.getLogger(__name__)


def class_path(model: BaseRewardModel) -> str:
    """Dotted path of a reward model's class, for messages."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def check_scores(
    model: BaseRewardModel, samples: Sequence[BaseSample], returned: Any, artifact_dir: Path | None = None
) -> list[float | None]:
    """Turns what `score` returned into Python numbers.

    Args:
        model: The reward model that returned it.
        samples: The samples it was asked to score.
        returned: What it returned.
        artifact_dir: Where a sample with a non-finite score is saved; None saves nothing.

    Returns:
        One float or None (failed) per sample.

    Raises:
        RunError: If the number of scores, their shape or their type is wrong, or a score is NaN or infinite.
    """
    name = f"reward {model.name!r} ({class_path(model)})"
    shape = getattr(returned, "shape", None)
    if shape is not None:
        if tuple(shape) != (len(samples),):
            raise RunError(
                f"{name} returned shape {tuple(shape)} for {len(samples)} samples; return shape ({len(samples)},)."
            )
        returned = returned.tolist()
    if isinstance(returned, (str, bytes, dict)) or not isinstance(returned, Sequence):
        raise RunError(
            f"{name} returned {type(returned).__name__} for {len(samples)} samples; return a list of "
            f"{len(samples)} numbers, or a tensor or array of shape ({len(samples)},)."
        )
    if len(returned) != len(samples):
        raise RunError(f"{name} returned {len(returned)} scores for {len(samples)} samples; return one for each.")
    return [_check_score(model, s, v, artifact_dir) for s, v in zip(samples, returned, strict=True)]


def _check_score(model: BaseRewardModel, sample: BaseSample, value: Any, artifact_dir: Path | None) -> float | None:
    if value is None:
        return None
    name = f"reward {model.name!r} ({class_path(model)})"
    if getattr(value, "shape", None) == ():  # a 0-dim tensor or a numpy scalar
        value = value.item()
    if not isinstance(value, numbers.Real):
        shape = getattr(value, "shape", None)
        what = type(value).__name__ if shape is None else f"{type(value).__name__} of shape {tuple(shape)}"
        raise RunError(f"{name} returned {what} for one sample; return a number, or None where scoring failed.")
    score = float(value)
    if math.isfinite(score):
        return score
    saved = (
        "" if artifact_dir is None else f" The sample is saved as {save_failed_sample(sample, model, artifact_dir)}."
    )
    raise RunError(
        f"{name} returned {score} for the prompt {sample.prompt!r} (dataset {sample.source!r}, row {sample.index}, "
        f"member {sample.member}).{saved} A reward must be finite; return None, or raise RewardFailure, where a "
        "sample cannot be judged."
    )


def save_failed_sample(sample: BaseSample, model: BaseRewardModel, folder: Path) -> Path:
    """Saves what a reward could not judge, so that it can be looked at and judged again.

    A picture is saved as PNG; of a video some frames, side by side, and all of them, with the sound, as tensors in a
    safetensors file. What is known of the sample stands beside it as JSON.

    Returns:
        The PNG; the JSON file for a sample without decoded pictures.
    """
    from PIL import Image
    from safetensors.torch import save_file

    folder.mkdir(parents=True, exist_ok=True)
    words = [model.name, sample.source, f"row{sample.index}", f"member{sample.member}", f"cycle{sample.key.cycle}"]
    path = folder / (re.sub(r"[^\w.-]+", "_", "-".join(words)) + ".png")
    facts: dict[str, Any] = {
        "reward": model.name,
        "reward_class": class_path(model),
        "prompt": sample.prompt,
        "negative_prompt": sample.negative_prompt,
        "dataset": sample.source,
        "row": sample.index,
        "member": sample.member,
        "group_id": sample.group_id,
        "seed": sample.key.seed,
        "cycle": sample.key.cycle,
    }
    media = {name: getattr(sample, name, None) for name in ("video", "audio")}
    tensors = {name: tensor.contiguous() for name, tensor in media.items() if tensor is not None}
    if tensors:
        save_file(tensors, path.with_suffix(".safetensors"))
        facts |= {name: getattr(sample, name) for name in ("fps", "sample_rate") if hasattr(sample, name)}
    path.with_suffix(".json").write_text(json.dumps(facts, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    frames = sample_frames(sample)
    if frames is None:
        return path.with_suffix(".json")
    shown = torch.cat(list(frames), dim=-1).expand(3, -1, -1)  # [3, H, F * W]
    Image.fromarray(shown.permute(1, 2, 0).contiguous().numpy(), "RGB").save(path)
    return path
