"""Each kernel against formulas written out independently, and against diffusers."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers.schedulers import DDIMScheduler, FlowMatchEulerDiscreteScheduler

from flow_factory.errors import InputError
from flow_factory.scheduler import (
    Dynamics,
    TransitionMoments,
    effective_std,
    log_prob,
    parse_dynamics,
    sample_next,
    transition_coefficients,
    transition_moments,
)

STOCHASTIC = [d for d in Dynamics if d.stochastic]
B = 5


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


@pytest.fixture
def step() -> dict[str, torch.Tensor]:
    """A different step in every row, float64."""
    sigma = torch.tensor([0.98, 0.9, 0.6, 0.3, 0.05], dtype=torch.float64)
    sigma_next = torch.tensor([0.95, 0.7, 0.55, 0.1, 0.01], dtype=torch.float64)
    return {
        "x": randn(B, 2, 3, 4, seed=1, dtype=torch.float64),
        "velocity": randn(B, 2, 3, 4, seed=2, dtype=torch.float64),
        "sigma": sigma,
        "sigma_next": sigma_next,
    }


def rows(value: torch.Tensor) -> torch.Tensor:
    return value.view(-1, 1, 1, 1)


def written_out(name: Dynamics, x, v, s, t, eta):
    """Mean [B, ...] and std [B] as the papers print them."""
    h = s - t
    x0, e = x - rows(s) * v, x + rows(1 - s) * v
    if name is Dynamics.FLOW_SDE:
        a = eta * torch.sqrt(s / (1 - s))
        mean = x * rows(1 - a**2 * h / (2 * s)) - v * rows(1 + a**2 * (1 - s) / (2 * s)) * rows(h)
        return mean, a * torch.sqrt(h)
    if name is Dynamics.DANCE_SDE:
        return x - rows(h) * (v + eta**2 * (x - rows(1 - s) * x0) / rows(2 * s**2)), eta * torch.sqrt(h)
    if name is Dynamics.CPS:
        c = t * math.sin(eta * math.pi / 2)
        return rows(1 - t) * x0 + rows(torch.sqrt(t**2 - c**2)) * e, c
    # DDIM, in its own coordinates: x_ddim = sqrt(ab) x0 + sqrt(1 - ab) e.
    n, n_next = torch.sqrt((1 - s) ** 2 + s**2), torch.sqrt((1 - t) ** 2 + t**2)
    ab, ab_next = (1 - s) ** 2 / n**2, (1 - t) ** 2 / n_next**2
    q = eta * torch.sqrt((1 - ab_next) / (1 - ab) * (1 - ab / ab_next))
    x_ddim = x / rows(n)
    x0_ddim = (x_ddim - rows(torch.sqrt(1 - ab)) * e) / rows(torch.sqrt(ab))
    torch.testing.assert_close(x0_ddim, x0, rtol=1e-10, atol=1e-10)
    mean = rows(torch.sqrt(ab_next)) * x0_ddim + rows(torch.sqrt(1 - ab_next - q**2)) * e
    return mean * rows(n_next), q * n_next


@pytest.mark.parametrize("eta", [0.1, 0.7, 1.0])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_moments_are_the_papers(name, eta, step):
    moments = transition_moments(name, noise_level=eta, **step)
    mean, std = written_out(name, step["x"], step["velocity"], step["sigma"], step["sigma_next"], eta)
    torch.testing.assert_close(moments.mean, mean, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(moments.std, std, rtol=1e-11, atol=0)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_diffusion_times_sqrt_h_is_std_except_for_cps(name, step):
    """Pitfall 7: the effective std of CPS has no sqrt(h)."""
    moments = transition_moments(name, noise_level=0.5, **step)
    h = step["sigma"] - step["sigma_next"]
    factor = torch.ones_like(h) if name is Dynamics.CPS else h.sqrt()
    torch.testing.assert_close(moments.diffusion * factor, moments.std, rtol=1e-14, atol=0)


def test_cps_std_depends_on_the_target_only():
    """Pitfall 7: a longer CPS step to the same target adds the same noise."""
    near, far = (
        transition_coefficients("CPS", torch.tensor([s]), torch.tensor([0.4]), torch.tensor([0.8])).std
        for s in (0.41, 0.99)
    )
    assert torch.equal(near, far)
    # 0.4 and 0.8 as float32 numbers, which is what the kernel is given.
    t, eta = (torch.tensor([v], dtype=torch.float32).double() for v in (0.4, 0.8))
    assert float(near) == pytest.approx(float(t) * math.sin(float(eta) * math.pi / 2), rel=1e-14)


def test_flow_sde_is_dance_sde_with_diffusion_eta(step):
    eta = 0.4
    flow_eta = eta / torch.sqrt(step["sigma"] / (1 - step["sigma"]))
    flow = transition_moments("Flow-SDE", noise_level=flow_eta, **step)
    dance = transition_moments("Dance-SDE", noise_level=eta, **step)
    torch.testing.assert_close(flow.mean, dance.mean, rtol=1e-13, atol=1e-13)
    torch.testing.assert_close(flow.std, dance.std, rtol=1e-13, atol=0)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_small_noise_tends_to_the_ode_step(name, step):
    """The mean's distance to the Euler step falls with eta^2, the std with eta."""
    ode = step["x"] - rows(step["sigma"] - step["sigma_next"]) * step["velocity"]
    coarse, fine = (transition_moments(name, noise_level=eta, **step) for eta in (1e-3, 1e-4))
    errors = [(m.mean - ode).abs().max() for m in (coarse, fine)]
    assert float(errors[0] / errors[1]) == pytest.approx(100, rel=1e-3)
    torch.testing.assert_close(coarse.std / fine.std, torch.full((B,), 10.0, dtype=torch.float64), rtol=1e-4, atol=0)


