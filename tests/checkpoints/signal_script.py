"""Child process of the signal tests."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
import time

from flow_factory.checkpoints.signals import SignalGuard


def say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


def sleeper() -> None:
    time.sleep(60)


def until_asked() -> None:
    with SignalGuard() as guard:
        say("ready")
        while not guard.requested:
            time.sleep(0.01)
        say(f"requested {guard.signum} {guard.overdue(0.0)} {guard.overdue(60.0)} {59 < guard.remaining(60) <= 60}")
    say(f"threads {threading.active_count()} default {signal.getsignal(signal.SIGTERM) == signal.SIG_DFL}")
    sys.exit(guard.exit_code)


def stuck_in_native_code() -> None:
    with SignalGuard():
        child = multiprocessing.get_context("fork").Process(target=sleeper)
        child.start()
        say(f"ready {child.pid}")
        sys.stdout.write("buffered output")  # not flushed before the exit
        # Waits for a lock in C without the GIL: no Python-level handler ever runs again in this thread.
        libc, mutex = ctypes.CDLL(None), ctypes.create_string_buffer(64)
        libc.pthread_mutex_lock(mutex)
        libc.pthread_mutex_lock(mutex)


def graceful_twice() -> None:
    with SignalGuard(grace_s=5.0) as guard:
        say("ready")
        while not guard.requested:
            time.sleep(0.01)
        time.sleep(0.5)
        say("still here")
    sys.exit(guard.exit_code)


def forked_children() -> None:
    with SignalGuard() as guard:
        child = multiprocessing.get_context("fork").Process(target=sleeper)
        child.start()
        time.sleep(0.2)
        assert child.pid is not None
        os.kill(child.pid, signal.SIGINT)  # as a terminal does to the whole group: the child leaves it to us
        time.sleep(0.2)
        say(f"alive {child.is_alive()} requested {guard.requested}")
        child.terminate()
        child.join(5)
        say(f"ended {child.exitcode} requested {guard.requested}")


if __name__ == "__main__":
    globals()[sys.argv[1]]()
