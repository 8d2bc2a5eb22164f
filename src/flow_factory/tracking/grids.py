"""Contact sheets: pictures side by side with their captions, and before/after comparisons, as PNG files."""

from __future__ import annotations

import io
import math
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flow_factory.checkpoints.atomic import atomic_write_bytes

MIN_TILE = 128  # pixels; smaller pictures are enlarged by whole factors, so that their pixels stay sharp
MAX_TILE = 512
_GAP = 10
_FONT_SIZE = 13
LINE_HEIGHT = 17
_CAPTION_LINES = 3
# Tried in this order for captions in scripts that Pillow's own font does not draw.
_WIDE_FONTS = (
    "NotoSansCJK-Regular.ttc",
    "SourceHanSans-Regular.otf",
    "wqy-microhei.ttc",
    "msyh.ttc",
    "PingFang.ttc",
    "Arial Unicode.ttf",
    "DejaVuSans.ttf",
)
Rows = Sequence[tuple[str, Sequence[Tensor | Image.Image | None]]]
"""Title and pictures of each row of a sheet; None leaves a place empty."""

BACKGROUND, SOFT_INK, _INK = (255, 255, 255), (90, 90, 90), (20, 20, 20)


def to_pil(image: Tensor | Image.Image) -> Image.Image:
    """An RGB picture from a uint8 tensor [C, H, W] with 1, 3 or 4 channels, or from a PIL image.

    Raises:
        ValueError: For another shape or dtype.
    """
    if isinstance(image, Image.Image):
        return image.convert("RGB")
    if str(image.dtype) != "torch.uint8" or image.ndim != 3 or image.shape[0] not in (1, 3, 4):
        raise ValueError(
            f"a picture is a uint8 tensor [C, H, W] with 1, 3 or 4 channels, not {image.dtype} {[*image.shape]}"
        )
    array = image.detach().cpu().permute(1, 2, 0).contiguous().numpy()
    return Image.fromarray(array[..., 0] if array.shape[2] == 1 else array).convert("RGB")


def save_grid(
    images: Sequence[Tensor | Image.Image],
    path: str | os.PathLike[str],
    captions: Sequence[str] | None = None,
    columns: int | None = None,
) -> None:
    """Saves pictures as one contact sheet, each with its caption beneath.

    Args:
        images: uint8 tensors [C, H, W] or PIL images; sizes may differ.
        path: Target PNG file; its folder is created.
        captions: One text per picture.
        columns: Pictures in a row; about square by default.

    Raises:
        ValueError: If there are no pictures, or not as many captions as pictures.
    """
    if columns is None:
        columns = min(8, math.ceil(math.sqrt(len(images)))) if images else 1
    rows = [("", images)]
    _save_blocks(rows, captions, path, columns)


def save_comparison(
    rows: Rows,
    captions: Sequence[str] | None,
    path: str | os.PathLike[str],
    columns: int = 8,
    max_tile: int = MAX_TILE,
) -> None:
    """Saves rows of pictures that belong together one under the other, such as before and after training.

    Args:
        rows: Title and pictures of each row; all rows have the same number of pictures.
        captions: One text per column, written beneath it.
        path: Target PNG file; its folder is created.
        columns: Pictures side by side; more go on in another block of rows below.
        max_tile: Height and width in pixels from which pictures are made smaller.

    Raises:
        ValueError: If the rows or the captions differ in length, or are empty.
    """
    _save_blocks(rows, captions, path, columns, max_tile)


def _save_blocks(
    rows: Rows,
    captions: Sequence[str] | None,
    path: str | os.PathLike[str],
    columns: int,
    max_tile: int = MAX_TILE,
) -> None:
    count = len(rows[0][1]) if rows else 0
    if count == 0 or any(len(images) != count for _, images in rows):
        raise ValueError(f"a sheet needs rows of equally many pictures, not {[len(images) for _, images in rows]}")
    if captions is not None and len(captions) != count:
        raise ValueError(f"{len(captions)} captions for {count} pictures")
    if columns < 1:
        raise ValueError(f"columns is {columns}; it must be at least 1")
    tiles = _scaled([[None if image is None else to_pil(image) for image in images] for _, images in rows], max_tile)
    width = max(tile.width for row in tiles for tile in row if tile is not None)
    columns = math.ceil(count / math.ceil(count / columns))  # the last block is about as wide as the others

    titles = [title for title, _ in rows]
    font = font_for([*titles, *(captions or ())])
    margin = max((math.ceil(font.getlength(title)) for title in titles), default=0)
    left = _GAP + (margin + _GAP if margin else 0)
    wrapped = [_wrap(caption, font, width) for caption in captions] if captions is not None else [[]] * count

    blocks = []
    for start in range(0, count, columns):
        part = slice(start, start + columns)
        titled = [(title, row[part]) for title, row in zip(titles, tiles, strict=True)]
        blocks.append(_block(titled, wrapped[part], width, columns, left, font))
    sheet = Image.new("RGB", (blocks[0].width, _GAP + sum(block.height for block in blocks)), BACKGROUND)
    top = _GAP
    for block in blocks:
        sheet.paste(block, (0, top))
        top += block.height
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    atomic_write_bytes(target, png_bytes(sheet))


