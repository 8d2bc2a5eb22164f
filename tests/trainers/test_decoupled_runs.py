"""nft, awm, dpo, dgpo and crd end to end on a random pipeline: they move, resume, and do what they say."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.samples import BaseSample
from flow_factory.trainers.rl.dpo import form_pairs
from flow_factory.trainers.state import run_state
from tests.trainers.decoupled_cases import DECOUPLED, FULL, SPREAD, run_of
from tests.trainers.support import assert_same_tree, make_trainer, weights
from tests.trainers.test_resume import metrics


def folder_in(parent: Path, name: str) -> Path:
    folder = parent / name
    folder.mkdir()
    return folder


def updates(folder: Path, kind: str = "update") -> list[dict[str, Any]]:
    lines = (folder / "save" / "run" / "metrics.jsonl").read_text().splitlines()
    return [row for row in map(json.loads, lines) if row["kind"] == kind]


@pytest.mark.parametrize("kind", DECOUPLED)
def test_two_and_two_cycles_equal_four(tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    """Pitfall 22: snapshots, schedules and counters too. Group-coupled ones with groups over several batches."""
    changes = {**run_of(kind), **FULL[kind], **(SPREAD if kind in ("dgpo", "crd") else {})}
    changes |= {"train.max_epochs": 4, "log.save_freq": 2, "train.reference": "start"}
    whole = make_trainer(tiny_sd3_dir, folder_in(tmp_path, "whole"), changes)
    whole.start()
    parts = folder_in(tmp_path, "parts")
    make_trainer(tiny_sd3_dir, parts, {**changes, "train.max_epochs": 2}).start()
    second = make_trainer(tiny_sd3_dir, parts, changes)
    assert second.start().counts["cycles"] == 2
    assert_same_tree(run_state(second), run_state(whole))
    assert metrics(parts) == metrics(tmp_path / "whole")
    snapshots = whole.adapter.variant_state()["snapshots"]
    live = weights(whole)
    for name in set(snapshots) - {"reference", "ema"}:
        moved = [not torch.equal(snapshots[name][key], live[key]) for key in live]
        assert any(moved), f"{name} equals the live weights: the test would not notice a lost snapshot"


@pytest.mark.parametrize("dynamics", ["ODE", "Flow-SDE"])
@pytest.mark.parametrize("kind", DECOUPLED)
def test_parameters_and_rollouts_move(tiny_sd3_dir: Path, tmp_path: Path, kind: str, dynamics: str) -> None:
    """Pitfall 3, with deterministic and with stochastic rollouts."""
    changes = {**run_of(kind), "scheduler.dynamics_type": dynamics, "scheduler.num_sde_steps": 2, "train.max_epochs": 1}
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    before = weights(trainer)
    first = trainer.generate_samples()[0].trajectory.states
    assert list(first) == [4], "only the final latents are kept"
    trainer.start()
    after = weights(trainer)
    assert sum(not torch.equal(before[name], after[name]) for name in before) >= len(before) // 2
    assert updates(tmp_path)[0]["default/param_change_norm"] > 0
    trainer.progress, trainer._plan = type(trainer.progress)(), None
    trainer.sampling_policy = trainer.adapter.train  # type: ignore[method-assign]  # the live weights, not a snapshot
    second = trainer.generate_samples()[0].trajectory.states
    assert not torch.equal(first[4].only, second[4].only)


def test_rollouts_with_a_solver_of_second_order(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """With ODE dynamics every step is `outside_solver`'s, as the recipes of nft and dgpo sample."""
    ends, steps = [], {"train.num_inference_steps": 8, "train.max_epochs": 1}
    for solver in ("euler", "dpm2m"):
        changes = {**run_of("nft"), "scheduler.outside_solver": solver, **steps}
        trainer = make_trainer(tiny_sd3_dir, folder_in(tmp_path, solver), changes)
        ends.append(trainer.generate_samples()[0].trajectory.states[8].only)
    trainer.start()
    assert trainer.step == 1 and not torch.equal(*ends)
    assert torch.allclose(*ends, atol=0.5), "another solver of the same flow"


