"""Fixtures shared by all areas."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

if "PYTEST_XDIST_WORKER" in os.environ:
    # Before torch is imported: threads of several processes that wait for each other on busy cores only spin.
    os.environ.setdefault("OMP_NUM_THREADS", "1")


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random StableDiffusion3Pipeline; do not write into it."""
    from tests.models.tiny_pipelines import build_tiny_sd3

    folder = tmp_path_factory.mktemp("tiny-sd3")
    build_tiny_sd3(seed=0).save_pretrained(folder, safe_serialization=True)
    return folder


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """With `pytest -n`, what shares expensive fixtures stays in one process: a parity case, or else a file."""
    for item in items:
        case = getattr(getattr(item, "callspec", None), "params", {}).get("bench")
        item.add_marker(pytest.mark.xdist_group(item.location[0] if case is None else case.name))
