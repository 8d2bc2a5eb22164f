"""Solvers of the deterministic steps of a rollout, of higher order than the Euler step."""

from __future__ import annotations

import torch
from torch import Tensor

from flow_factory.samples.reductions import accumulation_dtype

_LONGEST = 2.0  # times the last step, in lambda


def dpm_solver_2m_step(
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    previous: tuple[Tensor, Tensor] | None = None,
) -> Tensor:
    """One step of DPM-Solver++ (2M), its midpoint form, in flow coordinates; arXiv 2211.01095, algorithm 2.

    With alpha = 1 - s, lambda = log(alpha / s), step h = lambda' - lambda and the last step r h, the method is
    x' = (s' / s) x - alpha' (exp(-h) - 1) D, D = x0^ + (x0^ - x0^_last) / (2 r). The part without the difference is the
    Euler step of the flow exactly, so this computes

        x' = x - (s - s') v + alpha' (1 - exp(-h)) / (2 r) (x0^ - x0^_last)

    and is the Euler step bit for bit where there is no last step, where the last step began at s = 1 (r is infinite),
    at s' = 0 (h is infinite: the method has no second order there), and where h is more than twice the last step, since
    the difference would be extrapolated further than it holds: SD3's grids end ..., 0.278, 0.009, 0, where h is 4.6
    times the last step and the correction is larger than what it corrects. This limit is ours.

    Args:
        x: State at sigma, [B, ...].
        velocity: v at x.
        sigma: s, [B].
        sigma_next: s', [B].
        previous: x0^ = x - s v of the step before, and its s, [B]; None at the start of a trajectory, or where it was
            left (after a stochastic step).

    Returns:
        The state at sigma_next, in the dtype of `x`.
    """
    shape = (-1,) + (1,) * (x.dim() - 1)
    euler = x - (sigma - sigma_next).to(x.dtype).view(shape) * velocity
    if previous is None:
        return euler
    last_clean, last_sigma = previous
    dtype = accumulation_dtype(x.device)
    s, t, p = sigma.to(dtype), sigma_next.to(dtype), last_sigma.to(dtype)
    usable = (t > 0) & (p < 1) & (s < p) & (t < s)
    # Rows without a second order get harmless numbers, so that nothing divides by their zeros.
    s_, t_, p_ = (torch.where(usable, value, safe) for value, safe in ((s, 0.5), (t, 0.25), (p, 0.75)))
    step, last_step = _log_snr(t_) - _log_snr(s_), _log_snr(s_) - _log_snr(p_)
    weight = (1 - t_ - t_ * (1 - s_) / s_) * step / (2 * last_step)
    usable &= step <= _LONGEST * last_step
    weight = torch.where(usable, weight, torch.zeros_like(weight)).to(x.dtype).view(shape)
    clean = x - sigma.to(x.dtype).view(shape) * velocity
    return euler + weight * (clean - last_clean)


def _log_snr(s: Tensor) -> Tensor:
    """lambda = log((1 - s) / s), half the log signal-to-noise ratio."""
    return torch.log1p(-s) - s.log()
