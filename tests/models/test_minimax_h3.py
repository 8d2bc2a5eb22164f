"""MiniMax-H3 beyond what tests/parity compares: two schedules, given rows, one row at a time, and what is refused."""

from __future__ import annotations

import json
import shutil
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import diffusers
import pytest
import torch
from diffusers import ModularPipeline
from PIL import Image

from flow_factory.checkpoints.selection import SavedWeights
from flow_factory.cli.static_checks import check_statically
from flow_factory.data_utils.media_files import read_audio
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, get_model_spec, load_config_from_mapping
from flow_factory.hparams.local_model import check_pipeline_folder, inspect_local_model
from flow_factory.models.components import load_pipeline_class
from flow_factory.models.minimax_h3.conditions import Conditioning, PackedCondition, PackedText
from flow_factory.models.minimax_h3.layout import pack_audio, pack_video, unpack_audio, unpack_video
from flow_factory.samples import ConditionInputs, LatentState, Media
from flow_factory.trainers.export_request import ExportRequest
from flow_factory.trainers.exporting import export_weights
from flow_factory.trainers.noising import free_times
from tests.models.benches import Open
from tests.models.support import generators
from tests.parity.bench import Bench, set_path
from tests.parity.media import clip, picture, save, tone
from tests.parity.minimax_h3 import SAMPLE_RATE

TEXT, FRAMES, REFERENCES = "minimax-h3-t2va", "minimax-h3-fl2va", "minimax-h3-ref2va"


def configured(bench: Bench, changes: Mapping[str, Any], folder: Path | None = None) -> Any:
    """The case's configuration with dotted changes."""
    mapping = bench.mapping()
    for path, value in {"eval.eval_freq": 0, **changes}.items():
        set_path(mapping, path, value)
    if folder is not None:
        mapping["model"]["model_name_or_path"] = str(folder)
    return load_config_from_mapping(mapping, origin="test")


def given(bench: Bench, media: Media, prompt: str = "red dot") -> ConditionInputs:
    return ConditionInputs(prompt, bench.case.size, None, media)


# Two schedules ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("key", [TEXT, FRAMES])
@pytest.mark.parametrize("steps", [2, 4, 10])
def test_video_and_sound_have_schedules_of_their_own(bench: Open, key: str, steps: int) -> None:
    own = bench(key)
    own.reference(own.case.settings[0], rows=(0,), steps=steps)
    state = own.fresh.prepare_latents(None, generators([0]), *own.case.size)
    grid = own.fresh.sigma_grid(steps, state, None)
    assert grid.length == steps - 1
    for name, scheduler in {"video": own.pipeline.scheduler, "audio": own.pipeline.audio_scheduler}.items():
        assert torch.equal(grid.sigmas[name], scheduler.sigmas) and torch.equal(
            grid.timesteps[name], scheduler.timesteps
        )
    assert steps == 2 or not torch.equal(grid.sigmas["video"], grid.sigmas["audio"])
    assert set(grid.sigmas) == ({"video", "audio"} if key == TEXT else {"video", "audio", "given"})
    # A freely drawn time of the video has the sound where a rollout would have it.
    for name, sigmas in grid.sigmas.items():
        torch.testing.assert_close(own.fresh.component_sigma(name, grid.sigmas["video"]), sigmas, rtol=0, atol=1e-6)
    last = grid.sigmas["video"][-2:-1]
    times = free_times(state, last, own.fresh.timestep_for_sigma, own.fresh.component_sigma)
    assert torch.allclose(times["audio"].timestep, grid.timesteps["audio"][-1:])
    assert steps == 2 or not torch.allclose(times["audio"].timestep, times["video"].timestep)


