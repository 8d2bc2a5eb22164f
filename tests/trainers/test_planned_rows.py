"""The rows that a plan foretells are those that runs log, cycle by cycle, and those that evaluations take."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flow_factory.hparams import load_config, load_config_from_mapping, plan_geometry
from flow_factory.hparams.geometry import Geometry
from flow_factory.models.shapes.skeleton import build_skeleton
from flow_factory.tracking.metrics import read_metrics
from flow_factory.trainers.build import build_trainer
from flow_factory.trainers.planning import RunPlan, plan_run
from flow_factory.trainers.planning.evaluations import CycleFacts, Range, coupled, rollout_rows
from flow_factory.trainers.planning.inputs import Starts, read_prompts
from flow_factory.trainers.planning.report import CycleRows
from flow_factory.trainers.rl.grpo import GRPOTrainer
from tests.trainers.decoupled_cases import run_of
from tests.trainers.offline_support import make_dataset, offline_mapping
from tests.trainers.support import make_config

TINY = "examples/{}/lora/sd3_5/{}.yaml"
SMALL = [
    *("train.unique_sample_num_per_epoch=4", "train.group_size=4", "train.per_device_batch_size=8"),
    *("train.max_epochs=2", "eval.eval_freq=0", "log.monitor=false", "log.verbose=false"),
]
TWO_UPDATES = {"train.gradient_step_per_epoch": 2, "train.num_inner_epochs": 2}
GUIDED = {"train.guidance_scale": 3.0}
RUNS: dict[str, dict[str, Any]] = {
    "grpo": {},
    "grpo guided, with a KL": {**GUIDED, **TWO_UPDATES, "train.kl_beta": 0.1},
    "grpo, only its reference guided": {"train.kl_beta": 0.1, "train.kl_cfg": 2.0},
    "gspo, updates inside a batch": {"train.policy_loss": "gspo", **TWO_UPDATES, "train.gradient_step_per_epoch": 1},
    "gspo, accumulation of one": {"train.policy_loss": "gspo", "train.gradient_accumulation_steps": 1},
    "shared noise": {"train.share_initial_noise": True, "scheduler.sde_steps": [1, 2], "scheduler.num_sde_steps": 1},
    "shared noise, mixed groups": {
        "train.share_initial_noise": True,
        "scheduler.num_sde_steps": 1,
        "data.sampler_type": "global_random",
        **GUIDED,
    },
    "fewer steps after the window": {
        "train.num_inference_steps": 8,
        "scheduler.sde_steps": [0, 1, 2, 3, 4],
        "scheduler.num_sde_steps": 1,
        "scheduler.outside_solver": "dpm2m",
        "scheduler.after_window_fraction": 0.4,
    },
    "dppo": {"train.trainer_type": "dppo"},
    "nft": run_of("nft"),
    "nft off policy": {
        **run_of("nft"),
        **TWO_UPDATES,
        "train.off_policy": True,
        "train.old_model_decay": 2,
        "train.kl_beta": 0.1,
    },
    "nft, two updates": {**run_of("nft"), **TWO_UPDATES, **GUIDED},
    "awm": {**run_of("awm"), **TWO_UPDATES, "train.kl_beta": 0.1, "train.ema_kl_beta": 0.1},
    "dpo": {**run_of("dpo"), "train.group_size": 4},
    "dgpo": run_of("dgpo"),
    "dgpo, guided reference": {**run_of("dgpo"), "train.kl_beta": 0.1, "train.kl_cfg": 2.0},
    "dgpo, average as reference": {**run_of("dgpo"), "train.use_ema_ref": True},
    "crd": run_of("crd"),
    "crd, guided reference": {**run_of("crd"), "train.kl_beta": 0.1, "train.kl_cfg": 2.0, **GUIDED},
}


class Derived(GRPOTrainer):
    """GRPO under another name."""


def assert_logged(run: Path, plan: RunPlan) -> None:
    """Every cycle of a run took the rows that were planned for it."""
    rows = read_metrics(run, kind="cycle")
    assert len(rows) == plan.total_cycles == len(plan.cycles)
    for row, planned in zip(rows, plan.cycles, strict=True):
        assert (row["network_rows"], row["trained_rows"]) == (exactly(planned.network_rows), exactly(planned.trained))


def exactly(planned: Range | None) -> int:
    assert planned is not None and planned.exact
    return planned.low


@pytest.mark.parametrize("name", RUNS)
def test_rows_of_a_run(tiny_sd3_dir: Path, tmp_path: Path, name: str) -> None:
    changes = {"train.seed": 3, **RUNS[name]}
    config = make_config(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2, **changes})
    plan = plan_run(config)
    assert not [note for note in plan.notes if "not known" in note]
    build_trainer(config).start()
    assert_logged(tmp_path / "save" / "run", plan)


@pytest.mark.parametrize("name", ["grpo", "nft", "dpo", "dgpo", "crd"])
def test_rows_of_the_tiny_examples(name: str, tmp_path: Path) -> None:
    """On the embedded pipeline, with the examples' own steps, times and windows."""
    where = [f"log.save_dir={tmp_path}", f"data.cache_dir={tmp_path / 'cache'}", "log.run_name=run"]
    config = load_config(TINY.format(name, "tiny"), [*SMALL, *where])
    plan = plan_run(config)
    build_trainer(config).start()
    assert_logged(tmp_path / "run", plan)


