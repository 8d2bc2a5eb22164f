"""Grids, latents and media of a rollout against `pipeline(...)`."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.models.rollout import RolloutOutput
from flow_factory.samples import VideoWithSound
from tests.models.support import generators
from tests.parity.bench import Bench
from tests.parity.case import Setting
from tests.parity.media import inverted


def named(result: Any) -> dict[str, Tensor]:
    """The pipeline's latents by component."""
    return {"latent": result} if isinstance(result, Tensor) else dict(result)


def assert_latents(got: dict[str, Tensor], expected: Any, place: str) -> None:
    """Equal to 1e-5 (of their standard deviation, where that is above 1), and not because there is nothing in them."""
    __tracebackhide__ = True  # the numbers below say it; dumps of tensors would bury them
    expected = named(expected)
    assert got.keys() == expected.keys()
    for name, latents in got.items():
        assert torch.isfinite(latents).all() and float(latents.std()) > 0.05, f"{place}, {name}: nothing to compare"
        tolerance = 1e-5 * max(1.0, float(expected[name].std()))
        torch.testing.assert_close(
            latents, expected[name], rtol=0, atol=tolerance, msg=lambda m, n=name: f"{place}, {n}: {m}"
        )


def assert_media(got: Sequence[Any], expected: Sequence[Any], place: str) -> None:
    """Pictures, lists of frames, or pairs of these with a waveform, as the adapter and the pipeline make them."""
    __tracebackhide__ = True
    for own, theirs in zip(got, expected, strict=True):
        if isinstance(own, VideoWithSound):
            frames, waveform = theirs
            assert_pixels(own.frames, frames, place)
            assert_sound(own.sound.waveform, waveform, place)
        else:
            assert_pixels(own, theirs, place)


def assert_pixels(own: Tensor, theirs: Any, place: str) -> None:
    """Equal to one grey level, which is what a difference of 1e-5 can tip."""
    __tracebackhide__ = True
    pixels = np.stack([np.asarray(frame) for frame in theirs]) if isinstance(theirs, list) else np.asarray(theirs)
    ours = own.movedim(-3, -1).numpy()
    assert ours.dtype == np.uint8 and ours.shape == pixels.shape, f"{place}: {ours.shape}, {pixels.shape}"
    assert pixels.std() > 2, f"{place}: the picture is empty"
    difference = np.abs(ours.astype(int) - pixels.astype(int))
    assert difference.max() <= 1 and (difference > 0).mean() < 0.01, f"{place}: {difference.max()} levels"


def assert_sound(own: Tensor, theirs: Tensor, place: str) -> None:
    """Waveforms [channels, samples] equal to 1e-5, and not silent."""
    __tracebackhide__ = True
    assert own.dtype == torch.float32 and float(theirs.std()) > 1e-2, f"{place}: nothing to hear"
    torch.testing.assert_close(own, theirs.float(), rtol=0, atol=1e-5, msg=lambda m: f"{place}, sound: {m}")


@pytest.mark.parametrize("number", [0, 1, 2])
def test_grid_is_the_pipelines_bit_for_bit(bench: Bench, number: int) -> None:
    """Pitfall 52: the trainer's sigma grid differs from the pipeline's. For 1, 4 and 10 steps, unless the case says."""
    setting, steps = bench.case.settings[0], bench.case.grid_steps[number]
    generation = bench.generation(setting)
    condition = bench.condition(bench.fresh, setting, bench.batch)
    for name, scheduler in bench.schedulers.items():
        with bench.scheduled(scheduler):
            bench.reference(setting, rows=(0,), steps=steps)
            height, width = bench.case.size
            state = bench.fresh.prepare_latents(condition, generators(list(bench.batch)), height, width, generation)
            before = copy.deepcopy(bench.fresh.pipeline.scheduler.__dict__)
            sigmas, timesteps = bench.case.grid(bench.pipeline.scheduler)
            if sigmas.isnan().any():  # a terminal shift divides 0 by 0 for a single step
                with pytest.raises(InputError, match="not finite"):
                    bench.fresh.sigma_grid(steps, state, condition, generation)
                continue
            grid = bench.fresh.sigma_grid(steps, state, condition, generation)
            assert torch.equal(grid.primary, sigmas), f"{name}: {grid.primary} {sigmas}"
            assert torch.equal(next(iter(grid.timesteps.values())), timesteps), name
            after = bench.fresh.pipeline.scheduler.__dict__
            assert str(before) == str(after), f"{name}: asking for the grid changed the pipeline's scheduler"


