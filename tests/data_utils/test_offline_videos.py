"""Stored videos: read off their headers, cut to the frames that a run takes, brought to its size."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from flow_factory.data_utils.offline_files import OfflineScan, scan_offline_dataset
from flow_factory.data_utils.offline_plan import OfflinePlan, plan_offline_data
from flow_factory.data_utils.offline_train_data import load_medium
from flow_factory.data_utils.video_files import video_facts
from flow_factory.errors import InputError
from flow_factory.hparams import DatasetArguments, get_model_spec
from flow_factory.samples import Video
from tests.parity.media import clip, save
from tests.trainers.offline_support import offline_config, record, write_records


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
    from tests.parity.media import tone

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
