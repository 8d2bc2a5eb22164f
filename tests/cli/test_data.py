"""`flow-factory data`: what is made is what training reads, and what is bad is named."""

from __future__ import annotations

import io
import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image
from typer.testing import CliRunner, Result

from flow_factory.cli.app import app
from flow_factory.data_utils.offline_files import OfflineExample, scan_offline_dataset
from flow_factory.hparams import DatasetArguments, get_model_spec, load_config, save_config
from flow_factory.rewards.shapes_styles import hollowness
from flow_factory.rewards.shapes_world import parse_caption, scenes, split_of
from tests.trainers.offline_support import make_dataset, offline_config, picture, record, write_records
from tests.trainers.support import make_config

SD3 = get_model_spec("sd3-5").io


def flow_factory(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def examples(folder: Path) -> list[OfflineExample]:
    """The examples of a dataset that has nothing wrong with it."""
    scan = scan_offline_dataset(DatasetArguments(dataset_dir=str(folder)), "train", io=SD3)
    assert scan.problems == []
    return scan.examples


def encoded(shade: int, size: tuple[int, int] = (24, 24), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size[1], size[0]), (shade, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


# validate ------------------------------------------------------------------------------------------------------------


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


# draw, from-folder ---------------------------------------------------------------------------------------------------


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


def test_from_folder_keeps_bytes_and_captions(tmp_path: Path) -> None:
    source = tmp_path / "mine"
    (source / "sub").mkdir(parents=True)
    for number, name in enumerate(("b.png", "a.JPG", "sub/c.png")):
        (source / name).write_bytes(encoded(40 * number, kind="JPEG" if "JPG" in name else "PNG"))
        (source / name).with_suffix(".txt").write_text(f"picture\n  {number} ")
    (source / "notes.md").write_text("no picture")
    assert "wrote 3 demonstrations" in flow_factory("data", "from-folder", source, tmp_path / "out").output
    made = examples(tmp_path / "out")
    assert [e.record.prompt for e in made] == ["picture 1", "picture 0", "picture 2"]
    assert [e.record.metadata["file"] for e in made] == ["a.JPG", "b.png", "sub/c.png"]
    for example in made:
        original = source / example.record.metadata["file"]
        assert example.arms["target"][0].path.read_bytes() == original.read_bytes()


def test_from_folder_names_every_picture_that_cannot_be_used(tmp_path: Path) -> None:
    source = tmp_path / "mine"
    source.mkdir()
    for name in ("none", "empty", "broken", "good"):
        (source / f"{name}.png").write_bytes(encoded(9))
        (source / f"{name}.txt").write_text("a caption")
    (source / "none.txt").unlink()
    (source / "empty.txt").write_text(" \n")
    (source / "broken.png").write_bytes(encoded(9)[:60])
    text = error_of(flow_factory("data", "from-folder", source, tmp_path / "out"))
    assert "3 of 4 pictures cannot be used" in text
    assert "none.png: there is no caption none.txt beside it" in text
    assert "empty.txt: is empty" in text and "broken.png cannot be decoded" in text
    assert sorted(path.name for path in tmp_path.iterdir()) == ["mine"], "nothing is left of it"
    assert "is not a folder" in error_of(flow_factory("data", "from-folder", tmp_path / "x", tmp_path / "out"))
    (tmp_path / "bare").mkdir()
    assert "holds no pictures" in error_of(flow_factory("data", "from-folder", tmp_path / "bare", tmp_path / "out"))


# from-hf -------------------------------------------------------------------------------------------------------------


def pick_a_pic(path: Path, labels: list[Any], **columns: list[Any]) -> Path:
    """A table in the layout of Pick-a-Pic: picture j of row i has the shade 20 i + 10 j."""
    rows = len(labels)
    table = {
        "caption": [f"prompt {i}" for i in range(rows)],
        "jpg_0": [encoded(20 * i, kind="JPEG") for i in range(rows)],
        "jpg_1": [encoded(20 * i + 10, kind="JPEG") for i in range(rows)],
        "label_0": labels,
        "model_0": ["m"] * rows,
    }
    pyarrow.parquet.write_table(pyarrow.table({**table, **columns}), path)
    return path


def shade(example: OfflineExample, arm: str) -> int:
    return int(np.asarray(Image.open(example.arms[arm][0].path))[0, 0, 0])


def test_from_hf_orders_pairs_by_label_and_leaves_ties_out(tmp_path: Path) -> None:
    table = pick_a_pic(tmp_path / "t.parquet", [1.0, 0.5, 0.0, None, 1.0])
    result = flow_factory("data", "from-hf", table, tmp_path / "out")
    assert result.exit_code == 0, result.output
    assert "wrote 3 preferences" in result.output and "left out: 1 ties, 1 rows without a label" in result.output
    made = examples(tmp_path / "out")
    assert [e.record.prompt for e in made] == ["prompt 0", "prompt 2", "prompt 4"]
    found = [(shade(e, "chosen"), shade(e, "rejected")) for e in made]
    expected = [(0, 10), (50, 40), (80, 90)]
    assert np.abs(np.array(found) - np.array(expected)).max() <= 2, "JPEG rounds"
    assert made[1].arms["chosen"][0].path.read_bytes() == encoded(50, kind="JPEG")
    assert [e.record.metadata["row"] for e in made] == [0, 2, 4]


def test_from_hf_reads_image_features_folders_and_single_pictures(tmp_path: Path) -> None:
    from datasets import Dataset, Features, Value
    from datasets import Image as ImageFeature

    folder = tmp_path / "tables"
    folder.mkdir()
    rows = {"text": ["a", "b"], "image": [{"bytes": encoded(7), "path": None}, {"bytes": encoded(8), "path": None}]}
    features = Features({"text": Value("string"), "image": ImageFeature()})
    Dataset.from_dict(rows, features=features).to_parquet(folder / "part.parquet")
    command = ("data", "from-hf", folder, tmp_path / "out", "--prompt-column", "text", "--image-column", "image")
    result = flow_factory(*command, "--limit", 1)
    assert result.exit_code == 0 and "wrote 1 demonstrations" in result.output, result.output
    (made,) = examples(tmp_path / "out")
    assert made.record.prompt == "a" and made.arms["target"][0].path.read_bytes() == encoded(7)


def test_from_hf_names_the_row_that_cannot_be_used(tmp_path: Path) -> None:
    wide, broken = encoded(3, (24, 48), "JPEG"), encoded(4, kind="JPEG")[:200]
    good = encoded(5, kind="JPEG")
    table = pick_a_pic(
        tmp_path / "t.parquet", [1.0, 1.0, 0.0, 1.0], jpg_1=[good, wide, broken, good], caption=["a", "b", "c", ""]
    )
    text = error_of(flow_factory("data", "from-hf", table, tmp_path / "out"))
    assert "row 1: its pictures have different shapes (24 x 24 and 48 x 24, width x height)" in text
    assert "--skip-unusable" in text and not (tmp_path / "out").exists()
    result = flow_factory("data", "from-hf", table, tmp_path / "out", "--skip-unusable")
    assert result.exit_code == 0 and "wrote 1 preferences" in result.output and "3 unusable rows" in result.output


def test_from_hf_judges_shapes_as_a_viewer_shows_them(tmp_path: Path) -> None:
    """EXIF orientation 6 turns a wide picture upright."""
    turned = io.BytesIO()
    image = Image.new("RGB", (48, 24))
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(turned, "JPEG", exif=exif)
    tall, wide = encoded(1, (48, 24), "JPEG"), encoded(1, (24, 48), "JPEG")
    frames = io.BytesIO()
    image.save(frames, "GIF", save_all=True, append_images=[Image.new("RGB", (48, 24), "red")])
    table = pick_a_pic(
        tmp_path / "t.parquet", [1, 1, 0], jpg_0=[turned.getvalue()] * 2 + [frames.getvalue()], jpg_1=[tall, wide, wide]
    )
    text = error_of(flow_factory("data", "from-hf", table, tmp_path / "out"))
    assert "row 1: its pictures have different shapes (24 x 48 and 48 x 24, width x height)" in text
    result = flow_factory("data", "from-hf", table, tmp_path / "out", "--skip-unusable")
    assert result.exit_code == 0 and "2 unusable rows" in result.output
    assert [e.size for e in examples(tmp_path / "out")] == [(48, 24)], "what was written is what training takes"


def test_from_hf_names_labels_and_cells_that_are_none(tmp_path: Path) -> None:
    table = pick_a_pic(tmp_path / "t.parquet", [1, -1, 0])
    text = error_of(flow_factory("data", "from-hf", table, tmp_path / "out"))
    assert "row 1: column 'label_0' holds -1; it must be 1 where the first picture is better" in text
    cells = [{"bytes": None, "path": str(tmp_path / "gone.jpg")}]
    other = pick_a_pic(tmp_path / "u.parquet", [1], jpg_0=cells)
    text = error_of(flow_factory("data", "from-hf", other, tmp_path / "out"))
    assert "row 0: column 'jpg_0' names" in text and "gone.jpg" in text and "No such file" in text
    assert not (tmp_path / "out").exists()


def test_from_hf_lists_the_columns_there_are(tmp_path: Path) -> None:
    table = pick_a_pic(tmp_path / "t.parquet", [1.0])
    text = error_of(flow_factory("data", "from-hf", table, tmp_path / "out", "--prompt-column", "text"))
    assert "no column 'text'" in text and "It has: caption, jpg_0, jpg_1, label_0, model_0" in text
    pyarrow.parquet.write_table(pyarrow.table({"caption": ["a"], "picture": [b"x"]}), tmp_path / "other.parquet")
    text = error_of(flow_factory("data", "from-hf", tmp_path / "other.parquet", tmp_path / "out"))
    assert "no columns jpg_0 and jpg_1; name its picture columns with --image-column" in text
    ties = pick_a_pic(tmp_path / "ties.parquet", [0.5, 0.5])
    assert "no example could be made: 2 ties" in error_of(flow_factory("data", "from-hf", ties, tmp_path / "out"))
    missing = error_of(flow_factory("data", "from-hf", tmp_path / "none.parquet", tmp_path / "out"))
    assert "none.parquet" in missing
    (tmp_path / "damaged.parquet").write_bytes(b"PAR1 and then nothing")
    assert "damaged.parquet" in error_of(flow_factory("data", "from-hf", tmp_path / "damaged.parquet", tmp_path / "o"))
    assert sorted(p.name for p in tmp_path.iterdir() if p.is_dir()) == []


# make-preferences ----------------------------------------------------------------------------------------------------


@pytest.fixture
def rl_config(tiny_sd3_dir: Path, tmp_path: Path) -> Path:
    config = tmp_path / "rl.yaml"
    save_config(make_config(tiny_sd3_dir, tmp_path, {"eval.per_device_batch_size": 4}), config)
    return config


def test_make_preferences_pairs_the_best_with_the_worst(rl_config: Path, tmp_path: Path) -> None:
    result = flow_factory(
        "data", "make-preferences", rl_config, "--output", tmp_path / "p", "--images-per-prompt", 3, "--limit", 5
    )
    assert result.exit_code == 0, result.output
    assert "wrote 5 pairs of 5 prompts" in result.output and "0 ties" in result.output
    made = examples(tmp_path / "p")
    assert len(made) == 5 and sorted(p.name for p in (tmp_path / "p").iterdir()) == ["images", "train.jsonl"]
    for example in made:
        metadata = example.record.metadata
        for arm, score in zip(("chosen", "rejected"), metadata["rewards"]["red"], strict=True):
            pixels = np.asarray(Image.open(example.arms[arm][0].path), dtype=np.float64)
            assert pixels[..., 0].mean() / 255 == pytest.approx(score, abs=1e-12), "the PNG holds what was scored"
        assert metadata["totals"][0] > metadata["totals"][1] and len(set(metadata["members"])) == 2
    assert "exists and is not written over" in error_of(
        flow_factory("data", "make-preferences", rl_config, "--output", tmp_path / "p")
    )


def test_make_preferences_goes_on_where_it_was_stopped(
    rl_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flow_factory.trainers.offline import preferences

    command = ("data", "make-preferences", rl_config, "--images-per-prompt", 2)
    assert flow_factory(*command, "--output", tmp_path / "whole").exit_code == 0
    rollout, calls = preferences.rollout_batch, [0]

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return rollout(*arguments, **keywords)

    monkeypatch.setattr(preferences, "rollout_batch", stopping)
    assert flow_factory(*command, "--output", tmp_path / "parts").exit_code == 130
    assert not (tmp_path / "parts").exists() and calls[0] == 3
    work = tmp_path / ".parts.partial"
    with (work / "progress.jsonl").open("a") as file:
        file.write('{"outcome": "pa')  # as a killed process leaves it
    text = error_of(flow_factory(*command, "--output", tmp_path / "parts", "--seed", 5))
    assert "holds unfinished work of other settings" in text
    calls[0] = 10
    assert flow_factory(*command, "--output", tmp_path / "parts").exit_code == 0
    assert calls[0] == 10 + 2, "four prompts, two at once: the first two batches were done"
    names = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path / "parts") for p in (tmp_path / "parts").rglob("*") if p.is_file())
    assert all((tmp_path / "whole" / n).read_bytes() == (tmp_path / "parts" / n).read_bytes() for n in names)
    assert not work.exists()


def test_make_preferences_counts_ties(rl_config: Path, tmp_path: Path) -> None:
    command = ("data", "make-preferences", rl_config, "--images-per-prompt", 2, "--output", tmp_path / "p")
    text = error_of(flow_factory(*command, "--limit", 2, "--min-margin", 0.9))
    assert "none of 2 prompts gave a pair (2 ties, 0 with fewer than two" in text
    assert not (tmp_path / "p").exists() and not (tmp_path / ".p.partial").exists()
    assert flow_factory(*command, "--limit", 2).exit_code == 0, "nothing of the first try is in the way"


def test_make_preferences_takes_weights_and_prompts(rl_config: Path, tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Of a run folder: its trained weights; and prompts that are not the run's own."""
    from flow_factory.trainers.build import build_trainer

    config = load_config(rl_config, ["train.max_epochs=1", "train.learning_rate=0.05", "train.ema_decay=0.0"])
    build_trainer(config).start()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.txt").write_text("a red circle\nsky\n")
    command = ("data", "make-preferences", "--prompts", tmp_path / "other", "--images-per-prompt", 2)
    assert flow_factory(*command, rl_config, "--output", tmp_path / "base").exit_code == 0
    assert flow_factory(*command, tmp_path / "save/run", "--output", tmp_path / "tuned").exit_code == 0
    base, tuned = examples(tmp_path / "base"), examples(tmp_path / "tuned")
    assert [e.record.prompt for e in base] == [e.record.prompt for e in tuned] == ["a red circle", "sky"]
    assert any(shade(a, "chosen") != shade(b, "chosen") for a, b in zip(base, tuned, strict=True)) or (
        [e.record.metadata["totals"] for e in base] != [e.record.metadata["totals"] for e in tuned]
    )


def test_make_preferences_needs_prompts_and_rewards(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    config = tmp_path / "sft.yaml"
    save_config(offline_config(tiny_sd3_dir, tmp_path, tmp_path / "data"), config)
    command = ("data", "make-preferences", config, "--output", tmp_path / "p")
    assert "has no prompts of its own; name some with --prompts" in error_of(flow_factory(*command))
    text = error_of(flow_factory(*command, "--prompts", "builtin/shapes"))
    assert "neither rewards nor eval_rewards" in text
    assert flow_factory(*command, "--images-per-prompt", 1).exit_code == 2
