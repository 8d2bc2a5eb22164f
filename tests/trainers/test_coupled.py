"""The GRPO family end to end on a random pipeline: on-policy, moving with its KL, counted, and resumed bit for bit."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from flow_factory.errors import InputError, RunError
from flow_factory.hparams import load_config_from_mapping
from flow_factory.trainers.state import run_state
from tests.trainers.support import assert_same_tree, make_config, make_trainer
from tests.trainers.test_grpo_run import updates
from tests.trainers.test_resume import metrics

# Fields of `train:` that make a member of the family of the base run.
FAMILY: dict[str, dict[str, Any]] = {
    "grpo-guard": {"trainer_type": "grpo-guard"},
    "dppo": {"trainer_type": "dppo"},
    "dppo, v-based": {"trainer_type": "dppo", "kl_mask_type": "v-based"},
    "gspo": {"policy_loss": "gspo"},
    "reinforce": {"policy_loss": "reinforce"},
    "tempflow": {"noise_weighting": "tempflow"},
}


def changes(member: str, **more: Any) -> dict[str, Any]:
    return {
        **{f"train.{k}": v for k, v in FAMILY[member].items()},
        **{k.replace("__", "."): v for k, v in more.items()},
    }


@pytest.mark.parametrize("dynamics", ["Flow-SDE", "Dance-SDE", "CPS"])
@pytest.mark.parametrize("member", [m for m in FAMILY if m not in ("reinforce", "tempflow")])
def test_first_ratio_is_exactly_one(tiny_sd3_dir: Path, tmp_path: Path, member: str, dynamics: str) -> None:
    """Pitfall 2, with latents stored in half precision: means and velocities of the rollout are kept in float32."""
    more = {
        "scheduler.dynamics_type": dynamics,
        "scheduler.noise_level": 0.3,
        "train.max_epochs": 1,
        "train.latent_storage_dtype": "bf16",
    }
    make_trainer(tiny_sd3_dir, tmp_path, {**changes(member), **more}).start()
    first = updates(tmp_path)[0]
    assert first["default/ratio_deviation_max"] == 0.0 and first["default/ratio_mean"] == 1.0
    assert first.get("default/divergence_max", 0.0) == 0.0
    assert first["default/grad_norm"] > 0.0 and first["default/param_change_norm"] > 0.0


@pytest.mark.parametrize("member", FAMILY)
def test_kl_changes_the_gradient(tiny_sd3_dir: Path, tmp_path: Path, member: str) -> None:
    """Pitfall 1. The second update is the first away from the reference."""
    norms = []
    for number, beta in enumerate((0.0, 10.0)):
        folder = tmp_path / str(number)
        folder.mkdir()
        more = changes(member, train__kl_beta=beta, train__gradient_step_per_epoch=2, train__max_epochs=1)
        make_trainer(tiny_sd3_dir, folder, more).start()
        norms.append([row["default/grad_norm"] for row in updates(folder)])
    assert norms[0][0] == norms[1][0] and norms[0][1] != norms[1][1]


@pytest.mark.parametrize(("trainer", "field"), [("grpo", "kl_cfg"), ("dppo", "kl_guidance_scale")])
def test_the_reference_can_have_its_own_guidance(tiny_sd3_dir: Path, tmp_path: Path, trainer: str, field: str) -> None:
    """Pitfall 35: negatives are encoded although the rollout is not guided; the KL is there from the first update."""
    more = {f"train.{field}": 3.0, "train.kl_beta": 0.1, "train.trainer_type": trainer, "train.max_epochs": 1}
    make_trainer(tiny_sd3_dir, tmp_path, more).start()
    row = updates(tmp_path)[0]
    assert row["default/kl"] > 0.0 and row["default/ratio_deviation_max"] == 0.0
    with pytest.raises(InputError, match=rf"train\.{field}.*no effect with kl_beta 0"):
        make_config(tiny_sd3_dir, tmp_path, {**more, "train.kl_beta": 0.0})


@pytest.mark.parametrize("member", FAMILY)
@pytest.mark.parametrize(("steps", "window", "per_cycle"), [(2, 1, 2), (1, 2, 1), (2, 2, 1)])
def test_optimizer_steps_per_cycle(
    tiny_sd3_dir: Path, tmp_path: Path, member: str, steps: int, window: int, per_cycle: int
) -> None:
    """Pitfall 10."""
    more = changes(member, scheduler__num_sde_steps=window, train__gradient_step_per_epoch=per_cycle)
    more |= {"train.num_inner_epochs": steps, "train.max_epochs": 1}
    trainer = make_trainer(tiny_sd3_dir, tmp_path, more)
    assert trainer.start().counts["optimizer_steps"] == per_cycle * steps == trainer.step


def test_one_window_for_all_groups_members_and_batches(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 17: the noise of every sample of a cycle, however samples are dealt; the window moves between cycles."""
    more = {"scheduler.num_sde_steps": 1, "train.max_epochs": 4}
    layouts = ({}, {"data.sampler_type": "global_random", "train.per_device_batch_size": 2, "log.run_name": "other"})
    seen: list[dict[int, set[tuple[float, ...]]]] = []
    for layout in layouts:
        trainer = make_trainer(tiny_sd3_dir, tmp_path, {**more, **layout})
        found: dict[int, set[tuple[float, ...]]] = {}
        optimize = trainer.optimize

        def noted(samples: Any, found: Any = found, optimize: Any = optimize) -> None:
            for sample in samples:
                found.setdefault(sample.key.cycle, set()).add(sample.trajectory.noise_levels)
            optimize(samples)

        trainer.optimize = noted  # type: ignore[method-assign]
        trainer.start()
        seen.append(found)
    assert seen[0] == seen[1] and list(seen[0]) == [0, 1, 2, 3]
    assert all(len(levels) == 1 for levels in seen[0].values())
    assert len(set.union(*seen[0].values())) > 1


