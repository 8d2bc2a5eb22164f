"""Condition media: decoding, and their way from a dataset's row to encoders and samples."""

from __future__ import annotations

from pathlib import Path

import av
import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.condition_cache import condition_key
from flow_factory.data_utils.loaders import build_eval_loader
from flow_factory.data_utils.media_files import load_media, read_audio, read_media, read_video
from flow_factory.data_utils.media_headers import check_media_headers
from flow_factory.data_utils.prompt_dataset import MediaFile, PromptRecord
from flow_factory.data_utils.prompt_files import MediaRef, PromptRow
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.samples import (
    Audio,
    ConditionInputs,
    I2AVSample,
    I2ISample,
    T2ISample,
    V2VSample,
    Video,
    condition_fields,
)
from tests.data_utils.helpers import FakeAdapter, dataset, run_config, write_jsonl

IMAGES = PipelineIOContract(
    (MediaSlot(Modality.TEXT, "prompt"), MediaSlot(Modality.IMAGE, "image", max_items=None)), (Modality.IMAGE,)
)


def write_video(path: Path, frames: int = 5, rate: int = 8) -> np.ndarray:
    """A lossless video of flat grey frames; returns their grey levels."""
    levels = np.linspace(20, 220, frames).round().astype(np.uint8)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("ffv1", rate=rate)
        stream.width, stream.height, stream.pix_fmt = 32, 16, "bgr0"
        for level in levels:
            frame = av.VideoFrame.from_ndarray(np.full((16, 32, 3), level, np.uint8), format="rgb24")
            container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return levels


def write_tone(path: Path, rate: int = 8000, seconds: float = 0.25) -> np.ndarray:
    """A stereo tone; returns its samples [2, n]."""
    t = np.arange(int(rate * seconds)) / rate
    samples = np.stack([0.5 * np.sin(2 * np.pi * 440 * t), 0.25 * np.cos(2 * np.pi * 220 * t)]).astype(np.float32)
    with av.open(str(path), "w") as container:
        stream = container.add_stream("pcm_f32le", rate=rate, layout="stereo")
        interleaved = samples.T.reshape(1, -1).copy()
        frame = av.AudioFrame.from_ndarray(interleaved, format="flt", layout="stereo")
        frame.sample_rate = rate
        container.mux(stream.encode(frame))
        container.mux(stream.encode())
    return samples


def write_image(path: Path, colour: tuple[int, int, int], size: tuple[int, int] = (24, 16)) -> Path:
    """A flat picture; size is (width, height)."""
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new("RGB", size, colour).save(path)
    return path


def test_a_picture_is_read_upright_as_rgb(tmp_path: Path) -> None:
    image = read_media(write_image(tmp_path / "a.png", (10, 20, 30)), Modality.IMAGE)
    assert isinstance(image, torch.Tensor) and image.dtype == torch.uint8 and image.shape == (3, 16, 24)
    assert image[:, 0, 0].tolist() == [10, 20, 30]


def test_a_video_is_read_frame_by_frame_with_its_rate(tmp_path: Path) -> None:
    levels = write_video(tmp_path / "v.mkv")
    video = read_video(tmp_path / "v.mkv")
    assert video.frames.shape == (5, 3, 16, 32) and video.fps == 8.0
    assert video.frames[:, 0, 3, 3].tolist() == levels.tolist()


def test_sound_is_read_as_it_was_written(tmp_path: Path) -> None:
    samples = write_tone(tmp_path / "a.wav")
    audio = read_audio(tmp_path / "a.wav")
    assert audio.sample_rate == 8000
    torch.testing.assert_close(audio.waveform, torch.from_numpy(samples), rtol=0, atol=1e-6)


