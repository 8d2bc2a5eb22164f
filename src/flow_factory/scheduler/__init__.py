"""Transition kernels, sigma grids and step windows. Importing the package alone imports no torch."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from flow_factory.scheduler.names import Dynamics, parse_dynamics

if TYPE_CHECKING:
    from flow_factory.scheduler.dynamics import (
        Coefficients,
        TransitionMoments,
        effective_std,
        log_prob,
        sample_next,
        transition_coefficients,
        transition_moments,
    )
    from flow_factory.scheduler.grid import pipeline_grid
    from flow_factory.scheduler.solvers import dpm_solver_2m_step
    from flow_factory.scheduler.windows import Candidates, noise_weights, resolve_candidates, select_window, steps_taken

__all__ = [
    "Candidates",
    "Coefficients",
    "Dynamics",
    "TransitionMoments",
    "dpm_solver_2m_step",
    "effective_std",
    "log_prob",
    "noise_weights",
    "parse_dynamics",
    "pipeline_grid",
    "resolve_candidates",
    "sample_next",
    "select_window",
    "steps_taken",
    "transition_coefficients",
    "transition_moments",
]

_HOMES = {
    "pipeline_grid": "grid",
    "Candidates": "windows",
    "resolve_candidates": "windows",
    "select_window": "windows",
    "steps_taken": "windows",
    "noise_weights": "windows",
    "dpm_solver_2m_step": "solvers",
}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(import_module(f"{__name__}.{_HOMES.get(name, 'dynamics')}"), name)
