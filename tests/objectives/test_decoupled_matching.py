"""Matching errors, DiffusionNFT and AWM against written-out float64 versions and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.objectives.awm import awm_loss, pseudo_log_prob
from flow_factory.objectives.matching import (
    advantage_bound,
    mean_absolute,
    mean_square,
    predicted_clean,
    unit_reward,
)
from flow_factory.objectives.nft import nft_loss
from flow_factory.samples import LatentState
from flow_factory.trainers.rl.decoupled import DecoupledTrainer
from tests.objectives.decoupled_cases import assert_close, gradients, make_case

ADVANTAGES = torch.tensor([1.3, -0.7, 9.0, 0.0], dtype=torch.float64)


def test_errors_are_means_over_active_elements_of_all_components() -> None:
    case = make_case()
    square, absolute = mean_square(case.velocity, case.target), mean_absolute(case.velocity, case.target)
    for row in range(4):
        difference = case.flat(case.velocity, row) - case.flat(case.target, row)
        assert difference.numel() == 12 + 5
        assert square[row].item() == pytest.approx(difference.square().mean().item(), rel=1e-12)
        assert absolute[row].item() == pytest.approx(difference.abs().mean().item(), rel=1e-12)
    assert gradients(square.sum(), case)["video"][:, 0].abs().max() == 0, "pinned elements get no gradient"


def test_inactive_elements_may_hold_anything() -> None:
    case = make_case()
    broken = case.velocity["video"].detach().clone()
    broken[:, 0] = math.nan
    velocity = LatentState({"video": broken.requires_grad_(), "audio": case.velocity["audio"]})
    loss = mean_square(velocity, case.target).sum()
    assert torch.equal(loss, mean_square(case.velocity, case.target).sum())
    (gradient,) = torch.autograd.grad(loss, [velocity["video"]])
    assert bool(torch.isfinite(gradient).all())


def test_predicted_clean_of_the_target_is_the_data() -> None:
    case = make_case()
    back = predicted_clean(case.state, case.target, case.sigmas)
    for row in range(4):
        assert (case.flat(back, row) - case.flat(case.clean, row)).abs().max() < 1e-14


def test_unit_reward_maps_the_clip_range_to_zero_and_one() -> None:
    rewards = unit_reward(torch.tensor([-7.0, -5.0, 0.0, 2.5, 5.0, 9.0]), (-5.0, 5.0))
    assert rewards.tolist() == [0.0, 0.0, 0.5, 0.75, 1.0, 1.0]
    assert advantage_bound((-1.0, 3.0)) == 3.0
    lopsided = unit_reward(torch.tensor([-9.0, 9.0]), (-1.0, 3.0))
    assert lopsided.tolist() == pytest.approx([1 / 3, 1.0])


def nft_written_out(case, advantages, beta, bound):
    """Row by row, on joined active elements; the weights are constants."""
    total = 0.0
    for row in range(len(advantages)):
        v, old, x, x0 = (case.flat(s, row) for s in (case.velocity, case.other, case.state, case.clean))
        sigma = case.sigmas["audio"][row]
        r = (max(-bound, min(bound, advantages[row].item())) / bound + 1) / 2
        for share, mixed in ((r, beta * v + (1 - beta) * old), (1 - r, (1 + beta) * old - beta * v)):
            error = x - sigma * mixed - x0
            weight = max(1e-5, error.detach().abs().mean().item())
            total = total + share * (error * error).mean() / weight
    return bound / beta * total / len(advantages)


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_against_the_written_out_loss(beta: float) -> None:
    case = make_case()
    loss, metrics = nft_loss(
        case.velocity, case.other, case.state, case.clean, case.sigmas, ADVANTAGES, beta=beta, adv_clip_range=(-5, 5)
    )
    expected = nft_written_out(case, ADVANTAGES, beta, 5.0)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-12)
    assert_close(gradients(loss, case), gradients(expected, case))
    assert metrics["reward"].item() == pytest.approx((0.63 + 0.43 + 1.0 + 0.5) / 4)


def test_nft_samples_without_a_score_take_no_part() -> None:
    """Also away from the old policy, where r = 1/2 has a gradient; the others weigh as before."""
    case = make_case()
    mask = torch.tensor([True, False, True, True])
    loss, _ = nft_loss(
        case.velocity, case.other, case.state, case.clean, case.sigmas, ADVANTAGES, beta=1.0, adv_clip_range=(-5, 5),
        mask=mask,
    )  # fmt: skip
    found = gradients(loss, case)
    assert all(float(g[1].abs().max()) == 0 for g in found.values())
    expected = gradients(nft_written_out(case, ADVANTAGES, 1.0, 5.0), case)
    for name, gradient in expected.items():
        assert torch.allclose(found[name][mask], gradient[mask], rtol=1e-6, atol=1e-12)
        assert float(gradient[1].abs().max()) > 0


def on_policy(case):
    return case.velocity.detach()


def test_nft_has_no_gradient_for_average_samples_on_policy() -> None:
    """r = 1/2 and v_old = v: the positive and the negative branch cancel."""
    case = make_case()
    loss, _ = nft_loss(
        case.velocity, on_policy(case), case.state, case.clean, case.sigmas, torch.zeros(4), beta=1.0,
        adv_clip_range=(-5, 5),
    )  # fmt: skip
    assert loss.item() > 0
    assert max(float(g.abs().max()) for g in gradients(loss, case).values()) < 1e-15


@pytest.mark.parametrize("beta", [1.0, 0.1])
def test_nft_gradient_direction_on_policy(beta: float) -> None:
    """dL/dv = A_max (2 r - 1) 2 s^2 (v - target) / (w n B): good samples are fitted, bad ones un-fitted."""
    case = make_case()
    loss, _ = nft_loss(
        case.velocity, on_policy(case), case.state, case.clean, case.sigmas, ADVANTAGES, beta=beta,
        adv_clip_range=(-5, 5),
    )  # fmt: skip
    reward = unit_reward(ADVANTAGES, (-5, 5))
    expected = {}
    for name in ("video", "audio"):
        rows = []
        for row in range(4):
            sigma = case.sigmas[name][row]
            weight = (sigma * (case.flat(case.velocity, row) - case.flat(case.target, row))).abs().mean().detach()
            direction = (case.velocity[name] - case.target[name])[row].detach()
            rows.append(5 * (2 * reward[row] - 1) * 2 * sigma**2 * direction / (weight * 17 * 4))
        expected[name] = torch.stack(rows)
    expected["video"][:, 0] = 0  # pinned
    assert_close(gradients(loss, case), expected)


DERIVATIVES = {
    "Uniform": lambda m, s: 1.0,
    "t": lambda m, s: s,
    "t**2": lambda m, s: s * s,
    "huber": lambda m, s: s / (2 * math.sqrt(m + 1e-10)),
    "ghuber": lambda m, s: s * (m + 1e-10) ** (0.25 - 1),
}


@pytest.mark.parametrize("weighting", DERIVATIVES)
def test_awm_gradient_at_ratio_one_is_an_advantage_weighted_matching_loss(weighting: str) -> None:
    """-A l / B differentiated by hand: A weight'(m) 2 (v - target) / (n B)."""
    case = make_case()
    error = mean_square(case.velocity, case.target)
    sigma = case.sigmas["audio"]
    log_prob = pseudo_log_prob(weighting, error, sigma)  # type: ignore[arg-type]
    loss, metrics = awm_loss(log_prob, log_prob, ADVANTAGES, (-1.0, 1.0), (-5.0, 5.0))
    assert metrics["ratio_deviation_max"] == 0 and metrics["clip_fraction"] == 0
    scaled = ADVANTAGES.clamp(-5, 5) / 5
    expected = {}
    for name in ("video", "audio"):
        factor = [scaled[i] * DERIVATIVES[weighting](error[i].item(), sigma[i].item()) * 2 / (17 * 4) for i in range(4)]
        difference = (case.velocity[name] - case.target[name]).detach()
        expected[name] = torch.stack([f * d for f, d in zip(factor, difference, strict=True)])
    expected["video"][:, 0] = 0
    assert_close(gradients(loss, case), expected)


