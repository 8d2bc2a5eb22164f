"""The folder of a run: its name, who may write into it, and from which checkpoint it goes on. Needs no torch.

    <log.save_dir>/<log.run_name>/
      config.yaml            the resolved configuration; a run can be started again from it
      inputs.json            digests of the base weights and the training prompts
      environment.json       versions, devices, world size, seed
      overrides.json         names of the values given on the command line
      resolved.json          the sigma grid, the steps that may be stochastic, parameter counts
      metrics.jsonl          one line per update, cycle and evaluation
      checkpoints/           checkpoint-000012/ ...
      samples/               contact sheets of evaluations, and their videos
      attempt-1/             an earlier attempt that ended before its first checkpoint

Nothing of an earlier run is ever written over.
"""

from __future__ import annotations

import json
import logging
import os
import re
import time
from collections.abc import Mapping
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from flow_factory.checkpoints.atomic import atomic_write_text, clean_leftovers
from flow_factory.checkpoints.manifest import list_checkpoints, newest_checkpoint, read_manifest, read_meta
from flow_factory.checkpoints.redaction import redact
from flow_factory.errors import InputError
from flow_factory.tracking.backends import require_backend
from flow_factory.tracking.inputs import changed_inputs, describe_inputs

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments

logger = logging.getLogger(__name__)

CONFIG = "config.yaml"
METRICS = "metrics.jsonl"
CHECKPOINTS = "checkpoints"
SAMPLES = "samples"
INPUTS = "inputs.json"
RESULT = "result.json"
OVERRIDES = "overrides.json"
LOCK = ".lock"
# What an attempt leaves before its first checkpoint, and what is moved away before another attempt.
_ATTEMPT_FILES = re.compile(
    r"^(config(\.\d+)?\.yaml|environment(\.\d+)?\.json|metrics\.jsonl|result\.json|resolved\.json|tracker\.json"
    r"|inputs(\.\d+)?\.json|overrides(\.\d+)?\.json|report\.html|samples|failed_samples|trackers)$"
)

_SHOWN_CHANGES = 20
_MAX_NAME_BYTES = 255
# `is_in_use` holds a lock for an instant, of which a run that begins just then must not die; a writer keeps it.
_LOCK_ATTEMPTS, _LOCK_PAUSE = 6, 0.1  # pause in seconds

_locks: dict[Path, int] = {}


def prepare_run_folder(config: Arguments) -> Path:
    """Creates the run's folder or reopens it for resuming, and writes the resolved configuration into it.

    Called by one process of the run. What `train.resume` means:

    * auto: go on from the newest checkpoint in the folder, if there is one. An earlier attempt without a checkpoint is
      moved to `attempt-N/`.
    * never: the folder must not hold a run.
    * a path: go on from that checkpoint. In the checkpoint's own run folder it must be the newest one; with another
      `log.run_name` it starts a branch, which the same configuration goes on with when it is started again.

    Args:
        config: The resolved configuration.

    Returns:
        `<log.save_dir>/<log.run_name>`.

    Raises:
        InputError: If the folder cannot be used as it is asked for, a checkpoint is damaged, the configuration differs
            from the checkpoint's, or another process is writing here. Nothing has been changed then.
    """
    log, resume = config.log_args, config.training_args.resume
    require_backend(log.logging_backend)
    folder = _folder_of(config)
    external = None if resume in ("auto", "never") else locate_checkpoint(resume)
    if folder.exists() and not folder.is_dir():
        raise InputError(f"{folder} is a file; choose another log.run_name or log.save_dir.")
    if not holds_run(folder):
        if external is not None:
            check_same_config(config, external)
        _create(folder)
        _write_config(folder, config)
        return folder

    if resume == "never":
        raise InputError(
            f"{folder} already holds a run, and train.resume is never: nothing is written over. Choose another "
            f"log.run_name, or go on with that run by train.resume=auto."
        )
    own = folder / CHECKPOINTS
    inside = external is not None and external.parent.resolve() == own.resolve()
    if external is not None and not inside and _saved_resume(folder) != resume:
        raise InputError(
            f"{folder} already holds a run, and train.resume={resume} belongs to another one. Choose a log.run_name "
            f"that is not in use to branch off from that checkpoint, or go on with this run by train.resume=auto."
        )
    lock_run_folder(folder)
    try:
        clean_leftovers(own)
        start = external if inside else newest_checkpoint(own, hashes=False)
        if start is not None:
            later = [path.name for _, path in list_checkpoints(own) if path.name > start.name]
            if later:
                raise InputError(
                    f"train.resume={resume} is not the newest checkpoint of {folder}: going on from it would mix with "
                    f"{', '.join(later)}. Give another log.run_name to branch off, or move the later ones away."
                )
            check_same_config(config, start)
        else:
            if external is not None:
                check_same_config(config, external)
            _set_aside_attempt(folder)
        _write_config(folder, config)
    except BaseException:
        release_run_folder(folder)
        raise
    return folder