STATEFUL = {
    "grpo, reinforce": {"advantage_aggregation": "reinforce", "advantage_params": {"decay": 0.5}},
    "grpo, per_prompt": {"advantage_aggregation": "per_prompt", "advantage_params": {"min_count": 3}},
}


@pytest.mark.parametrize("member", [*FAMILY, *STATEFUL])
def test_exact_resume(tiny_sd3_dir: Path, tmp_path: Path, member: str) -> None:
    """Pitfall 22: one and one cycles equal two, with a sliding window and a shared start that move in between."""
    fields = {**FAMILY, **STATEFUL}[member]
    more = {f"train.{name}": value for name, value in fields.items()}
    more |= {
        "train.kl_beta": 0.01,
        "train.share_initial_noise": True,
        "scheduler.sde_window": "sliding",
        "scheduler.sliding_interval": 1,
        "scheduler.outside_solver": "dpm2m",
    }
    states = []
    for name, lengths in (("whole", (3,)), ("parts", (2, 3))):
        folder = tmp_path / name
        folder.mkdir()
        for length in lengths:
            trainer = make_trainer(tiny_sd3_dir, folder, {**more, "train.max_epochs": length})
            result = trainer.start()
        assert result.counts["cycles"] == 3 - (lengths[0] if len(lengths) > 1 else 0)
        states.append((run_state(trainer), metrics(folder)))
    assert_same_tree(states[1][0], states[0][0])
    assert states[0][1] == states[1][1]
    if member in STATEFUL:
        assert states[0][0]["trainer"]["advantage"] != {}


def test_gspo_clips_samples_as_a_whole(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """With a clip range that any change leaves: on the second update both steps of a sample are cut, or neither."""
    more = changes("gspo", train__clip_range=1e-9, train__gradient_step_per_epoch=2, train__max_epochs=1)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, more)
    seen: list[torch.Tensor] = []
    original = trainer.policy_loss  # type: ignore[attr-defined]

    def watched(batch: Any, transition: Any, policy: Any, sequence: Any) -> Any:
        assert not sequence.requires_grad and sequence.dtype == torch.float64
        seen.append(sequence)
        return original(batch, transition, policy, sequence)

    trainer.policy_loss = watched  # type: ignore[attr-defined]
    trainer.start()
    assert len(seen) == 4  # two batches x two steps
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[2], seen[3])  # one ratio per sample
    assert not bool(seen[0].any()) and bool(seen[2].all())  # 0 before the first update, not after it


def test_gspos_ratio_follows_the_weights(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """An update in the middle of a batch: the ratio of its later steps is that of the new weights."""
    more = changes("gspo", train__max_epochs=1, train__gradient_accumulation_steps=1)
    trainer = make_trainer(tiny_sd3_dir, tmp_path, more)
    seen: list[torch.Tensor] = []
    original = trainer.policy_loss  # type: ignore[attr-defined]
    trainer.policy_loss = lambda *a: (seen.append(a[3]), original(*a))[1]  # type: ignore[attr-defined]
    trainer.start()
    assert not bool(seen[0].any()) and bool(seen[1].all())


def test_tempflow_weighs_the_policy_term_alone(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, changes("tempflow", train__kl_beta=0.5))
    weights = trainer.step_weights  # type: ignore[attr-defined]
    assert len(weights) == 4 and sum(weights[:3]) == pytest.approx(3.0) and weights[0] > weights[2]
    plain = make_trainer(tiny_sd3_dir, tmp_path, {"log.run_name": "plain"})
    assert plain.step_weights == [1.0] * 4  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"scheduler.dynamics_type": "ODE"}, r"scheduler\.dynamics_type.*no transition density"),
        ({"scheduler.sde_steps": [2, 3]}, r"scheduler\.sde_steps.*\[3\] cannot be stochastic"),
        ({"scheduler.num_sde_steps": 9, "scheduler.sde_steps": None}, r"scheduler\.num_sde_steps.*at most 3"),
        (
            {"scheduler.sde_window": "contiguous", "scheduler.sde_window_range": [2, 8], "scheduler.sde_steps": None},
            r"scheduler\.sde_window_range.*room for 1 stochastic",
        ),
        ({"scheduler.after_window_fraction": 0.5}, r"scheduler\.after_window_fraction.*dpm2m"),
        ({"train.policy_loss": "grppo"}, r"train\.policy_loss.*'grppo'.*Did you mean 'grpo'"),
        ({"train.advantage_aggregation": "rloo2"}, r"train\.advantage_aggregation.*Did you mean 'rloo'"),
        ({"train.adv_clip_range": [1.0, 2.0]}, r"train\.adv_clip_range.*lo < 0 < hi"),
    ],
)
@pytest.mark.parametrize("trainer", ["grpo", "grpo-guard", "dppo"])
def test_bad_input(tiny_sd3_dir: Path, tmp_path: Path, trainer: str, more: dict[str, Any], words: str) -> None:
    if trainer != "grpo" and "train.policy_loss" in more:
        words = r"train\.policy_loss.*is fixed by the class"
    with pytest.raises(InputError, match=words):
        make_config(tiny_sd3_dir, tmp_path, {"train.trainer_type": trainer, **more})


