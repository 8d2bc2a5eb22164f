"""The flow-matching loss against a written-out version, masks and components included."""

from __future__ import annotations

import pytest
import torch

from flow_factory.objectives.flow_matching import flow_matching_loss
from flow_factory.samples import LatentState


def _state(generator: torch.Generator, rows: int = 3) -> LatentState:
    shapes = {"video": (2, 4, 5), "audio": (7,)}
    components = {
        name: torch.randn(rows, *shape, generator=generator, dtype=torch.float64) for name, shape in shapes.items()
    }
    mask = torch.rand(rows, 1, 4, 5, generator=generator) > 0.4
    return LatentState(components, {"video": mask})


def test_value_and_gradient_against_a_written_out_version() -> None:
    generator = torch.Generator().manual_seed(0)
    target, velocity = _state(generator), _state(generator)
    leaves = {name: tensor.clone().requires_grad_() for name, tensor in velocity.items()}
    loss, _ = flow_matching_loss(LatentState(leaves, target.masks), target, torch.tensor([0.1, 0.5, 0.9]))
    loss.backward()

    expected = 0.0
    gradients = {name: torch.zeros_like(tensor) for name, tensor in velocity.items()}
    for row in range(3):
        mask = target.masks["video"][row].expand(2, 4, 5)
        count = int(mask.sum()) + 7
        video = (velocity["video"][row] - target["video"][row]) * mask
        audio = velocity["audio"][row] - target["audio"][row]
        expected += (float((video**2).sum()) + float((audio**2).sum())) / count / 3
        gradients["video"][row], gradients["audio"][row] = 2 * video / count / 3, 2 * audio / count / 3
    assert loss.dtype == torch.float64 and loss.item() == pytest.approx(expected, rel=1e-12)
    for name, leaf in leaves.items():
        assert leaf.grad is not None
        torch.testing.assert_close(leaf.grad, gradients[name], rtol=1e-12, atol=1e-14)


def test_the_minimum_is_the_conditional_mean() -> None:
    """Of two data points reached from one state the best velocity is the mean of both targets."""
    generator = torch.Generator().manual_seed(1)
    targets = [torch.randn(1, 6, generator=generator, dtype=torch.float64) for _ in range(2)]
    velocity = ((targets[0] + targets[1]) / 2).requires_grad_()
    sigma = torch.tensor([0.5])
    losses = [flow_matching_loss(LatentState.single(velocity), LatentState.single(t), sigma)[0] for t in targets]
    sum(losses).backward()  # type: ignore[union-attr]
    assert velocity.grad is not None and velocity.grad.abs().max() < 1e-15


def test_metrics_are_means_of_each_band_of_noise() -> None:
    target = LatentState.single(torch.zeros(4, 2))
    velocity = LatentState.single(torch.tensor([[1.0, 1.0], [2.0, 2.0], [3.0, 3.0], [4.0, 4.0]]))
    _, metrics = flow_matching_loss(velocity, target, torch.tensor([0.1, 0.2, 0.7, 1.0]))
    assert {name: value.item() for name, value in metrics.items()} == {
        "error_low_noise": 2.5,
        "error_high_noise": 12.5,
    }
    with pytest.raises(ValueError, match="sigma has shape"):
        flow_matching_loss(velocity, target, torch.zeros(4, 1))
