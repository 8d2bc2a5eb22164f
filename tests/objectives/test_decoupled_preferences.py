"""DPO, DGPO and CRD against autograd of written-out float64 versions and closed forms."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.objectives.crd import (
    adaptive_kl_weights,
    centred,
    centring_weights,
    crd_loss,
    implicit_reward,
    normalised_error,
)
from flow_factory.objectives.dgpo import dgpo_loss, group_weight, preference_terms
from flow_factory.objectives.dpo import dpo_loss
from flow_factory.objectives.matching import mean_absolute, mean_square
from tests.objectives.decoupled_cases import assert_close, gradients, make_case

F64 = torch.float64


def values(*numbers: float) -> torch.Tensor:
    return torch.tensor(numbers, dtype=F64)


@pytest.mark.parametrize("beta", [0.7, 100.0, 2000.0])
def test_dpo_gradient_is_the_closed_form(beta: float) -> None:
    """d/dm_w = beta/2 sigmoid(-margin) / P, and the opposite for m_l; errors of real states underneath."""
    case = make_case()
    errors = mean_square(case.velocity, case.target)
    reference = mean_square(case.other, case.target) + values(0.01, -0.02, 0.03, 0.0) / beta
    winner, loser = errors.chunk(2)
    loss, metrics = dpo_loss(winner, loser, *reference.chunk(2), beta)
    margin = -(beta / 2) * ((winner - reference[:2]) - (loser - reference[2:])).detach()
    assert loss.item() == pytest.approx(sum(math.log1p(math.exp(-x)) if x > -700 else -x for x in margin.tolist()) / 2)
    slope = beta / 2 * torch.sigmoid(-margin) / 2
    expected = gradients((slope * winner - slope * loser).sum(), case)
    assert_close(gradients(loss, case), expected)
    assert metrics["accuracy"].item() == (margin > 0).double().mean().item()


def test_dpo_at_the_reference_is_log_two_and_pulls_apart() -> None:
    winner, loser = values(1.0, 2.0).requires_grad_(), values(3.0, 0.5).requires_grad_()
    loss, _ = dpo_loss(winner, loser, winner.detach(), loser.detach(), 10.0)
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2))
    assert winner.grad is not None and loser.grad is not None
    assert winner.grad.tolist() == [1.25, 1.25] and loser.grad.tolist() == [-1.25, -1.25]


def test_dpo_places_without_a_pair_count_nothing() -> None:
    winner, loser = values(1.0, 2.0).requires_grad_(), values(3.0, 0.5)
    loss, metrics = dpo_loss(winner, loser, values(1.0, 9.0), values(3.0, 0.5), 10.0, values(1.0, 0.0))
    loss.backward()
    assert loss.item() == pytest.approx(math.log(2) / 2) and metrics["accuracy"].item() == 0.0
    assert winner.grad is not None and winner.grad.tolist() == [1.25, 0.0]
    empty, _ = dpo_loss(winner, loser, values(1.0, 9.0), values(3.0, 0.5), 10.0, values(0.0, 0.0))
    assert empty.item() == 0.0


def test_dgpo_is_the_gradient_of_the_group_preference_up_to_beta_over_k() -> None:
    """Whatever the layout: W of the whole group, then one sample after the other."""
    beta, k = 3.0, 4
    case = make_case(k)
    advantages = values(1.2, -0.5, 0.1, -0.8)
    error = mean_square(case.velocity, case.target)
    error_ref = mean_square(case.other, case.target).detach()
    whole = -torch.nn.functional.logsigmoid(-(advantages * beta * (error - error_ref) / k).sum())
    weight = group_weight(preference_terms(advantages, error, error_ref, beta, k))
    pieces = sum(dgpo_loss(error[i : i + 1], advantages[i : i + 1], weight.reshape(1))[0] for i in range(k))
    together = dgpo_loss(error, advantages, weight.expand(k))[0] * k
    expected = {n: g * k / beta for n, g in gradients(whole, case).items()}
    assert isinstance(pieces, torch.Tensor)
    assert_close(gradients(pieces, case), expected)
    assert_close(gradients(together, case), expected)
    assert 0 < weight.item() < 1


def test_dgpo_clip_cuts_what_already_moved() -> None:
    """rho = exp(d_old - d): a good sample that fits much better, a bad one that fits much worse; W stays."""
    error = values(1.0, 1.0, 1.0, 1.0, 1.0).requires_grad_()
    advantages = values(1.0, 1.0, -1.0, -1.0, 0.0)
    old = values(1.2, 0.8, 0.8, 1.2, 0.5)
    loss, cut, metrics = dgpo_loss(error, advantages, torch.full((5,), 0.5, dtype=F64), old, (-0.1, 0.1))
    loss.backward()
    assert cut.tolist() == [True, False, True, False, True]
    assert error.grad is not None and error.grad.tolist() == pytest.approx([0.0, 0.1, 0.0, -0.1, 0.0])
    assert loss.item() == pytest.approx(0.0) and metrics["clip_fraction"].item() == pytest.approx(0.6)
    assert metrics["group_weight"].item() == 0.5
    with pytest.raises(InputError, match="clip_range"):
        dgpo_loss(error, advantages, error.detach(), old, (0.1, 0.2))


REWARDS, ADVANTAGES = values(0.9, 0.3, 0.5, 0.1), values(1.4, -0.4, 0.2, -1.2)


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.5, 2.0])
def test_crd_centring_sums_to_zero_under_its_weights(temperature: float) -> None:
    implicit = values(0.2, -0.7, 0.05, 1.1)
    weights = centring_weights(REWARDS, ADVANTAGES, temperature)
    assert weights.shape == (4, 1 if temperature < 0 else 2)
    assert weights.sum(dim=0).tolist() == pytest.approx([1.0] * weights.shape[1])
    means, rewards = centred(implicit, REWARDS, ADVANTAGES, temperature).chunk(2, dim=1)
    assert (weights * rewards).sum(dim=0).abs().max() < 1e-15
    assert (weights * (implicit.unsqueeze(1) - means)).sum(dim=0).abs().max() < 1e-15
    assert means.unique(dim=0).shape[0] == 1


def test_crd_weights_by_hand() -> None:
    positive, negative = centring_weights(REWARDS, ADVANTAGES, 0.0).unbind(dim=1)
    assert positive.tolist() == pytest.approx([1 / (1 + math.exp(-0.4)), 0.0, 1 / (1 + math.exp(0.4)), 0.0])
    assert negative.tolist() == pytest.approx([0.0, 1 / (1 + math.exp(0.2)), 0.0, 1 / (1 + math.exp(-0.2))])
    # The sign of A decides, also where all R lie on one side of 1/2; nobody on a side: uniform.
    positive, negative = centring_weights(REWARDS, ADVANTAGES.abs(), 0.0).unbind(dim=1)
    assert positive.tolist() == pytest.approx(REWARDS.softmax(dim=0).tolist())
    assert negative.tolist() == [0.25] * 4
    sharp = centring_weights(REWARDS, ADVANTAGES, 0.5)
    assert sharp[:, 0].tolist() == pytest.approx((REWARDS / 0.5).softmax(0).tolist())
    assert sharp[:, 1].tolist() == pytest.approx((-REWARDS / 0.5).softmax(0).tolist())


@pytest.mark.parametrize("adaptive", [True, False])
@pytest.mark.parametrize("temperature", [-1.0, 0.7])
@pytest.mark.parametrize("loss_type", ["mse", "bce"])
def test_crd_gradient_against_the_derivative_by_hand(loss_type, temperature: float, adaptive: bool) -> None:
    """dL/dr_i = A_max 2 (beta r_c - R_c) for mse, A_max (sigmoid - sigmoid) for the cross-entropy; r_i = -m_i / w_i."""
    beta, bound = 1.7, 5.0
    case = make_case()
    absolute = mean_absolute(case.velocity, case.target)
    error = mean_square(case.velocity, case.target)
    old = mean_square(case.other, case.target) / (mean_absolute(case.other, case.target) if adaptive else 1.0)
    implicit = implicit_reward(normalised_error(error, absolute, adaptive), old)
    loss, metrics = crd_loss(
        implicit, centred(implicit, REWARDS, ADVANTAGES, temperature), beta=beta, bound=bound, loss_type=loss_type
    )

    fixed = absolute.detach() if adaptive else torch.ones(4, dtype=F64)
    r = (-(error / fixed - old)).detach()
    if temperature < 0:
        columns = [torch.full((4,), 0.25, dtype=F64)]
    else:
        columns = [(REWARDS / temperature).softmax(0), (-REWARDS / temperature).softmax(0)]
    slopes, expected_loss = torch.zeros(4, dtype=F64), 0.0
    for weights in columns:
        centred_r, centred_R = r - (weights * r).sum(), REWARDS - (weights * REWARDS).sum()
        if loss_type == "mse":
            expected_loss += (beta * centred_r - centred_R).square().mean().item() / len(columns)
            slopes += 2 * (beta * centred_r - centred_R) / len(columns)
        else:
            p, q = torch.sigmoid(beta * centred_r), torch.sigmoid(centred_R)
            expected_loss += -(q * p.log() + (1 - q) * (1 - p).log()).mean().item() / len(columns)
            slopes += (p - q) / len(columns)
    assert loss.item() == pytest.approx(bound / beta * expected_loss, rel=1e-10)
    expected = gradients((bound * slopes / 4 * -(error / fixed)).sum(), case)
    assert_close(gradients(loss, case), expected)
    assert metrics["implicit_reward_abs"].item() > 0


@pytest.mark.parametrize("temperature", [-1.0, 0.0, 0.5])
def test_crd_members_without_a_score_are_in_no_mean_and_no_loss(temperature: float) -> None:
    """A failed score is not a reward of 1/2: the group is what remains of it."""
    implicit, mask = values(0.2, -0.7, 0.05, 1.1).requires_grad_(), torch.tensor([True, False, True, True])
    found = centred(implicit, REWARDS, ADVANTAGES, temperature, mask)
    assert torch.equal(found[mask], centred(implicit[mask], REWARDS[mask], ADVANTAGES[mask], temperature))
    assert not bool(found[1].any())
    whole, _ = crd_loss(implicit, found, beta=1.7, bound=5.0, mask=mask)
    (gradient,) = torch.autograd.grad(whole, implicit)
    rest, _ = crd_loss(implicit[mask], found[mask], beta=1.7, bound=5.0)
    assert whole.item() == pytest.approx(rest.item() * 3 / 4)
    assert torch.allclose(gradient, torch.autograd.grad(rest * 3 / 4, implicit)[0]) and gradient[1] == 0
    nobody = centred(implicit, REWARDS, ADVANTAGES, temperature, torch.zeros(4, dtype=torch.bool))
    assert nobody.shape == found.shape and not bool(nobody.any())


def test_crd_adaptive_kl_runs_from_the_floor_to_kl_beta() -> None:
    weights = 0.1 * adaptive_kl_weights(values(0.0, 0.5, 1.0), 0.1, 1e-4)
    assert weights.tolist() == pytest.approx([1e-4, (0.1 + 1e-4) / 2, 0.1])


def test_rows_of_a_wrong_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="loser has shape"):
        dpo_loss(values(1.0, 2.0), values(1.0).unsqueeze(1), values(1.0, 2.0), values(1.0, 2.0), 1.0)
    with pytest.raises(ValueError, match="weight has shape"):
        dgpo_loss(values(1.0, 2.0), values(1.0, 2.0), values(1.0))