@pytest.mark.parametrize("name", list(Dynamics))
def test_deterministic_rows_are_the_euler_step_bit_for_bit(name):
    x, v = randn(4, 3, 5, seed=3), randn(4, 3, 5, seed=4)
    sigma, sigma_next = torch.tensor([1.0, 0.7, 0.3, 0.5]), torch.tensor([0.9, 0.4, 0.0, 0.5])
    euler = x - (sigma - sigma_next).view(-1, 1, 1) * v
    eta = 0.0 if name is Dynamics.ODE else torch.tensor([0.0, 0.6, 0.0, 0.6])
    moments = transition_moments(name, x, v, sigma, sigma_next, eta)
    noisy = torch.tensor([False, name is not Dynamics.ODE, False, False])  # the last row takes no step at all
    assert torch.equal(moments.std > 0, noisy)
    assert torch.equal(moments.diffusion > 0, noisy)
    assert torch.equal(moments.mean[~noisy], euler[~noisy])
    noise = randn(4, 3, 5, seed=5)
    noise[0] = math.inf  # 0 * inf is NaN: a deterministic row must not even look at its noise
    drawn = sample_next(moments, noise)
    assert torch.equal(drawn[~noisy], euler[~noisy])
    assert not torch.equal(drawn[1], euler[1]) or name is Dynamics.ODE


def test_ode_step_is_the_euler_step_of_diffusers_bit_for_bit():
    scheduler = FlowMatchEulerDiscreteScheduler(shift=3.0)
    scheduler.set_timesteps(7)
    sigmas, x = scheduler.sigmas.clone(), randn(2, 4, 8, 8, seed=6)
    ours = x
    for i, timestep in enumerate(scheduler.timesteps):
        v = randn(2, 4, 8, 8, seed=100 + i)
        x = scheduler.step(v, timestep, x, return_dict=False)[0]
        ours = transition_moments("ODE", ours, v, sigmas[i].expand(2), sigmas[i + 1].expand(2), 0.0).mean
        assert torch.equal(x, ours)


@pytest.mark.parametrize("eta", [0.0, 0.5, 1.0])
def test_ddim_eta_is_the_ddim_scheduler_of_diffusers(eta):
    """Stable Diffusion's scheduler in its own coordinates, ours in flow coordinates; whole trajectories agree."""
    scheduler = DDIMScheduler(
        beta_start=0.00085,
        beta_end=0.012,
        beta_schedule="scaled_linear",
        clip_sample=False,
        set_alpha_to_one=False,
        steps_offset=1,
    )
    scheduler.alphas_cumprod = scheduler.alphas_cumprod.double()
    scheduler.final_alpha_cumprod = scheduler.alphas_cumprod[0]
    scheduler.set_timesteps(8)
    stride = 1000 // 8
    x = randn(2, 3, 4, 4, seed=7, dtype=torch.float64)
    flow = None
    for timestep in scheduler.timesteps.tolist():
        previous = timestep - stride
        ab = scheduler.alphas_cumprod[timestep]
        ab_next = scheduler.alphas_cumprod[previous] if previous >= 0 else scheduler.final_alpha_cumprod
        scale, scale_next = ab.sqrt() + (1 - ab).sqrt(), ab_next.sqrt() + (1 - ab_next).sqrt()
        sigma, sigma_next = (1 - ab).sqrt() / scale, (1 - ab_next).sqrt() / scale_next
        flow = x / scale if flow is None else flow
        epsilon = torch.tanh(x)  # any function of the state serves as a model
        noise = randn(2, 3, 4, 4, seed=timestep, dtype=torch.float64)
        x0 = (x - (1 - ab).sqrt() * epsilon) / ab.sqrt()
        # diffusers adds noise only for eta > 0.
        x = scheduler.step(epsilon, timestep, x, eta=eta, variance_noise=noise, return_dict=False)[0]
        moments = transition_moments("DDIM-eta", flow, epsilon - x0, sigma.expand(2), sigma_next.expand(2), eta)
        flow = sample_next(moments, noise)
        torch.testing.assert_close(flow * scale_next, x, rtol=1e-9, atol=1e-9)