def test_solver_pipeline_equals_the_pipeline(bench: Bench) -> None:
    for name, scheduler in bench.schedulers.items():
        with bench.scheduled(scheduler):
            for setting in _settings(bench, name):
                place = f"{name}, {setting.name}"
                out = bench.roll(bench.fresh, setting, solver="pipeline")
                _assert_same(bench, out, setting, place)


def test_ode_steps_equal_the_pipeline_with_euler(bench: Bench) -> None:
    """With the checkpoint's scheduler if its steps are Euler's, else with Euler steps on its grid."""
    for name, scheduler in bench.schedulers.items():
        with bench.scheduled(scheduler):
            for setting in _settings(bench, name):
                out = bench.roll(bench.fresh, setting, dynamics="ODE")
                bench.reference(setting)  # fills the scheduler's grid
                bench.pipeline.scheduler = bench.euler_counterpart(scheduler)
                _assert_same(bench, out, setting, f"{name}, {setting.name}")
                bench.pipeline.scheduler = scheduler


def _settings(bench: Bench, scheduler: str) -> Sequence[Setting]:
    """All settings for the checkpoint's own scheduler, the last one for the others."""
    return bench.case.settings if scheduler == "own" else bench.case.settings[-1:]


def _assert_same(bench: Bench, out: RolloutOutput, setting: Setting, place: str) -> None:
    assert out.media is not None
    assert_latents(bench.latents(out), bench.reference(setting), place)
    assert_media(out.media, bench.reference(setting, "pil"), place)


def test_rows_equal_the_pipelines_single_calls(bench: Bench) -> None:
    """Row i of a batch of three is the call with that row's inputs and generator alone."""
    for setting in bench.case.settings:
        latents = bench.latents(bench.roll(bench.fresh, setting, solver="pipeline", decode=False))
        for row in range(len(bench.case.prompts)):
            own = {name: x[row : row + 1] for name, x in latents.items()}
            assert_latents(own, bench.reference(setting, rows=(row,)), f"{setting.name}, row {row}")


def test_every_input_changes_the_result(bench: Bench) -> None:
    """Pitfall: an input that is taken and not passed on. Inputs that a setting ignores must change nothing."""
    for setting in bench.case.settings:
        before = bench.latents(bench.roll(bench.fresh, setting, rows=(1,), steps=2, decode=False))
        for name, keywords in perturbations(bench, setting).items():
            arguments = {"setting": setting, "rows": (1,), "steps": 2, "decode": False, **keywords}
            after = bench.latents(bench.roll(bench.fresh, **arguments))
            moved = max(float((after[n] - before[n]).abs().max()) for n in before)
            place = f"{setting.name}, {name}: moved by {moved}"
            assert moved == 0.0 if name in setting.inert else moved > 1e-3, place


def perturbations(bench: Bench, setting: Setting) -> dict[str, dict[str, Any]]:
    """Input name to the arguments of `roll` that change it."""
    guidance = bench.guidance(setting)
    changes: dict[str, dict[str, Any]] = {
        "prompt": {"inputs": {"prompt": "blue car"}},
        "negative_prompt": {"inputs": {"negative_prompt": "dark"}},
    }
    media = bench.case.media[1]
    for slot, items in media.items():
        for number, item in enumerate(items):
            other = (*items[:number], inverted(item), *items[number + 1 :])
            changes[f"{slot}[{number}]"] = {"inputs": {"media": {**media, slot: other}}}
    if guidance.needs_negative():
        changes["guidance"] = {"guidance": replace(guidance, scale=guidance.scale + 1)}
    if guidance.embedded is not None:
        changes["embedded guidance"] = {"guidance": replace(guidance, embedded=guidance.embedded + 1)}
    for name, value in bench.case.varied.items():
        changes[name] = {"setting": replace(setting, generation={**setting.generation, name: value})}
    return changes
