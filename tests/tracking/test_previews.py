"""What is seen of samples: strips of frames, waveforms, what they were made from, and sheets of all."""

from __future__ import annotations

import io
import itertools
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.rewards.smoke import make_sample
from flow_factory.samples import Audio, I2AVSample, I2ISample, I2VSample, ImageSample, T2ISample, V2VSample
from flow_factory.tracking.grids import LINE_HEIGHT
from flow_factory.tracking.previews import preview_of, save_previews
from flow_factory.tracking.strips import (
    FRAME_GAP,
    FRAME_SIZE,
    STRIP_FRAMES,
    WAVE_HEIGHT,
    shown_frames,
    video_strip,
    waveform,
)
from tests.tracking.media import clip, sounding_sample, tone, video_sample


def picture_sample(colour: tuple[int, int, int], given: list[torch.Tensor] | None = None) -> ImageSample:
    pixels = torch.tensor(colour, dtype=torch.uint8)[:, None, None].expand(3, 64, 64).contiguous()
    sample = make_sample(T2ISample if given is None else I2ISample, pixels, "a prompt", "toy", 0, {})
    assert isinstance(sample, ImageSample)
    if given is not None:
        sample.condition_images = given  # type: ignore[attr-defined]
    return sample


def array(picture: Image.Image | Path) -> np.ndarray:
    return np.asarray(picture if isinstance(picture, Image.Image) else Image.open(picture).convert("RGB")).astype(int)


def boxes(sheet: np.ndarray, colour: list[int]) -> tuple[int, int, int, int]:
    """Top, left, height and width of the area of a colour."""
    rows, columns = np.nonzero((sheet == colour).all(axis=-1))
    return rows.min(), columns.min(), rows.max() - rows.min() + 1, columns.max() - columns.min() + 1


@pytest.mark.parametrize("count", [1, 2, 5, 6, 7, 17, 81, 121])
def test_the_first_and_the_last_frame_are_among_evenly_spaced_ones(count: int) -> None:
    chosen = shown_frames(count)
    assert chosen[0] == 0 and chosen[-1] == count - 1 and len(chosen) == min(count, STRIP_FRAMES)
    steps = np.diff(chosen)
    assert count == 1 or (steps.min() >= 1 and steps.max() - steps.min() <= 1)


def test_a_strip_shows_frames_in_order_sharp_and_with_their_times_beneath() -> None:
    frames = clip(count=11, height=32, width=48)
    strip = array(video_strip(frames, 8.0))
    tile_height, tile_width = 32 * 3, 48 * 3  # enlarged by the least whole factor that makes 128 pixels
    assert strip.shape == (tile_height + LINE_HEIGHT, 6 * tile_width + 5 * FRAME_GAP, 3)
    for place, index in enumerate([0, 2, 4, 6, 8, 10]):
        colour = frames[index, :, 0, 0].tolist()
        assert boxes(strip, colour) == (0, place * (tile_width + FRAME_GAP), tile_height, tile_width)
    assert (strip[tile_height:] < 128).any()  # ink
    assert not np.array_equal(strip, array(video_strip(frames, 16.0))), "the times depend on the rate"
    assert np.array_equal(strip[:tile_height], array(video_strip(frames, None))[:tile_height])


def test_large_frames_are_scaled_down_and_narrow_ones_keep_their_captions() -> None:
    assert video_strip(clip(3, 480, 832), 16.0).size == (3 * FRAME_SIZE + 2 * FRAME_GAP, round(480 * 256 / 832) + 17)
    narrow = video_strip(clip(81, 256, 8), 16.0)
    assert narrow.width > 6 * 25 and narrow.height == 256 + LINE_HEIGHT


def test_a_waveform_shows_both_channels_at_their_amplitude_and_time() -> None:
    sound = torch.zeros(2, 24000)
    sound[0, 12000:] = 0.5  # silence, then a level
    sound[1, ::2], sound[1, 1::2] = 1.0, -1.0
    drawn = array(waveform(Audio(sound, 24000), 600))
    ink = (drawn == (11, 98, 196)).all(axis=-1)
    first, second = ink[:WAVE_HEIGHT], ink[WAVE_HEIGHT + 2 : 2 * WAVE_HEIGHT + 2]
    assert second.all(), "full amplitude from top to bottom"
    middle = (WAVE_HEIGHT - 1) / 2
    assert {abs(row - middle) for row in np.nonzero(first[:, :299])[0]} == {0.5}
    assert set(np.nonzero(first[:, 301:])[0]) == {round(0.5 * middle)}
    assert drawn.shape == (2 * WAVE_HEIGHT + 2 + 2 + LINE_HEIGHT, 600, 3)
    assert (drawn[2 * WAVE_HEIGHT + 4 :] < 128).any(), "the facts in words"


