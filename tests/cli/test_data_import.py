"""`flow-factory data from-folder` and `from-hf`: what people have becomes what training reads."""

from __future__ import annotations

import io
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pyarrow.parquet
from PIL import Image

from tests.cli.data_support import encoded, error_of, examples, flow_factory, shade


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
