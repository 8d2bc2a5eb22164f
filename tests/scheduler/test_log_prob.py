"""Log-probabilities of transitions, and the ratio of a replay."""

from __future__ import annotations

import math

import pytest
import torch
from torch.distributions import Normal

from flow_factory.errors import InputError
from flow_factory.samples.reductions import drop_low_bits
from flow_factory.scheduler import Dynamics, TransitionMoments, log_prob, sample_next, transition_moments

STOCHASTIC = [d for d in Dynamics if d.stochastic]


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=dtype)


def moments_of(mean: torch.Tensor, std: torch.Tensor) -> TransitionMoments:
    return TransitionMoments(mean, std, std)


def test_normalised_is_the_mean_log_density():
    mean, x = randn(3, 2, 5, seed=1, dtype=torch.float64), randn(3, 2, 5, seed=2, dtype=torch.float64)
    std = torch.tensor([0.01, 0.3, 1.7], dtype=torch.float64)
    expected = Normal(mean, std.view(-1, 1, 1)).log_prob(x).mean(dim=(1, 2))
    torch.testing.assert_close(log_prob(x, moments_of(mean, std)), expected, rtol=2e-10, atol=0)


def test_unnormalised_is_twice_the_variance_times_normalised_up_to_a_constant():
    mean, std = randn(3, 8, seed=3, dtype=torch.float64), torch.tensor([0.1, 0.5, 0.9], dtype=torch.float64)
    moments = moments_of(mean, std)
    one, two = randn(3, 8, seed=4, dtype=torch.float64), randn(3, 8, seed=5, dtype=torch.float64)
    plain = log_prob(one, moments, normalised=False) - log_prob(two, moments, normalised=False)
    full = log_prob(one, moments) - log_prob(two, moments)
    torch.testing.assert_close(plain, 2 * std**2 * full, rtol=0, atol=1e-8)
    expected = -((one - mean) ** 2).mean(1)
    torch.testing.assert_close(log_prob(one, moments, normalised=False), expected, rtol=2e-10, atol=0)


@pytest.mark.parametrize("normalised", [True, False])
def test_mask_leaves_inactive_elements_out_of_value_and_gradient(normalised):
    mean, x = randn(2, 6, seed=6, dtype=torch.float64), randn(2, 6, seed=7, dtype=torch.float64)
    std = torch.tensor([0.4, 0.8], dtype=torch.float64)
    mask = torch.tensor([[True, True, False, True, False, True]])
    expected = log_prob(x[:, mask[0]], moments_of(mean[:, mask[0]], std), normalised=normalised)
    spoiled = x.clone()
    spoiled[:, ~mask[0]] = math.inf  # inactive elements may hold anything
    mean.requires_grad_(True)
    got = log_prob(spoiled, moments_of(mean, std), mask=mask, normalised=normalised)
    torch.testing.assert_close(got, expected, rtol=1e-14, atol=0)
    got.sum().backward()
    assert mean.grad is not None
    assert torch.equal(mean.grad == 0, ~mask.expand(2, 6))


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_gradient_in_the_velocity(name, normalised):
    """Against autograd of a written-out density, and in closed form: d l / d v = (x' - mean) / q^2 * dm/dv / D."""
    x, v, nxt = (randn(2, 3, 4, seed=s, dtype=torch.float64) for s in (8, 9, 10))
    s, t = torch.tensor([0.9, 0.5], dtype=torch.float64), torch.tensor([0.7, 0.4], dtype=torch.float64)
    v.requires_grad_(True)
    moments = transition_moments(name, x, v, s, t, 0.6, torch.tensor([0, 3]))
    (got,) = torch.autograd.grad(log_prob(nxt, moments, normalised=normalised).sum(), v, retain_graph=True)

    q = moments.std.view(-1, 1, 1)
    density = (
        Normal(moments.mean, q).log_prob(nxt).mean(dim=(1, 2)).sum()
        if normalised
        else -((nxt - moments.mean) ** 2).mean(dim=(1, 2)).sum()
    )
    (autograd,) = torch.autograd.grad(density, v, retain_graph=True)
    torch.testing.assert_close(got, autograd, rtol=1e-12, atol=1e-14)

    (slope,) = torch.autograd.grad(moments.mean.sum(), v)  # the kernel is linear: dm/dv is the same in all elements
    scale = 1 / q**2 if normalised else 2
    closed = (nxt - moments.mean.detach()) * scale * slope / 12
    torch.testing.assert_close(got, closed, rtol=1e-12, atol=1e-14)


def test_next_state_is_detached():
    """Otherwise the gradient of a rollout-and-train step would vanish: x' = mean + q z moves with the mean."""
    v = randn(2, 5, seed=11).requires_grad_(True)
    moments = transition_moments("CPS", randn(2, 5, seed=12), v, torch.full((2,), 0.6), torch.full((2,), 0.4), 0.5)
    nxt = sample_next(moments, randn(2, 5, seed=13))
    assert nxt.requires_grad
    (grad,) = torch.autograd.grad(log_prob(nxt, moments).sum(), v)
    assert float(grad.abs().min()) > 0


