"""What evaluations leave of videos and sounds: sheets, files that play, comparisons; and what they do without PyAV."""

from __future__ import annotations

import importlib.util
import logging
import wave
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import numpy as np
import pytest
from PIL import Image

from flow_factory.data_utils.media_files import read_audio, read_video
from flow_factory.distributed import Comm
from flow_factory.samples import BaseSample, T2ISample, V2VSample
from flow_factory.tracking.report import write_report
from flow_factory.trainers.sheets import SampleSheets, _pack, _unpack
from tests.tracking.media import clip, sounding_sample, tone, video_sample


@dataclass
class Shown:
    """Stands for a tracker."""

    images: list[str] = field(default_factory=list)
    videos: list[tuple[str, list[tuple[Path, str]]]] = field(default_factory=list)

    def log_images(self, name: str, path: Path, cycle: int) -> None:
        self.images.append(path.name)

    def log_videos(self, name: str, videos: list[tuple[Path, str]]) -> None:
        self.videos.append((name, videos))


def sheets(run: Path, limit: int = 16, tracker: Any = None) -> SampleSheets:
    return SampleSheets(run, Comm.single(), cast(Any, tracker or Shown()), limit)


def save(writer: SampleSheets, samples: list[BaseSample], cycle: int) -> None:
    """What an evaluation does: the samples are gone when the sheet is made."""
    writer.save("toy", writer.preview(samples), cycle)


def numbered(samples: list[BaseSample]) -> list[BaseSample]:
    for index, sample in enumerate(samples):
        sample.index, sample.prompt = index, f"prompt {index}"
    return samples


def array(path: Path) -> np.ndarray:
    return np.asarray(Image.open(path)).astype(int)


def shows(path: Path, sample: Any, frame: int = 0) -> bool:
    return bool((array(path) == sample.video[frame, :, 0, 0].tolist()).all(axis=-1).any())


def test_videos_of_evaluations_are_seen_heard_and_compared(tmp_path: Path) -> None:
    tracker = Shown()
    writer = sheets(tmp_path, limit=2, tracker=tracker)
    first = numbered([sounding_sample(frames=clip(6, seed=i)) for i in range(3)])
    later = numbered([sounding_sample(tone(0.5, 16000, 1), frames=clip(6, seed=3 + i), fps=12.0) for i in range(3)])
    save(writer, first, 0)
    folder = tmp_path / "samples" / "toy"
    assert not (folder / "before_after.png").exists()
    save(writer, later, 4)
    names = sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file())
    files = [f"cycle-00000{cycle}/00{index}.mp4" for cycle in (0, 4) for index in (0, 1)]
    assert names == sorted(["before_after.png", "cycle-000000.png", "cycle-000004.png", "first.safetensors", *files]), (
        "the third prompt is beyond eval.num_grid_images"
    )
    assert read_video(folder / files[0]).frames.shape == (6, 3, 32, 48) and read_video(folder / files[2]).fps == 12.0
    sound = read_audio(folder / files[3])
    assert sound.sample_rate == 16000 and sound.waveform.shape[1] == pytest.approx(8000, abs=1024)
    comparison = folder / "before_after.png"
    assert all(shows(comparison, sample) for sample in (*first[:2], *later[:2]))
    assert not shows(comparison, later[2]) and not shows(folder / "cycle-000004.png", first[0])
    assert tracker.images == ["cycle-000000.png", "cycle-000004.png"]
    assert tracker.videos[1] == ("samples/toy", [(folder / files[2], "prompt 0"), (folder / files[3], "prompt 1")])


def test_a_cycle_that_is_evaluated_again_leaves_nothing_of_the_former(tmp_path: Path) -> None:
    samples = numbered([video_sample(frames=clip(5, seed=i)) for i in range(3)])
    save(sheets(tmp_path), samples, 2)
    save(sheets(tmp_path, limit=1), samples, 2)
    assert [path.name for path in (tmp_path / "samples/toy/cycle-000002").iterdir()] == ["000.mp4"]


def test_condition_videos_stand_above_what_was_made_of_them(tmp_path: Path) -> None:
    sample = video_sample(V2VSample, frames=clip(5, seed=0), condition_video=clip(7, seed=4))
    writer = sheets(tmp_path)
    save(writer, numbered([sample]), 0)
    save(writer, numbered([sample]), 1)
    for name in ("cycle-000000.png", "before_after.png"):
        pixels = array(tmp_path / "samples/toy" / name)
        given, made = ((pixels == [0, 40 * (seed + 1), 90]).all(axis=-1).nonzero()[0].min() for seed in (4, 0))
        assert given < made


