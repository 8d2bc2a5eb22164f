"""What a run ran on: versions and devices, but no host names, users or paths."""

from __future__ import annotations

import json
import platform
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

from flow_factory.tracking.run_folder import write_once

ENVIRONMENT = "environment.json"
_PACKAGES = (
    "flow-factory",
    "torch",
    "torchvision",
    "diffusers",
    "transformers",
    "accelerate",
    "peft",
    "safetensors",
    "datasets",
    "deepspeed",
    "numpy",
    "pillow",
)


def describe_environment(world_size: int, seed: int) -> dict[str, Any]:
    """Versions of Python and the engines, device names, thread count, world size and seed."""
    versions: dict[str, str | None] = {}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    cuda = torch.cuda.is_available()
    return {
        "python": sys.version.split()[0],
        "system": f"{platform.system()} {platform.machine()}",
        "packages": versions,
        "cuda": torch.version.cuda if cuda else None,
        "devices": [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())] if cuda else ["cpu"],
        "threads": torch.get_num_threads(),
        "world_size": world_size,
        "seed": seed,
    }


def write_environment(run_dir: Path, world_size: int, seed: int) -> None:
    """Writes `environment.json`; a former one that differs is kept as `environment.N.json`."""
    text = json.dumps(describe_environment(world_size, seed), indent=2)
    write_once(run_dir / ENVIRONMENT, text + "\n")
