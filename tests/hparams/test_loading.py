"""From YAML to arguments: types, unknown keys, sections, overrides, plugins."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any, Literal

import pytest

from flow_factory.contracts import OFFLINE_EXECUTION_CONTRACT
from flow_factory.errors import InputError
from flow_factory.hparams import (
    ConfigError,
    GRPOTrainingArguments,
    OfflineFlowMatchingTrainingArguments,
    TrainingArguments,
    get_training_args_class,
    load_config,
    load_config_from_mapping,
    register_training_args,
    validate_dataclass,
)
from tests.hparams.helpers import BASE, BASE_YAML, load, load_text, merged, problems_of


def test_sections_land_in_their_classes(tmp_path: Path) -> None:
    config = load_text(tmp_path, BASE_YAML + "scheduler: {noise_level: 0.8}\nlog: {run_name: a}\neval:\n")
    assert isinstance(config.training_args, GRPOTrainingArguments)
    assert config.model_args.model_type == "sd3-5"
    assert config.scheduler_args.noise_level == 0.8
    assert config.log_args.run_name == "a"
    assert [reward.reward_model for reward in config.reward_args.reward_configs] == ["jpeg_compressibility"]
    assert config.eval_reward_args is None


@pytest.mark.parametrize("key", ["learning_rat", "learning-rate", "LEARNING_RATE", "learningrate"])
def test_a_typo_is_an_error_with_the_nearest_key_and_its_line(tmp_path: Path, key: str) -> None:
    """Pitfalls 40 and 61: a typo never trains to the end at the default value."""
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, BASE_YAML.replace("  per_device", f"  {key}: 1e-3\n  per_device"))
    text = str(caught.value)
    assert f"train.{key}" in text and "run.yaml:5" in text and "did you mean train.learning_rate?" in text
    assert caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("changes", "path", "hint"),
    [
        ({"num_procesess": 2}, "num_procesess", "did you mean num_processes?"),
        ({"learning_rate": 1e-4}, "learning_rate", "it belongs into train:"),
        ({"lora_rank": 4}, "lora_rank", "it belongs into model:"),
        ({"trian": {}}, "trian", "did you mean train?"),
        ({"rewards": {"weigth": 1}}, "rewards[0].weigth", "did you mean rewards[0].weight?"),
        ({"train": {"max_sequence_lenght": 8}}, "train.max_sequence_lenght", "train.max_sequence_length?"),
        ({"train": {"num_frames": 8}}, "train.num_frames", "unknown key"),
        (
            {"train": {"trainer_type": f"{__name__}.OutsideArguments", "clip_range": 1e-4}},
            "train.clip_range",
            "it belongs to train.trainer_type awm, dgpo, grpo",
        ),
        ({"data": {"datasets": {"train": {"wieght": 1}}}}, "data.datasets[0].train.wieght", "train.weight?"),
        ({"train": {"execution_contract": "online"}}, "train.execution_contract", "cannot be set"),
        ({"train": {"paradigm": "decoupled"}}, "train.paradigm", "cannot be set"),
        ({"train": {"required_trainable_roles": ["x"]}}, "train.required_trainable_roles", "cannot be set"),
        ({"train": {"num_batches_per_epoch": 4}}, "train.num_batches_per_epoch", "derived"),
        ({"optimizers": [{"nam": "default"}]}, "optimizers[0].nam", "optimizers[0].name?"),
    ],
)
def test_unknown_keys_everywhere(changes: dict[str, Any], path: str, hint: str) -> None:
    """Pitfall 40."""
    message = problems_of(changes)[path]
    assert hint in message


def test_an_unknown_key_in_an_override_names_the_override() -> None:
    with pytest.raises(ConfigError, match=r"train\.gruop_size \(override 'train\.gruop_size=4'\).*train\.group_size"):
        load(overrides=["train.gruop_size=4"])


@pytest.mark.parametrize("text", ["1e-4", '"1e-4"', "'1e-4'", "0.0001", "1.0e-4"])
def test_numbers_are_read_however_they_are_written(tmp_path: Path, text: str) -> None:
    """Pitfall 41: YAML 1.1 readers take 1e-4 for a string."""
    config = load_text(tmp_path, BASE_YAML.replace("  per_device", f"  learning_rate: {text}\n  per_device"))
    assert config.training_args.learning_rate == 1e-4
    assert load_text(tmp_path, BASE_YAML, [f"train.learning_rate={text}"]).training_args.learning_rate == 1e-4


@pytest.mark.parametrize(
    ("field", "value", "got"),
    [
        ("mixed_precision", "no", "no"),
        ("log.run_name", "on", "on"),
        ("log.run_name", "12:30", "12:30"),
        ("log.run_name", "2024", "2024"),
        ("log.run_name", "1e3", "1e3"),
        ("log.run_name", "007", "007"),
        ("log.run_name", "true", "true"),
        ("log.logging_backend", "none", "none"),
        ("log.verbose", "no", False),
        ("log.verbose", "On", True),
        ("log.verbose", "false", False),
        ("train.shuffle_samples", "off", False),
        ("train.gradient_accumulation_steps", "4", 4),
        ("train.gradient_accumulation_steps", "auto", "auto"),
        ("model.target_modules", "no", "no"),
        ("model.target_modules", "[to_q, on]", ["to_q", "on"]),
    ],
)
def test_the_field_decides_what_a_word_means(field: str, value: str, got: object) -> None:
    """Pitfall 53: unquoted `no`, `on`, `12:30` in a text field are text; in a boolean field `no` is false."""
    config = load(overrides=[f"{field}={value}"])
    sections = {"log": config.log_args, "train": config.training_args, "model": config.model_args}
    section, _, name = field.rpartition(".")
    assert getattr(sections.get(section, config), name) == got


@pytest.mark.parametrize(
    ("override", "path", "words"),
    [
        ("train.seed=true", "train.seed", ["true", "boolean where a number"]),
        ("train.seed=no", "train.seed", ["'no'", "a whole number"]),
        ("train.seed=1.5", "train.seed", ["1.5", "a whole number"]),
        ("train.seed=12:30", "train.seed", ["'12:30'", "a whole number"]),
        ("train.learning_rate=.nan", "train.learning_rate", ["not a finite number"]),
        ("train.learning_rate=.inf", "train.learning_rate", ["not a finite number"]),
        ("train.learning_rate='inf'", "train.learning_rate", ["not a finite number"]),
        ("train.learning_rate=fast", "train.learning_rate", ["'fast'", "a number"]),
        ("train.learning_rate=0", "train.learning_rate", ["greater than 0"]),
        ("train.group_size=0", "train.group_size", ["at least 1"]),
        ("train.ema_decay=1.0", "train.ema_decay", ["less than 1"]),
        ("train.shuffle_samples=1", "train.shuffle_samples", ["true or false"]),
        ("train.shuffle_samples=maybe", "train.shuffle_samples", ["'maybe'", "true or false"]),
        ("train.gradient_accumulation_steps=atuo", "train.gradient_accumulation_steps", ["'auto'", "Did you mean"]),
        ("train.adam_betas=[0.9]", "train.adam_betas", ["2 values"]),
        ("train.adam_betas=0.9", "train.adam_betas", ["2 values"]),
        ("train.clip_range=[1, 2, 3]", "train.clip_range", ["2 values"]),
        ("train.kl_type=xbased", "train.kl_type", ["'x-based'", "Did you mean 'x-based'?"]),
        ("scheduler.dynamics_type=flow_sde", "scheduler.dynamics_type", ["Did you mean 'Flow-SDE'?"]),
        ("scheduler.sde_steps=3", "scheduler.sde_steps", ["a list of a whole number"]),
        ("mixed_precision=fp8", "mixed_precision", ["'fp8'", "'bf16'"]),
        ("mixed_precision=false", "mixed_precision", ["'no'"]),
        ("model.model_type=sd35", "model.model_type", ["Did you mean 'sd3-5'?"]),
        ("model.model_type=null", "model.model_type", ["text"]),
        ("train.trainer_type=gpro", "train.trainer_type", ["Did you mean 'grpo'?"]),
        ("data.sampler_type=ditributed_k_repeat", "data.sampler_type", ["Did you mean 'distributed_k_repeat'?"]),
        ("rewards.dtype=bf32", "rewards[0].dtype", ["'fp32'"]),
        ("rewards.weight=[1]", "rewards[0].weight", ["a number"]),
        ("train=3", "train", ["a mapping of fields"]),
        ("rewards=jpeg", "rewards", ["a list of mappings"]),
        ("plugins=my_module", "plugins", ["a list of text"]),
        ("train.max_sequence_length=600", "train.max_sequence_length", ["at most 512"]),
        ("data.datasets=[]", "data.datasets", ["empty"]),
        ("train.resume=''", "train.resume", ["auto, never"]),
    ],
)
def test_values_of_the_wrong_kind(override: str, path: str, words: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        load(overrides=[override])
    from flow_factory.hparams.errors import show_path

    found = {show_path(problem.path): problem for problem in caught.value.problems}
    assert path in found, caught.value
    assert found[path].place == f"override {override!r}"
    for word in words:
        assert word in found[path].message


def test_a_python_false_from_another_yaml_reader_means_no() -> None:
    """Pitfall 53: yaml.safe_load turns `mixed_precision: no` into False."""
    assert load({"mixed_precision": False}).mixed_precision == "no"
    assert "'bf16'" in problems_of({"mixed_precision": True})["mixed_precision"]


def test_all_field_errors_come_in_one_go_and_cross_field_errors_after_them(tmp_path: Path) -> None:
    text = BASE_YAML.replace("  per_device", "  sed: 1\n  group_size: x\n  learning_rate: -1\n  per_device")
    text += "scheduler: {dynamics_type: ODE}\nlogg: {}\n"
    with pytest.raises(ConfigError) as caught:
        load_text(tmp_path, text)
    assert len(caught.value.problems) == 4
    assert "ODE" not in str(caught.value)  # a cross-field error
    for line in (5, 6, 7, 12):
        assert f"run.yaml:{line})" in str(caught.value)


def test_scalars_stand_for_pairs_and_mappings_for_lists_of_one() -> None:
    config = load({"train": {"clip_range": 1e-4, "adv_clip_range": 3, "resolution": 256}})
    assert config.training_args.clip_range == (-1e-4, 1e-4)
    assert config.training_args.adv_clip_range == (-3.0, 3.0)
    assert config.training_args.resolution == (256, 256)
    assert len(config.reward_args.reward_configs) == 1
    config = load({"data": {"dataset_dir": "data", "datasets": {"name": "a", "train": {"weight": 2}}}})
    assert config.data_args.datasets is not None and config.data_args.datasets[0].name == "a"


def test_resolution_height_and_width_agree() -> None:
    args = load({"train": {"resolution": [256, 512]}}).training_args
    assert (args.height, args.width, args.resolution) == (256, 512, (256, 512))
    args = load({"train": {"resolution": 256, "width": 128}}).training_args
    assert (args.height, args.width, args.resolution) == (256, 128, (256, 128))


def test_eval_inherits_what_is_not_given() -> None:
    config = load({"train": {"resolution": 256, "guidance_scale": 2.0, "max_sequence_length": 32}})
    assert config.eval_args.resolution == (256, 256)
    assert config.eval_args.guidance_scale == 2.0
    assert config.eval_args.per_device_batch_size == 8
    assert config.eval_generation.max_sequence_length == 32
    config = load({"train": {"max_sequence_length": 32}, "eval": {"max_sequence_length": 64, "guidance_scale": 5}})
    assert config.train_generation.max_sequence_length == 32
    assert config.eval_generation.max_sequence_length == 64
    assert config.eval_args.guidance_scale == 5.0


def test_a_null_of_eval_that_means_something_is_not_trains_value() -> None:
    """`audio_guidance_scale: null` is "that of the video": 7 from `train:` would be another guidance."""
    model = {"model": {"model_type": "ltx2_t2av"}}
    changes = {"train": {"audio_guidance_scale": 5, "num_frames": 9}, "eval": {"audio_guidance_scale": None}}
    config = load(merged(model, merged(changes, {"eval": {"num_frames": None}})))
    assert config.eval_generation.audio_guidance_scale is None
    assert config.eval_generation.num_frames == 9, "null is no number of frames, so it is as not given"
    again = load_config_from_mapping(config.to_mapping())
    assert again.eval_generation == config.eval_generation and again.train_generation == config.train_generation
    assert load(merged(model, {"train": {"audio_guidance_scale": 5}})).eval_generation.audio_guidance_scale == 5


def test_model_and_model_type_are_required() -> None:
    with pytest.raises(ConfigError) as caught:
        load_config_from_mapping({"rewards": {"reward_model": "jpeg_compressibility"}})
    text = str(caught.value)
    assert "model.model_type" in text and "model.model_name_or_path" in text and "required" in text


def test_interpolation(tmp_path: Path) -> None:
    text = (
        BASE_YAML + "eval:\n  num_inference_steps: ${train.num_inference_steps}\nlog: {run_name: 'r-${train.seed}'}\n"
    )
    config = load_text(tmp_path, text, ["train.num_inference_steps=7", "train.seed=3"])
    assert config.eval_args.num_inference_steps == 7
    assert config.log_args.run_name == "r-3"
    with pytest.raises(ConfigError, match=r"run\.yaml:9.*train\.nothing"):
        load_text(tmp_path, BASE_YAML + "eval:\n  num_inference_steps: ${train.nothing}\n")


def test_seeds_fall_back_to_the_train_seed() -> None:
    config = load({"train": {"seed": 5}})
    assert (config.sde_seed, config.eval_seed) == (5, 5)
    config = load({"train": {"seed": 5}, "scheduler": {"seed": 6}, "eval": {"seed": 7}})
    assert (config.sde_seed, config.eval_seed) == (6, 7)


def test_short_form_makes_the_optimizer() -> None:
    config = load({"train": {"learning_rate": 2e-4, "adam_betas": [0.8, 0.9], "max_grad_norm": None}})
    (optimizer,) = config.optimizer_args
    assert (optimizer.learning_rate, optimizer.betas, optimizer.max_grad_norm) == (2e-4, (0.8, 0.9), None)
    assert config.optimizer_for("default") is optimizer
    with pytest.raises(KeyError, match="fake"):
        config.optimizer_for("fake")


def test_a_reward_carries_its_own_params_untouched() -> None:
    config = load({"rewards": {"params": {"a": [1, {"b": "no"}], "c": 1e-3}}})
    assert config.reward_args.reward_configs[0].params == {"a": [1, {"b": "no"}], "c": 1e-3}


@dataclasses.dataclass
class _Params:
    strict: bool = False
    scale: float = 1.0
    kind: Literal["a", "b"] = "a"


def test_any_dataclass_is_validated_strictly() -> None:
    assert validate_dataclass(_Params, {"strict": "no", "scale": "1e-3"}) == _Params(False, 1e-3)
    assert validate_dataclass(_Params, None) == _Params()
    with pytest.raises(ConfigError) as caught:
        validate_dataclass(_Params, {"strct": True, "kind": "c", "scale": True}, ("rewards", 0, "params"), "run.yaml:3")
    text = str(caught.value)
    assert "rewards[0].params.strct" in text and "params.strict?" in text and "run.yaml:3" in text
    assert "'c' is not one of 'a', 'b'" in text and "boolean" in text


# --- arguments classes outside the package


@register_training_args("test-outside")
@dataclasses.dataclass
class OutsideArguments(TrainingArguments):
    """Arguments of a trainer outside the package."""

    trainer_type: Literal["test-outside"] = dataclasses.field(default="test-outside", metadata={"help": "Key."})
    strength: float = dataclasses.field(default=1.0, metadata={"help": "Strength."})

    def __post_init__(self) -> None:
        if self.strength > 9:
            raise ValueError("strength must be at most 9.")


@dataclasses.dataclass
class OutsideOffline(OfflineFlowMatchingTrainingArguments):
    """Arguments of a dataset trainer outside the package."""

    trainer_type: Literal["outside-offline"] = "outside-offline"


class OutsideOfflineTrainer:
    """Stands for a trainer class: found by its dotted path."""

    execution_contract = OFFLINE_EXECUTION_CONTRACT


class AnnotatedTrainer:
    """A trainer that names its arguments by an annotation."""

    training_args: OutsideArguments


def test_registered_arguments() -> None:
    config = load({"train": {"trainer_type": "Test-Outside", "strength": 2}})
    assert isinstance(config.training_args, OutsideArguments)
    assert config.training_args.strength == 2.0
    assert config.trainer_key == "test-outside"
    assert config.training_args.height == 512  # although its __post_init__ does not call its parent's
    assert (
        "strength must be at most 9"
        in problems_of({"train": {"trainer_type": "test-outside", "strength": 10}})["train"]
    )
    assert (
        "train.strength?" in problems_of({"train": {"trainer_type": "test-outside", "strenght": 1}})["train.strenght"]
    )


def test_trainer_by_dotted_path_finds_its_arguments() -> None:
    path = f"{__name__}.OutsideOfflineTrainer"
    assert get_training_args_class(path) is OutsideOffline
    assert get_training_args_class(f"{__name__}.AnnotatedTrainer") is OutsideArguments
    assert get_training_args_class(f"{__name__}.OutsideArguments") is OutsideArguments
    mapping = {**BASE, "train": {"trainer_type": path}}
    del mapping["rewards"]
    config = load_config_from_mapping(mapping)
    assert isinstance(config.training_args, OutsideOffline)
    assert config.trainer_key == path
    assert load_config_from_mapping(config.to_mapping()) == config


def test_wrong_dotted_paths_of_trainers() -> None:
    assert "no module" in problems_of({"train": {"trainer_type": "nowhere.at.All"}})["train.trainer_type"]
    assert "has no 'Nothing'" in problems_of({"train": {"trainer_type": f"{__name__}.Nothing"}})["train.trainer_type"]
    assert "neither a trainer" in problems_of({"train": {"trainer_type": "math.pi"}})["train.trainer_type"]
    assert "no ModelSpec" in problems_of({"model": {"model_type": "math.pi"}})["model.model_type"]


def test_two_arguments_classes_cannot_share_a_key() -> None:
    with pytest.raises(InputError, match="already registered"):
        register_training_args("grpo")(OutsideArguments)


@pytest.mark.parametrize("as_file", [True, False])
def test_a_plugin_that_fails_is_named_with_its_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, as_file: bool
) -> None:
    """Whatever a plugin raises while it is imported is wrong input, and says where."""
    file = tmp_path / "failing_plugin.py"
    file.write_text("x = 1\nraise KeyError('y')\n")
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError, match=r"plugins: .*failing_plugin.*failing_plugin\.py:2 raised KeyError: 'y'"):
        load({"plugins": [str(file) if as_file else "failing_plugin"]})


def test_plugins_are_imported_before_keys_are_looked_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plugin = tmp_path / "my_plugin.py"
    plugin.write_text(
        "from dataclasses import dataclass\n"
        "from typing import Literal\n"
        "from flow_factory.hparams import TrainingArguments, register_training_args\n"
        "@register_training_args('from-plugin')\n"
        "@dataclass\n"
        "class Args(TrainingArguments):\n"
        "    trainer_type: Literal['from-plugin'] = 'from-plugin'\n"
    )
    changes = {"plugins": [str(plugin)], "train": {"trainer_type": "from-plugin"}}
    assert load(changes).trainer_key == "from-plugin"
    assert load(changes).plugins == [str(plugin)]  # a second load does not register twice
    with pytest.raises(InputError, match=r"missing_plugin\.py' does not exist"):
        load({"plugins": [str(tmp_path / "missing_plugin.py")]})
    with pytest.raises(InputError, match="no module 'no_such_plugin_module'"):
        load({"plugins": ["no_such_plugin_module"]})


def test_load_config_takes_paths_and_strings(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    path.write_text(BASE_YAML)
    assert load_config(path) == load_config(str(path)) == load(merged({}, {"data": {}}))
