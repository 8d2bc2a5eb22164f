"""What the samplers do to a distribution, computed exactly.

For data N(0, sd^2) the exact velocity is linear in x, every step is linear and the state stays Gaussian: its variance
obeys a recursion. No Monte Carlo, so four digits mean four digits.
"""

from __future__ import annotations

import pytest
import torch

from flow_factory.scheduler import Dynamics, transition_coefficients, transition_moments


def shifted_grid(steps: int, shift: float) -> torch.Tensor:
    u = torch.linspace(1, 0, steps + 1, dtype=torch.float64)
    return shift * u / (1 + (shift - 1) * u)


def final_variance(name: str, steps: int, eta: float, sd: float = 1.0, shift: float = 3.0) -> float:
    """Variance at sigma = 0 of samples started from N(0, 1), the final step deterministic.

    The velocity is E[e - x0 | x]: with x = (1 - s) x0 + s e, Cov(e - x0, x) = s - (1 - s) sd^2.
    """
    grid = shifted_grid(steps, shift)
    s, t = grid[:-1], grid[1:]
    levels = torch.full((steps,), eta, dtype=torch.float64)
    levels[-1] = 0
    slope = (s - (1 - s) * sd**2) / ((1 - s) ** 2 * sd**2 + s**2)
    # The kernel's own response to x and to z, read off by feeding it unit inputs.
    moments = transition_moments(
        name, torch.ones(steps, 1, dtype=torch.float64), slope.view(-1, 1), s, t, levels, torch.arange(steps)
    )
    variance = 1.0
    for gain, std in zip(moments.mean.flatten().tolist(), moments.std.tolist(), strict=True):
        variance = gain**2 * variance + std**2
    return variance


@pytest.mark.parametrize(
    ("name", "steps", "eta", "expected"),
    [
        ("Flow-SDE", 1000, 0.7, 1.0015),
        ("Dance-SDE", 1000, 0.3, 0.9965),
        ("ODE", 1000, 0.0, 0.9964),
        ("CPS", 1000, 0.7, 0.719),
        ("CPS", 100_000, 0.7, 0.727),
    ],
)
def test_variance_at_the_end(name, steps, eta, expected):
    digits = 4 if expected != 0.719 and expected != 0.727 else 3
    assert round(final_variance(name, steps, eta), digits) == expected


@pytest.mark.parametrize("sd", [0.5, 1.0, 2.0])
@pytest.mark.parametrize(("name", "eta"), [("Dance-SDE", 0.3), ("ODE", 0.0), ("DDIM-eta", 1.0)])
def test_marginals_are_kept_to_first_order(name, eta, sd):
    """Four times the steps, a quarter of the error."""
    coarse, fine = (final_variance(name, n, eta, sd) / sd**2 - 1 for n in (1000, 4000))
    assert coarse / fine == pytest.approx(4, rel=0.05)
    assert abs(fine) < 0.005


@pytest.mark.parametrize("sd", [0.5, 1.0, 2.0])
def test_flow_sde_keeps_marginals(sd):
    """Slower than first order (its diffusion grows without bound towards the first grid point), but it gets there."""
    errors = [abs(final_variance("Flow-SDE", n, 0.7, sd) / sd**2 - 1) for n in (250, 1000, 100_000)]
    assert errors[0] < 0.012 and errors[1] < 0.004 and errors[2] < 8e-4


def test_cps_does_not_keep_the_marginal_at_fixed_noise():
    assert final_variance("CPS", 20_000, 0.7) < 0.74
    # With eta ~ 1 / sqrt(N) the noise injected per unit of time is that of an SDE, and the marginal converges.
    errors = [abs(final_variance("CPS", n, 0.7 * (100 / n) ** 0.5) - 1) for n in (1_000, 10_000, 100_000)]
    assert errors[0] > errors[1] > errors[2]
    assert errors[2] < 2e-3


def test_wrong_sqrt_h_in_cps_would_be_seen():
    """Pitfall 7: with c sqrt(h) the point-mass test below could not hold at any step size."""
    s, t, eta = (torch.tensor([v], dtype=torch.float64) for v in (0.8, 0.5, 0.7))
    c = transition_coefficients("CPS", s, t, eta)
    gain = c.x_scale + c.v_scale / s
    wrong = gain**2 * s**2 + c.std**2 * (s - t)
    assert abs(float(wrong) - 0.25) > 0.05


@pytest.mark.parametrize("steps", [1, 2, 5, 50])
@pytest.mark.parametrize(("name", "eta"), [("CPS", 0.3), ("CPS", 0.9), ("CPS", 1.0), ("DDIM-eta", 0.7), ("ODE", 0.0)])
def test_point_mass_is_reproduced_exactly(name, eta, steps):
    """All data at x0, so e^ is exact: x at sigma is N((1 - sigma) x0, sigma^2), whatever the number of steps."""
    x0 = 1.7
    grid = shifted_grid(steps, 3.0)
    mean, variance = 0.0, 1.0
    for i in range(steps):
        s, t = grid[i : i + 1], grid[i + 1 : i + 2]
        c = transition_coefficients(name, s, t, torch.tensor([eta], dtype=torch.float64), torch.tensor([i]))
        # v = e^ - x0 = (x - x0) / s, so x' = (c_x + c_v / s) x - c_v x0 / s + q z.
        gain = float(c.x_scale + c.v_scale / s)
        mean = gain * mean - float(c.v_scale / s) * x0
        variance = gain**2 * variance + float(c.std) ** 2
        assert mean == pytest.approx((1 - float(t)) * x0, abs=1e-12)
        assert variance == pytest.approx(float(t) ** 2, abs=1e-12)


def test_sde_kernels_do_not_reproduce_a_point_mass():
    """The excess noise that CPS was made to avoid; guards the test above against holding trivially."""
    s, t, eta = (torch.tensor([v], dtype=torch.float64) for v in (0.5, 0.3, 0.7))
    for name in (Dynamics.FLOW_SDE, Dynamics.DANCE_SDE):
        c = transition_coefficients(name, s, t, eta, torch.tensor([2]))
        gain = c.x_scale + c.v_scale / s
        assert float(gain**2 * s**2 + c.std**2) > 0.09 + 1e-3
