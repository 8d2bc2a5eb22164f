"""What is peculiar to LTX-2: guidance of three kinds, texts behind connectors, a pinned frame; what does not fit."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import diffusers
import pytest
import torch
from diffusers import LTX2Pipeline
from torch import Tensor

from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, load_config_from_mapping
from flow_factory.hparams.local_model import check_pipeline_folder, inspect_local_model
from flow_factory.models.images import to_pil
from flow_factory.models.ltx2 import image_to_audio_video
from flow_factory.models.ltx2.guidance import LTX2Guidance, Predictions
from flow_factory.samples import ComponentTimes, ConditionInputs, Media, NoiseKey, StepTimes, T2AVSample, Trajectory
from flow_factory.trainers.export_request import ExportRequest
from flow_factory.trainers.exporting import export_weights
from tests.models.benches import Open
from tests.models.support import generators
from tests.parity.bench import SEEDS, Bench, set_path
from tests.parity.ltx2 import parts, vae
from tests.parity.media import picture
from tests.parity.parts import seeded
from tests.parity.test_sampling import assert_media

# Guidance ------------------------------------------------------------------------------------------------------------

FULL = LTX2Guidance(
    scale=3.0,
    rescale=0.7,
    audio_scale=7.0,
    audio_rescale=0.4,
    stg_scale=1.0,
    audio_stg_scale=0.5,
    modality_scale=2.0,
    audio_modality_scale=3.0,
    stg_blocks=(1,),
)


def draw(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64)


def written_out(
    x: Tensor, sigma: float, velocities: tuple[Tensor, ...], text: float, stg: float, modality: float, phi: float
) -> Tensor:
    """One row in clean samples, as the pipeline combines them."""
    plain, negative, perturbed, isolated = (x - sigma * v for v in velocities)
    guided = plain + (text - 1) * (plain - negative) + stg * (plain - perturbed) + (modality - 1) * (plain - isolated)
    if phi > 0:
        guided = phi * guided * (plain.flatten().std() / guided.flatten().std()) + (1 - phi) * guided
    return (x - guided) / sigma


@pytest.mark.parametrize("phi", [0.0, 0.4, 1.0])
def test_guided_velocities_are_those_of_guided_clean_samples(phi: float) -> None:
    torch.manual_seed(0)
    x, sigma = draw(3, 2, 3, 4, 5), torch.tensor([0.9, 0.5, 0.1], dtype=torch.float64)
    velocities = tuple(draw(3, 2, 3, 4, 5) for _ in range(4))
    guidance = replace(FULL, rescale=phi, audio_rescale=phi)
    for name, weights in (("video", (3.0, 1.0, 2.0)), ("audio", (7.0, 0.5, 3.0))):
        got = guidance.guide(name, x, sigma, Predictions(*velocities))
        for row in range(3):
            own = tuple(v[row] for v in velocities)
            expected = written_out(x[row], float(sigma[row]), own, *weights, phi)
            torch.testing.assert_close(got[row], expected, rtol=0, atol=1e-12)


def test_kinds_that_were_not_evaluated_have_no_part() -> None:
    torch.manual_seed(0)
    x, sigma, (plain, negative) = draw(2, 3, 4), torch.tensor([0.9, 0.5]), (draw(2, 3, 4), draw(2, 3, 4))
    assert FULL.guide("video", x, sigma, Predictions(plain)) is plain  # bit for bit, whatever is to be rescaled
    unscaled = replace(FULL, rescale=0.0)
    torch.testing.assert_close(
        unscaled.guide("video", x, sigma, Predictions(plain, negative)), negative + 3.0 * (plain - negative)
    )


@pytest.mark.parametrize(
    ("changes", "needs"),
    [
        ({}, (False, False, False)),
        ({"scale": 1.5}, (True, False, False)),
        ({"audio_scale": 1.5}, (True, False, False)),
        ({"stg_scale": 0.5}, (False, True, False)),
        ({"audio_stg_scale": 0.5}, (False, True, False)),
        ({"modality_scale": 1.5}, (False, False, True)),
        ({"audio_modality_scale": 1.5}, (False, False, True)),
        ({"scale": 0.0, "modality_scale": 0.0, "rescale": 0.7}, (False, False, False)),
    ],
)
def test_a_kind_is_evaluated_if_either_component_wants_it(changes: dict[str, float], needs: tuple[bool, ...]) -> None:
    guidance = LTX2Guidance(**changes)
    assert (guidance.needs_negative(), guidance.needs_perturbed, guidance.needs_isolated) == needs


def test_unguided_is_every_kind_off_and_the_networks_inputs_kept() -> None:
    plain = replace(FULL, cross_timestep=False).unguided()
    assert not (plain.needs_negative() or plain.needs_perturbed or plain.needs_isolated)
    assert not plain.cross_timestep and plain.stg_blocks == (1,)


@pytest.mark.parametrize("absent", [None, 0.0])
def test_what_the_sound_has_no_value_for_is_the_videos(bench: Open, absent: float | None) -> None:
    """0 as well: the pipeline says `audio_x or x`."""
    own = bench("ltx2_t2av-2.3")
    fields = {f"audio_{name}": absent for name in ("guidance_scale", "stg_scale", "modality_scale", "guidance_rescale")}
    fields |= {"stg_scale": 1.5, "modality_scale": 2.5, "guidance_rescale": 0.3}
    guidance = own.fresh.guidance(4.0, replace(own.generation(own.case.settings[0]), **fields))
    assert isinstance(guidance, LTX2Guidance) and guidance.weights("audio") == guidance.weights("video")
    assert guidance.weights("audio") == (4.0, 1.5, 2.5, 0.3)


def test_losses_on_stored_media_are_one_forward(bench: Open) -> None:
    """Whatever kinds the configuration's own fields turn on."""
    own = bench("ltx2_t2av-2.3")
    adapter = own.adapter({f"train.{k}": v for k, v in own.case.setting("all").generation.items()})
    assert adapter.guidance(1.0) != adapter.offline_guidance()
    condition = own.condition(adapter, own.case.setting("guided"))
    state = adapter.prepare_latents(condition, generators(list(SEEDS)), *own.case.size)
    before = adapter.bundle.rows
    with torch.no_grad():
        adapter.predict(state, adapter.sigma_grid(4, state, None).times(0, 3), condition, adapter.offline_guidance())
    assert adapter.bundle.rows - before == 3


