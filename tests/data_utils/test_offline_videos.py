"""Stored videos: read off their headers, cut to the frames that a run takes, brought to its size."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import av
import pytest
import torch

from flow_factory.contracts import SoundFormat
from flow_factory.data_utils.media_files import read_soundtrack, read_video
from flow_factory.data_utils.offline_files import OfflineScan, scan_offline_dataset
from flow_factory.data_utils.offline_plan import OfflinePlan, plan_offline_data
from flow_factory.data_utils.offline_train_data import blank_medium, load_medium
from flow_factory.data_utils.video_files import Soundtrack, decode_to_end, video_facts
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetArguments, get_model_spec, load_config_from_mapping
from flow_factory.samples import Audio, Video, VideosWithSound, VideoWithSound
from flow_factory.tracking.players import encode_mp4
from tests.parity.media import clip, save, save_with_sound, tone
from tests.trainers.offline_support import offline_config, offline_mapping, record, write_records


def store(folder: Path, *clips: Video, kind: str = "demonstration") -> Path:
    """A dataset of one example for each clip, or each pair of them."""
    names = [save(item, folder / "videos" / str(number)).name for number, item in enumerate(clips)]
    arms = 1 if kind == "demonstration" else 2
    rows = [record(kind, f"prompt {i}", *names[i : i + arms]) for i in range(0, len(names), arms)]
    for row in rows:
        for arm in ("target", "chosen", "rejected"):
            for item in row["supervision"].get(arm, {}).get("media", []):
                item["type"] = "video"
    return write_records(folder, rows)


def scan(folder: Path) -> OfflineScan:
    io = get_model_spec("wan2_t2v").io
    return scan_offline_dataset(DatasetArguments(name="toy", dataset_dir=str(folder)), "train", io=io)


def plan(folder: Path, num_frames: int, size: tuple[int, int] = (32, 48)) -> OfflinePlan:
    changes = {
        "model.model_type": "wan2_t2v",
        "train.num_frames": num_frames,
        "train.resolution": list(size),
        "train.gradient_accumulation_steps": 1,
        "train.image_sizing": "crop",
    }
    return plan_offline_data(offline_config(Path("org/wan"), folder, folder, "sft", changes))


def test_sizes_and_frames_are_read_off_the_header(tmp_path: Path) -> None:
    store(tmp_path, clip(0, frames=5), clip(1, frames=9, size=(24, 40)))
    found = scan(tmp_path)
    assert not found.problems
    assert [(example.size, example.frames) for example in found.examples] == [((32, 48), 5), ((24, 40), 9)]


def test_arms_of_a_preference_have_one_shape(tmp_path: Path) -> None:
    store(tmp_path, clip(0), clip(1, size=(48, 32)), kind="preference")
    (problem,) = scan(tmp_path).problems
    assert "chosen is 32 x 48 pixels (height x width) and rejected 48 x 32" in problem


def test_the_shorter_arm_counts(tmp_path: Path) -> None:
    store(tmp_path, clip(0, frames=9), clip(1, frames=5), kind="preference")
    assert scan(tmp_path).examples[0].frames == 5


@pytest.mark.parametrize(("content", "reason"), [(b"x" * 64, "cannot be decoded"), (None, "does not exist")])
def test_a_bad_file_is_named(tmp_path: Path, content: bytes | None, reason: str) -> None:
    path = tmp_path / "a.mp4"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(InputError, match=f"here:3: {path} {reason}"):
        video_facts(path, "here:3")


def test_a_file_without_pictures_is_named(tmp_path: Path) -> None:
    path = save(tone(0), tmp_path / "a")
    with pytest.raises(InputError, match="holds no video frames"):
        video_facts(path)


def test_videos_shorter_than_num_frames_are_refused(tmp_path: Path) -> None:
    path = store(tmp_path, clip(0, frames=9), clip(1, frames=5), clip(2, frames=9))
    with pytest.raises(InputError, match=rf"{path}:2: a video has 5 frames, but train.num_frames is 9"):
        plan(tmp_path, num_frames=9)
    assert plan(tmp_path, num_frames=5).left_out == 1


def test_the_first_frames_are_trained_on_at_the_runs_size(tmp_path: Path) -> None:
    exact, other = clip(0, frames=9), clip(1, frames=7, size=(48, 48))
    store(tmp_path, exact, other)
    entries = plan(tmp_path, num_frames=5).entries
    assert torch.equal(load_medium(entries[0], "target"), exact.frames[:5])
    fitted = load_medium(entries[1], "target")
    assert fitted.shape == (5, 3, 32, 48) and fitted.dtype == torch.uint8
    # Cut around the middle: 48 x 48 to 48 wide, 8 rows off above and below.
    assert torch.equal(fitted, other.frames[:5, :, 8:40])


def trimmed(source: Path, start: int) -> Path:
    """The video from a later frame on, nothing encoded anew: what comes before stays in the file and is not shown."""
    path = source.with_stem("trimmed")
    with av.open(str(source)) as given, av.open(str(path), "w") as made:
        stream = given.streams.video[0]
        copy = made.add_stream_from_template(stream)
        for packet in given.demux(stream):
            if packet.dts is not None and packet.pts is not None and stream.average_rate and packet.time_base:
                skipped = round(start / (stream.average_rate * packet.time_base))
                packet.dts, packet.pts, packet.stream = packet.dts - skipped, packet.pts - skipped, copy
                made.mux(packet)
    return path


def test_frames_that_are_not_shown_are_not_counted(tmp_path: Path) -> None:
    whole = tmp_path / "whole.mp4"
    whole.write_bytes(encode_mp4(clip(0, 24, (32, 48)).frames, 24.0))
    cut = trimmed(whole, 10)
    assert [video_facts(path)[1] for path in (whole, cut)] == [24, 14]
    assert torch.equal(read_video(cut).frames, read_video(whole).frames[10:])
    decode_to_end(cut)


def lying(video: bytes) -> bytes:
    """The MP4 with the matrix of a phone that was held upright: it is shown turned by 90 degrees clockwise."""
    upright = struct.pack(">9i", 1 << 16, 0, 0, 0, 1 << 16, 0, 0, 0, 1 << 30)
    turned = struct.pack(">9i", 0, 1 << 16, 0, -1 << 16, 0, 0, 0, 0, 1 << 30)
    begin = video.index(upright, video.index(b"tkhd"))
    return video[:begin] + turned + video[begin + len(turned) :]


def test_videos_are_turned_as_a_player_shows_them(tmp_path: Path) -> None:
    plain, turned = tmp_path / "plain.mp4", tmp_path / "turned.mp4"
    plain.write_bytes(encode_mp4(clip(0, 5, (32, 48)).frames, 24.0))
    turned.write_bytes(lying(plain.read_bytes()))
    assert [video_facts(path) for path in (plain, turned)] == [((32, 48), 5), ((48, 32), 5)]
    # Clockwise: what was the left column from below to above is the top row.
    assert torch.equal(read_video(turned).frames[..., 0, :], read_video(plain).frames[..., 0].flip(-1))


# Videos with sound ---------------------------------------------------------------------------------------------------

H3 = "minimax-h3-t2va"
RATE = 32000
SOUND = SoundFormat(sample_rate=RATE, channels=2, samples=RATE // 4, frame_rate=24)
"""A quarter of a second: six frames."""


def noise(seconds: float, channels: int = 2, rate: int = RATE) -> Audio:
    g = torch.Generator().manual_seed(round(1000 * seconds))
    return Audio(torch.rand(channels, round(seconds * rate), generator=g) * 2 - 1, rate)


def sounding(folder: Path, sound: Audio, frames: int = 6, fps: float = 24.0, start: float = 0.0) -> Path:
    return save_with_sound(clip(0, frames, (32, 48), fps), sound, folder / "videos" / "0", start)


def scan_sound(folder: Path, *media: dict[str, str]) -> OfflineScan:
    row = record("demonstration", "x", "0.mkv")
    row["supervision"]["target"]["media"] = list(media) or [{"type": "video", "path": "0.mkv"}]
    write_records(folder, [row])
    dataset = DatasetArguments(name="toy", dataset_dir=str(folder))
    return scan_offline_dataset(dataset, "train", io=get_model_spec(H3).io)


def plan_sound(folder: Path) -> OfflinePlan:
    scan_sound(folder)
    changes = {
        "model.model_type": H3,
        "train.num_frames": 124,
        "train.resolution": [32, 64],
        "train.per_device_batch_size": 1,
        "train.gradient_accumulation_steps": 1,
    }
    mapping = offline_mapping(Path("org/h3"), folder, folder)
    for section in ("train", "eval"):
        del mapping[section]["max_sequence_length"]
    for path, value in changes.items():
        section, name = path.split(".")
        mapping[section][name] = value
    return plan_offline_data(load_config_from_mapping(mapping))


def test_a_video_has_its_sound_in_its_file(tmp_path: Path) -> None:
    path = sounding(tmp_path, noise(0.3), start=0.05)
    (example,) = scan_sound(tmp_path).examples
    assert example.frames == 6 and example.soundtracks == (Soundtrack(24.0, 0.05, pytest.approx(0.35)),)
    (problem,) = scan_sound(tmp_path, {"type": "video", "path": "0.mkv"}, {"type": "audio", "path": "0.wav"}).problems
    assert "holds video, audio; the model gives video, whose file has the sound as a track" in problem
    save(clip(0, 6, (32, 48)), tmp_path / "videos" / "0")
    (problem,) = scan_sound(tmp_path).problems
    assert f"media[0].path: {path} has no sound track, and the model learns videos with their sound" in problem


@pytest.mark.parametrize(
    ("seconds", "start", "fps", "message"),
    [
        (5.2, 0.0, 24.0, None),
        (5.1, 0.0, 24.0, None),
        (5.0, 0.05, 24.0, r"train\.jsonl:1: a video has sound from 0\.05 to 5\.05 seconds, .* the first 5\.17; remove"),
        (5.2, 0.3, 24.0, "sound from 0.30 to 5.50 seconds"),
        (5.2, 0.0, 30.0, "a video has 30 frames a second, but the model makes 24, .* bring the video to that rate"),
    ],
)
def test_sounds_that_do_not_last_or_go_with_the_frames(
    tmp_path: Path, seconds: float, start: float, fps: float, message: str | None
) -> None:
    sounding(tmp_path, noise(seconds, rate=8000), frames=124, fps=fps, start=start)
    if message is None:
        (entry,) = plan_sound(tmp_path).entries
        assert entry.sound == SoundFormat(RATE, 2, 207 * 800, 24)
        return
    with pytest.raises(InputError, match=message):
        plan_sound(tmp_path)


def test_a_sound_is_cut_to_its_frames(tmp_path: Path) -> None:
    sound = noise(0.5)
    read = read_soundtrack(sounding(tmp_path, sound), SOUND)
    assert read.sample_rate == RATE and torch.equal(read.waveform, sound.waveform[:, : SOUND.samples])


def test_sound_begins_with_the_first_frame(tmp_path: Path) -> None:
    sound, late = noise(0.22), RATE // 50
    waveform = read_soundtrack(sounding(tmp_path, sound, start=0.02), SOUND).waveform
    assert not waveform[:, :late].any() and torch.equal(waveform[:, late : late + 7040], sound.waveform)
    assert waveform.shape == (2, SOUND.samples) and not waveform[:, late + 7040 :].any()


def test_what_is_heard_before_the_first_frame_is_cut_off(tmp_path: Path) -> None:
    sound, early = noise(0.4), RATE // 20
    waveform = read_soundtrack(sounding(tmp_path, sound, start=-0.05), SOUND).waveform
    assert torch.equal(waveform, sound.waveform[:, early : early + SOUND.samples])


def test_what_is_missing_is_silent_up_to_a_tenth_of_a_second(tmp_path: Path) -> None:
    sound = noise(0.16)
    waveform = read_soundtrack(sounding(tmp_path, sound), SOUND).waveform
    assert torch.equal(waveform[:, :5120], sound.waveform) and not waveform[:, 5120:].any()
    path = sounding(tmp_path, noise(0.14))
    with pytest.raises(InputError, match=rf"here:3: {path} has sound for 0\.14 of the 0\.25 seconds"):
        read_soundtrack(path, SOUND, "here:3")


def test_mono_becomes_two_channels_of_half_its_power(tmp_path: Path) -> None:
    sound = noise(0.3, channels=1)
    waveform = read_soundtrack(sounding(tmp_path, sound), SOUND).waveform
    expected = sound.waveform[:, : SOUND.samples].expand(2, -1) / 2**0.5
    torch.testing.assert_close(waveform, expected, rtol=0, atol=1e-5)


@pytest.mark.parametrize("rate", [16000, 48000])
def test_sound_is_brought_to_the_models_rate(tmp_path: Path, rate: int) -> None:
    waveform = read_soundtrack(sounding(tmp_path, tone(1, 0.3, rate)), SOUND).waveform
    expected = tone(1, 0.3, RATE).waveform[:, : SOUND.samples]
    assert (waveform - expected)[:, 100:].abs().max() < 0.01


def test_sound_of_an_mp4_stays_with_its_frames(tmp_path: Path) -> None:
    """AAC has silence in front, which its decoder leaves out."""
    t = torch.arange(RATE) / RATE
    sweep = torch.sin(2 * torch.pi * (200 + 400 * t) * t).repeat(2, 1) / 2
    path = tmp_path / "a.mp4"
    path.write_bytes(encode_mp4(clip(0, 24, (32, 48)).frames, 24.0, Audio(sweep, RATE)))
    read = read_soundtrack(path, replace(SOUND, samples=RATE - 2000)).waveform
    errors = [(read[:, 2000:20000] - sweep[:, 2000 + lag : 20000 + lag]).abs().mean() for lag in (-8, 0, 8)]
    assert min(errors) == errors[1] < 0.02


def test_an_example_is_frames_with_sound(tmp_path: Path) -> None:
    sounding(tmp_path, noise(5.3), frames=130)
    (entry,) = plan_sound(tmp_path).entries
    medium, blank = load_medium(entry, "target"), blank_medium(entry)
    assert isinstance(medium, VideoWithSound) and isinstance(blank, VideoWithSound)
    assert medium.frames.shape == blank.frames.shape == (124, 3, 32, 64)
    assert medium.sound.waveform.shape == blank.sound.waveform.shape == (2, 207 * 800)
    batch = VideosWithSound.stack([medium, blank])
    assert all(torch.equal(a.frames, b.frames) for a, b in zip(batch.unbind(), (medium, blank), strict=True))


def test_videos_are_decoded_to_their_end(tmp_path: Path) -> None:
    path = tmp_path / "a.mp4"
    whole = encode_mp4(clip(0, 24, (32, 48)).frames, 24.0, noise(0.3))
    path.write_bytes(whole)
    decode_to_end(path)
    begin = whole.index(b"mdat") + 1500
    path.write_bytes(whole[:begin] + bytes(2500) + whole[begin + 2500 :])
    with pytest.raises(InputError, match=f"here:3: {path} (cannot be decoded|ends after)"):
        decode_to_end(path, "here:3")
