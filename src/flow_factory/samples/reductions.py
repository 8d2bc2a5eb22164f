"""Row-wise means that do not depend on the batch they are computed in.

A row's log-probability in a rollout of 24 rows must equal the one replayed in a micro-batch of 4. PyTorch may split a
float32 reduction differently for another batch size or thread count, which changes the last bits. Summing in float64
and rounding once at the end makes the order invisible: to float32 (except with a probability near 1e-8 per value), or
with `drop_low_bits` where float32 is too coarse.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def accumulation_dtype(device: torch.device) -> torch.dtype:
    """float64, or float32 on devices without it (MPS)."""
    return torch.float32 if device.type == "mps" else torch.float64


def active_count(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Number of active elements of each row, int64 [B].

    Args:
        x: [B, ...].
        mask: Boolean, broadcastable to `x`, True where active; None = all active.
    """
    if mask is None:
        return torch.full((x.shape[0],), x.shape[1:].numel(), dtype=torch.int64, device=x.device)
    return mask.expand_as(x).reshape(x.shape[0], -1).sum(dim=1)


def row_mean(x: Tensor, mask: Tensor | None = None) -> Tensor:
    """Mean over all non-batch elements of each row, accumulated and returned in float64.

    Args:
        x: [B, ...].
        mask: Boolean, broadcastable to `x`, True where an element counts; None = all. Inactive elements of `x` may
            hold anything, also non-finite values.

    Returns:
        [B], 0 for a row without an active element.
    """
    dtype = accumulation_dtype(x.device)
    if mask is None:
        return x.reshape(x.shape[0], -1).sum(dim=1, dtype=dtype) / max(1, x.shape[1:].numel())
    total = zero_inactive(x, mask).reshape(x.shape[0], -1).sum(dim=1, dtype=dtype)
    return total / active_count(x, mask).clamp(min=1).to(dtype)


def drop_low_bits(x: Tensor, bits: int = 20) -> Tensor:
    """`x` rounded to 53 - `bits` significant bits, so that the order of a float64 sum no longer shows in it.

    With 20 bits the result is good to 1e-10 relative; the last bits of a sum, which depend on how it was split, cross a
    rounding border with a probability near 1e-5. Veltkamp's splitting (T. J. Dekker, "A floating-point technique for
    extending the available precision", Numerische Mathematik 18, 1971): c x - (c x - x) with c = 2^bits + 1. The
    gradient is that of `x`.

    Args:
        x: float64; other dtypes are returned as they are.
        bits: How many of the 53 to give up.
    """
    if x.dtype != torch.float64:
        return x
    scaled = x * float(2**bits + 1)
    return scaled - (scaled - x)


def zero_inactive(x: Tensor, mask: Tensor | None) -> Tensor:
    """`x` with zeros in place of its inactive elements, in value and in gradient."""
    return x if mask is None else torch.where(mask, x, torch.zeros((), dtype=x.dtype, device=x.device))


def combine_row_means(means: Sequence[Tensor], counts: Sequence[Tensor]) -> Tensor:
    """The mean over all elements of several components, from each component's mean and element count.

    Args:
        means: One [B] tensor per component.
        counts: One [B] integer tensor per component (see `active_count`).

    Returns:
        [B] in the dtype of the means; 0 where no component has an active element.
    """
    if len(means) == 1:
        return means[0]
    dtype = means[0].dtype
    weights = [count.to(dtype) for count in counts]
    total = torch.stack(weights).sum(dim=0).clamp(min=1)
    return torch.stack([mean * weight for mean, weight in zip(means, weights, strict=True)]).sum(dim=0) / total