# Trajectories --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["ltx2_t2av-2.3", "ltx2_i2av"])
def test_rows_and_components_may_be_at_different_times(bench: Open, name: str) -> None:
    """Freely drawn times: each row is what it is alone, and each component reads its own time."""
    own = bench(name)
    setting = own.case.setting("guided")
    adapter, guidance = own.stirred, replace(own.guidance(setting), stg_scale=1.0, stg_blocks=(1,), modality_scale=2.0)
    condition = own.condition(adapter, setting)
    state = adapter.prepare_latents(condition, generators(list(SEEDS)), *own.case.size)

    def times(video: Tensor, audio: Tensor) -> ComponentTimes:
        sigmas = {"video": video, "audio": audio}
        return ComponentTimes({n: StepTimes(s, s, adapter.timestep_for_sigma(s, state)) for n, s in sigmas.items()})

    both = times(torch.tensor([0.3, 0.95, 0.6]), torch.tensor([0.4, 0.9, 0.2]))
    with torch.no_grad():
        got = adapter.predict(state, both, condition, guidance)
        for row in range(3):
            alone = adapter.predict(state.take([row]), both.take([row]), condition.row(row), guidance)
            for component in got:
                torch.testing.assert_close(got[component][row : row + 1], alone[component], rtol=0, atol=2e-5)
        other = adapter.predict(state, times(both["video"].sigma, both["video"].sigma), condition, guidance)
    assert (got["audio"] - other["audio"]).abs().amax(dim=(1, 2, 3)).min() > 1e-3


