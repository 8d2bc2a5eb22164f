"""Signals: the first is a request, the second ends the process at once; nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from flow_factory.checkpoints.signals import SignalGuard

SCRIPT = Path(__file__).parent / "signal_script.py"


def start(case: str) -> subprocess.Popen[str]:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}
    command = [sys.executable, str(SCRIPT), case]
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment)


def is_running(pid: int) -> bool:
    try:
        with open(f"/proc/{pid}/stat") as handle:
            return handle.read().rsplit(")", 1)[1].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_the_first_signal_is_a_request_and_the_exit_code_says_so(signum):
    """Pitfall 43: an interrupted run does not exit with 0."""
    process = start("until_asked")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signum)
    output, errors = process.communicate(timeout=20)
    assert output == f"requested {int(signum)} True False True\nthreads 1 default True\n"
    assert process.returncode == 128 + signum
    assert f"{signal.Signals(signum).name} received" in errors


def test_a_second_signal_exits_at_once_even_inside_native_code():
    """Pitfall 43: no worker is left, output is flushed, the code is 128 + the signal."""
    process = start("stuck_in_native_code")
    assert process.stdout is not None
    child = int(process.stdout.readline().split()[1])
    assert is_running(child)
    process.send_signal(signal.SIGINT)
    time.sleep(0.3)
    assert process.poll() is None
    began = time.monotonic()
    process.send_signal(signal.SIGTERM)
    output, errors = process.communicate(timeout=20)
    assert time.monotonic() - began < 5
    assert process.returncode == 128 + signal.SIGTERM
    assert output == "buffered output"
    assert "second signal (SIGTERM)" in errors
    for _ in range(50):
        if not is_running(child):
            break
        time.sleep(0.1)
    assert not is_running(child)


def test_a_forwarded_duplicate_within_the_grace_is_one_signal():
    process = start("graceful_twice")
    assert process.stdout is not None and process.stdout.readline() == "ready\n"
    process.send_signal(signal.SIGINT)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=20)
    assert output == "still here\n"
    assert process.returncode in (128 + signal.SIGINT, 128 + signal.SIGTERM)


def test_forked_workers_do_not_inherit_the_guard():
    """Pitfall 43: a data loader worker dies of SIGTERM, and its signals are not taken for the parent's."""
    process = start("forked_children")
    output, errors = process.communicate(timeout=20)
    assert output == f"alive True requested False\nended {-signal.SIGTERM} requested False\n", errors


def test_flag_is_set_when_the_signal_returns_and_handlers_come_back():
    former = [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)]
    with SignalGuard() as guard:
        assert (guard.requested, guard.exit_code, guard.overdue(0.0)) == (False, 0, False)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.requested and guard.exit_code == 143
        with SignalGuard() as inner:
            assert not inner.requested
        assert signal.getsignal(signal.SIGTERM) == guard._handle
    assert [signal.getsignal(signum) for signum in (signal.SIGINT, signal.SIGTERM)] == former
    assert signal.set_wakeup_fd(-1) == -1
    assert not [thread for thread in threading.enumerate() if thread.name == "signal-guard"]


def test_handlers_come_back_after_an_error():
    former = signal.getsignal(signal.SIGINT)
    with pytest.raises(RuntimeError), SignalGuard():
        raise RuntimeError
    assert signal.getsignal(signal.SIGINT) is former


def test_other_threads_are_left_alone():
    seen = []

    def work() -> None:
        with SignalGuard() as guard:
            seen.append((guard.requested, signal.getsignal(signal.SIGTERM)))

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [(False, signal.getsignal(signal.SIGTERM))]
