"""Model specs, checkpoint folders and built-in names, without torch."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from flow_factory.errors import InputError
from flow_factory.hparams import (
    GenerationArguments,
    ModelSpec,
    builtin_names,
    get_model_spec,
    model_keys,
    register_model_spec,
    resolve_builtin,
)
from flow_factory.hparams import builtin as builtin_module
from flow_factory.hparams.local_model import check_pipeline_folder, inspect_local_model, local_folder
from flow_factory.hparams.models.sd3_5 import SPEC
from tests.hparams.helpers import load

READ_BY_SPECS = (
    *(
        "block_out_channels",
        "encoder_block_out_channels",
        "layers_per_block",
        "patch_size",
        "patch_size_t",
        "sample_size",
    ),
    *("scale_factor_spatial", "scale_factor_temporal", "spatial_compression_ratio", "temporal_compression_ratio"),
    *("spatial_downsample_factors", "temporal_downsample_factors", "clip_length", "temperal_downsample", "num_layers"),
    *("spatio_temporal_scaling", "joint_attention_dim", "sample_rate", "mel_hop_length", "num_hidden_layers"),
)
COMPONENTS = ("transformer", "vae", "scheduler", "text_encoder", "tokenizer")


def make_folder(folder: Path, **changes: Any) -> Path:
    """A folder that looks like a small SD3 pipeline from outside."""
    index: dict[str, Any] = {"_class_name": "StableDiffusion3Pipeline", **{c: ["diffusers", "X"] for c in COMPONENTS}}
    index.update(changes)
    for component in COMPONENTS:
        (folder / component).mkdir(parents=True, exist_ok=True)
        (folder / component / "config.json").write_text("{}")
    (folder / "model_index.json").write_text(json.dumps({k: v for k, v in index.items() if v is not None}))
    (folder / "vae" / "config.json").write_text(json.dumps({"block_out_channels": [8, 8, 8]}))
    (folder / "transformer" / "config.json").write_text(json.dumps({"patch_size": 2, "sample_size": 16}))
    return folder


def test_sd3_5_facts() -> None:
    spec = get_model_spec("SD3-5")
    assert spec is SPEC
    assert spec.size_multiple() == 16 and spec.floor() == 256
    assert spec.generation_fields() == ("max_sequence_length",)
    assert spec.generation_arguments().max_sequence_length == 256
    assert set(spec.default_lora_targets) == {
        *("to_q", "to_k", "to_v", "to_out.0"),
        *("add_q_proj", "add_k_proj", "add_v_proj", "to_add_out"),
        *("ff.net.0.proj", "ff.net.2", "ff_context.net.0.proj", "ff_context.net.2"),
    }


def test_sizes_are_read_from_a_local_checkpoint(tmp_path: Path) -> None:
    """Pitfall 46: the model's own floor is a warning."""
    folder = make_folder(tmp_path / "m")
    assert SPEC.size_multiple(folder) == 8  # 2^2 x patch 2
    assert SPEC.floor(folder) == 16
    config = load({"model": {"model_name_or_path": str(folder)}, "train": {"resolution": 64}})
    found = inspect_local_model(config)
    assert (found.problems, found.warnings, found.folder) == ([], [], folder)
    found = inspect_local_model(load({"model": {"model_name_or_path": str(folder)}, "train": {"resolution": [64, 60]}}))
    assert "[64, 60] of sd3-5 must be a multiple of 8 in height and width, e.g. [64, 64]" in str(found.problems[0])
    found = inspect_local_model(load({"model": {"model_name_or_path": str(folder)}, "train": {"resolution": 8}}))
    assert found.problems == [] and "below 16" in found.warnings[0]
    own = {"datasets": [{"dataset_dir": "a", "eval": {"resolution": [64, 60]}}]}
    found = inspect_local_model(
        load(
            {"model": {"model_name_or_path": str(folder)}, "train": {"resolution": 64}}
            | {"data": {"dataset_dir": "data", **own}}
        )
    )
    (problem,) = found.problems
    assert problem.path == ("data", "datasets", 0, "eval", "resolution") and "multiple of 8" in problem.message
    found = inspect_local_model(load({"train": {"resolution": 128}}))
    assert found.folder is None and "train.resolution [128, 128] is below 256" in found.warnings[0]


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("./missing", ["'./missing' does not exist", "Hub id"]),
        ("/nowhere/at/all", ["does not exist"]),
        ("a/b/c", ["does not exist"]),
        ("missing", ["does not exist"]),
        ("builtin/nothing", ["no built-in model 'builtin/nothing'"]),
    ],
)
def test_missing_model_paths(name: str, words: list[str]) -> None:
    found = inspect_local_model(load({"model": {"model_name_or_path": name}}))
    (problem,) = found.problems
    assert problem.path == ("model", "model_name_or_path") and problem.place == "<python>"
    for word in words:
        assert word in problem.message


