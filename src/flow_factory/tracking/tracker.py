"""The one place that a run reports to: metrics.jsonl always, an experiment tracker if asked for, progress lines."""

from __future__ import annotations

import importlib
import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from flow_factory.checkpoints.atomic import atomic_write_json, atomic_write_text
from flow_factory.checkpoints.redaction import redact
from flow_factory.checkpoints.values import dumps
from flow_factory.contracts import Modality
from flow_factory.errors import FlowFactoryError, InputError, Interrupted
from flow_factory.tracking.backends import require_backend
from flow_factory.tracking.environment import write_environment
from flow_factory.tracking.formatting import flatten, format_duration, format_number
from flow_factory.tracking.metrics import MetricsWriter
from flow_factory.tracking.progress import ProgressDisplay
from flow_factory.tracking.report import REPORT, write_report
from flow_factory.tracking.run_folder import METRICS, RESULT, release_run_folder

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments

logger = logging.getLogger(__name__)

# Phases between two cycles: what is logged in them belongs to the cycle that is finished.
_BOUNDARY_PHASES = ("evaluate", "checkpoint")
# TensorBoard takes videos as GIFs alone, and with a package of its own; it has the contact sheets.
_PLAYING_BACKENDS = ("wandb", "trackio")


class Tracker:
    """Writes a run's metrics, pictures and progress. Ranks other than 0 may call everything; it does nothing there.

    Args:
        config: The resolved configuration.
        run_dir: The run folder, prepared.
        accelerator: Says which process is the main one and how many there are; None for a single process.

    Raises:
        InputError: If the package of `log.logging_backend` is not installed, or the service does not let us in.
    """

    def __init__(self, config: Arguments, run_dir: Path, accelerator: Any = None) -> None:
        self.run_dir = run_dir
        self.is_main = accelerator is None or bool(accelerator.is_main_process)
        self._world_size = 1 if accelerator is None else int(accelerator.num_processes)
        self._cycle = 0
        self._unit = "videos" if Modality.VIDEO in config.spec.io.outputs else "images"
        self._began = time.perf_counter()
        self._metrics: MetricsWriter | None = None
        self._backend: Any = None  # an accelerate GeneralTracker
        require_backend(config.log_args.logging_backend)
        self.display = ProgressDisplay(enabled=self.is_main and config.log_args.verbose)
        if self.is_main:
            self._metrics = MetricsWriter(run_dir / METRICS)
            write_environment(run_dir, self._world_size, config.training_args.seed)
            self._backend = _start_backend(config, run_dir)

    # ---------------------------------------------------------------------------------------------------- numbers
    def log(self, metrics: Mapping[str, Any], step: int, kind: str = "data") -> None:
        """One row of metrics of the present cycle.

        Args:
            metrics: Names and scalars.
            step: Optimizer steps taken so far.
            kind: "update", "cycle", "eval" or another word.
        """
        self._write(metrics, step, kind, self._cycle)

    def log_cycle(self, cycle: int, step: int, metrics: Mapping[str, Any], seconds: Mapping[str, float]) -> None:
        """The row and the line of a finished cycle.

        Args:
            cycle: Finished cycles.
            step: Optimizer steps taken so far.
            metrics: The cycle's numbers.
            seconds: Wall-clock seconds by phase.
        """
        self._cycle = cycle
        timings = {f"seconds/{name}": value for name, value in seconds.items()}
        self._write({**metrics, **timings}, step, "cycle", cycle)
        self.display.end_cycle(cycle, metrics)

    def log_evaluation(self, cycle: int, step: int, means: Mapping[str, float]) -> None:
        """The row and the line of an evaluation."""
        self._write(means, step, "eval", cycle)
        self.display.end_phase()
        if means:
            numbers = " | ".join(f"{name} {format_number(value)}" for name, value in means.items())
            self.display.line(f"evaluation after cycle {cycle} | {numbers}")

    def log_images(self, name: str, path: Path, cycle: int) -> None:
        """Shows a saved picture in the experiment tracker, where it can show pictures."""
        log_images = getattr(self._backend, "log_images", None)
        if log_images is None or self._backend is None:
            return
        import numpy
        from PIL import Image

        with Image.open(path) as opened:
            picture = opened.convert("RGB")
        if self._backend.name == "tensorboard":
            self._guard(log_images, {name: numpy.asarray(picture)[None]}, cycle, dataformats="NHWC")
        else:
            # These trackers count steps themselves: they refuse one that is smaller than an earlier one.
            self._guard(log_images, {name: [picture]})

    def log_videos(self, name: str, videos: Sequence[tuple[Path, str]]) -> None:
        """Shows saved videos in the experiment tracker, where it plays files (Weights & Biases, trackio).

        Args:
            name: What they are called together.
            videos: Files and their captions.
        """
        if self._backend is None or self._backend.name not in _PLAYING_BACKENDS or not videos:
            return
        backend = self._backend

        def log() -> None:
            player = importlib.import_module(backend.name).Video
            players = {f"{name}/{path.stem}": player(str(path), caption=text, format="mp4") for path, text in videos}
            backend.log(players)

        self._guard(log)

    # --------------------------------------------------------------------------------------------------- progress
    def enter_phase(self, name: str, finished_cycles: int, max_epochs: int | None) -> None:
        """Begins a phase, in the progress lines too.

        Args:
            name: "rollout", "feedback", "optimize", "evaluate" or "checkpoint".
            finished_cycles: Cycles finished so far.
            max_epochs: `train.max_epochs`.
        """
        self._cycle = finished_cycles + (name not in _BOUNDARY_PHASES)
        self.display.enter_phase(name, self._cycle, max_epochs)

    def progress(self, name: str, total: int, unit: str = "") -> AbstractContextManager[Callable[[int], None]]:
        """Counts this rank's units of work inside a phase; the numbers shown are those of all ranks.

        Args:
            name: What is being done.
            total: How many units this rank will do.
            unit: Their name; by default what the model makes.

        Returns:
            A context manager that yields a function to be called with the number of units just done.
        """
        return self.display.count(name, total, unit or self._unit, self._world_size)

    # ------------------------------------------------------------------------------------------------- life of a run
    def resume(self, cycle: int, step: int, checkpoint: Path, evaluated_cycle: int | None = None) -> None:
        """Goes on after a checkpoint: rows written after it are dropped, for they will be written again.

        Args:
            cycle: Finished cycles of the checkpoint.
            step: Optimizer steps of the checkpoint.
            checkpoint: Where it is.
            evaluated_cycle: The last cycle that was evaluated when it was saved; by default the finished one.
        """
        self._cycle = cycle
        if self._metrics is not None:
            dropped = self._metrics.truncate_after(cycle, step, evaluated_cycle)
            if dropped:
                logger.info("dropped %d rows of metrics that were written after %s", dropped, checkpoint.name)
        self.display.line(f"resumed from {checkpoint} after cycle {cycle}")

    def finish(self, result: Any) -> None:
        """The end of a run that came to it: `result.json`, `report.html` and the closing line.

        Args:
            result: A TrainingResult, or anything with a `to_mapping()`.
        """
        self.display.end_phase()
        self._write_result(result, "finished")
        self.write_report()
        took = format_duration(time.perf_counter() - self._began)
        where = f"report: {self.run_dir / REPORT}" if (self.run_dir / REPORT).exists() else str(self.run_dir)
        self.display.line(f"finished after cycle {self._cycle} in {took} | {where}")

    def stop(self, result: Any, error: BaseException) -> None:
        """The end of a run that was interrupted or failed: the same files, as far as they can be written.

        Args:
            result: The result so far.
            error: What ended it; it is on its way up, so nothing is raised here.
        """
        self.display.end_phase()
        interrupted = isinstance(error, (Interrupted, KeyboardInterrupt))
        message = str(error) if isinstance(error, FlowFactoryError) else f"{type(error).__name__}: {error}".rstrip(": ")
        try:
            self._write_result(result, "interrupted" if interrupted else "failed", message)
        except Exception:
            logger.exception("%s could not be written", self.run_dir / RESULT)
        self.write_report()

    def write_report(self) -> None:
        """Makes `report.html` from what the run folder holds; a run does not fail for its report."""
        if not self.is_main:
            return
        try:
            write_report([self.run_dir])
        except Exception:
            logger.exception("the report could not be made; try again: flow-factory report %s", self.run_dir)

    def close(self) -> None:
        """Ends the files and the experiment tracker, and lets go of the run folder; may be called twice."""
        self.display.close()
        if self._metrics is not None:
            self._metrics.close()
        if self._backend is not None:
            self._guard(self._backend.finish)
            self._backend = None
        if self.is_main:
            release_run_folder(self.run_dir)

    # ---------------------------------------------------------------------------------------------------- details
    def _write_result(self, result: Any, status: str, message: str = "") -> None:
        if self.is_main:
            outcome = {"status": status, "message": message, "ended": round(time.time(), 3)}
            atomic_write_text(self.run_dir / RESULT, dumps({**result.to_mapping(), **outcome}, indent=1) + "\n")

    def _write(self, metrics: Mapping[str, Any], step: int, kind: str, cycle: int) -> None:
        if self._metrics is not None:
            self._metrics.log(metrics, step, kind, cycle)
        if self._backend is not None:
            named = {f"{kind}/{name}": value for name, value in _scalars(metrics).items()}
            if self._backend.name in ("tensorboard", "mlflow"):
                axis = step if kind in ("update", "data") else cycle
                self._guard(self._backend.log, named, axis)
            else:
                # One monotonic step for all kinds is what these expect; the two counters go along as axes to plot by.
                self._guard(self._backend.log, {**named, f"{kind}/step": step, f"{kind}/cycle": cycle})

    def _guard(self, call: Callable[..., Any], *args: Any, **kwargs: Any) -> None:
        """A tracker that fails (network, quota) must not end a run of many hours: it is left out from then on."""
        try:
            call(*args, **kwargs)
        except Exception:
            logger.exception("log.logging_backend failed and is left out from now on; metrics.jsonl goes on.")
            self._backend = None


