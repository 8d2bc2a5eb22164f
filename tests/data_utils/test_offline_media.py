"""Pictures are decoded as a viewer shows them, and what is no picture is named."""

from __future__ import annotations

import io
import random
import struct
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flow_factory.data_utils.offline_media import fit_image, image_size, read_image, same_shape
from flow_factory.errors import InputError


def _gradient(height: int, width: int) -> Image.Image:
    y, x = np.mgrid[0:height, 0:width]
    pixels = np.stack([255 * x / width, 255 * y / height, 0 * x], axis=-1).astype(np.uint8)
    return Image.fromarray(pixels)


@pytest.mark.parametrize("suffix", ["png", "jpg", "webp"])
def test_pictures_are_turned_upright(tmp_path: Path, suffix: str) -> None:
    """EXIF orientation 6: the first row of the file is the right side of the picture."""
    image, path = _gradient(16, 48), tmp_path / f"a.{suffix}"
    exif = image.getexif()
    exif[0x0112] = 6
    image.save(path, exif=exif, quality=95)
    assert image_size(path) == (48, 16)
    upright = np.asarray(read_image(path)).astype(int)
    assert upright.shape == (48, 16, 3)
    expected = np.rot90(np.asarray(image).astype(int), k=-1)
    assert np.abs(upright - expected).max() <= (0 if suffix == "png" else 24)


def test_size_of_the_header_is_that_of_the_decoded_picture(tmp_path: Path) -> None:
    for mode in ("RGB", "L", "P", "RGBA", "1", "CMYK"):
        path = tmp_path / f"{mode}.{'jpg' if mode == 'CMYK' else 'png'}"
        Image.new(mode, (12, 20)).save(path)
        image = read_image(path)
        assert image.mode == "RGB" and image_size(path) == (image.height, image.width) == (20, 12)


def test_transparency_lies_on_white(tmp_path: Path) -> None:
    image = Image.new("RGBA", (4, 4), (255, 0, 0, 0))
    image.putpixel((1, 1), (0, 0, 255, 255))
    image.putpixel((2, 2), (0, 0, 0, 128))
    image.save(tmp_path / "a.png")
    read = read_image(tmp_path / "a.png")
    assert read.getpixel((0, 0)) == (255, 255, 255) and read.getpixel((1, 1)) == (0, 0, 255)
    assert read.getpixel((2, 2)) == (127, 127, 127)


