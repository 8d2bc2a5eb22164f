"""The embedded pipeline as a user finds it: small, safe to load, loadable by plain diffusers, and able to draw."""

from __future__ import annotations

import functools
import importlib.resources
import json
import logging
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.rewards.prompt_scoring import score
from flow_factory.rewards.shapes_world import Kind, Split, format_caption, parse_caption, scenes, split_of

ASSETS = Path(str(importlib.resources.files("flow_factory"))) / "assets"
FOLDER = ASSETS / "tiny-sd3-shapes"
PROMPT_SETS = ("shapes", "singles", "counts", "numbers")
MEGABYTE = 1024 * 1024


def prompts(name: str, split: str) -> list[str]:
    """Lines of one of the embedded prompt files."""
    return (ASSETS / "prompts" / name / f"{split}.txt").read_text().splitlines()


# --- prompts ---


@pytest.mark.parametrize("name", PROMPT_SETS)
@pytest.mark.parametrize("split", ["train", "test"])
def test_prompts_are_captions_of_their_side_of_the_split(name: str, split: Split) -> None:
    lines = prompts(name, split)
    parsed = [parse_caption(line) for line in lines]
    assert [format_caption(scene) for scene in parsed] == lines
    assert len(set(lines)) == len(lines)
    assert {split_of(scene) for scene in parsed} == {split}


def test_no_held_out_prompt_is_trained_on_in_any_set() -> None:
    trained = {line for name in PROMPT_SETS for line in prompts(name, "train")}
    held_out = {line for name in PROMPT_SETS for line in prompts(name, "test")}
    assert not trained & held_out
    words = [{word for line in lines for word in line.split() if not word.isdigit()} for lines in (trained, held_out)]
    assert words[0] == words[1]


def test_the_panel_for_figures_is_held_out_and_not_what_settings_are_chosen_on() -> None:
    panel = prompts("shapes", "panel")
    assert len(set(panel)) == len(panel) == 96
    assert {split_of(parse_caption(line)) for line in panel} == {"test"}
    assert not set(panel) & set(prompts("shapes", "test"))
    assert {parse_caption(line).kind for line in panel} == {"single", "count", "number"}


@pytest.mark.parametrize("split", ["train", "test"])
def test_edits_show_a_scene_that_differs_in_one_thing_from_what_is_asked_for(split: Split) -> None:
    folder = ASSETS / "prompts" / "edits"
    rows = [json.loads(line) for line in (folder / f"{split}.jsonl").read_text().splitlines()]
    assert len({row["prompt"] for row in rows}) == len(rows) == {"train": 96, "test": 48}[split]
    for row in rows:
        asked, shown = parse_caption(row["prompt"]), parse_caption(row["shown"])
        assert split_of(asked) == split and asked.kind == shown.kind == "single"
        names = ("colour", "shape", "background")
        assert sum(getattr(asked, name) != getattr(shown, name) for name in names) == 1
        picture = Image.open(folder / "images" / row["image"])
        assert picture.size == (64, 64) and picture.mode == "RGB"
        assert score(picture, shown).strict == 1.0 and score(picture, asked).strict == 0.0
    assert len(list((folder / "images").iterdir())) == 96 + 48


def test_each_set_holds_the_kinds_it_is_named_for() -> None:
    kinds = {name: {parse_caption(line).kind for line in prompts(name, "train")} for name in PROMPT_SETS}
    assert kinds == {
        "shapes": {"single", "count", "number"},
        "singles": {"single"},
        "counts": {"count"},
        "numbers": {"number"},
    }


# --- the folder ---


def test_folder_is_small_and_holds_no_pickles() -> None:
    files = [path for path in FOLDER.rglob("*") if path.is_file()]
    assert sum(path.stat().st_size for path in files) <= 8 * MEGABYTE
    assert {path.suffix for path in files} <= {".json", ".safetensors", ".md"}


def test_configuration_names_no_place_of_the_machine_it_was_made_on() -> None:
    for path in FOLDER.rglob("*.json"):
        assert "/" not in str(json.loads(path.read_text()).get("_name_or_path", "")), path