@pytest.mark.parametrize("modality", [Modality.IMAGE, Modality.VIDEO, Modality.AUDIO])
def test_a_damaged_file_is_named(tmp_path: Path, modality: Modality) -> None:
    path = tmp_path / "broken.bin"
    path.write_bytes(b"not media" * 10)
    with pytest.raises(InputError, match=r"broken\.bin"):
        read_media(path, modality)
    with pytest.raises(InputError, match=r"missing\.bin"):
        read_media(tmp_path / "missing.bin", modality)


def test_sound_that_changes_on_the_way_is_named(tmp_path: Path) -> None:
    """As broadcasts do, between stereo and mono; AAC in ADTS frames can be joined byte by byte."""
    parts = []
    for channels, layout in ((2, "stereo"), (1, "mono")):
        with av.open(str(tmp_path / f"{layout}.aac"), "w") as container:
            stream = container.add_stream("aac", rate=32000, layout=layout)
            frame = av.AudioFrame.from_ndarray(np.zeros((channels, 8192), np.float32), format="fltp", layout=layout)
            frame.sample_rate = 32000
            container.mux([*stream.encode(frame), *stream.encode(None)])
        parts.append((tmp_path / f"{layout}.aac").read_bytes())
    path = tmp_path / "joined.aac"
    path.write_bytes(b"".join(parts))
    with pytest.raises(InputError, match=f"{path} holds mono of 32000 Hz and stereo of 32000 Hz, one after"):
        read_audio(path)


def test_a_video_without_sound_is_no_audio(tmp_path: Path) -> None:
    write_video(tmp_path / "v.mkv")
    write_tone(tmp_path / "a.wav")
    with pytest.raises(InputError, match="no sound"):
        read_audio(tmp_path / "v.mkv")
    with pytest.raises(InputError, match="no video frames"):
        read_video(tmp_path / "a.wav")


def _file(path: Path, slot: str = "image", digest: str = "1") -> MediaFile:
    return MediaFile(slot, Modality.IMAGE, path, digest)


def test_items_of_a_slot_keep_their_order(tmp_path: Path) -> None:
    paths = [write_image(tmp_path / f"{i}.png", (i, i, i)) for i in (1, 2, 3)]
    media = load_media([_file(paths[2]), _file(paths[0], "last"), _file(paths[1])])
    assert list(media) == ["image", "last"]
    inputs = ConditionInputs("p", (8, 8), media=media)
    assert [int(x[0, 0, 0]) for x in inputs.images()] == [3, 2, 1]
    assert [int(x[0, 0, 0]) for x in inputs.images("image")] == [3, 2] and inputs.images("other") == []


def test_samples_show_what_they_were_made_from() -> None:
    image, frames = torch.zeros(3, 8, 8, dtype=torch.uint8), torch.zeros(4, 3, 8, 8, dtype=torch.uint8)
    sound = Audio(torch.zeros(1, 10), 16000)
    inputs = ConditionInputs("p", (8, 8), media={"image": (image,), "video": (Video(frames, 8.0),), "audio": (sound,)})
    assert condition_fields(I2ISample, inputs) == {"condition_images": [image]}
    assert condition_fields(V2VSample, inputs)["condition_video"] is frames
    assert condition_fields(T2ISample, inputs) == {}
    references = condition_fields(I2AVSample, inputs)
    assert references["condition_images"] == [image] and references["condition_videos"][0] is frames
    assert references["condition_sounds"] == inputs.audios()
    assert inputs.audios() == [sound]


def test_the_cache_key_covers_media_and_then_the_size() -> None:
    plain = PromptRecord("p", "a", 0, 0, 0)
    assert condition_key(plain, {}, False, (8, 8)) == condition_key(plain, {}, False, (16, 8))
    shown = PromptRecord("p", "a", 0, 0, 0, media=(_file(Path("x.png")),))
    other = PromptRecord("p", "a", 0, 0, 0, media=(_file(Path("x.png"), digest="2"),))
    keys = [condition_key(r, {}, False, size) for r in (plain, shown, other) for size in ((8, 8), (16, 8))]
    assert len(set(keys)) == 5


