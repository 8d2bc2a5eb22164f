"""GRPO-Guard, DPPO, GSPO and REINFORCE against derivations that do not use them, in float64."""

from __future__ import annotations

import math

import pytest
import torch
from diffusers import FlowMatchEulerDiscreteScheduler
from torch.distributions import Normal

from flow_factory.objectives.bound import bind_policy_loss
from flow_factory.objectives.dppo import dppo_loss
from flow_factory.objectives.grpo_guard import gradient_scale, guard_log_ratio
from flow_factory.objectives.policy_step import PolicyStep
from flow_factory.scheduler import Dynamics, log_prob, pipeline_grid, transition_coefficients, transition_moments

B, D = 6, 40
SDES = ["Flow-SDE", "Dance-SDE", "CPS", "DDIM-eta"]


def randn(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def make_step(dynamics: str = "Flow-SDE", moved: float = 1e-2, seed: int = 0) -> tuple[PolicyStep, torch.Tensor]:
    """A step of a linear policy v = w x + small, and the weight w that its graph ends in."""
    x, noise, shift = randn(B, D, seed=seed), randn(B, D, seed=seed + 1), randn(B, D, seed=seed + 2)
    s, t, index = torch.full((B,), 0.7).double(), torch.full((B,), 0.6).double(), torch.full((B,), 3)
    old = transition_moments(dynamics, x, 0.8 * x, s, t, 0.6, index)
    reached = old.mean + old.std.unsqueeze(1) * noise
    weight = torch.full((D,), 0.8, dtype=torch.float64, requires_grad=True)
    velocity = weight * x + moved * shift
    new = transition_moments(dynamics, x, velocity, s, t, 0.6, index)
    c = transition_coefficients(dynamics, s, t, torch.full((B,), 0.6).double(), index)
    step = PolicyStep(
        dynamics=Dynamics(dynamics),
        log_prob=log_prob(reached, new),
        old_log_prob=log_prob(reached, old),
        mean=new.mean,
        velocity=velocity,
        next_state=reached,
        std=new.std,
        spread=new.std.unsqueeze(1),
        sigma=s,
        h=s - t,
        velocity_scale=c.v_scale.abs(),
        declared={"old_mean": old.mean, "old_velocity": 0.8 * x},
    )
    return step, weight


ADVANTAGES = torch.tensor([1.0, -1.0, 0.5, -2.0, 2.0, 0.0], dtype=torch.float64)
ALL = torch.ones(B, dtype=torch.bool)


def density_ratio(step: PolicyStep) -> torch.Tensor:
    """rho from torch's own Normal, geometric mean over the elements."""
    q = step.spread
    new, old = (Normal(mean, q).log_prob(step.next_state) for mean in (step.mean, step.old_mean))
    return (new.mean(dim=1) - old.mean(dim=1)).exp()


@pytest.mark.parametrize("dynamics", SDES)
def test_guards_log_ratio_is_the_mean_of_z_times_the_shift_and_the_papers_form(dynamics):
    step, _ = make_step(dynamics)
    got = guard_log_ratio(step.next_state, step.mean, step.old_mean, step.spread)
    # The paper's: the log-ratio of the normalised densities times q, with the mean of its bias put back.
    q = step.std
    new, old = (Normal(m, q[:, None]).log_prob(step.next_state).mean(1) for m in (step.mean, step.old_mean))
    papers = (new - old) * q + (step.mean - step.old_mean).square().mean(1) / (2 * q)
    torch.testing.assert_close(got, papers, rtol=1e-9, atol=1e-15)
    by_element = [
        sum(float((x - m_old) / q_i * (m - m_old)) for x, m, m_old in zip(*(r.tolist() for r in rows), strict=True)) / D
        for *rows, q_i in zip(step.next_state, step.mean, step.old_mean, q.tolist(), strict=True)
    ]
    assert got.tolist() == pytest.approx(by_element, rel=1e-10)
    assert guard_log_ratio(step.next_state, step.old_mean, step.old_mean, step.spread).tolist() == [0.0] * B


def test_guards_log_ratio_is_centred_where_the_plain_one_is_not():
    """Over many samples of one step the plain log-ratio has mean -(mu - mu_old)^2 / (2 q^2)."""
    q, shift, n = 0.3, 0.05, 20_000
    z = randn(n, 4, seed=5)
    mean, old = torch.full((n, 4), shift).double(), torch.zeros(n, 4).double()
    got = guard_log_ratio(q * z, mean, old, torch.full((n, 1), q).double())
    plain = (Normal(mean, q).log_prob(q * z) - Normal(old, q).log_prob(q * z)).mean(1)
    error = shift / 2 / math.sqrt(n)
    assert abs(float(got.mean())) < 4 * error
    assert float(plain.mean()) == pytest.approx(-(shift**2) / (2 * q**2), abs=4 * error / q)


@pytest.mark.parametrize("dynamics", SDES)
def test_guards_gradient(dynamics):
    """Inside the clip range: -A rho z (d mu / d v) x / (D scale), written out per row."""
    step, weight = make_step(dynamics)
    loss, metrics = bind_policy_loss("grpo-guard", {"clip_range": (-0.9, 9.0)})(step, ADVANTAGES, ALL)
    (got,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (slope,) = torch.autograd.grad(step.mean.sum(), step.velocity, retain_graph=True)
    z = (step.next_state - step.old_mean) / step.spread
    rho = (z * (step.mean - step.old_mean)).mean(1).exp().detach()
    inputs = randn(B, D, seed=0)
    scale = step.h if dynamics in ("Flow-SDE", "Dance-SDE") else slope[:, 0].abs()
    terms = -ADVANTAGES[:, None] * rho[:, None] * z * slope * inputs / D / scale[:, None]
    torch.testing.assert_close(got, (terms / B).sum(0).detach(), rtol=1e-6, atol=1e-15)
    assert float(metrics["clip_fraction"]) == 0.0


def sd3_steps(eta: float = 0.7):
    """Coefficients of the trained steps of SD3's grid, 10 steps, shift 3."""
    sigmas = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=3.0), 10).primary
    return sigmas, lambda name: transition_coefficients(
        name, sigmas[:-1], sigmas[1:], torch.full((10,), eta), torch.arange(10)
    )


