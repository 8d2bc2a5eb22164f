"""`flow-factory data make-preferences`: the best and the worst of a prompt's pictures, whole or in parts."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.offline_files import scan_offline_dataset
from flow_factory.data_utils.offline_writer import new_dataset
from flow_factory.data_utils.prompt_dataset import load_prompt_dataset
from flow_factory.hparams import DatasetArguments, load_config, save_config
from flow_factory.samples import ImageSample, NoiseKey
from flow_factory.trainers.offline import preferences
from tests.cli.data_support import error_of, examples, flow_factory, shade
from tests.trainers.offline_support import make_dataset, offline_config, picture, write_records
from tests.trainers.support import make_config


@pytest.fixture
def rl_config(tiny_sd3_dir: Path, tmp_path: Path) -> Path:
    config = tmp_path / "rl.yaml"
    save_config(make_config(tiny_sd3_dir, tmp_path, {"eval.per_device_batch_size": 4}), config)
    return config


def test_make_preferences_pairs_the_best_with_the_worst(rl_config: Path, tmp_path: Path) -> None:
    result = flow_factory(
        "data", "make-preferences", rl_config, "--output", tmp_path / "p", "--images-per-prompt", 3, "--limit", 5
    )
    assert result.exit_code == 0, result.output
    assert "wrote 5 pairs of 5 prompts" in result.output and "0 ties" in result.output
    made = examples(tmp_path / "p")
    assert len(made) == 5 and sorted(p.name for p in (tmp_path / "p").iterdir()) == ["images", "train.jsonl"]
    for example in made:
        metadata = example.record.metadata
        for arm, score in zip(("chosen", "rejected"), metadata["rewards"]["red"], strict=True):
            pixels = np.asarray(Image.open(example.arms[arm][0].path), dtype=np.float64)
            assert pixels[..., 0].mean() / 255 == pytest.approx(score, abs=1e-12), "the PNG holds what was scored"
        assert metadata["totals"][0] > metadata["totals"][1] and len(set(metadata["members"])) == 2
    assert "exists and is not written over" in error_of(
        flow_factory("data", "make-preferences", rl_config, "--output", tmp_path / "p")
    )


def test_make_preferences_goes_on_where_it_was_stopped(
    rl_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = ("data", "make-preferences", rl_config, "--images-per-prompt", 2)
    assert flow_factory(*command, "--output", tmp_path / "whole").exit_code == 0
    rollout, calls = preferences.rollout_batch, [0]

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == 3:
            raise KeyboardInterrupt
        return rollout(*arguments, **keywords)

    monkeypatch.setattr(preferences, "rollout_batch", stopping)
    assert flow_factory(*command, "--output", tmp_path / "parts").exit_code == 130
    assert not (tmp_path / "parts").exists() and calls[0] == 3
    work = tmp_path / ".parts.partial"
    with (work / "progress.jsonl").open("a") as file:
        file.write('{"outcome": "pa')  # as a killed process leaves it
    text = error_of(flow_factory(*command, "--output", tmp_path / "parts", "--seed", 5))
    assert "holds unfinished work of other settings" in text
    calls[0] = 10
    assert flow_factory(*command, "--output", tmp_path / "parts").exit_code == 0
    assert calls[0] == 10 + 2, "four prompts, two at once: the first two batches were done"
    names = sorted(p.relative_to(tmp_path / "whole") for p in (tmp_path / "whole").rglob("*") if p.is_file())
    assert names == sorted(p.relative_to(tmp_path / "parts") for p in (tmp_path / "parts").rglob("*") if p.is_file())
    assert all((tmp_path / "whole" / n).read_bytes() == (tmp_path / "parts" / n).read_bytes() for n in names)
    assert not work.exists()


def test_make_preferences_counts_ties(rl_config: Path, tmp_path: Path) -> None:
    command = ("data", "make-preferences", rl_config, "--images-per-prompt", 2, "--output", tmp_path / "p")
    text = error_of(flow_factory(*command, "--limit", 2, "--min-margin", 0.9))
    assert "none of 2 prompts gave a pair (2 ties, 0 with fewer than two" in text
    assert not (tmp_path / "p").exists() and not (tmp_path / ".p.partial").exists()
    assert flow_factory(*command, "--limit", 2).exit_code == 0, "nothing of the first try is in the way"


def test_make_preferences_takes_weights_and_prompts(rl_config: Path, tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Of a run folder: its trained weights; and prompts that are not the run's own."""
    from flow_factory.trainers.build import build_trainer

    config = load_config(rl_config, ["train.max_epochs=1", "train.learning_rate=0.05", "train.ema_decay=0.0"])
    build_trainer(config).start()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "train.txt").write_text("a red circle\nsky\n")
    command = ("data", "make-preferences", "--prompts", tmp_path / "other", "--images-per-prompt", 2)
    assert flow_factory(*command, rl_config, "--output", tmp_path / "base").exit_code == 0
    assert flow_factory(*command, tmp_path / "save/run", "--output", tmp_path / "tuned").exit_code == 0
    base, tuned = examples(tmp_path / "base"), examples(tmp_path / "tuned")
    assert [e.record.prompt for e in base] == [e.record.prompt for e in tuned] == ["a red circle", "sky"]
    assert any(shade(a, "chosen") != shade(b, "chosen") for a, b in zip(base, tuned, strict=True)) or (
        [e.record.metadata["totals"] for e in base] != [e.record.metadata["totals"] for e in tuned]
    )


