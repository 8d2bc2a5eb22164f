"""Does training on stored examples teach what they show? A style by demonstrations, preferences by offline DPO.

    python scripts/measure_offline.py                       # both, three seeds
    python scripts/measure_offline.py train.max_epochs=10 --part style --seeds 42

*Style*: 256 pictures of single shapes drawn as outlines, which the embedded pipeline, trained on filled shapes, does
not know (`flow-factory data draw`). Measured before and after `examples/sft/lora/sd3_5/tiny.yaml`:

* the held-out flow-matching loss: mean squared error of the velocity on 96 other pictures of that style, of
  combinations that do not occur in training, at fixed noise and times (8 per picture);
* the style statistic `hollowness` (`rewards/shapes_styles.py`): how far the middle of a shape has the background's
  colour, of pictures that the model generates for the 48 held-out prompts, and of the drawn pictures, the target.

*Preferences*: pairs made by the tool from the pipeline's own pictures for training prompts, then
`examples/offline_dpo/lora/sd3_5/tiny.yaml`; measured: `prompt_match`, strict and graded, on a fixed panel of prompts
whose combinations do not occur in training. The pairs of a seed are made with that seed.

Seeds are those of training; data, panel and evaluation noise are the same for all.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch

HELD_OUT_PICTURES = 96
TIMES = 8
SFT = "examples/sft/lora/sd3_5/tiny.yaml"
DPO = "examples/offline_dpo/lora/sd3_5/tiny.yaml"
GRPO = "examples/grpo/lora/sd3_5/tiny.yaml"


def command(*words: object) -> float:
    """Runs `flow-factory` as a user does, in a fresh process; seconds."""
    program = str(Path(sys.executable).with_name("flow-factory"))
    start = time.perf_counter()
    subprocess.run([program, *map(str, words)], check=True, stdout=subprocess.DEVNULL)
    return time.perf_counter() - start


def draw_held_out(folder: Path) -> None:
    """A demonstration dataset of combinations that do not occur in training, with a seed of its own."""
    import numpy as np

    from flow_factory.data_utils.offline_writer import example_line, new_dataset
    from flow_factory.rewards.shapes_styles import render_outlined
    from flow_factory.rewards.shapes_world import format_caption, sample_scene

    rng = np.random.default_rng(99)
    with new_dataset(folder) as writer:
        for index in range(HELD_OUT_PICTURES):
            scene = sample_scene(rng, "single", "test")
            name = writer.save_image(render_outlined(scene, rng), f"{index:06d}")
            writer.add(example_line("demonstration", format_caption(scene), {"target": name}))


def held_out_losses(data: Path, loras: dict[str, Path | None], folder: Path) -> dict[str, float]:
    """The flow-matching loss on held-out pictures, with each LoRA (None: the base model), noise and times fixed."""
    from flow_factory.data_utils.offline_plan import plan_offline_data
    from flow_factory.data_utils.offline_train_data import build_offline_train_dataloader
    from flow_factory.distributed import Comm
    from flow_factory.hparams import load_config
    from flow_factory.objectives.flow_matching import flow_matching_loss
    from flow_factory.trainers.inference import build_inference_model
    from flow_factory.trainers.offline.noised_arms import noised_arms

    config = load_config(SFT, [f"data.dataset_dir={data}", f"data.cache_dir={folder / 'cache'}"])
    # The times that the run trains, many of them and stratified.
    arguments: Any = config.training_args
    sampling = dataclasses.replace(arguments.time_sampling, count=TIMES)
    found = {}
    for name, lora in loras.items():
        variant = "base" if lora is None else "trained"
        model = build_inference_model(config, Comm.single(), lora, [variant])
        loader, _ = build_offline_train_dataloader(config, model.adapter, Comm.single(), plan_offline_data(config))
        losses = []
        with torch.no_grad(), model.use(variant):
            for batch in loader:
                condition = model.adapter.prepare_condition_state(batch.condition)
                for arms in noised_arms(model.adapter, batch, sampling, seed=0, data_epoch=0):
                    noised = arms["target"]
                    guidance = model.adapter.offline_guidance()
                    velocity = model.adapter.predict(noised.state, noised.times, condition, guidance)
                    losses.append(flow_matching_loss(velocity, noised.target, noised.sigma)[0].item())
        found[name] = statistics.mean(losses)
    return found


def target_hollowness(data: Path) -> float:
    """The style statistic of drawn pictures."""
    from PIL import Image

    from flow_factory.rewards.shapes_styles import hollowness
    from flow_factory.rewards.shapes_world import parse_caption

    rows = [json.loads(line) for line in (data / "train.jsonl").read_text().splitlines()]
    values = []
    for row in rows:
        (media,) = row["supervision"]["target"]["media"]
        image = Image.open(data / "images" / media["path"])
        values.append(hollowness(image, parse_caption(row["input"]["prompt"])))
    return statistics.mean(values)


def train(config: str, folder: Path, name: str, overrides: list[str]) -> tuple[dict[str, Any], float]:
    """One run; its result and seconds."""
    common = [f"log.save_dir={folder}", f"log.run_name={name}", "log.save_freq=0", f"data.cache_dir={folder / 'cache'}"]
    seconds = command("train", config, *common, *overrides)
    return json.loads((folder / name / "result.json").read_text()), seconds


def newest_lora(run: Path) -> Path:
    return sorted((run / "checkpoints").glob("checkpoint-*"))[-1] / "lora"


def measure_style(folder: Path, seeds: list[int], overrides: list[str]) -> None:
    data, held_out = folder / "outlined", folder / "held-out"
    command("data", "draw", data)
    draw_held_out(held_out)
    loras: dict[str, Path | None] = {"base": None}
    before, after, seconds = 0.0, [], []
    for seed in seeds:
        result, took = train(SFT, folder, f"sft-{seed}", [f"data.dataset_dir={data}", f"train.seed={seed}", *overrides])
        loras[str(seed)] = newest_lora(folder / f"sft-{seed}")
        before = result["evaluations"][0]["default/hollow"]
        after.append(result["evaluations"][-1]["default/hollow"])
        seconds.append(took)
    losses = held_out_losses(held_out, loras, folder)
    base = losses.pop("base")
    target = target_hollowness(held_out)
    print(f"style: held-out flow-matching loss {base:.4f} -> {listed(losses.values())}, "
          f"change {listed([100 * (loss / base - 1) for loss in losses.values()], 1)} %")  # fmt: skip
    print(f"style: hollowness {before:.4f} -> {listed(after)}, target {target:.4f}; share of the way "
          f"{listed([(value - before) / (target - before) for value in after], 3)}")  # fmt: skip
    print(f"style: seconds {listed(seconds, 0)}")


def measure_preferences(folder: Path, seeds: list[int], overrides: list[str]) -> None:
    results, pairs, seconds, making = [], [], [], []
    for seed in seeds:
        data = folder / f"preferences-{seed}"
        making.append(
            command("data", "make-preferences", GRPO, "--output", data, "--images-per-prompt", 8, "--min-margin", 0.2,
                    "--seed", seed, f"data.cache_dir={folder / 'cache'}")
        )  # fmt: skip
        pairs.append(len((data / "train.jsonl").read_text().splitlines()))
        where = [f"data.datasets[0].dataset_dir={data}", f"train.seed={seed}", "data.datasets[1].eval.split=panel"]
        result, took = train(DPO, folder, f"dpo-{seed}", [*where, *overrides])
        results.append(result["evaluations"])
        seconds.append(took)
    for key in [name for name in results[0][0] if name != "cycle"]:
        before = [evaluations[0][key] for evaluations in results]
        after = [evaluations[-1][key] for evaluations in results]
        gains = [b - a for a, b in zip(before, after, strict=True)]
        spread = f" (std {statistics.stdev(gains):.4f})" if len(gains) > 1 else ""
        print(f"preferences: {key} {before[0]:.4f} -> {listed(after)}, mean gain {statistics.mean(gains):+.4f}{spread}")
    print(f"preferences: pairs {pairs}; seconds to make them {listed(making, 0)}, to train {listed(seconds, 0)}")


def listed(values: Any, digits: int = 4) -> str:
    return ", ".join(f"{value:.{digits}f}" for value in values)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--part", choices=["style", "preferences", "both"], default="both")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("overrides", nargs="*", help="key=value, for the training runs")
    arguments = parser.parse_args()
    print(f"{os.cpu_count()} CPU cores; settings changed: {arguments.overrides or 'none'}")
    with tempfile.TemporaryDirectory() as name:
        if arguments.part != "preferences":
            measure_style(Path(name), arguments.seeds, arguments.overrides)
        if arguments.part != "style":
            measure_preferences(Path(name), arguments.seeds, arguments.overrides)


if __name__ == "__main__":
    main()
