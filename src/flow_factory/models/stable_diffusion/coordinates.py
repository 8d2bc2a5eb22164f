"""Diffusion models with epsilon or v prediction, in the coordinates of flow matching.

Such a model knows x = a x0 + s e with a^2 + s^2 = 1 at each of its training timesteps. Divided by a + s this is the
flow's x_f = (1 - sigma) x0 + sigma e with sigma = s / (a + s), and the velocity is v = e - x0. An Euler step of the
flow is then the DDIM step with eta 0 (Song et al., arXiv 2010.02502, equation 12), and every kernel and objective of
the toolkit holds unchanged. Schedulers keep either x ("variance preserving") or x / a = x0 + (s / a) e ("exploding").
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor

from flow_factory.errors import InputError

_DRAWS_NOISE = ("Ancestral", "DDPM", "LCM", "SDE", "TCD")


def make_scheduler(scheduler: Any, num_steps: int, device: torch.device | str) -> Any:
    """A deep copy that has been asked for `num_steps`.

    Raises:
        InputError: If its steps draw noise from the global generator, or it has not so many.
    """
    name = type(scheduler).__name__
    if any(part in name for part in _DRAWS_NOISE) or "sde" in str(scheduler.config.get("algorithm_type", "")):
        raise InputError(
            f"scheduler {name} adds noise of its own in every step, which no run can repeat. Give the checkpoint "
            f"another scheduler (DDIMScheduler, EulerDiscreteScheduler, ...); stochastic steps come from "
            f"scheduler.dynamics_type."
        )
    own = copy.deepcopy(scheduler)
    trained = scheduler.config.num_train_timesteps
    if num_steps <= trained:
        own.set_timesteps(num_steps, device=device)
    # Beyond that a scheduler's spacing is 0: it steps on the spot. Near it, its offset can lead past the last timestep.
    if num_steps > trained or float(own.timesteps.max()) >= trained:
        raise InputError(
            f"num_inference_steps is {num_steps}, but the checkpoint knows {trained} timesteps, and {name} cannot take "
            f"so many steps on them; use fewer."
        )
    return own


def flow_sigmas(scheduler: Any) -> Tensor:
    """Flow sigmas [T + 1], float64 on CPU, of a scheduler that has been asked for its timesteps."""
    if isinstance(getattr(scheduler, "sigmas", None), Tensor):  # s / a
        ratio = scheduler.sigmas.double().cpu()
        return ratio / (1.0 + ratio)
    products = scheduler.alphas_cumprod.double().cpu()
    timesteps = scheduler.timesteps.cpu()
    last = int(timesteps[-1]) - scheduler.config.num_train_timesteps // scheduler.num_inference_steps
    final = products[last] if last >= 0 else torch.as_tensor(scheduler.final_alpha_cumprod).double().cpu()
    return sigma_of(torch.cat([products[timesteps], final.view(1)]))


def sigma_of(alphas_cumprod: Tensor) -> Tensor:
    """s / (a + s), where a^2 is the cumulative product of alphas."""
    a, s = alphas_cumprod.sqrt(), (1.0 - alphas_cumprod).sqrt()
    return s / (a + s)


def preserving(x: Tensor, sigma: Tensor) -> Tensor:
    """x of unit variance, which the network takes, from the flow's state [B, ...] at sigma [B]."""
    return x / _rows(((1.0 - sigma) ** 2 + sigma**2).sqrt(), x)


def from_preserving(x: Tensor, sigma: Tensor) -> Tensor:
    """The inverse of `preserving`."""
    return x * _rows(((1.0 - sigma) ** 2 + sigma**2).sqrt(), x)


def exploding(x: Tensor, sigma: Tensor) -> Tensor:
    """x0 + (s / a) e from the flow's state at sigma < 1."""
    return x / _rows(1.0 - sigma, x)


def from_exploding(x: Tensor, sigma: Tensor) -> Tensor:
    """The inverse of `exploding`."""
    return x * _rows(1.0 - sigma, x)


def is_exploding(scheduler: Any) -> bool:
    """Whether the scheduler keeps x0 + (s / a) e: then its initial noise has another deviation than 1."""
    return float(scheduler.init_noise_sigma) != 1.0


def velocity_of(output: Tensor, x: Tensor, sigma: Tensor, prediction_type: str) -> Tensor:
    """v = e - x0 from the network's output, both [B, ...].

    Args:
        output: The prediction.
        x: The flow's state.
        sigma: [B].
        prediction_type: "epsilon" or "v_prediction", from the scheduler's configuration.
    """
    s = _rows(sigma, x)
    if prediction_type == "epsilon":  # x_f = (1 - sigma) x0 + sigma e
        return (output - x) / (1.0 - s)
    # The model's v = a e - s x0. With its x: e = a v + s x and x0 = a x - s v.
    norm = ((1.0 - s) ** 2 + s**2).sqrt()
    a, b, own = (1.0 - s) / norm, s / norm, x / norm
    return (a + b) * output + (b - a) * own


def output_of(velocity: Tensor, x: Tensor, sigma: Tensor, prediction_type: str) -> Tensor:
    """The inverse of `velocity_of`: what the network has said, from v = e - x0."""
    s = _rows(sigma, x)
    noise, clean = x + (1.0 - s) * velocity, x - s * velocity
    if prediction_type == "epsilon":
        return noise
    return ((1.0 - s) * noise - s * clean) / ((1.0 - s) ** 2 + s**2).sqrt()


def _rows(values: Tensor, like: Tensor) -> Tensor:
    return values.to(like.dtype).view(-1, *([1] * (like.ndim - 1)))
