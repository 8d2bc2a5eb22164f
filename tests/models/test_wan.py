"""What is peculiar to Wan: two experts in one batch, a pinned first frame, a late start; and inputs that do not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, load_config_from_mapping
from flow_factory.hparams.local_model import check_pipeline_folder, inspect_local_model
from flow_factory.samples import (
    ComponentTimes,
    Condition,
    ConditionInputs,
    LatentState,
    Media,
    NoiseKey,
    StepTimes,
    Trajectory,
    V2VSample,
)
from tests.models.benches import Open
from tests.models.support import generators
from tests.parity.bench import SEEDS, Bench, set_path
from tests.parity.media import clip, picture


def problems(bench: Bench, changes: Mapping[str, Any]) -> list[str]:
    """What `check` says of the case's configuration with dotted changes."""
    mapping = bench.mapping()
    for path, value in {"eval.eval_freq": 0, **changes}.items():
        set_path(mapping, path, value)
    config = load_config_from_mapping(mapping, origin="test")
    return [str(problem).replace(" (test)", "") for problem in inspect_local_model(config).problems]


def inputs(bench: Bench, media: Media) -> list[ConditionInputs]:
    return [ConditionInputs("a dot", bench.case.size, None, media)]


@pytest.mark.parametrize("guided", [False, True])
def test_rows_of_a_batch_may_need_different_experts(bench: Open, guided: bool) -> None:
    """Freely drawn times differ between rows: each row is what it is alone, and gradients reach both networks."""
    own = bench("wan2_t2v-a14b")
    setting = own.case.setting("guided" if guided else "unguided")
    adapter, guidance = own.stirred, own.guidance(setting)
    condition = own.condition(adapter, setting)
    state = adapter.prepare_latents(condition, generators(list(SEEDS)), *own.case.size)
    sigma = torch.tensor([0.3, 0.95, 0.79])  # the boundary is at 0.8
    times = ComponentTimes({"latent": StepTimes(sigma, sigma, adapter.timestep_for_sigma(sigma, state))})
    with adapter.pin():
        velocity = adapter.predict(state, times, condition, guidance).only
        velocity.square().mean().backward()
    reached = {
        n.split(".")[0] for n, p in adapter.trainable_parameters().items() if p.grad is not None and p.grad.any()
    }
    assert reached == {"transformer", "transformer_2"}
    for parameter in adapter.trainable_parameters().values():
        parameter.grad = None
    for row in range(3):
        alone = adapter.predict(state.take([row]), times.take([row]), condition.row(row), guidance).only
        torch.testing.assert_close(velocity[row : row + 1].detach(), alone.detach(), rtol=0, atol=1e-5)


def test_each_expert_is_used_on_its_side_of_the_boundary(bench: Open) -> None:
    own = bench("wan2_t2v-a14b")
    adapter: Any = own.fresh
    assert adapter._experts(torch.tensor([999, 800, 799, 0])) == {"transformer": [0, 1], "transformer_2": [2, 3]}
    assert adapter._experts(torch.tensor([999, 801])) == {"transformer": [0, 1]}


def test_a_lora_of_two_experts_is_one_file(bench: Open, tmp_path: Path) -> None:
    """Written with both, and a run that starts from it has both again."""
    own = bench("wan2_t2v-a14b")
    own.stirred.export_lora(tmp_path)
    again = own.adapter({"model.resume_path": str(tmp_path)})
    # alpha / r is 2, a power of two, so that folding it loses nothing.
    pairs = zip(own.stirred.trainable_parameters().items(), again.trainable_parameters().items(), strict=True)
    assert all(name == other and torch.equal(value, read) for (name, value), (other, read) in pairs)


def test_the_first_frame_stays_what_was_given(bench: Open) -> None:
    """Pinned latents take no part in noise and log-probabilities, and are the condition's at every point."""
    own = bench("wan2_i2v-5b")
    adapter: Any = own.fresh
    setting = own.case.setting("unguided")
    given = own.condition(adapter, setting).frames
    out = own.roll(
        adapter,
        setting,
        dynamics="Flow-SDE",
        noise_levels=[0.7, 0.0, 0.7, 0.0],
        step_generators=lambda step: generators([10 * step + i for i in range(3)]),
        compute_log_prob=True,
        trajectory_indices="all",
        decode=False,
    )
    for state in out.trajectory.states.values():
        assert torch.equal(state.only[:, :, :1], given)
        assert not state.masks["latent"][:, :, 0].any() and state.masks["latent"][:, :, 1:].all()
    first, second = out.trajectory.states[0].only, out.trajectory.states[1].only
    assert (first[:, :, 1:] != second[:, :, 1:]).all()


