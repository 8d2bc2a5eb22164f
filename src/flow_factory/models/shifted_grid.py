"""Grids of pipelines that shift with the number of image tokens, as FLUX.1 does."""

from __future__ import annotations

from typing import Any

import numpy as np
from diffusers.pipelines.flux.pipeline_flux import calculate_shift


def token_shift(scheduler: Any, tokens: int, max_shift: float = 1.15) -> float:
    """mu for `set_timesteps`, from the scheduler's configuration.

    Args:
        scheduler: A diffusers scheduler.
        tokens: Image tokens that the network sees.
        max_shift: What the pipeline takes where the configuration has no `max_shift`.
    """
    config = scheduler.config
    return calculate_shift(
        tokens,
        config.get("base_image_seq_len", 256),
        config.get("max_image_seq_len", 4096),
        config.get("base_shift", 0.5),
        config.get("max_shift", max_shift),
    )


def linear_sigmas(num_steps: int) -> Any:
    """1 down to 1 / N in N equal steps, before the scheduler's shift: what Flux-like pipelines pass on."""
    return np.linspace(1.0, 1 / num_steps, num_steps)


def flow_sigmas(scheduler: Any, num_steps: int) -> dict[str, Any]:
    """`sigmas` as an argument of `set_timesteps`; none for a scheduler that makes its own (`use_flow_sigmas`)."""
    return {} if scheduler.config.get("use_flow_sigmas", False) else {"sigmas": linear_sigmas(num_steps)}
