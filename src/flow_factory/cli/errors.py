"""How a command fails: one message on stderr and an exit code; a traceback only with `--debug`."""

from __future__ import annotations

import functools
import os
import sys
import threading
from collections.abc import Callable
from typing import Annotated, NoReturn, ParamSpec, TypeVar

import typer

from flow_factory.errors import FlowFactoryError, Interrupted

P = ParamSpec("P")
R = TypeVar("R")
_DEBUG = "FLOW_FACTORY_DEBUG"


def _set_debug(value: bool) -> bool:
    if value:
        os.environ[_DEBUG] = "1"  # the environment, so that worker processes know it too
    return value


DebugOption = Annotated[
    bool, typer.Option("--debug", callback=_set_debug, help="Show the traceback of an error.", show_default=False)
]


def guarded(command: Callable[P, R]) -> Callable[P, R]:
    """Turns exceptions of a command into a message and an exit code: 2 for input, 1 for a failure, 130 for Ctrl-C."""

    @functools.wraps(command)
    def run(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return command(*args, **kwargs)
        except Interrupted as error:
            if any(thread is not threading.current_thread() and not thread.daemon for thread in threading.enumerate()):
                # A reward's call that hangs in its thread: the interpreter's teardown would wait for it.
                from flow_factory.checkpoints.signals import exit_now

                _say(str(error), label=None)
                exit_now(error.exit_code)
            _fail(str(error), error.exit_code, label=None)  # asked for, so not an error
        except FlowFactoryError as error:
            _fail(str(error), error.exit_code)
        except KeyboardInterrupt:
            _fail("interrupted.", 130)
        except BrokenPipeError:
            raise  # the reader of our output has gone; typer ends quietly
        except Exception as error:
            hint = "" if os.environ.get(_DEBUG) else "\nRun the command again with --debug for the traceback."
            _fail(f"{type(error).__name__}: {error}{hint}", 1)

    return run


def _fail(message: str, code: int, label: str | None = "error: ") -> NoReturn:
    _say(message, label)
    raise SystemExit(code)


def _say(message: str, label: str | None = "error: ") -> None:
    if os.environ.get(_DEBUG) and sys.exc_info()[0] is not None:
        import traceback

        traceback.print_exc()
    from rich.console import Console
    from rich.text import Text

    console = Console(stderr=True, highlight=False, soft_wrap=True)
    console.print(Text.assemble((label, "bold red"), message) if label else message, markup=False)