def test_the_training_script_numbers_tokens_as_the_weights_do() -> None:
    script = Path(__file__).parents[2] / "scripts" / "tiny_pipeline" / "tokenizer.json"
    if not script.exists():
        pytest.skip("the scripts are not part of an installed package")
    expected = json.loads(script.read_text())["model"]["vocab"]
    for name in ("tokenizer", "tokenizer_2"):
        assert json.loads((FOLDER / name / "tokenizer.json").read_text())["model"]["vocab"] == expected


@functools.cache
def load():
    """The pipeline, loaded once for this file."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(FOLDER, torch_dtype=torch.float32)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline


def generate(captions: list[str], guidance: float = 1.0, steps: int = 8, **arguments: int) -> np.ndarray:
    """uint8 pictures (N, 64, 64, 3), one a caption, from seeds 0, 1, ..."""
    generators = [torch.Generator().manual_seed(seed) for seed in range(len(captions))]
    output = load()(
        captions,
        num_inference_steps=steps,
        guidance_scale=guidance,
        generator=generators,
        output_type="np",
        **{"max_sequence_length": 16, **arguments},
    )
    return (output.images * 255).round().astype(np.uint8)


def test_plain_load_is_silent_and_fp32(caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]) -> None:
    load.cache_clear()
    with caplog.at_level(logging.WARNING):
        pipeline = load()
    said = caplog.text + capfd.readouterr().err
    for word in ("missing", "not initialized", "newly initialized", "unexpected", "Unexpected"):
        assert word not in said, said
    modules = [component for component in pipeline.components.values() if isinstance(component, torch.nn.Module)]
    assert len(modules) == 5
    assert {parameter.dtype for module in modules for parameter in module.parameters()} == {torch.float32}


def test_third_text_encoder_says_nothing() -> None:
    embeds = load()._get_t5_prompt_embeds(["a red circle on a white background", ""], max_sequence_length=16)
    assert embeds.shape == (2, 16, 128)
    assert torch.count_nonzero(embeds) == 0


def test_every_caption_fits_the_tokenizers_without_unknown_words() -> None:
    kinds: tuple[Kind, ...] = ("single", "count", "number")
    captions = [format_caption(scene) for kind in kinds for scene in scenes(kind)]
    pipeline = load()
    for tokenizer in (pipeline.tokenizer, pipeline.tokenizer_2, pipeline.tokenizer_3):
        rows = tokenizer(captions).input_ids
        assert max(map(len, rows)) <= 16
        assert tokenizer.unk_token_id not in {token for row in rows for token in row}
    words = [tuple(row) for row in pipeline.tokenizer(captions).input_ids]
    assert len(set(words)) == len(captions)


def test_draws_64_pixels_and_the_length_of_the_silent_text_hardly_matters() -> None:
    captions = ["a red circle on a white background", "three blue squares on a black background"]
    short, long = generate(captions), generate(captions, max_sequence_length=128)
    assert short.shape == (2, 64, 64, 3)
    assert np.abs(short.astype(int) - long.astype(int)).mean() < 6


@pytest.mark.parametrize(("guidance", "floor"), [(1.0, 0.5), (3.0, 0.75)])
def test_draws_what_held_out_captions_ask_for(guidance: float, floor: float) -> None:
    """Floors well under the accuracies in the model card: they catch broken weights, not a worse day."""
    captions = prompts("singles", "test")[:24]
    scores = [
        score(picture, parse_caption(caption))
        for picture, caption in zip(generate(captions, guidance), captions, strict=True)
    ]
    assert np.mean([item.strict for item in scores]) >= floor


def test_without_guidance_there_is_something_left_to_learn() -> None:
    """The wrong captions of its training show: a reward has both right and wrong pictures to tell apart."""
    captions = prompts("shapes", "train")[:32]
    scores = [
        score(picture, parse_caption(caption)) for picture, caption in zip(generate(captions), captions, strict=True)
    ]
    assert 0.3 <= np.mean([item.strict for item in scores]) <= 0.85


def test_an_empty_negative_prompt_guides() -> None:
    captions = prompts("counts", "test")[:12]
    means = []
    for guidance in (1.0, 2.5):
        pictures = generate(captions, guidance)
        means.append(np.mean([score(p, parse_caption(c)).graded for p, c in zip(pictures, captions, strict=True)]))
    assert means[1] > means[0] - 0.02