def test_guards_gradients_have_equal_scale_on_sd3s_grid():
    """|d mu / d v| of steps 0 to 8, the size of the gradient of z (mu - mu_old), before and after the division."""
    sigmas, coefficients = sd3_steps()
    slope = coefficients("Flow-SDE").v_scale.abs()[:9]
    h = (sigmas[:-1] - sigmas[1:]).double()[:9]
    divided = slope / gradient_scale(Dynamics.FLOW_SDE, h, slope)
    assert (float(slope.min()), float(slope.max())) == pytest.approx((0.04, 0.335), abs=1e-3)
    # 1 + a^2 (1 - s) / (2 s): 1 at s = 1, and 1 + eta^2 / 2 at all later steps.
    assert divided.tolist() == pytest.approx([1.0, *[1 + 0.7**2 / 2] * 8], rel=1e-5)
    assert float((slope / gradient_scale(Dynamics.CPS, h, slope)).min()) == 1.0


def test_cps_slope_is_what_guard_divides_by():
    """|d mean / d v| = s (1 - s') - (1 - s) sqrt(s'^2 - c^2)."""
    sigmas, coefficients = sd3_steps(eta=0.8)
    s, t = sigmas[:-1].double(), sigmas[1:].double()
    c = t * math.sin(0.8 * math.pi / 2)
    expected = s * (1 - t) - (1 - s) * (t**2 - c**2).sqrt()
    torch.testing.assert_close(coefficients("CPS").v_scale.abs(), expected.abs(), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("kind", ["x-based", "v-based"])
def test_dppos_mask_and_gradient(kind):
    """The terms that count have the gradient of -A rho; the cut ones none at all."""
    step, weight = make_step(moved=2e-2)
    rho = density_ratio(step)
    if kind == "x-based":
        divergence = ((step.mean - step.old_mean) ** 2 / (2 * step.spread**2)).mean(1).detach()
    else:
        divergence = ((step.velocity - step.old_velocity) ** 2).mean(1).detach()
    threshold = float(divergence.median())
    # The farthest two go on moving away, the nearest one too, and the others come back.
    order = divergence.argsort()
    advantages = -(rho.detach() - 1).sign() * torch.tensor([1.0, 0.5, 2.0, 1.5, 0.7, 3.0], dtype=torch.float64)
    for row in (order[0], order[-2], order[-1]):
        advantages[row] *= -1
    cut = torch.zeros(B, dtype=torch.bool)
    cut[order[-2:]] = True
    params = {"kl_mask_type": kind, "kl_mask_threshold": threshold}
    loss, metrics = bind_policy_loss("dppo", params)(step, advantages, ALL)
    (got,) = torch.autograd.grad(loss, weight, retain_graph=True)
    (expected,) = torch.autograd.grad((-advantages * rho)[~cut].sum() / B, weight)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-15)
    assert float(metrics["masked_fraction"]) == pytest.approx(int(cut.sum()) / B)
    assert float(metrics["divergence_max"]) == pytest.approx(float(divergence.max()), rel=1e-9)