@pytest.mark.parametrize("length", [1, 10, 599, 601])
def test_waveforms_of_any_length_fill_the_width(length: int) -> None:
    drawn = array(waveform(Audio(torch.ones(1, length), 16000), 600))
    assert (drawn[0] == (11, 98, 196)).all()
    assert not (drawn[1] == (11, 98, 196)).all()


def test_sound_beyond_its_range_and_none_at_all_are_drawn() -> None:
    odd = Audio(torch.tensor([[float("nan"), 7.0, -7.0, 0.0]] * 5), 16000)
    assert waveform(odd, 200).height == WAVE_HEIGHT + 2 + LINE_HEIGHT  # of many channels the mean
    assert waveform(Audio(torch.zeros(1, 0), 16000), 200).width == 200


def test_a_preview_holds_the_strip_and_the_files_that_are_asked_for() -> None:
    sample = sounding_sample(tone(1.0))
    silent = preview_of(sample)
    assert silent is not None and silent.is_strip and silent.files == {} and silent.given is None
    full = preview_of(sample, frozenset({"mp4", "wav"}))
    assert full is not None and set(full.files) == {"mp4", "wav"}
    assert full.picture.height > video_strip(clip(), 8.0).height, "the waveform is beneath"
    without_sound = preview_of(video_sample(), frozenset({"mp4", "wav"}))
    assert without_sound is not None and set(without_sound.files) == {"mp4"}
    assert preview_of(video_sample(video=None)) is None


def test_pictures_stay_exact_and_their_sheets_as_they_were(tmp_path: Path) -> None:
    from flow_factory.tracking.grids import save_grid

    generator = torch.Generator().manual_seed(0)
    samples = []
    for _ in range(5):
        sample = picture_sample((0, 0, 0))
        sample.image = torch.randint(0, 256, (3, 64, 64), dtype=torch.uint8, generator=generator)
        samples.append(sample)
    previews = [preview_of(sample, frozenset({"mp4"})) for sample in samples]
    for sample, preview in zip(samples, previews, strict=True):
        assert preview is not None and not preview.is_strip and preview.files == {}
        assert np.array_equal(array(preview.picture), sample.image.permute(1, 2, 0).numpy())
    captions = [f"prompt {i}" for i in range(5)]
    save_previews([("", [p for p in previews if p])], captions, tmp_path / "a.png")
    save_grid([s.image for s in samples], tmp_path / "b.png", captions)
    assert (tmp_path / "a.png").read_bytes() == (tmp_path / "b.png").read_bytes()


def test_videos_stand_one_under_the_other_with_their_prompts(tmp_path: Path) -> None:
    samples = [video_sample(frames=clip(5, seed=seed)) for seed in range(3)]
    previews = [p for s in samples if (p := preview_of(s))]
    save_previews([("", previews)], ["one", "two", "three"], tmp_path / "sheet.png")
    sheet = array(tmp_path / "sheet.png")
    places = [boxes(sheet, [0, 40 * (seed + 1), 90]) for seed in range(3)]
    assert [place[1] for place in places] == [10, 10, 10]
    assert len({b[0] - a[0] for a, b in itertools.pairwise(places)}) == 1
    assert sheet.shape[1] == previews[0].picture.width + 20


def test_comparisons_of_videos_keep_a_prompt_together(tmp_path: Path) -> None:
    def row(first_seed: int) -> list:
        return [p for seed in (0, 1) if (p := preview_of(video_sample(frames=clip(3, seed=first_seed + seed))))]

    save_previews([("base", row(0)), ("trained", row(2))], ["one", "two"], tmp_path / "sheet.png")
    sheet = array(tmp_path / "sheet.png")
    tops = [boxes(sheet, [0, 40 * (seed + 1), 90])[0] for seed in (0, 2, 1, 3)]
    assert tops == sorted(tops), "base, trained of the first prompt, then of the second"


