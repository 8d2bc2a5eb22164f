"""How fast an algorithm's own snapshot follows the live weights: snapshot <- d snapshot + (1 - d) weights."""

from __future__ import annotations

from dataclasses import dataclass

from flow_factory.hparams.errors import FieldError

_FORM = "start-value-slope-end, for instance 75-0.0-0.0075-0.999"


@dataclass(frozen=True)
class DecaySchedule:
    """Decay d as a function of the number n of optimizer steps so far.

    d(n) = value for n < start, else min(value + (n - start) slope, end).

    Attributes:
        start: Optimizer steps during which the decay is constant.
        value: Decay until then, in [0, 1).
        slope: Growth per optimizer step, at least 0.
        end: Largest decay, in [value, 1). A decay of 1 would freeze the snapshot for good.
    """

    start: int
    value: float
    slope: float
    end: float

    def __call__(self, n: int) -> float:
        """The decay after `n` optimizer steps."""
        return self.value if n < self.start else min(self.value + (n - self.start) * self.slope, self.end)

    @property
    def copies(self) -> bool:
        """True if every move is a copy: the snapshot is then the live policy at the start of each cycle."""
        return self.value == 0 and (self.slope == 0 or self.end == 0)


# DiffusionNFT's three settings of the old policy: a copy every cycle; a slow start; a flat part, then nearly frozen.
PRESETS = {
    0: DecaySchedule(0, 0.0, 0.0, 0.0),
    1: DecaySchedule(0, 0.0, 0.001, 0.5),
    2: DecaySchedule(75, 0.0, 0.0075, 0.999),
}


def parse_decay(value: str | int, field: str) -> DecaySchedule:
    """The schedule that a field names.

    Args:
        value: A preset (0, 1 or 2) or "start-value-slope-end".
        field: Name of the field, for errors.

    Raises:
        FieldError: If it names none, or one that stops moving the snapshot.
    """
    text = str(value).strip()
    if text.isdigit():
        if int(text) not in PRESETS:
            raise FieldError(field, f"is no preset; use {', '.join(map(str, PRESETS))}, or {_FORM}.")
        return PRESETS[int(text)]
    parts = text.split("-")
    try:
        start, first, slope, end = int(parts[0]), *(float(part) for part in parts[1:])
    except ValueError:
        raise FieldError(field, f"cannot be read; write {_FORM}, or a preset 0, 1 or 2.") from None
    schedule = DecaySchedule(start, first, slope, end)
    if not 0 <= schedule.value <= schedule.end < 1:
        raise FieldError(
            field,
            f"has decays from {schedule.value:g} to {schedule.end:g}; they must grow inside [0, 1). At 1 the snapshot "
            f"would never move again.",
        )
    return schedule