def resolve_resume(config: Arguments, run_dir: Path) -> Path | None:
    """The checkpoint that a prepared run goes on from, or None for a fresh start.

    A run's own checkpoints come first: a branch that is started again goes on with itself.

    Raises:
        InputError: If there is no checkpoint where `train.resume` points, or the newest one is damaged.
    """
    resume = config.training_args.resume
    if resume == "never":
        return None
    own = newest_checkpoint(run_dir / CHECKPOINTS, hashes=False)
    return own if own is not None or resume == "auto" else locate_checkpoint(resume)


def locate_checkpoint(given: str | os.PathLike[str]) -> Path:
    """The checkpoint meant by a path: itself, or the newest one of a run folder or its `checkpoints` folder.

    Raises:
        InputError: If there is none.
    """
    path = Path(given).expanduser()
    if not path.is_dir():
        raise InputError(
            f"train.resume={given}: there is no such folder. Give a checkpoint, a run folder, auto or never."
        )
    if list_checkpoints(path / CHECKPOINTS):
        path = path / CHECKPOINTS
    newest = newest_checkpoint(path, hashes=False)
    if newest is not None:
        return newest
    read_manifest(path)
    return path


def check_run_name(name: str) -> None:
    """Checks that a run's name can be the name of a folder.

    Raises:
        InputError: If it is empty, a path, too long for file systems, or holds control characters.
    """
    if not name.strip() or name in (".", "..") or re.search(r"[/\\]", name) or not name.isprintable():
        raise InputError(f"log.run_name is {name!r}; it must be one folder name (log.save_dir holds the path to it).")
    size = len(name.encode("utf-8", "surrogatepass"))
    if size > _MAX_NAME_BYTES:
        raise InputError(
            f"log.run_name is {size} bytes long ({name[:40]!r}...); file systems take at most {_MAX_NAME_BYTES}."
        )


def holds_run(folder: Path) -> bool:
    """Whether a folder holds results of a run; an attempt that failed while its model was loading left none."""
    metrics = folder / METRICS
    has_rows = metrics.is_file() and metrics.stat().st_size > 0
    return has_rows or (folder / SAMPLES).exists() or bool(list_checkpoints(folder / CHECKPOINTS))


def default_run_name(config: Arguments, now: datetime | None = None) -> str:
    """`{trainer}-{model}-{date}-{time}`."""
    parts = (config.training_args.trainer_type, config.model_args.model_type)
    names = [re.sub(r"[^A-Za-z0-9_-]+", "-", part.rpartition(".")[2]) for part in parts]
    return "-".join([*names, (now or datetime.now()).strftime("%Y%m%d-%H%M%S")])


def check_same_config(config: Arguments, checkpoint: Path) -> None:
    """Checks that a checkpoint was written under the same configuration, apart from fields that may change.

    Raises:
        InputError: Listing the changed keys with their saved and present values, or the input files that have changed.
    """
    from flow_factory.hparams import diff_mappings, load_config_from_mapping

    saved_mapping = read_meta(checkpoint).get("config")
    if not isinstance(saved_mapping, Mapping):
        raise InputError(f"checkpoint {checkpoint} holds no configuration in meta.json and cannot be resumed from.")
    try:
        saved_config = load_config_from_mapping(dict(saved_mapping), origin=str(checkpoint / "meta.json"))
    except InputError as error:
        raise InputError(
            f"the configuration saved in {checkpoint} does not load with this release and cannot be compared: {error}"
        ) from error
    saved, present = redact(saved_config.fingerprint_mapping()), redact(config.fingerprint_mapping())
    changed = diff_mappings(saved, present)
    if changed:
        raise InputError(
            f"the configuration differs from the one that {checkpoint} was saved under (saved -> now):\n  "
            + "\n  ".join(changed)
            + "\nResuming would be neither the old run nor the new one. Restore these values, or start a new run with "
            "another log.run_name and train.resume=never (model.resume_path starts from saved weights)."
        )
    _check_same_inputs(config, checkpoint)


