"""The checks of `flow-factory doctor`. Each yields findings; none of them changes anything that stays."""

from __future__ import annotations

import importlib.util
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import Enum
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from packaging.requirements import Requirement

    from flow_factory.hparams import Arguments

_PACKAGE = "flow-factory"
_LITTLE_GB, _NO_GB = 10.0, 1.0
_PEERS_DEADLINE_S = 90.0


class Level(str, Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"


@dataclass(frozen=True)
class Finding:
    """The result of a check.

    Attributes:
        level: How it ended.
        name: What was checked.
        found: What was found.
        remedy: What to do, if anything.
    """

    level: Level
    name: str
    found: str
    remedy: str = ""


def diagnose(config: Arguments | None = None, distributed: bool = False) -> Iterator[Finding]:
    """Runs all checks, quick ones first; a check that raises is a problem itself.

    Args:
        config: Whose folders and tracker are checked; None: the defaults.
        distributed: Whether to start two processes.
    """
    checks: list[Callable[[], Iterator[Finding]]] = [
        check_python,
        check_packages,
        check_extras,
        lambda: check_tracker(config),
        lambda: check_folders(config),
        check_devices,
        check_threads,
        check_picture,
        *([check_peers] if distributed else []),
    ]
    for check in checks:
        try:
            yield from check()
        except Exception as error:  # whatever an engine raises on a broken machine belongs into the list
            name = getattr(check, "__name__", "check").removeprefix("check_").replace("<lambda>", "configuration")
            yield Finding(Level.PROBLEM, name, f"{type(error).__name__}: {error}", "see the message; install again")


def check_python() -> Iterator[Finding]:
    """The interpreter against what the package requires."""
    from packaging.specifiers import SpecifierSet

    version, required = platform.python_version(), metadata.metadata(_PACKAGE)["Requires-Python"] or ""
    found = f"{version} ({platform.system()} {platform.machine()})"
    if SpecifierSet(required).contains(version, prereleases=True):
        yield Finding(Level.OK, "python", found)
    else:
        yield Finding(
            Level.PROBLEM, "python", found, f"this package needs Python {required}: make an environment with it"
        )


def check_packages() -> Iterator[Finding]:
    """The installed engines against the ranges the package was written for."""
    good = []
    for requirement in _requirements():
        if requirement.marker is not None:
            continue
        command = f'pip install -U "{requirement.name}{requirement.specifier}"'
        version = installed_version(requirement.name)
        if version is None:
            yield Finding(Level.PROBLEM, requirement.name, "not installed", command)
        elif not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                Level.PROBLEM, requirement.name, f"{version}, outside the range {requirement.specifier}", command
            )
        else:
            good.append(f"{requirement.name} {version}")
    engines = ("torch ", "diffusers ", "transformers ", "accelerate ", "peft ")
    yield Finding(Level.OK, "packages", ", ".join(p for p in good if p.startswith(engines)) + f"; {len(good)} in range")


def check_extras() -> Iterator[Finding]:
    """Optional parts: what is there, and the command for what is not."""
    extras: dict[str, list[str]] = {}
    for requirement in _requirements():
        for extra in metadata.metadata(_PACKAGE).get_all("Provides-Extra") or []:
            marker = requirement.marker
            if marker is not None and marker.evaluate({"extra": extra}) and not marker.evaluate({"extra": ""}):
                missing = extras.setdefault(extra, [])
                version = installed_version(requirement.name)
                if version is None:
                    missing.append(requirement.name)
                elif not requirement.specifier.contains(version, prereleases=True):
                    missing.append(f"{requirement.name}{requirement.specifier}")
    present = [name for name, missing in extras.items() if not missing]
    absent = [name for name, missing in extras.items() if missing]
    remedy = f'optional; for any of them: pip install "{_PACKAGE}[{absent[0]}]"' if absent else ""
    found = f"installed: {', '.join(present) or 'none'}; not installed: {', '.join(absent) or 'none'}"
    yield Finding(Level.OK, "extras", found, remedy)


