"""What cannot hold for the decoupled algorithms is said before a model loads: value, place and remedy."""

from __future__ import annotations

from typing import Any

import pytest

from flow_factory.hparams import plan_geometry
from flow_factory.hparams.decay import PRESETS, DecaySchedule, parse_decay
from flow_factory.hparams.errors import FieldError
from tests.hparams.helpers import load, problems_of


def train(kind: str, **fields: Any) -> dict[str, Any]:
    return {"train": {"trainer_type": kind, **fields}, "scheduler": {"dynamics_type": "ODE"}}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        (train("nft", timestep_range=[0.0, 0.05]), "train.timestep_range", ["[0, 0.05]", "10 steps", "widen it"]),
        (train("awm", time_sampling_strategy="discrete_wo_init", timestep_range=0.1, num_train_timesteps=2),
         "train.timestep_range", ["discrete_wo_init"]),
        (train("nft", timestep_range=[0.5, 0.5]), "train.timestep_range", ["0 <= lo < hi"]),
        (train("nft", num_inference_steps=1), "train.timestep_range", ["none of the 1 steps", "num_inference_steps"]),
        (train("dgpo", num_train_timesteps=7), "train.num_train_timesteps", ["is 7", "6 steps", "without replacement"]),
        (train("dgpo", num_train_timesteps=4, gradient_step_per_epoch=8), "train.gradient_step_per_epoch",
         ["between members of a group", "1, 2, 4"]),
        (train("crd", gradient_step_per_epoch=2), "train.gradient_step_per_epoch", ["9 training times (1, 3, 9)"]),
        (train("crd", num_train_timesteps=4, gradient_accumulation_steps=4), "train.gradient_accumulation_steps",
         ["is 4", "between members of a group", "multiple of 8"]),
        (train("dgpo", use_ema_ref=True, kl_cfg=3.0), "train.kl_cfg", ["nothing uses", "kl_beta 0"]),
        (train("nft", global_std=False), "train.global_std", ["is False", "'gdpo' does not take it", "use", "sum"]),
        (train("dgpo", clip_dsm=False, clip_kl=True), "train.clip_kl", ["clip_dsm"]),
        (train("dgpo", clip_range=1.0), "train.clip_range", ["lo > -1"]),
        (train("dgpo", clip_range=[0.1, 0.2]), "train.clip_range", ["lo < 0 < hi"]),
        (train("nft", off_policy=True, old_model_decay=0), "train.old_model_decay", ["copies", "preset 1 or 2"]),
        (train("nft", off_policy=True, old_model_decay="0-1.0-0.0-1.0"), "train.old_model_decay", ["never move"]),
        (train("nft", old_model_decay=2), "train.old_model_decay", ["no effect on-policy", "off_policy: true"]),
        (train("nft", off_policy=True, old_model_decay="slow"), "train.old_model_decay", ["'slow'", "start-value"]),
        (train("crd", sampling_model_decay=7), "train.sampling_model_decay", ["7", "no preset", "0, 1, 2"]),
        (train("crd", old_model_decay="0-0.5-0.1"), "train.old_model_decay", ["cannot be read"]),
        (train("crd", kl_beta=0), "train.kl_beta", ["reward_adaptive_kl", "0.0001"]),
        (train("dpo", weighting_scheme="discrete"), "train.weighting_scheme", ["logit_normal"]),
        (train("dpo", weighting_scheme="uniform", logit_mean=0.5), "train.logit_mean", ["'uniform' does not take it"]),
        (train("sft", weighting_scheme="uniform", logit_std=2.0), "train.logit_std", ["no effect", "logit_normal"]),
        (train("sft", timestep_range=[0.5, 0.5]), "train.timestep_range", ["0 <= lo < hi"]),
        ({**train("dpo"), "num_processes": 2, "data": {"dataset_dir": "d", "sampler_type": "group_distributed"}},
         "data.sampler_type", ["group_distributed", "pairs", "group_contiguous", "multiple of the 2 ranks"]),
        (train("dpo", gradient_step_per_epoch=3), "train.gradient_step_per_epoch", ["2 batches x 1 loss terms"]),
    ],
)  # fmt: skip
def test_what_cannot_hold_is_said(changes: dict[str, Any], path: str, words: list[str]) -> None:
    problems = problems_of(changes)
    assert path in problems, problems
    for word in words:
        assert word in problems[path]


