"""The two kinds of failure a user sees, and the exit codes that go with them."""

from __future__ import annotations


class FlowFactoryError(Exception):
    """Base of all errors meant for the user: shown as one message without a traceback (unless `--debug`)."""

    exit_code: int = 1


class InputError(FlowFactoryError):
    """Something the user gave is wrong: the message names the value, the place and the remedy. Exit code 2."""

    exit_code = 2


class RunError(FlowFactoryError):
    """A run that started correctly failed. Exit code 1."""

    exit_code = 1


class PeerFailedError(RunError):
    """Another rank failed, and this one ends with it. Exit code 1; the other rank's error is the cause."""


class Interrupted(FlowFactoryError):
    """A signal ended the run after its state was saved. Exit code 128 + signal number.

    Args:
        message: What was saved and how to go on.
        signum: The signal that was received.
    """

    def __init__(self, message: str, signum: int) -> None:
        super().__init__(message)
        self.signum = signum
        self.exit_code = 128 + signum
