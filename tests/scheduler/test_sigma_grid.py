"""The grid is the pipeline's, bit for bit."""

from __future__ import annotations

import copy
import subprocess
import sys

import numpy as np
import pytest
import torch
from diffusers.schedulers import (
    DDIMScheduler,
    EulerDiscreteScheduler,
    FlowMatchEulerDiscreteScheduler,
    UniPCMultistepScheduler,
)

from flow_factory.errors import InputError
from flow_factory.scheduler import pipeline_grid


@pytest.mark.parametrize("steps", [1, 4, 10])
def test_equals_set_timesteps_with_a_static_shift(steps):
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    grid = pipeline_grid(scheduler, steps)
    scheduler.set_timesteps(steps)
    assert torch.equal(grid.primary, scheduler.sigmas)
    assert torch.equal(grid.timesteps["latent"], scheduler.timesteps)
    assert grid.length == steps
    assert grid.primary.shape == (steps + 1,)


@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.parametrize("mu", [0.5, 0.9, 1.15])
def test_equals_set_timesteps_with_a_dynamic_shift(steps, mu):
    """Flux: linspace(1, 1/N, N) and mu."""
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True)
    sigmas = np.linspace(1.0, 1 / steps, steps)
    grid = pipeline_grid(scheduler, steps, sigmas=sigmas, mu=mu)  # type: ignore[arg-type]
    scheduler.set_timesteps(sigmas=sigmas, mu=mu)
    assert torch.equal(grid.primary, scheduler.sigmas)
    assert torch.equal(grid.timesteps["latent"], scheduler.timesteps)


def test_the_two_families_of_grids_have_the_published_ends():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    sd3 = pipeline_grid(scheduler, 10).primary.tolist()
    flux_like = pipeline_grid(scheduler, 10, sigmas=np.linspace(1.0, 0.1, 10)).primary.tolist()  # type: ignore[arg-type]
    assert [round(s, 4) for s in sd3[-3:]] == [0.2780, 0.0089, 0.0]
    assert [round(s, 4) for s in flux_like[-2:]] == [0.25, 0.0]


def test_scheduler_is_left_untouched_and_the_tensors_are_copies():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(3)
    before = copy.deepcopy({k: v for k, v in vars(scheduler).items() if k != "_internal_dict"})
    grid = pipeline_grid(scheduler, 7)
    grid.primary.zero_()
    for key, value in before.items():
        now = getattr(scheduler, key)
        assert torch.equal(now, value) if isinstance(value, torch.Tensor) else now == value
    assert float(pipeline_grid(scheduler, 7).primary[0]) == 1.0


def test_float_sigmas_not_integer_timesteps():
    """Pitfall 6: sigmas looked up through rounded timesteps are off by up to 1e-3."""
    grid = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=3.0), 10)
    rounded = grid.timesteps["latent"].long().float() / 1000
    error = (rounded - grid.primary[:-1]).abs().max()
    assert 1e-4 < float(error) <= 1e-3
    assert torch.equal(grid.primary[:-1] * 1000, grid.timesteps["latent"])


def test_given_timesteps_are_passed_on():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=1.0)
    grid = pipeline_grid(scheduler, None, timesteps=[900.0, 500.0])
    scheduler.set_timesteps(timesteps=[900.0, 500.0])
    assert grid.length == 2
    assert torch.equal(grid.timesteps["latent"], torch.tensor([900.0, 500.0]))
    assert torch.equal(grid.primary, scheduler.sigmas)


def test_other_flow_schedulers_keep_their_own_grid():
    scheduler = UniPCMultistepScheduler(use_flow_sigmas=True, prediction_type="flow_prediction", flow_shift=3.0)
    grid = pipeline_grid(scheduler, 6)
    scheduler.set_timesteps(6)
    assert torch.equal(grid.primary, scheduler.sigmas)
    assert torch.equal(grid.timesteps["latent"], scheduler.timesteps)


def test_larger_shift_means_noisier_times():
    """Pitfall 9: the shift acts on sigma: s -> k s / (1 + (k - 1) s)."""
    means = []
    for shift in (1.0, 2.0, 3.0, 6.0):
        plain = torch.linspace(1, 0.1, 10, dtype=torch.float64)
        got = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=shift), 10, sigmas=plain.tolist()).primary[:-1]
        torch.testing.assert_close(got.double(), shift * plain / (1 + (shift - 1) * plain), rtol=1e-6, atol=0)
        means.append(float(got.mean()))
    assert means == sorted(means)
    assert means[-1] > means[0] + 0.2


@pytest.mark.filterwarnings("ignore:__array__ implementation:DeprecationWarning")
def test_schedulers_that_do_not_walk_flow_sigmas_are_refused():
    for scheduler, message in (
        (DDIMScheduler(), "DDIMScheduler has no sigmas"),
        (EulerDiscreteScheduler(), "EulerDiscreteScheduler gives sigmas from"),
        (FlowMatchEulerDiscreteScheduler(invert_sigmas=True), "fall from at most 1"),
    ):
        with pytest.raises(InputError, match=message):
            pipeline_grid(scheduler, 5)
    with pytest.raises(InputError, match="num_inference_steps is 0"):
        pipeline_grid(FlowMatchEulerDiscreteScheduler(), 0)
    ends = FlowMatchEulerDiscreteScheduler(shift_terminal=0.02)
    assert len(pipeline_grid(ends, 2).primary) == 3
    with pytest.raises(InputError, match=r"not finite for num_inference_steps 1 .*Take more steps"):
        pipeline_grid(ends, 1, sigmas=[1.0])


def test_the_packages_import_no_torch_by_themselves():
    code = (
        "import sys, flow_factory.scheduler, flow_factory.scheduler.names, flow_factory.objectives\n"
        "import flow_factory.advantage, flow_factory.advantage.registry\n"
        "print(sorted({'torch', 'numpy', 'diffusers'} & set(sys.modules)))"
    )
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "[]"