def test_connectors_run_when_texts_are_encoded_and_never_again(bench: Open) -> None:
    own = bench("ltx2_t2av-2.3")
    calls: list[int] = []
    handle = own.fresh.pipeline.connectors.register_forward_hook(lambda module, given, out: calls.append(len(given[0])))
    setting = own.case.setting("guided")
    condition = own.condition(own.fresh, setting)
    assert calls == [3, 3]  # prompts, and negative prompts
    own.fresh.inference(
        condition,
        initial_generators=generators(list(SEEDS)),
        num_inference_steps=2,
        guidance=own.guidance(setting),
        height=32,
        width=64,
    )
    handle.remove()
    assert calls == [3, 3]


@pytest.mark.parametrize(("name", "more"), [("ltx2_t2av-2.3", set()), ("ltx2_i2av", {"vae", "audio_vae"})])
def test_cached_conditions_are_of_these_connectors(bench: Open, name: str, more: set[str]) -> None:
    """Pitfall 28: a condition cache that does not notice another encoder."""
    names, _ = bench(name).fresh._encoders
    assert set(names) - {"processor"} == {"text_encoder", "tokenizer", "connectors"} | more  # which is an empty place


def test_the_first_frame_stays_what_was_given(bench: Open) -> None:
    """Pinned latents take no part in noise and log-probabilities, and are the condition's at every point."""
    own = bench("ltx2_i2av")
    adapter: Any = own.fresh
    setting = own.case.setting("guided")
    given = own.condition(adapter, setting).first_frame
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
        assert torch.equal(state["video"][:, :, :1], given) and "audio" not in state.masks
        assert not state.masks["video"][:, :, 0].any() and state.masks["video"][:, :, 1:].all()
    first, second = out.trajectory.states[0], out.trajectory.states[1]
    assert (first["video"][:, :, 1:] != second["video"][:, :, 1:]).all() and (first["audio"] != second["audio"]).all()


def test_pinned_tokens_are_at_time_0(bench: Open) -> None:
    own = bench("ltx2_i2av")
    adapter: Any = own.fresh
    state = adapter.prepare_latents(None, generators([0, 1]), *own.case.size)
    # Tokens are frame by frame: 4 x 8 of the first, then those of two more.
    times = adapter._token_times(state, torch.tensor([700.0, 300.0, 700.0, 300.0]), 2)
    row = torch.tensor([0.0] * 32 + [1.0] * 64)
    assert torch.equal(times, torch.stack([700 * row, 300 * row, 700 * row, 300 * row]))


# Media ---------------------------------------------------------------------------------------------------------------


def test_samples_hold_frames_and_sound(bench: Open) -> None:
    own = bench("ltx2_t2av-2.0")
    out = own.roll(own.fresh, own.case.settings[0], rows=(1,), steps=2)
    assert out.media is not None
    sample = own.fresh.make_sample(
        media=out.media[0],
        generation=replace(own.generation(own.case.settings[0]), frame_rate=12.5),
        prompt="p",
        source="s",
        source_id=0,
        index=0,
        group_id=0,
        member=0,
        key=NoiseKey(0, 0, 0, 0),
        condition=out.trajectory,  # type: ignore[arg-type]  # of no concern here
        trajectory=Trajectory(out.grid, (0.0,)),
    )
    assert isinstance(sample, T2AVSample) and sample.fps == 12.5 and sample.sample_rate == 24000
    assert sample.video is not None and sample.video.shape == (5, 3, 32, 64) and sample.frames is sample.video
    # 8 moments are 4 x 8 - 3 mel frames (the first moment is one), of 4 samples each.
    assert sample.audio is not None and sample.audio.shape == (2, 116) and sample.audio.abs().max() <= 1


