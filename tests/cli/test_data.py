"""`flow-factory data validate` and `draw`: what is bad is named, and what is drawn is what training reads."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

from PIL import Image

from flow_factory.hparams import save_config
from flow_factory.hparams.starter import starter_config
from flow_factory.rewards.shapes_styles import hollowness
from flow_factory.rewards.shapes_world import parse_caption, scenes, split_of
from flow_factory.tracking.players import encode_mp4
from tests.cli.data_support import error_of, examples, flow_factory
from tests.parity.media import clip, save, save_with_sound, tone
from tests.trainers.offline_support import make_dataset, offline_config, picture, record, write_records
from tests.trainers.support import make_config


def test_validate_says_that_all_is_good(tmp_path: Path) -> None:
    make_dataset(tmp_path, "preference", 5, ((32, 32), (24, 40)))
    for source in (tmp_path, tmp_path / "train.jsonl"):
        result = flow_factory("data", "validate", source)
        assert result.exit_code == 0
        assert f"{tmp_path / 'train.jsonl'}: 5 preferences, all good" in result.output
        assert "32 x 32 (3), 24 x 40 (2)" in result.output


def test_validate_lists_every_bad_record_and_decodes_to_the_end(tmp_path: Path) -> None:
    make_dataset(tmp_path, count=30)
    lines = (tmp_path / "train.jsonl").read_text().splitlines()
    spoiled = [{**json.loads(line), "schema_version": 1} if n in range(3, 27) else line for n, line in enumerate(lines)]
    write_records(tmp_path, spoiled)
    whole = (tmp_path / "images" / "29-0.png").read_bytes()
    (tmp_path / "images" / "29-0.png").write_bytes(whole[: len(whole) - 30])
    (tmp_path / "images" / "1-0.png").unlink()
    text = error_of(flow_factory("data", "validate", tmp_path))
    assert "26 problems" in text and "4 good demonstrations, 26 problems" in text
    for line in (2, *range(4, 28), 30):
        assert f"{tmp_path / 'train.jsonl'}:{line}: " in text, line
    assert "29-0.png cannot be decoded" in text


def test_validate_takes_a_configuration(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", "preference", 4)
    config = tmp_path / "run.yaml"
    save_config(offline_config(Path("builtin/tiny-sd3-shapes"), tmp_path, tmp_path / "data", "offline-dpo"), config)
    assert flow_factory("data", "validate", config).exit_code == 0
    assert "2 preferences" in flow_factory("data", "validate", config, "data.max_dataset_size=2").output
    assert "a configuration has its own" in error_of(flow_factory("data", "validate", config, "--split", "train"))
    assert "overrides a configuration" in error_of(flow_factory("data", "validate", tmp_path / "data", "a=b"))


def test_validate_of_a_prompt_run_points_to_check(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    config = tmp_path / "run.yaml"
    save_config(make_config(tiny_sd3_dir, tmp_path), config)
    assert "reads prompts, not stored examples; `flow-factory check`" in error_of(
        flow_factory("data", "validate", config)
    )


def test_validate_against_a_model(tmp_path: Path) -> None:
    row = record("demonstration", "x", "a.png")
    row["input"]["media"] = [{"type": "image", "path": "a.png"}]
    (tmp_path / "images").mkdir()
    picture(tmp_path / "images" / "a.png", 1)
    write_records(tmp_path, [row])
    assert flow_factory("data", "validate", tmp_path).exit_code == 0
    assert "the model takes no image" in error_of(flow_factory("data", "validate", tmp_path, "--model-type", "sd3-5"))
    shutil.move(tmp_path / "images", tmp_path / "elsewhere")
    assert "is not a file under" in error_of(flow_factory("data", "validate", tmp_path))
    assert flow_factory("data", "validate", tmp_path, "--image-dir", tmp_path / "elsewhere").exit_code == 0


def test_validate_decodes_videos_with_their_sound(tmp_path: Path) -> None:
    path = save_with_sound(clip(0), tone(0, 1.0), tmp_path / "videos" / "a")
    row = record("demonstration", "x", path.name)
    row["supervision"]["target"]["media"][0]["type"] = "video"
    write_records(tmp_path, [row])
    for options in ([], ["--model-type", "wan2_t2v"], ["--model-type", "minimax-h3-t2va"]):
        assert "1 demonstrations, all good" in flow_factory("data", "validate", tmp_path, *options).output
    save(clip(0), tmp_path / "videos" / "a")
    assert flow_factory("data", "validate", tmp_path).exit_code == 0
    said = error_of(flow_factory("data", "validate", tmp_path, "--model-type", "minimax-h3-t2va"))
    assert "has no sound track" in said
    whole = encode_mp4(clip(0, 24).frames, 24.0)
    begin = whole.index(b"mdat") + 1500
    path.write_bytes(whole[:begin] + bytes(2500) + whole[begin + 2500 :])
    assert "a.mkv cannot be decoded" in error_of(flow_factory("data", "validate", tmp_path))


def test_validate_of_a_configuration_finds_what_does_not_fit_it(tmp_path: Path) -> None:
    """What `check` refuses is not all good here: a video with fewer frames than training takes."""
    path = save(clip(0, frames=5), tmp_path / "data" / "videos" / "a")
    row = record("demonstration", "x", path.name)
    row["supervision"]["target"]["media"][0]["type"] = "video"
    write_records(tmp_path / "data", [row])
    config = tmp_path / "run.yaml"
    config.write_text(starter_config("sft", "wan2_t2v"))
    options = (f"data.dataset_dir={tmp_path / 'data'}", "train.num_frames=5")
    assert "1 demonstrations, all good" in flow_factory("data", "validate", config, *options).output
    text = error_of(flow_factory("data", "validate", config, options[0], "train.num_frames=9"))
    assert "train.jsonl:1" in text and "has 5 frames, but train.num_frames is 9" in text


def test_validate_decodes_the_inputs_too(tmp_path: Path) -> None:
    rows = [record("demonstration", f"x {n}", "target.png") for n in range(3)]
    (tmp_path / "images").mkdir()
    for number, row in enumerate(rows):
        row["input"]["media"] = [{"type": "image", "path": picture(tmp_path / "images" / f"in-{number}.png", number)}]
    picture(tmp_path / "images" / "target.png", 9)
    path = write_records(tmp_path, rows)
    assert flow_factory("data", "validate", tmp_path).exit_code == 0
    damaged = tmp_path / "images" / "in-1.png"
    damaged.write_bytes(damaged.read_bytes()[:-40])
    text = error_of(flow_factory("data", "validate", tmp_path))
    assert f"{path}:2: {damaged} cannot be decoded" in text and "2 good demonstrations, 1 problems" in text


def test_validate_takes_no_option_that_would_have_no_effect(tmp_path: Path) -> None:
    path = make_dataset(tmp_path, count=2) / "train.jsonl"
    text = error_of(flow_factory("data", "validate", path, "--split", "test"))
    assert f"--split test chooses a file of a folder, and {path} is a file; leave it out" in text


def test_check_reads_stored_examples(tmp_path: Path) -> None:
    make_dataset(tmp_path / "data", count=6)
    config = tmp_path / "run.yaml"
    mapping = offline_config(
        Path("builtin/tiny-sd3-shapes"), tmp_path, tmp_path / "data", changes={"train.resolution": 64}
    )
    save_config(mapping, config)
    text = error_of(flow_factory("check", config))
    line = 1 + next(n for n, row in enumerate(config.read_text().split("\n")) if "gradient_accumulation_steps" in row)
    assert f"train.gradient_accumulation_steps ({config}:{line}): 2 does not divide the 3 batches" in text
    result = flow_factory("check", config, "train.gradient_accumulation_steps=3")
    assert result.exit_code == 0 and "stored examples: 6" in result.output and "group" not in result.output
    (tmp_path / "data" / "images" / "4-0.png").unlink()
    text = error_of(flow_factory("check", config, "train.gradient_accumulation_steps=3"))
    assert f"data.dataset_dir ({config}:" in text and f"{tmp_path / 'data' / 'train.jsonl'}:5: " in text


def test_draw_makes_outlines_of_training_combinations(tmp_path: Path) -> None:
    result = flow_factory("data", "draw", tmp_path / "a", "--number", 24)
    assert result.exit_code == 0 and "wrote 24 demonstrations and 48 held-out prompts" in result.output
    drawn = examples(tmp_path / "a")
    assert len(drawn) == 24
    for example in drawn:
        scene = parse_caption(example.record.prompt)
        assert split_of(scene) == "train" and scene.kind == "single"
        assert hollowness(Image.open(example.arms["target"][0].path), scene) > 0.95
    held_out = (tmp_path / "a" / "test.txt").read_text().splitlines()
    assert len(held_out) == sum(split_of(scene) == "test" for scene in scenes("single"))
    assert all(split_of(parse_caption(prompt)) == "test" for prompt in held_out)
    assert flow_factory("data", "draw", tmp_path / "b", "--number", 24).exit_code == 0
    files = sorted(path.relative_to(tmp_path / "a") for path in (tmp_path / "a").rglob("*") if path.is_file())
    assert all((tmp_path / "a" / f).read_bytes() == (tmp_path / "b" / f).read_bytes() for f in files)
    assert "exists and is not written over" in error_of(flow_factory("data", "draw", tmp_path / "a"))