@pytest.mark.parametrize("key", [TEXT, FRAMES, REFERENCES])
def test_every_row_has_the_pipelines_time_and_place(bench: Open, key: str) -> None:
    """Given pictures and videos stay at max(t, 0.999), given sounds at 1; as the pipeline plans its rows."""
    own = bench(key)
    seen: list[dict[str, Any]] = []

    def noted(module: Any, args: Any, keywords: dict[str, Any]) -> None:
        seen.append(keywords)

    both = []
    for side in (own.fresh, own):
        network = side.pipeline.components[own.case.components[0]]
        handle = network.register_forward_pre_hook(noted, with_kwargs=True)
        seen.clear()
        if side is own:
            own._results.clear()
            own.reference(own.case.settings[0], rows=(1,))
        else:
            own.roll(own.fresh, own.case.settings[0], rows=(1,), solver="pipeline", decode=False)
        handle.remove()
        both.append(list(seen))
    ours, theirs = both
    assert len(ours) == len(theirs) == own.case.steps - 1
    for mine, other in zip(ours, theirs, strict=True):
        assert torch.equal(mine["timestep"][mine["timestep_indices"]], other["timestep"][other["timestep_indices"]])
        for name in ("position_ids", "token_tags", "video_indices", "audio_indices", "text_indices"):
            assert torch.equal(mine[name], other[name]), name
    levels = [set(mine["timestep"].tolist()) for mine in ours]
    assert round(max(levels[0]), 3) == {TEXT: 0.0, FRAMES: 0.999, REFERENCES: 1.0}[key]


# Given rows ------------------------------------------------------------------------------------------------------


def test_packing_is_undone() -> None:
    video, sound = torch.randn(1, 4, 5, 6, 8), torch.randn(1, 2, 3, 7)
    patch = (1, 2, 2)
    rows = pack_video(video, patch)
    assert rows.shape == (5 * 3 * 4, 4 * 4) and torch.equal(unpack_video(rows, video, patch), video)
    assert pack_audio(sound).shape == (14, 3) and torch.equal(unpack_audio(pack_audio(sound)), sound)
    assert torch.equal(pack_audio(sound)[7:], sound[0, 1].T)  # one channel after the other


@pytest.mark.parametrize("key", [FRAMES, REFERENCES])
def test_the_noise_of_given_rows_stays_with_a_sample(bench: Open, key: str) -> None:
    """It is drawn first, is the same at each step, takes no part in log-probabilities, and matters."""
    own = bench(key)
    adapter, setting = own.fresh, own.case.settings[0]
    out = own.roll(
        adapter,
        setting,
        rows=(1,),
        noise_levels=[0.7, 0.0, 0.0],
        step_generators=lambda step: generators([step]),
        compute_log_prob=True,
        trajectory_indices="all",
        decode=False,
    )
    noise = [state["given"] for state in out.trajectory.states.values()]
    assert len(noise) == 4 and all(torch.equal(x, noise[0]) for x in noise)
    condition = own.condition(adapter, setting, (1,))
    latents = [one.latents for one in condition.only.conditioning if one.latents is not None]
    generator = generators([4])[0]
    drawn = [pack_video(torch.randn(x.shape, generator=generator), adapter.pipeline.patch_size) for x in latents]
    assert torch.equal(noise[0][0], torch.cat(drawn))

    before, after = out.trajectory.states[0], out.trajectory.states[1]
    forward = {"dynamics": "Flow-SDE", "noise_level": 0.7, "next_state": after, "compute_log_prob": True}
    times = out.grid.times(0, 1)
    again = adapter.forward(before, times, condition, adapter.guidance(1.0), **forward)
    assert torch.equal(again.log_prob, out.trajectory.log_probs[0])
    assert float(again.velocity["given"].abs().max()) == 0 and again.next_state.masks["given"].sum() == 0
    other = LatentState({**before.components, "given": -before["given"]}, before.masks)
    moved = adapter.predict(other, times, condition, adapter.guidance(1.0))
    assert not torch.equal(moved["video"], again.velocity["video"])