def test_losses_on_stored_videos_see_the_given_first_frame(bench: Open) -> None:
    """Whatever stands in the state's pinned part, the network reads the condition's frame."""
    own = bench("wan2_i2v-5b")
    adapter = own.fresh
    condition = own.condition(adapter, own.case.setting("unguided"))
    state = adapter.encode_output_state([clip(i, 5, own.case.size).frames for i in range(3)])
    assert not state.masks["latent"][:, :, 0].any()
    other = LatentState.single(state.only.clone(), state.masks["latent"])
    other.only[:, :, 0] += 1.0
    seen = [adapter.network_state(s, condition).only for s in (state, other)]
    assert torch.equal(*seen) and torch.equal(seen[0][:, :, 1:], state.only[:, :, 1:])


def test_a_late_start_is_the_noised_video(bench: Open) -> None:
    """strength 0.5 of 4 steps: two steps, from (1 - s) x0 + s e at the third point of the grid."""
    own = bench("wan2_v2v")
    adapter: Any = own.fresh
    setting = replace(own.case.setting("unguided"), generation={"strength": 0.5})
    out = own.roll(adapter, setting, trajectory_indices=[0, -1], decode=False)
    fields = own.generation(replace(setting, generation={"strength": 1.0}))
    whole = adapter.sigma_grid(4, out.trajectory.states[0], None, fields)
    assert out.grid.length == 2 and torch.equal(out.grid.primary, whole.primary[2:])
    sigma, video = out.grid.primary[0], own.condition(adapter, setting).video
    noise = adapter.prepare_latents(None, generators(list(SEEDS)), *own.case.size).only
    expected = video + sigma * (noise - video)
    torch.testing.assert_close(out.trajectory.states[0].only, expected, rtol=0, atol=1e-6)


def test_a_changed_video_keeps_its_frame_rate(bench: Open) -> None:
    own = bench("wan2_v2v")
    (given,) = own.inputs(rows=(1,))
    fields: dict[str, Any] = {"prompt": "p", "source": "s", "source_id": 0, "index": 0, "group_id": 0, "member": 0}
    trajectory = Trajectory(own.roll(own.fresh, own.case.settings[0], rows=(1,), steps=2, decode=False).grid, (0.0,))
    sample = own.fresh.make_sample(
        media=clip(0).frames,
        inputs=given,
        key=NoiseKey(0, 0, 0, 0),
        condition=Condition(),
        trajectory=trajectory,
        **fields,
    )
    assert isinstance(sample, V2VSample) and sample.fps == 8.0 and sample.condition_video is not None


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("wan2_t2v-2.1", {"train.num_frames": 6}, "train.num_frames: is 6, but .* multiple of 4 frames; use 5 or 9"),
        ("wan2_t2v-2.1", {"eval.num_frames": 80, "eval.eval_freq": 1}, "eval.num_frames: is 80, .* use 77 or 81"),
        ("wan2_v2v", {"train.num_frames": 4}, "train.num_frames: is 4, .* use 1 or 5"),
        ("wan2_t2v-2.1", {"train.guidance_scale_2": 3.0}, "train.guidance_scale_2: belongs to the second expert"),
        ("wan2_t2v-2.1", {"train.resolution": [32, 40]}, r"\[32, 40\] of wan2_t2v must be a multiple of 16"),
        ("wan2_t2v-5b", {"train.resolution": [32, 48]}, r"\[32, 48\] of wan2_t2v must be a multiple of 32"),
        (
            "wan2_t2v-2.1",
            {"model.target_components": ["transformer", "transformer_2"]},
            "model.target_components: .* has no transformer_2; take it out",
        ),
        ("wan2_i2v-2.1", {"train.max_sequence_length": 256}, "train.max_sequence_length: is 256, .* use 512"),
    ],
)
def test_fields_that_do_not_fit_the_checkpoint(bench: Open, name: str, changes: dict[str, Any], message: str) -> None:
    found = problems(bench(name), changes)
    assert len(found) == 1 and re.search(message, found[0]), found
    assert problems(bench(name), {}) == []


