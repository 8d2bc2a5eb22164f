"""Random states of a joint model in float64: two components of different sizes, one with pinned elements."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from flow_factory.samples import LatentState

SHAPES = {"video": (2, 3, 4), "audio": (5,)}


@dataclass
class Case:
    """Noised data of B rows with random velocities; `velocity` is what gradients are taken of."""

    clean: LatentState
    noise: LatentState
    sigmas: dict[str, Tensor]
    state: LatentState
    target: LatentState
    velocity: LatentState
    other: LatentState

    def flat(self, values: LatentState, row: int) -> Tensor:
        """The active elements of one row, all components joined."""
        mask = self.clean.masks["video"].expand_as(values["video"])[row]
        return torch.cat([values["video"][row][mask], values["audio"][row]])


def make_case(batch: int = 4, seed: int = 0) -> Case:
    """Rows at different noise levels; the first frame of the video component is pinned."""
    generator = torch.Generator().manual_seed(seed)

    def draw() -> dict[str, Tensor]:
        return {n: torch.randn(batch, *s, generator=generator, dtype=torch.float64) for n, s in SHAPES.items()}

    mask = torch.ones(batch, 2, 1, 1, dtype=torch.bool)
    mask[:, 0] = False
    masks = {"video": mask}
    clean, noise = draw(), draw()
    sigma = torch.rand(batch, generator=generator, dtype=torch.float64) * 0.8 + 0.1
    shaped = {n: sigma.reshape(-1, *[1] * len(s)) for n, s in SHAPES.items()}
    state = {n: (1 - shaped[n]) * clean[n] + shaped[n] * noise[n] for n in SHAPES}
    state["video"] = torch.where(mask, state["video"], clean["video"])
    target = {n: noise[n] - clean[n] for n in SHAPES}
    velocity = {n: v.requires_grad_() for n, v in draw().items()}
    return Case(
        LatentState(clean, masks),
        LatentState(noise, masks),
        dict.fromkeys(SHAPES, sigma),
        LatentState(state, masks),
        LatentState(target, masks),
        LatentState(velocity),
        LatentState(draw()),
    )


def gradients(loss: Tensor, case: Case) -> dict[str, Tensor]:
    """d loss / d velocity by component."""
    found = torch.autograd.grad(loss, [case.velocity[n] for n in SHAPES], retain_graph=True)
    return dict(zip(SHAPES, found, strict=True))


def assert_close(a: dict[str, Tensor], b: dict[str, Tensor], relative: float = 1e-6) -> None:
    """Equal to a relative 1e-6 of the largest element; neither may be all zero."""
    for name, value in b.items():
        scale = float(value.abs().max())
        assert scale > 0, name
        assert float((a[name] - value).abs().max()) <= relative * scale, name
