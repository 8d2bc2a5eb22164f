"""The main job over several training seeds, measured on a panel of prompts and noises that no setting was chosen on.

Each seed is trained as a user trains it; then `flow-factory eval --compare` scores the base model and the trained one
on `builtin/shapes`, file `panel.txt` (96 held-out combinations, none of them in the test file), four pictures a prompt
from a noise seed of its own. Group diversity and the picture statistics beside the rewards would show hacking.

    python scripts/measure_main_job.py --seeds 42 43 44
    python scripts/measure_main_job.py --seeds 42 train.learning_rate=3e-4
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

PANEL = ["--dataset", "shapes", "--split", "panel", "--samples-per-prompt", "4", "--seed", "20261129"]


def run(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One training run in a fresh process and its evaluation in another."""
    command = str(Path(sys.executable).with_name("flow-factory"))
    place = [f"log.save_dir={folder}", f"log.run_name=seed-{seed}"]
    start = time.perf_counter()
    train = [command, "train", config, f"train.seed={seed}", *place, *overrides]
    subprocess.run(train, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    output = folder / f"eval-{seed}.json"
    score = [command, "eval", str(folder / f"seed-{seed}"), "--compare", *PANEL, "--output", str(output)]
    subprocess.run(score, check=True, stdout=subprocess.DEVNULL)
    result = json.loads((folder / f"seed-{seed}" / "result.json").read_text())
    panel = json.loads(output.read_text())["datasets"]["shapes"]
    del panel["samples"]  # every picture's scores: the means and intervals are kept
    return {
        "seed": seed,
        "seconds": round(seconds, 1),
        "cycles": len(result["rewards"]),
        "overrides": overrides,
        "panel": panel,
    }


def table(records: list[dict[str, Any]]) -> str:
    """One line a metric: before, after by seed, and the mean gain with its spread over training seeds."""
    lines = ["| on the panel | before | after, by seed | mean gain (std over seeds) |", "|---|---|---|---|"]
    for name, entry in records[0]["panel"]["base"].items():
        if not isinstance(entry, dict) or "mean" not in entry:
            continue
        after = [r["panel"]["trained"][name]["mean"] for r in records]
        gains = [value - r["panel"]["base"][name]["mean"] for value, r in zip(after, records, strict=True)]
        spread = f" ({statistics.stdev(gains):.3f})" if len(gains) > 1 else ""
        cells = ", ".join(f"{value:.4f}" for value in after)
        lines.append(f"| {name} | {entry['mean']:.4f} | {cells} | {statistics.mean(gains):+.4f}{spread} |")
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/grpo/lora/sd3_5/tiny.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--output", type=Path, help="Where to keep the records, one JSON line a seed.")
    parser.add_argument("--keep", type=Path, help="Folder to keep the runs in; a temporary one.")
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as temporary:
        folder = arguments.keep or Path(temporary)
        folder.mkdir(parents=True, exist_ok=True)
        records = [run(arguments.config, seed, folder, arguments.overrides) for seed in arguments.seeds]
    if arguments.output is not None:
        arguments.output.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{os.cpu_count()} CPU cores; settings changed: {arguments.overrides or 'none'}")
    print(table(records))
    print(f"seconds: {[r['seconds'] for r in records]} for {records[0]['cycles']} cycles")


if __name__ == "__main__":
    main()
