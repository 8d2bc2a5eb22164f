"""Statistics of pictures against values worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from flow_factory.hparams.reward_args import RewardArguments
from flow_factory.rewards import brightness as brightness_reward
from flow_factory.rewards.smoke import make_sample
from flow_factory.samples import I2AVSample, T2ISample, T2VSample
from flow_factory.samples.statistics import (
    PICTURE_STATISTICS,
    REC_709,
    VIDEO_FRAMES,
    brightness,
    contrast,
    edge_energy,
    group_diversity,
    high_frequency_ratio,
    luminance,
    picture_statistics,
    sample_frames,
    sample_statistics,
    saturation,
    thumbnails,
)

CLOSE = {"rtol": 1e-6, "atol": 1e-7}


def gray(values: torch.Tensor) -> torch.Tensor:
    """[H, W] in [0, 1] as one RGB picture of floats, [1, 3, H, W]."""
    return values.float().expand(1, 3, *values.shape)


def checkerboard(size: int, cell: int = 1) -> torch.Tensor:
    """0 and 1 in cells of `cell` pixels, [size, size]."""
    index = torch.arange(size) // cell
    return ((index[:, None] + index) % 2).float()


def cosine(size: int, ky: int, kx: int, amplitude: float) -> torch.Tensor:
    """A wave of ky and kx whole periods along the axes, [size, size]."""
    n = torch.arange(size, dtype=torch.float64)
    return amplitude * torch.cos(2 * math.pi * (ky * n[:, None] + kx * n) / size)


def test_a_picture_of_one_colour() -> None:
    picture = torch.tensor([51, 102, 204], dtype=torch.uint8)[None, :, None, None].expand(1, 3, 16, 24)
    light = REC_709[0] * 0.2 + REC_709[1] * 0.4 + REC_709[2] * 0.8
    expected = torch.tensor([[light, 0.75, 0.0, 0.0, 0.0]])  # saturation (0.8 - 0.2) / 0.8
    torch.testing.assert_close(picture_statistics(picture), expected, **CLOSE)


def test_black_has_no_saturation_and_a_pure_colour_full() -> None:
    pictures = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    pictures[1, 0] = 1  # the darkest red there is
    assert saturation(pictures).tolist() == [0.0, 1.0]


def test_a_checkerboard() -> None:
    """Half black, half white; every forward difference along either axis is 1, so the gradient's length is sqrt(2)."""
    picture = gray(checkerboard(32))
    torch.testing.assert_close(brightness(picture), torch.tensor([0.5]), **CLOSE)
    torch.testing.assert_close(contrast(picture), torch.tensor([0.5]), **CLOSE)
    torch.testing.assert_close(edge_energy(picture), torch.tensor([math.sqrt(2)]), **CLOSE)
    assert saturation(picture).item() == 0
    # Its only frequency is (1/2, 1/2) cycles per pixel, the highest there is.
    torch.testing.assert_close(high_frequency_ratio(picture), torch.tensor([1.0]), **CLOSE)


def test_a_ramp_has_its_slope_as_edge_energy() -> None:
    ramp = torch.arange(17)[:, None] * 0.02 + torch.arange(11) * 0.015
    torch.testing.assert_close(edge_energy(gray(ramp)), torch.tensor([0.025]), rtol=1e-5, atol=0)


def test_a_step_between_halves() -> None:
    """One column of differences of height d among W - 1 columns."""
    picture = torch.zeros(8, 10)
    picture[:, 5:] = 0.6
    torch.testing.assert_close(edge_energy(gray(picture)), torch.tensor([0.6 / 9]), **CLOSE)
    torch.testing.assert_close(contrast(gray(picture)), torch.tensor([0.3]), **CLOSE)


