"""Turning SIGINT and SIGTERM into a request that the training loop answers at a safe point.

The first signal only sets a flag. A second one ends the process at once, even while the main thread is inside a long
native call: a small thread reads signal numbers from a wake-up socket, which the interpreter's C-level handler writes.
"""

from __future__ import annotations

import contextlib
import math
import multiprocessing
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Any

_active: SignalGuard | None = None
_fork_hook_installed = False
_FLUSH_S = 0.5
# Shows the answer to a first signal; None writes it to the error stream.
_announcer: Callable[[str], None] | None = None


class Abandoned(BaseException):
    """Raised by the first signal inside `SignalGuard.abandonable`, past any `except Exception` of the code it ends."""


class SignalGuard:
    """Context manager that holds back SIGINT and SIGTERM; inactive outside the main thread and inside another guard.

    Used as

        with SignalGuard() as guard:
            while not guard.requested:
                ...

    Former handlers are back after the block. Forked children (data loader workers) do not inherit the guard: they die
    of SIGTERM as usual and leave Ctrl-C to their parent.

    Args:
        grace_s: A further signal within this time of the first counts as the same one. Launchers forward a Ctrl-C that
            the terminal has already sent to the whole process group, so workers of a launcher need some (0.5).

    Attributes:
        signum: The first signal, or None.
    """

    def __init__(self, grace_s: float = 0.0) -> None:
        self.grace_s = grace_s
        self.signum: int | None = None
        self._requested_at = math.inf
        self._received = 0
        self._abandonable = False
        self._former: dict[int, Any] = {}
        self._former_wakeup = -1
        self._sockets: tuple[socket.socket, socket.socket] | None = None
        self._watcher: threading.Thread | None = None

    @property
    def requested(self) -> bool:
        """Whether a signal has asked the run to stop."""
        return self.signum is not None

    @property
    def exit_code(self) -> int:
        """128 + signal number, or 0 without a signal."""
        return 0 if self.signum is None else 128 + self.signum

    def remaining(self, seconds: float) -> float:
        """Seconds left until `seconds` after the first signal; infinite without a signal, negative when passed."""
        return math.inf if self.signum is None else self._requested_at + seconds - time.monotonic()

    def overdue(self, seconds: float) -> bool:
        """Whether the first signal came at least `seconds` ago."""
        return self.remaining(seconds) <= 0

    def __enter__(self) -> SignalGuard:
        global _active
        if threading.current_thread() is not threading.main_thread() or _active is not None:
            return self
        _install_fork_hook()
        reader, writer = socket.socketpair()
        writer.setblocking(False)  # the C-level handler must never wait
        self._sockets = (reader, writer)
        self._watcher = threading.Thread(target=self._watch, args=(reader,), name="signal-guard", daemon=True)
        self._watcher.start()
        self._former_wakeup = signal.set_wakeup_fd(writer.fileno(), warn_on_full_buffer=False)
        for signum in (signal.SIGINT, signal.SIGTERM):
            self._former[signum] = signal.signal(signum, self._handle)
        _active = self
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        global _active
        if self._sockets is None:
            return
        _active = None
        for signum, handler in self._former.items():
            # A handler that C code had installed is reported as None and cannot be set again.
            signal.signal(signum, signal.SIG_DFL if handler is None else handler)
        signal.set_wakeup_fd(self._former_wakeup)
        reader, writer = self._sockets
        writer.shutdown(socket.SHUT_WR)  # ends the watcher's loop, also while a forked child holds a copy of the socket
        if self._watcher is not None:
            self._watcher.join()
        writer.close()
        reader.close()
        self._sockets = None

    @contextmanager
    def abandonable(self) -> Iterator[None]:
        """A block of the main thread that the first signal ends at once, wherever it waits.

        For code that may wait for long and changes nothing that lasts, such as scoring. After the block, `requested`
        tells whether it was abandoned.
        """
        self._abandonable = True
        try:
            with contextlib.suppress(Abandoned):
                yield
        finally:
            self._abandonable = False

    def _handle(self, signum: int, frame: FrameType | None) -> None:
        """Python-level handler in the main thread: the flag is set when `os.kill(own pid)` returns. Counts nothing."""
        self._request(signum)
        if self._abandonable:
            self._abandonable = False
            raise Abandoned

    def _request(self, signum: int) -> None:
        if self.signum is None:
            self._requested_at = time.monotonic()
            self.signum = signum

    def _watch(self, reader: socket.socket) -> None:
        """Watcher thread: sees every signal as a byte, whatever the main thread is doing."""
        while received := reader.recv(64):
            for signum in received:
                if signum not in self._former:
                    continue
                self._received += 1
                self._request(signum)
                name = signal.Signals(signum).name
                if self._received == 1:
                    (_announcer or _say)(
                        f"{name} received: saving at the next safe point; send it again to exit at once"
                    )
                elif time.monotonic() - self._requested_at >= self.grace_s:
                    _say(f"second signal ({name}): exiting at once without saving")
                    exit_now(128 + signum)


def announce_with(announcer: Callable[[str], None] | None) -> None:
    """Says who shows the answer to a first signal, in place of a bare write, which would tear a live display.

    Args:
        announcer: Called from another thread, at any moment; None for the bare write.
    """
    global _announcer
    _announcer = announcer


def exit_now(code: int) -> None:
    """Ends the process without clean-up, but with its output flushed and its `multiprocessing` children ended."""
    # Another thread may hold a stream's lock (a full pipe) or have closed it; the exit must happen all the same.
    flusher = threading.Thread(target=_flush, daemon=True)
    flusher.start()
    flusher.join(_FLUSH_S)
    with contextlib.suppress(Exception):
        for child in multiprocessing.active_children():
            child.kill()
    os._exit(code)


def _flush() -> None:
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(Exception):
            stream.flush()


def _say(text: str) -> None:
    """Writes to the error stream without Python's buffers, whose locks a handler must not wait for."""
    with contextlib.suppress(OSError):
        os.write(2, f"\n{text}\n".encode())


def _install_fork_hook() -> None:
    global _fork_hook_installed
    if not _fork_hook_installed and hasattr(os, "register_at_fork"):
        _fork_hook_installed = True
        os.register_at_fork(after_in_child=_release_in_child)


def _release_in_child() -> None:
    global _active
    if _active is not None:
        _active = None
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.SIG_IGN)
