"""The deterministic steps of a rollout under DPM-Solver++ 2M: its memory, and points that are left out."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import LatentState
from flow_factory.scheduler import dpm_solver_2m_step
from tests.models.support import PROMPTS, generators

STEPS = 8


def roll(adapter: SD3_5Adapter, **keywords: Any) -> Any:
    return adapter.inference(
        adapter.encode_prompt(PROMPTS[:2]),
        initial_generators=generators([1, 2]),
        step_generators=lambda step: generators([10 * step, 10 * step + 1]),
        num_inference_steps=STEPS,
        guidance=adapter.guidance(1.0),
        height=32,
        width=24,
        decode=False,
        trajectory_indices=keywords.get("path", "all"),
        **keywords,
    ).trajectory


@pytest.mark.parametrize("path", [None, (0, 1, 2, 3, 5, 7)])
def test_every_step_is_the_solvers(stirred: SD3_5Adapter, path: tuple[int, ...] | None) -> None:
    """Recomputed from the stored states; after the stochastic step 2 the memory starts anew."""
    levels = tuple(0.5 if i == 2 else 0.0 for i in range(STEPS))
    keywords = {} if path is None else {"path": path}
    found = roll(stirred, noise_levels=levels, outside_solver="dpm2m", **keywords)
    condition = stirred.encode_prompt(PROMPTS[:2])
    steps = path or tuple(range(STEPS))
    previous = None
    first_order = 0
    for index, end in zip(steps, (*steps[1:], STEPS), strict=True):
        if end not in found.states:
            continue
        x, times = found.states[index].only, found.grid.times(index, 2, next_index=end)
        if index == 2:
            previous = None
            continue
        with torch.no_grad():
            v = stirred.predict(LatentState.single(x), times, condition, stirred.guidance(1.0)).only
        s = times.only
        expected = dpm_solver_2m_step(x, v, s.sigma, s.sigma_next, previous)
        euler = x - (s.sigma - s.sigma_next).view(-1, 1, 1, 1) * v
        first_order += torch.equal(expected, euler)
        previous = (x - s.sigma.view(-1, 1, 1, 1) * v, s.sigma)
        assert torch.equal(found.states[end].only, expected), index
    # The first step, the one after it (which follows a step from s = 1), the first after the window, and the long step
    # to 0.009; with all points also the last, to 0, which is not kept otherwise.
    assert first_order == (5 if path is None else 4)


def test_paths_that_do_not_hold(stirred: SD3_5Adapter) -> None:
    for path in ((1, 2, 3), (0, 2, 1), (0, 3, 8), ()):
        with pytest.raises(InputError, match=r"must begin at step 0 and ascend on a grid of 8 steps"):
            roll(stirred, path=path)
    levels = tuple(0.5 if i == 3 else 0.0 for i in range(STEPS))
    for path in ((0, 3, 5), (0, 4)):
        with pytest.raises(InputError, match=r"stochastic steps.*need every point of the grid"):
            roll(stirred, noise_levels=levels, path=path)
    with pytest.raises(InputError, match="the pipeline's own solver"):
        roll(stirred, solver="pipeline", path=(0, 2))