def test_deterministic_steps_have_no_log_prob():
    x, s, t = torch.zeros(2, 3), torch.full((2,), 0.5), torch.full((2,), 0.4)
    with pytest.raises(InputError, match="row 0 is a deterministic step"):
        log_prob(x, transition_moments("ODE", x, x, s, t, 0.0))
    mixed = transition_moments("CPS", x, x, s, t, torch.tensor([0.5, 0.0]))
    for normalised in (True, False):
        with pytest.raises(InputError, match="row 1 is a deterministic step"):
            log_prob(x, mixed, normalised=normalised)


@pytest.mark.parametrize("normalised", [True, False])
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_a_row_does_not_depend_on_the_rows_beside_it(name, threads, normalised):
    """Pitfall 2: the batch composition differs between rollout and training.

    40,000 elements a row are more than the size from which PyTorch splits a single row among threads.
    """
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        n = 6
        x, v, z = (randn(n, 4, 100, 100, seed=s) for s in (14, 15, 16))
        s, t = torch.linspace(0.95, 0.4, n), torch.linspace(0.9, 0.3, n)
        index = torch.tensor([0, 1, 2, 3, 4, 5])
        whole = transition_moments(name, x, v, s, t, 0.7, index)
        nxt = sample_next(whole, z)
        together = log_prob(nxt, whole, normalised=normalised)
        for part in ([0], [5, 3], [2, 0, 4, 1], [1, 1, 1, 1, 1, 1, 1]):
            alone = transition_moments(name, x[part], v[part], s[part], t[part], 0.7, index[part])
            assert torch.equal(alone.mean, whole.mean[part])
            assert torch.equal(alone.std, whole.std[part])
            assert torch.equal(sample_next(alone, z[part]), nxt[part])
            assert torch.equal(log_prob(nxt[part], alone, normalised=normalised), together[part])
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("storage", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("name", STOCHASTIC)
def test_replay_of_the_stored_state_gives_ratio_one(name, storage):
    """Pitfall 2: the next state is rounded to its storage precision before its log-prob; then replay is exact."""
    x, v, z = (randn(4, 4, 16, 16, seed=s) for s in (17, 18, 19))
    s, t = torch.full((4,), 0.8), torch.full((4,), 0.7)
    rollout = transition_moments(name, x, v, s, t, 0.7, torch.full((4,), 3))
    stored = sample_next(rollout, z).to(storage)
    old = log_prob(stored, rollout)

    order = torch.tensor([2, 0, 3, 1])
    replayed = transition_moments(name, x[order], v[order], s, t, torch.full((4,), 0.7), torch.full((4,), 3))
    new = log_prob(stored[order], replayed)
    assert torch.equal((new - old[order]).exp(), torch.ones(4).double())
    if storage is torch.bfloat16:  # and the fault that this avoids is there to be seen
        unrounded = log_prob(sample_next(rollout, z), rollout)
        assert not torch.equal((new - unrounded[order]).exp(), torch.ones(4).double())


def test_log_ratios_are_finer_than_a_clip_range_of_two_millionths():
    """In float32 a log-prob near 1 moves in steps of 1e-7, a twentieth of the clip range of GRPO-Guard's recipes."""
    x, v, z = (randn(1, 4, 32, 32, seed=s) for s in (20, 21, 22))
    s, t = torch.tensor([0.8]), torch.tensor([0.7])
    rollout = transition_moments("Flow-SDE", x, v, s, t, 0.7)
    nxt = sample_next(rollout, z)
    old = log_prob(nxt, rollout)
    q = rollout.std.double()
    direction = (
        z.double() / z.double().square().mean()
    )  # moving the mean by d q moves l by d - d^2 / 2 (to first order)
    for size in (1e-8, 3e-8, 1e-7):
        moved = TransitionMoments(rollout.mean.double() + size * q * direction, q, q)
        exact = TransitionMoments(rollout.mean.double(), q, q)
        got = float(log_prob(nxt, moved) - log_prob(nxt, exact))
        assert got == pytest.approx(size, abs=1e-9)
    assert float((old.float() + 3e-8) - old.float()) != pytest.approx(3e-8, rel=0.2)  # what float32 makes of it


def test_dropping_low_bits():
    x = randn(1000, seed=23, dtype=torch.float64).requires_grad_(True)
    rounded = drop_low_bits(x)
    assert 0 < float((rounded / x - 1).detach().abs().max()) <= 2.0**-33
    assert torch.equal(drop_low_bits(rounded), rounded)
    assert torch.equal(drop_low_bits(x * (1 + 1e-15)), rounded)
    (grad,) = torch.autograd.grad(rounded.sum(), x)
    assert torch.equal(grad, torch.ones_like(x))
