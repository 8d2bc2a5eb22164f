"""`plan` as a user starts it: tables, JSON, and everything that can be given wrong."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml
from safetensors.torch import load_file

from flow_factory.cli.plan import size_text
from flow_factory.hparams import load_config_from_mapping
from flow_factory.trainers.build import build_trainer
from tests.cli.invoke import Done, invoke
from tests.trainers.support import base_mapping

Command = Callable[..., Done]


@pytest.fixture
def bare(tiny_sd3_dir: Path, tmp_path: Path) -> Path:
    """The tiny pipeline without any weights."""
    target = tmp_path / "bare"
    shutil.copytree(tiny_sd3_dir, target, ignore=shutil.ignore_patterns("*.safetensors"))
    return target


@pytest.fixture
def config(bare: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run on it, in the present folder."""
    monkeypatch.chdir(tmp_path)
    mapping = base_mapping(bare, tmp_path)
    mapping["eval"] |= {"eval_freq": 1}
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump(mapping))
    return path


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: invoke(capsys, monkeypatch, "plan", *arguments)


def mapping_of(done: Done) -> dict[str, Any]:
    assert done.code == 0, done.err
    return json.loads(done.out)


def part(plan: dict[str, Any], name: str) -> dict[str, Any]:
    return next(part for part in plan["memory"] if part["name"] == name)


def test_tables(config: Path, command: Command, tmp_path: Path) -> None:
    before = sorted(tmp_path.rglob("*"))
    done = command(config)
    assert done.code == 0, done.err
    assert done.out.startswith("grpo, lora: sd3-5, ") and "cpu in fp32, 1 process\n" in done.out
    lines = [" ".join(line.split()) for line in done.out.splitlines()]
    # The numbers themselves are held by tests/parity/test_planning.py.
    for start in ("transformer SD3Transformer2DModel", "weights", "optimizer", "snapshot ema", "held all the time"):
        assert any(line.startswith(start) for line in lines), start
    assert "each cycle: rollout 32 - 32" in lines  # 4 prompts x 2 samples x 4 steps
    assert "each cycle: optimisation 16 16 48" in lines  # two trained steps; a backward is two forwards
    assert "each cycle: all 48 16 80" in lines
    assert "evaluation of toy (3 prompts, 3 times) 6 - 6" in lines
    assert "the run: 2 cycles, 3 evaluations 114 32 178" in lines
    assert any("with train.enable_gradient_checkpointing: ~ " in line for line in lines)
    assert any(line.startswith("note: estimates (~) come from") for line in lines)
    assert sorted(tmp_path.rglob("*")) == before, "nothing is written"


def test_json_and_overrides(config: Path, command: Command) -> None:
    plan = mapping_of(command(config, "--json"))
    assert plan["rows"]["first"]["network_rows"] == {"low": 48, "high": 48}
    assert plan["rows"]["run"] == {"network_rows": {"low": 114, "high": 114}, "trained": {"low": 32, "high": 32}}
    assert plan["rows"]["evaluation"] == 6 and plan["total_cycles"] == 2 and plan["evaluation_count"] == 3
    assert plan["peak_bytes"] > plan["held_bytes"] > part(plan, "weights")["bytes"] > 0
    twice = mapping_of(command(config, "--json", "model.lora_rank=4"))
    assert twice["trainable"] == 2 * plan["trainable"] and twice["parameters"] == plan["parameters"]
    assert part(twice, "snapshot ema")["bytes"] == 2 * part(plan, "snapshot ema")["bytes"]
    more = mapping_of(command(config, "--json", "train.per_device_batch_size=8", "train.unique_sample_num_per_epoch=4"))
    assert part(more, "activations")["bytes"] == pytest.approx(2 * part(plan, "activations")["bytes"], rel=0.01)
    less = mapping_of(command(config, "--json", "train.enable_gradient_checkpointing=true"))
    assert part(less, "activations")["bytes"] == plan["activations"]["checkpointed"] < plan["activations"]["plain"]


def test_another_device_than_this_one(config: Path, command: Command) -> None:
    """A GPU has bf16, and its AdamW steps all parameters together; a copy asked for on the CPU is on the host."""
    full = ("model.finetune_type=full", "mixed_precision=auto", "train.ema_device=cpu", "train.kl_beta=0.1")
    here = mapping_of(command(config, "--json", *full))
    there = mapping_of(command(config, "--json", "--device", "cuda", *full))
    assert (here["precision"], there["precision"]) == ("fp32", "bf16")
    assert {c["name"]: c["dtype"] for c in there["components"]} == {
        "transformer": "fp32",  # master weights
        "vae": "fp32",
        **dict.fromkeys(("text_encoder", "text_encoder_2", "text_encoder_3"), "bf16"),
    }
    assert (part(here, "snapshot ema")["place"], part(there, "snapshot ema")["place"]) == ("device", "host")
    assert part(there, "snapshot reference")["place"] == "device"
    trained = 4 * there["trainable"]
    assert part(there, "optimizer step")["bytes"] == 2 * trained > part(here, "optimizer step")["bytes"] > trained
    assert part(there, "gradients")["bytes"] == part(there, "snapshot reference")["bytes"] == trained
    # Activations are smaller, but bf16 copies of all weights wait for the backward pass.
    assert there["activations"]["plain"] < here["activations"]["plain"]