def test_a_vae_that_reads_a_time_decodes_at_0(bench: Open, tmp_path: Path) -> None:
    """The pipeline's default, at which it adds no noise."""
    timed = seeded(lambda: LTX2Pipeline(**{**parts(), "vae": vae(timestep_conditioning=True)}))
    own = Bench(replace(bench("ltx2_t2av-2.0").case, build=timed), tmp_path)
    setting = own.case.settings[0]
    out = own.roll(own.fresh, setting, steps=2)
    assert out.media is not None
    assert_media(out.media, own.reference(setting, "pil", steps=2), "decoded at time 0")


@pytest.mark.parametrize("name", ["ltx2_t2av-2.0", "ltx2_i2av"])
def test_the_code_of_a_model_card_saves_frames_and_sound(
    bench: Open, name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own, saved = bench(name), dict[str, Any]()
    own.stirred.export_lora(tmp_path / "run" / "lora")
    weights = SavedWeights(tmp_path / "run" / "lora", "lora", averaged=False, checkpoint=tmp_path / "run", step=1)
    mapping = own.mapping()
    changes = {"num_inference_steps": 2, "resolution": own.case.size, "frame_rate": 16.0}
    for field, value in changes.items():
        set_path(mapping, f"eval.{field}", value)
    out = tmp_path / "out"
    out.mkdir()
    request = ExportRequest(load_config_from_mapping(mapping, origin="test"), tmp_path / "run", weights, "diffusers")
    export_weights(request, out)
    to_pil(picture(0)).save(out / "input.png")

    def encode_video(frames: Any, fps: float, path: str, audio: Tensor, audio_sample_rate: int) -> None:
        saved.update(frames=frames, fps=fps, audio=audio, rate=audio_sample_rate)

    monkeypatch.chdir(out)
    monkeypatch.setattr(diffusers.utils, "encode_video", encode_video)
    card = (out / "README.md").read_text()
    fields = own.case.generation
    assert f"| frames | {fields['num_frames']} |" in card
    assert f"| frames per second | {fields['frame_rate']:g} |" in card
    code = card.partition("```python\n")[2].partition("```")[0]
    exec(code.replace(f"path/to/{own.folder.name}", str(own.folder)), {})
    assert len(saved["frames"]) == 5 and saved["frames"][0].size == (64, 32) and saved["fps"] == 16.0
    assert saved["audio"].shape == (2, 116) and saved["rate"] == 24000


@pytest.mark.parametrize("name", ["ltx2_t2av-2.0", "ltx2_i2av"])
def test_stored_media_cannot_be_encoded(bench: Open, name: str) -> None:
    """There is nothing that makes the audio VAE's spectrograms of a waveform. Trainers refuse such models at once."""
    adapter = bench(name).fresh
    assert not adapter.supports_output_encoding
    with pytest.raises(InputError, match=r"'ltx2_\w+' cannot encode its output media .*: its audio VAE reads mel spec"):
        adapter.encode_output_state([])
    mapping = bench(name).mapping()
    mapping["train"] = {"trainer_type": "sft", "resolution": [32, 64], "per_device_batch_size": 1}
    del mapping["rewards"], mapping["scheduler"]
    with pytest.raises(
        ConfigError, match=r"model_type.*cannot be trained on stored media, .*'sft' learns: its audio VAE reads"
    ):
        load_config_from_mapping(mapping)


# Checkpoints and fields ----------------------------------------------------------------------------------------------


def test_a_text_to_video_checkpoint_also_starts_from_a_picture(bench: Open) -> None:
    """The same weights were saved under either class, so both give the same."""
    own, folder = bench("ltx2_i2av"), bench("ltx2_t2av-2.3").folder
    check_pipeline_folder(folder, own.fresh.spec)
    setting = own.case.setting("guided")
    adapter = own.adapter(folder=folder)
    assert type(adapter.pipeline).__name__ == adapter.spec.pipeline_class
    got, expected = (own.roll(a, setting, steps=2, decode=False).trajectory.states[2] for a in (adapter, own.fresh))
    assert all(torch.equal(got[component], expected[component]) for component in ("video", "audio"))


def problems(bench: Bench, changes: Mapping[str, Any]) -> list[str]:
    """What `check` says of the case's configuration with dotted changes."""
    mapping = bench.mapping()
    for path, value in {"eval.eval_freq": 0, **changes}.items():
        set_path(mapping, path, value)
    config = load_config_from_mapping(mapping, origin="test")
    return [str(problem).replace(" (test)", "") for problem in inspect_local_model(config).problems]


BLOCKS = "train.spatio_temporal_guidance_blocks"


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ltx2_t2av-2.0", {"train.num_frames": 6}, "num_frames: is 6, but .* multiple of 2 frames; use 5 or 7"),
        ("ltx2_i2av", {"train.num_frames": 8}, "num_frames: is 8, .* use 7 or 9"),
        ("ltx2_t2av-2.0", {"train.resolution": [32, 48]}, r"\[32, 48\] of ltx2_t2av must be a multiple of 32"),
        ("ltx2_t2av-2.0", {"train.frame_rate": 500.0}, "frame_rate: is 500, at which 5 frames are too short"),
        ("ltx2_t2av-2.0", {"train.max_sequence_length": 18}, "max_sequence_length: is 18, .* multiple of the 4"),
        ("ltx2_t2av-2.0", {"train.stg_scale": 1.0}, "stg_scale: has no effect on .* .perturbed_attn is false"),
        ("ltx2_t2av-2.0", {"train.audio_stg_scale": 1.0}, "stg_scale: has no effect"),
        ("ltx2_t2av-2.3", {"train.stg_scale": 1.0, BLOCKS: [0, 2]}, "has 2, but .* has the blocks 0 to 1"),
        ("ltx2_t2av-2.3", {"train.stg_scale": 1.0, BLOCKS: None}, "is empty, but stg_scale needs a block"),
    ],
)
def test_fields_that_do_not_fit_the_checkpoint(bench: Open, name: str, changes: dict[str, Any], message: str) -> None:
    found = problems(bench(name), changes)
    assert len(found) == 1 and re.search(message, found[0]), found
    assert problems(bench(name), {}) == []


