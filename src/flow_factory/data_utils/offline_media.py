"""Stored media as tensors: pictures decoded as a viewer shows them, and brought to the size of their batch.

A picture is turned upright by its EXIF orientation, laid on white where it is transparent and converted to RGB. To
reach a size it is scaled until it covers it (Lanczos) and cut around its middle; a picture of that size keeps its
pixels.
"""

from __future__ import annotations

import io
import math
import struct
import warnings
from pathlib import Path

from PIL import Image, ImageOps, UnidentifiedImageError

from flow_factory.contracts import Modality
from flow_factory.errors import InputError

Size = tuple[int, int]
"""Height and width in pixels."""

DECODABLE = frozenset({Modality.IMAGE, Modality.VIDEO})
"""Kinds of media that can be decoded; the schema knows more."""

# What PIL's decoders let through when a file is damaged: whatever their parsers happen to raise.
_DAMAGE = (
    OSError, EOFError, SyntaxError, ValueError, TypeError, LookupError, ArithmeticError, struct.error,
    Image.DecompressionBombError,
)  # fmt: skip
_ASPECT_TOLERANCE = 0.01
_ORIENTATION = 0x0112
_UPRIGHT = 1
_TURNED_BY_A_QUARTER = (5, 6, 7, 8)


def image_size(path: Path, place: str = "") -> Size:
    """Height and width that `read_image` would give, read off the file's header.

    Args:
        path: The picture.
        place: `file:line` that names it, for messages.

    Raises:
        InputError: If the header cannot be read, or the file holds several pictures or greys of 32 bits.
    """
    try:
        with _opened(path) as image:
            _check_readable(image, path, place)
            width, height = image.size
            turned = _orientation(image) in _TURNED_BY_A_QUARTER
    except _DAMAGE as error:
        raise _unreadable(path, place, error) from error
    return (width, height) if turned else (height, width)


def read_image(source: Path | bytes, place: str = "") -> Image.Image:
    """The whole picture in RGB.

    Args:
        source: The picture's file, or its encoded bytes.
        place: What names it, `file:line` for a file, for messages.

    Raises:
        InputError: If it cannot be decoded to its end, or holds several pictures or greys of 32 bits.
    """
    try:
        with _opened(source) as image:
            _check_readable(image, source, place)
            turned = _orientation(image) != _UPRIGHT
            image.load()
            return _to_rgb(ImageOps.exif_transpose(image) if turned else image)
    except _DAMAGE as error:
        raise _unreadable(source, place, error) from error


def fit_image(image: Image.Image, size: Size) -> Image.Image:
    """The picture scaled to cover `size` and cut around its middle; the same picture if it has that size.

    Args:
        image: In RGB.
        size: (height, width).
    """
    height, width = size
    if image.size == (width, height):
        return image
    return ImageOps.fit(image, (width, height), Image.Resampling.LANCZOS, centering=(0.5, 0.5))


def same_shape(one: Size, other: Size) -> bool:
    """Whether two sizes have one aspect ratio, to one percent: scaled to one size, neither loses more than an edge."""
    return abs(math.log(one[0] * other[1] / (one[1] * other[0]))) <= _ASPECT_TOLERANCE


def _opened(source: Path | bytes) -> Image.Image:
    with warnings.catch_warnings():
        # A picture of 90 to 180 million pixels is only warned of; larger ones raise.
        warnings.simplefilter("ignore", Image.DecompressionBombWarning)
        return Image.open(io.BytesIO(source) if isinstance(source, bytes) else source)


def _check_readable(image: Image.Image, source: Path | bytes, place: str) -> None:
    if image.mode in ("I", "F"):  # PIL would clip them to 0 ... 255: white, or black
        raise InputError(
            f"{_subject(source, place)} has greys of 32 bits, of which nothing says how bright they are; "
            f"save it with 8 or 16 bits."
        )
    # Cameras write JPEGs with a preview behind the picture (MPO); viewers show the first.
    frames = 1 if image.format == "MPO" else getattr(image, "n_frames", 1)
    if frames > 1:
        raise InputError(f"{_subject(source, place)} holds {frames} pictures; give a file with one.")


def _orientation(image: Image.Image) -> int:
    """The EXIF orientation, as far as the header tells it: PIL decodes a whole PNG to look behind its pixels."""
    if image.format == "PNG" and "exif" not in image.info:
        return _UPRIGHT
    return image.getexif().get(_ORIENTATION, _UPRIGHT)


def _to_rgb(image: Image.Image) -> Image.Image:
    if "A" in image.getbands() or "transparency" in image.info:
        overlay = image.convert("RGBA")
        white = Image.new("RGBA", overlay.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, overlay).convert("RGB")
    if image.mode.startswith("I;16"):
        # PIL clips 16-bit greys to 255 instead of scaling them.
        return image.point(lambda value: value / 256, "L").convert("RGB")
    return image.convert("RGB")


def _unreadable(source: Path | bytes, place: str, error: BaseException) -> InputError:
    if isinstance(error, FileNotFoundError):
        what = "does not exist"
    elif isinstance(error, UnidentifiedImageError):
        what = "is no picture in a known format"
    else:
        what = f"cannot be decoded: {str(error).rstrip('.')}"
    return InputError(f"{_subject(source, place)} {what}; replace the file or remove its record.")


def _subject(source: Path | bytes, place: str) -> str:
    if isinstance(source, bytes):
        return place
    return f"{place}: {source}" if place else str(source)