def test_make_preferences_reads_each_datasets_own_split_and_limit(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    for name in ("one", "two"):
        (tmp_path / name).mkdir()
        (tmp_path / name / f"part-{name}.txt").write_text("".join(f"{name} {n}\n" for n in range(3)))
    (tmp_path / "two" / "train.txt").write_text("not asked for\n")
    datasets = [
        {
            "name": name,
            "dataset_dir": str(tmp_path / name),
            "train": {"split": f"part-{name}", "max_dataset_size": size},
        }
        for name, size in (("one", 2), ("two", None))
    ]
    config = tmp_path / "rl.yaml"
    save_config(make_config(tiny_sd3_dir, tmp_path, {"data": {"datasets": datasets}}), config)
    command = ("data", "make-preferences", config, "--images-per-prompt", 2, "--output")
    assert flow_factory(*command, tmp_path / "p").exit_code == 0
    assert [e.record.prompt for e in examples(tmp_path / "p")] == ["one 0", "one 1", "two 0", "two 1", "two 2"]
    text = error_of(flow_factory(*command, tmp_path / "q", "--split", "part-two"))
    assert "has no part-two.txt" in text


def test_make_preferences_does_not_go_on_with_other_metadata(
    rl_config: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rewards may read it."""
    prompts = tmp_path / "other"
    prompts.mkdir()
    command = ("data", "make-preferences", rl_config, "--prompts", prompts, "--images-per-prompt", 2)

    def stopping(*arguments: Any, **keywords: Any) -> Any:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(preferences, "rollout_batch", stopping)
        write_records(prompts, [{"prompt": "a", "count": 1}])
        assert flow_factory(*command, "--output", tmp_path / "p").exit_code == 130
    write_records(prompts, [{"prompt": "a", "count": 2}])
    assert "holds unfinished work of other settings, weights or prompts" in error_of(
        flow_factory(*command, "--output", tmp_path / "p")
    )


def test_pairs_keep_the_pictures_they_were_made_from(tmp_path: Path) -> None:
    """What an editing model was given belongs to its pair, so that the dataset can be trained on by itself."""
    (tmp_path / "images").mkdir()
    given = [tmp_path / "images" / picture(tmp_path / "images" / f"{n}.PNG", n) for n in range(2)]
    io = PipelineIOContract(
        (MediaSlot(Modality.TEXT, "prompt"), MediaSlot(Modality.IMAGE, "image", required=True, max_items=2)),
        (Modality.IMAGE,),
    )
    write_records(tmp_path, [{"prompt": "paint it red", "images": ["1.PNG", "0.PNG"]}])
    (asked,) = load_prompt_dataset(DatasetArguments(dataset_dir=str(tmp_path)), "train", io=io)
    unused: Any = None
    samples = [
        ImageSample(
            prompt=asked.prompt, source=asked.source, source_id=asked.source_id, index=asked.index,
            group_id=asked.group_id, member=member, key=NoiseKey(0, 0, asked.group_id, member), condition=unused,
            trajectory=unused, rewards={"r": score}, image=torch.full((3, 32, 32), member, dtype=torch.uint8),
        )
        for member, score in enumerate((0.5, 0.1, 0.9))
    ]  # fmt: skip
    rewards: Any = SimpleNamespace(weights_for=lambda sample: {"r": 1.0})
    target = tmp_path / "pairs"
    with new_dataset(target) as writer:
        outcome, line = preferences._judge(
            asked, samples, rewards, preferences.PreferenceSettings(images_per_prompt=3, seed=0), writer
        )
        assert outcome == "pair" and line is not None
        writer.add(line)
    scan = scan_offline_dataset(DatasetArguments(dataset_dir=str(target)), "train", io=io)
    assert scan.problems == []
    (made,) = scan.examples
    assert [file.path.read_bytes() for file in made.record.media] == [given[1].read_bytes(), given[0].read_bytes()]
    assert all(target in file.path.parents for file in made.record.media)
    assert made.record.group_id == asked.group_id, "the same prompt with the same pictures"
    assert made.record.metadata["members"] == [2, 1]


def test_make_preferences_needs_prompts_and_rewards(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    make_dataset(tmp_path / "data")
    config = tmp_path / "sft.yaml"
    save_config(offline_config(tiny_sd3_dir, tmp_path, tmp_path / "data"), config)
    command = ("data", "make-preferences", config, "--output", tmp_path / "p")
    assert "has no prompts of its own; name some with --prompts" in error_of(flow_factory(*command))
    text = error_of(flow_factory(*command, "--prompts", "builtin/shapes"))
    assert "neither rewards nor eval_rewards" in text
    assert flow_factory(*command, "--images-per-prompt", 1).exit_code == 2
