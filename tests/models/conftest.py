"""Adapters shared by the tests of a file; tests that change weights make their own."""

from __future__ import annotations

from pathlib import Path

import pytest
from diffusers import StableDiffusion3Pipeline

from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.models.benches import Open
from tests.models.support import make_adapter, plain_pipeline, stir
from tests.parity.bench import Bench
from tests.parity.cases import all_cases


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """The bench of a parity case, made once for the tests of a file."""
    benches: dict[str, Bench] = {}

    def opened(name: str) -> Bench:
        if name not in benches:
            case = next(case for case in all_cases() if case.name == name)
            benches[name] = Bench(case, tmp_path_factory.mktemp("case"))
        return benches[name]

    return opened


@pytest.fixture(scope="session")
def pipeline(tiny_sd3_dir: Path) -> StableDiffusion3Pipeline:
    """The tiny pipeline as a user loads it; tests set its scheduler themselves."""
    return plain_pipeline(tiny_sd3_dir)


@pytest.fixture(scope="session")
def fresh(tiny_sd3_dir: Path) -> SD3_5Adapter:
    """An adapter as constructed (LoRA's B is zero): it computes the pretrained model. Do not change its weights."""
    return make_adapter(tiny_sd3_dir)


@pytest.fixture
def stirred(tiny_sd3_dir: Path) -> SD3_5Adapter:
    """An adapter of one's own whose LoRA has moved."""
    adapter = make_adapter(tiny_sd3_dir)
    stir(adapter)
    return adapter
