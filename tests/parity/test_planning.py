"""What `plan` says of a model without its weights, against the adapter with them: every family, number for number."""

from __future__ import annotations

import shutil
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flow_factory.distributed import Comm
from flow_factory.hparams import load_config_from_mapping
from flow_factory.models.abc import BaseAdapter
from flow_factory.models.components import pipeline_modules
from flow_factory.models.registry import get_adapter_class
from flow_factory.models.shapes.runner import ShapeRuns
from flow_factory.models.shapes.skeleton import build_skeleton
from flow_factory.trainers.build import build_trainer
from flow_factory.trainers.optim import build_optimizers
from flow_factory.trainers.planning import plan_run
from flow_factory.trainers.planning.costs import Batch, Costs
from flow_factory.trainers.planning.memory import component_plans, parameter_parts
from flow_factory.trainers.rl.nft import NFTTrainer
from tests.models.saved_bytes import SavedBytes
from tests.models.support import generators
from tests.parity.bench import Bench, set_path
from tests.parity.cases import all_cases
from tests.parity.cycles import cycle_config

FACTOR = 1.2
"""How far the estimate of activations may be from what autograd saves."""


def config_of(bench: Bench, **changes: Any) -> Any:
    mapping = bench.mapping()
    for path, value in changes.items():
        set_path(mapping, path.replace("__", "."), value)
    return load_config_from_mapping(mapping)


def built(bench: Bench, **changes: Any) -> BaseAdapter[Any]:
    """A real adapter with an average and an old policy."""
    adapter = get_adapter_class(bench.case.key)(config_of(bench, **changes), Comm.single())
    for name in ("old", "ema"):
        adapter.add_snapshot(name)
    adapter.prepare()
    return adapter


def nbytes(tensors: Iterable[Tensor]) -> int:
    return sum(t.untyped_storage().nbytes() for t in tensors)


@pytest.mark.parametrize("finetune", ["lora", "full"])
def test_parameters_and_what_belongs_to_them(bench: Bench, finetune: str) -> None:
    """Exactly: total, trainable, gradients, optimizer state, frozen copies."""
    real = built(bench, model__finetune_type=finetune)
    trained = real.trainable_parameters()
    # A trainer whose snapshots are those of the adapter above: nft keeps its old policy, and there is an average.
    config = config_of(bench, model__finetune_type=finetune, train__ema_decay=0.9)
    skeleton = build_skeleton(config)
    assert {n: p.shape for n, p in skeleton.trainable_parameters().items()} == {n: p.shape for n, p in trained.items()}

    plans = component_plans(skeleton)
    everything = {id(p): p for module in pipeline_modules(real.pipeline).values() for p in module.parameters()}
    copies = (
        {id(v) for s in real.weights.snapshots.values() for v in s.values.values()} if finetune == "lora" else set()
    )
    total = sum(p.numel() for key, p in everything.items() if key not in copies)
    lora = sum(p.numel() for p in trained.values()) if finetune == "lora" else 0
    assert sum(c.parameters for c in plans) == total - lora
    assert sum(c.trainable for c in plans) == sum(p.numel() for p in trained.values())

    parts = {part.name: part.bytes for part in parameter_parts(config, skeleton, NFTTrainer, "cpu")}
    (optimizer,) = build_optimizers(config.optimizer_for("default"), trained).values()
    for parameter in trained.values():
        parameter.grad = torch.ones_like(parameter)
    assert parts["gradients"] == nbytes(p.grad for p in trained.values() if p.grad is not None)
    optimizer.step()
    assert parts["optimizer"] == nbytes(t for state in optimizer.state.values() for t in state.values())
    for name in ("old", "ema"):
        assert parts[f"snapshot {name}"] == nbytes(real.weights.snapshots[name].values.values())


def test_bytes_of_weights(bench: Bench) -> None:
    """In float32, and on five families in the dtypes that frozen parts may be held in: what stays float32 does so."""
    halves = bench.case.name in ("sd3-5", "flux1-dev", "sd1-5", "qwen-image", "wan2_t2v-2.1")
    for dtype in ("fp32", "bf16", "fp16") if halves else ("fp32",):
        change = {"model.frozen_parameters_dtype": dtype}
        real = bench.fresh if dtype == "fp32" else bench.adapter(change)
        plans = component_plans(build_skeleton(config_of(bench, model__frozen_parameters_dtype=dtype)))
        trained = {id(p) for p in real.trainable_parameters().values()}
        for plan in plans:
            module = pipeline_modules(real.pipeline)[plan.name]
            own = {id(t): t for t in [*module.parameters(), *module.buffers()] if id(t) not in trained}
            assert plan.bytes == sum(t.numel() * t.element_size() for t in own.values()), plan.name
            assert plan.dtype == dtype


@cache
def shape_runs(bench: Bench) -> ShapeRuns:
    """One skeleton for the tests below, which change nothing about it."""
    return ShapeRuns(build_skeleton(config_of(bench)))


def test_encoded_prompts_have_the_shapes_of_real_ones(bench: Bench) -> None:
    for setting in bench.case.settings:
        negative = bench.guidance(setting).needs_negative()
        real = bench.fresh.encode_inputs(bench.inputs(), negative, bench.generation(setting))
        planned = shape_runs(bench).encode(bench.inputs(), negative, bench.generation(setting))
        found = {name: (t.shape, t.dtype) for name, t in planned.tensors().items()}
        assert found == {name: (t.shape, t.dtype) for name, t in real.tensors().items()}


