"""Files that play: written, and read back by PyAV and the standard library."""

from __future__ import annotations

import importlib.util
import io
import subprocess
import sys
import wave
from pathlib import Path

import av
import numpy as np
import pytest
import torch

from flow_factory.data_utils.media_files import read_audio, read_video
from flow_factory.errors import InputError
from flow_factory.samples import Audio
from flow_factory.tracking import players
from flow_factory.tracking.players import encode_mp4, encode_wav, require_video_encoder
from tests.tracking.media import clip, tone


def write(folder: Path, content: bytes) -> Path:
    path = folder / "file.mp4"
    path.write_bytes(content)
    return path


@pytest.mark.parametrize("fps", [8.0, 16.0, 24.0, 24000 / 1001, 12.5])
def test_frames_come_back_in_number_rate_and_colour(tmp_path: Path, fps: float) -> None:
    frames = clip(count=9, height=32, width=48)
    video = read_video(write(tmp_path, encode_mp4(frames, fps)))
    assert video.frames.shape == frames.shape and video.fps == pytest.approx(fps, rel=1e-6)
    difference = (video.frames.int() - frames.int()).abs()
    assert difference.max() <= 6 and difference.float().mean() < 2  # read as BT.601 it would be 27 and 8


def test_the_file_names_its_colours_and_has_what_browsers_decode(tmp_path: Path) -> None:
    with av.open(str(write(tmp_path, encode_mp4(clip(), 8.0, tone())))) as container:
        (picture,) = container.streams.video
        (sound,) = container.streams.audio
        assert (picture.codec_context.name, picture.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert sound.codec_context.name == "aac"
        frame = next(container.decode(picture))
        assert (frame.colorspace, frame.color_range) == (1, 1)  # BT.709, narrow range


@pytest.mark.parametrize(("height", "width"), [(33, 47), (32, 47), (33, 48), (1, 1)])
def test_odd_sizes_repeat_the_last_row_and_column(tmp_path: Path, height: int, width: int) -> None:
    frames = clip(4, height, width)
    read = read_video(write(tmp_path, encode_mp4(frames, 8.0))).frames
    assert read.shape == (4, 3, height + height % 2, width + width % 2)
    padded = torch.nn.functional.pad(frames.float(), (0, width % 2, 0, height % 2), mode="replicate")
    assert (read.float() - padded).abs().max() <= 6


def test_gray_frames_and_a_single_one(tmp_path: Path) -> None:
    frames = torch.full((1, 1, 16, 16), 128, dtype=torch.uint8)
    read = read_video(write(tmp_path, encode_mp4(frames, 8.0))).frames
    assert read.shape == (1, 3, 16, 16) and (read.int() - 128).abs().max() <= 2


@pytest.mark.parametrize("sample_rate", [16000, 24000, 44100, 48000])
@pytest.mark.parametrize("channels", [1, 2])
def test_the_sound_in_a_video_is_in_time(tmp_path: Path, sample_rate: int, channels: int) -> None:
    """AAC encoders are late by a frame of 1024 samples; the file says so, and decoders cut it off."""
    sound = tone(1.5, sample_rate, channels)
    path = write(tmp_path, encode_mp4(clip(count=12), 8.0, sound))
    read = read_audio(path)
    count = sound.waveform.shape[1]
    assert read.sample_rate == sample_rate and read.waveform.shape[0] == channels
    assert count <= read.waveform.shape[1] <= count + 1024  # the last frame is whole
    difference = (read.waveform[:, 2048 : count - 2048] - sound.waveform[:, 2048 : count - 2048]).abs()
    assert difference.mean() < 0.03  # a shift by a frame makes it 0.4
    with av.open(str(path)) as container:
        (stream,) = container.streams.audio
        assert float(stream.duration * stream.time_base) == pytest.approx(1.5, abs=2e-3)
    assert read_video(path).frames.shape[0] == 12


def test_a_rate_that_aac_has_not_is_raised_to_the_next(tmp_path: Path) -> None:
    sound = tone(1.0, 12345, 1)
    read = read_audio(write(tmp_path, encode_mp4(clip(), 8.0, sound)))
    assert read.sample_rate == 16000 and read.waveform.shape[1] == pytest.approx(16000, abs=1100)


@pytest.mark.parametrize(("channels", "sample_rate"), [(1, 16000), (2, 24000), (3, 7)])
def test_wav_files_hold_the_samples(channels: int, sample_rate: int) -> None:
    generator = torch.Generator().manual_seed(0)
    waveform = torch.rand(channels, 1000, generator=generator) * 2.4 - 1.2  # some beyond the range
    with wave.open(io.BytesIO(encode_wav(Audio(waveform, sample_rate)))) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (channels, sample_rate, 1000)
        assert file.getsampwidth() == 2
        read = np.frombuffer(file.readframes(1000), dtype="<i2").reshape(1000, channels).T / 32767
    np.testing.assert_allclose(read, waveform.clamp(-1, 1).numpy(), atol=0.51 / 32767)


def test_bad_input_is_refused() -> None:
    frames = clip()
    for wrong in (frames.float(), frames[0], frames[:, :2], frames[:0]):
        with pytest.raises(ValueError, match="a video is a uint8 tensor"):
            encode_mp4(wrong, 8.0)
    with pytest.raises(ValueError, match="positive number of frames"):
        encode_mp4(frames, 0.0)
    with pytest.raises(ValueError, match="sound of 3 channels"):
        encode_mp4(frames, 8.0, tone(channels=3))
    for waveform in (torch.zeros(2, 0), torch.zeros(4), torch.zeros(2, 4, dtype=torch.int16)):
        with pytest.raises(ValueError, match="sound is a floating point tensor"):
            encode_wav(Audio(waveform, 16000))


def test_a_missing_encoder_is_named_with_the_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    require_video_encoder()
    monkeypatch.setattr(players, "_ENCODERS", ("no_such_encoder",))
    with pytest.raises(InputError, match=r"no_such_encoder.*flow-factory\[video\]"):
        require_video_encoder()
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(InputError, match=r'PyAV: pip install "flow-factory\[video\]"'):
        require_video_encoder()


def test_asking_for_the_encoder_imports_no_torch() -> None:
    """So that the command which needs it can say so before it loads anything."""
    code = (
        "import sys; from flow_factory.tracking.players import require_video_encoder as need; need(); "
        "sys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