def test_fields_are_checked_again_when_the_checkpoint_is_there(bench: Open) -> None:
    """Of a checkpoint on the Hub, `check` knows nothing."""
    with pytest.raises(ConfigError, match=r"train.guidance_scale_2.*belongs to the second expert"):
        bench("wan2_t2v-2.1").adapter({"train.guidance_scale_2": 3.0})


@pytest.mark.parametrize(("name", "other"), [("wan2_v2v", "wan2_t2v-2.1"), ("wan2_i2v-5b", "wan2_t2v-5b")])
def test_text_to_video_checkpoints_load_as_what_else_they_are(bench: Open, name: str, other: str) -> None:
    """The same weights were saved under either class, so both adapters give the same video."""
    own, folder = bench(name), bench(other).folder
    check_pipeline_folder(folder, own.fresh.spec)
    setting = own.case.settings[-1]
    adapter = own.adapter(folder=folder)
    assert type(adapter.pipeline).__name__ == adapter.spec.pipeline_class
    got, expected = (own.roll(a, setting, steps=2, decode=False).trajectory for a in (adapter, own.fresh))
    assert torch.equal(got.states[max(got.states)].only, expected.states[max(expected.states)].only)


@pytest.mark.parametrize(
    ("name", "other", "message"),
    [
        ("wan2_i2v-5b", "wan2_t2v-2.1", "goes from text to a video"),
        ("wan2_v2v", "wan2_t2v-a14b", "has boundary_ratio 0.8, which .* does not heed"),
        ("wan2_v2v", "wan2_t2v-5b", "has expand_timesteps True"),
    ],
)
def test_text_to_video_checkpoints_that_are_nothing_else(bench: Open, name: str, other: str, message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(name).adapter(folder=bench(other).folder)


@pytest.mark.parametrize(("name", "absent"), [("wan2_t2v-a14b", "transformer_2"), ("wan2_i2v-2.1", "image_encoder")])
def test_parts_that_a_checkpoint_needs(bench: Open, tmp_path: Path, name: str, absent: str) -> None:
    own = bench(name)
    copy = tmp_path / "copy"
    copy.mkdir()
    for path in own.folder.iterdir():
        if path.name != absent:
            (copy / path.name).symlink_to(path)
    with pytest.raises(InputError, match=f"lacks {absent}"):
        check_pipeline_folder(copy, own.fresh.spec)


@pytest.mark.parametrize(
    ("name", "media", "message"),
    [
        ("wan2_i2v-5b", {}, "takes one first_frame, but 0 came"),
        ("wan2_i2v-5b", {"first_frame": (picture(0), picture(1))}, "takes one first_frame, but 2 came"),
        ("wan2_i2v-5b", {"first_frame": (picture(0),), "last_frame": (picture(1),)}, "takes a first frame alone"),
        ("wan2_i2v-2.1", {"first_frame": (picture(0),), "last_frame": (picture(1),)}, "takes a first frame alone"),
        ("wan2_i2v-flf2v", {"first_frame": (picture(0),)}, "'a dot' has no last_frame"),
        ("wan2_v2v", {}, "takes one video, but 0 came"),
        ("wan2_v2v", {"video": (clip(0, frames=4),)}, "has 4 frames, but num_frames is 5"),
    ],
)
def test_media_that_do_not_fit(bench: Open, name: str, media: Media, message: str) -> None:
    own = bench(name)
    with pytest.raises(InputError, match=message):
        own.fresh.encode_inputs(inputs(own, media))


def test_a_strength_of_no_step_is_refused(bench: Open) -> None:
    own = bench("wan2_v2v")
    setting = replace(own.case.settings[0], generation={"strength": 0.2})
    with pytest.raises(InputError, match=r"strength 0\.2 of 4 steps is none"):
        own.roll(own.fresh, setting, decode=False)


def test_a_video_to_start_from_teaches_nothing_when_stored(bench: Open) -> None:
    """The network does not see it: an sft run would be one of text to video, and look like more."""
    mapping = bench("wan2_v2v").mapping()
    mapping["train"] = {"trainer_type": "sft", "resolution": [32, 48], "per_device_batch_size": 1}
    del mapping["rewards"], mapping["scheduler"]
    with pytest.raises(ConfigError, match=r"'wan2_v2v' cannot be trained on stored media.*wan2_t2v, whose LoRA fits"):
        load_config_from_mapping(mapping)
