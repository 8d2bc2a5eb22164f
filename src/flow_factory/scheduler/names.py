"""Names of the transition dynamics. Imports no torch."""

from __future__ import annotations

import difflib
from enum import Enum

from flow_factory.errors import InputError


class Dynamics(str, Enum):
    """How one step goes from x at sigma to x' at sigma' (`scheduler.dynamics_type`)."""

    ODE = "ODE"
    FLOW_SDE = "Flow-SDE"
    DANCE_SDE = "Dance-SDE"
    CPS = "CPS"
    DDIM_ETA = "DDIM-eta"

    @property
    def stochastic(self) -> bool:
        """True if the dynamics can add noise, and so has a transition density."""
        return self is not Dynamics.ODE

    @property
    def max_noise_level(self) -> float | None:
        """Largest noise level with a meaning, or None if there is no bound."""
        return 1.0 if self in (Dynamics.CPS, Dynamics.DDIM_ETA) else None


def parse_dynamics(name: Dynamics | str) -> Dynamics:
    """The dynamics called `name`.

    Raises:
        InputError: If there is none, naming the nearest.
    """
    if isinstance(name, Dynamics):
        return name
    try:
        return Dynamics(name)
    except ValueError:
        known = {d.value.lower(): d.value for d in Dynamics}
        near = difflib.get_close_matches(str(name).lower().replace("_", "-"), known, n=1, cutoff=0.5)
        hint = f" Did you mean {known[near[0]]!r}?" if near else ""
        raise InputError(
            f"unknown dynamics {name!r} (scheduler.dynamics_type).{hint} Known: {', '.join(known.values())}."
        ) from None
