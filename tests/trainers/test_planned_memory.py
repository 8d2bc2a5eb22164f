"""Bytes of what belongs to parameters, against real optimizers and by hand."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

from flow_factory.hparams import OptimizerArguments
from flow_factory.models.parallel import BUCKET_ELEMENTS
from flow_factory.trainers.optim import build_optimizers
from flow_factory.trainers.planning.parameters import (
    optimizer_bytes,
    reduction_bytes,
    snapshot_bytes,
    step_bytes,
    tensor_bytes,
)
from flow_factory.trainers.planning.report import Activations, MemoryPart, RunPlan, unknown_part
from flow_factory.trainers.roles import CHANGE_NORM_ELEMENTS

SHAPES = [(8, 16), (16,), (4, 8, 3, 3), (16, 8)]


@pytest.mark.parametrize("kind", ["adamw", "muon"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_optimizer_state_is_that_of_torch(kind: str, dtype: torch.dtype) -> None:
    parameters = {str(i): nn.Parameter(torch.randn(shape, dtype=dtype)) for i, shape in enumerate(SHAPES)}
    arguments = OptimizerArguments(optimizer=kind)  # type: ignore[arg-type]
    optimizers = build_optimizers(arguments, parameters)
    for parameter in parameters.values():
        parameter.grad = torch.ones_like(parameter)
    for optimizer in optimizers.values():
        optimizer.step()
    states = [state for optimizer in optimizers.values() for state in optimizer.state.values()]
    real = sum(t.numel() * t.element_size() for state in states for t in state.values() if isinstance(t, Tensor))
    assert optimizer_bytes(list(parameters.values()), arguments) == real


def test_copies_and_tied_weights() -> None:
    weight = torch.empty(10, 10, dtype=torch.bfloat16)
    assert tensor_bytes([weight, weight, torch.empty(3)]) == 200 + 12
    assert snapshot_bytes([weight]) == 400


def test_a_step_on_a_gpu_and_on_a_cpu() -> None:
    """The copy that measures the change; and a denominator of all parameters at a time, or of the largest."""
    parameters = [torch.empty(n, device="meta") for n in (100, 300, 50)]
    adamw, muon = OptimizerArguments(), OptimizerArguments(optimizer="muon")
    assert step_bytes(parameters, adamw, "cuda") == 4 * (450 + 450)
    assert step_bytes(parameters, adamw, "cpu") == step_bytes(parameters, muon, "cuda") == 4 * (450 + 300)
    # Of more than CHANGE_NORM_ELEMENTS the change is measured on every third parameter here.
    large = [torch.empty(CHANGE_NORM_ELEMENTS // 2, device="meta") for _ in range(5)]
    assert step_bytes(large, adamw, "cuda") == 4 * (2 + 5) * (CHANGE_NORM_ELEMENTS // 2)


def test_the_buffer_of_gradient_reduction() -> None:
    small = [torch.empty(100, device="meta"), torch.empty(50, device="meta")]
    assert reduction_bytes(small, 1) == 0 and reduction_bytes(small, 2) == 4 * 150
    many = [torch.empty(BUCKET_ELEMENTS // 2, device="meta")] * 5
    assert reduction_bytes(many, 2) == 4 * BUCKET_ELEMENTS
    huge = [torch.empty(3 * BUCKET_ELEMENTS, device="meta")]
    assert reduction_bytes(huge, 2) == 4 * 3 * BUCKET_ELEMENTS


def test_the_peak_is_what_is_held_and_the_largest_that_passes() -> None:
    held = (MemoryPart("weights", 100), MemoryPart("ema", 50, "host"), MemoryPart("cache", 7, "disk"))
    passing = (MemoryPart("activations", 30, always=False), MemoryPart("decode", 40, always=False))
    assert _plan(held + passing).held_bytes == 100
    assert _plan(held + passing).peak_bytes == 140
    assert _plan(held).peak_bytes == 100
    assert _plan((*held, *passing, unknown_part("rollout", "why"))).peak_bytes is None


def _plan(memory: tuple[MemoryPart, ...]) -> RunPlan:
    names = ("grpo", "sd3-5", "path", "cpu", "fp32")
    return RunPlan(*names, 1, "lora", (), memory, Activations(0), "cycle", (), None, (), None)
