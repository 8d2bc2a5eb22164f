"""The adapter against `pipeline(...)` itself."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from diffusers import (
    DPMSolverMultistepScheduler,
    FlowMatchEulerDiscreteScheduler,
    FlowMatchHeunDiscreteScheduler,
    StableDiffusion3Pipeline,
    UniPCMultistepScheduler,
)
from torch import Tensor

from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import Grid, LatentState
from tests.models.support import PROMPTS, generators

HEIGHT, WIDTH, STEPS = 32, 24, 4
SEEDS = [3, 4, 5]

SCHEDULERS = {
    "euler": FlowMatchEulerDiscreteScheduler(shift=3.0),
    "euler-dynamic": FlowMatchEulerDiscreteScheduler(use_dynamic_shifting=True, base_image_seq_len=16),
    "heun": FlowMatchHeunDiscreteScheduler(shift=3.0),
    "unipc": UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
    "dpm++": DPMSolverMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0),
}


class EulerOn(FlowMatchEulerDiscreteScheduler):
    """Euler steps on the grid of another scheduler."""

    def copy_grid(self, sigmas: Tensor, timesteps: Tensor) -> EulerOn:
        self._grid = (sigmas.clone(), timesteps.clone())
        return self

    def set_timesteps(self, num_inference_steps: Any = None, device: Any = None, **unused: Any) -> None:
        self.sigmas, self.timesteps = (tensor.clone() for tensor in self._grid)
        self.num_inference_steps = len(self.timesteps)
        self._step_index = self._begin_index = None

    def step(self, model_output: Any, timestep: Any, sample: Any, **keywords: Any) -> Any:
        if self._step_index is None:
            self._step_index = 0
        return super().step(model_output, timestep.float(), sample, **keywords)


@pytest.fixture
def scheduled(
    request: pytest.FixtureRequest, fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline
) -> Iterator[None]:
    """Gives both sides the scheduler named by the test's parameter, and the former ones back."""
    former = fresh.pipeline.scheduler, pipeline.scheduler
    fresh.pipeline.scheduler = copy.deepcopy(SCHEDULERS[request.param])
    pipeline.scheduler = copy.deepcopy(SCHEDULERS[request.param])
    yield
    fresh.pipeline.scheduler, pipeline.scheduler = former


def call(pipeline: StableDiffusion3Pipeline, scale: float, output: str = "latent", row: int | None = None) -> Any:
    """What the pipeline gives for all prompts, or for one of them alone."""
    rows = range(len(PROMPTS)) if row is None else [row]
    return pipeline(
        [PROMPTS[i] for i in rows],
        negative_prompt=["blur" if i else "" for i in rows],
        height=HEIGHT,
        width=WIDTH,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        generator=generators([SEEDS[i] for i in rows]),
        max_sequence_length=10,
        output_type=output,
    ).images


def roll(adapter: SD3_5Adapter, scale: float, **keywords: Any) -> tuple[Tensor, Any]:
    """Final latents and media of the adapter for all prompts."""
    condition = adapter.encode_prompt(PROMPTS, [None, "blur", "blur"], need_negative=scale > 1)
    out = adapter.inference(
        condition,
        initial_generators=generators(SEEDS),
        num_inference_steps=STEPS,
        guidance=adapter.guidance(scale),
        height=HEIGHT,
        width=WIDTH,
        **keywords,
    )
    return out.trajectory.states[out.grid.length].only, out.media


def check(got: tuple[Tensor, Any], pipeline: StableDiffusion3Pipeline, scale: float) -> None:
    """Latents to 1e-5; decoded bytes to one level, which is what a difference of 1e-5 can tip."""
    latents, media = got
    torch.testing.assert_close(latents, call(pipeline, scale), rtol=0, atol=1e-5)
    expected = np.stack([np.asarray(image) for image in call(pipeline, scale, "pil")])
    pixels = torch.stack(media).permute(0, 2, 3, 1).numpy()
    assert np.abs(pixels.astype(int) - expected.astype(int)).max() <= 1


