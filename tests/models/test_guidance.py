"""Guidance as a pure function."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.models.guidance import GuidanceSpec
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import ComponentTimes, Grid, LatentState, StepTimes

POSITIVE = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(0))
NEGATIVE = torch.randn(3, 2, 4, generator=torch.Generator().manual_seed(1))


def times(*sigmas: float, index: list[int] | None = None) -> ComponentTimes:
    s = torch.tensor(sigmas)
    at = None if index is None else torch.tensor(index)
    return ComponentTimes({"latent": StepTimes(s, s, 1000 * s)}, at, None if index is None else 10)


def test_scale_one_is_unguided() -> None:
    spec = GuidanceSpec(1.0)
    assert not spec.needs_negative() and not spec.active(times(0.5, 0.5, 0.5))
    assert GuidanceSpec(1.5).active(times(0.5, 0.5, 0.5))


def test_combination() -> None:
    guided = GuidanceSpec(3.0).combine(POSITIVE, NEGATIVE, times(0.5, 0.5, 0.5))
    torch.testing.assert_close(guided, 3 * POSITIVE - 2 * NEGATIVE)


def test_rows_outside_a_window_are_the_positive_prediction_bit_for_bit() -> None:
    spec = GuidanceSpec(3.0, sigma_window=(0.2, 0.8))
    out = spec.combine(POSITIVE, NEGATIVE, times(0.9, 0.5, 0.1))
    assert torch.equal(out[0], POSITIVE[0]) and torch.equal(out[2], POSITIVE[2])
    torch.testing.assert_close(out[1], 3 * POSITIVE[1] - 2 * NEGATIVE[1])
    assert not spec.active(times(0.9, 0.95, 0.1)) and spec.active(times(0.9, 0.8, 0.1))


def test_step_windows_count_fractions_of_the_grid() -> None:
    spec = GuidanceSpec(3.0, step_window=(0.2, 0.5))
    rows = spec.rows(times(0.5, 0.5, 0.5, index=[1, 2, 5]))
    assert rows is not None and rows.tolist() == [False, True, False]
    off_grid = spec.rows(times(0.5, 0.5, 0.5))
    assert off_grid is not None and off_grid.all()


def test_full_rescale_restores_the_positive_std() -> None:
    out = GuidanceSpec(5.0, rescale=1.0).combine(POSITIVE, NEGATIVE, times(0.5, 0.5, 0.5))
    torch.testing.assert_close(out.std(dim=(1, 2)), POSITIVE.std(dim=(1, 2)))


@pytest.mark.parametrize(
    "fields", [{}, {"rescale": 0.7}, {"keep_token_norm": True}, {"norm_limit": 0.5}], ids=lambda fields: "".join(fields)
)
def test_half_precision_predictions_are_combined_in_float32(fields: dict[str, Any]) -> None:
    """Predictions that nearly agree: a scale of 7 on their difference, rounded to 8 bits, would be mostly rounding."""
    positive = POSITIVE.bfloat16()
    negative = (POSITIVE + 0.01 * NEGATIVE).bfloat16()
    spec, at = GuidanceSpec(7.0, **fields), times(0.5, 0.5, 0.5)
    guided = spec.combine(positive, negative, at)
    assert guided.dtype == torch.float32
    assert torch.equal(guided, spec.combine(positive.float(), negative.float(), at))


def test_guidance_without_negative_conditions_says_so(fresh: SD3_5Adapter) -> None:
    condition = fresh.encode_prompt(["star"], need_negative=False)
    state = LatentState.single(torch.zeros(1, 4, 8, 8))
    grid = Grid.single(torch.tensor([1.0, 0.0]), torch.tensor([1000.0]))
    with pytest.raises(InputError, match="need_negative"):
        fresh.predict(state, grid.times(0, 1), condition, fresh.guidance(4.5))