def check_tracker(config: Arguments | None) -> Iterator[Finding]:
    """The experiment tracker that a configuration asks for."""
    from flow_factory.errors import InputError
    from flow_factory.tracking.backends import BACKENDS, require_backend

    if config is not None:
        try:
            require_backend(config.log_args.logging_backend)
        except InputError as error:
            yield Finding(Level.PROBLEM, "tracker", "the configured one is missing", str(error))
            return
    there = [name for name, (module, _) in BACKENDS.items() if importlib.util.find_spec(module) is not None]
    asked = "" if config is None else f"configured: {config.log_args.logging_backend or 'none'}; "
    yield Finding(Level.OK, "tracker", f"{asked}available: {', '.join(there) or 'none'}")


def check_folders(config: Arguments | None) -> Iterator[Finding]:
    """The folders that runs write to: whether they can be written, and how much room there is."""
    from flow_factory.hparams.data_args import DataArguments
    from flow_factory.hparams.run_args import LogArguments

    log, data = (LogArguments(), DataArguments()) if config is None else (config.log_args, config.data_args)
    hub = os.environ.get("HF_HUB_CACHE") or os.path.join(
        os.environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    for name, place, setting in (
        ("log.save_dir", log.save_dir, "log.save_dir"),
        ("data.cache_dir", data.cache_dir, "data.cache_dir"),
        ("Hub cache", hub, "the environment variable HF_HOME"),
        ("temporary files", tempfile.gettempdir(), "the environment variable TMPDIR"),
    ):
        yield check_folder(name, Path(place).expanduser(), setting)


def check_folder(name: str, folder: Path, setting: str) -> Finding:
    """Whether a folder, or the one it would be created in, can be written, with its free space.

    Args:
        name: How to call it.
        folder: Where it is or would be.
        setting: What names it, for the remedy.
    """
    existing = folder.absolute()
    while not os.path.lexists(existing) and existing != existing.parent:
        existing = existing.parent
    if not existing.is_dir():
        return Finding(Level.PROBLEM, name, f"{existing} is not a folder", f"name another one by {setting}")
    try:
        with tempfile.TemporaryFile(dir=existing):
            free = shutil.disk_usage(existing).free / 1e9
    except OSError as error:
        return Finding(Level.PROBLEM, name, f"{existing}: {error.strerror}", f"name another folder by {setting}")
    found = f"{folder}: {free:,.0f} GB free" if free >= _LITTLE_GB else f"{folder}: {free:.1f} GB free"
    if free < _NO_GB:
        return Finding(Level.PROBLEM, name, found, f"make room, or name another disk by {setting}")
    if free < _LITTLE_GB:
        return Finding(Level.WARNING, name, found, f"checkpoints and models are large; make room, or see {setting}")
    return Finding(Level.OK, name, found)


def check_devices() -> Iterator[Finding]:
    """CUDA devices with their memory and bf16, or what is there instead."""
    import torch

    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    for index in range(count):
        facts = torch.cuda.get_device_properties(index)
        bf16 = torch.cuda.get_device_capability(index) >= (8, 0)
        free = torch.cuda.mem_get_info(index)[0] / 1e9
        found = f"{facts.name}, {facts.total_memory / 1e9:.0f} GB ({free:.0f} free), {'bf16' if bf16 else 'no bf16'}"
        if bf16:
            yield Finding(Level.OK, f"cuda:{index}", found)
        else:
            yield Finding(Level.WARNING, f"cuda:{index}", found, 'mixed_precision "auto" computes in float32; try fp16')
    if count:
        return
    if shutil.which("nvidia-smi"):
        yield Finding(
            Level.WARNING,
            "cuda",
            f"none usable by torch {torch.__version__}, though there is a driver",
            "install the torch build for your CUDA version: https://pytorch.org/get-started/locally",
        )
    mps = torch.backends.mps.is_available()
    what = "Apple MPS is there but not used; " if mps else ""
    yield Finding(Level.OK, "device", f"{what}CPU: the embedded pipeline trains in minutes; larger models need CUDA")


def check_threads() -> Iterator[Finding]:
    """Threads against the cores that this process may use."""
    import torch

    cores, threads = usable_cores(), torch.get_num_threads()
    setting = os.environ.get("OMP_NUM_THREADS")
    found = (
        f"{threads} torch thread{'s' * (threads != 1)} on {cores} usable cores (OMP_NUM_THREADS {setting or 'not set'})"
    )
    if threads > cores:
        # Threads that spin on a core that is busy already make everything many times slower.
        yield Finding(Level.WARNING, "threads", found, f"export OMP_NUM_THREADS={cores}")
    elif threads < cores // 2 and setting is not None:
        yield Finding(Level.OK, "threads", found, f"on a quiet machine OMP_NUM_THREADS={cores} is faster on a CPU")
    else:
        yield Finding(Level.OK, "threads", found)


def usable_cores() -> int:
    """Cores of this process: its affinity and, in a container, its CPU quota (at least 1)."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    quota = Path("/sys/fs/cgroup/cpu.max")  # cgroup v2: "<quota> <period>" in microseconds, or "max <period>"
    if quota.is_file():
        allowed, period = quota.read_text().split()
        if allowed != "max":
            cores = min(cores, max(1, int(allowed) // int(period)))
    return cores


def check_picture() -> Iterator[Finding]:
    """Loads the embedded pipeline and makes a picture, as `sample` does."""
    import numpy as np

    from flow_factory.data_utils.prompt_choice import choose_prompts
    from flow_factory.distributed import Comm
    from flow_factory.hparams import load_config_from_mapping
    from flow_factory.trainers.inference import build_inference_model
    from flow_factory.trainers.sampling import make_samples

    began = time.perf_counter()
    config = load_config_from_mapping(_EMBEDDED, origin="the embedded pipeline")
    model = build_inference_model(config, Comm.single(), None, ["base"])
    made = make_samples(model, config, choose_prompts(config, ["a red circle on a white background"]), ["base"], 1)
    picture = made["base"][0].preview.picture
    seconds = time.perf_counter() - began
    # A red disc on white: the middle is red, the corner is not.
    middle, corner = (np.asarray(picture)[place].tolist() for place in ((32, 32), (3, 3)))
    if middle[0] > middle[1] + 60 and min(corner) > 150:
        yield Finding(
            Level.OK, "picture", f"the embedded pipeline drew a red circle in {seconds:.1f} s, loading included"
        )
    else:
        yield Finding(
            Level.PROBLEM,
            "picture",
            f"the embedded pipeline was asked for a red circle on white and drew {middle} in the middle, {corner} in a "
            "corner",
            "the computation goes wrong: install torch again, and report this with the output of this command",
        )


_EMBEDDED: dict[str, Any] = {
    "mixed_precision": "no",
    "model": {"model_type": "sd3-5", "model_name_or_path": "builtin/tiny-sd3-shapes"},
    "train": {"resolution": 64, "max_sequence_length": 16},
    "eval": {"num_inference_steps": 8, "guidance_scale": 3.0},
    "rewards": {"reward_model": "prompt_match"},
}


def check_peers() -> Iterator[Finding]:
    """Starts two processes that sum a number over gloo, as ranks of a run do."""
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    began = time.perf_counter()
    shared = {**os.environ, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "WORLD_SIZE": "2"}
    command = [sys.executable, "-c", _PEER]
    peers = [
        subprocess.Popen(
            command, env={**shared, "RANK": str(rank)}, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        for rank in (0, 1)
    ]
    errors = []
    try:
        for peer in peers:
            _, error = peer.communicate(timeout=max(1.0, _PEERS_DEADLINE_S - (time.perf_counter() - began)))
            if peer.returncode != 0:
                errors.append((error.strip().splitlines() or [f"exit code {peer.returncode}"])[-1])
    except subprocess.TimeoutExpired:
        errors.append(f"no answer within {_PEERS_DEADLINE_S:.0f} s")
    finally:
        for peer in peers:
            peer.kill()
            peer.wait()
    if not errors:
        yield Finding(Level.OK, "two processes", f"summed a number over gloo in {time.perf_counter() - began:.1f} s")
        return
    yield Finding(
        Level.PROBLEM,
        "two processes",
        errors[0],
        "ranks cannot reach each other: let processes of this machine connect over its loopback interface, and set "
        "GLOO_SOCKET_IFNAME=lo",
    )


_PEER = """
import torch
import torch.distributed as dist
dist.init_process_group("gloo")
total = torch.tensor([dist.get_rank() + 1.0])
dist.all_reduce(total)
dist.barrier()
dist.destroy_process_group()
raise SystemExit(0 if total.item() == 3.0 else f"1 + 2 summed to {total.item()}")
"""


def installed_version(package: str) -> str | None:
    """The version of an installed package, or None."""
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _requirements() -> list[Requirement]:
    from packaging.requirements import Requirement

    return [Requirement(line) for line in metadata.requires(_PACKAGE) or []]