@pytest.mark.parametrize("scheduled", ["euler", "euler-dynamic", "heun"], indirect=True)
@pytest.mark.parametrize("steps", [1, 4, 10])
@pytest.mark.usefixtures("scheduled")
def test_grid_is_the_pipelines_bit_for_bit(fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline, steps: int) -> None:
    """Pitfall 52: the trainer's sigma grid differs from the pipeline's."""
    pipeline(
        "star", height=HEIGHT, width=WIDTH, num_inference_steps=steps, max_sequence_length=10, output_type="latent"
    )
    condition = fresh.encode_prompt(["star"])
    state = fresh.prepare_latents(condition, generators([0]), HEIGHT, WIDTH)
    before = copy.deepcopy(fresh.pipeline.scheduler.__dict__)
    grid = fresh.sigma_grid(steps, state, condition)
    assert torch.equal(grid.sigmas["latent"], pipeline.scheduler.sigmas)
    assert torch.equal(grid.timesteps["latent"], pipeline.scheduler.timesteps)
    assert str(before) == str(fresh.pipeline.scheduler.__dict__), "asking for the grid changed the pipeline's scheduler"


@pytest.mark.parametrize("scheduled", list(SCHEDULERS), indirect=True)
@pytest.mark.parametrize("scale", [1.0, 4.5])
@pytest.mark.usefixtures("scheduled")
def test_solver_pipeline_equals_the_pipeline(
    fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline, scale: float
) -> None:
    check(roll(fresh, scale, solver="pipeline"), pipeline, scale)


@pytest.mark.parametrize("scheduled", ["euler", "euler-dynamic"], indirect=True)
@pytest.mark.parametrize("scale", [1.0, 4.5])
@pytest.mark.usefixtures("scheduled")
def test_ode_dynamics_equal_the_pipeline_with_euler(
    fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline, scale: float
) -> None:
    check(roll(fresh, scale, dynamics="ODE"), pipeline, scale)


@pytest.mark.parametrize("scheduled", ["heun", "unipc", "dpm++"], indirect=True)
@pytest.mark.usefixtures("scheduled")
def test_ode_dynamics_equal_the_euler_counterpart(fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline) -> None:
    call(pipeline, 4.5)
    pipeline.scheduler = EulerOn().copy_grid(pipeline.scheduler.sigmas, pipeline.scheduler.timesteps)
    check(roll(fresh, 4.5, dynamics="ODE"), pipeline, 4.5)


@pytest.mark.parametrize("scale", [1.0, 4.5])
def test_rows_equal_the_pipelines_single_calls(
    fresh: SD3_5Adapter, pipeline: StableDiffusion3Pipeline, scale: float
) -> None:
    latents, _ = roll(fresh, scale)
    for row in range(len(PROMPTS)):
        torch.testing.assert_close(latents[row], call(pipeline, scale, row=row)[0], rtol=0, atol=1e-5)


def test_decoded_pixels_are_those_of_pil_output(fresh: SD3_5Adapter) -> None:
    fresh.pipeline.set_progress_bar_config(disable=True)
    images = call(fresh.pipeline, 4.5, "pil")
    media = fresh.decode_latents(LatentState.single(call(fresh.pipeline, 4.5)))
    assert [m.dtype for m in media] == [torch.uint8] * 3 and media[0].shape == (3, HEIGHT, WIDTH)
    for image, tensor in zip(images, media, strict=True):
        assert np.array_equal(np.asarray(image), tensor.permute(1, 2, 0).numpy())


def test_the_rollout_walks_down_to_the_data() -> None:
    """Pitfall 8: velocity direction of models that predict data - noise. v = (x - x0) / sigma must arrive at x0."""
    target = torch.full((1, 4, 4, 4), 0.25)

    class Exact(SD3_5Adapter):
        def __init__(self) -> None:
            pass

        def predict_velocity(self, state: Any, times: Any, condition: Any, guidance: Any) -> LatentState:
            return LatentState.single((state.only - target) / times.only.sigma.view(-1, 1, 1, 1))

    adapter = Exact()
    adapter.device, adapter._autocast_dtype = torch.device("cpu"), None
    state = LatentState.single(torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0)))
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.0])
    grid = Grid.single(sigmas, 1000 * sigmas[:-1])
    for index in range(3):
        times = grid.times(index, 1)
        step = adapter.forward(state, times, None, None, dynamics="ODE", noise_level=0.0)  # type: ignore[arg-type]
        state = step.next_state
    torch.testing.assert_close(state.only, target, rtol=0, atol=1e-6)
