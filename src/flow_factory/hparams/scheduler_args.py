"""How the rollout moves from noise to data, and which of its steps are stochastic."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Annotated, Literal

from pydantic import Field

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.types import DynamicsName, NonNegativeFloat, NonNegativeInt, PositiveInt, Section, option


@dataclass
class SchedulerArguments(Section):
    """The `scheduler:` section."""

    dynamics_type: DynamicsName = option(
        "Flow-SDE",
        "Transition of the rollout: Flow-SDE, Dance-SDE, CPS, DDIM-eta or ODE. Coupled trainers (grpo ...) need "
        "transition densities, so not ODE.",
    )
    noise_level: NonNegativeFloat = option(0.7, "eta of the stochastic steps; 0 makes them deterministic.")
    num_sde_steps: PositiveInt | None = option(
        1, "Stochastic steps per cycle, drawn among sde_steps; these are the trained ones. null: all of them."
    )
    sde_steps: list[NonNegativeInt] | None = option(
        None,
        "Grid indices that may be stochastic (never the last, T-1). null: the indices i <= T-2 whose effective std "
        "does not exceed sigma_next. A given list is taken as it is, with a warning for steps that exceed it.",
    )
    sde_window: Literal["random", "contiguous", "sliding"] = option(
        "random",
        "How the stochastic steps are chosen each cycle. random: without replacement; contiguous: neighbours from a "
        "random start (Flow-GRPO-Fast); sliding: a window that moves from high noise to low (MixGRPO).",
    )
    sde_window_range: tuple[NonNegativeInt, NonNegativeInt] | None = option(
        None, "contiguous: the window lies in [lo, hi); null: all candidates."
    )
    sliding_interval: PositiveInt = option(25, "sliding: cycles between two moves.")
    sliding_stride: PositiveInt = option(1, "sliding: steps per move.")
    outside_solver: Literal["euler", "dpm2m"] = option(
        "euler",
        "Solver of the deterministic steps: those outside the window, with ODE dynamics all. euler: the ODE step of "
        "the dynamics; dpm2m: DPM-Solver++ 2M, of second order, which starts anew after a stochastic step.",
    )
    after_window_fraction: Annotated[float, Field(gt=0, le=1)] = option(
        1.0,
        "Share of the steps after the last stochastic one that are taken, evenly spaced; below 1 needs outside_solver: "
        "dpm2m (MixGRPO-Flash: 0.4).",
    )
    log_prob: Literal["auto", "normalised", "unnormalised"] = option(
        "auto",
        "Form of the step log-prob, always a mean over elements. normalised: the Gaussian log-density; unnormalised: "
        "-(x' - mean)^2 as CPS recipes use; auto: unnormalised for CPS, else normalised.",
    )
    seed: int | None = option(None, "Seed of the choice of stochastic steps; null: train.seed.")

    def __post_init__(self) -> None:
        if self.dynamics_type in ("CPS", "DDIM-eta") and self.noise_level > 1:
            raise FieldError("noise_level", f"is a fraction with {self.dynamics_type}; use at most 1.")
        steps = self.sde_steps
        if steps is not None:
            if not steps:
                raise FieldError("sde_steps", "is empty; list at least one grid index, or write null for the default.")
            if len(set(steps)) != len(steps):
                raise FieldError("sde_steps", "names an index twice; list each once.")
            self.sde_steps = sorted(steps)
            if self.num_sde_steps is not None and self.num_sde_steps > len(steps):
                raise FieldError(
                    "num_sde_steps",
                    f"asks for more steps than sde_steps has; use at most {len(steps)}, or null for all.",
                )
        if self.sde_window != "random" and self.num_sde_steps is None:
            raise FieldError("num_sde_steps", f"must be the window's size when sde_window is {self.sde_window!r}.")
        if self.sde_window_range is not None:
            low, high = self.sde_window_range
            if self.sde_window != "contiguous":
                raise FieldError(
                    "sde_window_range", "has effect only with sde_window: contiguous; set that or remove it."
                )
            if high - low < (self.num_sde_steps or 1):
                raise FieldError(
                    "sde_window_range",
                    f"has room for {max(high - low, 0)} steps but num_sde_steps is {self.num_sde_steps}; widen it.",
                )

        if self.after_window_fraction < 1 and self.outside_solver == "euler":
            raise FieldError(
                "after_window_fraction",
                "takes longer steps, which need a solver of higher order; set outside_solver: dpm2m, or use 1.",
            )
        if self.after_window_fraction < 1 and self.dynamics_type == "ODE":
            raise FieldError("after_window_fraction", "has no window to follow with ODE dynamics; use 1.")

    @property
    def log_prob_normalised(self) -> bool:
        """Whether log-probs are Gaussian log-densities (True) or negative squared deviations."""
        return self.log_prob == "normalised" or (self.log_prob == "auto" and self.dynamics_type != "CPS")

    def num_trained_steps(self, num_inference_steps: int) -> int:
        """Stochastic steps per rollout, as far as it is known before the model's grid is (an upper bound for null)."""
        if self.num_sde_steps is not None:
            return self.num_sde_steps
        return len(self.sde_steps) if self.sde_steps is not None else max(num_inference_steps - 1, 1)