# Which field weighs a term towards another policy, and what else makes it visible.
KL_TERMS = {
    "nft": ("kl_beta", {"gradient_step_per_epoch": 3}),
    "awm": ("kl_beta", {"gradient_step_per_epoch": 3, "clip_range": 1.0}),
    "awm-ema": ("ema_kl_beta", {"gradient_step_per_epoch": 3, "clip_range": 1.0}),
    "dgpo": ("kl_beta", {"gradient_step_per_epoch": 2}),
    "dgpo-x": ("kl_beta", {"gradient_step_per_epoch": 2, "kl_type": "x-based"}),
    "crd": ("kl_beta", {"gradient_step_per_epoch": 3, "kl_cfg": 1.0, "reward_adaptive_kl": False}),
}


@pytest.mark.parametrize("case", KL_TERMS)
def test_kl_changes_the_gradient(tiny_sd3_dir: Path, tmp_path: Path, case: str) -> None:
    """Pitfall 1: the first update is at the reference, where the term and its gradient vanish; the second is not."""
    field, fields = KL_TERMS[case]
    norms = []
    for number, beta in enumerate((0.0, 10.0)):
        folder = folder_in(tmp_path, str(number))
        changes = {**run_of(case.partition("-")[0], **fields), f"train.{field}": beta, "train.max_epochs": 1}
        make_trainer(tiny_sd3_dir, folder, changes).start()
        norms.append([row["default/grad_norm"] for row in updates(folder)])
    assert norms[0][0] == norms[1][0]
    assert norms[0][1] != norms[1][1]


def test_dpo_has_no_kl_but_its_reference(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """beta is what holds the policy at the reference: it scales the gradient there."""
    norms = []
    for beta in (1.0, 3.0):
        folder = folder_in(tmp_path, str(beta))
        make_trainer(tiny_sd3_dir, folder, {**run_of("dpo", beta=beta), "train.max_epochs": 1}).start()
        norms.append(updates(folder)[0]["default/grad_norm"])
    assert norms[1] == pytest.approx(3 * norms[0], rel=1e-5)


def test_awm_ratio_is_one_until_the_first_update_and_the_clip_can_bind_after_it(
    tiny_sd3_dir: Path, tmp_path: Path
) -> None:
    changes = run_of("awm", gradient_step_per_epoch=3, clip_range=1e-6, learning_rate=1e-2, num_inner_epochs=2)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {**changes, "train.max_epochs": 2})
    trainer.start()
    rows = updates(tmp_path)
    assert len(rows) == 12 == trainer.step
    assert [row["default/ratio_deviation_max"] == 0.0 for row in rows] == [True, *[False] * 5] * 2
    assert max(row["default/clip_fraction"] for row in rows) > 0


def test_nft_on_policy_evaluates_no_old_policy_before_the_first_update(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """The same numbers as with the old policy evaluated, which has the same weights until then."""
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {**run_of("nft", gradient_step_per_epoch=3), "train.max_epochs": 1})
    evaluated: list[bool] = []
    original = trainer._old_velocity  # type: ignore[attr-defined]

    def counted(batch: Any, point: Any) -> Any:
        old = original(batch, point)
        if old is None:
            frozen = trainer.frozen_velocity(trainer.snapshot("old"), batch, point)  # type: ignore[attr-defined]
            assert torch.equal(frozen.only, trainer.velocity(batch, point).detach().only)  # type: ignore[attr-defined]
        evaluated.append(old is not None)
        return old

    trainer._old_velocity = counted  # type: ignore[attr-defined]
    trainer.start()
    assert evaluated == [False] * 2 + [True] * 4


