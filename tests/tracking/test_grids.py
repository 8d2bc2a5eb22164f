"""Contact sheets."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.tracking.grids import MAX_TILE, save_comparison, save_grid


def solid(colour: tuple[int, int, int], size: int = 64) -> torch.Tensor:
    return torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, size, size).contiguous()


COLOURS = [(255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 0), (0, 255, 255)]


def pixels(path) -> np.ndarray:
    with Image.open(path) as image:
        return np.asarray(image.convert("RGB"))


def area(sheet: np.ndarray, colour: tuple[int, int, int]) -> int:
    return int((sheet == colour).all(axis=-1).sum())


def test_every_picture_is_there_enlarged_and_sharp(tmp_path):
    path = tmp_path / "new" / "grid.png"
    save_grid([solid(colour) for colour in COLOURS], path, captions=["a b"] * 5, columns=3)
    sheet = pixels(path)
    for colour in COLOURS:
        assert area(sheet, colour) == 128 * 128  # twice the size, no blending at the edges
    positions = [np.argwhere((sheet == colour).all(axis=-1))[0] for colour in COLOURS]
    assert positions[0][0] == positions[1][0] == positions[2][0] < positions[3][0] == positions[4][0]
    assert positions[0][1] == positions[3][1] < positions[1][1] == positions[4][1] < positions[2][1]


def test_pixels_keep_their_place(tmp_path):
    image = torch.zeros(3, 64, 64, dtype=torch.uint8)
    image[0, 3, 60] = 255
    save_grid([image], tmp_path / "g.png")
    rows, columns = np.nonzero((pixels(tmp_path / "g.png") == (255, 0, 0)).all(axis=-1))
    assert (rows.min() - 10, columns.min() - 10, len(rows)) == (6, 120, 4)


def test_captions_are_drawn_beneath_and_long_ones_are_cut(tmp_path):
    save_grid([solid(COLOURS[0])], tmp_path / "without.png")
    save_grid([solid(COLOURS[0])], tmp_path / "with.png", captions=["a red picture"])
    save_grid([solid(COLOURS[0])], tmp_path / "long.png", captions=["word " * 200])
    save_grid([solid(COLOURS[0])], tmp_path / "unbroken.png", captions=["x" * 500])
    without, short, long, unbroken = (pixels(tmp_path / f"{n}.png") for n in ("without", "with", "long", "unbroken"))
    assert without.shape == (148, 148, 3) and short.shape[0] > 148
    assert (short[140:] < 100).any()  # ink
    assert long.shape[0] == short.shape[0] + 2 * 17 and long.shape[1] == unbroken.shape[1] == 148


def test_odd_captions_do_not_fail(tmp_path):
    captions = ["", "  ", "ü 红色 🙂", "a\nb\tc", "[bold]x[/bold]"]
    save_grid([solid(colour) for colour in COLOURS], tmp_path / "g.png", captions=captions)


def test_comparison_puts_rows_one_under_the_other_in_blocks(tmp_path):
    before = [solid((10 * i, 0, 0)) for i in range(1, 11)]
    after = [solid((0, 10 * i, 0)) for i in range(1, 11)]
    save_comparison([("before", before), ("after", after)], [f"p{i}" for i in range(10)], tmp_path / "c.png", columns=8)
    sheet = pixels(tmp_path / "c.png")
    for i in range(1, 11):
        top = np.argwhere((sheet == (10 * i, 0, 0)).all(axis=-1))[0]
        bottom = np.argwhere((sheet == (0, 10 * i, 0)).all(axis=-1))[0]
        assert top[1] == bottom[1] and bottom[0] - top[0] == 138
    assert sheet.shape[1] < 6 * 150  # ten pictures become two blocks of five


def test_mixed_sizes_channels_and_large_pictures(tmp_path):
    grey = torch.full((1, 32, 64), 128, dtype=torch.uint8)
    alpha = torch.full((4, 64, 32), 255, dtype=torch.uint8)
    save_grid([grey, alpha, Image.new("L", (20, 20))], tmp_path / "g.png", columns=3)
    save_grid([solid((255, 0, 0), 1024)] * 2, tmp_path / "large.png", columns=2)
    assert area(pixels(tmp_path / "large.png"), (255, 0, 0)) == 2 * MAX_TILE**2


def test_bad_input_is_refused(tmp_path):
    path = tmp_path / "g.png"
    image = solid(COLOURS[0])
    with pytest.raises(ValueError, match="uint8"):
        save_grid([image.float()], path)
    with pytest.raises(ValueError, match=r"\[2, 64, 64\]"):
        save_grid([image[:2]], path)
    with pytest.raises(ValueError, match="2 captions for 1"):
        save_grid([image], path, captions=["a", "b"])
    with pytest.raises(ValueError, match="equally many"):
        save_comparison([("a", [image]), ("b", [])], ["x"], path)
    with pytest.raises(ValueError, match="equally many"):
        save_grid([], path)
    with pytest.raises(ValueError, match="columns"):
        save_grid([image], path, columns=0)
    assert not path.exists() and not list(tmp_path.iterdir())