def _scalars(metrics: Mapping[str, Any]) -> dict[str, Any]:
    plain = {name: value.item() if hasattr(value, "item") else value for name, value in metrics.items()}
    return {name: value for name, value in plain.items() if isinstance(value, (int, float))}


def _start_backend(config: Arguments, run_dir: Path) -> Any:
    """Starts the experiment tracker of `log.logging_backend` through accelerate's class for it."""
    name = config.log_args.logging_backend
    if name is None or name == "none":
        return None
    from accelerate import PartialState
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS

    PartialState()  # accelerate's trackers ask it which process they are in; an Accelerator has made it already
    project, folder = config.log_args.project, run_dir / "trackers"
    folder.mkdir(exist_ok=True)
    run_id = _run_id(run_dir)
    arguments: dict[str, Any] = {
        "tensorboard": {"logging_dir": str(folder)},
        "wandb": {"name": run_dir.name, "id": run_id, "resume": "allow", "dir": str(folder)},
        "swanlab": {
            "experiment_name": run_dir.name,
            "id": run_id,
            "resume": "allow",
            "logdir": str(folder / "swanlab"),
        },
        "trackio": {"name": run_dir.name, "resume": "allow"},
        "mlflow": {"run_name": run_dir.name},
    }[name]
    tracker = LOGGER_TYPE_TO_CLASS[name](run_dir.name if name == "tensorboard" else project, **arguments)
    try:
        tracker.start()
    except Exception as error:  # each service has errors of its own
        raise InputError(
            f"log.logging_backend={name} cannot be started: {type(error).__name__}: {error}. Log in to it, use its "
            f"offline mode (WANDB_MODE=offline, SWANLAB_MODE=offline), or set log.logging_backend=none."
        ) from error
    flat = flatten(redact(config.to_mapping()))
    if name == "tensorboard":
        # add_hparams of TensorBoard would write another run folder; the text shows up beside the curves.
        tracker.tracker.add_text("config", "```json\n" + json.dumps(flat, indent=1, default=str) + "\n```")
    else:
        tracker.store_init_configuration(flat)
    return tracker


def _run_id(run_dir: Path) -> str:
    """An identity that a resumed run shares with its beginning."""
    path = run_dir / "tracker.json"
    if path.exists():
        return str(json.loads(path.read_text(encoding="utf-8"))["run_id"])
    run_id = secrets.token_hex(8)
    atomic_write_json(path, {"run_id": run_id})
    return run_id
