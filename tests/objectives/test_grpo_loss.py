"""The clipped surrogate: values, gradients and edges."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.objectives import grpo_loss, kl_penalty
from flow_factory.scheduler import log_prob, transition_moments


def randn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def as_published(log_prob, old_log_prob, advantages, clip_range):
    """PPO's objective as it is printed: ratio, clipped ratio, pessimistic maximum, mean."""
    rho = torch.exp(log_prob - old_log_prob)
    clipped = torch.clamp(rho, 1 + clip_range[0], 1 + clip_range[1])
    return torch.maximum(-advantages * rho, -advantages * clipped).mean()


@pytest.mark.parametrize("clip_range", [(-0.2, 0.2), (-0.1, 0.5), (-1e-4, 1e-4), (-2e-6, 4e-6)])
def test_value_and_gradient_against_the_published_form(clip_range):
    spread = 3 * clip_range[1]
    new = (randn(400, seed=1) * spread - 1.5).requires_grad_(True)
    old = randn(400, seed=2) * spread - 1.5
    advantages = randn(400, seed=3)
    loss, metrics = grpo_loss(new, old, advantages, clip_range)
    expected = as_published(new, old, advantages, clip_range)
    torch.testing.assert_close(loss, expected, rtol=1e-10, atol=1e-12)
    (grad,) = torch.autograd.grad(loss, new)
    (autograd,) = torch.autograd.grad(expected, new)
    torch.testing.assert_close(grad, autograd, rtol=1e-6, atol=0)

    rho = torch.exp(new - old).detach()
    cut = ((rho > 1 + clip_range[1]) & (advantages > 0)) | ((rho < 1 + clip_range[0]) & (advantages < 0))
    closed = torch.where(cut, torch.zeros_like(rho), -advantages * rho / 400)
    torch.testing.assert_close(grad, closed, rtol=1e-6, atol=0)
    assert 0.1 < float(cut.double().mean()) < 0.9  # both branches were exercised
    assert float(metrics["clip_fraction"]) == pytest.approx(float(cut.double().mean()), abs=1e-12)


def test_equal_log_probs_give_ratio_one_exactly():
    values = torch.tensor([-1.234567, 0.1, -1e-3, 812.7])
    loss, metrics = grpo_loss(
        values.clone().requires_grad_(True), values, torch.tensor([1.0, -2.0, 0.5, 0.0]), (-1e-4, 1e-4)
    )
    assert metrics["ratio_mean"].item() == 1.0
    assert metrics["ratio_deviation_max"].item() == 0.0
    assert metrics["clip_fraction"].item() == 0.0
    assert metrics["approx_kl"].item() == 0.0
    assert loss.item() == 0.125  # -mean(A)


def grad_at(log_ratio: float, advantage: float, clip: float = 0.25) -> float:
    new = torch.tensor([log_ratio], dtype=torch.float64, requires_grad=True)
    old = torch.zeros(1, dtype=torch.float64)
    loss, _ = grpo_loss(new, old, torch.tensor([advantage], dtype=torch.float64), (-clip, clip))
    (grad,) = torch.autograd.grad(loss, new)
    return float(grad)


def test_edges_of_the_clip_range():
    """Inside and on the edge the gradient is -A rho; beyond it, in the direction A pushes, exactly 0."""
    hi, lo, eps = math.log1p(0.25), math.log1p(-0.25), 1e-9
    for advantage, edge, outside in ((2.0, hi, hi + eps), (-2.0, lo, lo - eps)):
        assert grad_at(edge, advantage) == pytest.approx(-advantage * math.exp(edge), rel=1e-12)
        assert grad_at(outside, advantage) == 0.0
        # The other sign is never cut there: moving back must stay possible.
        assert grad_at(outside, -advantage) == pytest.approx(advantage * math.exp(outside), rel=1e-12)
    assert grad_at(0.0, 0.0) == 0.0


def test_extreme_ratios_are_finite_where_the_clip_binds():
    """exp(1000) overflows; with a plain maximum the zero gradient of the clip would become 0 * inf = NaN."""
    new = torch.tensor([1000.0, -1000.0, 1000.0, -1000.0], requires_grad=True)
    advantages = torch.tensor([1.0, -1.0, 0.0, 0.0])
    loss, _ = grpo_loss(new, torch.zeros(4), advantages, (-0.2, 0.2))
    assert loss.item() == pytest.approx((-1.2 + 0.8) / 4, rel=1e-6)
    (grad,) = torch.autograd.grad(loss, new)
    assert grad.tolist() == [0.0] * 4