def test_dppo_stays_finite_where_a_cut_ratio_overflows():
    new = torch.tensor([1000.0, -1000.0, 1000.0], requires_grad=True)
    loss, _ = dppo_loss(new, torch.zeros(3), torch.ones(3), torch.tensor([1.0, -1.0, 0.0]), 1e-6)
    (grad,) = torch.autograd.grad(loss, new)
    assert loss.item() == 0.0 and grad.tolist() == [0.0] * 3


def test_dppo_lets_samples_come_back():
    """Beyond the threshold, but A points towards the old policy: the term counts in full."""
    new = torch.tensor([0.1, -0.1], dtype=torch.float64, requires_grad=True)
    loss, _ = dppo_loss(new, torch.zeros(2), torch.ones(2), torch.tensor([-1.0, 1.0]), 1e-6)
    (grad,) = torch.autograd.grad(loss, new)
    assert grad.tolist() == pytest.approx([math.exp(0.1) / 2, -math.exp(-0.1) / 2])


def test_needs_of_dppo_follow_its_divergence():
    assert bind_policy_loss("dppo", {}).stores == {"mean"}
    assert bind_policy_loss("dppo", {"kl_mask_type": "v-based"}).stores == {"velocity"}
    assert bind_policy_loss("grpo", {}).stores == frozenset() == bind_policy_loss("gspo", {}).stores


def test_gspos_steps_add_up_to_the_gradient_of_the_sequence_form():
    """mean max(-A s, -A clip(s)), s = exp(mean over steps of l - l_old), differentiated through s at once."""
    theta = randn(5, seed=30).mul(0.01).requires_grad_(True)
    features, old = randn(3, B, 5, seed=31), randn(3, B, seed=32)
    log_probs = features @ theta + old  # [T, B]
    clip = (-0.004, 0.006)
    sequence = (log_probs - old).mean(0)
    ratio = sequence.exp()
    clipped = ratio.clamp(1 + clip[0], 1 + clip[1])
    expected = torch.maximum(-ADVANTAGES * ratio, -ADVANTAGES * clipped).mean()
    (gradient,) = torch.autograd.grad(expected, theta, retain_graph=True)
    loss_function = bind_policy_loss("gspo", {"clip_range": clip})
    template, _ = make_step()
    total = torch.zeros(5, dtype=torch.float64)
    values = []
    for t in range(3):
        step = PolicyStep(
            **{
                **{f: getattr(template, f) for f in template.__dataclass_fields__},
                "log_prob": log_probs[t],
                "old_log_prob": old[t],
                "declared": {"sequence_log_ratio": sequence.detach()},
            }
        )
        loss, metrics = loss_function(step, ADVANTAGES, ALL)
        total += torch.autograd.grad(loss, theta, retain_graph=True)[0] / 3
        values.append(loss.item())
    torch.testing.assert_close(total, gradient, rtol=1e-6, atol=1e-15)
    assert values == pytest.approx([expected.item()] * 3, rel=1e-12)
    assert 0 < float(metrics["clip_fraction"]) < 1  # some sequences are clipped as a whole, some are not


def test_reinforces_gradient():
    step, weight = make_step()
    loss, _ = bind_policy_loss("reinforce", {})(step, ADVANTAGES, ALL)
    (got,) = torch.autograd.grad(loss, weight, retain_graph=True)
    density = Normal(step.mean, step.spread).log_prob(step.next_state).mean(1)
    (expected,) = torch.autograd.grad(-(ADVANTAGES * density).mean(), weight)
    torch.testing.assert_close(got, expected, rtol=1e-6, atol=1e-15)


@pytest.mark.parametrize("name", ["grpo", "grpo-guard", "dppo", "gspo", "reinforce"])
def test_masked_samples_take_no_part(name):
    """Their terms are 0 whatever their numbers are, and the others weigh as before."""
    step, weight = make_step()
    if name == "gspo":
        step = PolicyStep(
            **{
                **{f: getattr(step, f) for f in step.__dataclass_fields__},
                "declared": {"sequence_log_ratio": (step.log_prob - step.old_log_prob).detach()},
            }
        )
    loss_function = bind_policy_loss(
        name, {"clip_range": (-0.5, 0.5)} if name in ("grpo", "gspo", "grpo-guard") else {}
    )
    mask = torch.tensor([True, True, False, True, True, True])
    without = ADVANTAGES.clone()
    without[2] = 0.0
    gradients = [
        torch.autograd.grad(loss_function(step, a, m)[0], weight, retain_graph=True)[0]
        for a, m in ((ADVANTAGES, mask), (without, ALL), (ADVANTAGES, ALL))
    ]
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-12, atol=0)
    assert not torch.equal(gradients[0], gradients[2])
