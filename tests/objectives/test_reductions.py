"""Means over rows, elements and components."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.objectives import agg_loss, masked_mean
from flow_factory.objectives.common import check_rows
from flow_factory.samples.reductions import active_count, combine_row_means, row_mean

X = torch.tensor([[1.0, 2.0, 6.0], [10.0, 20.0, 60.0]])
MASK = torch.tensor([[True, True, False], [False, False, True]])


def test_masked_mean_by_hand():
    assert masked_mean(X).tolist() == [3.0, 30.0]
    assert masked_mean(X, MASK).tolist() == [1.5, 60.0]
    assert masked_mean(X, keep_batch=False).item() == 16.5
    assert masked_mean(X, MASK, keep_batch=False).item() == 21.0  # (1 + 2 + 60) / 3
    assert masked_mean(X, torch.tensor([True, False, True])).tolist() == [3.5, 35.0]  # broadcast over rows
    assert masked_mean(torch.tensor([4.0, 5.0])).tolist() == [4.0, 5.0]
    assert masked_mean(X.bfloat16()).dtype == torch.bfloat16


def test_agg_loss_modes_by_hand():
    assert agg_loss(X, MASK).item() == 30.75  # (1.5 + 60) / 2
    assert agg_loss(X, MASK, "sum").item() == 61.5
    assert agg_loss(X, MASK, "element-mean").item() == 21.0
    assert agg_loss(torch.tensor([1.0, 3.0])).item() == 2.0
    with pytest.raises(ValueError, match="unknown loss aggregation 'mean'"):
        agg_loss(X, mode="mean")  # type: ignore[arg-type]


def test_inactive_elements_may_hold_anything():
    x = torch.tensor([[1.0, math.nan, math.inf]], requires_grad=True)
    mean = row_mean(x, torch.tensor([[True, False, False]]))
    mean.sum().backward()
    assert mean.tolist() == [1.0]
    assert x.grad is not None and x.grad.tolist() == [[1.0, 0.0, 0.0]]


def test_a_row_without_active_elements_is_zero():
    assert row_mean(X, torch.zeros_like(MASK)).tolist() == [0.0, 0.0]
    assert masked_mean(X, torch.zeros_like(MASK), keep_batch=False).item() == 0.0


def test_rows_are_accumulated_in_float64():
    """A float32 sum of 2^25 ones and a large number loses the ones; 1e8 + 1 is exact in float64."""
    x = torch.ones(1, 1001)
    x[0, 0] = 1e8
    assert row_mean(x).item() * 1001 == 1e8 + 1000


def test_components_are_weighted_by_their_element_counts():
    video, audio = torch.arange(12.0).view(2, 6), torch.tensor([[100.0, 200.0], [300.0, 400.0]])
    mask = torch.tensor([[True] * 6, [False] * 5 + [True]])
    joined = combine_row_means(
        [row_mean(video, mask), row_mean(audio)], [active_count(video, mask), active_count(audio)]
    )
    assert joined.tolist() == [(0 + 1 + 2 + 3 + 4 + 5 + 300) / 8, (11 + 700) / 3]
    alone = row_mean(video)
    assert combine_row_means([alone], [active_count(video)]) is alone


def test_shapes_that_would_broadcast_are_refused():
    rows = torch.zeros(3)
    check_rows(rows, other=torch.ones(3))
    with pytest.raises(ValueError, match=r"advantages has shape \(3, 1\); expected \(3,\)"):
        check_rows(rows, advantages=torch.zeros(3, 1))
    with pytest.raises(ValueError, match="one value per sample"):
        check_rows(torch.zeros(3, 1))
