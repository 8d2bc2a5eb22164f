"""Replay, gradients and whole cycles."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from flow_factory.models.abc import BaseAdapter
from flow_factory.models.lora import expand_dead
from flow_factory.samples import LatentState
from flow_factory.scheduler.names import Dynamics
from flow_factory.trainers.build import build_trainer
from tests.models.on_policy import on_policy_samples, replayed_ratios
from tests.models.support import generators
from tests.parity.bench import SEEDS, Bench
from tests.parity.cycles import CYCLES, cycle_config


def test_first_ratio_is_exactly_one(bench: Bench) -> None:
    """Pitfall 2: first on-policy ratio is not 1. Each SDE dynamics of the model, rows shuffled."""
    adapter = bench.stirred
    for setting in bench.case.settings:
        guidance = bench.guidance(setting)
        encoded = bench.condition(adapter, setting)
        together = bench.condition(adapter, setting, bench.batch)
        length = adapter.sigma_grid(bench.case.steps, _noise(bench, adapter, bench.batch), together).length
        levels = [0.7 if i in (0, length - 2) else 0.0 for i in range(length)]
        for dynamics in (d for d in bench.fresh.spec.dynamics if Dynamics(d).stochastic):
            same = {"size": bench.case.size, "levels": levels, "steps": bench.case.steps, "dynamics": dynamics}
            rows = [encoded.row(0), encoded.row(1)]
            with adapter.rollout():
                if len(bench.batch) == 1:
                    batches = [on_policy_samples(adapter, [row], guidance, members=1, **same) for row in rows]
                else:
                    samples = on_policy_samples(adapter, rows, guidance, **same)
                    batches = [[samples[i] for i in (2, 0, 3, 1)]]
            with adapter.train():
                ratios = torch.cat([replayed_ratios(adapter, b, guidance, dynamics) for b in batches], dim=1)
            assert ratios.shape == (2, sum(map(len, batches)))
            assert torch.equal(ratios, torch.ones_like(ratios)), f"{setting.name}, {dynamics}: {ratios}"


def _noise(bench: Bench, adapter: BaseAdapter[Any], rows: Sequence[int]) -> LatentState:
    condition = bench.condition(adapter, bench.case.settings[0], rows)
    return adapter.prepare_latents(condition, generators([SEEDS[row] for row in rows]), *bench.case.size)


def largest_gradients(bench: Bench, adapter: BaseAdapter[Any]) -> dict[str, float]:
    """The largest gradient of every parameter, over all settings and two steps, for a random functional."""
    largest: dict[str, float] = {}
    for setting, rows in itertools.product(bench.case.settings, bench.batches):
        condition = adapter.prepare_condition_state(bench.condition(adapter, setting, rows))
        state = _noise(bench, adapter, rows)
        grid = adapter.sigma_grid(bench.case.steps, state, condition)
        for step in (0, grid.length - 1):
            with adapter.pin():
                velocity = adapter.predict(state, grid.times(step, len(rows)), condition, bench.guidance(setting))
                generator = torch.Generator().manual_seed(step)
                terms = [(v * torch.randn(v.shape, generator=generator)).sum() for _, v in velocity.items()]
                torch.stack(terms).sum().backward()
            for name, parameter in adapter.trainable_parameters().items():
                gradient = 0.0 if parameter.grad is None else float(parameter.grad.abs().max())
                largest[name] = max(largest.get(name, 0.0), gradient)
                parameter.grad = None
    return largest


def linears(module: nn.Module) -> list[str]:
    """Names of the linear layers as the model calls them, without LoRA's own."""
    names = [name for name, child in module.named_modules() if isinstance(child, nn.Linear) and "lora_" not in name]
    return [name.removesuffix(".base_layer") for name in names]


def wrapped_layers(adapter: BaseAdapter[Any]) -> set[str]:
    """Names of the layers with LoRA, with their component in front."""
    return {name.split(".lora_")[0] for name in adapter.trainable_parameters()}


