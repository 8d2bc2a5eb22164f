"""Penalties for moving away from a reference policy, per transition.

The current policy's tensors keep their graph, so the term must be formed outside `no_grad`; the reference's are
detached.
"""

from __future__ import annotations

from typing import Literal, get_args

from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.objectives.common import check_rows
from flow_factory.samples.reductions import row_mean, zero_inactive

KLKind = Literal["v-based", "x-based", "transition", "transition_dt"]
KL_KINDS: tuple[str, ...] = get_args(KLKind)


def kl_penalty(
    kind: KLKind | str,
    *,
    velocity: Tensor | None = None,
    velocity_ref: Tensor | None = None,
    mean: Tensor | None = None,
    mean_ref: Tensor | None = None,
    std: Tensor | None = None,
    diffusion: Tensor | None = None,
    mask: Tensor | None = None,
) -> Tensor:
    """Penalty of each row, [B]; every kind is a mean over (active) elements.

    Args:
        kind: "v-based": mean (v - v_ref)^2. "x-based": mean (mean - mean_ref)^2. "transition": the exact KL of two
            Gaussians with the same q, per element, mean (mean - mean_ref)^2 / (2 q^2). "transition_dt": the same over
            2 a^2, i.e. h times "transition"; the published KL weights of Flow-GRPO (arXiv 2505.05470) belong to it.
        velocity: v of the current policy, [B, ...], with graph.
        velocity_ref: v of the reference; detached here.
        mean: Transition mean of the current policy, [B, ...], with graph.
        mean_ref: Transition mean of the reference; detached here.
        std: q, [B] (`TransitionMoments.std`).
        diffusion: a, [B] (`TransitionMoments.diffusion`).
        mask: Boolean, broadcastable to the state, True where active.

    Raises:
        InputError: Unknown kind, or a transition kind on a deterministic step.
        ValueError: If a tensor that the kind needs is missing or of another shape.
    """
    if kind not in KL_KINDS:
        raise InputError(f"unknown KL kind {kind!r} (train.kl_type): {', '.join(KL_KINDS)}.")
    if kind == "v-based":
        ours, theirs = _needed(kind, velocity=velocity, velocity_ref=velocity_ref)
    else:
        ours, theirs = _needed(kind, mean=mean, mean_ref=mean_ref)
    if ours.shape != theirs.shape:
        raise ValueError(
            f"{kind}: shapes {tuple(ours.shape)} and {tuple(theirs.shape)} of policy and reference differ."
        )
    difference = zero_inactive(ours - theirs.detach().to(ours.dtype), mask)
    square = row_mean(difference * difference, mask)
    if kind == "transition":
        square = square / _twice_variance(kind, square, *_needed(kind, std=std))
    elif kind == "transition_dt":
        square = square / _twice_variance(kind, square, *_needed(kind, diffusion=diffusion))
    return square.to(ours.dtype)


def _twice_variance(kind: str, like: Tensor, deviation: Tensor) -> Tensor:
    check_rows(like, deviation=deviation)
    if bool((deviation <= 0).any()):
        raise InputError(
            f"KL kind {kind!r} divides by the step's noise, which is 0 for a deterministic step. Use 'v-based' or "
            f"'x-based', or train stochastic steps only."
        )
    return 2 * deviation.detach().to(like.dtype).square()


def _needed(kind: str, **tensors: Tensor | None) -> list[Tensor]:
    missing = [name for name, value in tensors.items() if value is None]
    if missing:
        raise ValueError(f"KL kind {kind!r} needs {', '.join(missing)}.")
    return [value for value in tensors.values() if value is not None]