def test_without_pyav_sheets_and_sounds_stay_and_one_warning_names_the_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None if name == "av" else real(name, *rest))
    writer = sheets(tmp_path)
    with caplog.at_level(logging.WARNING):
        for cycle in range(3):
            save(writer, numbered([sounding_sample(), sounding_sample()]), cycle)
    warnings = [record.getMessage() for record in caplog.records if "no videos" in record.getMessage()]
    assert len(warnings) == 1 and 'pip install "flow-factory[video]"' in warnings[0]
    folder = tmp_path / "samples/toy"
    assert sorted(path.name for path in folder.glob("*.png")) == [
        "before_after.png",
        *(f"cycle-00000{cycle}.png" for cycle in range(3)),
    ]
    assert sorted(path.name for path in (folder / "cycle-000001").iterdir()) == ["000.wav", "001.wav"]
    with wave.open(str(folder / "cycle-000001/000.wav")) as file:
        assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 24000, 24000)


def test_pictures_need_no_pyav_and_leave_no_files_that_play(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from flow_factory.rewards.smoke import make_sample

    monkeypatch.setattr(importlib.util, "find_spec", lambda name, *rest: None)
    picture = make_sample(T2ISample, clip()[0], "a prompt", "toy", 0, {})
    save(sheets(tmp_path), [picture], 0)
    assert sorted(path.name for path in (tmp_path / "samples/toy").iterdir()) == [
        "cycle-000000.png",
        "first.safetensors",
    ]
    assert not caplog.records


def test_nothing_is_saved_of_samples_without_pictures_or_beyond_the_limit(tmp_path: Path) -> None:
    save(sheets(tmp_path), [video_sample(video=None)], 0)
    save(sheets(tmp_path, limit=0), [video_sample()], 0)
    assert not (tmp_path / "samples").exists()


def test_previews_travel_between_ranks_whole() -> None:
    from flow_factory.tracking.previews import preview_of

    preview = preview_of(sounding_sample(), frozenset({"mp4", "wav"}))
    assert preview is not None
    back = _unpack(_pack(preview), True)
    assert back.files == preview.files and back.is_strip and back.given is None
    assert np.array_equal(np.asarray(back.picture), np.asarray(preview.picture))
    edited = preview_of(video_sample(V2VSample, condition_video=clip()))
    assert edited is not None and edited.given is not None
    given = _unpack(_pack(edited), True).given
    assert given is not None and np.array_equal(np.asarray(given), np.asarray(edited.given))


class Ranks(Comm):
    """One of two ranks, whose other one gave these answers."""

    def gather_objects(self, value: Any) -> list[Any]:
        return [value, [[0, "prompt 0", True]]] if isinstance(value, list) else [value, None]

    def gather_bytes(self, values: Any) -> list[bytes]:
        from flow_factory.tracking.previews import preview_of

        other = preview_of(video_sample(frames=clip(5, seed=0)), frozenset({"mp4"}))
        assert other is not None
        return [*values, _pack(other)]


def test_the_sheet_holds_the_prompts_of_all_ranks_in_order(tmp_path: Path) -> None:
    own = video_sample(frames=clip(5, seed=1))
    own.index, own.prompt = 1, "prompt 1"
    save(SampleSheets(tmp_path, Ranks(world_size=2), cast(Any, Shown()), 16), [own], 0)
    pixels = array(tmp_path / "samples/toy/cycle-000000.png")
    tops = [(pixels == [0, 40 * (seed + 1), 90]).all(axis=-1).nonzero()[0].min() for seed in (0, 1)]
    assert tops == sorted(tops)
    assert len(list((tmp_path / "samples/toy/cycle-000000").iterdir())) == 2
    other = SampleSheets(tmp_path / "b", Ranks(rank=1, world_size=2), cast(Any, Shown()), 16)
    save(other, [own], 0)
    assert not (tmp_path / "b").exists()


def test_the_report_of_such_a_folder_plays_what_was_saved(tmp_path: Path) -> None:
    from tests.tracking.report_runs import Page, make_run

    run = make_run(tmp_path / "run", cycles=1)
    writer = sheets(run)
    for cycle in (0, 1):
        save(writer, numbered([sounding_sample(), sounding_sample()]), cycle)
    page = Page(write_report([run]).path.read_text())
    assert sum(tag == "video" for tag, _ in page.tags) == 4
    assert [text for text in ("prompt 0", "prompt 1") if text in page.words] == ["prompt 0", "prompt 1"]
