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
_LINE_HEIGHT = 17
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
_BACKGROUND, _INK, _SOFT_INK = (255, 255, 255), (20, 20, 20), (90, 90, 90)


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
    rows: Sequence[tuple[str, Sequence[Tensor | Image.Image]]],
    captions: Sequence[str] | None,
    path: str | os.PathLike[str],
    columns: int = 8,
) -> None:
    """Saves rows of pictures that belong together one under the other, such as before and after training.

    Args:
        rows: Title and pictures of each row; all rows have the same number of pictures.
        captions: One text per column, written beneath it.
        path: Target PNG file; its folder is created.
        columns: Pictures side by side; more go on in another block of rows below.

    Raises:
        ValueError: If the rows or the captions differ in length, or are empty.
    """
    _save_blocks(rows, captions, path, columns)


def _save_blocks(
    rows: Sequence[tuple[str, Sequence[Tensor | Image.Image]]],
    captions: Sequence[str] | None,
    path: str | os.PathLike[str],
    columns: int,
) -> None:
    count = len(rows[0][1]) if rows else 0
    if count == 0 or any(len(images) != count for _, images in rows):
        raise ValueError(f"a sheet needs rows of equally many pictures, not {[len(images) for _, images in rows]}")
    if captions is not None and len(captions) != count:
        raise ValueError(f"{len(captions)} captions for {count} pictures")
    if columns < 1:
        raise ValueError(f"columns is {columns}; it must be at least 1")
    tiles = _scaled([[to_pil(image) for image in images] for _, images in rows])
    width = max(tile.width for row in tiles for tile in row)
    height = max(tile.height for row in tiles for tile in row)
    columns = math.ceil(count / math.ceil(count / columns))  # the last block is about as wide as the others

    titles = [title for title, _ in rows]
    font = _font_for([*titles, *(captions or ())])
    margin = max((math.ceil(font.getlength(title)) for title in titles), default=0)
    left = _GAP + (margin + _GAP if margin else 0)
    wrapped = [_wrap(caption, font, width) for caption in captions] if captions is not None else [[]] * count

    # Heights of the blocks: each is all rows of up to `columns` pictures, with its longest caption beneath.
    blocks = [range(start, min(start + columns, count)) for start in range(0, count, columns)]
    caption_heights = [max(len(wrapped[i]) for i in block) * _LINE_HEIGHT for block in blocks]
    heights = [len(rows) * (height + _GAP) + (caption + _GAP if caption else 0) for caption in caption_heights]
    sheet = Image.new("RGB", (left + columns * (width + _GAP), _GAP + sum(heights)), _BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    top = _GAP
    for block, block_height in zip(blocks, heights, strict=True):
        for number, (title, row) in enumerate(zip(titles, tiles, strict=True)):
            y = top + number * (height + _GAP)
            if title:
                draw.text((_GAP, y + height // 2), title, fill=_SOFT_INK, font=font, anchor="lm")
            for column, index in enumerate(block):
                tile = row[index]
                x = left + column * (width + _GAP)
                sheet.paste(tile, (x + (width - tile.width) // 2, y + (height - tile.height) // 2))
        for column, index in enumerate(block):
            for line_number, line in enumerate(wrapped[index]):
                y = top + len(rows) * (height + _GAP) - _GAP // 2 + line_number * _LINE_HEIGHT
                draw.text((left + column * (width + _GAP), y), line, fill=_INK, font=font)
        top += block_height
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    buffer = io.BytesIO()
    sheet.save(buffer, format="PNG", optimize=False)
    atomic_write_bytes(target, buffer.getvalue())


def _scaled(rows: list[list[Image.Image]]) -> list[list[Image.Image]]:
    """Enlarges small pictures by whole factors and shrinks large ones, all by the same factor."""
    longest = max(max(image.size) for row in rows for image in row)
    if longest < MIN_TILE:
        factor = math.ceil(MIN_TILE / longest)
        return [
            [im.resize((im.width * factor, im.height * factor), Image.Resampling.NEAREST) for im in r] for r in rows
        ]
    if longest > MAX_TILE:
        scale = MAX_TILE / longest
        return [
            [
                im.resize((max(1, round(im.width * scale)), max(1, round(im.height * scale))), Image.Resampling.LANCZOS)
                for im in row
            ]
            for row in rows
        ]
    return rows


def _font_for(texts: Sequence[str]) -> Any:
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
