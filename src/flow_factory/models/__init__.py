"""Models: adapters around diffusers pipelines, the one rollout, and the weights being trained."""

from flow_factory.models.registry import get_adapter_class, register_adapter

__all__ = ["get_adapter_class", "register_adapter"]