def test_batches_carry_decoded_media_to_encoder_and_samples(tmp_path: Path) -> None:
    folder = tmp_path / "data"
    for name, level in (("one.png", 50), ("two.png", 90)):
        write_image(folder / "images" / name, (level,) * 3)
    rows = [{"prompt": "a", "images": ["one.png", "two.png"]}, {"prompt": "b", "image": "two.png"}]
    write_jsonl(folder, "test", rows)
    adapter = FakeAdapter(io=IMAGES)
    config = run_config([dataset(folder)], tmp_path / "cache")
    loader = build_eval_loader(config, adapter, Comm.single(), config.data_args.sources()[0])  # type: ignore[arg-type]
    (encoded,) = adapter.inputs
    assert [[int(i[0, 0, 0]) for i in inputs.images()] for inputs in encoded] == [[50, 90], [90]]
    assert {inputs.size for inputs in encoded} == {(16, 24)}
    (batch,) = list(loader)
    assert batch.inputs is not None and [len(i.images()) for i in batch.inputs] == [2, 1]


def test_batches_of_text_carry_no_inputs(tmp_path: Path) -> None:
    write_jsonl(tmp_path / "data", "test", [{"prompt": "a"}])
    adapter = FakeAdapter()
    config = run_config([dataset(tmp_path / "data")], tmp_path / "cache")
    loader = build_eval_loader(config, adapter, Comm.single(), config.data_args.sources()[0])  # type: ignore[arg-type]
    assert next(iter(loader)).inputs is None


@pytest.mark.parametrize(
    ("modality", "good", "wrong"),
    [
        (Modality.IMAGE, "picture.png", ("video.mkv", "tone.wav", "empty", "text")),
        (Modality.VIDEO, "video.mkv", ("tone.wav", "empty", "text")),
        (Modality.AUDIO, "tone.wav", ("picture.png", "video.mkv", "empty", "text")),
    ],
)
def test_check_opens_files_of_each_kind(tmp_path: Path, modality: Modality, good: str, wrong: tuple[str, ...]) -> None:
    """A file of another kind is found before a model is loaded, and not when its row is encoded."""
    Image.new("RGB", (8, 8)).save(tmp_path / "picture.png")
    write_video(tmp_path / "video.mkv")
    write_tone(tmp_path / "tone.wav")
    (tmp_path / "empty").write_bytes(b"")
    (tmp_path / "text").write_text("no picture")
    folders = dict.fromkeys(Modality, tmp_path)
    check_media_headers([PromptRow("a", media=(MediaRef("x", modality, good),), line=1)], folders, "train.jsonl")
    for name in wrong:
        rows = [PromptRow("a", media=(MediaRef("x", modality, file),), line=n) for n, file in enumerate((good, name))]
        with pytest.raises(InputError, match=rf"train\.jsonl:1: .*{name} .*replace the file"):
            check_media_headers(rows, folders, "train.jsonl")


def test_check_opens_so_many_files_and_says_how_many_it_did_not(tmp_path: Path) -> None:
    """A prompt file may name tens of thousands, and `check` is asked often."""
    Image.new("RGB", (8, 8)).save(tmp_path / "one.png")
    (tmp_path / "two.png").write_bytes((tmp_path / "one.png").read_bytes())
    (tmp_path / "broken.png").write_bytes(b"")
    names = ("one.png", "two.png", "one.png", "broken.png")
    rows = [PromptRow("a", media=(MediaRef("x", Modality.IMAGE, name),), line=n) for n, name in enumerate(names, 1)]
    folders = dict.fromkeys(Modality, tmp_path)
    assert check_media_headers(rows, folders, "train.jsonl", most=2) == 1
    with pytest.raises(InputError, match=r"train\.jsonl:4: .*broken\.png"):
        check_media_headers(rows, folders, "train.jsonl", most=3)
    assert check_media_headers(rows[:3], folders, "train.jsonl") == 0
