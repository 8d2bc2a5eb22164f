"""Noised states: joint states with pinned elements, grid times bit for bit, draws that depend on identities only."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch

from flow_factory.hparams.training_times import TimeSampling
from flow_factory.samples import BaseSample, Condition, Grid, LatentState, NoiseKey, SampleBatch, Trajectory
from flow_factory.trainers.noising import NoisedState, noised_at

SIGMAS = torch.tensor([1.0, 0.9, 0.7, 0.4, 0.0])
GRID = Grid(
    {"video": SIGMAS, "audio": SIGMAS**2},
    {"video": SIGMAS[:-1] * 1000, "audio": SIGMAS[:-1] * 7},
)
ALL = TimeSampling("discrete", 0, (0.0, 0.8))


def latents(group: int, member: int) -> LatentState:
    """Final latents of a sample: a video whose first frame is pinned, and sound."""
    generator = torch.Generator().manual_seed(100 * group + member)
    video, audio = torch.randn(2, 3, generator=generator), torch.randn(4, generator=generator)
    return LatentState({"video": video, "audio": audio}, {"video": torch.tensor([[False], [True]])})


def batch_of(identities: Sequence[tuple[int, int]], dtype: torch.dtype = torch.float32) -> SampleBatch:
    samples = []
    for group, member in identities:
        state = latents(group, member).to(dtype=dtype)
        trajectory = Trajectory(GRID, (0.0,) * 4, {4: state})
        key = NoiseKey(3, 5, group, member)
        samples.append(BaseSample("p", "toy", 1, 0, group, member, key, Condition(), trajectory))
    return SampleBatch(
        samples, Condition(), Trajectory.stack([s.trajectory for s in samples]), torch.zeros(len(samples))
    )


def at(
    identities: Sequence[tuple[int, int]], number: int = 0, sampling: TimeSampling = ALL, **how: object
) -> NoisedState:
    return noised_at(batch_of(identities), number, sampling, GRID, lambda sigma, state: 1000 * sigma, **how)  # type: ignore[arg-type]


def test_state_and_target_lead_back_to_the_data() -> None:
    point = at([(1, 0), (1, 1), (2, 0)])
    for name, x0 in point.clean.items():
        sigma = point.times[name].sigma.reshape(-1, *[1] * (x0.dim() - 1))
        assert torch.allclose(point.state[name] - sigma * point.target[name], x0, atol=1e-6)
    assert torch.equal(point.state["video"][:, 0], point.clean["video"][:, 0]), "pinned frames keep their values"
    assert torch.equal(point.target["video"][:, 0], torch.zeros(3, 3))
    assert point.state.masks["video"].shape == (3, 2, 1)


def test_times_are_those_of_the_grid_bit_for_bit_for_each_component() -> None:
    """Pitfall 6: the grid's own float sigmas and the network's own times, no lookup by a rounded number."""
    point = at([(1, 0), (1, 1), (2, 0)], number=1)
    index = point.times.index
    assert index is not None and point.times.length == 4
    for name in ("video", "audio"):
        assert torch.equal(point.times[name].sigma, GRID.sigmas[name][index])
        assert torch.equal(point.times[name].timestep, GRID.timesteps[name][index])


def test_all_times_of_a_sample_are_the_range() -> None:
    drawn = [at([(1, 0), (2, 1)], number).times.index for number in range(3)]
    rows = torch.stack([index for index in drawn if index is not None], dim=1)
    assert all(sorted(row.tolist()) == [0, 1, 2] for row in rows)


def test_free_times_ask_the_adapter_for_the_networks_time() -> None:
    sampling = TimeSampling("logit_normal", 2, (0.0, 1.0), 3.0)
    point = noised_at(batch_of([(1, 0), (1, 1)]), 1, sampling, GRID, lambda sigma, state: 77 * sigma)
    assert point.times.index is None
    assert torch.equal(point.times["audio"].timestep, 77 * point.times["audio"].sigma)
    assert torch.equal(point.times["audio"].sigma, point.times["video"].sigma)
    assert torch.equal(point.sigma, point.sigmas["video"])


@pytest.mark.parametrize("how", [{}, {"shared_noise": True, "shared_times": True}])
def test_a_row_does_not_depend_on_its_batch(how: dict[str, bool]) -> None:
    """The same bits whatever rank, order or size of micro-batch a sample is in."""
    whole = at([(1, 0), (1, 1), (2, 0), (2, 1)], number=2, **how)
    part = at([(2, 1), (1, 1)], number=2, **how)
    for row, other in ((3, 0), (1, 1)):
        for name in ("video", "audio"):
            assert torch.equal(whole.state[name][row], part.state[name][other])
            assert torch.equal(whole.target[name][row], part.target[name][other])


def noises(point: NoisedState) -> torch.Tensor:
    return point.target["audio"] + point.clean["audio"]


def test_groups_share_what_they_are_told_to_share() -> None:
    identities = [(1, 0), (1, 1), (2, 0), (2, 1)]
    own = noises(at(identities))
    assert len({tuple(row.tolist()) for row in own}) == 4
    shared = at(identities, shared_noise=True, shared_times=True)
    noise = noises(shared)
    assert torch.allclose(noise[0], noise[1], atol=1e-6) and torch.allclose(noise[2], noise[3], atol=1e-6)
    assert not torch.allclose(noise[0], noise[2], atol=1e-2)
    assert not torch.allclose(noise[0], own[0], atol=1e-2), "the group's noise is not its first member's"
    for seed in range(3):
        index = at(identities, number=seed, shared_times=True).times.index
        assert index is not None and index[0] == index[1] and index[2] == index[3]


def test_times_and_passes_draw_anew() -> None:
    first = noises(at([(1, 0)], number=0))
    assert not torch.allclose(first, noises(at([(1, 0)], number=1)), atol=1e-2)
    assert not torch.allclose(first, noises(at([(1, 0)], number=0, repeat=1)), atol=1e-2)
    assert torch.equal(first, noises(at([(1, 0)], number=0)))


def test_stored_precision_does_not_change_the_arithmetic() -> None:
    point = noised_at(batch_of([(1, 0)], torch.float16), 0, ALL, GRID, lambda sigma, state: sigma)
    assert {x.dtype for _, x in point.state.items()} == {torch.float32}
    assert torch.equal(point.clean["audio"][0], latents(1, 0)["audio"].half().float())