@pytest.mark.parametrize(
    ("ky", "kx", "fine"), [(0, 4, 0), (0, 5, 0), (4, 4, 0), (6, 6, 27 / 36), (7, 7, 1), (0, 10, 1), (9, 3, 1)]
)
def test_one_wave_is_coarse_or_fine(ky: int, kx: int, fine: float) -> None:
    """64 pixels: the limit of 1/8 cycles per pixel is 8 periods.

    The Hann window spreads a wave over its neighbours with powers 1, 4, 1 (of 6) along each axis. Of (6, 6), at radius
    8.5, the neighbours (5, 5), (5, 6) and (6, 5) lie below 8: 1 + 4 + 4 of 36.
    """
    wave = gray(0.5 + cosine(64, ky, kx, 0.3))
    torch.testing.assert_close(high_frequency_ratio(wave), torch.tensor([float(fine)]), rtol=1e-5, atol=1e-7)


@pytest.mark.parametrize("offset", [0.3, 0.5])
def test_two_waves_share_the_power_by_their_squares(offset: float) -> None:
    """Far enough apart that the window mixes nothing: b^2 / (a^2 + b^2), whatever the brightness."""
    picture = gray(offset + cosine(64, 3, 2, 0.2) + cosine(64, 5, 20, 0.1))
    torch.testing.assert_close(high_frequency_ratio(picture), torch.tensor([0.2]), rtol=1e-5, atol=0)


@pytest.mark.parametrize("size", [(48, 31), (31, 48)])
def test_spectrum_against_the_full_transform(size: tuple[int, int]) -> None:
    """Odd and even widths: the half spectrum's columns must be counted as often as the full one has them."""
    light = torch.rand(*size, generator=torch.Generator().manual_seed(1), dtype=torch.float64).float().double()
    n, m = (torch.arange(s, dtype=torch.float64) for s in size)
    window = torch.sin(math.pi * n / size[0])[:, None] ** 2 * torch.sin(math.pi * m / size[1]) ** 2
    centred = window * (light - (window * light).sum() / window.sum())
    power = torch.fft.fft2(centred).abs() ** 2
    fy, fx = torch.fft.fftfreq(size[0]).double(), torch.fft.fftfreq(size[1]).double()
    fine = (fy[:, None] ** 2 + fx**2) > (1 / 8) ** 2
    expected = (power[fine].sum() / power.sum()).float()[None]
    torch.testing.assert_close(high_frequency_ratio(light.float()[None, None]), expected, rtol=1e-5, atol=0)


def test_a_smooth_gradient_is_not_fine_structure() -> None:
    """Without a window the jump between the borders would put several percent of its power there."""
    assert high_frequency_ratio(gray(torch.arange(64) / 63 + torch.zeros(64, 1))).item() < 1e-3


def test_scaling_the_pixels_scales_contrast_and_edges_alone() -> None:
    picture = torch.rand(3, 3, 20, 24, generator=torch.Generator().manual_seed(2))
    for measure, factor in ((brightness, 0.25), (contrast, 0.25), (edge_energy, 0.25)):
        torch.testing.assert_close(measure(picture * 0.25), factor * measure(picture), **CLOSE)
    for measure in (saturation, high_frequency_ratio):
        torch.testing.assert_close(measure(picture * 0.25), measure(picture), rtol=1e-5, atol=0)


def test_enlarging_a_checkerboard_makes_it_coarser() -> None:
    cells = (1, 2, 4, 8, 16)
    ratios = [high_frequency_ratio(gray(checkerboard(64, cell))).item() for cell in cells]
    edges = [edge_energy(gray(checkerboard(64, cell))).item() for cell in cells]
    assert ratios[:3] == pytest.approx([1, 1, 1], rel=1e-5)  # even the fundamental, sqrt(2) / (2 cells), is fine
    # Now the fundamental is coarse; of a square wave's power it holds 8 / pi^2 along each axis.
    assert ratios[3] == pytest.approx(1 - 64 / math.pi**4, rel=0.1) and ratios[4] < ratios[3]
    assert edges == sorted(edges, reverse=True)