def test_candidates_are_known_only_with_the_grid(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Of the steps of this grid one can be stochastic, with more noise none: said before prompts are encoded."""
    more = {"scheduler.sde_steps": None, "scheduler.num_sde_steps": 2}
    with pytest.raises(InputError, match=r"scheduler\.num_sde_steps is 2, but 1 step\(s\) can be stochastic"):
        make_trainer(tiny_sd3_dir, tmp_path, more)
    with pytest.raises(InputError, match=r"steps \[0, 1, 2\] would add more noise.*Lower scheduler\.noise_level"):
        make_trainer(tiny_sd3_dir, tmp_path, {**more, "scheduler.noise_level": 0.95})


def test_parameters_are_checked_before_the_model_is_loaded(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"train\.advantage_params\.min_conut.*min_count"):
        make_trainer(
            tiny_sd3_dir,
            tmp_path,
            {"train.advantage_aggregation": "per_prompt", "train.advantage_params": {"min_conut": 1}},
        )
    with pytest.raises(InputError, match=r"train\.policy_loss_params\.kl_mask_threshold.*greater than 0"):
        make_trainer(
            tiny_sd3_dir, tmp_path, {"train.policy_loss": "dppo", "train.policy_loss_params": {"kl_mask_threshold": 0}}
        )
    assert not (tmp_path / "save").exists()


PLUGIN = """
from flow_factory.advantage import register_adv_estimator
from flow_factory.objectives import agg_loss, register_policy_loss


@register_adv_estimator("above-{name}")
def above(rewards, groups, *, margin: float = 0.0):
    return (rewards > rewards[groups.valid].mean() + margin).double() * 2 - 1


@register_policy_loss("loss-{name}", needs={{"old_velocity"}})
def loss(step, advantages, mask, *, strength: float = 0.5):
    drift = step.row_mean((step.velocity - step.old_velocity) ** 2)
    terms = strength * drift - advantages * step.log_prob
    return {result}, {{"drift": drift.detach().mean()}}
"""


def plugin(folder: Path, name: str, result: str = "agg_loss(terms, mask)") -> dict[str, Any]:
    (folder / f"{name}.py").write_text(PLUGIN.format(name=name, result=result))
    return {
        "plugins": [str(folder / f"{name}.py")],
        "train.policy_loss": f"loss-{name}",
        "train.policy_loss_params": {"strength": 0.25},
        "train.advantage_aggregation": f"above-{name}",
        "train.max_epochs": 1,
    }


def test_a_users_file_with_a_loss_and_an_estimator(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    more = plugin(tmp_path, "mine_of_tests")
    trainer = make_trainer(tiny_sd3_dir, tmp_path, more)
    trainer.start()
    row = updates(tmp_path)[0]
    assert row["default/drift"] == 0.0 and row["default/grad_norm"] > 0
    assert trainer.config.training_args.policy_loss_params == {"strength": 0.25}
    # The saved configuration finds the file from anywhere.
    saved = trainer.config.to_mapping()
    assert saved["plugins"] == [str((tmp_path / "mine_of_tests.py").resolve())]
    assert load_config_from_mapping(saved) == trainer.config


@pytest.mark.parametrize(
    ("result", "words"), [("terms", r"loss of shape \(4,\)"), ("agg_loss(terms) / 0", "not finite")]
)
def test_wrong_results_of_a_users_loss(tiny_sd3_dir: Path, tmp_path: Path, result: str, words: str) -> None:
    name = f"wrong_{len(result)}"
    trainer = make_trainer(tiny_sd3_dir, tmp_path, plugin(tmp_path, name, result))
    with pytest.raises(RunError, match=rf"policy loss 'loss-{name}', .*\(.*{name}\.py:\d+\),.*{words}"):
        trainer.start()