def test_each_arm_of_a_pair_has_its_own_condition_noise_shared(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 15: conditions follow their samples through pairing, shuffling and stacking."""
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {**run_of("dpo", num_train_timesteps=2), "train.max_epochs": 1})
    seen = 0

    def watch(batch: Any, point: Any, pair_weights: torch.Tensor) -> None:
        nonlocal seen
        for row, sample in enumerate(batch.samples):
            for name, tensor in sample.condition.tensors().items():
                assert torch.equal(batch.condition.tensors()[name][row], tensor[0]), (row, name)
        winners, losers = batch.samples[: len(pair_weights)], batch.samples[len(pair_weights) :]
        noise = (point.target.only + point.clean.only).chunk(2)
        assert torch.allclose(*noise, atol=1e-5) and torch.equal(*point.sigma.chunk(2))
        for winner, loser in zip(winners, losers, strict=True):
            assert winner.group_id == loser.group_id and winner.advantage > loser.advantage
            seen += 1
        original(batch, point, pair_weights)

    original = trainer._term  # type: ignore[attr-defined]
    trainer._term = watch  # type: ignore[attr-defined]
    # A condition that differs inside a group: every sample's embedding is marked with its own number.
    make_feedback = trainer.prepare_feedback

    def marked(samples: list[BaseSample]) -> None:
        make_feedback(samples)
        for number, sample in enumerate(samples):
            tensors = {n: t + 0.01 * number for n, t in sample.condition.tensors().items()}
            sample.condition = type(sample.condition).from_tensors(tensors)

    trainer.prepare_feedback = marked  # type: ignore[method-assign]
    trainer.start()
    assert seen == 4 * 2


class Steps:
    """What the pairing sees of a sample."""

    def __init__(self, group: int, member: int, advantage: float, **rewards: float | None) -> None:
        self.source_id, self.group_id, self.member = 1, group, member
        self.advantage, self.rewards = advantage, rewards


def pairs(samples: Sequence[Steps]) -> list[tuple[int, int, int, float]]:
    found = form_pairs(list(samples))  # type: ignore[arg-type]
    return [(p.winner.group_id, p.winner.member, p.loser.member, p.weight) for p in found]


def test_pairs_are_best_against_worst_and_ties_give_none() -> None:
    samples = [
        Steps(8, 2, -1.0, r=1.0), Steps(8, 0, 0.5, r=1.0), Steps(8, 1, 0.5, r=1.0),
        Steps(3, 1, 0.0, r=1.0), Steps(3, 0, 0.0, r=1.0),
        # A failed score has advantage 0, which would beat or lose against others by nothing that was measured.
        Steps(5, 0, 0.0, r=None), Steps(5, 1, -0.3, r=1.0), Steps(5, 2, -0.1, r=1.0),
        Steps(6, 0, 0.0, r=None), Steps(6, 1, 0.0, r=None),
        Steps(7, 0, 0.0, r=None), Steps(7, 1, 0.7, r=1.0),
    ]  # fmt: skip
    assert pairs(samples) == [(3, 0, 0, 0.0), (5, 2, 1, 1.0), (6, 0, 0, 0.0), (7, 1, 1, 0.0), (8, 0, 2, 1.0)]
    assert pairs(samples[::-1]) == pairs(samples)


def test_groups_of_ties_are_counted_and_move_nothing(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = {**run_of("dpo", num_train_timesteps=2), "train.max_epochs": 1}
    changes["rewards"] = [{"name": "same", "reward_model": "tests.trainers.rewards.Constant"}]
    result = make_trainer(tiny_sd3_dir, tmp_path, changes).start()
    assert result.counts["optimizer_steps"] == 1, "the accumulation window holds"
    (cycle,) = updates(tmp_path, "cycle")
    assert cycle["pairs"] == 0 and cycle["tied_groups"] == 4
    assert updates(tmp_path)[0]["default/grad_norm"] == 0.0


@pytest.mark.parametrize("kind", DECOUPLED)
def test_samples_that_could_not_be_scored_get_no_gradient(tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    """A failed score is not a middling one: whatever is done to such a sample, no update changes."""
    spread: dict[str, Any] = {
        **SPREAD,
        "train.max_epochs": 1,
        "train.gradient_step_per_epoch": 2,
        "train.num_train_timesteps": 2,
    }
    spread["rewards"] = [{"name": "some", "reward_model": "tests.trainers.rewards.SometimesScores"}]
    if kind == "crd":  # distance to the reference is kept by every sample
        spread |= {"train.kl_beta": 0.0, "train.reward_adaptive_kl": False}
    norms = []
    for shift in (0.0, 5.0):
        trainer = make_trainer(tiny_sd3_dir, folder_in(tmp_path, str(shift)), {**run_of(kind), **spread})
        feedback = trainer.prepare_feedback

        def moved(samples: list[BaseSample], feedback: Any = feedback, shift: float = shift) -> None:
            feedback(samples)
            for sample in samples:
                if sample.member == 1:
                    assert sample.rewards == {"some": None} and sample.advantage == 0.0
                    sample.trajectory.states[4].only.add_(shift)

        trainer.prepare_feedback = moved  # type: ignore[method-assign]
        trainer.start()
        norms.append([row["default/grad_norm"] for row in updates(tmp_path / str(shift))])
    assert norms[0][0] > 0 and norms[0] == norms[1]


def test_dgpo_samples_with_the_fast_average_after_the_switch(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = run_of("dgpo", switch_ema_ref=1, ema_ref_ramp_rate=0.2, gradient_step_per_epoch=2)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, {**changes, "train.max_epochs": 2})
    policies = []
    inference = trainer.adapter.inference

    def noted(*args: Any, **kwargs: Any) -> Any:
        policies.append(trainer.adapter.variants.active)
        return inference(*args, **kwargs)

    trainer.adapter.inference = noted  # type: ignore[method-assign]
    trainer.start()
    assert policies == ["default"] * 2 + ["fast_ema"] * 2


def test_dgpo_fast_average_follows_every_update(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """After update n the decay is min(0.2 n, 0.3): written out against the weights after each step."""
    changes = run_of("dgpo", ema_ref_ramp_rate=0.2, gradient_step_per_epoch=2, max_epochs=1)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    expected = {n: p.clone() for n, p in trainer.own_snapshot("fast_ema").values.items()}  # type: ignore[attr-defined]
    follow = trainer.after_update  # type: ignore[attr-defined]

    def checked() -> None:
        follow()
        decay = min(0.2 * trainer.step, 0.3)
        for name, live in weights(trainer).items():
            expected[name] = decay * expected[name] + (1 - decay) * live
            found = trainer.own_snapshot("fast_ema").values[name]  # type: ignore[attr-defined]
            assert torch.allclose(found, expected[name], atol=1e-7)

    trainer.after_update = checked  # type: ignore[attr-defined]
    trainer.start()
    assert trainer.step == 2


def test_crd_snapshots_move_by_their_own_schedules_at_the_end_of_a_cycle(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    changes = run_of("crd", old_model_decay="0-0.25-0.1-0.999", sampling_model_decay="5-0.0-0.1-0.9", max_epochs=1)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes)
    start = weights(trainer)
    trainer.start()
    live = weights(trainer)
    snapshots = trainer.adapter.variant_state()["snapshots"]
    for name, value in live.items():
        assert torch.equal(snapshots["sampling"][name], value)
        assert torch.allclose(snapshots["old"][name], 0.35 * start[name] + 0.65 * value, atol=1e-7)


@pytest.mark.parametrize("kind", ["dgpo", "crd"])
def test_groups_over_several_batches_equal_one_batch(tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    """Group numbers are those of complete groups: 2 rows a batch, 4 and 8 give one gradient."""
    found = {}
    for rows in (2, 4, 8):
        changes = {**run_of(kind), **FULL[kind], **SPREAD, "train.per_device_batch_size": rows}
        folder = folder_in(tmp_path, str(rows))
        trainer = make_trainer(tiny_sd3_dir, folder, {**changes, "train.max_epochs": 2})
        trainer.start()
        found[rows] = [row["default/grad_norm"] for row in updates(folder)]
    assert found[2][0] > 0
    for rows in (2, 4):
        assert found[rows] == pytest.approx(found[8], rel=2e-4)


def test_a_guided_reference_encodes_negatives_for_an_unguided_rollout(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 35."""
    trainer = make_trainer(
        tiny_sd3_dir, tmp_path, {**run_of("crd", guidance_scale=1.0, kl_cfg=3.0), "train.max_epochs": 1}
    )
    sample = trainer.generate_samples()[0]
    assert "negative_prompt_embeds" in sample.condition.tensors()
    trainer.start()
    assert updates(tmp_path)[0]["default/kl"] > 0, "the guided reference differs from the unguided policy at once"


@pytest.mark.parametrize("kind", ["nft", "dgpo"])
def test_full_finetuning_runs(tiny_sd3_dir: Path, tmp_path: Path, kind: str) -> None:
    changes = {**run_of(kind), **FULL[kind], "model.finetune_type": "full", "train.learning_rate": 1e-5}
    result = make_trainer(
        tiny_sd3_dir, tmp_path, {**changes, "train.ema_ref_device": "cpu"} if kind == "dgpo" else changes
    )
    assert len(result.start().losses) == 2
