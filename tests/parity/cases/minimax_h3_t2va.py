"""MiniMax-H3 from text: two schedules, one sequence for text, sound and video."""

from __future__ import annotations

from tests.parity.case import Case
from tests.parity.minimax_h3 import FAMILY, LAYERS, pipeline
from tests.parity.parts import seeded

CASES = [
    Case(
        key="minimax-h3-t2va",
        build=seeded(lambda: pipeline("t2va")),
        wrapped=LAYERS,
        **FAMILY,
    )
]