def _block(
    rows: Sequence[tuple[str, Sequence[Image.Image | None]]],
    captions: Sequence[Sequence[str]],
    width: int,
    columns: int,
    left: int,
    font: Any,
) -> Image.Image:
    """Titled rows of up to `columns` tiles with the columns' captions, as lines, beneath; without what is above it."""
    rows = [(title, row) for title, row in rows if any(tile is not None for tile in row)]
    heights = [max(tile.height for tile in row if tile is not None) for _, row in rows]
    bottom = sum(height + _GAP for height in heights)
    caption = max(map(len, captions)) * LINE_HEIGHT
    block = Image.new("RGB", (left + columns * (width + _GAP), bottom + (caption + _GAP if caption else 0)), BACKGROUND)
    draw = ImageDraw.Draw(block)
    y = 0
    for (title, row), height in zip(rows, heights, strict=True):
        if title:
            draw.text((_GAP, y + height // 2), title, fill=SOFT_INK, font=font, anchor="lm")
        for column, tile in enumerate(row):
            if tile is not None:
                indent = (width - tile.width) // 2 if columns > 1 else 0
                x = left + column * (width + _GAP) + indent
                block.paste(tile, (x, y + (height - tile.height) // 2))
        y += height + _GAP
    for column, lines in enumerate(captions):
        for number, line in enumerate(lines):
            place = (left + column * (width + _GAP), bottom - _GAP // 2 + number * LINE_HEIGHT)
            draw.text(place, line, fill=_INK, font=font)
    return block


def png_bytes(picture: Tensor | Image.Image) -> bytes:
    """A picture as a PNG file; tensors as in `to_pil`."""
    buffer = io.BytesIO()
    to_pil(picture).save(buffer, format="PNG", optimize=False)
    return buffer.getvalue()


def resized(image: Image.Image, longest: int, max_tile: int, min_tile: int = MIN_TILE) -> Image.Image:
    """Enlarges a small picture by a whole factor, and shrinks a large one.

    Args:
        image: The picture.
        longest: Longest side in pixels of all pictures that are scaled alike.
        max_tile: What `longest` may become at most.
        min_tile: What it becomes at least.
    """
    if longest < min_tile:
        factor = math.ceil(min_tile / longest)
        return image.resize((image.width * factor, image.height * factor), Image.Resampling.NEAREST)
    if longest > max_tile:
        scale = max_tile / longest
        size = (max(1, round(image.width * scale)), max(1, round(image.height * scale)))
        return image.resize(size, Image.Resampling.LANCZOS)
    return image


def _scaled(rows: list[list[Image.Image | None]], max_tile: int) -> list[list[Image.Image | None]]:
    """All pictures, resized by the same factor."""
    longest = max(max(image.size) for row in rows for image in row if image is not None)
    return [[None if image is None else resized(image, longest, max_tile) for image in row] for row in rows]


def font_for(texts: Sequence[str]) -> Any:
    """Pillow's own font, or a system font with more scripts where a text needs one and it is there."""
    if any(ord(letter) > 0x24F and letter.isalpha() for text in texts for letter in text):
        for name in _WIDE_FONTS:
            try:
                return ImageFont.truetype(name, size=_FONT_SIZE)
            except OSError:
                continue
    return ImageFont.load_default(size=_FONT_SIZE)


def _wrap(text: str, font: Any, width: int) -> list[str]:
    """Breaks a caption into at most three lines that fit the width; what is longer ends with an ellipsis."""
    lines: list[str] = []
    line = ""
    for word in text.split():
        joined = f"{line} {word}".strip()
        if font.getlength(joined) <= width:
            line = joined
            continue
        if line:
            lines.append(line)
        while len(lines) <= _CAPTION_LINES and font.getlength(word) > width:  # scripts without spaces, long names
            fitting = _fitting(word, font, width)
            lines.append(word[:fitting])
            word = word[fitting:]
        line = word
    if line:
        lines.append(line)
    if len(lines) > _CAPTION_LINES:
        last = lines[_CAPTION_LINES - 1]
        lines = [*lines[: _CAPTION_LINES - 1], _with_ellipsis(last, font, width)]
    return lines


def _fitting(text: str, font: Any, width: int) -> int:
    """How many letters of a text fit into the width, at least one."""
    count = len(text)
    while count > 1 and font.getlength(text[:count]) > width:
        count -= 1
    return count


def _with_ellipsis(text: str, font: Any, width: int) -> str:
    while text and font.getlength(text + "…") > width:
        text = text[:-1]
    return text.rstrip() + "…"
