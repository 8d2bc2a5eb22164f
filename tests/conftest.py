"""Fixtures shared by all areas."""

from __future__ import annotations

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def tiny_sd3_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a tiny random StableDiffusion3Pipeline; do not write into it."""
    from tests.models.tiny_pipelines import build_tiny_sd3

    folder = tmp_path_factory.mktemp("tiny-sd3")
    build_tiny_sd3(seed=0).save_pretrained(folder, safe_serialization=True)
    return folder