def test_condition_videos_and_pictures_are_shown_above_what_was_made(tmp_path: Path) -> None:
    """`condition_images` keep their shape, in one row; a condition video is a strip of its own."""
    tall = torch.zeros(3, 100, 50, dtype=torch.uint8)
    tall[2] = 255
    wide = torch.zeros(3, 50, 100, dtype=torch.uint8)
    wide[1] = 255
    made = [
        preview_of(video_sample(V2VSample, frames=clip(5, seed=0), condition_video=clip(7, 64, 96, seed=3))),
        preview_of(video_sample(V2VSample, frames=clip(5, seed=1), condition_video=clip(7, 64, 96, seed=4))),
    ]
    save_previews([("", [p for p in made if p])], ["one", "two"], tmp_path / "v2v.png")
    sheet = array(tmp_path / "v2v.png")
    tops = [boxes(sheet, [0, 40 * (seed + 1), 90])[0] for seed in (3, 0, 4, 1)]
    assert tops == sorted(tops)

    first = preview_of(video_sample(I2VSample, frames=clip(5, 32, 48), condition_images=[tall, wide]))
    assert first is not None and first.given is not None
    given = array(first.given)
    assert given.shape == (96, first.picture.width, 3), "as high as a frame"
    assert boxes(given, [0, 0, 255])[2:] == (96, 48) and boxes(given, [0, 255, 0])[2:] == (96, 192)

    edits = [preview_of(picture_sample((9, 9, 9), [tall])), preview_of(picture_sample((8, 8, 8), []))]
    save_previews([("cycle 0", [p for p in edits if p])], ["edit", "no reference"], tmp_path / "edit.png")
    sheet = array(tmp_path / "edit.png")
    blue, gray = boxes(sheet, [0, 0, 255]), boxes(sheet, [9, 9, 9])
    assert blue[0] + blue[2] < gray[0] and gray[1] <= blue[1] < gray[1] + gray[3]


def test_each_prompt_takes_the_height_that_its_own_references_need(tmp_path: Path) -> None:
    """A row without references has no empty place for them."""
    given = [[clip(3, 96, 96, seed=3)], [clip(3, seed=4), clip(3, seed=5)], []]
    samples = [
        video_sample(I2AVSample, frames=clip(5, seed=i), condition_videos=videos) for i, videos in enumerate(given)
    ]
    previews = [p for s in samples if (p := preview_of(s))]
    save_previews([("", previews)], ["one", "two", "three"], tmp_path / "sheet.png")
    above = [10 + p.given.height if p.given else 0 for p in previews]
    caption = LINE_HEIGHT + 10
    assert array(tmp_path / "sheet.png").shape[0] == 10 + sum(
        extra + p.picture.height + 10 + caption for extra, p in zip(above, previews, strict=True)
    )


def test_references_of_every_kind_stand_one_under_the_other() -> None:
    square = torch.zeros(3, 50, 50, dtype=torch.uint8)
    square[2] = 255
    references = {"condition_images": [square], "condition_videos": [clip(7, 64, 96, seed=3), clip(3, seed=4)]}
    sample = video_sample(I2AVSample, frames=clip(5, 32, 48), condition_sounds=[tone(), tone()], **references)
    preview = preview_of(sample)
    assert preview is not None and preview.given is not None
    given = array(preview.given)
    tops = [boxes(given, colour)[0] for colour in ([0, 0, 255], [0, 160, 90], [0, 200, 90])]
    assert tops == [0, 96 + FRAME_GAP, 96 + 128 + LINE_HEIGHT + 2 * FRAME_GAP]
    below = given[tops[-1] + 96 + LINE_HEIGHT :]
    assert below.shape[0] == 2 * (FRAME_GAP + 2 * WAVE_HEIGHT + 2 * 2 + LINE_HEIGHT) and (below == (11, 98, 196)).any()


def test_a_preview_is_a_whole_picture(tmp_path: Path) -> None:
    preview = preview_of(sounding_sample())
    assert preview is not None
    save_previews([("", [preview])], ["a prompt"], tmp_path / "sheet.png")
    with Image.open(io.BytesIO((tmp_path / "sheet.png").read_bytes())) as picture:
        picture.load()
        assert picture.size[0] == preview.picture.width + 20
