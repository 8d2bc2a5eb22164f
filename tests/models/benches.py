"""Parity cases opened by name, for tests of what is peculiar to a model."""

from __future__ import annotations

from collections.abc import Callable

from tests.parity.bench import Bench

Open = Callable[[str], Bench]
"""Takes the name of a case; the bench is made at its first use."""