@pytest.mark.parametrize(
    ("weighting", "by_hand"),
    [
        ("Uniform", lambda m, s: -m),
        ("t", lambda m, s: -s * m),
        ("t**2", lambda m, s: -s * s * m),
        ("huber", lambda m, s: -s * (math.sqrt(m + 1e-10) - 1e-5)),
        ("ghuber", lambda m, s: -s * ((m + 1e-10) ** 0.25 - 1e-10**0.25) / 0.25),
    ],
)
def test_awm_weightings(weighting, by_hand) -> None:
    error, sigma = torch.tensor([0.0, 0.3, 2.0]).double(), torch.tensor([0.2, 0.9, 0.5])
    found = pseudo_log_prob(weighting, error, sigma)
    expected = [by_hand(m, s) for m, s in zip(error.tolist(), sigma.double().tolist(), strict=True)]
    assert found.tolist() == pytest.approx(expected, abs=1e-15)
    assert found.dtype == torch.float64


def test_awm_generalised_huber_contains_huber() -> None:
    error, sigma = torch.rand(5).double(), torch.rand(5).double()
    half = pseudo_log_prob("ghuber", error, sigma, power=0.5)
    assert torch.allclose(half, 2 * pseudo_log_prob("huber", error, sigma), rtol=1e-12)