def test_ddim_without_noise_is_euler_in_flow_coordinates(step):
    mean, std = written_out(Dynamics.DDIM_ETA, *step.values(), 0.0)
    euler = transition_moments("ODE", noise_level=0.0, **step)
    assert torch.equal(std, torch.zeros(B, dtype=torch.float64))
    torch.testing.assert_close(mean, euler.mean, rtol=1e-12, atol=1e-12)


def test_first_grid_point_is_known_by_its_index():
    """Pitfall 5: grids that start at 0.999 must not get tens of times the noise; no comparison with 1.0."""
    for shift, excess in ((3.0, 6), (1.0, 10)):
        scheduler = FlowMatchEulerDiscreteScheduler(shift=shift)
        scheduler.set_timesteps(10)
        target = scheduler.sigmas[1:2]
        eta = torch.tensor([0.7])
        at_one, at_999 = (
            transition_coefficients("Flow-SDE", torch.tensor([s]), target, eta, torch.tensor([0])) for s in (1.0, 0.999)
        )
        a = 0.7 * math.sqrt(1 / (1 - float(target)))
        assert float(at_one.diffusion) == pytest.approx(a, rel=1e-6)
        assert float(at_999.diffusion) == pytest.approx(a * math.sqrt(0.999), rel=1e-5)
        plain = transition_coefficients("Flow-SDE", torch.tensor([0.999]), target, eta, torch.tensor([1]))
        assert float(plain.diffusion) == pytest.approx(31.6 * 0.7, rel=1e-3)
        assert float(plain.diffusion / at_999.diffusion) == pytest.approx(excess, rel=0.07)


def test_index_zero_rule_holds_in_the_middle_too_and_only_for_flow_sde():
    s, t, eta = torch.tensor([0.5]), torch.tensor([0.3]), torch.tensor([0.7])
    for name in STOCHASTIC:
        first, later, off_grid = (
            transition_coefficients(name, s, t, eta, i) for i in (torch.tensor([0]), torch.tensor([4]), None)
        )
        assert torch.equal(later.x_scale, off_grid.x_scale)
        assert torch.equal(first.x_scale, later.x_scale) == (name is not Dynamics.FLOW_SDE)
    # The numerator stays s: a = eta sqrt(s / (1 - s')).
    first = transition_coefficients("Flow-SDE", s, t, eta, torch.tensor([0]))
    assert float(first.diffusion) == pytest.approx(0.7 * math.sqrt(0.5 / 0.7), rel=1e-6)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_effective_std_of_a_grid(name):
    sigmas = torch.tensor([0.999, 0.9, 0.5, 0.2, 0.0])
    std = effective_std(name, sigmas, 0.6)
    x = torch.zeros(4, 3)
    moments = transition_moments(name, x, x, sigmas[:-1], sigmas[1:], 0.6, torch.arange(4))
    assert std.dtype == torch.float64
    assert torch.equal(std.float(), moments.std)


@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_number_and_a_tensor_of_noise_levels_give_the_same_bits(name):
    x, v = randn(3, 7, seed=8), randn(3, 7, seed=9)
    s, t = torch.tensor([0.9, 0.6, 0.2]), torch.tensor([0.8, 0.4, 0.1])
    number = transition_moments(name, x, v, s, t, 0.7)
    tensor = transition_moments(name, x, v, s, t, torch.full((3,), 0.7))
    assert torch.equal(number.mean, tensor.mean)
    assert torch.equal(number.std, tensor.std)