def lock_run_folder(folder: Path) -> None:
    """Makes this process the only writer of a run folder until `release_run_folder` or its end, however it ends.

    Raises:
        InputError: If another process holds the folder.
    """
    key = folder.resolve()
    if key in _locks:
        return
    try:
        import fcntl
    except ImportError:  # Windows has no flock; the folder is then not guarded.
        return
    descriptor = os.open(folder / LOCK, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        for attempt in range(_LOCK_ATTEMPTS):
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if attempt == _LOCK_ATTEMPTS - 1:
                    raise
                time.sleep(_LOCK_PAUSE)
    except BlockingIOError:
        os.close(descriptor)
        raise InputError(
            f"another process is running in {folder}. Wait for it to end, or choose another log.run_name."
        ) from None
    except OSError as error:
        os.close(descriptor)
        logger.warning("%s cannot be locked (%s); make sure that no second run writes into it.", folder, error)
        return
    _locks[key] = descriptor


def release_run_folder(folder: Path) -> None:
    """Lets other processes use the folder; does nothing if this process does not hold it."""
    descriptor = _locks.pop(folder.resolve(), None)
    if descriptor is not None:
        os.close(descriptor)


def is_in_use(folder: Path) -> bool:
    """Whether another process is writing into a run folder; holds its lock for a moment to find out."""
    path = folder / LOCK
    if folder.resolve() in _locks or not path.exists():
        return False
    try:
        import fcntl
    except ImportError:
        return False
    try:
        with path.open("rb") as lock:
            fcntl.flock(lock, fcntl.LOCK_SH | fcntl.LOCK_NB)  # let go of when the file is closed
    except BlockingIOError:
        return True
    except OSError:  # a lock that cannot be read, or a file system without locks, tells nothing
        return False
    return False


def keep_former(path: Path) -> None:
    """Renames an existing file to the next free `name.N.ending`, so that its name can be used again."""
    if not path.exists():
        return
    number = 1
    while (kept := path.with_name(f"{path.stem}.{number}{path.suffix}")).exists():
        number += 1
    os.rename(path, kept)


def write_once(path: Path, text: str) -> None:
    """Writes a text file atomically; a former file with another content is kept as `name.N.ending`."""
    if path.exists():
        if path.read_bytes() == text.encode("utf-8"):  # bytes: a damaged former file is kept like any other
            return
        keep_former(path)
    atomic_write_text(path, text)


def _folder_of(config: Arguments) -> Path:
    save_dir, name = Path(config.log_args.save_dir).expanduser(), config.log_args.run_name
    if name is not None:
        check_run_name(name)
        return save_dir / name
    base = default_run_name(config)
    name, number = base, 1
    while (save_dir / name).exists():  # two runs within a second
        number += 1
        name = f"{base}-{number}"
    return save_dir / name


def _create(folder: Path) -> None:
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock_run_folder(folder)
    except OSError as error:
        raise InputError(f"cannot create the run folder {folder}: {error.strerror} (log.save_dir).") from error


def _write_config(folder: Path, config: Arguments) -> None:
    """Writes the resolved configuration, with the run's name in it, so that the run can be gone on with from it."""
    from flow_factory.hparams.saving import dump_yaml

    mapping = redact(config.to_mapping())
    mapping["log"]["run_name"] = folder.name
    write_once(folder / CONFIG, dump_yaml(mapping))
    write_once(folder / INPUTS, json.dumps(describe_inputs(config), indent=1) + "\n")
    # Names only: the values are in the configuration, where those that look like passwords are left out.
    write_once(folder / OVERRIDES, json.dumps({"overridden": config.origins.overridden()}, indent=1) + "\n")


def _check_same_inputs(config: Arguments, checkpoint: Path) -> None:
    path = checkpoint.parent.parent / INPUTS
    if not path.is_file():  # a checkpoint that was copied out of its run
        return
    try:
        saved = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise InputError(
            f"{path} cannot be read ({error}); remove it to go on without comparing the inputs."
        ) from error
    changed = changed_inputs(saved, describe_inputs(config))
    if changed:
        rest = len(changed) - _SHOWN_CHANGES
        shown = changed[:_SHOWN_CHANGES] + [f"and {rest} more"] * (rest > 0)
        raise InputError(
            f"files that the run reads have changed since {checkpoint} was saved:\n  "
            + "\n  ".join(shown)
            + "\nResuming would be neither the old run nor the new one. Restore these files, or start a new run with "
            "another log.run_name."
        )


def _saved_resume(folder: Path) -> str | None:
    """`train.resume` of the configuration that a run folder was last used with."""
    import yaml

    try:
        return str(yaml.safe_load((folder / CONFIG).read_text(encoding="utf-8"))["train"]["resume"])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, KeyError, TypeError):
        return None


def _set_aside_attempt(folder: Path) -> None:
    """Moves what an attempt without a checkpoint left into `attempt-N/`."""
    found = sorted(entry for entry in folder.iterdir() if _ATTEMPT_FILES.match(entry.name))
    number = 1
    while (folder / f"attempt-{number}").exists():
        number += 1
    target = folder / f"attempt-{number}"
    target.mkdir()
    for entry in found:
        os.rename(entry, target / entry.name)
    logger.warning(
        "%s holds an earlier attempt that ended before its first checkpoint; it was moved to %s", folder, target.name
    )
