"""DPM-Solver++ 2M in flow coordinates: its order on an exactly solvable flow, and diffusers step for step."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from diffusers import DPMSolverMultistepScheduler

from flow_factory.scheduler import dpm_solver_2m_step, noise_weights, steps_taken


def variance(s: float, sd: float = 0.5) -> float:
    return (1 - s) ** 2 * sd**2 + s**2


def velocity(x: torch.Tensor, s: float, sd: float = 0.5) -> torch.Tensor:
    """The exact velocity for data N(0, sd^2); the flow of a point is proportional to the standard deviation."""
    return (s - (1 - s) * sd**2) / variance(s, sd) * x


def solve(steps: int, second_order: bool, start: float = 0.95, end: float = 0.05) -> float:
    """Relative error at the end of the flow, on a grid that is uniform in sigma."""
    sigmas = torch.linspace(start, end, steps + 1, dtype=torch.float64)
    x, previous = torch.ones(1, 1, dtype=torch.float64), None
    for s, t in itertools.pairwise(sigmas):
        v = velocity(x, float(s))
        moved = dpm_solver_2m_step(x, v, s.view(1), t.view(1), previous if second_order else None)
        previous = (x - s * v, s.view(1))
        x = moved
    return abs(float(x) / math.sqrt(variance(end) / variance(start)) - 1)


@pytest.mark.parametrize(("second_order", "order"), [(False, 1), (True, 2)])
def test_order_of_convergence(second_order: bool, order: int) -> None:
    errors = [solve(steps, second_order) for steps in (40, 80, 160, 320)]
    slopes = [math.log2(a / b) for a, b in itertools.pairwise(errors)]
    assert slopes == pytest.approx([order] * 3, abs=0.15)
    assert solve(40, True) < solve(40, False) / 4


def test_equals_diffusers_step_for_step() -> None:
    sigmas = torch.tensor([0.98, 0.9, 0.74, 0.5, 0.31, 0.12, 0.0], dtype=torch.float64)
    theirs = DPMSolverMultistepScheduler(
        algorithm_type="dpmsolver++", solver_order=2, solver_type="midpoint", prediction_type="flow_prediction",
        use_flow_sigmas=True, flow_shift=1.0, lower_order_final=True, final_sigmas_type="zero",
    )  # fmt: skip
    theirs.set_timesteps(len(sigmas) - 1)
    theirs.sigmas, theirs.num_inference_steps = sigmas.clone(), len(sigmas) - 1
    theirs.timesteps = torch.arange(len(sigmas) - 1, 0, -1)
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
    y, previous = x.clone(), None
    for number, (s, t) in enumerate(zip(sigmas[:-1].tolist(), sigmas[1:].tolist(), strict=True)):
        wiggle = torch.randn(2, 3, 4, 4, generator=generator, dtype=torch.float64)
        v = velocity(x, s) + 0.3 * wiggle
        row = torch.full((2,), s, dtype=torch.float64)
        moved = dpm_solver_2m_step(x, v, row, torch.full((2,), t, dtype=torch.float64), previous)
        y = theirs.step(velocity(y, s) + 0.3 * wiggle, theirs.timesteps[number], y).prev_sample
        previous, x = (x - s * v, row), moved
        torch.testing.assert_close(x, y.double(), rtol=1e-5, atol=1e-6)


def test_is_the_euler_step_where_there_is_no_second_order() -> None:
    """Without a last step, after a step from s = 1, and at s' = 0; a row does not depend on the rows beside it."""
    generator = torch.Generator().manual_seed(1)
    x, v, clean = (torch.randn(3, 5, generator=generator) for _ in range(3))
    s, t = torch.tensor([0.6, 0.6, 0.6]), torch.tensor([0.4, 0.0, 0.4])
    euler = x - (s - t).view(-1, 1) * v
    assert torch.equal(dpm_solver_2m_step(x, v, s, t), euler)
    mixed = dpm_solver_2m_step(x, v, s, t, (clean, torch.tensor([1.0, 0.8, 0.8])))
    assert torch.equal(mixed[:2], euler[:2]) and not torch.equal(mixed[2], euler[2])
    alone = dpm_solver_2m_step(x[2:], v[2:], s[2:], t[2:], (clean[2:], torch.tensor([0.8])))
    assert torch.equal(mixed[2:], alone)


def test_does_not_extrapolate_over_sd3s_last_long_step() -> None:
    """0.465 to 0.278 to 0.009 is a step in lambda of 0.8 and one of 3.8."""
    generator = torch.Generator().manual_seed(2)
    x, v, clean = (torch.randn(2, 5, generator=generator, dtype=torch.float64) for _ in range(3))
    s, last = torch.tensor([0.278, 0.278]).double(), torch.tensor([0.4649, 0.4649]).double()
    lam = [math.log((1 - sigma) / sigma) for sigma in (0.4649, 0.278)]
    border = 1 / (1 + math.exp(lam[1] + 2 * (lam[1] - lam[0])))  # twice the last step
    for t, is_euler in ((0.0089, True), (border * 0.999, True), (border * 1.001, False)):
        t_row = torch.full((2,), t, dtype=torch.float64)
        euler = x - (s - t_row).view(-1, 1) * v
        assert torch.equal(dpm_solver_2m_step(x, v, s, t_row, (clean, last)), euler) == is_euler


def test_steps_taken() -> None:
    assert steps_taken(10, (3, 4)) == tuple(range(10))
    assert steps_taken(25, (4, 5, 6, 7), 0.4) == (*range(8), 8, 10, 12, 15, 17, 20, 22)  # 7 of the remaining 17
    assert steps_taken(10, (8,), 0.1) == tuple(range(10))  # one step remains, and at least one is taken
    assert steps_taken(10, (0, 5), 0.5) == (0, 1, 2, 3, 4, 5, 6, 8)
    assert steps_taken(6, (), 0.5) == (0, 2, 4)
    for length in range(3, 30):
        for last in range(length - 1):
            for fraction in (0.1, 0.4, 0.75, 1.0):
                steps = steps_taken(length, (last,), fraction)
                assert steps[: last + 2] == tuple(range(last + 2)) and list(steps) == sorted(set(steps))
                assert len(steps) - last - 1 == max(1, math.ceil((length - last - 1) * fraction - 1e-9))


def test_tempflows_weights() -> None:
    """Their constant 2.25 is 1 / mean q for SD3's grid of 10 steps and eta 0.7."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    from flow_factory.scheduler import pipeline_grid

    sigmas = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=3.0), 10).primary
    weights = noise_weights("Flow-SDE", sigmas, 0.7)
    # q written out for step 4, and the mean over steps 0 to 8 from the paper's constant.
    s, t = sigmas[4].item(), sigmas[5].item()
    assert weights[4].item() == pytest.approx(2.25 * 0.7 * math.sqrt(s / (1 - s) * (s - t)), rel=2e-3)
    assert weights[:-1].mean().item() == pytest.approx(1.0)
