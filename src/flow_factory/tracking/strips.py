"""Videos and sounds as pictures: frames side by side over time, and waveforms."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw
from torch import Tensor

from flow_factory.samples import Audio
from flow_factory.tracking.grids import BACKGROUND, LINE_HEIGHT, SOFT_INK, font_for, resized, to_pil

STRIP_FRAMES = 6
FRAME_SIZE = 256
"""Pixels of a frame's longer side, if the video has as many."""
FRAME_GAP = 6
WAVE_HEIGHT = 48
"""Pixels of one channel's waveform."""

_MAX_CHANNELS = 2  # of what has more, the mean is drawn
_WAVE, _ZERO = (11, 98, 196), (214, 218, 224)


def shown_frames(count: int, limit: int = STRIP_FRAMES) -> list[int]:
    """Which frames stand for a video: at most `limit`, evenly spaced, the first and the last among them."""
    if count <= limit:
        return list(range(count))
    return [round(i * (count - 1) / (limit - 1)) for i in range(limit)]


def video_strip(frames: Tensor, fps: float | None, sound: Audio | None = None) -> Image.Image:
    """Frames from left to right with their times beneath, and the waveform of the sound below.

    Args:
        frames: uint8 [F, C, H, W].
        fps: Frames per second; None writes the frames' numbers instead.
        sound: What is heard with them.
    """
    chosen = shown_frames(len(frames))
    tiles = [_tile(frames[index]) for index in chosen]
    labels = [f"frame {index}" if fps is None else f"{index / fps:.2f} s" for index in chosen]
    strip = _side_by_side(tiles, labels)
    return strip if sound is None else stacked([strip, waveform(sound, strip.width)])


def frame_height(frames: Tensor) -> int:
    """Height in pixels at which the strip of a video shows its frames."""
    return _tile(frames[0]).height


def waveform(sound: Audio, width: int) -> Image.Image:
    """Lowest and highest value of each stretch of time, a row per channel (-1 to 1), with the facts beneath.

    Args:
        sound: float [channels, samples].
        width: Pixels, for the whole duration.
    """
    samples = sound.waveform.detach().cpu().float().numpy()
    channels, count = samples.shape
    drawn = samples if channels <= _MAX_CHANNELS else samples.mean(axis=0, keepdims=True)
    picture = stacked([_envelope(channel, width) for channel in drawn])
    seconds = count / sound.sample_rate
    facts = [f"{seconds:.2f} s" if seconds >= 0.1 else f"{1000 * seconds:.3g} ms", f"{sound.sample_rate / 1000:g} kHz"]
    facts += [f"{channels} channels" if channels > 1 else "mono", f"peak {np.abs(samples).max(initial=0.0):.2f}"]
    return stacked([picture, _line(f"sound: {', '.join(facts)}", width)])


def given_pictures(pictures: Sequence[Tensor], size: tuple[int, int]) -> Image.Image:
    """Condition pictures from left to right, each as large as fits.

    Args:
        pictures: uint8 [C, H, W], of any sizes.
        size: Height and width of the whole.
    """
    height, width = size
    room = max(1, (width - (len(pictures) - 1) * FRAME_GAP) // len(pictures))
    sheet = Image.new("RGB", (width, height), BACKGROUND)
    left = 0
    for picture in map(to_pil, pictures):
        scale = min(room / picture.width, height / picture.height)
        tile = picture.resize((max(1, round(picture.width * scale)), max(1, round(picture.height * scale))))
        sheet.paste(tile, (left, (height - tile.height) // 2))
        left += tile.width + FRAME_GAP
    return sheet


def stacked(parts: Sequence[Image.Image], gap: int = 2) -> Image.Image:
    """Pictures one under the other, at the left, with `gap` pixels between them."""
    height = sum(part.height for part in parts) + gap * (len(parts) - 1)
    sheet = Image.new("RGB", (max(part.width for part in parts), height), BACKGROUND)
    top = 0
    for part in parts:
        sheet.paste(part, (0, top))
        top += part.height + gap
    return sheet


def _tile(frame: Tensor) -> Image.Image:
    picture = to_pil(frame)
    return resized(picture, max(picture.size), FRAME_SIZE)


def _side_by_side(tiles: Sequence[Image.Image], labels: Sequence[str]) -> Image.Image:
    width, height = tiles[0].size
    font = font_for(labels)
    room = max([width, *(int(font.getlength(label)) + 2 for label in labels)])  # narrow frames still have their times
    sheet = Image.new("RGB", (len(tiles) * (room + FRAME_GAP) - FRAME_GAP, height + LINE_HEIGHT), BACKGROUND)
    draw = ImageDraw.Draw(sheet)
    for number, (tile, label) in enumerate(zip(tiles, labels, strict=True)):
        left = number * (room + FRAME_GAP)
        sheet.paste(tile, (left, 0))
        draw.text((left, height + 1), label, fill=SOFT_INK, font=font)
    return sheet


def _envelope(channel: np.ndarray, width: int) -> Image.Image:
    pixels = np.full((WAVE_HEIGHT, width, 3), BACKGROUND, dtype=np.uint8)
    pixels[WAVE_HEIGHT // 2] = _ZERO
    if len(channel):
        edges = np.arange(width + 1) * len(channel) // width
        starts = np.minimum(edges[:-1], len(channel) - 1)
        values = np.clip(np.nan_to_num(channel), -1, 1)
        scale = (WAVE_HEIGHT - 1) / 2
        tops = np.round((1 - np.maximum.reduceat(values, starts)) * scale)
        bottoms = np.round((1 - np.minimum.reduceat(values, starts)) * scale)
        tops[1:], bottoms[1:] = np.minimum(tops[1:], bottoms[:-1]), np.maximum(bottoms[1:], tops[:-1])  # no gaps
        rows = np.arange(WAVE_HEIGHT)[:, None]
        pixels[(rows >= tops) & (rows <= bottoms)] = _WAVE
    return Image.fromarray(pixels)


def _line(text: str, width: int) -> Image.Image:
    line = Image.new("RGB", (width, LINE_HEIGHT), BACKGROUND)
    ImageDraw.Draw(line).text((0, 1), text, fill=SOFT_INK, font=font_for([text]))
    return line
