"""`train`, `sample` and `report` of a model that makes videos, as a user starts them; a tiny Wan, made here."""

from __future__ import annotations

import json
import subprocess
import sys
import wave
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from diffusers import WanPipeline
from PIL import Image

from flow_factory.cli.app import main
from flow_factory.data_utils.media_files import read_audio, read_video
from flow_factory.data_utils.prompt_choice import PromptChoice
from flow_factory.hparams.saving import dump_yaml
from flow_factory.tracking.previews import preview_of
from flow_factory.trainers.sampling import MadeSample, _facts, write_samples
from tests.cli.invoke import Done, invoke
from tests.parity.bench import Bench
from tests.parity.cases import all_cases
from tests.parity.cycles import cycle_config
from tests.tracking.media import clip, sounding_sample, tone
from tests.tracking.report_runs import Page

Command = Callable[..., Done]
SIZE = (32, 48)


def configuration(name: str, folder: Path) -> Path:
    """The checkpoint of a parity case with three prompts to evaluate, and a configuration of one GRPO cycle."""
    (folder / "model").mkdir()
    bench = Bench(next(case for case in all_cases() if case.name == name), folder / "model")
    config = cycle_config(bench, "grpo", folder).to_mapping()
    config["eval"] |= {"eval_freq": 1, "guidance_scale": 4.0}
    path = folder / "config.yaml"
    path.write_text(dump_yaml(config))
    return path


@pytest.fixture(scope="module")
def text_to_video(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return configuration("wan2_t2v-2.1", tmp_path_factory.mktemp("wan"))


@pytest.fixture(scope="module")
def run(text_to_video: Path) -> Path:
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit) as stop:
        patch.setattr(sys, "argv", ["flow-factory", "train", str(text_to_video), "log.verbose=false"])
        main()
    assert not stop.value.code
    return text_to_video.parent / "save" / "run"


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: invoke(capsys, monkeypatch, *arguments)


