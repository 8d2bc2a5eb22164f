"""The recorded search for the settings of the main job: learning rate, window, noise level, groups, reward shape.

Every trial is a training run of `examples/grpo/lora/sd3_5/tiny.yaml` with some values overridden, evaluated on the
example's own test prompts. Figures are quoted on another panel (`scripts/measure_main_job.py`), which no trial sees.

    python scripts/search_main_job.py --output guidance/data/main_job_search.jsonl     # runs what is not there yet
    python scripts/search_main_job.py --output guidance/data/main_job_search.jsonl --table

A trial's record: its overrides, its seed, held-out scores before and after, and its seconds. Trials that run side by
side share the machine, so their seconds say little; cycles and pictures are what they are compared by.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

CONFIG = "examples/grpo/lora/sd3_5/tiny.yaml"
BASE = {
    "train.learning_rate": "2e-3",
    "scheduler.num_sde_steps": "2",
    "scheduler.noise_level": "0.7",
    "train.unique_sample_num_per_epoch": "8",
    "train.group_size": "12",
    "train.gradient_step_per_epoch": "2",
}
COARSE = 20
# One change at a time from the base, 20 cycles of 96 pictures each, one seed.
STAGE_ONE: list[dict[str, str]] = [
    {},
    {"train.learning_rate": "5e-4"},
    {"train.learning_rate": "1e-3"},
    {"train.learning_rate": "4e-3"},
    {"scheduler.noise_level": "0.5"},
    {"scheduler.noise_level": "0.8"},
    {"scheduler.noise_level": "0.9"},
    {"scheduler.noise_level": "0.9", "scheduler.num_sde_steps": "1"},
    {"scheduler.num_sde_steps": "1"},
    {"scheduler.num_sde_steps": "3"},
    {"scheduler.num_sde_steps": "2", "scheduler.sde_window": "contiguous", "scheduler.sde_window_range": "[0,4]"},
    {"train.unique_sample_num_per_epoch": "12", "train.group_size": "8"},
    {"train.unique_sample_num_per_epoch": "4", "train.group_size": "24"},
    {"train.gradient_step_per_epoch": "1"},
    {"rewards[0].params": "{strict: true}"},
    {"train.advantage_aggregation": "sum"},
    {"train.kl_beta": "0.01"},
    {"scheduler.dynamics_type": "CPS"},
]


def run(trial: dict[str, str], seed: int, cycles: int, folder: Path) -> dict[str, Any]:
    """One training run in a fresh process on one thread; evaluated before the first and after the last cycle."""
    name = f"trial-{abs(hash((tuple(trial.items()), seed, cycles)))}"
    values = {**BASE, **trial, "train.seed": str(seed), "train.max_epochs": str(cycles), "eval.eval_freq": str(cycles)}
    command = [str(Path(sys.executable).with_name("flow-factory")), "train", CONFIG]
    command += [f"{key}={value}" for key, value in values.items()]
    command += [f"log.save_dir={folder}", f"log.run_name={name}", "log.save_freq=0", "log.verbose=false"]
    start = time.perf_counter()
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    seconds = time.perf_counter() - start
    record: dict[str, Any] = {"changes": trial, "seed": seed, "cycles": cycles, "seconds": round(seconds, 1)}
    if done.returncode != 0:  # a setting that breaks the run is a result too
        return {**record, "failed": done.stderr.strip().splitlines()[-1:]}
    evaluations = json.loads((folder / name / "result.json").read_text())["evaluations"]
    for when, row in (("before", evaluations[0]), ("after", evaluations[-1])):
        record[when] = {key.split("/")[-1]: round(value, 4) for key, value in row.items() if key != "cycle"}
    return record


def key(record: dict[str, Any]) -> str:
    return json.dumps([record["changes"], record["seed"], record["cycles"]], sort_keys=True)


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def search(wanted: list[dict[str, Any]], output: Path, jobs: int) -> None:
    """Runs the trials that the file does not hold yet; each is written as soon as it is done."""
    output.parent.mkdir(parents=True, exist_ok=True)
    known = {key(record) for record in read(output)}
    missing = [w for w in wanted if key(w) not in known]
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(jobs) as pool, output.open("a") as file:
        for done in as_completed(
            [pool.submit(run, w["changes"], w["seed"], w["cycles"], Path(folder)) for w in missing]
        ):
            record = done.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            print(json.dumps(record), flush=True)


def table(records: list[dict[str, Any]]) -> str:
    """The trials as a Markdown table, best strict gain first within each number of cycles."""
    lines = ["| changed from the base | cycles | seed | strict | graded | brightness |", "|---|---|---|---|---|---|"]

    def gain(record: dict[str, Any]) -> float:
        return record["after"]["strict"] - record["before"]["strict"] if "after" in record else float("-inf")

    for record in sorted(records, key=lambda r: (r["cycles"], -gain(r))):
        changes = ", ".join(f"`{k.split('.', 1)[1]}` {v}" for k, v in record["changes"].items()) or "nothing (the base)"
        start = f"| {changes} | {record['cycles']} | {record['seed']} |"
        if "after" not in record:
            lines.append(f"{start} failed | | |")
            continue
        cells = [f"{record['before'][n]:.3f} -> {record['after'][n]:.3f}" for n in ("strict", "graded", "brightness")]
        lines.append(f"{start} {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, a trial each; continued if it exists.")
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    parser.add_argument("--table", action="store_true", help="Only print the table of what has been run.")
    parser.add_argument("--finalist", action="append", default=[], help="JSON of changes: 40 cycles, 2 seeds.")
    arguments = parser.parse_args()
    if not arguments.table:
        wanted = [{"changes": c, "seed": 7, "cycles": COARSE} for c in STAGE_ONE]
        wanted += [
            {"changes": json.loads(text), "seed": s, "cycles": 40} for text in arguments.finalist for s in (7, 8)
        ]
        search(wanted, arguments.output, arguments.jobs)
    print(table(read(arguments.output)))


if __name__ == "__main__":
    main()
