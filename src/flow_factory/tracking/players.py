"""Files that play: videos as MP4 (H.264, with their sound as AAC) by PyAV, waveforms as WAV by the standard library.

Both are what browsers play without a plugin. H.264 as all of them decode it has colour at half resolution (yuv420p) and
is lossy, so these files are to be looked at; what is measured are the frames themselves. Needs no torch.
"""

from __future__ import annotations

import importlib.util
import io
import wave
from fractions import Fraction
from typing import TYPE_CHECKING, Any

import numpy as np

from flow_factory.errors import InputError

if TYPE_CHECKING:
    from torch import Tensor

    from flow_factory.samples import Audio

REMEDY = 'pip install "flow-factory[video]"'

_ENCODERS = ("libx264", "libopenh264")  # builds of FFmpeg without GPL parts have the second alone
_BT709 = 1  # in the tables of ITU-T H.273, for matrix, primaries and transfer alike
_NARROW_RANGE = 1
_LAYOUTS = {1: "mono", 2: "stereo", 6: "5.1"}
# Sampling rates of ISO/IEC 14496-3, table 1.18; sound at another one is resampled to the next higher.
_AAC_RATES = (7350, 8000, 11025, 12000, 16000, 22050, 24000, 32000, 44100, 48000, 64000, 88200, 96000)


def require_video_encoder() -> None:
    """Checks that videos can be written.

    Raises:
        InputError: If PyAV is missing, or its FFmpeg has no encoder of H.264.
    """
    if importlib.util.find_spec("av") is None:
        raise InputError(f"writing videos needs PyAV: {REMEDY}.")
    _encoder()


def encode_mp4(frames: Tensor, fps: float, sound: Audio | None = None) -> bytes:
    """A video as an MP4 file.

    Args:
        frames: uint8 [F, C, H, W] with 1 or 3 channels. An odd height or width is made even, which H.264 needs, by
            showing the last row or column twice.
        fps: Frames per second.
        sound: What is heard, from the first frame on; it may be longer or shorter.

    Raises:
        InputError: If PyAV or its encoder is missing.
        ValueError: If frames or sound have another shape or dtype, or the rate is not positive.
    """
    import av
    from av.video.reformatter import ColorRange, Colorspace

    pixels = _even_pixels(frames)
    if not fps > 0:
        raise ValueError(f"a video has a positive number of frames per second, not {fps}")
    buffer = io.BytesIO()
    with av.open(buffer, "w", format="mp4") as container:
        options = {"crf": "17", "preset": "veryfast"}
        stream: Any = container.add_stream(_encoder(), rate=Fraction(fps).limit_denominator(1001), options=options)
        stream.height, stream.width = pixels.shape[1:3]
        stream.pix_fmt = "yuv420p"
        # Said in the file: players guess the matrix from the height where it is not, and colours shift.
        context = stream.codec_context
        context.colorspace = context.color_primaries = context.color_trc = _BT709
        context.color_range = _NARROW_RANGE
        heard = None if sound is None else _sound_stream(container, sound)  # before the first packet writes the header
        for picture in pixels:
            frame = av.VideoFrame.from_ndarray(picture, format="rgb24")
            converted = frame.reformat(
                format="yuv420p", dst_colorspace=Colorspace.ITU709, dst_color_range=ColorRange.MPEG
            )
            container.mux(stream.encode(converted))
        container.mux(stream.encode())
        if sound is not None:
            _encode_sound(container, heard, sound)
    return buffer.getvalue()


def encode_wav(sound: Audio) -> bytes:
    """A waveform as a WAV file of 16-bit integers.

    Args:
        sound: float [channels, samples]; what is beyond [-1, 1] is clipped.

    Raises:
        ValueError: If it has another shape or dtype.
    """
    samples = _waveform(sound)
    buffer = io.BytesIO()
    with wave.open(buffer, "wb") as file:
        file.setnchannels(samples.shape[0])
        file.setsampwidth(2)
        file.setframerate(sound.sample_rate)
        file.writeframes(np.round(samples.T * 32767).astype("<i2").tobytes())
    return buffer.getvalue()


def _encoder() -> str:
    from av.codec import codecs_available

    for name in _ENCODERS:
        if name in codecs_available:
            return name
    raise InputError(
        f"PyAV is built on an FFmpeg without an encoder of H.264 ({' or '.join(_ENCODERS)}); its wheels on PyPI have "
        f"one: {REMEDY}."
    )


def _even_pixels(frames: Tensor) -> np.ndarray:
    """uint8 [F, H, W, 3] with even H and W."""
    if str(frames.dtype) != "torch.uint8" or frames.ndim != 4 or frames.shape[1] not in (1, 3) or not len(frames):
        raise ValueError(
            f"a video is a uint8 tensor [F, C, H, W] with 1 or 3 channels, not {frames.dtype} {[*frames.shape]}"
        )
    array = frames.detach().cpu().expand(-1, 3, -1, -1).permute(0, 2, 3, 1).contiguous().numpy()
    height, width = array.shape[1:3]
    return np.pad(array, ((0, 0), (0, height % 2), (0, width % 2), (0, 0)), mode="edge")


def _waveform(sound: Audio) -> np.ndarray:
    """float32 [channels, samples] in [-1, 1]."""
    samples = sound.waveform
    if samples.ndim != 2 or not samples.is_floating_point() or not samples.numel():
        raise ValueError(
            f"sound is a floating point tensor [channels, samples], not {samples.dtype} {[*samples.shape]}"
        )
    return np.clip(np.nan_to_num(samples.detach().cpu().float().numpy()), -1, 1)


def _sound_stream(container: Any, sound: Audio) -> Any:
    channels = sound.waveform.shape[0]
    if channels not in _LAYOUTS:
        raise ValueError(f"sound of {channels} channels has no place in a video file; it takes {[*_LAYOUTS]}")
    rate = next((rate for rate in _AAC_RATES if rate >= sound.sample_rate), _AAC_RATES[-1])
    return container.add_stream("aac", rate=rate, layout=_LAYOUTS[channels])


def _encode_sound(container: Any, stream: Any, sound: Audio) -> None:
    import av

    samples = np.ascontiguousarray(_waveform(sound))
    frame = av.AudioFrame.from_ndarray(samples, format="fltp", layout=stream.layout.name)
    frame.sample_rate = sound.sample_rate
    frame.pts, frame.time_base = 0, Fraction(1, sound.sample_rate)  # lets the muxer cut off what the encoder is late by
    resampler = av.AudioResampler(format=stream.format.name, layout=stream.layout.name, rate=stream.rate)
    for part in [*resampler.resample(frame), *resampler.resample(None)]:
        container.mux(stream.encode(part))
    container.mux(stream.encode())
