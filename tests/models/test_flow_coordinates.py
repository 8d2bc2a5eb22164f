"""Epsilon and v prediction as flow matching: closed forms, times, and schedulers that cannot be repeated."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers import DDIMScheduler, DPMSolverMultistepScheduler, EulerAncestralDiscreteScheduler, PNDMScheduler

from flow_factory.errors import InputError
from flow_factory.models.stable_diffusion import coordinates as flow
from flow_factory.models.stable_diffusion.base import StableDiffusionAdapter
from flow_factory.samples import LatentState

BETAS: dict[str, Any] = {"beta_start": 0.00085, "beta_end": 0.012, "beta_schedule": "scaled_linear"}


def test_predictions_become_the_velocity_and_back() -> None:
    """With the true noise and data, epsilon = e and v = a e - s x0 (arXiv 2202.00512) both give e - x0."""
    g = torch.Generator().manual_seed(0)
    clean, noise = torch.randn(2, 3, 2, 4, 4, generator=g, dtype=torch.float64)
    product = torch.tensor([0.9, 0.5, 0.01], dtype=torch.float64)
    a, s = (t.view(3, 1, 1, 1) for t in (product.sqrt(), (1 - product).sqrt()))
    sigma = flow.sigma_of(product)
    x = (a * clean + s * noise) / (a + s)
    torch.testing.assert_close(x, clean + sigma.view(3, 1, 1, 1) * (noise - clean))
    torch.testing.assert_close(flow.preserving(x, sigma), a * clean + s * noise)
    torch.testing.assert_close(flow.exploding(x, sigma), clean + s / a * noise)
    torch.testing.assert_close(flow.from_exploding(flow.exploding(x, sigma), sigma), x)
    for kind, said in (("epsilon", noise), ("v_prediction", a * noise - s * clean)):
        velocity = flow.velocity_of(said, x, sigma, kind)
        torch.testing.assert_close(velocity, noise - clean)
        torch.testing.assert_close(flow.output_of(velocity, x, sigma, kind), said)


def test_time_of_a_freely_drawn_sigma() -> None:
    scheduler = DDIMScheduler(**BETAS)
    adapter: Any = SimpleNamespace(pipeline=SimpleNamespace(scheduler=scheduler))
    table = flow.sigma_of(scheduler.alphas_cumprod.double())
    at, none = torch.tensor([0, 1, 500, 999]), LatentState({})  # the size does not matter
    times = StableDiffusionAdapter.timestep_for_sigma(adapter, table[at].float(), none)
    torch.testing.assert_close(times, at.float(), rtol=0, atol=2e-2)
    between = StableDiffusionAdapter.timestep_for_sigma(adapter, (table[[500]] + table[[501]]).float() / 2, none)
    assert between.item() == pytest.approx(500.5, abs=0.02)
    ends = StableDiffusionAdapter.timestep_for_sigma(adapter, torch.tensor([0.0, 1.0]), none)
    assert ends.tolist() == pytest.approx([0.0, 999.0], abs=1e-3)


@pytest.mark.parametrize(
    "scheduler",
    [EulerAncestralDiscreteScheduler(**BETAS), DPMSolverMultistepScheduler(**BETAS, algorithm_type="sde-dpmsolver++")],
)
def test_a_scheduler_that_draws_noise_is_refused(scheduler: Any) -> None:
    with pytest.raises(InputError, match="DDIMScheduler"):
        flow.make_scheduler(scheduler, 4, "cpu")


@pytest.mark.parametrize(
    "scheduler", [PNDMScheduler(steps_offset=1, skip_prk_steps=True), DDIMScheduler(steps_offset=1)]
)
@pytest.mark.parametrize("number", [1000, 1001, 5000])
def test_more_steps_than_timesteps_are_refused(scheduler: Any, number: int) -> None:
    """Their spacing would be 0: a rollout without a single step."""
    with pytest.raises(InputError, match=rf"num_inference_steps is {number}, but the checkpoint knows 1000 timesteps"):
        flow.make_scheduler(scheduler, number, "cpu")
    assert len(flow.make_scheduler(scheduler, 500, "cpu").timesteps) >= 500
