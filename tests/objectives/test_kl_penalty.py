"""KL penalties: closed forms, exact Gaussian KL, gradients, masks."""

from __future__ import annotations

import pytest
import torch
from torch.distributions import Normal, kl_divergence

from flow_factory.errors import InputError
from flow_factory.objectives import KL_KINDS, kl_penalty
from flow_factory.scheduler import Dynamics, transition_moments


def randn(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float64) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64).to(dtype)


def inputs(name: str = "Flow-SDE", dtype: torch.dtype = torch.float64) -> dict[str, torch.Tensor]:
    x, v, v_ref = (randn(3, 2, 4, seed=s, dtype=dtype) for s in (1, 2, 3))
    s, t = torch.tensor([0.95, 0.7, 0.4], dtype=dtype), torch.tensor([0.9, 0.5, 0.1], dtype=dtype)
    v.requires_grad_(True)
    ours = transition_moments(name, x, v, s, t, 0.6)
    theirs = transition_moments(name, x, v_ref, s, t, 0.6)
    return {
        "velocity": v,
        "velocity_ref": v_ref,
        "mean": ours.mean,
        "mean_ref": theirs.mean,
        "std": ours.std,
        "diffusion": ours.diffusion,
    }


def written_out(kind: str, a: dict[str, torch.Tensor]) -> torch.Tensor:
    if kind == "v-based":
        return ((a["velocity"] - a["velocity_ref"]) ** 2).mean(dim=(1, 2))
    square = ((a["mean"] - a["mean_ref"]) ** 2).mean(dim=(1, 2))
    return {"x-based": square, "transition": square / (2 * a["std"] ** 2)}.get(kind, square / (2 * a["diffusion"] ** 2))


@pytest.mark.parametrize("kind", KL_KINDS)
@pytest.mark.parametrize("name", [d.value for d in Dynamics if d.stochastic])
def test_value_and_gradient(name, kind):
    """float32 through the kernel against autograd of the written-out float64 form, and the closed gradient."""
    a = inputs(name)
    expected = written_out(kind, a)
    got = kl_penalty(kind, **a)
    torch.testing.assert_close(got, expected, rtol=1e-12, atol=0)
    (grad,) = torch.autograd.grad(got.sum(), a["velocity"], retain_graph=True)
    (autograd,) = torch.autograd.grad(expected.sum(), a["velocity"], retain_graph=True)
    torch.testing.assert_close(grad, autograd, rtol=1e-6, atol=0)

    (slope,) = torch.autograd.grad(a["mean"].sum(), a["velocity"], retain_graph=True)
    deviation = {"transition": a["std"], "transition_dt": a["diffusion"]}.get(kind)
    scale = 1.0 if deviation is None else 1 / (2 * deviation.view(-1, 1, 1) ** 2)
    inner = 2 * (a["velocity"] - a["velocity_ref"]) if kind == "v-based" else 2 * (a["mean"] - a["mean_ref"]) * slope
    torch.testing.assert_close(grad, inner * scale / 8, rtol=1e-6, atol=0)

    low = kl_penalty(kind, **inputs(name, torch.float32))
    assert low.dtype == torch.float32
    torch.testing.assert_close(low.double(), expected, rtol=2e-5, atol=0)


@pytest.mark.parametrize("name", [d.value for d in Dynamics if d.stochastic])
def test_transition_is_the_exact_gaussian_kl_per_element(name):
    a = inputs(name)
    q = a["std"].view(-1, 1, 1)
    exact = kl_divergence(Normal(a["mean"], q), Normal(a["mean_ref"], q)).mean(dim=(1, 2))
    torch.testing.assert_close(kl_penalty("transition", **a), exact, rtol=1e-12, atol=0)


def test_transition_dt_is_h_times_transition_except_for_cps():
    h = torch.tensor([0.05, 0.2, 0.3], dtype=torch.float64)
    for name in ("Flow-SDE", "Dance-SDE", "DDIM-eta"):
        a = inputs(name)
        torch.testing.assert_close(kl_penalty("transition_dt", **a), h * kl_penalty("transition", **a))
    a = inputs("CPS")
    assert torch.equal(kl_penalty("transition_dt", **a), kl_penalty("transition", **a))


@pytest.mark.parametrize("kind", KL_KINDS)
def test_mask_and_equal_policies(kind):
    a = inputs()
    mask = torch.tensor([True, True, False, True])
    kept = {k: v[..., mask] if v.dim() == 3 else v for k, v in a.items()}
    torch.testing.assert_close(kl_penalty(kind, **a, mask=mask), kl_penalty(kind, **kept), rtol=1e-14, atol=0)
    same = a | {"velocity_ref": a["velocity"], "mean_ref": a["mean"]}
    assert kl_penalty(kind, **same).tolist() == [0.0] * 3


@pytest.mark.parametrize("kind", KL_KINDS)
def test_reference_is_detached_and_the_policy_is_not(kind):
    """Pitfall 1: the term keeps the policy's graph."""
    a = inputs()
    reference = {k: a[k].detach().clone().requires_grad_(True) for k in ("velocity_ref", "mean_ref")}
    kl = kl_penalty(kind, **(a | reference))
    assert kl.requires_grad
    kl.sum().backward()
    assert all(tensor.grad is None for tensor in reference.values())
    assert a["velocity"].grad is not None and float(a["velocity"].grad.abs().sum()) > 0


def test_errors():
    a = inputs()
    with pytest.raises(InputError, match=r"unknown KL kind 'kl'.*transition_dt"):
        kl_penalty("kl", **a)
    for kind, field in (("transition", "std"), ("transition_dt", "diffusion")):
        with pytest.raises(InputError, match="divides by the step's noise"):
            kl_penalty(kind, **(a | {field: torch.tensor([0.1, 0.0, 0.2])}))
        with pytest.raises(ValueError, match=f"needs {field}"):
            kl_penalty(kind, mean=a["mean"], mean_ref=a["mean_ref"])
    with pytest.raises(ValueError, match="needs velocity_ref"):
        kl_penalty("v-based", velocity=a["velocity"])
    with pytest.raises(ValueError, match="of policy and reference differ"):
        kl_penalty("v-based", velocity=a["velocity"], velocity_ref=a["velocity_ref"][:1])