def test_luminance_is_that_of_the_brightness_reward() -> None:
    assert REC_709 == brightness_reward.REC_709
    pixels = torch.randint(0, 256, (1, 3, 9, 7), dtype=torch.uint8, generator=torch.Generator().manual_seed(3))
    sample = make_sample(T2ISample, pixels[0], "p", "toy", 0, {})
    reward = brightness_reward.Brightness(RewardArguments(reward_model="brightness"))
    assert brightness(pixels).tolist() == pytest.approx(reward.score([sample]), rel=1e-6)
    assert luminance(pixels).shape == (1, 9, 7)


def test_bytes_and_floats_gray_and_colour_agree() -> None:
    pixels = torch.randint(0, 256, (4, 1, 16, 16), dtype=torch.uint8, generator=torch.Generator().manual_seed(4))
    expected = picture_statistics(pixels)
    torch.testing.assert_close(picture_statistics(pixels.float() / 255), expected, rtol=0, atol=0)
    torch.testing.assert_close(picture_statistics(pixels.expand(-1, 3, -1, -1)), expected, **CLOSE)


def test_columns_are_the_single_statistics_and_the_batch_is_invisible(monkeypatch: pytest.MonkeyPatch) -> None:
    pixels = torch.randint(0, 256, (7, 3, 40, 33), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
    whole = picture_statistics(pixels)
    for column, measure in enumerate((brightness, saturation, contrast, edge_energy, high_frequency_ratio)):
        assert measure.__name__ == PICTURE_STATISTICS[column]
        assert torch.equal(whole[:, column], measure(pixels))
    assert torch.equal(whole, torch.cat([picture_statistics(p[None]) for p in pixels]))
    monkeypatch.setattr("flow_factory.samples.statistics._CHUNK", 2 * 3 * 40 * 33)
    assert torch.equal(whole, picture_statistics(pixels))
    assert picture_statistics(pixels[:0]).shape == (0, 5)


@pytest.mark.parametrize("shape", [(3, 8, 8), (2, 4, 8, 8)])
def test_another_shape_is_refused(shape: tuple[int, ...]) -> None:
    with pytest.raises(ValueError, match=r"not \[N, C, H, W\]"):
        picture_statistics(torch.zeros(shape))


def test_other_bad_pictures_are_refused() -> None:
    with pytest.raises(ValueError, match="int64"):
        brightness(torch.zeros(1, 3, 8, 8, dtype=torch.int64))
    with pytest.raises(ValueError, match="1 x 8 pixels has no gradient"):
        edge_energy(torch.zeros(1, 3, 1, 8))


# ------------------------------------------------------------------------------------------------- diversity


def test_diversity_of_flat_pictures_is_the_mean_difference() -> None:
    """Pairs of 0, 0.5 and 0.8: (0.5 + 0.8 + 0.3) / 3. They have no structure that could be unlike."""
    members = torch.tensor([0.0, 0.5, 0.8])[:, None, None, None].expand(3, 3, 16, 16)
    assert group_diversity(thumbnails(members)) == pytest.approx(1.6 / 3, rel=1e-6)
    assert group_diversity(thumbnails(members), "correlation") == 0.0


def test_equal_members_and_single_members_have_none() -> None:
    picture = torch.rand(1, 3, 32, 32, generator=torch.Generator().manual_seed(6))
    for metric in ("rms", "correlation"):
        assert group_diversity(picture.expand(4, -1, -1, -1), metric) == pytest.approx(0, abs=1e-12)
        assert group_diversity(picture, metric) == 0.0


def test_negatives_are_twice_uncorrelated_and_blanks_once() -> None:
    board = gray(checkerboard(32))
    assert group_diversity(torch.cat([board, 1 - board]), "correlation") == pytest.approx(2.0, rel=1e-6)
    assert group_diversity(torch.cat([board, 1 - board])) == pytest.approx(1.0, rel=1e-6)
    assert group_diversity(torch.cat([board, torch.zeros_like(board)]), "correlation") == pytest.approx(1.0)
    # Pairs: (board, negative) 2, (board, blank) 1, (negative, blank) 1.
    three = torch.cat([board, 1 - board, torch.full_like(board, 0.3)])
    assert group_diversity(three, "correlation") == pytest.approx(4 / 3, rel=1e-6)


def test_fading_lowers_rms_alone() -> None:
    members = torch.rand(5, 3, 32, 32, generator=torch.Generator().manual_seed(7))
    faded = 0.4 + 0.1 * members
    assert group_diversity(faded) == pytest.approx(0.1 * group_diversity(members), rel=1e-5)
    assert group_diversity(faded, "correlation") == pytest.approx(group_diversity(members, "correlation"), rel=1e-5)


def test_fine_noise_is_no_diversity() -> None:
    """Cells of 8 x 8 pixels average independent noise of deviation s to s / 8: sqrt(2) s / 8 between two members."""
    noise = 0.5 + 0.1 * torch.randn(8, 3, 256, 256, generator=torch.Generator().manual_seed(8))
    assert group_diversity(thumbnails(noise)) == pytest.approx(math.sqrt(2) * 0.1 / 8, rel=0.02)


def test_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValueError, match="'lpips' is not one of"):
        group_diversity(torch.zeros(2, 3), "lpips")  # type: ignore[arg-type]