def test_precision_is_promoted_never_lowered():
    s, t = torch.tensor([0.9]), torch.tensor([0.8])
    for given, expected in ((torch.bfloat16, torch.float32), (torch.float16, torch.float32), (torch.float64,) * 2):
        x = randn(1, 4, seed=10).to(given)
        moments = transition_moments("CPS", x, x, s, t, 0.5)
        assert {moments.mean.dtype, moments.std.dtype, moments.diffusion.dtype} == {expected}
        assert log_prob(x, moments).dtype == torch.float64


def test_float32_moments_are_correct_to_float32():
    """The coefficients subtract nearly equal numbers; float64 inside keeps them exact."""
    sigmas = torch.linspace(1, 0, 41)
    x, v = randn(39, 64, seed=11), randn(39, 64, seed=12)
    for name in STOCHASTIC:
        args = (sigmas[:-2], sigmas[1:-1])
        index = torch.arange(39)
        low = transition_moments(name, x, v, *args, 0.25, index)
        high = transition_moments(name, x.double(), v.double(), *(a.double() for a in args), 0.25, index)
        torch.testing.assert_close(low.mean.double(), high.mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(low.std.double(), high.std, rtol=1.2e-7, atol=0)


def test_sample_next_moves_by_std_times_noise(step):
    moments = transition_moments("Dance-SDE", noise_level=0.3, **step)
    noise = randn(B, 2, 3, 4, seed=13, dtype=torch.float64)
    torch.testing.assert_close(
        (sample_next(moments, noise) - moments.mean) / rows(moments.std), noise, rtol=1e-11, atol=1e-11
    )


def test_names():
    assert parse_dynamics("Flow-SDE") is Dynamics.FLOW_SDE
    assert [d.value for d in Dynamics] == ["ODE", "Flow-SDE", "Dance-SDE", "CPS", "DDIM-eta"]
    with pytest.raises(InputError, match=r"unknown dynamics 'flow_sde' .*'Flow-SDE'.*DDIM-eta"):
        parse_dynamics("flow_sde")


@pytest.mark.parametrize(
    ("name", "sigma", "sigma_next", "eta", "message"),
    [
        ("Flow-SDE", 0.4, 0.5, 0.7, "row 0 steps from sigma 0.4 to sigma_next 0.5"),
        ("ODE", 0.4, 0.5, 0.0, "row 0 steps from sigma 0.4"),
        ("CPS", 1.2, 0.5, 0.7, "sigma 1.2"),
        ("CPS", 0.5, -0.1, 0.7, "sigma_next -0.1"),
        ("CPS", 0.5, 0.4, 1.1, r"noise level 1.1 .*CPS takes .*in \[0, 1\]"),
        ("DDIM-eta", 0.5, 0.4, 1.1, r"in \[0, 1\]"),
        ("Flow-SDE", 0.5, 0.4, -0.1, "noise level -0.1 .*at least 0"),
        ("Dance-SDE", 0.5, 0.4, math.inf, "noise level inf"),
        ("Dance-SDE", 0.5, 0.4, math.nan, "noise level nan"),
        ("Flow-SDE", 1.0, 0.9, 0.7, "divides by 1 - sigma = 0"),
        ("SDE", 0.5, 0.4, 0.7, "unknown dynamics"),
    ],
)
def test_errors_name_the_value(name, sigma, sigma_next, eta, message):
    x = torch.zeros(1, 3)
    with pytest.raises(InputError, match=message):
        transition_moments(name, x, x, torch.tensor([sigma]), torch.tensor([sigma_next]), eta)


def test_large_noise_levels_are_allowed_where_the_formula_allows_them():
    x = torch.zeros(1, 3)
    for name in ("Flow-SDE", "Dance-SDE"):
        moments = transition_moments(name, x, x, torch.tensor([0.5]), torch.tensor([0.4]), 1.5)
        assert isinstance(moments, TransitionMoments)
        assert float(moments.std) > 0


def test_shapes_are_checked():
    x, s = torch.zeros(3, 4), torch.full((3,), 0.5)
    with pytest.raises(ValueError, match="velocity has shape"):
        transition_moments("CPS", x, x[:2], s, s, 0.5)
    with pytest.raises(ValueError, match=r"sigma_next has shape \(2,\)"):
        transition_moments("CPS", x, x, s, s[:2], 0.5)
    with pytest.raises(ValueError, match=r"noise_level has shape \(3, 1\)"):
        transition_moments("CPS", x, x, s, s, torch.full((3, 1), 0.5))