def test_rows_of_any_length_are_kept_apart() -> None:
    latents, sound = torch.randn(1, 4, 1, 2, 2), torch.randn(6, 3)
    rows = [
        PackedText(torch.randn(1, 3, 8), torch.tensor([1, 1, 1])),
        PackedText(
            torch.randn(1, 5, 8),
            torch.tensor([1, 0, 0, 1, 1]),
            (Conditioning("image", latents), Conditioning("video", latents, sound), Conditioning("audio", None, sound)),
        ),
    ]
    joined = PackedCondition.cat([PackedCondition((row,)) for row in rows])
    assert joined.batch_size == 2 and joined.row(1).only is rows[1]
    again = PackedCondition.from_tensors({name: t.clone() for name, t in joined.tensors().items()})
    assert {n: t.tolist() for n, t in again.tensors().items()} == {n: t.tolist() for n, t in joined.tensors().items()}
    assert [(one.kind, one.has_audio) for one in again.texts[1].conditioning] == [
        ("image", False),
        ("video", True),
        ("audio", True),
    ]
    half = joined.to(dtype=torch.float16)
    assert half.texts[0].embeds.dtype == torch.float16 and half.texts[0].tags.dtype == torch.int64
    with pytest.raises(ValueError, match="has 2"):
        _ = joined.only


def test_a_videos_sound_is_not_a_sound_of_its_own(bench: Open) -> None:
    own = bench(REFERENCES)
    video, sound = (clip(3, frames=16, fps=24.0),), (tone(5, 0.5, SAMPLE_RATE),)
    with_track = own.fresh.encode_inputs([given(own, {"video": video, "soundtrack": sound})]).only
    beside = own.fresh.encode_inputs([given(own, {"video": video, "audio": sound})]).only
    assert [(one.kind, one.has_audio) for one in with_track.conditioning] == [("video", True)]
    assert [(one.kind, one.has_audio) for one in beside.conditioning] == [("video", False), ("audio", True)]
    assert torch.equal(with_track.conditioning[0].sound, beside.conditioning[1].sound)  # type: ignore[arg-type]


# What is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"train.per_device_batch_size": 2}, "train.per_device_batch_size", "is 2.*at most 1 row; use 1"),
        (
            {"eval.eval_freq": 1, "eval.per_device_batch_size": 4},
            "eval.per_device_batch_size",
            "is 4.*at most 1 row; use 1",
        ),
        ({"train.guidance_scale": 3.0}, "train.guidance_scale", "is 3.0.*has no guidance; use 1"),
        ({"train.num_inference_steps": 2}, "train.num_inference_steps", "is 2.*at least 3"),
        (
            {"eval.eval_freq": 1, "eval.num_inference_steps": 1},
            "eval.num_inference_steps",
            "is 1, of which .* takes 1 less: none; use at least 2",
        ),
        ({"scheduler.sde_steps": [2]}, "scheduler.sde_steps", r"\[2\] cannot be stochastic: of 3 steps"),
    ],
)
def test_fields_that_do_not_fit_the_model(bench: Open, changes: Mapping[str, Any], path: str, words: str) -> None:
    with pytest.raises(ConfigError, match=f"{path} .*{words}"):
        configured(bench(TEXT), changes)


def test_check_counts_the_steps_that_are_taken(bench: Open, tmp_path: Path) -> None:
    (tmp_path / "train.txt").write_text("a\nb\n")
    config = configured(bench(TEXT), {"data.dataset_dir": str(tmp_path)})
    assert any(line.startswith("steps: 3 (Flow-SDE") for line in check_statically(config).lines)


def test_pairs_do_not_fit_into_one_row(bench: Open) -> None:
    mapping = bench(TEXT).mapping()
    mapping["train"] = {"trainer_type": "dpo", "per_device_batch_size": 1, "group_size": 2, "resolution": [16, 32]}
    mapping["scheduler"] = {"dynamics_type": "ODE"}
    with pytest.raises(ConfigError, match=r"'dpo' compares 2 samples in one forward.*at most 1; use another trainer"):
        load_config_from_mapping(mapping)


@pytest.mark.parametrize(("frames", "near"), [(120, "124 or 141"), (125, "124 or 141"), (400, "328 or 345")])
def test_frames_that_the_pipeline_does_not_make(bench: Open, frames: int, near: str) -> None:
    own = bench(TEXT)
    (problem,) = inspect_local_model(configured(own, {"train.num_frames": frames})).problems
    assert f"is {frames}, but the VAE makes 5 more than a multiple of 17 frames" in problem.message
    assert problem.path == ("train", "num_frames") and f"use {near}" in problem.message