def test_what_holds_is_accepted() -> None:
    crd = load(train("crd", num_train_timesteps=20, gradient_step_per_epoch=2)).training_args
    assert crd.time_sampling.num_times(10) == 20  # type: ignore[attr-defined]
    load(train("crd", kl_beta=0, reward_adaptive_kl=False))
    load(train("dgpo", num_train_timesteps=6, gradient_step_per_epoch=3))
    load(train("awm", clip_range=1.0, time_sampling_strategy="uniform", num_train_timesteps=64))
    for kind in ("nft", "awm", "dpo", "dgpo", "crd"):
        load({**train(kind), "scheduler": {"dynamics_type": "Flow-SDE"}})


@pytest.mark.parametrize(
    ("world", "batch", "per_batch", "batches"), [(1, 8, 4, 2), (1, 4, 2, 4), (2, 32, 4, 1), (1, 1, 1, 8)]
)
def test_pairs_fill_equal_micro_batches(world: int, batch: int, per_batch: int, batches: int) -> None:
    """Eight groups are eight pairs, spread over ranks; a micro-batch has at most the rows of the rollout's."""
    config = load({**train("dpo", per_device_batch_size=batch), "num_processes": world})
    geometry = plan_geometry(config)
    assert geometry.optimized_batches == batches
    assert config.training_args.pairs_per_batch(8 // world) == per_batch  # type: ignore[attr-defined]
    assert geometry.updates_per_cycle == 1 and geometry.accumulation_steps == batches
    assert f"training: {batches} batches x 1 loss terms" in geometry.describe()


def test_guidance_of_the_reference_asks_for_negative_conditions() -> None:
    """Pitfall 35."""
    assert load(train("crd")).training_args.get_preprocess_guidance_scale() == 4.5
    without = load(train("crd", kl_beta=0, reward_adaptive_kl=False)).training_args
    assert without.get_preprocess_guidance_scale() == 1.0
    assert load(train("dgpo", guidance_scale=1.0, kl_cfg=3.0)).training_args.get_preprocess_guidance_scale() == 3.0
    assert load(train("nft")).training_args.get_preprocess_guidance_scale() == 1.0


def test_schedules_are_the_published_ones() -> None:
    """DiffusionNFT's (flat, ramp, cap) and CRD's start-value-slope-end, tabulated by hand."""
    assert [PRESETS[0](n) for n in (0, 10, 10**6)] == [0, 0, 0]
    assert [PRESETS[1](n) for n in (0, 100, 500, 9999)] == pytest.approx([0, 0.1, 0.5, 0.5])
    assert [PRESETS[2](n) for n in (0, 74, 75, 77, 10**4)] == pytest.approx([0, 0, 0, 0.015, 0.999])
    old = parse_decay("0-0.25-0.005-0.999", "old")
    assert [old(n) for n in (0, 10, 10**4)] == pytest.approx([0.25, 0.3, 0.999])
    late = parse_decay("10-0.25-0.1-0.5", "old")
    assert [late(n) for n in (0, 9, 10, 12, 99)] == pytest.approx([0.25, 0.25, 0.25, 0.45, 0.5])
    assert parse_decay("75-0.0-0.0075-0.999", "x") == parse_decay(2, "x") == parse_decay("2", "x")
    assert [DecaySchedule(0, 0.0, 0.001, 0.3)(n) for n in (0, 100, 300, 999)] == pytest.approx([0, 0.1, 0.3, 0.3])
    for wrong in ("0-0.5-0.1-0.4", "0-0.0-0.1-1.0", "x-0-0-0", "1-2-3", "3"):
        with pytest.raises(FieldError):
            parse_decay(wrong, "old")
