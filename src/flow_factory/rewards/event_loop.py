"""One event loop, in one thread, for everything a run awaits.

HTTP clients bind to the loop they are first used on; scoring each batch under its own `asyncio.run` breaks them on the
second batch. So all coroutines of a run's rewards run on this one loop, whichever thread asks.
"""

from __future__ import annotations

import asyncio
import concurrent.futures
import logging
import threading
from collections.abc import Coroutine
from typing import Any, TypeVar

import torch

T = TypeVar("T")
logger = logging.getLogger(__name__)
_CLOSE_S = 5.0


class EventLoopThread:
    """Runs coroutines on a loop of its own; starts on first use and ends with `close`."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._thread: threading.Thread | None = None

    def run(self, coroutine: Coroutine[Any, Any, T]) -> T:
        """Runs `coroutine` on the loop and returns its result; callable from any thread but the loop's own."""
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                self._thread = threading.Thread(
                    target=_serve, args=(self._loop,), name="reward-event-loop", daemon=True
                )
                self._thread.start()
            loop = self._loop
        return asyncio.run_coroutine_threadsafe(coroutine, loop).result()

    def close(self) -> None:
        """Cancels what still runs, stops the loop and joins its thread. The next `run` starts a new one."""
        with self._lock:
            loop, thread, self._loop, self._thread = self._loop, self._thread, None, None
        if loop is None or thread is None:
            return
        try:
            asyncio.run_coroutine_threadsafe(_cancel_others(), loop).result(timeout=_CLOSE_S)
        except (TimeoutError, concurrent.futures.TimeoutError):  # two classes before Python 3.11
            # A coroutine that blocks its loop cannot be cancelled; the thread is a daemon and ends with the process.
            logger.warning("a reward's coroutine still blocks its event loop after %.0f s and is left behind", _CLOSE_S)
            return
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


def _serve(loop: asyncio.AbstractEventLoop) -> None:
    with torch.no_grad():  # belongs to a thread, so what holds where `score` is called does not hold here
        loop.run_forever()


async def _cancel_others() -> None:
    others = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
    for task in others:
        task.cancel()
    await asyncio.gather(*others, return_exceptions=True)
    await asyncio.get_running_loop().shutdown_asyncgens()
