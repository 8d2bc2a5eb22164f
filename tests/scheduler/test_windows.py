"""Which steps are stochastic."""

from __future__ import annotations

import random
from collections import Counter

import pytest
import torch
from diffusers.schedulers import FlowMatchEulerDiscreteScheduler

from flow_factory.errors import InputError
from flow_factory.scheduler import Candidates, Dynamics, pipeline_grid, resolve_candidates, select_window

STOCHASTIC = [d for d in Dynamics if d.stochastic]
SD3 = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=3.0), 10).primary


def test_default_candidates_by_hand():
    """Flow-SDE 0.7 on SD3's grid of 10: q_i = 0.7 sqrt(s / (1 - s~)) sqrt(h) against the next sigma, by Python."""
    s = SD3.tolist()
    expected, exceeding = [], []
    for i in range(9):
        tilde = s[1] if i == 0 else s[i]
        q = 0.7 * (s[i] / (1 - tilde)) ** 0.5 * (s[i] - s[i + 1]) ** 0.5
        (expected if q <= s[i + 1] else exceeding).append(i)
    got = resolve_candidates("Flow-SDE", SD3, 0.7)
    assert got == Candidates(tuple(expected), tuple(exceeding))
    assert got == Candidates((0, 1, 2, 3, 4, 5, 6), (7, 8))


@pytest.mark.parametrize("name", STOCHASTIC)
@pytest.mark.parametrize("steps", [2, 4, 10, 28])
def test_last_step_is_never_a_candidate(name, steps):
    """Pitfall 18: the step to sigma = 0 is never stochastic, so never trained."""
    plain = [1 - i / steps for i in range(steps)]
    grid = pipeline_grid(FlowMatchEulerDiscreteScheduler(shift=3.0), steps, sigmas=plain).primary
    candidates = resolve_candidates(name, grid, 0.3)
    assert steps - 1 not in candidates.indices + candidates.exceeding
    for policy in ("random", "contiguous", "sliding"):
        for cycle in range(40):
            window = select_window(candidates, 1, policy, seed=0, cycle=cycle, interval=1)
            assert max(window) < steps - 1
    with pytest.raises(InputError, match=rf"sde_steps contains {steps - 1}, the last of {steps} steps"):
        resolve_candidates(name, grid, 0.3, [0, steps - 1])


def test_explicit_steps_are_taken_as_given_and_exceeding_ones_named():
    assert resolve_candidates("Flow-SDE", SD3, 0.7, [8, 2, 0]) == Candidates((0, 2, 8), (8,))
    assert resolve_candidates("CPS", SD3, 0.7, [8]) == Candidates((8,), ())
    for steps, message in (
        ([0, 12], "contains 12, but the grid has 10 steps"),
        ([-1], "contains -1"),
        ([1, 1], "names a step twice"),
    ):
        with pytest.raises(InputError, match=message):
            resolve_candidates("Flow-SDE", SD3, 0.7, steps)


def test_no_noise_no_candidates():
    assert resolve_candidates("ODE", SD3, 0.7) == Candidates((), ())
    assert resolve_candidates("CPS", SD3, 0.0) == Candidates((), ())
    assert resolve_candidates("CPS", torch.tensor([1.0, 0.0]), 0.5).indices == ()
    with pytest.raises(InputError, match=r"no step can be stochastic\. Use SDE dynamics"):
        select_window(Candidates((), ()), 1, seed=0, cycle=0)
    two_steps = torch.tensor([1.0, 0.0089, 0.0])
    with pytest.raises(InputError, match=r"steps \[0\] would add more noise .* Lower scheduler.noise_level"):
        select_window(resolve_candidates("Flow-SDE", two_steps, 0.7), 1, seed=0, cycle=0)


