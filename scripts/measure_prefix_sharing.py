"""What sharing the steps that a group has in common saves: rows and seconds of the rollout, side by side.

Two trainers of one configuration, with and without `train.share_initial_noise`, run cycles in turn in one process. With
a window at steps 3 and 4 of 8 and twelve pictures per prompt, a prompt costs 8 K rows of the transformer without and
3 + 5 K with it. Rows are counted by the model, seconds are medians over cycles; start-up is left out.

    python scripts/measure_prefix_sharing.py
    python scripts/measure_prefix_sharing.py --cycles 10 --threads 1 train.group_size=24 scheduler.sde_steps=[5,6]
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import tempfile
import time

import torch

from flow_factory import build_trainer, load_config
from flow_factory.trainers.abc import BaseTrainer

WINDOW = [
    "train.num_inference_steps=8",
    "scheduler.sde_steps=[3,4]",
    "scheduler.num_sde_steps=2",
    "train.group_size=12",
    "train.per_device_batch_size=24",
]


def cycle(trainer: BaseTrainer) -> dict[str, float]:
    """One cycle: its seconds, those of its rollout, and the rows that the rollout put through the network."""
    before, rollout = dict(trainer.result.counts), trainer.result.timings.get("rollout", 0.0)
    began = time.perf_counter()
    trainer._run_cycle()
    seconds = time.perf_counter() - began
    counts = {name: number - before.get(name, 0) for name, number in trainer.result.counts.items()}
    return {
        "rows": counts["network_rows"] - counts["trained_rows"],
        "samples": counts["samples"],
        "rollout_s": trainer.result.timings["rollout"] - rollout,
        "cycle_s": seconds,
    }


def on_paper(trainer: BaseTrainer) -> tuple[int, int]:
    """Rows of a cycle's rollout without and with sharing, from the window and the group size alone."""
    steps, k = trainer.rollout_plan.num_steps, trainer.geometry.group_size
    common = min(trainer.rollout_plan.window)
    prompts = trainer.geometry.unique * (2 if trainer.rollout_plan.guidance.needs_negative() else 1)
    return prompts * steps * k, prompts * (common + (steps - common) * k)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/grpo/lora/sd3_5/tiny.yaml")
    parser.add_argument("--cycles", type=int, default=8)
    parser.add_argument("--warmups", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    rows: dict[str, list[dict[str, float]]] = {"without": [], "with": []}
    with tempfile.TemporaryDirectory() as folder:
        fixed = [
            f"log.save_dir={folder}",
            "log.save_freq=0",
            "log.verbose=false",
            "eval.eval_freq=0",
            "train.max_epochs=100000",
        ]
        trainers = {}
        for name in rows:
            own = [f"train.share_initial_noise={str(name == 'with').lower()}", f"log.run_name={name}"]
            config = load_config(arguments.config, [*fixed, *WINDOW, *arguments.overrides, *own])
            trainers[name] = build_trainer(config)
        for number in range(arguments.warmups + arguments.cycles):
            # The order alternates, so that a slow drift of a shared machine weighs on both alike.
            for name in sorted(rows, reverse=bool(number % 2)):
                measured = cycle(trainers[name])
                if number >= arguments.warmups:
                    rows[name].append(measured)
        paper = dict(zip(rows, on_paper(trainers["with"]), strict=True))
        for trainer in trainers.values():
            trainer._close()
    medians = {
        name: {key: statistics.median(r[key] for r in measured) for key in measured[0]}
        for name, measured in rows.items()
    }
    report = {
        "machine": f"{platform.machine()}, {arguments.threads} thread(s), torch {torch.__version__}",
        "cycles": arguments.cycles,
        "rows_per_cycle": {name: int(medians[name]["rows"]) for name in rows},
        "rows_on_paper": paper,
        "rollout_s": {name: round(medians[name]["rollout_s"], 3) for name in rows},
        "cycle_s": {name: round(medians[name]["cycle_s"], 3) for name in rows},
        "rows_ratio": round(medians["with"]["rows"] / medians["without"]["rows"], 4),
        "median_of_paired_rollout_ratios": _paired(rows, "rollout_s"),
        "median_of_paired_cycle_ratios": _paired(rows, "cycle_s"),
    }
    print(json.dumps(report, indent=2))
    if report["rows_per_cycle"] != report["rows_on_paper"]:
        raise SystemExit("the rows of the rollout are not those counted on paper")


def _paired(rows: dict[str, list[dict[str, float]]], key: str) -> float:
    return round(statistics.median(a[key] / b[key] for a, b in zip(rows["with"], rows["without"], strict=True)), 4)


if __name__ == "__main__":
    main()
