"""Start-up times of the light commands: wall and CPU seconds, median of several fresh processes.

python scripts/measure_cli.py
"""

from __future__ import annotations

import resource
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CONFIG = """
model: {model_type: sd3-5, model_name_or_path: builtin/tiny-sd3-shapes}
data: {dataset_dir: data}
train: {trainer_type: grpo, resolution: 64}
rewards: {reward_model: jpeg_compressibility}
"""


def measure(arguments: list[str], folder: Path, repeats: int = 9) -> tuple[float, float]:
    """Median wall and CPU seconds of `flow-factory` with these arguments."""
    walls, cpus = [], []
    for _ in range(repeats):
        before, start = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(
            [str(Path(sys.executable).with_name("flow-factory")), *arguments],
            cwd=folder,
            check=True,
            capture_output=True,
        )
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        walls.append(time.perf_counter() - start)
        cpus.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return statistics.median(walls), statistics.median(cpus)


def main() -> None:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "data").mkdir()
        (folder / "data" / "train.txt").write_text("\n".join(f"prompt number {i}" for i in range(1000)) + "\n")
        (folder / "run.yaml").write_text(CONFIG)
        for arguments in (["--help"], ["check", "run.yaml"], ["list", "rewards"], ["config", "show", "run.yaml"]):
            wall, cpu = measure(arguments, folder)
            print(f"flow-factory {' '.join(arguments):24} {wall:.2f} s wall, {cpu:.2f} s CPU")


if __name__ == "__main__":
    main()