def test_sixteen_bits_are_scaled_not_clipped(tmp_path: Path) -> None:
    values = np.linspace(0, 65535, 64).astype(np.uint16).reshape(8, 8)
    Image.fromarray(values).save(tmp_path / "a.png")
    read = np.asarray(read_image(tmp_path / "a.png"))[..., 0].astype(int)
    assert np.abs(read - values // 256).max() <= 1


def test_a_picture_of_the_right_size_keeps_its_pixels() -> None:
    image = _gradient(24, 40)
    assert fit_image(image, (24, 40)) is image


def test_other_sizes_are_covered_and_cut_around_the_middle() -> None:
    """A picture twice as wide as the size loses a quarter on each side, and keeps its shapes."""
    wide = Image.new("RGB", (128, 32), (255, 0, 0))
    wide.paste((0, 0, 255), (32, 0, 96, 32))
    fitted = np.asarray(fit_image(wide, (32, 64)))
    assert fitted.shape == (32, 64, 3) and (fitted[:, 2:-2] == (0, 0, 255)).all()
    halved = np.asarray(fit_image(_gradient(64, 64), (32, 32))).astype(int)
    coarse = np.asarray(_gradient(32, 32)).astype(int)
    assert np.abs(halved - coarse)[2:-2, 2:-2].max() <= 4


def test_what_cannot_be_decoded_is_named_with_its_line(tmp_path: Path) -> None:
    image, whole = _gradient(64, 64), tmp_path / "a.png"
    image.save(whole)
    cut = tmp_path / "cut.png"
    cut.write_bytes(whole.read_bytes()[: whole.stat().st_size // 2])
    assert image_size(cut) == (64, 64), "the header is whole"
    with pytest.raises(InputError, match=r"^d\.jsonl:3: .*cut\.png cannot be decoded: .*truncated"):
        read_image(cut, "d.jsonl:3")
    (tmp_path / "text.png").write_text("no picture")
    for function in (image_size, read_image):
        with pytest.raises(InputError, match=r"^d\.jsonl:4: .*text\.png is no picture in a known format"):
            function(tmp_path / "text.png", "d.jsonl:4")
        with pytest.raises(InputError, match=r"^d\.jsonl:5: .*none\.png does not exist"):
            function(tmp_path / "none.png", "d.jsonl:5")
    frames = [Image.new("L", (4, 4), shade) for shade in (0, 90, 180)]
    frames[0].save(tmp_path / "a.gif", save_all=True, append_images=frames[1:])
    with pytest.raises(InputError, match="holds 3 pictures"):
        image_size(tmp_path / "a.gif")


@pytest.mark.filterwarnings("ignore")  # PIL warns of some kinds of damage before it raises
@pytest.mark.parametrize("kind", ["PNG", "JPEG", "WEBP", "TIFF", "BMP", "GIF", "PPM"])
def test_damage_of_any_kind_is_an_error_of_the_input(tmp_path: Path, kind: str) -> None:
    """PIL lets through what its parsers happen to raise: struct.error, TypeError, DecompressionBombError and others."""
    image, path, generator = _gradient(24, 24), tmp_path / "a", random.Random(1)
    buffer = io.BytesIO()
    image.save(buffer, kind)
    refused = 0
    for number in range(150):
        data = bytearray(buffer.getvalue())
        if number % 2:
            data = data[: generator.randrange(len(data))]
        for _ in range(generator.randrange(1, 6) if data else 0):
            data[generator.randrange(min(len(data), 200))] = generator.randrange(256)
        path.write_bytes(bytes(data))
        for function in (image_size, read_image):
            try:
                function(path, "d.jsonl:1")
            except InputError as error:
                assert str(error).startswith(f"d.jsonl:1: {path} ")
                refused += 1
    assert refused > 50


def test_a_picture_of_too_many_pixels_is_named(tmp_path: Path) -> None:
    header = b"BM" + struct.pack("<IHHI", 54, 0, 0, 54) + struct.pack("<IiiHHIIiiII", 40, 40000, 40000, 1, 24, *[0] * 6)
    (tmp_path / "a.bmp").write_bytes(header)
    for function in (image_size, read_image):
        with pytest.raises(InputError, match=r"^d\.jsonl:2: .*a\.bmp cannot be decoded: .*1600000000 pixels"):
            function(tmp_path / "a.bmp", "d.jsonl:2")


def test_the_preview_behind_a_cameras_picture_is_passed_over(tmp_path: Path) -> None:
    image = _gradient(48, 32)
    image.save(tmp_path / "a.jpg", "MPO", save_all=True, append_images=[_gradient(12, 8)], quality=95)
    with Image.open(tmp_path / "a.jpg") as written:
        assert written.format == "MPO" and getattr(written, "n_frames", 1) == 2
    assert image_size(tmp_path / "a.jpg") == (48, 32)
    read = np.asarray(read_image(tmp_path / "a.jpg")).astype(int)
    assert np.abs(read - np.asarray(image).astype(int)).max() <= 24


def test_encoded_bytes_are_read_as_their_file_is(tmp_path: Path) -> None:
    path = tmp_path / "a.png"
    _gradient(8, 6).save(path)
    assert np.array_equal(np.asarray(read_image(path.read_bytes())), np.asarray(read_image(path)))
    with pytest.raises(InputError, match=r"^column 'x' is no picture in a known format"):
        read_image(b"text", "column 'x'")


def test_shapes_agree_to_a_hundredth() -> None:
    assert same_shape((100, 200), (512, 1024)) and same_shape((1000, 1000), (1000, 1009))
    assert not same_shape((1000, 1000), (1000, 1011)) and not same_shape((100, 200), (200, 100))


@pytest.mark.parametrize("mode", ["I", "F"])
def test_greys_of_32_bits_have_no_brightness(tmp_path: Path, mode: str) -> None:
    """PIL clips them: floats of 0 to 1 would be a black picture, and whole numbers above 255 a white one."""
    path = tmp_path / "grey.tiff"
    Image.new(mode, (12, 20), 1).save(path)
    for read in (read_image, image_size):
        with pytest.raises(InputError, match=r"x:3: .*grey\.tiff has greys of 32 bits.*save it with 8 or 16 bits"):
            read(path, "x:3")
