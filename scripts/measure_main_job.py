"""The main job over several training seeds: held-out rewards before and after, and wall-clock time.

The evaluation panel (prompts, noise, seed) is the configuration's and is the same for all training seeds.

    python scripts/measure_main_job.py --seeds 42 43 44
    python scripts/measure_main_job.py --seeds 42 train.learning_rate=3e-4     # one setting of a search
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


def run(config: str, seed: int, folder: Path, overrides: list[str]) -> dict[str, Any]:
    """One training run in a fresh process, as a user starts it."""
    name = f"seed-{seed}"
    command = [str(Path(sys.executable).with_name("flow-factory")), "train", config, f"train.seed={seed}"]
    command += [f"log.save_dir={folder}", f"log.run_name={name}", "log.save_freq=0", *overrides]
    start = time.perf_counter()
    subprocess.run(command, check=True, stdout=subprocess.DEVNULL)
    seconds = time.perf_counter() - start
    result = json.loads((folder / name / "result.json").read_text())
    first, last = result["evaluations"][0], result["evaluations"][-1]
    scores = {key: (first[key], last[key]) for key in first if key != "cycle"}
    return {"seed": seed, "seconds": seconds, "scores": scores, "cycles": len(result["rewards"])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--config", default="examples/grpo/lora/sd3_5/tiny.yaml")
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("overrides", nargs="*", help="key=value")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        runs = [run(arguments.config, seed, Path(name), arguments.overrides) for seed in arguments.seeds]
    print(f"{os.cpu_count()} CPU cores; settings changed: {arguments.overrides or 'none'}")
    for key in runs[0]["scores"]:
        before = [r["scores"][key][0] for r in runs]
        after = [r["scores"][key][1] for r in runs]
        gains = [b - a for a, b in zip(before, after, strict=True)]
        spread = f" (std {statistics.stdev(gains):.4f})" if len(gains) > 1 else ""
        print(f"{key}: {statistics.mean(before):.4f} -> {[round(a, 4) for a in after]}, mean gain "
              f"{statistics.mean(gains):+.4f}{spread}")  # fmt: skip
    print(f"seconds: {[round(r['seconds'], 1) for r in runs]} for {runs[0]['cycles']} cycles")


if __name__ == "__main__":
    main()
