"""Transition kernels: what one step of the sampler does to a state, as pure functions.

Flow coordinates throughout: sigma s in [0, 1], 1 = noise, 0 = data; x_s = (1 - s) x0 + s e; velocity v = e - x0, so
x0^ = x - s v and e^ = x + (1 - s) v. A step goes from s down to s' = s - h.

Every kernel here is linear in x and v with coefficients that depend on the step only:

    x' = c_x x + c_v v + q z,    z ~ N(0, I)

The [B] coefficients are computed in float64 (CPS and DDIM-eta subtract nearly equal numbers) and rounded once to the
state's precision; everything that touches the state is elementwise. So a row does not depend on the rows beside it,
and a deterministic row (noise level 0, or no step) is x - h v bit for bit, whatever the other rows do.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.samples.reductions import accumulation_dtype, drop_low_bits, row_mean, zero_inactive
from flow_factory.scheduler.names import Dynamics, parse_dynamics


@dataclass(frozen=True)
class TransitionMoments:
    """Mean and spread of one Gaussian transition.

    Attributes:
        mean: [B, ...], float32 (float64 for float64 inputs), with the graph of the velocity.
        std: Effective standard deviation q of each row, [B]; exactly 0 where the step is deterministic.
        diffusion: Diffusion coefficient a of each row, [B]: q = a sqrt(h). For CPS, which has no sqrt(h), a = q = c.
    """

    mean: Tensor
    std: Tensor
    diffusion: Tensor


@dataclass(frozen=True)
class Coefficients:
    """x' = x_scale x + v_scale v + std z; all [B] in float64.

    Attributes:
        x_scale: d mean / d x.
        v_scale: d mean / d v (negative for a step towards data).
        std: Effective standard deviation q.
        diffusion: Diffusion coefficient a.
    """

    x_scale: Tensor
    v_scale: Tensor
    std: Tensor
    diffusion: Tensor


def transition_coefficients(
    dynamics: Dynamics | str,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: Tensor,
    index: Tensor | None = None,
) -> Coefficients:
    """Coefficients of one transition.

    Args:
        dynamics: One of the five kernels.
        sigma: s, [B].
        sigma_next: s', [B], at most s.
        noise_level: eta, [B]. Rows with 0 are the Euler step of the ODE.
        index: Grid index of each row, int64 [B]. At index 0 Flow-SDE uses s~ = s' in sqrt(s / (1 - s~)), elsewhere
            s~ = s. The index decides, not the value of s: grids that start at 0.999 have the same singularity.
            None: no row is the first of a grid.

    Raises:
        InputError: Unknown dynamics, s' > s, values out of range, or a Flow-SDE step that divides by 1 - s = 0.
    """
    dynamics = parse_dynamics(dynamics)
    dtype = accumulation_dtype(sigma.device)
    s, t, eta = sigma.to(dtype), sigma_next.to(dtype), noise_level.to(dtype)
    _check_values(dynamics, s, t, eta)
    h = s - t
    one, zero = torch.ones_like(s), torch.zeros_like(s)
    if dynamics is Dynamics.ODE:
        return Coefficients(one, -h, zero, zero)

    noisy = (eta > 0) & (h > 0)
    # Deterministic rows get harmless numbers here, so that no kernel divides by their zeros.
    s_, t_ = torch.where(noisy, s, 0.5 * one), torch.where(noisy, t, 0.25 * one)
    if dynamics is Dynamics.FLOW_SDE:
        s_tilde = s_ if index is None else torch.where(index == 0, t_, s_)
        if bool((s_tilde >= 1).any()):
            raise InputError(
                "Flow-SDE at sigma = 1 divides by 1 - sigma = 0. Pass `index` (0 for the first step of the grid, "
                "which then uses the next sigma), or a noise level of 0 for this row."
            )
        values = _flow_sde(s_, t_, eta, s_tilde)
    else:
        values = {Dynamics.DANCE_SDE: _dance_sde, Dynamics.CPS: _cps, Dynamics.DDIM_ETA: _ddim_eta}[dynamics](
            s_, t_, eta
        )
    return Coefficients(
        torch.where(noisy, values.x_scale, one),
        torch.where(noisy, values.v_scale, -h),
        torch.where(noisy, values.std, zero),
        torch.where(noisy, values.diffusion, zero),
    )


def _sde(s: Tensor, t: Tensor, a: Tensor) -> Coefficients:
    """Euler-Maruyama step of the reverse SDE with the ODE's marginals and diffusion coefficient a.

    drift v + a^2 / (2 s) (x + (1 - s) v); Flow-GRPO (arXiv 2505.05470), the SDE update rule of its section on the
    ODE-to-SDE conversion.
    """
    h = s - t
    x_scale = 1 - a**2 * h / (2 * s)
    v_scale = -h * (1 + a**2 * (1 - s) / (2 * s))
    return Coefficients(x_scale, v_scale, a * h.sqrt(), a)


def _flow_sde(s: Tensor, t: Tensor, eta: Tensor, s_tilde: Tensor) -> Coefficients:
    """Flow-GRPO (arXiv 2505.05470): a = eta sqrt(s / (1 - s~))."""
    return _sde(s, t, eta * (s / (1 - s_tilde)).sqrt())


def _dance_sde(s: Tensor, t: Tensor, eta: Tensor) -> Coefficients:
    """DanceGRPO (arXiv 2505.07818), rectified flow: constant diffusion eta.

    Published as x - h (v + eta^2 (x - (1 - s) x0^) / (2 s^2)). As x - (1 - s) x0^ = s (x + (1 - s) v), this is the
    same step as Flow-SDE's with a = eta.
    """
    return _sde(s, t, eta)


def _interpolant(s: Tensor, t: Tensor, q: Tensor, e_scale: Tensor, a: Tensor) -> Coefficients:
    """(1 - s') x0^ + e_scale e^ + q z, written out in x and v."""
    return Coefficients((1 - t) + e_scale, (1 - s) * e_scale - s * (1 - t), q, a)


def _cps(s: Tensor, t: Tensor, eta: Tensor) -> Coefficients:
    """Coefficients-preserving sampling (arXiv 2509.05952): c = s' sin(eta pi / 2), sqrt(s'^2 - c^2) = s' cos(...).

    The noise that is added and the predicted noise that is kept share s'^2. There is no sqrt(h) in c.
    """
    angle = eta * (math.pi / 2)
    c = t * torch.sin(angle)
    # At eta = 1 cos(pi / 2) is 6e-17 in floating point; the step keeps nothing of the predicted noise.
    kept = torch.where(eta == 1, torch.zeros_like(t), t * torch.cos(angle))
    return _interpolant(s, t, c, kept, c)


def _ddim_eta(s: Tensor, t: Tensor, eta: Tensor) -> Coefficients:
    """DDIM with eta (arXiv 2010.02502, the generalised sampling step), carried to flow coordinates.

    With n = sqrt((1 - s)^2 + s^2): alpha-bar = ((1 - s) / n)^2 and x_flow = n x_ddim, so q_flow = n' q_ddim, where
    q_ddim = eta sqrt((1 - ab') / (1 - ab) (1 - ab / ab')). Inserting alpha-bar and cancelling:
    q_flow = eta s' sqrt(1 - r^2), r = (1 - s) s' / (s (1 - s')), the mean being (1 - s') x0^ + sqrt(s'^2 - q^2) e^.
    """
    r = (1 - s) * t / (s * (1 - t))
    q = eta * t * (1 - r**2).clamp(min=0).sqrt()
    return _interpolant(s, t, q, (t**2 - q**2).clamp(min=0).sqrt(), q / (s - t).sqrt())


def _check_values(dynamics: Dynamics, s: Tensor, t: Tensor, eta: Tensor) -> None:
    """Raises InputError for values without a meaning; one device synchronisation when all is well."""
    top = dynamics.max_noise_level if dynamics.max_noise_level is not None else math.inf
    eta_ok = (eta >= 0) & (eta <= top) & torch.isfinite(eta)
    sigma_ok = (s >= 0) & (s <= 1) & (t >= 0) & (t <= s)
    if bool((eta_ok & sigma_ok).all()):
        return
    if not bool(eta_ok.all()):
        row = int((~eta_ok).nonzero()[0])
        bound = "at least 0" if top == math.inf else f"in [0, {top:g}]"
        raise InputError(
            f"noise level {eta[row].item():g} of row {row} (scheduler.noise_level): {dynamics.value} takes a finite "
            f"noise level {bound}."
        )
    row = int((~sigma_ok).nonzero()[0])
    raise InputError(
        f"row {row} steps from sigma {s[row].item():g} to sigma_next {t[row].item():g}: sampling runs from noise (1) "
        f"to data (0), so 0 <= sigma_next <= sigma <= 1. Check the order of the grid."
    )


def transition_moments(
    dynamics: Dynamics | str,
    x: Tensor,
    velocity: Tensor,
    sigma: Tensor,
    sigma_next: Tensor,
    noise_level: float | Tensor,
    index: Tensor | None = None,
) -> TransitionMoments:
    """Mean and standard deviation of the transition from x at sigma to sigma_next.

    Args:
        dynamics: One of the five kernels.
        x: State, [B, ...]; half precision is promoted to float32, float64 stays.
        velocity: v = noise - data predicted at x, same shape.
        sigma: [B].
        sigma_next: [B].
        noise_level: eta, a number for all rows or [B]; 0 = the Euler step of the ODE.
        index: Grid index of each row, int64 [B], or None; see `transition_coefficients`.

    Raises:
        InputError: See `transition_coefficients`.
        ValueError: If shapes do not fit.
    """
    if velocity.shape != x.shape:
        raise ValueError(f"velocity has shape {tuple(velocity.shape)}, the state {tuple(x.shape)}; they must agree.")
    batch = x.shape[0]
    dtype = torch.promote_types(torch.promote_types(x.dtype, velocity.dtype), torch.float32)
    # A number and a tensor that holds it must give the same bits: both pass through the state's precision first.
    eta = torch.as_tensor(noise_level, device=x.device, dtype=dtype)
    rows = {"sigma": sigma, "sigma_next": sigma_next, "noise_level": eta}
    if index is not None:
        rows["index"] = index
    for name, value in rows.items():
        if value.dim() > 1 or (value.dim() == 1 and value.shape[0] != batch):
            raise ValueError(f"{name} has shape {tuple(value.shape)}; expected ({batch},), one value per row.")
        rows[name] = value.to(x.device).expand(batch)
    dynamics = parse_dynamics(dynamics)
    if isinstance(noise_level, float) and noise_level == 0.0:
        dynamics = Dynamics.ODE  # the same step, without a kernel that no row uses
    c = transition_coefficients(dynamics, rows["sigma"], rows["sigma_next"], rows["noise_level"], rows.get("index"))

    shape = (batch,) + (1,) * (x.dim() - 1)
    x_scale, v_scale = c.x_scale.to(dtype).view(shape), c.v_scale.to(dtype).view(shape)
    mean = x.to(dtype) * x_scale + velocity.to(dtype) * v_scale
    return TransitionMoments(mean, c.std.to(dtype), c.diffusion.to(dtype))


def sample_next(moments: TransitionMoments, noise: Tensor) -> Tensor:
    """Draws the next state: mean + q z, and the mean itself, bit for bit, in deterministic rows.

    Args:
        moments: From `transition_moments`.
        noise: z, standard normal, shape of the mean.
    """
    std = moments.std.view((-1,) + (1,) * (moments.mean.dim() - 1))
    return torch.where(std > 0, moments.mean + std * noise.to(moments.mean.dtype), moments.mean)


def log_prob(next_x: Tensor, moments: TransitionMoments, mask: Tensor | None = None, normalised: bool = True) -> Tensor:
    """Log-probability of a transition per row, as the *mean* over its (active) elements, [B].

    The published clip ranges and KL weights assume the mean. Differentiable in the moments; `next_x` is detached.

    Args:
        next_x: The state that was reached, as stored; any float dtype.
        moments: From `transition_moments` at the same step.
        mask: Boolean, broadcastable to the state, True where active.
        normalised: True: log-density of Normal(mean, q). False: -(x' - mean)^2, which is 2 q^2 times the normalised
            form up to a constant. CPS recipes use it (arXiv 2509.05952): the normalised form diverges as c -> 0.

    Returns:
        float64 [B] (float32 where the device has no float64), with 33 significant bits: log-probs are of the order of
        1, so float32 would resolve log-ratios to 1e-7 only, too coarse for a clip range of 2e-6, while all 53 bits
        would show in which order a row was summed.

    Raises:
        InputError: If a row is deterministic.
    """
    if bool((moments.std <= 0).any()):
        row = int((moments.std <= 0).nonzero()[0])
        raise InputError(
            f"row {row} is a deterministic step (std 0): it has no transition density, so no log-prob. Ask for "
            f"log-probs of stochastic steps only; ODE dynamics and steps outside the SDE window have none."
        )
    error = zero_inactive(next_x.detach().to(moments.mean.dtype) - moments.mean, mask)
    square = row_mean(error * error, mask)
    if not normalised:
        return drop_low_bits(-square)
    q = moments.std.to(square.dtype)
    return drop_low_bits(-square / (2 * q * q) - q.log() - 0.5 * math.log(2 * math.pi))


def effective_std(dynamics: Dynamics | str, sigmas: Tensor, noise_level: float) -> Tensor:
    """Effective standard deviation q of every step of a grid, if all were stochastic.

    Args:
        dynamics: One of the five kernels.
        sigmas: The grid, [T + 1], from noise to data.
        noise_level: eta.

    Returns:
        float64 [T].
    """
    steps = sigmas.shape[0] - 1
    eta = torch.full((steps,), float(noise_level), dtype=sigmas.dtype, device=sigmas.device)
    index = torch.arange(steps, device=sigmas.device)
    return transition_coefficients(dynamics, sigmas[:-1], sigmas[1:], eta, index).std
