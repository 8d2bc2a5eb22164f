"""`call_arguments` against the calls whose results the other checks compare with rollouts."""

from __future__ import annotations

import inspect
import json
from typing import Any

import pytest
from diffusers import ModularPipeline

from flow_factory.hparams import get_model_spec
from flow_factory.hparams.models.registry import _MODEL_SPEC_REGISTRY
from flow_factory.models.registry import get_adapter_class
from tests.parity.case import Case, Setting
from tests.parity.cases import all_cases


def call_arguments(case: Case, setting: Setting, **fields: Any) -> dict[str, Any]:
    """What the adapter of the case says of a setting."""
    generation = get_model_spec(case.key).generation_arguments(**{**case.generation, **setting.generation, **fields})
    return get_adapter_class(case.key).call_arguments(setting.scale, generation)


def test_all_models_have_a_case() -> None:
    built_in = set(_MODEL_SPEC_REGISTRY.keys())  # `model_keys` also has what other tests have registered
    assert len(built_in) > 1 and {case.key for case in all_cases()} >= built_in


@pytest.mark.parametrize("case", all_cases(), ids=lambda case: case.name)
def test_the_pipeline_takes_every_argument_and_means_the_setting(case: Case) -> None:
    """The case's own calls are known to give the rollout's latents; what they leave out is the pipeline's default."""
    pipeline = case.build()
    if isinstance(pipeline, ModularPipeline):
        parameters = {entry.name: entry for entry in pipeline.blocks.inputs}
    else:
        parameters = inspect.signature(type(pipeline).__call__).parameters
    for setting in case.settings:
        arguments = call_arguments(case, setting)
        assert arguments.keys() <= parameters.keys(), f"{setting.name}: {arguments.keys() - parameters.keys()}"
        expected = {**case.call, **setting.call}
        assert expected.items() <= arguments.items(), f"{setting.name}: {arguments}"
        for name in arguments.keys() - expected.keys():
            # An empty negative prompt is what the adapter takes where none is given.
            if name != "negative_prompt" and name != "max_sequence_length":
                assert arguments[name] == parameters[name].default, f"{setting.name}: {name}"
        assert json.loads(json.dumps(arguments)) == arguments


def case_of(key: str) -> Case:
    """The first case of a model."""
    return next(case for case in all_cases() if case.key == key)


def test_flux1_has_the_users_scale_beside_true_cfg() -> None:
    setting = Setting("embedded", 3.5)
    assert call_arguments(case_of("flux1"), setting, max_sequence_length=77) == {
        "guidance_scale": 3.5,
        "true_cfg_scale": 1.0,
        "max_sequence_length": 77,
    }
    guided = call_arguments(case_of("flux1"), setting, true_cfg_scale=2.0)
    assert (guided["guidance_scale"], guided["true_cfg_scale"], guided["negative_prompt"]) == (3.5, 2.0, "")


def test_qwen_images_scale_is_the_pipelines_true_cfg_scale() -> None:
    case = case_of("qwen-image")
    guided = {"true_cfg_scale": 4.0, "max_sequence_length": 77, "negative_prompt": ""}
    assert call_arguments(case, Setting("guided", 4.0), max_sequence_length=77) == guided
    unguided = {"true_cfg_scale": 1.0, "max_sequence_length": 77}
    assert call_arguments(case, Setting("unguided", 1.0), max_sequence_length=77) == unguided


def test_z_images_scale_counts_from_0() -> None:
    assert call_arguments(case_of("z-image"), Setting("guided", 5.0))["guidance_scale"] == 5.0


def test_sana_is_told_to_leave_the_instruction_out() -> None:
    case = case_of("sana")
    assert call_arguments(case, Setting("guided", 4.5), enhance_prompts=False)["complex_human_instruction"] is None
    assert "complex_human_instruction" not in call_arguments(case, Setting("guided", 4.5), enhance_prompts=True)