def test_several_processes(config: Path, command: Command) -> None:
    one, two = (mapping_of(command(config, "--json", f"num_processes={n}")) for n in (1, 2))
    assert two["rows"]["first"]["network_rows"] == one["rows"]["first"]["network_rows"]
    bucket = 4 * two["trainable"]
    assert part(two, "optimizer step")["bytes"] == part(one, "optimizer step")["bytes"] + bucket
    assert part(two, "samples of a cycle")["bytes"] * 2 == part(one, "samples of a cycle")["bytes"]


def test_muon_keeps_one_moment(config: Path, command: Command) -> None:
    adamw = mapping_of(command(config, "--json"))
    mapping = yaml.safe_load(config.read_text())
    mapping["optimizers"] = [
        {"name": "default", "optimizer": "muon", "learning_rate": mapping["train"].pop("learning_rate")}
    ]
    config.write_text(yaml.safe_dump(mapping))
    muon = mapping_of(command(config, "--json"))
    assert part(muon, "optimizer")["bytes"] == 4 * muon["trainable"] < part(adamw, "optimizer")["bytes"] / 2


def test_the_condition_cache_is_as_large_as_planned(
    config: Path, command: Command, tiny_sd3_dir: Path, tmp_path: Path
) -> None:
    """Bytes of the tensors that building the same run leaves on the disk."""
    plan = mapping_of(command(config, "--json"))
    mapping = yaml.safe_load(config.read_text())
    mapping["model"]["model_name_or_path"] = str(tiny_sd3_dir)
    trainer = build_trainer(load_config_from_mapping(mapping, origin="the test"))
    trainer._close()
    stored = [t for file in (tmp_path / "cache").rglob("*.safetensors") for t in load_file(file).values()]
    assert part(plan, "condition cache")["bytes"] == sum(t.numel() * t.element_size() for t in stored) > 0
    assert "8 encoded prompts" in part(plan, "condition cache")["note"]


@pytest.mark.parametrize(
    ("break_it", "message"),
    [
        (lambda folder: (folder / "transformer" / "config.json").rename(folder / "transformer" / "old"), "is missing"),
        (lambda folder: (folder / "transformer" / "config.json").unlink(), "lacks transformer"),
        (lambda folder: (folder / "model_index.json").unlink(), "has no model_index.json"),
        (lambda folder: (folder / "vae" / "config.json").write_text("{"), "vae/config.json is not valid JSON"),
        (lambda folder: shutil.rmtree(folder / "text_encoder"), "lacks text_encoder"),
    ],
)
def test_a_folder_that_is_not_complete(
    config: Path, bare: Path, command: Command, break_it: Callable[[Path], Any], message: str
) -> None:
    break_it(bare)
    done = command(config)
    assert done.code == 2 and message in done.err.replace("\n", "") and str(bare) in done.err.replace("\n", "")


@pytest.mark.parametrize(
    ("override", "message"),
    [
        ("model.target_components=[unet]", "'unet' of 'sd3-5' cannot be trained; use 'transformer'"),
        ("model.target_modules=[to_z]", "is called 'to_z'. Layers end in:"),
        ("model.model_name_or_path=./nowhere", "'./nowhere' does not exist"),
        ("train.resolution=33", "must be a multiple of"),
        ("train.unique_sample_num_per_epoch=3", "the numbers of a cycle cannot hold"),
        ("train.unique_sample_num_per_epoch=40", "has 8 prompts"),
        ("train.trainer_type=grop", "Did you mean"),
        ("train.learning_rat=1", "learning_rat"),
    ],
)
def test_wrong_values(config: Path, command: Command, override: str, message: str) -> None:
    done = command(config, override)
    assert done.code == 2 and message in done.err.replace("\n", ""), done.err


def test_sizes_have_three_digits() -> None:
    assert [size_text(n) for n in (0, 1023, 1024, 1536, 10 * 1024, 130_744_320 * 4, 3 << 40)] == [
        *("0 B", "1023 B", "1.00 KiB", "1.50 KiB", "10.0 KiB", "499 MiB", "3.00 TiB")
    ]
