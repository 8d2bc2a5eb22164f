"""What the loader of stored examples costs over a bare loop: images per second, the same pictures, decoder and workers.

    python scripts/measure_loader.py                     # in this process
    python scripts/measure_loader.py --workers 2 --size 512 --images 256

The bare loop decodes the same pictures in the same order with the same function and stacks what a batch has, in the
same number of worker processes; the loader also samples, checks, buckets and looks up conditions. Both alternate, after
one warm-up each, since the load of a shared machine changes. Without workers the CPU time is compared too.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset

from flow_factory.data_utils.offline_media import fit_image, read_image
from flow_factory.data_utils.offline_plan import plan_offline_data
from flow_factory.data_utils.offline_train_data import OfflineLoader, build_offline_train_dataloader
from flow_factory.distributed import Comm
from flow_factory.hparams import load_config
from flow_factory.trainers.inference import build_inference_model

SFT = "examples/sft/lora/sd3_5/tiny.yaml"


def write_dataset(folder: Path, count: int, size: int) -> None:
    """Noisy gradients as JPEG, which cost what photographs cost to decode."""
    (folder / "images").mkdir(parents=True)
    rng = np.random.default_rng(0)
    y, x = np.mgrid[0:size, 0:size] / size
    lines = []
    for index in range(count):
        base = np.stack([x, y, (x + y) / 2], axis=-1) * 255 * rng.random(3)
        pixels = np.clip(base + rng.normal(0, 12, base.shape), 0, 255).astype(np.uint8)
        Image.fromarray(pixels).save(folder / "images" / f"{index:06d}.jpg", quality=90)
        media = {"media": [{"type": "image", "path": f"{index:06d}.jpg"}]}
        record = {"schema_version": 2, "input": {"prompt": f"picture {index % 32}"},
                  "supervision": {"type": "demonstration", "target": media}}  # fmt: skip
        lines.append(json.dumps(record))
    (folder / "train.jsonl").write_text("\n".join(lines) + "\n")


class Bare(Dataset[torch.Tensor]):
    """Batches of decoded pictures, and nothing else."""

    def __init__(self, batches: list[list[tuple[Path, tuple[int, int]]]]) -> None:
        self.batches = batches

    def __len__(self) -> int:
        return len(self.batches)

    def __getitem__(self, number: int) -> torch.Tensor:
        images = [fit_image(read_image(path), size) for path, size in self.batches[number]]
        return torch.stack([torch.from_numpy(np.array(image)).permute(2, 0, 1) for image in images])


def bare_loader(loader: OfflineLoader, plan: Any, workers: int) -> DataLoader[Any]:
    entries = plan.entries
    batches = [[(entries[i].example.arms["target"][0].path, entries[i].size) for i in rows] for rows in loader.batches]
    return DataLoader(
        Bare(batches), batch_size=None, num_workers=workers, persistent_workers=workers > 0,
        multiprocessing_context="fork" if workers else None,
    )  # fmt: skip


def rates(batches: Iterator[Any]) -> tuple[float, float]:
    """Images per second of one pass, and per second of CPU time of this process."""
    wall, cpu = time.perf_counter(), time.process_time()
    images = sum(len(batch) for batch in batches)
    return images / (time.perf_counter() - wall), images / max(time.process_time() - cpu, 1e-9)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--images", type=int, default=256)
    parser.add_argument("--size", type=int, default=256, help="height and width of the stored pictures")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--workers", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        data = Path(name) / "data"
        write_dataset(data, arguments.images, arguments.size)
        config = load_config(
            SFT,
            [f"data.dataset_dir={data}", f"data.cache_dir={name}/cache", f"train.resolution={arguments.size}",
             f"train.per_device_batch_size={arguments.batch}", f"data.dataloader_num_workers={arguments.workers}"],
        )  # fmt: skip
        adapter = build_inference_model(config, Comm.single(), None, ["base"]).adapter
        plan = plan_offline_data(config)
        loader, _ = build_offline_train_dataloader(config, adapter, Comm.single(), plan)
        bare = bare_loader(loader, plan, arguments.workers)
        ours: list[tuple[float, float]] = []
        theirs: list[tuple[float, float]] = []
        try:
            for number in range(arguments.rounds + 1):
                # Which of the two goes first changes, so that neither always inherits the other's warm caches.
                if number % 2:
                    own, other = rates(iter(loader)), rates(iter(bare))
                else:
                    other, own = rates(iter(bare)), rates(iter(loader))
                if number:  # the first pass starts workers and fills caches
                    ours.append(own)
                    theirs.append(other)
        finally:
            loader.close()
    print(f"{arguments.images} pictures of {arguments.size} pixels, batches of {arguments.batch}, "
          f"{arguments.workers} workers, {arguments.rounds} rounds")  # fmt: skip
    for number, what in enumerate(("wall", "CPU") if not arguments.workers else ("wall",)):
        a, b = ([pass_[number] for pass_ in passes] for passes in (ours, theirs))
        ratios = [x / y for x, y in zip(a, b, strict=True)]
        print(f"{what}: loader {statistics.median(a):.1f} images/s, bare loop {statistics.median(b):.1f} images/s; "
              f"ratio of medians {statistics.median(a) / statistics.median(b):.3f}, median of paired ratios "
              f"{statistics.median(ratios):.3f} ({min(ratios):.3f} to {max(ratios):.3f})")  # fmt: skip


if __name__ == "__main__":
    main()