def test_sample_writes_videos_that_the_pipeline_makes_again(
    text_to_video: Path, tmp_path: Path, command: Command
) -> None:
    done = command("sample", text_to_video, "--num", 2, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    assert "wrote 2 videos and grid.png" in done.out
    record = json.loads((tmp_path / "out" / "samples.json").read_text())
    assert record["format_version"] == 3 and len(record["samples"]) == 2
    pipeline = WanPipeline.from_pretrained(str(text_to_video.parent / "model"))
    pipeline.set_progress_bar_config(disable=True)
    for entry in record["samples"]:
        assert (entry["fps"], entry["frames"]) == (16.0, 5) and entry["file"].endswith(".mp4")
        assert "sound" not in entry and "sample_rate" not in entry and "given" not in entry
        video = read_video(tmp_path / "out" / entry["file"])
        assert video.frames.shape == (5, 3, *SIZE) and video.fps == 16.0
        noise = torch.Generator().manual_seed(entry["torch_seed"])
        frames = pipeline(**entry["call"], generator=noise, output_type="np").frames[0]
        theirs = torch.from_numpy((frames * 255).round()).permute(0, 3, 1, 2)
        # Half the colour resolution, of frames that are noise: their brightness is what must agree.
        ours, luminance = video.frames.float(), torch.tensor([0.2126, 0.7152, 0.0722])[None, :, None, None]
        difference = ((ours - theirs) * luminance).sum(dim=1).abs().mean()
        other = ((ours.flip(0) - theirs) * luminance).sum(dim=1).abs().mean()
        assert difference < 6 and other > 3 * difference
    with Image.open(tmp_path / "out" / "grid.png") as sheet:
        assert sheet.width == 5 * 3 * SIZE[1] + 4 * 6 + 20, "five frames, each three times as large, in one row"


def test_a_run_on_videos_leaves_what_can_be_seen_and_played(run: Path, tmp_path: Path, command: Command) -> None:
    folder = run / "samples" / "toy"
    for cycle in (0, 1):
        assert [path.name for path in sorted((folder / f"cycle-00000{cycle}").iterdir())] == [
            "000.mp4",
            "001.mp4",
            "002.mp4",
        ]
    assert (folder / "before_after.png").exists()
    page = Page((run / "report.html").read_text())
    assert sum(tag == "video" for tag, _ in page.tags) == 6 and "holds no picture" not in page.words
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    (cycle_row,) = (row for row in rows if row["kind"] == "cycle")
    assert {"monitor/brightness", "monitor/motion", "monitor/diversity_relative"} <= cycle_row.keys()
    assert cycle_row["monitor/diversity"] > 0 and "monitor/loudness" not in cycle_row
    assert any("toy/monitor/motion" in row for row in rows if row["kind"] == "eval_monitor")

    done = command("sample", run, "--compare", "--num", 1, "--output", tmp_path / "both")
    assert done.code == 0, done.err
    record = json.loads((tmp_path / "both" / "samples.json").read_text())
    assert [entry["weights"] for entry in record["samples"]] == ["base", "trained"]
    # The first evaluation's video and the base model's are of one noise: B was zero.
    base = read_video(tmp_path / "both" / record["samples"][0]["file"]).frames.int()
    first = read_video(folder / "cycle-000000" / "000.mp4").frames.int()
    assert (base - first).abs().float().mean() < 1


def test_eval_scores_videos(run: Path, tmp_path: Path, command: Command) -> None:
    done = command("eval", run, "--samples-per-prompt", 2, "--output", tmp_path / "scores.json")
    assert done.code == 0, done.err
    toy = json.loads((tmp_path / "scores.json").read_text())["datasets"]["toy"]
    assert toy["trained"]["picture/diversity"]["mean"] > 0 and toy["trained"]["bright"]["failed"] == 0
    # Both are a mean luminance; the statistic looks at eight frames, the reward at all five.
    assert toy["trained"]["picture/brightness"]["mean"] == pytest.approx(toy["trained"]["bright"]["mean"], abs=0.1)


def test_what_a_video_was_made_from_is_named_and_shown_above_it(tmp_path: Path, command: Command) -> None:
    config = configuration("wan2_v2v", tmp_path)
    done = command("sample", config, "--num", 1, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    (entry,) = json.loads((tmp_path / "out" / "samples.json").read_text())["samples"]
    (given,) = entry["given"]["video"]
    frame = read_video(Path(given)).frames[0].permute(1, 2, 0).numpy()
    enlarged = frame.repeat(3, 0).repeat(3, 1)
    sheet = numpy.asarray(Image.open(tmp_path / "out" / "grid.png"))
    windows = numpy.lib.stride_tricks.sliding_window_view(sheet, enlarged.shape)[:20, :120, 0]
    assert (windows == enlarged).all(axis=(-1, -2, -3)).any(), "its first frame is at the top of the sheet"


def test_without_pyav_sample_says_so_before_anything_is_loaded(text_to_video: Path, tmp_path: Path) -> None:
    code = f"""
import importlib.util, sys
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, *rest: None if name == "av" else real(name, *rest)
from flow_factory.cli.app import main
sys.argv = ["flow-factory", "sample", {str(text_to_video)!r}, "--output", {str(tmp_path / "out")!r}]
try:
    main()
finally:
    print("HEAVY", [name for name in ("torch", "diffusers", "transformers") if name in sys.modules])
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 2 and 'writing videos needs PyAV: pip install "flow-factory[video]"' in done.stderr
    assert done.stdout.strip().endswith("HEAVY []") and not (tmp_path / "out").exists()


def test_a_joint_model_is_heard_too(tmp_path: Path, command: Command) -> None:
    config = configuration("ltx2_t2av-2.0", tmp_path)
    done = command("sample", config, "--num", 1, "--output", tmp_path / "out")
    assert done.code == 0, done.err
    (entry,) = json.loads((tmp_path / "out" / "samples.json").read_text())["samples"]
    with wave.open(str(tmp_path / "out" / entry["sound"])) as file:
        assert file.getframerate() == entry["sample_rate"] and file.getnframes() > 0
    assert len(read_video(tmp_path / "out" / entry["file"]).frames) == entry["frames"]
    assert read_audio(tmp_path / "out" / entry["file"]).sample_rate == entry["sample_rate"]


def test_videos_with_sound_are_written_with_their_waveform(tmp_path: Path) -> None:
    """As a model that makes both would: its sound is in the video, and in a file of its own."""
    made: dict[Any, list[MadeSample]] = {"base": [], "trained": []}
    for variant, samples in made.items():
        for index in range(2):
            sample = sounding_sample(tone(1.0, 16000), frames=clip(25, seed=index), fps=24.0)
            preview = preview_of(sample, frozenset({"mp4", "wav"}))
            assert preview is not None
            choice = PromptChoice(f"a bell {index}", None, index, 0, None)
            samples.append(MadeSample(choice, variant, preview, _facts(sample), torch.zeros(1), 7, {}, {}))
    write_samples(tmp_path, made, {"seed": 1})
    record = json.loads((tmp_path / "samples.json").read_text())
    assert [entry["file"] for entry in record["samples"]][::3] == ["000-a-bell-0.base.mp4", "001-a-bell-1.trained.mp4"]
    for entry in record["samples"]:
        assert (entry["fps"], entry["frames"], entry["sample_rate"]) == (24.0, 25, 16000)
        assert read_video(tmp_path / entry["file"]).frames.shape[0] == 25
        assert read_audio(tmp_path / entry["file"]).waveform.shape[1] == pytest.approx(16000, abs=1024)
        with wave.open(str(tmp_path / entry["sound"])) as file:
            assert (file.getnchannels(), file.getframerate(), file.getnframes()) == (2, 16000, 16000)
    sheet = numpy.asarray(Image.open(tmp_path / "grid.png").convert("RGB"))
    assert (sheet == (11, 98, 196)).all(axis=-1).sum() > 1000, "waveforms are drawn"
