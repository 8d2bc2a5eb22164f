"""Training times that are drawn from a distribution over the noise axis, and not from the steps of a grid."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from flow_factory.hparams.errors import FieldError
from flow_factory.hparams.training_times import TimeSampling
from flow_factory.hparams.types import PositiveFloat, PositiveInt, Section, TimestepRange, option


@dataclass
class FreeTimes(Section):
    """The fields that say how times are drawn, to be named before the base whose fields they replace."""

    num_train_timesteps: PositiveInt = option(1, "Training times per example.")
    weighting_scheme: Literal["logit_normal", "uniform"] = option(
        "logit_normal", "How training times are drawn: logit_normal or uniform."
    )
    logit_mean: float = option(0.0, "logit_normal: mean before the sigmoid.")
    logit_std: PositiveFloat = option(1.0, "logit_normal: standard deviation before the sigmoid.")
    time_shift: PositiveFloat = option(1.0, "Shift k of sigma: k s / (1 + (k-1) s); larger means noisier times.")
    timestep_range: TimestepRange = option(
        (0.0, 0.99), "Fractions (lo, hi) of the axis from noise to data that are trained; a number is (0, hi)."
    )

    @property
    def time_sampling(self) -> TimeSampling:
        """How training times are drawn."""
        return TimeSampling(
            self.weighting_scheme,
            self.num_train_timesteps,
            self.timestep_range,
            self.time_shift,
            self.logit_mean,
            self.logit_std,
        )


def check_timestep_range(value: tuple[float, float], field: str = "timestep_range") -> None:
    """Raises a FieldError unless 0 <= lo < hi <= 1."""
    low, high = value
    if not 0 <= low < high <= 1:
        raise FieldError(field, "must be fractions 0 <= lo < hi <= 1 of the axis from noise to data.")
