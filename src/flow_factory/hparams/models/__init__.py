"""Static facts of the models, readable without torch: one ModelSpec per adapter key."""

from flow_factory.hparams.models.registry import get_model_spec, model_keys, register_model_spec
from flow_factory.hparams.models.spec import GenerationArguments, ModelSpec

__all__ = ["GenerationArguments", "ModelSpec", "get_model_spec", "model_keys", "register_model_spec"]
