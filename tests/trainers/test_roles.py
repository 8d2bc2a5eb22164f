"""One role's optimizer step, several roles in turn, and the schedules: on parameters of a few numbers."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

from flow_factory.checkpoints.tree import load_tree, save_tree
from flow_factory.distributed import Comm
from flow_factory.errors import InputError, RunError
from flow_factory.hparams import OptimizerArguments
from flow_factory.models.parallel import Parallel
from flow_factory.trainers.optim import build_optimizers, learning_rate_schedule
from flow_factory.trainers.roles import RoleOptimizationCoordinator, RoleOptimizer, RolePhase, RoleUpdatePlan
from flow_factory.trainers.stopping import DeadlinePassedError


class ManyRanks(Comm):
    """A process group of which the other ranks' values are written down."""

    others: tuple[Any, ...] = ()

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, *self.others]


def make_role(name: str = "default", comm: Comm | None = None, **fields: Any) -> RoleOptimizer:
    weight, bias = nn.Parameter(torch.tensor([[1.0, 2.0], [3.0, 4.0]])), nn.Parameter(torch.tensor([1.0, -1.0]))
    parameters = {"weight": weight, "bias": bias}
    arguments = OptimizerArguments(learning_rate=0.1, weight_decay=0.0, **fields)
    return RoleOptimizer(
        role=name,
        parameters=parameters,
        optimizers=build_optimizers(arguments, parameters),
        schedule=lambda step: 1.0 / (step + 1),
        base_lr=arguments.learning_rate,
        max_grad_norm=arguments.max_grad_norm,
        parallel=Parallel.create("replicated"),
        comm=comm or Comm.single(),
    )


def loss_of(role: RoleOptimizer, scale: float = 1.0) -> torch.Tensor:
    return scale * (role.parameters["weight"].pow(2).sum() + role.parameters["bias"].pow(2).sum())


def test_a_metric_is_averaged_over_the_terms_that_have_it() -> None:
    """A number that only one of four terms reports (a KL of the first step, say) is not divided by four."""
    role = make_role()
    for term in range(3):
        assert role.accumulate(loss_of(role), {"always": float(term)}, 4) is None
    report = role.accumulate(loss_of(role), {"always": 3.0, "once": 8.0, "dev_max": 0.5}, 4)
    assert report is not None
    assert report.metrics["always"] == 1.5 and report.metrics["once"] == 8.0 and report.metrics["dev_max"] == 0.5


def test_ranks_may_report_different_metrics() -> None:
    comm = ManyRanks()
    comm.others = ({"sums": {"loss": [6.0, 2], "theirs": [5.0, 1]}, "maxima": {"dev_max": 0.9}},)  # type: ignore[misc]
    role = make_role(comm=comm)
    report = role.accumulate(torch.zeros((), requires_grad=True) + 0 * loss_of(role), {"mine": 2.0}, 1)
    assert report is not None
    assert report.metrics["loss"] == 2.0 and report.metrics["mine"] == 2.0
    assert report.metrics["theirs"] == 5.0 and report.metrics["dev_max"] == 0.9


def test_a_nan_is_not_lost_in_a_maximum() -> None:
    role = make_role()
    role.accumulate(loss_of(role), {"dev_max": math.nan}, 2)
    report = role.accumulate(loss_of(role), {"dev_max": 1.0}, 2)
    assert report is not None and math.isnan(report.metrics["dev_max"])


@pytest.mark.parametrize("fault", ["loss", "gradient", "deadline"])
def test_nothing_is_stepped_after_a_fault(fault: str) -> None:
    role = make_role()
    before = {name: p.detach().clone() for name, p in role.parameters.items()}
    loss = loss_of(role, math.nan if fault == "loss" else 1.0)
    if fault == "gradient":  # a finite loss with an infinite gradient: sqrt at 0
        loss = loss + (role.parameters["bias"].detach() * 0 + 0 * role.parameters["bias"]).abs().sqrt().sum()
    expected: type[Exception] = DeadlinePassedError if fault == "deadline" else RunError
    with pytest.raises(expected):
        role.accumulate(loss, {}, 1, deadline_passed=fault == "deadline")
    assert all(torch.equal(p, before[name]) for name, p in role.parameters.items())
    assert role.optimizer_step == 0


def test_the_schedule_is_a_function_of_the_roles_own_steps() -> None:
    role = make_role()
    rates = []
    for _ in range(3):
        report = role.accumulate(loss_of(role), {}, 1)
        assert report is not None
        rates.append(report.metrics["learning_rate"])
    assert rates == pytest.approx([0.1, 0.05, 0.1 / 3])


