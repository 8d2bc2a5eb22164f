"""Bytes of what belongs to parameters: weights, gradients, optimizer state, frozen copies, and what a step needs."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import Tensor

from flow_factory.hparams import OptimizerArguments
from flow_factory.models.parallel import BUCKET_ELEMENTS
from flow_factory.trainers.roles import CHANGE_NORM_ELEMENTS

_STEP_COUNTER = 4
"""Bytes of AdamW's step, a float32 number for each parameter."""


def tensor_bytes(tensors: Iterable[Tensor]) -> int:
    """Bytes of tensors; one that is given twice (tied weights) counts once."""
    return sum(t.numel() * t.element_size() for t in {id(t): t for t in tensors}.values())


def snapshot_bytes(parameters: Iterable[Tensor]) -> int:
    """Bytes of a frozen copy, which is held in float32 whatever the dtype of the parameters."""
    return sum(p.numel() for p in parameters) * torch.float32.itemsize


def optimizer_bytes(parameters: Sequence[Tensor], arguments: OptimizerArguments) -> int:
    """Bytes of the optimizer's state once every parameter has been stepped.

    AdamW keeps two moments in the parameter's dtype and a step counter; Muon one momentum for each matrix, and AdamW's
    for the rest (`trainers.optim`).
    """
    matrices = [p for p in parameters if p.ndim == 2] if arguments.optimizer == "muon" else []
    taken = {id(p) for p in matrices}
    rest = [p for p in parameters if id(p) not in taken]
    return tensor_bytes(matrices) + 2 * tensor_bytes(rest) + _STEP_COUNTER * len(rest)


def reduction_bytes(parameters: Sequence[Tensor], world_size: int) -> int:
    """Bytes of the flat float32 buffer in which gradients are averaged over ranks; 0 for one rank."""
    if world_size == 1:
        return 0
    whole, largest = sum(p.numel() for p in parameters), max(p.numel() for p in parameters)
    return max(min(whole, BUCKET_ELEMENTS), largest) * torch.float32.itemsize


def step_bytes(parameters: Sequence[Tensor], arguments: OptimizerArguments, device_type: str) -> int:
    """Bytes that an optimizer step needs for itself, when the activations are gone.

    The cycle's first step copies parameters, to measure how far they move. On a GPU, AdamW works on all parameters at a
    time and holds a denominator for each element; on a CPU it takes one after the other.
    """
    total = sum(p.numel() for p in parameters)
    stride = max(1, math.ceil(total / CHANGE_NORM_ELEMENTS))
    watched = tensor_bytes(parameters[::stride])
    at_once = arguments.optimizer == "adamw" and device_type != "cpu"
    work = tensor_bytes(parameters) if at_once else max(p.numel() * p.element_size() for p in parameters)
    return watched + work
