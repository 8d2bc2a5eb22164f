"""A registered policy loss: its parameters, what it needs, and what its mistakes are called."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flow_factory.errors import InputError, RunError
from flow_factory.objectives import agg_loss, list_policy_losses, masked_mean, register_policy_loss
from flow_factory.objectives.bound import PolicyLoss, bind_policy_loss
from tests.objectives.test_coupled_losses import ADVANTAGES, ALL, make_step

PLACE = r".*\(.*test_policy_loss_registry\.py:\d+\),"


def bound(function: Any, needs: frozenset[str] = frozenset()) -> PolicyLoss:
    return PolicyLoss("mine", function, {}, needs)


def test_a_loss_in_a_few_lines():
    @register_policy_loss("squared-of-tests", needs={"old_mean"})
    def squared(step, advantages, mask, *, strength: float = 1.0):
        distance = masked_mean((step.mean - step.old_mean) ** 2, step.active)
        loss = agg_loss(strength * distance - advantages * step.log_prob, mask)
        return loss, {"distance": distance.mean()}

    assert "squared-of-tests" in list_policy_losses()
    chosen = bind_policy_loss("squared-of-tests", {"strength": 2})
    assert chosen.params == {"strength": 2.0} and chosen.stores == {"mean"}
    step, weight = make_step()
    loss, metrics = chosen(step, ADVANTAGES, ALL)
    expected = (2 * ((step.mean - step.old_mean) ** 2).mean(1) - ADVANTAGES * step.log_prob).mean()
    torch.testing.assert_close(loss, expected)
    assert float(metrics["distance"].detach()) > 0
    assert torch.autograd.grad(loss, weight)[0].abs().sum() > 0
    inherited = bind_policy_loss("grpo", {}, {"clip_range": (-0.3, 0.3), "seed": 1})
    assert inherited.params == {"clip_range": (-0.3, 0.3)}
    given = bind_policy_loss("grpo", {"clip_range": [-0.1, 0.2]}, {"clip_range": (-0.3, 0.3)})
    assert given.params == {"clip_range": (-0.1, 0.2)}
    assert bind_policy_loss("grpo", {"clip_range": 0.1}).params == {"clip_range": (-0.1, 0.1)}


@pytest.mark.parametrize(
    ("result", "words"),
    [
        (lambda step: (step.log_prob, {}), r"returned a loss of shape \(6,\); return a scalar"),
        (lambda step: (step.log_prob.mean() * float("nan"), {}), r"is nan: not finite\. Log-ratios were in \["),
        (lambda step: (step.log_prob.mean() / 0, {}), r"inf: not finite"),
        (lambda step: (step.log_prob.detach().mean(), {}), "without a graph"),
        (lambda step: (0.5, {}), "returned a loss of float"),
        (lambda step: step.log_prob.mean(), r"returned Tensor; return \(loss, metrics\)"),
        (lambda step: step.nothing, "raised AttributeError"),
    ],
)
def test_wrong_results_name_the_function_and_its_line(result, words):
    def mine(step, advantages, mask):
        return result(step)

    with pytest.raises(RunError, match=rf"policy loss 'mine', {PLACE}.*{words}"):
        bound(mine)(make_step()[0], ADVANTAGES, ALL)


def test_what_is_read_must_be_declared():
    step, _ = make_step()
    step.declared.clear()  # type: ignore[attr-defined]

    def mine(step, advantages, mask):
        return (step.mean - step.old_mean).square().mean(), {}

    with pytest.raises(InputError, match=r"reads step\.old_mean without declaring it.*needs=\{'old_mean'\}"):
        bound(mine)(step, ADVANTAGES, ALL)
    with pytest.raises(InputError, match=r"'wrong-of-tests' needs 'old_maen'.*Did you mean 'old_mean'"):
        register_policy_loss("wrong-of-tests", needs={"old_maen"})(mine)


def test_names_and_parameters_are_checked():
    with pytest.raises(InputError, match=r"unknown policy loss 'grppo' \(train\.policy_loss\).*'grpo'"):
        bind_policy_loss("grppo", {})
    with pytest.raises(InputError, match=r"train\.policy_loss_params\.clip_rnage \(run\.yaml:9\).*clip_range"):
        bind_policy_loss("grpo", {"clip_rnage": 0.1}, place="run.yaml:9")
    with pytest.raises(InputError, match=r"train\.policy_loss_params\.kl_mask_type.*'w-based'.*'v-based'"):
        bind_policy_loss("dppo", {"kl_mask_type": "w-based"})

    def needy(step, advantages, mask, *, strength: float):
        return step.log_prob.mean(), {}

    register_policy_loss("needy-of-tests")(needy)
    with pytest.raises(InputError, match=r"train\.policy_loss_params\.strength.*is required"):
        bind_policy_loss("needy-of-tests", {})
    with pytest.raises(InputError, match=r"takes 2 positional arguments; it is called with \(step, advantages, mask\)"):
        register_policy_loss("short-of-tests")(lambda step, advantages: None)
        bind_policy_loss("short-of-tests", {})
    with pytest.raises(InputError, match=r"is .*not a function"):
        bind_policy_loss("flow_factory.objectives.policy_step.PolicyStep", {})
