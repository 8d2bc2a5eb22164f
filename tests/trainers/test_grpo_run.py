"""GRPO end to end on a random pipeline: on-policy, moving, synchronous with its own arithmetic."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError, RunError
from tests.trainers.rewards import Closing
from tests.trainers.support import make_config, make_trainer, weights


def updates(folder: Path, kind: str = "update") -> list[dict[str, Any]]:
    lines = (folder / "save" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("dynamics", ["Flow-SDE", "Dance-SDE", "CPS"])
@pytest.mark.parametrize("guidance", [1.0, 3.0])
def test_first_ratio_is_exactly_one(tiny_sd3_dir: Path, tmp_path: Path, dynamics: str, guidance: float) -> None:
    """Pitfall 2: through rollout, storage, shuffling, stacking and replay, without and with guidance."""
    changes = {
        "scheduler.dynamics_type": dynamics,
        "scheduler.noise_level": 0.3,
        "train.guidance_scale": guidance,
        "train.max_epochs": 1,
    }
    make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    first = updates(tmp_path)[0]
    assert first["default/ratio_deviation_max"] == 0.0
    assert first["default/ratio_mean"] == 1.0


@pytest.mark.parametrize("storage", [None, "bf16", "fp16"])
def test_stored_precision_does_not_move_the_first_ratio(
    tiny_sd3_dir: Path, tmp_path: Path, storage: str | None
) -> None:
    """Pitfall 2: next state stored in a lower precision than the log-prob saw."""
    make_trainer(tiny_sd3_dir, tmp_path, {"train.latent_storage_dtype": storage, "train.max_epochs": 1}).start()
    assert updates(tmp_path)[0]["default/ratio_deviation_max"] == 0.0


def test_a_first_ratio_that_precision_moves_is_said_once(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Pitfall 2: noise of the size of bf16's rounding against a clip range of 1e-4."""
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2})
    original = type(trainer.adapter).predict_velocity

    def rounded(self: Any, *args: Any) -> Any:
        return original(self, *args).map(lambda v: v + 1e-2 * torch.randn_like(v))

    monkeypatch.setattr(type(trainer.adapter), "predict_velocity", rounded)
    trainer.start()
    assert sum("more than half of train.clip_range" in record.message for record in caplog.records) == 1


def test_parameters_and_rollouts_move(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 3: one update changes the weights, and the weights change the pictures' latents."""
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1})
    before = weights(trainer)
    first = trainer.generate_samples()[0].trajectory.states
    trainer.start()
    after = weights(trainer)
    moved = [name for name in before if not torch.equal(before[name], after[name])]
    assert len(moved) == len(before) // 2 or len(moved) == len(before)  # lora_A may wait while lora_B is zero
    trainer.progress = type(trainer.progress)()
    trainer._plan = None
    second = trainer.generate_samples()[0].trajectory.states
    assert not torch.equal(next(iter(first.values())).only, next(iter(second.values())).only)
    assert updates(tmp_path)[0]["default/param_change_norm"] > 0


