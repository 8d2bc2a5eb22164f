"""Half precision, in which models of published sizes are trained: everything up to media, and back to gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.parity.bench import Bench

PRECISIONS: dict[str, dict[str, Any]] = {
    "autocast": {"mixed_precision": "bf16"},
    "stored": {"mixed_precision": "no", "model.frozen_parameters_dtype": "bf16"},
}
# Shares of the latents' standard deviation. Without autocast some networks, as diffusers has them, round their time to
# 8 bits too: HunyuanVideo 1.5 and FLUX.2.
NEAR = {"autocast": 0.05, "stored": 0.35}


@pytest.mark.parametrize("precision", PRECISIONS)
def test_half_precision(bench: Bench, precision: str) -> None:
    """States stay float32 and near those of float32, media are made, and gradients reach float32 weights."""
    setting, rows = bench.case.settings[-1], bench.batch
    exact = bench.latents(bench.roll(bench.fresh, setting, rows=rows, steps=2, decode=False))
    adapter = bench.adapter(PRECISIONS[precision])
    out = bench.roll(adapter, setting, rows=rows, steps=2)
    assert out.media is not None and len(out.media) == len(rows)
    state = out.trajectory.states[out.grid.length]
    assert {x.dtype for _, x in state.items()} == {torch.float32}
    for name, x in bench.latents(out).items():
        difference = float((x - exact[name]).std() / exact[name].std())
        assert 0.0 < difference < NEAR[precision], f"{name}: {difference}"

    condition = adapter.prepare_condition_state(bench.condition(adapter, setting, rows))
    with adapter.train(), adapter.pin():
        velocity = adapter.predict(state, out.grid.times(0, len(rows)), condition, bench.guidance(setting))
        assert {v.dtype for _, v in velocity.items()} == {torch.float32}
        torch.stack([v.square().mean() for _, v in velocity.items()]).sum().backward()
    gradients = [p.grad for p in adapter.trainable_parameters().values() if p.grad is not None]
    assert gradients and all(g.dtype == torch.float32 and torch.isfinite(g).all() for g in gradients)
    assert max(float(g.abs().max()) for g in gradients) > 0
    if adapter.supports_output_encoding:
        encoded = adapter.encode_output_state(out.media)
        pinned = {name for name, mask in state.masks.items() if not mask.any()}
        made = {n: (x.shape, x.dtype) for n, x in state.items() if n not in pinned}
        assert {n: (x.shape, x.dtype) for n, x in encoded.items()} == made