def test_a_hub_id_is_not_checked(tmp_path: Path) -> None:
    assert local_folder("stabilityai/stable-diffusion-3.5-medium") is None
    (tmp_path / "file").write_text("")
    with pytest.raises(InputError, match="is a file"):
        local_folder(str(tmp_path / "file"))


@pytest.mark.parametrize(
    ("changes", "match"),
    [
        (
            {"_class_name": "FluxPipeline"},
            "holds a FluxPipeline, but model_type 'sd3-5' loads a StableDiffusion3Pipeline",
        ),
        ({"_class_name": None}, "no _class_name"),
        ({"vae": None}, "lacks vae"),
        ({"text_encoder": [None, None]}, "lacks text_encoder"),
        (
            {"text_encoder_3": ["transformers", "T5EncoderModel"]},
            "lacks text_encoder_3, which model_type 'sd3-5' needs",
        ),
    ],
)
def test_folders_that_do_not_fit(tmp_path: Path, changes: dict[str, Any], match: str) -> None:
    with pytest.raises(InputError, match=match):
        check_pipeline_folder(make_folder(tmp_path, **changes), SPEC)


def test_folders_that_are_no_pipelines(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no model_index\.json"):
        check_pipeline_folder(tmp_path, SPEC)
    (tmp_path / "model_index.json").write_text("{")
    with pytest.raises(InputError, match="not valid JSON"):
        check_pipeline_folder(tmp_path, SPEC)


@pytest.mark.parametrize("text", ["{", "[]", "\xff"])
def test_a_damaged_configuration_of_a_component_is_named(tmp_path: Path, text: str) -> None:
    folder = make_folder(tmp_path)
    (folder / "transformer" / "config.json").write_text(text, encoding="latin-1")
    with pytest.raises(InputError, match=r"transformer/config\.json .*download the checkpoint again"):
        check_pipeline_folder(folder, SPEC)


@pytest.mark.parametrize(
    ("model", "field", "words"),
    [
        ({"frozen_parameters_dtype": {"vea": "bf16"}}, "frozen_parameters_dtype", "'vea' is no network of"),
        (
            {"component_load_dtypes": {"scheduler": "bf16"}},
            "component_load_dtypes",
            "its networks: text_encoder, trans",
        ),
        (
            {"finetune_type": "full", "frozen_parameters_dtype": {"transformer": "bf16"}},
            "frozen_parameters_dtype",
            "'transformer' is trained in full",
        ),
        ({"frozen_parameters_dtype": {"default": "bf16", "vae": "fp32"}}, "", ""),
    ],
)
def test_dtypes_are_of_networks_that_are_there(tmp_path: Path, model: dict[str, Any], field: str, words: str) -> None:
    folder = make_folder(tmp_path)
    for name in ("scheduler", "tokenizer"):
        (folder / name / "config.json").rename(folder / name / f"{name}_config.json")
    problems = inspect_local_model(load({"model": {"model_name_or_path": str(folder), **model}})).problems
    assert [p.path for p in problems] == ([("model", field)] if field else [])
    assert words in "".join(p.message for p in problems)


def test_a_component_of_another_class_is_a_warning(tmp_path: Path) -> None:
    """diffusers loads the index's class, and says nothing of the other."""
    folder = make_folder(tmp_path, vae=["diffusers", "AutoencoderKL"])
    (folder / "vae" / "config.json").write_text('{"_class_name": "AutoencoderDC", "block_out_channels": [8, 8, 8]}')
    found = inspect_local_model(load({"model": {"model_name_or_path": str(folder)}}))
    assert (
        "calls vae a AutoencoderKL, and so it is loaded, but its own config.json is that of a AutoencoderDC"
        in (found.warnings[0])
    )


def test_a_component_without_files_is_missing(tmp_path: Path) -> None:
    folder = make_folder(tmp_path)
    (folder / "tokenizer" / "config.json").unlink()
    with pytest.raises(InputError, match="lacks tokenizer"):
        check_pipeline_folder(folder, SPEC)


@pytest.mark.parametrize("key", model_keys())
@pytest.mark.parametrize("value", ["x", None, 0, []])
def test_values_that_no_component_can_have_are_no_traceback(tmp_path: Path, key: str, value: Any) -> None:
    """What is in a checkpoint is input as well: `check` asks the specs, which compute with it."""
    spec = get_model_spec(key)
    parts = {name for other in map(get_model_spec, model_keys()) for name in other.trainable_components}
    parts |= {
        *COMPONENTS,
        "audio_vae",
        "audio_scheduler",
        "vocoder",
        "connectors",
        "guider",
        "processor",
        "tokenizer_2",
    }
    parts |= {"text_encoder_2", "image_encoder", "image_processor", "feature_extractor"}
    for part in parts:
        (tmp_path / part).mkdir()
        (tmp_path / part / "config.json").write_text(json.dumps(dict.fromkeys(READ_BY_SPECS, value)))
    index = {"_class_name": spec.pipeline_class, **{part: ["diffusers", "X"] for part in parts}}
    (tmp_path / spec.index_file).write_text(json.dumps(index))
    model = {
        "model_type": key,
        "model_name_or_path": str(tmp_path),
        "target_components": spec.trainable_components[0],
    }
    found = inspect_local_model(load({"model": model, "train": {"per_device_batch_size": spec.max_batch or 8}}))
    if value is None and not isinstance(spec.size_factor, int):
        (problem,) = found.problems
        assert problem.path == ("model", "model_name_or_path") and f"that {key} cannot have" in problem.message


def test_a_pipeline_of_another_known_model_names_that_model(tmp_path: Path) -> None:
    other = dataclasses.replace(SPEC, key="test-other", pipeline_class="OtherPipeline")
    register_model_spec(other)
    with pytest.raises(InputError, match="use model_type test-other"):
        check_pipeline_folder(make_folder(tmp_path, _class_name="OtherPipeline"), SPEC)


@dataclasses.dataclass
class _Clashing(GenerationArguments):
    guidance_scale: float = 1.0


def test_registration_of_specs() -> None:
    with pytest.raises(InputError, match="both declare guidance_scale"):
        register_model_spec(dataclasses.replace(SPEC, key="test-clash", generation_arguments=_Clashing))
    with pytest.raises(InputError, match="'sd3-5' is already registered"):
        register_model_spec(SPEC)
    register_model_spec(dataclasses.replace(SPEC, key="Test-Third"))
    register_model_spec(dataclasses.replace(SPEC, key="Test-Third"))  # the same again is fine
    assert get_model_spec("test-third").key == "Test-Third"
    with pytest.raises(InputError, match="already registered"):
        register_model_spec(dataclasses.replace(SPEC, key="test-third", max_batch=1))


class AdapterWithSpec:
    """Stands for an adapter class outside the package."""

    spec = dataclasses.replace(SPEC, key="test-dotted", guidance="embedded")


def test_spec_of_an_adapter_by_dotted_path() -> None:
    spec = get_model_spec(f"{__name__}.AdapterWithSpec")
    assert isinstance(spec, ModelSpec) and spec.guidance == "embedded"
    config = load({"model": {"model_type": f"{__name__}.AdapterWithSpec"}})
    assert config.spec is spec


def test_builtin_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(builtin_module, "ASSETS", tmp_path)
    make_folder(tmp_path / "tiny-shapes")
    (tmp_path / "prompts" / "colours").mkdir(parents=True)
    (tmp_path / "prompts" / "__pycache__").mkdir()
    assert builtin_names("model") == ["tiny-shapes"] and builtin_names("prompts") == ["colours"]
    assert resolve_builtin("builtin/tiny-shapes", "model") == str(tmp_path / "tiny-shapes")
    assert resolve_builtin("builtin/colours/", "prompts") == str(tmp_path / "prompts" / "colours")
    assert resolve_builtin("some/path", "model") == "some/path"
    with pytest.raises(InputError, match=r"'builtin/tiny_shape'\. Did you mean builtin/tiny-shapes\?.*Built in:"):
        resolve_builtin("builtin/tiny_shape", "model")
    with pytest.raises(InputError, match=r"no built-in prompt set 'builtin/tiny-shapes'.*builtin/colours"):
        resolve_builtin("builtin/tiny-shapes", "prompts")


def test_what_ships_resolves() -> None:
    for kind in ("model", "prompts"):
        for name in builtin_names(kind):
            assert Path(resolve_builtin(f"builtin/{name}", kind)).is_dir()