def test_gradients_are_clipped_over_all_parameters_of_the_role() -> None:
    role = make_role(max_grad_norm=1.0)
    norms: list[float] = []
    step = role.optimizers["adamw"].step

    def look(*args: Any) -> Any:
        norms.append(math.sqrt(sum(float(p.grad.pow(2).sum()) for p in role.parameters.values() if p.grad is not None)))
        return step(*args)

    role.optimizers["adamw"].step = look  # type: ignore[method-assign]
    report = role.accumulate(loss_of(role), {}, 1)
    assert report is not None
    assert report.metrics["grad_norm"] == pytest.approx(2 * math.sqrt(32)) and norms == pytest.approx([1.0], rel=1e-4)


def test_muon_takes_the_matrices_and_adamw_the_rest() -> None:
    role = make_role(optimizer="muon")
    assert set(role.optimizers) == {"muon", "fallback"}
    before = {name: p.detach().clone() for name, p in role.parameters.items()}
    assert role.accumulate(loss_of(role), {}, 1) is not None
    assert all(not torch.equal(p, before[name]) for name, p in role.parameters.items())
    with pytest.raises(InputError, match="2-D parameters"):
        build_optimizers(OptimizerArguments(optimizer="muon"), {"bias": role.parameters["bias"]})


@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_two_roles_go_on_from_their_saved_state(tmp_path: Any, optimizer: str) -> None:
    """Pitfall 22: every role's counter, moments and therefore next step come back, bit for bit."""

    def run(pair: RoleOptimizationCoordinator, rounds: int) -> None:
        for _ in range(rounds):
            for name in RoleUpdatePlan((RolePhase("fake", 2), RolePhase("generator"))):
                role = pair.activate(name)
                role.accumulate(loss_of(role), {}, 1)

    def fresh() -> RoleOptimizationCoordinator:
        return RoleOptimizationCoordinator({n: make_role(n, optimizer=optimizer) for n in ("generator", "fake")})

    straight, first, second = fresh(), fresh(), fresh()
    run(straight, 4)
    run(first, 2)
    save_tree(tmp_path, "optimizer", first.state_dict())
    for name, role in second.roles.items():
        for key, parameter in role.parameters.items():
            parameter.data = first.roles[name].parameters[key].detach().clone()
    second.load_state_dict(load_tree(tmp_path, "optimizer"))
    run(second, 2)
    assert [role.optimizer_step for role in second.roles.values()] == [4, 8]
    for name, role in straight.roles.items():
        for key, parameter in role.parameters.items():
            assert torch.equal(second.roles[name].parameters[key], parameter), (name, key)
    with pytest.raises(RunError, match="this run trains"):
        RoleOptimizationCoordinator({"generator": make_role("generator")}).load_state_dict(first.state_dict())


def test_one_role_at_a_time() -> None:
    pair = RoleOptimizationCoordinator({n: make_role(n) for n in ("generator", "fake")})
    generator = pair.activate("generator")
    generator.accumulate(loss_of(generator), {}, 2)
    assert not pair.at_boundary
    with pytest.raises(RunError, match="finish its step before 'fake'"):
        pair.activate("fake")
    with pytest.raises(RunError, match="save between optimizer steps"):
        pair.state_dict()
    generator.accumulate(loss_of(generator), {}, 2)
    assert pair.at_boundary and pair.activate("fake") is pair.roles["fake"] and pair.primary is generator
    with pytest.raises(KeyError, match="no role 'surrogate'"):
        pair.activate("surrogate")


def test_update_plans() -> None:
    plan = RoleUpdatePlan((RolePhase("fake", 5), RolePhase("generator"), RolePhase("fake")))
    assert list(plan) == ["fake"] * 5 + ["generator", "fake"]
    assert plan.steps_per_round == {"fake": 6, "generator": 1}
    assert list(RoleUpdatePlan.single()) == ["default"]
    with pytest.raises(ValueError, match="at least 1"):
        RolePhase("fake", 0)
    with pytest.raises(ValueError, match="at least one phase"):
        RoleUpdatePlan(())


def test_learning_rate_schedules() -> None:
    constant = learning_rate_schedule("constant", 4, None)
    assert [constant(n) for n in range(6)] == [0.25, 0.5, 0.75, 1.0, 1.0, 1.0]
    linear = learning_rate_schedule("linear", 2, 6)
    assert [linear(n) for n in range(8)] == [0.5, 1.0, 1.0, 0.75, 0.5, 0.25, 0.0, 0.0]
    cosine = learning_rate_schedule("cosine", 0, 4)
    assert [cosine(n) for n in (0, 2, 4, 9)] == pytest.approx([1.0, 0.5, 0.0, 0.0])
    with pytest.raises(InputError, match=r"max_epochs or train\.max_steps"):
        learning_rate_schedule("linear", 0, None)
