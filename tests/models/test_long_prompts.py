"""Prompts that are cut off are told once for each reason, and shown."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from flow_factory.models.long_prompts import EachReasonOnce
from tests.models.support import make_adapter


class Lines(logging.Handler):
    """Keeps what it is given."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What diffusers says."""
    handler = Lines()
    logging.getLogger("diffusers").addHandler(handler)
    yield handler.lines
    logging.getLogger("diffusers").removeHandler(handler)


def test_each_reason_is_told_once_in_one_line(tiny_sd3_dir: Path, told: list[str]) -> None:
    """Through the pipeline's own messages: two CLIP encoders and one T5 cut each of these."""
    adapter = make_adapter(tiny_sd3_dir, {"train.max_sequence_length": 10})
    texts = [f"a very long prompt with number {i} that goes on and on until nobody reads it" for i in range(3)]
    for text in texts:
        adapter.encode_prompt([text, f"{text}, indeed"])
    assert len(told) == 2
    assert "since CLIP can only handle sequences up to" in told[0] and "the first text that is cut off: '" in told[0]
    assert "`max_sequence_length` is set to 10 tokens" in told[1]
    assert "<pad>" not in "".join(told) and "endoftext" not in "".join(told) and "\n" not in "".join(told)

    again = make_adapter(tiny_sd3_dir, {"train.max_sequence_length": 10})  # another run tells it again
    again.encode_prompt(texts[:1])
    assert len(told) == 4


def test_other_messages_pass_as_they_are() -> None:
    record = logging.LogRecord("diffusers", logging.WARNING, "", 0, "something %s", ("else",), None)
    told = EachReasonOnce()
    assert told.filter(record) and told.filter(record) and record.getMessage() == "something else"
