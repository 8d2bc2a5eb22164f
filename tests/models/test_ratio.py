"""The first on-policy ratio under what the base does; that it is 1 for every adapter is checked in tests/parity."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from flow_factory.samples import BaseSample
from tests.models.on_policy import on_policy_samples, replayed_ratios
from tests.models.support import PROMPTS, make_adapter, stir

LEVELS = (0.7, 0.0, 0.7, 0.0)


def sample(adapter: SD3_5Adapter, dynamics: str, scale: float, **keywords: Any) -> list[BaseSample]:
    """Two prompts with two members each."""
    encoded = adapter.encode_prompt(PROMPTS[:2], None, need_negative=scale > 1)
    return on_policy_samples(
        adapter, [encoded.row(0), encoded.row(1)], adapter.guidance(scale),
        size=(32, 24), levels=LEVELS, steps=4, dynamics=dynamics, **keywords,
    )  # fmt: skip


def replay(adapter: SD3_5Adapter, samples: list[BaseSample], dynamics: str, scale: float, **keywords: Any) -> Tensor:
    """Ratios of all stored transitions, [steps, B]."""
    return replayed_ratios(adapter, samples, adapter.guidance(scale), dynamics, **keywords)


@pytest.mark.parametrize("dynamics", ["Flow-SDE", "CPS"])
def test_ratio_is_one_for_states_stored_in_half_precision(stirred: SD3_5Adapter, dynamics: str) -> None:
    """Pitfall 2: next state stored in a lower precision than the log-prob saw."""
    samples = sample(stirred, dynamics, 4.5, storage_dtype=torch.bfloat16)
    assert samples[0].trajectory.states[0].only.dtype == torch.bfloat16
    ratios = replay(stirred, samples[::-1], dynamics, 4.5)
    assert torch.equal(ratios, torch.ones_like(ratios))


def test_ratio_is_one_with_gradient_checkpointing_and_unnormalised_log_probs(tiny_sd3_dir: Path) -> None:
    """Pitfall 2, under recomputation; the unnormalised form of CPS."""
    adapter = make_adapter(tiny_sd3_dir, {"train.enable_gradient_checkpointing": True})
    stir(adapter)
    samples = sample(adapter, "CPS", 4.5, log_prob_normalised=False)
    ratios = replay(adapter, samples, "CPS", 4.5, log_prob_normalised=False)
    assert torch.equal(ratios, torch.ones_like(ratios))


def test_another_batch_composition_stays_close(stirred: SD3_5Adapter) -> None:
    samples = sample(stirred, "Flow-SDE", 1.0)
    ratios = replay(stirred, samples[:1], "Flow-SDE", 1.0)
    assert (ratios - 1).abs().max() <= 1e-6


def test_the_ratio_notices_a_changed_weight(stirred: SD3_5Adapter) -> None:
    samples = sample(stirred, "Flow-SDE", 1.0)
    stir(stirred, scale=1e-2, seed=9)
    ratios = replay(stirred, samples, "Flow-SDE", 1.0)
    assert (ratios - 1).abs().max() > 1e-6
