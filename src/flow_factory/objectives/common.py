"""Reductions shared by the objectives. Everything is a mean over elements, then over samples, unless it says so."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from flow_factory.samples.reductions import active_count, row_mean

LossMode = Literal["sample-mean", "element-mean", "sum"]


def masked_mean(x: Tensor, mask: Tensor | None = None, keep_batch: bool = True) -> Tensor:
    """Mean over active elements.

    Args:
        x: [B, ...].
        mask: Boolean, broadcastable to `x`, True where an element counts; None = all.
        keep_batch: True: a mean per row, [B]. False: one mean over the active elements of the whole batch.

    Returns:
        In the dtype of `x`; accumulated in float64.
    """
    rows = row_mean(x, mask)
    if not keep_batch:
        counts = active_count(x, mask).to(rows.dtype)
        rows = (rows * counts).sum() / counts.sum().clamp(min=1)
    return rows.to(x.dtype)


def agg_loss(loss: Tensor, mask: Tensor | None = None, mode: LossMode = "sample-mean") -> Tensor:
    """A scalar loss from per-element or per-sample losses.

    Args:
        loss: [B] or [B, ...].
        mask: Boolean, broadcastable to `loss`; None = all active.
        mode: "sample-mean": mean over each sample, then over samples (all samples weigh the same). "element-mean":
            mean over all active elements (longer samples weigh more). "sum": sum over samples of their means.

    Raises:
        ValueError: For an unknown mode.
    """
    if mode == "element-mean":
        return masked_mean(loss, mask, keep_batch=False)
    if mode not in ("sample-mean", "sum"):
        raise ValueError(f"unknown loss aggregation {mode!r}: sample-mean, element-mean or sum.")
    rows = row_mean(loss, mask)
    return (rows.sum() if mode == "sum" else rows.mean()).to(loss.dtype)


def check_rows(expected: Tensor, **others: Tensor) -> None:
    """Checks that tensors are [B] like `expected`.

    Raises:
        ValueError: Naming the tensor that is not. A [B, 1] against a [B] would silently broadcast to [B, B].
    """
    if expected.dim() != 1:
        raise ValueError(f"expected one value per sample, [B]; got shape {tuple(expected.shape)}.")
    for name, value in others.items():
        if not isinstance(value, torch.Tensor) or value.shape != expected.shape:
            shape = tuple(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
            raise ValueError(f"{name} has shape {shape}; expected {tuple(expected.shape)}, one value per sample.")