def test_rows_of_every_step_are_counted(bench: Bench) -> None:
    """Guidance by one forward of 2 B rows, by two forwards, in a window of steps: as the bundle counts them."""
    runs = shape_runs(bench)
    for setting in bench.case.settings:
        guidance, generation = bench.guidance(setting), bench.generation(setting)
        planned = runs.encode(bench.inputs([0]), guidance.needs_negative(), generation)
        state = runs.adapter.prepare_latents(planned, generators([3]), *bench.case.size, generation)
        grid = runs.adapter.sigma_grid(bench.case.steps, state, planned, generation)
        one = Batch(runs, [planned], 1, bench.case.size, generation, grid)
        real = bench.fresh
        condition = real.prepare_condition_state(
            real.encode_inputs(bench.inputs([0]), guidance.needs_negative(), generation)
        )
        expected = []
        for step in range(grid.length):
            before = real.bundle.rows
            with torch.no_grad():
                real.predict(one.state, grid.times(step, 1, torch.device("cpu")), condition, guidance)
            expected.append(real.bundle.rows - before)
        assert list(Costs(runs, one).on_grid(grid, guidance)) == expected, setting.name


def test_activations_are_near_what_autograd_saves(bench: Bench) -> None:
    setting = bench.case.settings[-1]
    guidance, generation = bench.guidance(setting), bench.generation(setting)
    runs, real = shape_runs(bench), bench.fresh
    count = min(2, len(bench.batch))
    rows = [runs.encode(bench.inputs([0]), guidance.needs_negative(), generation) for _ in range(count)]
    state = runs.adapter.prepare_latents(rows[0], generators([3]), *bench.case.size, generation)
    grid = runs.adapter.sigma_grid(bench.case.steps, state, rows[0], generation)
    batch = Batch(runs, rows, count, bench.case.size, generation, grid)
    times = grid.times(0, count, torch.device("cpu"))
    traced = runs.predict(batch.state, times, batch.condition, guidance, train=True)

    encoded = real.encode_inputs(bench.inputs([0] * count), guidance.needs_negative(), generation)
    with SavedBytes(real.bundle) as saved:
        real.predict(batch.state, times, real.prepare_condition_state(encoded), guidance)
    assert saved.total / FACTOR < traced.held < saved.total * FACTOR
    assert traced.peak >= traced.held
    in_blocks = sum(block.count * block.held for block in traced.blocks)
    assert 0.5 * traced.held < in_blocks < 1.1 * traced.held
    again = runs.predict(batch.state, times, batch.condition, guidance, train=True, checkpointing=True)
    assert again.held < traced.held and again.peak < traced.peak


def test_a_whole_plan(bench: Bench, tmp_path: Path) -> None:
    """Nothing of a cycle is unknown, with condition media where the model takes them; once for each model."""
    if next(case for case in all_cases() if case.key == bench.case.key) is not bench.case:
        pytest.skip("another variant of this model is planned")
    plan = plan_run(cycle_config(bench, "grpo", tmp_path))
    assert plan.peak_bytes is not None and not [part.name for part in plan.memory if part.bytes is None]
    assert plan.activations.checkpointed is not None and plan.activations.plain is not None
    (cycle,) = plan.cycles
    # Two prompts x two samples; one trained step; with or without a second prediction for guidance.
    assert cycle.trained is not None and cycle.trained.low in (4, 8)
    assert cycle.trained.low < cycle.rollout <= 8 * bench.case.steps


def test_decoded_and_stored_media_have_all_their_frames(bench: Bench, tmp_path: Path) -> None:
    """What a cycle's samples hold in the end, and what the encoder of stored media is given."""
    if bench.case.name not in ("sd3-5", "wan2_t2v-2.1"):
        pytest.skip("a picture and a video are enough")
    config = cycle_config(bench, "grpo", tmp_path)
    trainer = build_trainer(config)
    samples = trainer.sample()
    decoded = plan_run(config).part("decoded samples")
    assert decoded.bytes == sum(s.frames.nbytes for s in samples) and decoded.place == "host"  # type: ignore[attr-defined]
    trainer._close()

    (tmp_path / "offline").mkdir()
    stored = plan_run(cycle_config(bench, "sft", tmp_path / "offline")).part("VAE encode")
    shape = samples[0].frames.shape if bench.makes_videos else samples[0].image.shape  # type: ignore[attr-defined]
    assert stored.bytes == shape_runs(bench).encode_media([torch.zeros(shape, dtype=torch.uint8)] * 2).peak
    assert stored.note == ("2 videos of 5 frames of 32 x 48" if bench.makes_videos else "2 pictures of 32 x 48")


def test_a_plan_of_stored_examples(bench: Bench, tmp_path: Path) -> None:
    """Pictures, videos and videos with sound are encoded; once for each model."""
    if next(case for case in all_cases() if case.key == bench.case.key) is not bench.case:
        pytest.skip("another variant of this model is planned")
    if not bench.trains_on_stored_media:
        pytest.skip(f"{bench.case.key} does not learn from stored media")
    plan = plan_run(cycle_config(bench, "sft", tmp_path))
    parts = {part.name: part.bytes for part in plan.memory}
    assert parts["VAE encode"] is not None and plan.activations.plain is not None
    (cycle,) = plan.cycles
    assert cycle.trained is not None and cycle.trained.low == 2


def test_a_folder_without_weights_is_enough(bench: Bench, tmp_path: Path) -> None:
    bare = tmp_path / "bare"
    shutil.copytree(bench.folder, bare, ignore=shutil.ignore_patterns("*.safetensors", "*.bin"))
    assert component_plans(build_skeleton(config_of(bench, model__model_name_or_path=str(bare)))) == component_plans(
        build_skeleton(config_of(bench))
    )
