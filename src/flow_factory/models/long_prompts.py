"""Prompts that are longer than a text encoder reads: said once, not for every batch that is encoded."""

from __future__ import annotations

import logging
import re

from diffusers.utils import logging as diffusers_logging

_TRUNCATED = re.compile(
    r"The following part of your input was truncated because (?P<why>.*?): \W*(?P<cut>.*)", re.DOTALL
)
_SPECIAL = re.compile(r"(\s*(<\|\w+\|>|</?\w+>))+")  # end and padding tokens, which the cut text ends with
_SHOWN = 60  # characters of the first text that is cut


class EachReasonOnce(logging.Filter):
    """Passes the first message about truncated prompts for each reason, in one line, and everything else as it is.

    diffusers logs every truncated text of every batch and encoder: hundreds of lines for a dataset. That texts are cut
    is worth knowing, since the model then never sees what a reward may ask for; once is enough.
    """

    def __init__(self) -> None:
        super().__init__()
        self.told: set[str] = set()

    def filter(self, record: logging.LogRecord) -> bool:
        found = _TRUNCATED.match(record.getMessage())
        if found is None:
            return True
        why = " ".join(found["why"].split())
        if why in self.told:
            return False
        self.told.add(why)
        cut = _SPECIAL.sub("", re.split(r"['\"](?:, |\])", found["cut"])[0]).strip()
        shown = cut if len(cut) <= _SHOWN else f"{cut[:_SHOWN]}..."
        record.msg = f"prompts are longer than the model reads, since {why}; the first text that is cut off: {shown!r}"
        record.args = ()
        return True


_filter = EachReasonOnce()


def tell_once() -> None:
    """From now on, each reason is told once; those told before are told again. Called when a model is loaded."""
    diffusers_logging.get_logger(__name__)  # makes the library's handlers
    for handler in logging.getLogger("diffusers").handlers:
        if _filter not in handler.filters:
            handler.addFilter(_filter)
    _filter.told.clear()