def test_every_lora_layer_learns_and_dead_modules_cannot(bench: Bench) -> None:
    """Pitfall 51: LoRA layers that can never get a gradient are declared, proven dead, and not wrapped."""
    got = largest_gradients(bench, bench.stirred)
    still = sorted(name for name, gradient in got.items() if gradient == 0.0)
    assert not still, f"no gradient reaches {', '.join(still)}: dead_modules, or a target outside of the blocks?"
    wrapped = len(wrapped_layers(bench.stirred))
    assert wrapped == bench.case.wrapped, f"LoRA wraps {wrapped} layers, and the case counts {bench.case.wrapped}"

    full = largest_gradients(bench, bench.full)
    for component in bench.full.trained_components:
        module = bench.full.bundle.component(component)
        patterns = [re.compile(p) for p in expand_dead(module, bench.full.spec.dead_modules)]
        dead = {name for name in linears(module) if any(p.fullmatch(name) for p in patterns)}
        assert dead or not patterns, f"{component}: dead_modules match nothing"
        assert {name for name in dead if full[f"{component}.{name}.weight"] > 0.0} == set(), "not dead"


def test_default_targets_cover_attention_and_mlp(bench: Bench) -> None:
    """Every linear layer inside a block is wrapped, dead, or left alone on purpose (fused single-stream blocks too)."""
    spec, wrapped = bench.fresh.spec, wrapped_layers(bench.fresh)
    for component in bench.fresh.trained_components:
        module = bench.fresh.bundle.component(component)
        left = [re.compile(p) for p in (*expand_dead(module, spec.dead_modules), *bench.case.uncovered)]
        blocks = tuple(f"{name}." for name, child in module.named_modules() if isinstance(child, nn.ModuleList))
        inside = {name for name in linears(module) if name.startswith(blocks) and "norm" not in name}
        forgotten = {
            name for name in inside if f"{component}.{name}" not in wrapped and not any(p.fullmatch(name) for p in left)
        }
        assert not forgotten, f"{component}: no LoRA on {', '.join(sorted(forgotten))}; nor dead, nor uncovered"


def test_losses_on_stored_media_are_unguided(bench: Bench) -> None:
    """Whatever the configuration's own fields say (true CFG), and wherever the model counts guidance from."""
    adapter = bench.adapter({f"train.{k}": v for s in bench.case.settings for k, v in s.generation.items()})
    assert not adapter.offline_guidance().needs_negative()


@pytest.mark.parametrize("cycle", CYCLES)
def test_a_cycle_of_each_trainer(bench: Bench, cycle: str, tmp_path: Path) -> None:
    """From prompts on disk to changed weights, with the model's own configuration fields."""
    if cycle == "sft" and not bench.trains_on_stored_media:
        pytest.skip(f"{bench.case.key} does not learn from stored media")
    trainer = build_trainer(cycle_config(bench, cycle, tmp_path))
    before: dict[str, Tensor] = {n: p.detach().clone() for n, p in trainer.adapter.trainable_parameters().items()}
    result = trainer.start()
    assert result is not None and trainer.progress.optimizer_step == 1
    after = trainer.adapter.trainable_parameters()
    moved = [name for name, value in before.items() if not torch.equal(value, after[name])]
    assert moved and all(torch.isfinite(p).all() for p in after.values())


def test_losses_on_noised_samples_are_unguided(bench: Bench, tmp_path: Path) -> None:
    """Whatever guides the rollout, `kl_cfg: 1` too; a network that takes guidance as an input keeps the rollout's."""
    trainer: Any = build_trainer(cycle_config(bench, "nft", tmp_path))
    seen = []
    predict = trainer.adapter.predict

    def noted(state: LatentState, times: Any, condition: Any, guidance: Any) -> LatentState:
        seen.append(guidance)
        return predict(state, times, condition, guidance)

    samples = trainer.sample()
    batch, point = next((b, p) for b in trainer.microbatches(samples) for p in trainer.noised(b))
    trainer.adapter.predict = noted
    for scale in (None, 1.0):
        trainer.velocity(batch, point, scale)
    assert seen[0] == seen[1] and not seen[0].needs_negative()
    assert seen[0].embedded == trainer.rollout_plan.guidance.embedded