def test_thumbnails_average_areas() -> None:
    board = gray(checkerboard(64)).mul(255).byte()
    assert torch.equal(thumbnails(board), torch.full((1, 3, 32, 32), 0.5))
    assert thumbnails(torch.zeros(2, 1, 100, 30)).shape == (2, 3, 32, 32)


# ----------------------------------------------------------------------------------------------- samples


def test_an_image_is_one_frame_and_a_video_is_averaged_over_some() -> None:
    pixels = torch.randint(0, 256, (3, 12, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(9))
    image = sample_frames(make_sample(T2ISample, pixels, "p", "toy", 0, {}))
    assert image is not None and torch.equal(image, pixels[None])
    video = make_sample(T2VSample, pixels, "p", "toy", 0, {})
    levels = torch.arange(15, dtype=torch.uint8) * 10
    video.video = levels[:, None, None, None].expand(15, 3, 12, 12).contiguous()  # type: ignore[attr-defined]
    frames = sample_frames(video)
    assert frames is not None and frames[:, 0, 0, 0].tolist() == [0, 20, 40, 60, 80, 100, 120, 140]
    assert frames.shape[0] == VIDEO_FRAMES
    row = sample_statistics([frames])[0]
    torch.testing.assert_close(row, torch.tensor([70 / 255, 0, 0, 0, 0]), **CLOSE)


@pytest.mark.parametrize("count", [1, 2, 5, 8, 9])
def test_no_frame_of_a_short_video_counts_twice(count: int) -> None:
    video = make_sample(T2VSample, torch.zeros(3, 4, 4, dtype=torch.uint8), "p", "toy", 0, {})
    video.video = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(count, 3, 4, 4)  # type: ignore[attr-defined]
    frames = sample_frames(video)
    assert frames is not None
    shown = frames[:, 0, 0, 0].tolist()
    assert len(shown) == len(set(shown)) == min(count, VIDEO_FRAMES) and (shown[0], shown[-1]) == (0, count - 1)


def test_without_pictures_there_is_nothing_to_measure() -> None:
    sample = make_sample(I2AVSample, torch.zeros(3, 8, 8, dtype=torch.uint8), "p", "toy", 0, {})
    sample.video = None  # type: ignore[attr-defined]
    assert sample_frames(sample) is None
    image = make_sample(T2ISample, torch.zeros(3, 8, 8, dtype=torch.uint8), "p", "toy", 0, {})
    image.image = None  # type: ignore[attr-defined]
    assert sample_frames(image) is None
    assert sample_statistics([]).shape == (0, 5)


def test_samples_of_several_sizes_keep_their_order() -> None:
    generator = torch.Generator().manual_seed(10)
    sizes = [(8, 8), (8, 8), (16, 12), (8, 8)]
    frames = [torch.randint(0, 256, (1, 3, *s), dtype=torch.uint8, generator=generator) for s in sizes]
    assert torch.equal(sample_statistics(frames), torch.cat([picture_statistics(f) for f in frames]))
