"""Runs a command in this process, through the real entry point."""

from __future__ import annotations

import sys
from dataclasses import dataclass

import pytest

from flow_factory.cli.app import main


@dataclass(frozen=True)
class Done:
    """How a command ended.

    Attributes:
        code: Exit code.
        out: Standard output.
        err: Standard error.
    """

    code: int
    out: str
    err: str


def invoke(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *arguments: object) -> Done:
    """Runs `flow-factory <arguments>`; a traceback is a failure of the test."""
    monkeypatch.setattr(sys, "argv", ["flow-factory", *map(str, arguments)])
    monkeypatch.setenv("COLUMNS", "160")
    capsys.readouterr()
    with pytest.raises(SystemExit) as stop:
        main()
    captured = capsys.readouterr()
    assert "Traceback" not in captured.err
    code = stop.value.code
    return Done(code if isinstance(code, int) else 0, captured.out, captured.err)
