"""Starting a run: in place, or as several workers through accelerate.

The parent starts `accelerate launch` in a session of its own, so that a Ctrl-C reaches the parent alone; the parent
then passes the signal to every worker exactly once. (A worker that got it from the terminal and again from the launcher
would take the second one as "exit at once" and lose its cycle.) A second signal ends them at once.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

from flow_factory.errors import FlowFactoryError, InputError, PeerFailedError, RunError

if TYPE_CHECKING:
    from flow_factory.hparams import Arguments
    from flow_factory.trainers.result import TrainingResult

_WORKER_DIR = "FLOW_FACTORY_WORKER_DIR"
# What the workers may take after their own deadline to write a checkpoint before they are killed.
_SAVE_GRACE_S = 60.0
_HANGUP = getattr(signal, "SIGHUP", None)  # not on Windows


def launched_world_size() -> int | None:
    """The number of processes that a launcher has started, or None if this process was started by hand."""
    if "RANK" not in os.environ and "LOCAL_RANK" not in os.environ:
        return None
    return int(os.environ.get("WORLD_SIZE", "1"))


def launch(config_path: str, overrides: Sequence[str] = (), debug: bool = False) -> TrainingResult | None:
    """Trains from a configuration file.

    Args:
        config_path: The YAML file.
        overrides: `key=value` strings.
        debug: Workers show tracebacks.

    Returns:
        The result, or None when the training ran in workers.

    Raises:
        InputError: If the configuration is wrong, or a launcher started another number of processes than it says.
        RunError: If a worker failed.
    """
    from flow_factory.hparams import load_config

    config = load_config(config_path, overrides)
    started = launched_world_size()
    if started is None and config.num_processes > 1:
        _run_workers(config, config_path, overrides, debug)
        return None
    return run_in_place(config, started or 1)


def run_in_place(config: Arguments, world_size: int) -> TrainingResult:
    """Trains in this process.

    Raises:
        InputError: If `world_size` differs from `num_processes`.
    """
    from flow_factory.hparams.cross_checks import check_world_size

    check_world_size(config, world_size)
    from flow_factory.trainers.build import build_trainer

    return build_trainer(config).start()


def _run_workers(config: Arguments, config_path: str, overrides: Sequence[str], debug: bool) -> None:
    with tempfile.TemporaryDirectory(prefix="flow-factory-") as folder:
        command = [sys.executable, "-m", "flow_factory.launch", "--agent", *_accelerate_arguments(config)]
        command += ["-m", "flow_factory.launch", config_path, *overrides]
        environment = {**os.environ, _WORKER_DIR: folder, "FLOW_FACTORY_DEBUG": "1" if debug else ""}
        here = config.num_processes // (config.num_machines or 1)
        # CPU workers share the cores; a launcher's default of one thread each would waste the rest.
        threads = max(1, (os.cpu_count() or 1) // here)
        environment.setdefault("OMP_NUM_THREADS", str(threads))
        grace = config.training_args.signal_deadline_s + _SAVE_GRACE_S
        code, received = _attend(command, environment, Path(folder), grace)
        _raise_for_workers(Path(folder), here, code, received)


def _accelerate_arguments(config: Arguments) -> list[str]:
    command: list[str] = []
    if config.config_file is not None:
        command += ["--config_file", config.config_file]
    # --multi_gpu starts one worker per process on CPUs too; --cpu would silently start a single one.
    command += ["--multi_gpu", "--num_processes", str(config.num_processes), "--mixed_precision", "no"]
    command += ["--num_machines", str(config.num_machines or 1), "--main_process_port", str(config.main_process_port)]
    command += ["--dynamo_backend", "no"]
    if config.machine_rank is not None:
        command += ["--machine_rank", str(config.machine_rank)]
    if config.main_process_ip is not None:
        command += ["--main_process_ip", config.main_process_ip]
    return command


def _attend(
    command: Sequence[str], environment: Mapping[str, str], folder: Path, grace: float
) -> tuple[int, int | None]:
    """Runs the launcher until it ends and passes signals on to the workers, also to those still being started.

    A terminal that hangs up counts as SIGTERM: the workers are in a session of their own and would go on without it.

    Args:
        command: The launcher's command line.
        environment: Its environment.
        folder: Where the workers leave their process ids.
        grace: Seconds that they may take to end after the first signal before they are killed.

    Returns:
        The launcher's exit code, and the first signal received, or None.
    """
    received: list[int] = []

    def handle(signum: int, frame: FrameType | None) -> None:
        received.append(signal.SIGTERM if signum == _HANGUP else signum)

    watched = [signal.SIGINT, signal.SIGTERM]
    if _HANGUP is not None and signal.getsignal(_HANGUP) is not signal.SIG_IGN:  # ignored under nohup
        watched.append(_HANGUP)
    previous = {s: signal.signal(s, handle) for s in watched}
    told: set[int] = set()
    process: subprocess.Popen[bytes] | None = None
    try:
        process = subprocess.Popen(command, env=environment, start_new_session=True)
        deadline: float | None = None
        while process.poll() is None:
            if received and deadline is None:
                deadline = time.monotonic() + grace
            for pid in set(_worker_pids(folder)) - told if received else ():
                told.add(pid)
                _kill(pid, received[0])
            if deadline is not None and (time.monotonic() > deadline or len(received) > 1):
                break
            time.sleep(0.1)
    finally:
        for pid in _worker_pids(folder):
            _kill(pid, signal.SIGKILL)
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        for signum, handler in previous.items():
            signal.signal(signum, handler)
    assert process is not None
    return process.returncode, received[0] if received else None


def _worker_pids(folder: Path) -> list[int]:
    return [int(p.stem) for p in folder.glob("*.pid")]


def _kill(pid: int, signum: int) -> None:
    try:
        os.kill(pid, signum)
    except (ProcessLookupError, PermissionError):
        return  # it has ended already, which is what the signal is for (and its number may be another's by now)


def _raise_for_workers(folder: Path, count: int, code: int, received: int | None) -> None:
    """Raises what the workers reported; their own messages have been printed by themselves."""
    from flow_factory.errors import Interrupted

    reports: list[dict[str, Any]] = [json.loads(p.read_text()) for p in sorted(folder.glob("*.exit"))]
    if received is not None:
        messages = [r["message"] for r in reports if r["code"] == 128 + received]
        raise Interrupted(messages[0] if messages else "stopped by a signal; the workers were ended.", received)
    failed = [r for r in reports if r["code"] != 0]
    if failed:
        # A peer of a failed rank fails too, told of it or with a broken connection: the typed error is the cause.
        first = min(failed, key=lambda r: (not r["typed"], r["time"]))
        if not first["typed"] and len(reports) < count:  # the cause is the worker that could not say anything
            first["message"] = f"{_killed(count - len(reports), count, code)} Another one reports: {first['message']}"
        error = InputError(first["message"]) if first["code"] == 2 else RunError(first["message"])
        raise error
    if code != 0 or len(reports) < count:
        raise RunError(_killed(count - len(reports), count, code))


def _killed(missing: int, count: int, code: int) -> str:
    return (
        f"{missing} of {count} workers ended without a report (launcher exit code {code}): killed, possibly for "
        f"memory. The same command goes on from the newest checkpoint."
    )


def agent_main(arguments: Sequence[str]) -> int:
    """Runs accelerate's launcher; its own report of a failed worker is left out, since the worker has told its error.

    Returns:
        The exit code.
    """
    import logging

    from accelerate.commands.launch import launch_command, launch_command_parser
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError

    threading.Thread(target=_follow_parent, args=(os.getppid(),), name="follow-parent", daemon=True).start()
    if not os.environ.get("FLOW_FACTORY_DEBUG"):
        logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        launch_command(launch_command_parser().parse_args(list(arguments)))
    except ChildFailedError:
        if os.environ.get("FLOW_FACTORY_DEBUG"):
            raise
        return 1
    except SignalException as error:  # it has ended the workers
        return 128 + error.sigval
    return 0


def _follow_parent(parent: int) -> None:
    """Ends this launcher, and so its workers, when its parent has been killed and can no longer do it."""
    while os.getppid() == parent:
        time.sleep(1.0)
    os.kill(os.getpid(), signal.SIGTERM)


def worker_main(arguments: Sequence[str]) -> int:
    """Entry of one worker process under a launcher.

    Returns:
        The exit code; the same is written for the parent, with the error's message.
    """
    folder = os.environ.get(_WORKER_DIR)
    rank = int(os.environ.get("RANK", "0"))
    if folder:
        (Path(folder) / f"{os.getpid()}.pid").touch()
    code, message, typed = 0, "", False
    try:
        launch(arguments[0], arguments[1:])
    except FlowFactoryError as error:
        code, message, typed = error.exit_code, str(error), not isinstance(error, PeerFailedError)
    except KeyboardInterrupt:
        code, message = 128 + signal.SIGINT, "stopped by a signal before training began; nothing was saved."
    except Exception as error:
        code, message = 1, f"{type(error).__name__}: {error}"
        if os.environ.get("FLOW_FACTORY_DEBUG"):
            raise
    finally:
        if folder:
            report = {"code": code, "message": message, "typed": typed, "rank": rank, "time": time.time()}
            (Path(folder) / f"{rank}.exit").write_text(json.dumps(report))
    return code


if __name__ == "__main__":
    exit_code = agent_main(sys.argv[2:]) if sys.argv[1:2] == ["--agent"] else worker_main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    # Without the interpreter's teardown: a peer that is still in a collective must not keep this process alive.
    os._exit(exit_code)
