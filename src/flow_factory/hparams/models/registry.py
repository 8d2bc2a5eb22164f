"""Which ModelSpec belongs to a `model.model_type`."""

from __future__ import annotations

import dataclasses

from flow_factory.errors import InputError
from flow_factory.hparams.models.spec import ModelSpec
from flow_factory.registry import Registry

_MODEL_SPEC_REGISTRY = Registry(
    "model type",
    {
        "sd3-5": "flow_factory.hparams.models.sd3_5.SPEC",
        "qwen-image": "flow_factory.hparams.models.qwen_image.QWEN_IMAGE",
        "qwen-image-edit-plus": "flow_factory.hparams.models.qwen_image.QWEN_IMAGE_EDIT_PLUS",
        "qwen-image-2.1": "flow_factory.hparams.models.qwen_image.QWEN_IMAGE_2_1",
        "z-image": "flow_factory.hparams.models.z_image.SPEC",
        "sd1-5": "flow_factory.hparams.models.stable_diffusion.SD1_5",
        "sdxl": "flow_factory.hparams.models.stable_diffusion.SDXL",
        "sana": "flow_factory.hparams.models.sana.SPEC",
        "chroma": "flow_factory.hparams.models.flux.CHROMA",
        "cogview4": "flow_factory.hparams.models.cogview4.SPEC",
        "lumina2": "flow_factory.hparams.models.lumina2.SPEC",
        "flux1": "flow_factory.hparams.models.flux.FLUX1",
        "flux1-kontext": "flow_factory.hparams.models.flux.FLUX1_KONTEXT",
        "wan2_t2v": "flow_factory.hparams.models.wan.TEXT_TO_VIDEO",
        "wan2_i2v": "flow_factory.hparams.models.wan.IMAGE_TO_VIDEO",
        "wan2_v2v": "flow_factory.hparams.models.wan.VIDEO_TO_VIDEO",
        "hunyuanvideo-1.5": "flow_factory.hparams.models.hunyuan_video15.TEXT_TO_VIDEO",
        "hunyuanvideo-1.5-i2v": "flow_factory.hparams.models.hunyuan_video15.IMAGE_TO_VIDEO",
        "minimax-h3-t2va": "flow_factory.hparams.models.minimax_h3.TEXT",
        "minimax-h3-fl2va": "flow_factory.hparams.models.minimax_h3.FRAMES",
        "minimax-h3-ref2va": "flow_factory.hparams.models.minimax_h3.REFERENCES",
        "ltx2_t2av": "flow_factory.hparams.models.ltx2.TEXT_TO_AUDIO_VIDEO",
        "ltx2_i2av": "flow_factory.hparams.models.ltx2.IMAGE_TO_AUDIO_VIDEO",
        "flux2": "flow_factory.hparams.models.flux2.FLUX2",
        "flux2-klein": "flow_factory.hparams.models.flux2.FLUX2_KLEIN",
    },
    field="model.model_type",
)
_EXTRA: dict[str, ModelSpec] = {}


def register_model_spec(spec: ModelSpec) -> None:
    """Makes a model known under `spec.key`; `@register_adapter` does this for adapters outside the package.

    Raises:
        InputError: If the key is taken, or a model-specific field has the name of a field of `train:` or `eval:`.
    """
    check_field_clash(spec)
    known = _EXTRA.get(spec.key.lower())
    if spec.key.lower() in _MODEL_SPEC_REGISTRY or (known is not None and known != spec):
        raise InputError(f"model type {spec.key!r} is already registered; choose another key.")
    _EXTRA[spec.key.lower()] = spec


def model_keys() -> list[str]:
    """The known model types."""
    return sorted({*_MODEL_SPEC_REGISTRY.keys(), *_EXTRA})


def get_model_spec(key: str) -> ModelSpec:
    """The spec of a model.

    Args:
        key: A known model type, or the dotted path of a ModelSpec or of an adapter class that carries one as `spec`.

    Raises:
        InputError: If there is no such model.
    """
    if key.lower() in _EXTRA:
        return _EXTRA[key.lower()]
    found = _MODEL_SPEC_REGISTRY.get(key)
    spec = found if isinstance(found, ModelSpec) else getattr(found, "spec", None)
    if not isinstance(spec, ModelSpec):
        raise InputError(f"model.model_type {key!r} leads to {found!r}, which is no ModelSpec and has none as `spec`.")
    return spec


def check_field_clash(spec: ModelSpec, training_args: type | None = None) -> None:
    """Raises an InputError if a model-specific field has the name of a field of `train:` or `eval:`."""
    from flow_factory.hparams.run_args import EvaluationArguments
    from flow_factory.hparams.training_args import OfflineFlowMatchingTrainingArguments, TrainingArguments

    sections = (EvaluationArguments, training_args or TrainingArguments, OfflineFlowMatchingTrainingArguments)
    own = set(spec.generation_fields())
    for section in sections if training_args is None else sections[:2]:
        clash = sorted(own & {f.name for f in dataclasses.fields(section)})
        if clash:
            raise InputError(
                f"model {spec.key!r} and {section.__name__} both declare {', '.join(clash)}; rename the model's field."
            )