def test_windows_differ_between_cycles(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """With a shared prefix the window decides what a cycle costs; the plan says the range and the mean."""
    changes = {**RUNS["shared noise"], "train.max_epochs": 40, "scheduler.sde_steps": [0, 1, 2]}
    plan = plan_run(make_config(tiny_sd3_dir, tmp_path, changes))
    # Four prompts of two samples, four steps: those before the window (at 0, 1 or 2) once for each prompt.
    costs = [8 * 4 - 4 * first for first in (0, 1, 2)]
    found = plan.spread("rollout")
    assert found is not None
    spread, mean = found
    assert spread == Range(min(costs), max(costs)) and min(costs) < mean < max(costs)
    assert {cycle.rollout for cycle in plan.cycles} == set(costs)


@pytest.mark.parametrize("kind", ["sft", "offline-dpo"])
def test_rows_of_an_epoch_of_stored_examples(tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    data = make_dataset(tmp_path / "data", {"sft": "demonstration", "offline-dpo": "preference"}[kind], count=9)
    mapping = offline_mapping(tiny_sd3_dir, tmp_path, data, kind)
    mapping["train"] |= {"num_train_timesteps": 3, "max_epochs": 1}
    config = load_config_from_mapping(mapping, origin="the test")
    plan = plan_run(config)
    result = build_trainer(config).start()
    evaluated = sum(e.rows for e in plan.evaluations) * (plan.evaluation_count or 0)
    assert plan.unit == "epoch" and evaluated == 0
    (cycle,) = plan.cycles
    assert result.counts["network_rows"] == exactly(cycle.network_rows)
    assert result.counts["trained_rows"] == exactly(cycle.trained)


@pytest.mark.parametrize("solver", ["pipeline", "dynamics"])
def test_rows_of_an_evaluation(tiny_sd3_dir: Path, tmp_path: Path, solver: str) -> None:
    changes = {"eval.eval_freq": 2, "eval.guidance_scale": 2.0, "eval.num_inference_steps": 3, "eval.solver": solver}
    config = make_config(tiny_sd3_dir, tmp_path, {**changes, "train.max_epochs": 5})
    plan = plan_run(config)
    trainer = build_trainer(config)
    before = trainer.adapter.bundle.rows
    trainer.evaluate()
    (evaluation,) = plan.evaluations
    assert evaluation.rows == trainer.adapter.bundle.rows - before == 3 * 3 * 2
    # Before the first cycle, after the second and the fourth, and at the end.
    assert evaluation.prompts == 3 and plan.evaluation_count == 4


def test_a_trainer_from_outside_is_counted_as_what_it_derives_from(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = {"train.trainer_type": "tests.trainers.test_planned_rows.Derived"}
    plan = plan_run(make_config(tiny_sd3_dir, tmp_path, changes))
    assert "Derived is counted as a CoupledTrainer." in plan.notes
    assert plan.cycles[0].trained is not None


def test_of_an_unknown_trainer_only_the_rollout_is_known(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = {"train.trainer_type": "tests.trainers.outside.ShrinkTrainer", "rewards": []}
    plan = plan_run(make_config(tiny_sd3_dir, tmp_path, changes))
    assert plan.cycles[0] == CycleRows(8 * 4, None, None) and plan.spread("network_rows") is None
    assert any("rollouts only" in note for note in plan.notes)
    assert plan.part("activations").bytes and plan.peak_bytes


def test_of_an_unknown_dataset_trainer_the_weights_are_known(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    mapping = offline_mapping(tiny_sd3_dir, tmp_path, make_dataset(tmp_path / "data"))
    mapping["train"] |= {"trainer_type": "tests.trainers.outside.RegressionTrainer"}
    plan = plan_run(load_config_from_mapping(mapping, origin="the test"))
    assert plan.cycles == () and plan.peak_bytes is None and plan.trainable > 0
    assert "reads data of its own" in plan.part("activations").note
    assert plan.to_mapping()["rows"]["first"] is None


@pytest.mark.parametrize(
    ("sampler", "starts"),
    # Eight prompts x four samples on two ranks, in batches of eight.
    [("group_contiguous", 8), ("group_distributed", 16), ("contiguous_shard", 8)],
)
def test_starts_of_groups_on_two_ranks(tiny_sd3_dir: Path, tmp_path: Path, sampler: str, starts: int) -> None:
    found = starts_of(tiny_sd3_dir, tmp_path, sampler)
    assert [found.in_cycle(cycle) for cycle in range(3)] == [starts] * 3


def test_starts_of_mixed_groups_depend_on_the_draw(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Two ranks with sixteen of the 32 samples each, shuffled: between eight and sixteen starts."""
    found = starts_of(tiny_sd3_dir, tmp_path, "distributed_k_repeat")
    counts = {found.in_cycle(cycle) for cycle in range(10)}
    assert all(8 < count <= 16 for count in counts) and len(counts) > 1


def starts_of(pipeline: Path, folder: Path, sampler: str) -> Starts:
    changes = {
        "num_processes": 2,
        "train.unique_sample_num_per_epoch": 8,
        "train.group_size": 4,
        "train.per_device_batch_size": 8,
        "data.sampler_type": sampler,
    }
    config = make_config(pipeline, folder, changes)
    return Starts(config, plan_geometry(config), read_prompts(config, build_skeleton(config)))


def test_rollout_rows_by_hand() -> None:
    guided = (2, 2, 1, 1)
    assert rollout_rows(range(4), (1,), guided, samples=12) == 12 * 6
    # The first step once for each of three starts, the others for every sample.
    assert rollout_rows(range(4), (1,), guided, samples=12, starts=3) == 3 * 2 + 12 * 4
    assert rollout_rows((0, 1, 3), (1,), guided, samples=12) == 12 * 5
    assert rollout_rows(range(4), (), guided, samples=12) == 12 * 6


def test_guidance_of_single_steps_by_hand() -> None:
    """Guidance that is on at some steps only costs there only; W = 2 ranks, 3 batches of 4, two passes."""

    class Arguments:
        num_inner_epochs, kl_beta = 2, 0.5

    geometry = Geometry(2, 4, 4, 6, 3, 2, 6, 2, "group_contiguous", optimized_batches=3)
    facts = CycleFacts(Arguments(), geometry, window=(1, 2), guided=(2, 2, 1, 1), reference=(1, 1, 1, 1))
    found = coupled(facts)
    assert found.trained == Range.exactly((2 + 1) * 24 * 2)
    assert found.frozen == Range.exactly((1 + 1) * 24 * 2)