def test_fields_are_checked_again_when_the_checkpoint_is_there(bench: Open) -> None:
    """Of a checkpoint on the Hub, `check` knows nothing."""
    with pytest.raises(ConfigError, match=r"train.stg_scale.*has no effect"):
        bench("ltx2_t2av-2.0").adapter({"train.stg_scale": 1.0})


@pytest.mark.parametrize("value", [-0.1, 1.5])
def test_a_rescaling_is_a_share(bench: Open, value: float) -> None:
    with pytest.raises(ConfigError, match=r"train.guidance_rescale"):
        bench("ltx2_t2av-2.0").adapter({"train.guidance_rescale": value})


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({}, "starts from one picture, but 0 came"),
        ({"image": (picture(0), picture(1))}, "one picture, but 2 came"),
        ({"image": (picture(0)[:, :1],)}, "is 1 x .* needs at least 2 x 2"),
    ],
)
def test_pictures_that_do_not_fit(bench: Open, media: Media, message: str) -> None:
    own = bench("ltx2_i2av")
    with pytest.raises(InputError, match=message):
        own.fresh.encode_inputs([ConditionInputs("a dot", own.case.size, None, media)])


def test_compressing_pictures_needs_pyav(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(image_to_audio_video, "is_av_available", lambda: False)
    own = bench("ltx2_i2av")
    off = {"train.image_crf": 0, "eval.image_crf": 0}
    for changes in ({}, {"train.image_crf": 18}, {**off, "eval.image_crf": 18}):
        with pytest.raises(InputError, match=r"with PyAV: pip install .*, or set image_crf to 0"):
            own.adapter(changes)
    assert own.adapter(off).pipeline is not None
