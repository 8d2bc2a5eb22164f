"""Optimizing trainable roles: accumulation, gradient reduction, the finite guard, clipping, the step, the counters.

A run with one live copy of the weights has the single role "default"; distillation runs have several (generator, fake,
surrogate), of which one is active at a time.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from flow_factory.checkpoints.optim import load_optimizer_state, optimizer_state
from flow_factory.distributed import Comm
from flow_factory.errors import RunError
from flow_factory.trainers.stopping import DeadlinePassedError

# Beyond this many elements the change of the parameters is measured on evenly spaced tensors only, so that full
# fine-tuning does not pay a second copy of the weights for a diagnostic.
CHANGE_NORM_ELEMENTS = 64_000_000


class ReducesGradients(Protocol):
    """The part of a Parallel strategy that an optimizer step needs."""

    def reduce_gradients(self, parameters: Sequence[nn.Parameter], comm: Comm) -> None:
        """Averages gradients over ranks, a missing gradient counting as zero."""


@dataclass
class UpdateReport:
    """What one optimizer step did.

    Attributes:
        role: The role that was stepped.
        metrics: Means (and `*_max` maxima) over the accumulated terms and over ranks, with `loss`, `grad_norm`, `lr`.
        step: The role's optimizer steps so far, this one included.
    """

    role: str
    metrics: dict[str, float]
    step: int


@dataclass
class RoleOptimizer:
    """One role's optimizer with its accumulation window.

    Args:
        role: Name of the role.
        parameters: Parameter name to parameter; names are stable, checkpoints are keyed by them.
        optimizers: Torch optimizers by name, together over exactly these parameters (two for Muon: its matrices, and
            AdamW for the rest).
        schedule: Optimizer step number to learning-rate factor; a pure function of the step.
        base_lr: Learning rate that the factor multiplies.
        max_grad_norm: Clipping norm; None disables clipping.
        parallel: Strategy that reduces the gradients.
        comm: Process group.
        use_grad_scaler: Scale losses dynamically (fp16 autocast only).
    """

    role: str
    parameters: dict[str, nn.Parameter]
    optimizers: dict[str, torch.optim.Optimizer]
    schedule: Callable[[int], float]
    base_lr: float
    max_grad_norm: float | None
    parallel: ReducesGradients
    comm: Comm
    use_grad_scaler: bool = False
    optimizer_step: int = 0
    pending: int = 0
    _terms: dict[str, list[Tensor | float]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if not self.parameters:
            raise RunError(f"role {self.role!r} has no trainable parameters: nothing would be learned.")
        device = next(iter(self.parameters.values())).device
        self.scaler = torch.amp.GradScaler(device.type, enabled=self.use_grad_scaler)

    def accumulate(
        self,
        loss: Tensor,
        metrics: Mapping[str, Tensor | float],
        accumulation_steps: int,
        *,
        measure_change: bool = False,
        deadline_passed: bool = False,
    ) -> UpdateReport | None:
        """Adds one loss term; steps the optimizer when the window is full.

        Args:
            loss: Scalar loss of the term, not yet divided by the window.
            metrics: Numbers to average over the terms of the window that have them; a name that ends in "_max" is
                maximised instead. Terms and ranks may have different names.
            accumulation_steps: Loss terms per optimizer step.
            measure_change: Also report `param_change_norm`, the L2 norm of the parameters' change.
            deadline_passed: This rank's signal deadline has passed; shared with the others in the same collective.

        Returns:
            A report if the optimizer was stepped, else None.

        Raises:
            RunError: If the loss or the gradient norm is not finite on any rank; nothing is stepped then.
            DeadlinePassedError: If `deadline_passed` on any rank; nothing is stepped then.
        """
        self.scaler.scale(loss / accumulation_steps).backward()
        self._note({"loss": loss.detach(), **metrics})
        self.pending += 1
        if self.pending < accumulation_steps:
            return None
        return self._step(measure_change, deadline_passed)

    def _note(self, metrics: Mapping[str, Tensor | float]) -> None:
        """Keeps the values as they are: reading them here would make an accelerator wait at every term."""
        for name, value in metrics.items():
            self._terms.setdefault(name, []).append(value.detach() if isinstance(value, Tensor) else value)

    def _step(self, measure_change: bool, deadline_passed: bool) -> UpdateReport:
        parameters = list(self.parameters.values())
        self.parallel.reduce_gradients(parameters, self.comm)
        for optimizer in self.optimizers.values():
            self.scaler.unscale_(optimizer)
        limit = math.inf if self.max_grad_norm is None else self.max_grad_norm
        grad_norm = nn.utils.clip_grad_norm_(parameters, limit).item()
        means, maxima = self._collect()
        broken = not (math.isfinite(means["loss"]) and (math.isfinite(grad_norm) or self.use_grad_scaler))
        # One collective carries both flags, so that all ranks leave the step by the same door.
        flags = torch.tensor([float(broken), float(deadline_passed)], device=self.comm.device)
        flags = self.comm.all_reduce_sum_(flags).tolist()
        if flags[1]:
            raise DeadlinePassedError
        if flags[0]:
            self.reset()
            raise RunError(
                f"update {self.optimizer_step + 1} of role {self.role!r} is not finite (loss {means['loss']}, gradient "
                f"norm {grad_norm}); no parameter was changed. Lower the learning rate or the noise level, or look at "
                f"the rewards of this cycle."
            )
        learning_rate = self.base_lr * self.schedule(self.optimizer_step)
        for optimizer in self.optimizers.values():
            for group in optimizer.param_groups:
                group["lr"] = learning_rate
        watched = self._watched() if measure_change else []
        before = [p.detach().clone() for p in watched]
        for optimizer in self.optimizers.values():
            self.scaler.step(optimizer)
        self.scaler.update()
        self.optimizer_step += 1
        metrics = {**means, **maxima, "grad_norm": grad_norm, "learning_rate": learning_rate}
        if measure_change:
            squares = [(p.detach() - b).double().pow(2).sum() for p, b in zip(watched, before, strict=True)]
            metrics["param_change_norm"] = math.sqrt(float(torch.stack(squares).sum()))
        self.reset()
        return UpdateReport(self.role, metrics, self.optimizer_step)

    def _collect(self) -> tuple[dict[str, float], dict[str, float]]:
        """Means and maxima over the window and over ranks."""
        values = {name: [float(term) for term in terms] for name, terms in self._terms.items()}
        sums = {n: (sum(terms), len(terms)) for n, terms in values.items() if not n.endswith("_max")}
        peaks_here = {n: functools.reduce(_larger, terms) for n, terms in values.items() if n.endswith("_max")}
        ranks = self.comm.gather_objects({"sums": sums, "maxima": peaks_here})
        means: dict[str, float] = {}
        for name in sorted({name for rank in ranks for name in rank["sums"]}):
            totals, counts = zip(*(rank["sums"][name] for rank in ranks if name in rank["sums"]), strict=True)
            means[name] = sum(totals) / sum(counts)
        peaks = sorted({name for rank in ranks for name in rank["maxima"]})
        maxima = {n: functools.reduce(_larger, (r["maxima"].get(n, -math.inf) for r in ranks)) for n in peaks}
        return means, maxima

    def _watched(self) -> list[nn.Parameter]:
        parameters = list(self.parameters.values())
        total = sum(p.numel() for p in parameters)
        stride = max(1, math.ceil(total / CHANGE_NORM_ELEMENTS))
        return parameters[::stride]

    def reset(self) -> None:
        """Forgets accumulated gradients and metrics."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=True)
        self.pending = 0
        self._terms.clear()

    def state_dict(self) -> dict[str, Any]:
        """Counters and optimizer state, keyed by parameter names. Only valid between two windows."""
        if self.pending:
            raise RunError(f"role {self.role!r} has {self.pending} accumulated terms: save between optimizer steps.")
        names = {parameter: name for name, parameter in self.parameters.items()}
        return {
            "optimizer_step": self.optimizer_step,
            "optimizers": {name: optimizer_state(optimizer, names) for name, optimizer in self.optimizers.items()},
            "scaler": self.scaler.state_dict(),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`."""
        self.optimizer_step = int(state["optimizer_step"])
        names = {param: name for name, param in self.parameters.items()}
        for name, optimizer in self.optimizers.items():
            load_optimizer_state(optimizer, names, state["optimizers"][name])
        self.scaler.load_state_dict(dict(state["scaler"]))


def _larger(a: float, b: float) -> float:
    """The larger number, and NaN if there is one: `max` would lose it."""
    return math.nan if math.isnan(a) or math.isnan(b) else max(a, b)


@dataclass(frozen=True)
class RolePhase:
    """`repeats` optimizer steps of one role in a row."""

    role: str
    repeats: int = 1

    def __post_init__(self) -> None:
        if self.repeats < 1:
            raise ValueError(f"RolePhase({self.role!r}, repeats={self.repeats}): repeats must be at least 1.")


@dataclass(frozen=True)
class RoleUpdatePlan:
    """The order in which roles are stepped, for example five fake updates, then one of the generator.

    Attributes:
        phases: The phases of one round, in order. A role may appear several times.
    """

    phases: tuple[RolePhase, ...]

    def __post_init__(self) -> None:
        if not self.phases:
            raise ValueError("RoleUpdatePlan needs at least one phase.")

    @classmethod
    def single(cls, role: str = "default") -> RoleUpdatePlan:
        """One role, one step a round."""
        return cls((RolePhase(role),))

    def __iter__(self) -> Iterator[str]:
        """The roles of one round, one entry per optimizer step."""
        for phase in self.phases:
            for _ in range(phase.repeats):
                yield phase.role

    @property
    def steps_per_round(self) -> dict[str, int]:
        """Optimizer steps of each role in one round."""
        counts: dict[str, int] = {}
        for role in self:
            counts[role] = counts.get(role, 0) + 1
        return counts


class RoleOptimizationCoordinator:
    """Keeps one role active at a time and every role's counters.

    Args:
        roles: Role name to its optimizer; the first owns `optimizer_step` of the run's progress.
    """

    def __init__(self, roles: Mapping[str, RoleOptimizer]) -> None:
        self.roles = dict(roles)
        self.active = next(iter(self.roles))

    @property
    def primary(self) -> RoleOptimizer:
        """The first role."""
        return next(iter(self.roles.values()))

    @property
    def at_boundary(self) -> bool:
        """True if no role holds accumulated gradients."""
        return all(role.pending == 0 for role in self.roles.values())

    def activate(self, role: str) -> RoleOptimizer:
        """Makes `role` the one that is optimised.

        Raises:
            KeyError: If there is no such role.
            RunError: If another role still holds accumulated gradients.
        """
        if role not in self.roles:
            raise KeyError(f"no role {role!r}; this run has {list(self.roles)}.")
        if role != self.active and self.roles[self.active].pending:
            raise RunError(f"role {self.active!r} has accumulated gradients; finish its step before {role!r}.")
        self.active = role
        return self.roles[role]

    def state_dict(self) -> dict[str, Any]:
        """All roles' states."""
        return {name: role.state_dict() for name, role in self.roles.items()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """The inverse of `state_dict`.

        Raises:
            RunError: If the checkpoint has other roles.
        """
        if set(state) != set(self.roles):
            raise RunError(f"the checkpoint holds the roles {sorted(state)}; this run trains {sorted(self.roles)}.")
        for name, role in self.roles.items():
            role.load_state_dict(state[name])
