"""Prompts that are cut off are told once for each reason, and shown."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest

from flow_factory.models.long_prompts import EachReasonOnce
from tests.models.support import make_adapter


def test_each_reason_is_told_once_in_one_line(tiny_sd3_dir: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """Through the pipeline's own messages: two CLIP encoders and one T5 cut each of these."""
    adapter = make_adapter(tiny_sd3_dir, {"train.max_sequence_length": 10})
    capfd.readouterr()
    texts = [f"a very long prompt with number {i} that goes on and on until nobody reads it" for i in range(3)]
    for text in texts:
        adapter.encode_prompt([text, f"{text}, indeed"])
    lines = [line for line in capfd.readouterr().err.splitlines() if "longer than the model reads" in line]
    assert len(lines) == 2
    assert "since CLIP can only handle sequences up to" in lines[0] and "the first text that is cut off: '" in lines[0]
    assert "`max_sequence_length` is set to 10 tokens" in lines[1]
    assert "<pad>" not in "".join(lines) and "endoftext" not in "".join(lines)

    again = make_adapter(tiny_sd3_dir, {"train.max_sequence_length": 10})  # another run tells it again
    capfd.readouterr()
    again.encode_prompt(texts[:1])
    assert capfd.readouterr().err.count("longer than the model reads") == 2


def test_other_messages_pass_as_they_are() -> None:
    record = logging.LogRecord("diffusers", logging.WARNING, "", 0, "something %s", ("else",), None)
    told = EachReasonOnce()
    assert told.filter(record) and told.filter(record) and record.getMessage() == "something else"