def test_rows_through_the_network_are_counted(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The unit in which algorithms are compared: each picture once a step, each trained transition once more."""
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 2, "train.guidance_scale": 1.0})
    samples, steps = trainer.geometry.samples_per_cycle, trainer.training_args.num_inference_steps
    counts = trainer.start().counts
    trained = 2 * samples * len(trainer.rollout_plan.window)
    assert counts["trained_rows"] == trained
    assert counts["network_rows"] == 2 * samples * steps + trained
    rows = [row["network_rows"] for row in updates(tmp_path, "cycle")]
    assert rows == [counts["network_rows"] / 2] * 2


def test_same_seed_same_numbers(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    a, b = (make_trainer(tiny_sd3_dir, tmp_path / n) for n in "ab")
    assert a.start().losses == b.start().losses
    for name, value in weights(a).items():
        assert torch.equal(value, weights(b)[name]), name


@pytest.mark.parametrize("kl_type", ["v-based", "x-based", "transition", "transition_dt"])
def test_kl_changes_the_gradient(tiny_sd3_dir: Path, tmp_path: Path, kl_type: str) -> None:
    """Pitfall 1: the gradient changes with kl_beta. The second update is the first away from the reference."""
    norms = []
    for number, beta in enumerate((0.0, 10.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        changes = {
            "train.kl_beta": beta,
            "train.kl_type": kl_type,
            "train.gradient_step_per_epoch": 2,
            "train.max_epochs": 1,
        }
        make_trainer(tiny_sd3_dir, folder, changes).start()
        norms.append([row["default/grad_norm"] for row in updates(folder)])
    assert norms[0][0] == norms[1][0]  # at the reference the KL term and its gradient are zero
    assert norms[0][1] != norms[1][1]


@pytest.mark.parametrize("updates_per_cycle", [1, 2, 4])
@pytest.mark.parametrize("sde_steps", [1, 2])
@pytest.mark.parametrize("inner", [1, 2])
def test_optimizer_steps_per_cycle(
    tiny_sd3_dir: Path, tmp_path: Path, updates_per_cycle: int, sde_steps: int, inner: int
) -> None:
    """Pitfall 10: two batches x window terms give exactly `gradient_step_per_epoch` steps an inner epoch."""
    changes = {
        "train.gradient_step_per_epoch": updates_per_cycle,
        "scheduler.num_sde_steps": sde_steps,
        "train.num_inner_epochs": inner,
        "train.max_epochs": 1,
    }
    if 2 % updates_per_cycle:
        with pytest.raises(InputError, match="gradient_step_per_epoch G=4"):
            make_config(tiny_sd3_dir, tmp_path, changes)
        return
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    result = trainer.start()
    assert result.counts["optimizer_steps"] == updates_per_cycle * inner == trainer.step == len(result.losses)


def test_accumulation_layouts_agree(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 21: 1 x 8, 2 x 4 and 8 x 1 (batches x rows) give one update to 1e-6."""
    results = {}
    for rows in (1, 4, 8):
        folder = tmp_path / str(rows)
        folder.mkdir()
        trainer = make_trainer(
            tiny_sd3_dir,
            folder,
            {"train.per_device_batch_size": rows, "train.max_epochs": 1, "train.max_grad_norm": None},
        )
        before = weights(trainer)
        gradients: dict[str, torch.Tensor] = {}
        step = trainer.roles.primary.optimizers["adamw"].step

        def keep(
            *args: Any, _trainer: Any = trainer, _into: dict[str, torch.Tensor] = gradients, _step: Any = step
        ) -> Any:
            _into.update(
                {n: p.grad.clone() for n, p in _trainer.adapter.trainable_parameters().items() if p.grad is not None}
            )
            return _step(*args)

        trainer.roles.primary.optimizers["adamw"].step = keep  # type: ignore[method-assign]
        trainer.start()
        assert before.keys() == weights(trainer).keys()
        results[rows] = gradients
    scale = max(g.abs().max().item() for g in results[8].values())
    assert scale > 0
    for rows in (1, 4):
        for name, gradient in results[rows].items():
            assert (gradient - results[8][name]).abs().max().item() <= 1e-6 * max(1.0, scale), (rows, name)


def test_zero_advantages_give_zero_gradient_and_are_counted(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = {"rewards": [{"name": "same", "reward_model": "tests.trainers.rewards.Constant"}], "train.max_epochs": 1}
    make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    assert updates(tmp_path)[0]["default/grad_norm"] == 0.0
    assert updates(tmp_path, "cycle")[0]["reward/zero_std_ratio"] == 1.0


def test_non_finite_loss_stops_before_the_step(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1})
    before = weights(trainer)
    original = trainer.policy_loss  # type: ignore[attr-defined]

    def broken(*args: Any) -> Any:
        loss, metrics = original(*args)
        return loss * float("nan"), metrics

    monkeypatch.setattr(trainer, "policy_loss", broken)
    with pytest.raises(RunError, match="update 1 of role 'default' is not finite"):
        trainer.start()
    for name, value in weights(trainer).items():
        assert torch.equal(value, before[name])
    assert trainer.progress.rollout_iteration == 0


def test_nan_reward_stops_with_name_prompt_and_picture(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 30."""
    changes = {"rewards": [{"name": "bad", "reward_model": "tests.trainers.rewards.NotANumber"}]}
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    with pytest.raises(RunError, match=r"'bad'.*(nan|NaN).*"):
        trainer.start()
    assert list((tmp_path / "save" / "run" / "failed_samples").glob("*.png"))


def test_full_finetuning_runs(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = {"model.finetune_type": "full", "train.learning_rate": 1e-5, "train.kl_beta": 0.01}
    result = make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    assert len(result.losses) == 2
    assert updates(tmp_path)[0]["default/ratio_deviation_max"] == 0.0
    assert updates(tmp_path)[1]["default/kl"] > 0.0


@pytest.mark.parametrize("finetune_type", ["lora", "full"])
def test_the_evaluated_average_is_exported_beside_the_live_weights(
    tiny_sd3_dir: Path, tmp_path: Path, finetune_type: str
) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {"model.finetune_type": finetune_type})
    checkpoint = trainer.start().checkpoint
    assert checkpoint is not None
    for name, variant in ((finetune_type, "default"), (f"{finetune_type}_ema", "ema")):
        changes = {
            "model.finetune_type": finetune_type,
            "model.resume_path": str(checkpoint / name),
            "log.run_name": name,
        }
        read = weights(make_trainer(tiny_sd3_dir, tmp_path, changes))
        values = trainer.adapter.variant_state()
        expected = values["roles"]["default"] if variant == "default" else values["snapshots"]["ema"]
        assert all(torch.equal(read[key], expected[key]) for key in expected)
    assert any(not torch.equal(values["roles"]["default"][k], v) for k, v in values["snapshots"]["ema"].items())


def test_evaluation_counts_every_prompt_once(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 19 (one process; two are in test_two_processes): a short last batch, not a padded one."""
    changes = {"eval.eval_freq": 1, "eval.per_device_batch_size": 2, "train.max_epochs": 1}
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    batches = list(trainer.evaluator.generate("toy"))
    assert [[s.index for s in samples] for samples in batches] == [[0, 1], [2]]
    result = trainer.start()
    assert [e["cycle"] for e in result.evaluations] == [0.0, 1.0]
    assert (tmp_path / "save/run/samples/toy/cycle-000000.png").exists()
    assert (tmp_path / "save/run/samples/toy/before_after.png").exists()


def test_the_grid_may_change_when_a_run_is_resumed(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """`eval:` is free to change: the comparison shows the pictures that both evaluations have."""
    changes = {"eval.eval_freq": 1, "train.max_epochs": 1, "eval.num_grid_images": 2}
    make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    comparison = tmp_path / "save/run/samples/toy/before_after.png"
    comparison.unlink()
    changes |= {"train.max_epochs": 2, "eval.num_grid_images": 3}
    make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    assert comparison.exists()


def test_rewards_are_built_once_and_closed_once(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    rewards = {"rewards": [{"name": "red", "reward_model": "tests.trainers.rewards.Closing"}], "train.max_epochs": 1}
    Closing.reset()
    make_trainer(tiny_sd3_dir, tmp_path, {**rewards, "eval.eval_freq": 1}).start()
    assert (Closing.built, Closing.closed) == (1, 1)
    Closing.reset()
    rewards |= {"eval_rewards": rewards["rewards"], "log.run_name": "second"}
    make_trainer(tiny_sd3_dir, tmp_path, {**rewards, "eval.eval_freq": 1}).start()
    assert (Closing.built, Closing.closed) == (2, 2)


def test_a_trainer_that_cannot_be_built_lets_go_of_its_folder(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from flow_factory.tracking import run_folder
    from flow_factory.trainers import setup

    def broken(*args: Any) -> Any:
        raise InputError("no such weights")

    monkeypatch.setattr(setup, "build_adapter", broken)
    with pytest.raises(InputError, match="no such weights"):
        make_trainer(tiny_sd3_dir, tmp_path)
    assert (tmp_path / "save/run").resolve() not in run_folder._locks


def test_a_reward_that_never_scores_ends_the_run(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 29: failed is not 0; a cycle in which nothing could be scored has nothing to learn from."""
    rewards = [{"name": "down", "reward_model": "tests.trainers.rewards.NeverScores"}]
    with pytest.raises(RunError, match=r"scoring failed for every sample of cycle 0 .*down"):
        make_trainer(tiny_sd3_dir, tmp_path, {"rewards": rewards}).start()


def test_a_reward_for_another_output_is_refused_before_loading(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    rewards = [{"name": "clip", "reward_model": "tests.trainers.rewards.WantsVideo"}]
    with pytest.raises(InputError, match=r"rewards\[clip\].*'video'.*T2ISample"):
        make_trainer(tiny_sd3_dir, tmp_path, {"rewards": rewards})
    assert not (tmp_path / "save").exists()