def test_awm_clip_binds_on_later_updates() -> None:
    """Past the clip, in the direction of the advantage, no gradient; the other way it passes."""
    log_prob = torch.tensor([0.3, 0.3, -0.3, -0.3], dtype=torch.float64, requires_grad=True)
    advantages = torch.tensor([2.5, -2.5, 2.5, -2.5])
    loss, metrics = awm_loss(log_prob, torch.zeros(4).double(), advantages, (-0.1, 0.1), (-5.0, 5.0))
    loss.backward()
    rho = torch.tensor([math.exp(0.3), math.exp(0.3), math.exp(-0.3), math.exp(-0.3)], dtype=torch.float64)
    expected = torch.tensor([0.0, 0.5 * rho[1], -0.5 * rho[2], 0.0]) / 4
    assert log_prob.grad is not None and torch.allclose(log_prob.grad, expected.double(), rtol=1e-6)
    assert metrics["clip_fraction"] == 0.5


def test_awm_clip_of_one_has_no_lower_bound() -> None:
    log_prob = torch.tensor([-20.0], dtype=torch.float64, requires_grad=True)
    loss, _ = awm_loss(log_prob, torch.zeros(1).double(), torch.tensor([-5.0]), (-1.0, 1.0), (-5.0, 5.0))
    loss.backward()
    assert log_prob.grad is not None and log_prob.grad.item() == pytest.approx(math.exp(-20.0), rel=1e-9)


@pytest.mark.parametrize("weight", [0.3, torch.tensor([0.1, 0.0, 2.0, 0.5], dtype=torch.float64)])
def test_the_kl_term_of_the_trainers_by_hand(weight: float | torch.Tensor) -> None:
    """d/dv of mean_i w_i mean (v - v_ref)^2 is 2 w_i (v - v_ref) / (n B), added to the loss's own gradient."""
    case, metrics = make_case(), {}
    loss = mean_square(case.velocity, case.target).sum()
    reference = LatentState(dict(case.other.items()), case.clean.masks)  # as adapters predict, with the state's masks
    found = DecoupledTrainer.add_kl(None, loss, metrics, case.velocity, reference, weight=weight)  # type: ignore[arg-type]
    rows = torch.as_tensor(weight, dtype=torch.float64).expand(4)
    kl = torch.stack([(case.flat(case.velocity, i) - case.flat(case.other, i)).square().mean() for i in range(4)])
    assert found.item() == pytest.approx((loss + (rows * kl).mean()).item(), rel=1e-12)
    assert metrics["kl"].item() == pytest.approx(kl.mean().item(), rel=1e-12)
    own, expected = gradients(loss, case), {}
    for name in ("video", "audio"):
        scale = rows.reshape(-1, *[1] * (case.velocity[name].dim() - 1))
        expected[name] = own[name] + 2 * scale * (case.velocity[name] - case.other[name]).detach() / (17 * 4)
    expected["video"][:, 0] = 0  # pinned
    assert_close(gradients(found, case), expected)
    assert DecoupledTrainer.add_kl(None, loss, {}, case.velocity, None, weight=weight) is loss  # type: ignore[arg-type]
