"""What a rollout stores, refuses and promises; joint and masked states through one code path."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.hparams import get_model_spec
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.rollout import RolloutOutput
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.models.step import transition
from flow_factory.samples import ComponentTimes, Grid, LatentState, StepTimes
from tests.models.support import PROMPTS, generators

STEPS = 4


def roll(adapter: SD3_5Adapter, rows: int = 2, **keywords: Any) -> RolloutOutput:
    settings: dict[str, Any] = {
        "initial_generators": generators([100 + i for i in range(rows)]),
        "step_generators": lambda step: generators([10 * step + i for i in range(rows)]),
        "num_inference_steps": STEPS,
        "guidance": adapter.guidance(1.0),
        "height": 32,
        "width": 24,
    }
    return adapter.inference(adapter.encode_prompt(PROMPTS[:rows]), **{**settings, **keywords})


SDE = {"noise_levels": (0.0, 0.7, 0.0, 0.0)}


def test_stored_states(fresh: SD3_5Adapter) -> None:
    assert set(roll(fresh).trajectory.states) == {STEPS}
    assert set(roll(fresh, trajectory_indices="all").trajectory.states) == set(range(STEPS + 1))
    assert set(roll(fresh, trajectory_indices="sde", **SDE).trajectory.states) == {1, 2, STEPS}
    assert set(roll(fresh, trajectory_indices=(0, -1, 2)).trajectory.states) == {0, 2, STEPS}
    out = roll(fresh, trajectory_indices="all", compute_log_prob=True, stores={"mean"}, **SDE)
    assert set(out.trajectory.log_probs) == {1} == set(out.trajectory.means)
    assert out.trajectory.sde_steps == (1,)
    assert not torch.equal(out.trajectory.means[1].only, out.trajectory.states[2].only)
    assert out.trajectory.log_probs[1].shape == (2,)
    assert all(
        not t.requires_grad and not t.is_inference() for s in out.trajectory.states.values() for _, t in s.items()
    )


def test_noise_levels_may_depend_on_the_grid(fresh: SD3_5Adapter) -> None:
    seen = []

    def levels(grid: Any) -> list[float]:
        seen.append(grid)
        return [0.3 if sigma > 0.9 else 0.0 for sigma in grid.primary[:-1].tolist()]

    out = roll(fresh, noise_levels=levels)
    assert seen[0] is out.grid and out.trajectory.noise_levels == (0.3, 0.0, 0.0, 0.0)


def test_a_rollout_depends_on_its_generators_alone(fresh: SD3_5Adapter) -> None:
    torch.manual_seed(0)
    first = roll(fresh, **SDE)
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    second = roll(fresh, **SDE)
    assert torch.equal(torch.random.get_rng_state(), state)
    assert torch.equal(first.trajectory.states[STEPS].only, second.trajectory.states[STEPS].only)
    other = roll(fresh, **SDE, step_generators=lambda step: generators([7, 8]))
    assert not torch.equal(first.trajectory.states[STEPS].only, other.trajectory.states[STEPS].only)


def test_the_rollout_leaves_pipeline_and_arguments_alone(fresh: SD3_5Adapter) -> None:
    """Pitfall 48: a pipeline helper rewrites its arguments."""
    prompts, negatives = list(PROMPTS), ["a", None, "b"]
    fresh.encode_prompt(prompts, negatives, need_negative=True)
    assert prompts == PROMPTS and negatives == ["a", None, "b"]
    before = copy.deepcopy(fresh.pipeline.scheduler.__dict__)
    roll(fresh, solver="pipeline")
    assert str(before) == str(fresh.pipeline.scheduler.__dict__)


@pytest.mark.parametrize(
    ("keywords", "message"),
    [
        ({"noise_levels": (0.7, 0.0)}, "2 noise levels.*4 steps"),
        ({"noise_levels": (0.7, -0.1, 0.0, 0.0)}, "at least 0"),
        ({"noise_levels": (0.7, 0.0, 0.0, 0.0), "dynamics": "ODE"}, "ODE dynamics has no stochastic steps"),
        ({"noise_levels": (0.7, 0.0, 0.0, 0.0), "solver": "pipeline"}, "solver 'pipeline' has no stochastic"),
        ({"noise_levels": (0.7, 0.0, 0.0, 0.0), "step_generators": None}, "step 0 is stochastic"),
        ({"compute_log_prob": True}, "at least one stochastic step"),
        ({"trajectory_indices": (0, 9)}, r"\[9\] are not on a grid of 4"),
        ({"trajectory_indices": "some"}, "'some'"),
        ({"dynamics": "Flow-SED"}, "Flow-SED"),
        ({"guidance": BaseAdapter.guidance(None, 4.5)}, "need_negative"),  # type: ignore[arg-type]
    ],
)
def test_what_does_not_fit_is_refused(fresh: SD3_5Adapter, keywords: dict[str, Any], message: str) -> None:
    with pytest.raises(InputError, match=message):
        roll(fresh, **keywords)


def test_should_stop_is_asked_before_every_step(fresh: SD3_5Adapter) -> None:
    calls = []

    def stop() -> None:
        calls.append(1)
        if len(calls) == 3:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        roll(fresh, should_stop=stop)
    assert len(calls) == 3


def test_final_methods_cannot_be_overridden() -> None:
    with pytest.raises(TypeError, match="final"):

        class Other(SD3_5Adapter):
            def inference(self, *args: Any, **keywords: Any) -> Any:
                return None


def joint(rows: int = 2) -> tuple[LatentState, LatentState, LatentState, ComponentTimes]:
    """A joint state with a pinned first frame in one of its components."""
    g = torch.Generator().manual_seed(0)
    shapes = {"video": (rows, 3, 4, 5), "audio": (rows, 7)}
    mask = torch.ones(rows, 3, 1, 1, dtype=torch.bool)
    mask[:, 0] = False
    state, velocity, noise = (
        LatentState({n: torch.randn(s, generator=g) for n, s in shapes.items()}, {"video": mask}) for _ in range(3)
    )
    s, s_next = torch.full((rows,), 0.8), torch.full((rows,), 0.6)
    times = ComponentTimes({n: StepTimes(s, s_next, 1000 * s) for n in shapes}, torch.full((rows,), 2), 5)
    return state, velocity, noise, times


def test_pinned_elements_keep_their_values_and_do_not_count() -> None:
    state, velocity, noise, times = joint()
    out = transition(state, velocity, times, dynamics="Flow-SDE", noise_level=0.7, noise=noise, compute_log_prob=True)
    assert torch.equal(out.next_state["video"][:, 0], state["video"][:, 0])
    assert not torch.equal(out.next_state["video"][:, 1], state["video"][:, 1])
    assert out.log_prob is not None
    # Mean over the active elements of both components, written out.
    total, count = torch.zeros(2, dtype=torch.float64), 2 * 20 + 7
    for name in state:
        error = (out.next_state[name] - out.mean[name]).double()
        q = out.std[name].double().view(-1, *([1] * (error.ndim - 1)))
        density = torch.distributions.Normal(0.0, q).log_prob(error)
        density = density[:, 1:] if name == "video" else density
        total += density.reshape(2, -1).sum(dim=1)
    torch.testing.assert_close(out.log_prob.double(), total / count, rtol=1e-5, atol=1e-6)
    again = transition(
        state, velocity, times, dynamics="Flow-SDE", noise_level=0.7, next_state=out.next_state, compute_log_prob=True
    )
    assert again.log_prob is not None and torch.equal(again.log_prob, out.log_prob)


def test_a_stochastic_step_needs_noise() -> None:
    state, velocity, _, times = joint()
    with pytest.raises(ValueError, match="noise"):
        transition(state, velocity, times, dynamics="Flow-SDE", noise_level=0.7)
    ode = transition(state, velocity, times, dynamics="Flow-SDE", noise_level=0.0)
    torch.testing.assert_close(ode.next_state["audio"], state["audio"] - 0.2 * velocity["audio"])


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
    adapter.spec = get_model_spec("sd3-5")
    state = LatentState.single(torch.randn(1, 4, 4, 4, generator=torch.Generator().manual_seed(0)))
    sigmas = torch.tensor([1.0, 0.75, 0.5, 0.0])
    grid = Grid.single(sigmas, 1000 * sigmas[:-1])
    for index in range(3):
        times = grid.times(index, 1)
        step = adapter.forward(state, times, None, None, dynamics="ODE", noise_level=0.0)  # type: ignore[arg-type]
        state = step.next_state
    torch.testing.assert_close(state.only, target, rtol=0, atol=1e-6)
