"""Rules across fields and sections: each names value, place and remedy, before any model loads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.errors import InputError
from flow_factory.hparams import (
    ConfigError,
    ModelSpec,
    check_world_size,
    get_model_spec,
    load_config_from_mapping,
    register_model_spec,
)
from flow_factory.registry import Registry
from tests.hparams import test_loading
from tests.hparams.helpers import BASE, BASE_YAML, load, load_text, merged, problems_of

TWO_SETS = {"datasets": [{"name": "a", "dataset_dir": "a"}, {"name": "b", "dataset_dir": "b"}]}
REWARD = {"reward_model": "jpeg_compressibility"}


def two_sets(**reward: Any) -> dict[str, Any]:
    return {"data": {"dataset_dir": "data", **TWO_SETS}, "rewards": {**REWARD, **reward}}


@pytest.mark.parametrize(
    ("changes", "path", "words"),
    [
        ({"scheduler": {"dynamics_type": "ODE"}}, "scheduler.dynamics_type", ["'ODE'", "grpo", "Flow-SDE"]),
        ({"scheduler": {"dynamics_type": "DDIM-eta"}}, "scheduler.dynamics_type", ["not defined", "sd3-5"]),
        ({"scheduler": {"noise_level": 0}}, "scheduler.noise_level", ["deterministic", "0.7"]),
        ({"scheduler": {"dynamics_type": "CPS", "noise_level": 1.2}}, "scheduler.noise_level", ["1.2", "at most 1"]),
        ({"train": {"group_size": 1}}, "train.group_size", ["is 1", "at least 2"]),
        ({"rewards": {**REWARD, "name": "total"}}, "rewards[0].name", ["'total'", "weighted sum"]),
        ({"train": {"clip_range": [1e-4, -1e-4]}}, "train.clip_range", ["lo < 0 < hi"]),
        ({"train": {"clip_range": 0}}, "train.clip_range", ["lo < 0 < hi"]),
        ({"train": {"adv_clip_range": [1, 5]}}, "train.adv_clip_range", ["lo < 0 < hi", "[-5.0, 5.0]"]),
        ({"train": {"num_inference_steps": 1}}, "train.num_inference_steps", ["at least 2"]),
        ({"scheduler": {"num_sde_steps": 10}}, "scheduler.num_sde_steps", ["is 10", "at most 9"]),
        ({"scheduler": {"sde_steps": [0, 9]}}, "scheduler.sde_steps", ["[9]", "0 to 8"]),
        ({"scheduler": {"sde_steps": [0, 0]}}, "scheduler.sde_steps", ["twice"]),
        ({"scheduler": {"sde_steps": []}}, "scheduler.sde_steps", ["empty"]),
        ({"scheduler": {"sde_steps": [1, 2], "num_sde_steps": 3}}, "scheduler.num_sde_steps", ["at most 2"]),
        ({"scheduler": {"sde_window": "sliding", "num_sde_steps": None}}, "scheduler.num_sde_steps", ["sliding"]),
        ({"scheduler": {"sde_window_range": [0, 4]}}, "scheduler.sde_window_range", ["contiguous"]),
        (
            {"scheduler": {"sde_window": "contiguous", "num_sde_steps": 3, "sde_window_range": [2, 4]}},
            "scheduler.sde_window_range",
            ["room for 2", "num_sde_steps is 3"],
        ),
        ({"rewards": []}, "rewards", ["'grpo'", "reward_model: jpeg_compressibility"]),
        ({"rewards": [REWARD, REWARD]}, "rewards[1].name", ["'default'", "rewards[0]"]),
        ({"rewards": {"weight": 0}}, "rewards", ["'default'", "no advantage"]),
        ({"rewards": {"reward_model": None}}, "rewards[0].reward_model", ["required"]),
        ({"rewards": {"applicable_datasets": ["x"]}}, "rewards[0].applicable_datasets", ["'x'", "'default'"]),
        (two_sets(applicable_datasets=["a", "bb"]), "rewards[0].applicable_datasets", ["'bb'", "Did you mean 'b'?"]),
        (two_sets(weight={"a": 1, "bb": 1}), "rewards[0].weight", ["'bb'", "known: 'a', 'b'"]),
        (two_sets(weight={"a": 1}, applicable_datasets=["a", "b"]), "rewards[0].weight", ["no weight for b"]),
        (two_sets(applicable_datasets=["a"]), "rewards", ["'b'", "no advantage"]),
        ({"train": {"advantage_aggregation": "gpdo"}}, "train.advantage_aggregation", ["Did you mean 'gdpo'?"]),
        (
            {"train": {"policy_loss": "reinforce", "clip_range": 0.1}},
            "train.clip_range",
            ["'reinforce' does not take it", "grpo or grpo-guard or gspo"],
        ),
        ({"train": {"global_std": False}}, "train.global_std", ["no effect", "'gdpo'", "advantage_aggregation sum"]),
        ({"data": {"datasets": [{"name": "a"}, {"name": "a"}]}}, "data.datasets", ["'a'", "twice"]),
        ({"data": {"dataset_dir": "x", **TWO_SETS}}, "data.dataset_dir", ["no effect"]),
        ({"num_processes": 3, "num_machines": 2}, "num_processes", ["not a multiple of num_machines = 2"]),
        ({"num_processes": 4, "num_machines": 2, "gpus_per_node": 4}, "gpus_per_node", ["num_processes = 4"]),
        ({"machine_rank": 1}, "machine_rank", ["counted from 0"]),
        ({"model": {"target_components": "trasformer"}}, "model.target_components", ["Did you mean 'transformer'?"]),
        ({"model": {"target_components": ["transformer", "transformer"]}}, "model.target_components", ["twice"]),
        ({"model": {"lora_adapter_name": "v1.0"}}, "model.lora_adapter_name", ["'v1.0'", "leave dots out"]),
        ({"model": {"target_components": ["vae"]}}, "model.target_components", ["'vae'", "cannot be trained"]),
        (
            {"model": {"finetune_type": "full", "resume_path": "x", "resume_type": "lora"}},
            "model.resume_type",
            ["would stay a LoRA"],
        ),
        ({"model": {"resume_type": "lora"}}, "model.resume_type", ["without resume_path"]),
        ({"model": {"resume_path": "x", "resume_type": "state"}}, "model.resume_type", ["train.resume: PATH"]),
        ({"process_index": 1}, "process_index", ["set by the launcher"]),
        ({"model": {"model_name_or_path": " "}}, "model.model_name_or_path", ["empty"]),
        ({"optimizers": [{"name": "fake"}]}, "optimizers[0].name", ["'fake'", "its roles: default"]),
        ({"optimizers": [{}, {}]}, "optimizers[1].name", ["two optimizers"]),
        ({"optimizers": [{"momentum": 0.9}]}, "optimizers[0].momentum", ["no effect with optimizer 'adamw'"]),
        (
            {"optimizers": [{"learning_rate": 1e-3}], "train": {"learning_rate": 1e-4}},
            "train.learning_rate",
            ["no effect beside `optimizers:`"],
        ),
        ({"train": {"lr_scheduler": "cosine"}}, "train.lr_scheduler", ["'cosine'", "max_epochs"]),
        ({"acceleration": {"shared": {"name": "torch_compile"}}}, "acceleration.shared", ["not available", "remove"]),
        ({"model": {"attn_backend": "flash"}}, "model.attn_backend", ["not available", "remove"]),
        ({"optimizers": {"update_frequency": 2}}, "optimizers[0].update_frequency", ["not available", "remove"]),
        ({"acceleration": {"rollout": {"name": "diffusers_cache"}}}, "acceleration.rollout", ["log-probs", "remove"]),
    ],
)
def test_what_does_not_fit_together(changes: dict[str, Any], path: str, words: list[str]) -> None:
    """Pitfalls 25 and 38 among others: group size 1, LoRA resumed for full tuning."""
    found = problems_of(changes)
    assert path in found, found
    for word in words:
        assert word in found[path]


def test_a_field_of_another_function_may_be_written_out_with_its_default() -> None:
    """A saved configuration names every field."""
    load({"train": {"policy_loss": "reinforce", "clip_range": 1e-4, "global_std": True}})
    load({"train": {"advantage_aggregation": "sum", "global_std": False}})


def test_the_place_is_the_line_the_override_or_the_default(tmp_path: Path) -> None:
    text = BASE_YAML + "scheduler:\n  dynamics_type: ODE\n"
    with pytest.raises(ConfigError, match=r"scheduler\.dynamics_type \(.*run\.yaml:9\): 'ODE'"):
        load_text(tmp_path, text)
    with pytest.raises(ConfigError, match=r"\(override 'scheduler\.dynamics_type=ODE'\)"):
        load_text(tmp_path, BASE_YAML, ["scheduler.dynamics_type=ODE"])
    with pytest.raises(ConfigError, match=r"train\.num_inference_steps \(.*\).*\n?") as caught:
        load_text(tmp_path, BASE_YAML, ["scheduler.num_sde_steps=null", "train.num_inference_steps=1"])
    assert "override 'train.num_inference_steps=1'" in str(caught.value)
    with pytest.raises(ConfigError, match=r"rewards \(default value\): trainer 'grpo' learns from rewards"):
        load_text(tmp_path, BASE_YAML.split("rewards:")[0])


def test_all_cross_field_errors_come_together() -> None:
    found = problems_of(
        {
            "scheduler": {"dynamics_type": "ODE"},
            "train": {"group_size": 1},
            "rewards": {"weight": 0.0},
            "machine_rank": 3,
        }
    )
    assert set(found) == {"scheduler.dynamics_type", "train.group_size", "rewards", "machine_rank"}


def test_rewards_on_a_trainer_without_feedback_are_an_error() -> None:
    train = {"trainer_type": f"{test_loading.__name__}.OutsideOfflineTrainer"}
    with pytest.raises(ConfigError, match="takes no rewards; remove them, or use eval_rewards"):
        load_config_from_mapping({**BASE, "train": train})
    mapping = {**BASE, "train": train, "eval_rewards": {"reward_model": "brightness"}}
    del mapping["rewards"]
    config = load_config_from_mapping(mapping)
    assert config.eval_reward_args is not None and len(config.eval_reward_args) == 1


def test_ode_is_fine_for_a_decoupled_trainer() -> None:
    assert test_loading.OutsideArguments.paradigm == "decoupled"
    config = load({"train": {"trainer_type": "test-outside"}, "scheduler": {"dynamics_type": "ODE"}})
    assert config.scheduler_args.dynamics_type == "ODE"


def test_guidance_on_a_model_that_has_none() -> None:
    spec = ModelSpec(
        key="test-no-guidance",
        adapter="nowhere.Adapter",
        pipeline_class="NoPipeline",
        io=PipelineIOContract((MediaSlot(Modality.TEXT, "prompt"),), (Modality.IMAGE,)),
        guidance="none",
    )
    register_model_spec(spec)
    model = {"model": {"model_type": "test-no-guidance"}}
    assert load(model).training_args.guidance_scale == 1.0  # the default of models that have guidance does not apply
    found = problems_of(merged(model, {"train": {"guidance_scale": 3}, "eval": {"guidance_scale": 2}}))
    assert "is 3.0, but model 'test-no-guidance' has no guidance; use 1" in found["train.guidance_scale"]
    assert "is 2.0" in found["eval.guidance_scale"]
    # sd3-5's own fields are not this model's
    assert (
        "unknown key" in problems_of(merged(model, {"train": {"max_sequence_length": 8}}))["train.max_sequence_length"]
    )


def evaluated(**spec: Any) -> dict[str, Any]:
    """Two datasets, the second with evaluation settings of its own."""
    return {"data": {"datasets": [{"name": "a", "dataset_dir": "a"}, {"name": "b", "dataset_dir": "b", "eval": spec}]}}


@pytest.mark.parametrize(
    ("model", "spec", "field", "words"),
    [
        ("sd3-5", {"guidance_scale": -3}, "guidance_scale", "must be at least 0"),
        ("minimax-h3-t2va", {"guidance_scale": 3}, "guidance_scale", "has no guidance; use 1"),
        ("minimax-h3-t2va", {"num_inference_steps": 1}, "num_inference_steps", "takes 1 less: none; use at least 2"),
        ("wan2_v2v", {"num_inference_steps": 1}, "num_inference_steps", "takes 0.8 of them: none; use at least 2"),
    ],
)
def test_a_datasets_own_evaluation_is_checked_as_that_of_all(
    model: str, spec: dict[str, Any], field: str, words: str
) -> None:
    batch = {"per_device_batch_size": get_model_spec(model).max_batch or 8}
    changes = merged(evaluated(**spec), {"model": {"model_type": model}, "train": batch})
    found = problems_of(changes)
    assert words in found[f"data.datasets[1].eval.{field}"]
    if "must be" not in words:
        assert load(
            merged(changes, {"eval": {"eval_freq": 0}} if "steps" in field else evaluated(**spec, enabled=False))
        )


@pytest.mark.parametrize(
    ("trainer", "number", "strength", "fewest"),
    [("grpo", 4, 0.25, 8), ("grpo", 10, 0.19, 11), ("nft", 4, 0.2, 5), ("nft", 9, 0.1, 10)],
)
def test_a_rollout_that_starts_late_needs_more_steps(trainer: str, number: int, strength: float, fewest: int) -> None:
    train = {"trainer_type": trainer, "num_inference_steps": number, "strength": strength}
    changes: dict[str, Any] = {"model": {"model_type": "wan2_v2v"}, "train": train, "eval": {"eval_freq": 0}}
    assert f"at least {fewest}." in problems_of(changes)["train.num_inference_steps"]
    load(merged(changes, {"train": {"num_inference_steps": fewest}}))
    with pytest.raises(ConfigError):
        load(merged(changes, {"train": {"num_inference_steps": fewest - 1}}))


def test_world_size_of_a_launcher_must_be_the_configured_one() -> None:
    """Pitfall 42: process counts that disagree are an error, not a silent one of eight."""
    config = load({"num_processes": 2})
    check_world_size(config, 2)
    with pytest.raises(InputError, match=r"num_processes is 2 .* the launcher started 8.*num_processes=8"):
        check_world_size(config, 8)


def test_estimators_registered_by_a_plugin_are_known(monkeypatch: pytest.MonkeyPatch) -> None:
    from flow_factory.advantage import registry

    known = Registry("advantage estimator", {"mine": "a.b"})
    monkeypatch.setattr(registry, "_ADV_ESTIMATOR_REGISTRY", known)
    assert load({"train": {"advantage_aggregation": "mine"}}).training_args is not None
    assert load({"train": {"advantage_aggregation": "my_module.estimate"}}).training_args is not None
    assert "'mine'" in problems_of({"train": {"advantage_aggregation": "mien"}})["train.advantage_aggregation"]