def test_small_clip_ranges_bind_in_float32():
    """1 + 2e-6 is 17 float32 steps from 1; near log-ratio 0 the resolution is far better."""
    log_ratio = torch.tensor([1.9e-6, 2.1e-6, 2.0e-6 - 1e-9], requires_grad=True)
    loss, metrics = grpo_loss(log_ratio, torch.zeros(3), torch.ones(3), (-2e-6, 2e-6))
    (grad,) = torch.autograd.grad(loss, log_ratio)
    assert (grad == 0).tolist() == [False, True, False]
    assert metrics["ratio_deviation_max"].item() == pytest.approx(2.1e-6, rel=1e-4)


def test_old_log_probs_and_advantages_are_detached():
    new, old, advantages = (randn(5, seed=s).requires_grad_(True) for s in (4, 5, 6))
    loss, metrics = grpo_loss(new, old, advantages, (-0.5, 0.5))
    loss.backward()
    assert new.grad is not None and old.grad is None and advantages.grad is None
    assert not any(m.requires_grad for m in metrics.values())
    assert set(metrics) == {"ratio_mean", "ratio_deviation_max", "clip_fraction", "approx_kl", "policy_loss"}


def test_metrics_by_hand():
    new, old = torch.tensor([0.1, -0.3, 0.0], dtype=torch.float64), torch.zeros(3, dtype=torch.float64)
    loss, metrics = grpo_loss(new, old, torch.tensor([1.0, -1.0, 1.0]).double(), (-0.05, 0.05))
    assert metrics["ratio_mean"].item() == pytest.approx((math.exp(0.1) + math.exp(-0.3) + 1) / 3, rel=1e-14)
    assert metrics["ratio_deviation_max"].item() == pytest.approx(1 - math.exp(-0.3), rel=1e-14)
    assert metrics["clip_fraction"].item() == pytest.approx(2 / 3)
    assert metrics["approx_kl"].item() == pytest.approx((0.01 + 0.09) / 6, rel=1e-14)
    assert metrics["policy_loss"].item() == loss.item() == pytest.approx((-1.05 + 0.95 - 1) / 3)


def test_weights_scale_each_term():
    new, old, advantages = (randn(6, seed=s) for s in (7, 8, 9))
    weights = torch.tensor([0.0, 1.0, 2.0, 0.5, 3.0, 1.0], dtype=torch.float64)
    got, _ = grpo_loss(new, old, advantages, (-0.2, 0.2), weights)
    parts = [grpo_loss(new[i : i + 1], old[i : i + 1], advantages[i : i + 1], (-0.2, 0.2))[0] for i in range(6)]
    torch.testing.assert_close(got, (torch.stack(parts) * weights).mean())


@pytest.mark.parametrize("clip_range", [(0.1, 0.2), (-0.1, -0.05), (-1.0, 0.1), (0.0, 0.0), (-0.1, math.inf)])
def test_bad_clip_ranges(clip_range):
    with pytest.raises(InputError, match=r"train\.clip_range"):
        grpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2), clip_range)


def test_shapes_are_checked():
    with pytest.raises(ValueError, match="advantages has shape"):
        grpo_loss(torch.zeros(2), torch.zeros(2), torch.zeros(2, 1), (-0.1, 0.1))


@pytest.mark.parametrize("kind", ["v-based", "x-based", "transition", "transition_dt"])
def test_gradient_changes_with_kl_beta(kind):
    """Pitfall 1: a KL formed under no_grad leaves the gradient as it was, whatever kl_beta is."""
    x, reference = randn(4, 3, 5, seed=10), randn(4, 3, 5, seed=11)
    s, t = torch.full((4,), 0.8).double(), torch.full((4,), 0.7).double()
    weight = torch.tensor(0.5, dtype=torch.float64, requires_grad=True)
    nxt, advantages = randn(4, 3, 5, seed=12), randn(4, seed=13)

    def gradient(kl_beta: float) -> float:
        v = weight * x
        moments = transition_moments("Flow-SDE", x, v, s, t, 0.7)
        ref = transition_moments("Flow-SDE", x, reference, s, t, 0.7)
        l_new = log_prob(nxt, moments)
        policy, _ = grpo_loss(l_new, l_new.detach(), advantages, (-1e-4, 1e-4))
        kl = kl_penalty(
            kind,
            velocity=v,
            velocity_ref=reference,
            mean=moments.mean,
            mean_ref=ref.mean,
            std=moments.std,
            diffusion=moments.diffusion,
        )
        (grad,) = torch.autograd.grad(policy + kl_beta * kl.mean(), weight)
        return float(grad)

    plain, small, large = gradient(0.0), gradient(0.04), gradient(0.08)
    assert abs(small - plain) > 1e-6
    assert large - plain == pytest.approx(2 * (small - plain), rel=1e-9)
