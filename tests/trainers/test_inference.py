"""A run's weights for inference: training's own function, and bit for bit what plain diffusers makes of the export."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import DiffusionPipeline
from PIL import Image

from flow_factory.cli.sources import open_source
from flow_factory.data_utils.prompt_choice import choose_prompts
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.models.abc import BaseAdapter
from flow_factory.trainers.inference import InferenceModel, Variant, build_inference_model
from flow_factory.trainers.sampling import MadeSample, make_samples
from tests.cli.invoke import invoke
from tests.models.support import plain_pipeline
from tests.trainers.runs import train_run

SEED = 3  # eval.seed of the runs
STEPS = 3


@pytest.fixture(scope="module")
def run(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, BaseAdapter[Any]]:
    return train_run(tiny_sd3_dir, tmp_path_factory.mktemp("run"))


@pytest.fixture(scope="module")
def full_run(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"model.finetune_type": "full", "train.learning_rate": 1e-3, "train.max_epochs": 1}
    return train_run(tiny_sd3_dir, tmp_path_factory.mktemp("full"), changes)[0]


def load(
    run: Path, variants: list[Variant], *overrides: str, averaged: bool | None = None
) -> tuple[InferenceModel, Any]:
    source = open_source(str(run), overrides, None, averaged)
    return build_inference_model(source.config, Comm.single(), source.trained, variants), source.config


def make(
    run: Path, variants: list[Variant], *overrides: str, averaged: bool | None = None
) -> dict[Variant, list[MadeSample]]:
    model, config = load(run, variants, *overrides, averaged=averaged)
    return make_samples(model, config, choose_prompts(config), variants, SEED)


def plain(pipeline: Any, picture: MadeSample, scale: float, output_type: str) -> Any:
    """What a user of diffusers calls, with the recorded seed."""
    return pipeline(
        picture.choice.prompt,
        num_inference_steps=STEPS,
        guidance_scale=scale,
        height=32,
        width=32,
        max_sequence_length=8,
        generator=torch.Generator().manual_seed(picture.torch_seed),
        output_type=output_type,
    ).images[0]


@pytest.mark.parametrize("scale", [1.0, 3.0])
@pytest.mark.parametrize("averaged", [False, True])
def test_the_exported_lora_gives_the_pictures_of_sample_in_plain_diffusers(
    run: tuple[Path, Any],
    tiny_sd3_dir: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    scale: float,
    averaged: bool,
) -> None:
    """Pitfalls 27, 54: bit for bit, with alpha / rank = 4 / 3 and an adapter name of the user's own."""
    folder, which = tmp_path / "lora", "--ema" if averaged else "--live"
    arguments = (run[0], which, "--output")
    assert invoke(capsys, monkeypatch, "export", *arguments, folder).code == 0
    done = invoke(capsys, monkeypatch, "sample", *arguments, tmp_path / "own", f"eval.guidance_scale={scale}")
    assert done.code == 0, done.err
    made = make(run[0], ["base", "trained"], f"eval.guidance_scale={scale}", averaged=averaged)

    pipeline = plain_pipeline(tiny_sd3_dir)
    for picture in made["base"]:
        assert torch.equal(plain(pipeline, picture, scale, "latent"), picture.latents)
    pipeline.load_lora_weights(str(folder), adapter_name="mine")
    record = json.loads((tmp_path / "own" / "samples.json").read_text())
    assert len(record["samples"]) == len(made["trained"]) == 3
    for picture, entry in zip(made["trained"], record["samples"], strict=True):
        assert entry["torch_seed"] == picture.torch_seed and entry["prompt"] == picture.choice.prompt
        assert torch.equal(plain(pipeline, picture, scale, "latent"), picture.latents)
        theirs = numpy.asarray(plain(pipeline, picture, scale, "pil"))
        ours = numpy.asarray(Image.open(tmp_path / "own" / entry["file"]))
        assert numpy.array_equal(theirs, ours)
        noise = torch.Generator().manual_seed(entry["torch_seed"])
        again = pipeline(**entry["call"], generator=noise).images[0]  # from the record alone
        assert numpy.array_equal(numpy.asarray(again), ours)
        assert entry["call"]["guidance_scale"] == scale and entry["call"]["max_sequence_length"] == 8
        assert entry["precision"]["compute_dtype"] == entry["precision"]["weight_dtypes"]["transformer"] == "float32"
    assert all(not torch.equal(b.latents, t.latents) for b, t in zip(*made.values(), strict=True))