def test_window_depends_on_seed_and_cycle_only():
    """Pitfall 17: one window for all members and ranks; also pitfall 14, nothing rests on Python's salted hash."""
    first = [select_window(range(9), 3, "random", seed=42, cycle=c) for c in range(6)]
    random.seed(123)
    torch.manual_seed(5)
    random.random()
    assert [select_window(range(9), 3, "random", seed=42, cycle=c) for c in range(6)] == first
    assert len(set(first)) > 1
    assert [select_window(range(9), 3, "random", seed=43, cycle=c) for c in range(6)] != first
    # Written down: a run resumed elsewhere, by another Python with another hash salt, draws these.
    assert first == [(3, 5, 6), (0, 3, 8), (4, 5, 7), (0, 2, 8), (0, 1, 7), (0, 3, 6)]


def test_random_windows_are_uniform_and_without_replacement():
    counts: Counter[int] = Counter()
    for cycle in range(3000):
        window = select_window([0, 2, 3, 5, 8], 2, "random", seed=7, cycle=cycle)
        assert len(set(window)) == 2 and list(window) == sorted(window)
        counts.update(window)
    assert set(counts) == {0, 2, 3, 5, 8}
    # 3000 x 2 / 5 = 1200 each; the standard deviation is 27.
    assert all(abs(n - 1200) < 5 * 27 for n in counts.values())


def test_contiguous_windows_start_uniformly_in_their_range():
    """Flow-GRPO-Fast: size 2 in (0, 10) starts in 0..7 here, since the last step is no candidate."""
    counts = Counter(
        select_window(range(9), 2, "contiguous", seed=1, cycle=c, window_range=(0, 10)) for c in range(2400)
    )
    assert set(counts) == {(i, i + 1) for i in range(8)}
    assert all(abs(n - 300) < 5 * 17 for n in counts.values())
    half = {select_window(range(9), 3, "contiguous", seed=1, cycle=c, window_range=(0, 5)) for c in range(200)}
    assert half == {(0, 1, 2), (1, 2, 3), (2, 3, 4)}


def test_contiguous_windows_do_not_jump_over_gaps():
    windows = {select_window([0, 1, 4, 5, 6], 2, "contiguous", seed=1, cycle=c) for c in range(100)}
    assert windows == {(0, 1), (4, 5), (5, 6)}
    with pytest.raises(InputError, match="needs 3 neighbouring steps"):
        select_window([0, 1, 4, 5], 3, "contiguous", seed=1, cycle=0)


def test_sliding_window_of_mixgrpo():
    """Size 4, stride 1 every 25 cycles, high noise first, back to 0 after the last full window; T 25."""
    candidates = range(24)
    for cycle in range(0, 25 * 21 * 2, 5):
        start = (cycle // 25) % 21  # the last full window is 20..23
        window = select_window(candidates, 4, "sliding", seed=cycle, cycle=cycle, interval=25, stride=1)
        assert window == tuple(range(start, start + 4))
    assert select_window(candidates, 4, "sliding", seed=0, cycle=25 * 21, interval=25) == (0, 1, 2, 3)
    wide = [select_window(range(9), 3, "sliding", seed=0, cycle=c, interval=1, stride=2) for c in range(5)]
    assert wide == [(0, 1, 2), (2, 3, 4), (4, 5, 6), (6, 7, 8), (0, 1, 2)]


def test_sizes_and_ranges():
    candidates = Candidates((0, 1, 2, 3), ())
    assert select_window(candidates, None, seed=0, cycle=0) == (0, 1, 2, 3)
    assert select_window(candidates, None, seed=0, cycle=0, window_range=(1, 3)) == (1, 2)
    assert select_window(candidates, 4, "contiguous", seed=0, cycle=0) == (0, 1, 2, 3)
    for size in (0, 5, -1):
        with pytest.raises(InputError, match=rf"num_sde_steps is {size}, but 4 step"):
            select_window(candidates, size, seed=0, cycle=0)
    with pytest.raises(InputError, match=r"none is in scheduler.sde_window_range \(7, 9\)"):
        select_window(candidates, 1, seed=0, cycle=0, window_range=(7, 9))
    with pytest.raises(InputError, match="unknown window policy 'slide'"):
        select_window(candidates, 1, "slide", seed=0, cycle=0)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="sliding_interval 0"):
        select_window(candidates, 1, "sliding", seed=0, cycle=0, interval=0)
