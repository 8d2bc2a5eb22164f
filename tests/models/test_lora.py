"""LoRA layers: targets, initial values, dead modules."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from flow_factory.errors import InputError
from flow_factory.hparams.models.targets import ATTENTION
from flow_factory.models.lora import select_targets
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.models.support import make_adapter, stir
from tests.models.test_variants import velocity


def test_initial_values_depend_on_the_seed_alone(tiny_sd3_dir: Path) -> None:
    torch.manual_seed(1)
    state = torch.random.get_rng_state()
    first = make_adapter(tiny_sd3_dir).trainable_parameters()
    assert torch.equal(torch.random.get_rng_state(), state), "the global generator was used"
    torch.manual_seed(2)
    second = make_adapter(tiny_sd3_dir, {"model.target_modules": ["to_q"]}).trainable_parameters()
    other = make_adapter(tiny_sd3_dir, {"train.seed": 12}).trainable_parameters()
    assert set(second) < set(first)
    assert all(torch.equal(first[name], value) for name, value in second.items())
    downs = [name for name in first if ".lora_A." in name]
    assert downs and all(not torch.equal(first[name], other[name]) for name in downs)
    assert all(not first[name].any() for name in first if ".lora_B." in name)


@pytest.mark.parametrize(("init", "std"), [("gaussian", 1 / 4), ("default", (1 / 32) ** 0.5 / 3**0.5)])
def test_initial_distributions(tiny_sd3_dir: Path, init: str, std: float) -> None:
    parameters = make_adapter(
        tiny_sd3_dir, {"model.lora_init": init, "model.target_modules": list(ATTENTION)}
    ).trainable_parameters()
    values = torch.cat([p.detach().flatten() for n, p in parameters.items() if ".lora_A." in n])
    assert float(values.std()) == pytest.approx(std, rel=0.05)


def test_the_start_is_the_base(tiny_sd3_dir: Path, fresh: SD3_5Adapter) -> None:
    adapter = make_adapter(tiny_sd3_dir)
    with adapter.use_component_variant(None):
        base = velocity(adapter)
    assert torch.equal(velocity(adapter), base)
    stir(adapter)
    assert not torch.allclose(velocity(adapter), base)


def test_targets() -> None:
    block = nn.ModuleDict({"to_q": nn.Linear(2, 2), "to_v": nn.Linear(2, 2), "norm": nn.LayerNorm(2)})
    module = nn.ModuleDict({"blocks": nn.ModuleList([block]), "to_q_other": nn.Linear(2, 2)})
    assert select_targets(module, ["to_q"]) == ["blocks.0.to_q"]
    assert select_targets(module, "to_v") == ["blocks.0.to_v"]
    assert select_targets(module, ["to_q", "blocks.0.to_q"]) == ["blocks.0.to_q"]
    with pytest.raises(InputError, match=r"'to_k'.*to_q, to_q_other, to_v"):
        select_targets(module, ["to_q", "to_k"])
    with pytest.raises(InputError, match="'to_q'"):
        select_targets(module, ["to_q"], dead=[r"blocks\.{last}\.to_q"])


def test_an_adapter_name_with_a_dot_is_refused(tiny_sd3_dir: Path) -> None:
    with pytest.raises(InputError, match="lora_adapter_name"):
        make_adapter(tiny_sd3_dir, {"model.lora_adapter_name": "v1.0"})


def test_an_adapter_name_that_a_snapshot_needs_is_refused(tiny_sd3_dir: Path) -> None:
    adapter = make_adapter(tiny_sd3_dir, {"model.lora_adapter_name": "ema"}, prepare=False)
    with pytest.raises(InputError, match="lora_adapter_name"):
        adapter.add_snapshot("ema")