@pytest.mark.parametrize(("averaged", "variant"), [(False, "default"), (True, "ema")])
def test_agrees_with_the_weights_that_training_had(
    run: tuple[Path, BaseAdapter[Any]], averaged: bool, variant: str
) -> None:
    """Training keeps alpha / r in its layers: not the same bits, but the same function, also in batches of three."""
    from flow_factory.samples import NoiseKey, Purpose

    made = make(run[0], ["trained"], averaged=averaged)["trained"]
    adapter = run[1]
    with torch.no_grad(), adapter.use_component_variant(variant):
        output = adapter.inference(
            adapter.encode_prompt([p.choice.prompt for p in made]),
            initial_generators=[NoiseKey(SEED, 0, i, 0).generator(Purpose.INITIAL) for i in range(3)],
            num_inference_steps=STEPS,
            guidance=adapter.guidance(1.0),
            height=32,
            width=32,
            solver="pipeline",
        )
    own = torch.stack([picture.latents for picture in made])
    torch.testing.assert_close(own, output.trajectory.states[STEPS].only, rtol=0, atol=1e-5)


def test_sample_shows_what_the_evaluation_in_training_showed(run: tuple[Path, Any]) -> None:
    """The averaged weights, the evaluation's noise: the same pictures to one level of 255."""
    from flow_factory.trainers.sheets import _load_pictures

    before = _load_pictures(run[0] / "samples" / "toy" / "first.safetensors")
    for picture in make(run[0], ["base"])["base"]:  # cycle 0: B was zero
        prompt, former = before[picture.choice.index]
        assert prompt == picture.choice.prompt
        shown = picture.preview.picture
        assert numpy.abs(numpy.asarray(former).astype(int) - numpy.asarray(shown).astype(int)).max() <= 1


def test_members_and_seeds_give_other_noise(run: tuple[Path, Any]) -> None:
    model, config = load(run[0], ["trained"])
    choices = choose_prompts(config, ["a red circle", "sky"], None, 3)
    assert [(c.prompt, c.index, c.member) for c in choices] == [
        ("a red circle", 0, 0),
        ("a red circle", 0, 1),
        ("sky", 1, 0),
    ]
    with pytest.raises(InputError, match="--num 1 is fewer than the 2 prompts"):
        choose_prompts(config, ["a red circle", "sky"], None, 1)
    pictures = [
        *make_samples(model, config, choices, ["trained"], 1)["trained"],
        *make_samples(model, config, choices, ["trained"], 2)["trained"],
    ]
    assert len({picture.torch_seed for picture in pictures}) == 6
    assert not torch.equal(pictures[0].latents, pictures[1].latents)


def test_full_weights_with_and_without_what_was_trained(full_run: Path, tiny_sd3_dir: Path, tmp_path: Path) -> None:
    both = make(full_run, ["base", "trained"])
    pipeline = plain_pipeline(tiny_sd3_dir)
    for picture in both["base"]:
        assert torch.equal(plain(pipeline, picture, 1.0, "latent"), picture.latents)
    alone = make(full_run, ["trained"])["trained"]
    for one, two, base in zip(alone, both["trained"], both["base"], strict=True):
        assert torch.equal(one.latents, two.latents) and not torch.equal(one.latents, base.latents)


def test_a_lora_on_full_weights_keeps_them_beneath(
    full_run: Path, tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """The base of a run that started from full weights is not the pretrained model."""
    weights = open_source(str(full_run)).trained
    changes = {"model.resume_path": str(weights), "train.max_epochs": 1}
    child, _ = train_run(tiny_sd3_dir, tmp_path_factory.mktemp("child"), changes)
    base = make(child, ["base"])["base"]
    expected = make(full_run, ["trained"])["trained"]
    assert all(torch.equal(a.latents, b.latents) for a, b in zip(base, expected, strict=True))


def test_a_variant_that_was_not_loaded_is_refused(full_run: Path) -> None:
    model, _ = load(full_run, ["trained"])
    with pytest.raises(InputError, match="without base ones"), model.use("base"):
        pass


@pytest.fixture
def merged_pipelines(
    run: tuple[Path, Any],
    full_run: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> Iterator[dict[str, Any]]:
    found = {}
    for name, folder, layout in (("lora", run[0], "merged"), ("full", full_run, "diffusers")):
        done = invoke(capsys, monkeypatch, "export", folder, "--format", layout, "--output", tmp_path / name)
        assert done.code == 0, done.err
        assert not [p for p in (tmp_path / name).rglob("*") if p.suffix in (".bin", ".pt", ".ckpt")]
        found[name] = DiffusionPipeline.from_pretrained(str(tmp_path / name))
        found[name].set_progress_bar_config(disable=True)
    yield found


def test_pipeline_folders_draw_what_sample_draws(
    run: tuple[Path, Any], full_run: Path, merged_pipelines: dict[str, Any]
) -> None:
    """Merged: W + BA in float32 is another order of sums. Full: the very same weights, bit for bit."""
    for picture in make(run[0], ["trained"])["trained"]:
        torch.testing.assert_close(
            plain(merged_pipelines["lora"], picture, 1.0, "latent"), picture.latents, rtol=0, atol=2e-5
        )
    for picture in make(full_run, ["trained"])["trained"]:
        assert torch.equal(plain(merged_pipelines["full"], picture, 1.0, "latent"), picture.latents)
