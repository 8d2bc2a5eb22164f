"""What a policy loss sees of one transition of a micro-batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.samples.reductions import row_mean


@dataclass(frozen=True)
class PolicyStep:
    """One stored transition under the current policy and under the one that sampled.

    States are flattened: D is the number of elements of a row, the components of a joint model one after another. The
    current policy's tensors carry its graph; the others have none.

    Attributes:
        dynamics: The transition kernel, as `scheduler.dynamics_type` names it.
        log_prob: l, mean log-density of the transition over its active elements, float64 [B].
        old_log_prob: The same under the policy that sampled, float64 [B].
        mean: Mean of the transition, [B, D].
        velocity: v = noise - data, guided, [B, D].
        next_state: x', the state that was reached, [B, D].
        std: q, effective standard deviation of the step, [B]; of the first component of a joint model.
        spread: q of each element, [B, 1], or [B, D] where components have their own; to divide states by.
        sigma: Noise level before the step, [B].
        h: Size of the step, sigma - sigma_next, [B].
        velocity_scale: |d mean / d v|, [B].
        active: bool [B, D], False for pinned elements; None = all active.
        declared: What only losses that `need` it get: `old_mean`, `old_velocity`, `sequence_log_ratio`.
    """

    dynamics: str
    log_prob: Tensor
    old_log_prob: Tensor
    mean: Tensor
    velocity: Tensor
    next_state: Tensor
    std: Tensor
    spread: Tensor
    sigma: Tensor
    h: Tensor
    velocity_scale: Tensor
    active: Tensor | None = None
    declared: Mapping[str, Tensor] = field(default_factory=dict)

    @property
    def old_mean(self) -> Tensor:
        """Mean of the transition under the policy that sampled, [B, D]; only with `needs={"old_mean"}`."""
        return self._declared("old_mean")

    @property
    def old_velocity(self) -> Tensor:
        """Velocity under the policy that sampled, [B, D]; only with `needs={"old_velocity"}`."""
        return self._declared("old_velocity")

    @property
    def sequence_log_ratio(self) -> Tensor:
        """Mean of l - l_old over all trained steps of each sample, without graph, float64 [B]; must be declared."""
        return self._declared("sequence_log_ratio")

    def row_mean(self, x: Tensor) -> Tensor:
        """Mean of [B, D] over each row's active elements, float64 [B]."""
        return row_mean(x, self.active)

    def _declared(self, name: str) -> Tensor:
        if name not in self.declared:
            raise InputError(
                f"the policy loss reads step.{name} without declaring it; register it with needs={{{name!r}}}."
            )
        return self.declared[name]
