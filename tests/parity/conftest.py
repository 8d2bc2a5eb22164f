"""One bench per case."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from diffusers.utils import logging

from tests.parity.bench import Bench
from tests.parity.case import Case
from tests.parity.cases import all_cases


@pytest.fixture(scope="session", params=all_cases(), ids=lambda case: case.name)
def bench(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    """The case's adapters; pytest groups tests by it."""
    case: Case = request.param
    level = logging.get_verbosity()
    logging.set_verbosity_error()  # pipelines comment on arguments that the checks give on purpose
    yield Bench(case, tmp_path_factory.mktemp(case.name))
    logging.set_verbosity(level)