def test_sizes_and_checkpoints_that_do_not_fit(bench: Open, tmp_path: Path) -> None:
    own = bench(TEXT)
    (problem,) = inspect_local_model(configured(own, {"train.resolution": [16, 40]})).problems
    assert "must be a multiple of 16" in problem.message
    assert get_model_spec(TEXT).size_multiple() == get_model_spec(REFERENCES).size_multiple() == 32

    with pytest.raises(InputError, match="lacks transformer_ref, which model_type 'minimax-h3-ref2va' needs"):
        check_pipeline_folder(own.folder, get_model_spec(REFERENCES))
    with pytest.raises(
        InputError, match=r"holds a MiniMaxH3ModularPipeline, but model_type 'sd3-5' loads a Stable.*fl2va"
    ):
        check_pipeline_folder(own.folder, get_model_spec("sd3-5"))
    (tmp_path / "model_index.json").write_text('{"_class_name": "WanPipeline"}')
    with pytest.raises(
        InputError, match=r"holds a WanPipeline, but model_type 'minimax-h3-t2va' loads a MiniMax.*wan2"
    ):
        check_pipeline_folder(tmp_path, get_model_spec(TEXT))
    with pytest.raises(InputError, match=r"has no modular_model_index.json"):
        load_pipeline_class(diffusers.MiniMaxH3ModularPipeline, tmp_path, workflow="t2va")

    shutil.copytree(own.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "transformer" / "diffusion_pytorch_model.safetensors"
    file.write_bytes(file.read_bytes()[:100])
    with pytest.raises(InputError, match=r"could not be loaded: .*transformer.* is damaged"):
        own.adapter(folder=tmp_path / "copy")


def test_a_text_encoder_without_the_layer_that_is_read(bench: Open, tmp_path: Path) -> None:
    own = bench(TEXT)
    shutil.copytree(own.folder, tmp_path / "copy")
    file = tmp_path / "copy" / "text_encoder" / "config.json"
    config = json.loads(file.read_text())
    config["text_config"]["num_hidden_layers"] = 1
    file.write_text(json.dumps(config))
    with pytest.raises(InputError, match=r"has 1 layers, but MiniMax-H3 reads what layer 1 gives.*at least 2"):
        own.adapter(folder=tmp_path / "copy")


def test_inputs_that_a_workflow_does_not_take(bench: Open) -> None:
    first, last, sound = (picture(0),), (picture(1),), (tone(0, 0.4, SAMPLE_RATE),)
    video = (clip(0, frames=16, fps=24.0),)
    for key, media, message in [
        (FRAMES, {}, "a first_frame, a last_frame or one of each, but 0 and 0 came"),
        (FRAMES, {"first_frame": (*first, *last)}, "but 2 and 0 came"),
        (REFERENCES, {}, "at least one reference picture .*use minimax-h3-t2va"),
        (REFERENCES, {"audio": sound}, "at least one reference picture"),
        (REFERENCES, {"image": first, "soundtrack": sound}, "1 soundtracks came with 0 videos"),
        (REFERENCES, {"video": video, "soundtrack": sound * 2}, "2 soundtracks came with 1 videos"),
        (REFERENCES, {"video": (clip(0, frames=3, fps=24.0),)}, "do not fit: A reference video .* at least 13 frames"),
        (REFERENCES, {"image": (picture(0, (16, 128)),)}, "do not fit: A reference image must be within 1:4 and 4:1"),
        (REFERENCES, {"image": first * 10}, "do not fit: MiniMax-H3 accepts at most 9 image references, got 10"),
    ]:
        own = bench(key)
        with pytest.raises(InputError, match=message) as caught:
            own.fresh.encode_inputs([given(own, media)])
        assert "'red dot'" in str(caught.value)
    with pytest.raises(InputError, match="empty prompt, which has no tokens"):
        bench(TEXT).fresh.encode_inputs([given(bench(TEXT), {}, prompt="")])


def test_sounds_of_another_rate_need_torchaudio(bench: Open, monkeypatch: pytest.MonkeyPatch) -> None:
    own = bench(REFERENCES)
    monkeypatch.setattr("flow_factory.models.minimax_h3.references.find_spec", lambda name: None)
    media = {"image": (picture(0),), "audio": (tone(0, 0.4, 16000),)}
    with pytest.raises(InputError, match=f"a sound of 16000 Hz .* hears {SAMPLE_RATE} Hz: pip install torchaudio"):
        own.fresh.encode_inputs([given(own, media)])


def test_prompts_name_what_the_model_takes(tmp_path: Path) -> None:
    from flow_factory.data_utils.prompt_files import read_prompts

    for key, text, message in [
        (TEXT, '{"prompt": "a", "image": "1.png"}', "takes no image"),
        (TEXT, '{"prompt": "a", "negative_prompt": "b"}', 'takes no "negative_prompt"'),
        (FRAMES, '{"prompt": "a"}', "needs at least one of 'first_frame', 'last_frame'"),
        (FRAMES, '{"prompt": "a", "image": "1.png"}', "could fill 'first_frame', 'last_frame'"),
        (REFERENCES, '{"prompt": "a", "audio": "1.wav"}', "needs at least one of 'image', 'video'"),
        (REFERENCES, '{"prompt": "a", "video": ["1", "2", "3", "4"]}', "has 4 files; the model takes at most 3"),
    ]:
        file = tmp_path / "train.jsonl"
        file.write_text(text + "\n")
        with pytest.raises(InputError, match=message):
            read_prompts(file, get_model_spec(key).io)
    file.write_text('{"prompt": "a", "video": "1.mp4", "soundtrack": "1.wav", "audio": ["2.wav", "3.wav"]}\n')
    (row,) = read_prompts(file, get_model_spec(REFERENCES).io)
    assert [(ref.slot, ref.path) for ref in row.media] == [
        ("video", "1.mp4"),
        ("soundtrack", "1.wav"),
        ("audio", "2.wav"),
        ("audio", "3.wav"),
    ]


def test_a_forward_takes_one_row_and_a_grid_two_points(bench: Open) -> None:
    own = bench(TEXT)
    adapter = own.fresh
    condition = own.condition(adapter, own.case.settings[0], (0, 1))
    state = adapter.prepare_latents(condition, generators([0, 1]), *own.case.size)
    grid = adapter.sigma_grid(4, state, None)
    with pytest.raises(
        InputError, match="a forward of 2 rows was asked for, but model 'minimax-h3-t2va' takes at most 1"
    ):
        adapter.predict(state, grid.times(0, 2), condition, adapter.guidance(1.0))
    with pytest.raises(InputError, match="a forward of 2 rows was asked for"):
        adapter.inference(
            bench(FRAMES).condition(bench(FRAMES).fresh, own.case.settings[0], (0, 1)),
            initial_generators=generators([0, 1]),
            num_inference_steps=4,
            guidance=adapter.guidance(1.0),
            height=16,
            width=32,
        )
    with pytest.raises(InputError, match="num_inference_steps is 1; MiniMax-H3 counts the end of its grid"):
        adapter.sigma_grid(1, state, None)
    with pytest.raises(InputError, match=r"guidance_scale is 2.0, but MiniMax-H3 has no guidance"):
        adapter.guidance(2.0)


# Exports ---------------------------------------------------------------------------------------------------------


def run_card(text: str, folder: Path, base: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """Runs the code of a model card in the export's folder; returns what it saved, without encoding it."""
    saved: dict[str, Any] = {}

    def encode_video(frames: Any, fps: float, path: str, audio: Any, audio_sample_rate: int) -> None:
        saved.update(frames=frames, fps=fps, path=path, audio=audio, rate=audio_sample_rate)

    monkeypatch.chdir(folder)
    monkeypatch.setattr(diffusers.utils, "encode_video", encode_video)
    code = text.partition("```python\n")[2].partition("```")[0]
    exec(code.replace(f"path/to/{base.name}", str(base)), {})
    return saved


@pytest.mark.parametrize("key", [TEXT, FRAMES, REFERENCES])
@pytest.mark.parametrize("layout", ["diffusers", "merged"])
def test_the_code_of_a_model_card_runs(
    bench: Open, key: str, layout: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = bench(key)
    own.stirred.export_lora(tmp_path / "run" / "lora")
    weights = SavedWeights(tmp_path / "run" / "lora", "lora", averaged=False, checkpoint=tmp_path / "run", step=1)
    changes = {"eval.num_inference_steps": 2, "eval.resolution": [16, 32]}
    out = tmp_path / "out"
    out.mkdir()
    export_weights(ExportRequest(configured(own, changes), tmp_path / "run", weights, layout), out)
    for number, name in enumerate(("first", "last", "subject")):
        Image.fromarray(picture(number).permute(1, 2, 0).numpy()).save(out / f"{name}.png")
    save(clip(0, frames=16, fps=24.0), out / "motion").rename(out / "motion.mp4")

    text = (out / "README.md").read_text()
    assert f'workflow="{get_model_spec(key).workflow}"' in text and str(tmp_path) not in text
    saved = run_card(text, out, own.folder, monkeypatch)
    assert len(saved["frames"]) == 124 and saved["frames"][0].size == (32, 16) and saved["fps"] == 24
    assert saved["audio"].shape[0] == 2 and saved["rate"] == SAMPLE_RATE and saved["path"] == "video.mp4"
    if layout == "merged":
        assert sorted(p.name for p in out.iterdir() if p.is_dir()) == sorted(get_model_spec(key).modular_components)


def test_samples_name_the_workflow(
    bench: Open, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """What `sample` records, as arguments of the pipeline, makes the same video again."""
    from flow_factory.cli.app import main

    own = bench(TEXT)
    mapping = own.mapping()
    mapping["data"]["dataset_dir"] = str(tmp_path)
    mapping["eval"] = {"resolution": [16, 32], "num_inference_steps": 3}
    (tmp_path / "run.yaml").write_text(json.dumps(mapping))
    arguments = ["sample", str(tmp_path / "run.yaml"), "--prompt", "red dot", "--output", str(tmp_path / "out")]
    monkeypatch.setattr("sys.argv", ["flow-factory", *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    assert not ended.value.code, capsys.readouterr().err
    record = json.loads((tmp_path / "out" / "samples.json").read_text())
    (made,) = record["samples"]
    pipeline = ModularPipeline.from_pretrained(record["model"], workflow=record["workflow"])
    pipeline.load_components()
    pipeline.set_progress_bar_config(disable=True)
    again = pipeline(**made["call"], generator=torch.Generator().manual_seed(made["torch_seed"]))
    sound = read_audio(tmp_path / "out" / made["sound"])
    assert sound.sample_rate == SAMPLE_RATE
    torch.testing.assert_close(sound.waveform, again.get("audio")[0], rtol=0, atol=1e-4)


def test_a_merged_export_is_the_lora_in_place(bench: Open, tmp_path: Path) -> None:
    own = bench(REFERENCES)
    own.stirred.export_lora(tmp_path / "run" / "lora")
    weights = SavedWeights(tmp_path / "run" / "lora", "lora", averaged=False, checkpoint=tmp_path / "run", step=1)
    out = tmp_path / "out"
    out.mkdir()
    export_weights(ExportRequest(configured(own, {}), tmp_path / "run", weights, "merged"), out)
    pipeline = ModularPipeline.from_pretrained(str(out), workflow="ref2va")
    pipeline.load_components()
    pipeline.set_progress_bar_config(disable=True)
    merged = own.reference(own.case.settings[0], pipeline=pipeline, rows=(0,))
    for name, latents in own.stirred_latents.items():
        torch.testing.assert_close(latents[:1], merged[name], rtol=0, atol=1e-4)


def test_a_hub_name_fetches_the_components_of_the_workflow(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from flow_factory.models.components import checkpoint_folder

    asked = SimpleNamespace()

    def snapshot_download(name: str, allow_patterns: list[str]) -> str:
        asked.name, asked.patterns = name, allow_patterns
        return str(tmp_path)

    monkeypatch.setattr("huggingface_hub.snapshot_download", snapshot_download)
    spec = replace(get_model_spec(REFERENCES), required_components=("transformer_ref", "vae"))
    assert checkpoint_folder("org/name", spec.modular_components) == tmp_path
    assert asked.name == "org/name"
    assert asked.patterns == ["modular_model_index.json", "transformer_ref/*", "vae/*"]
