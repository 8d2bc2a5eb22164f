"""Model keys to adapter classes. Built-in keys come from the torch-free specs; others are registered by decorator."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING, Any, TypeVar

from flow_factory.errors import InputError
from flow_factory.hparams import ModelSpec, get_model_spec
from flow_factory.hparams.models import model_keys, register_model_spec
from flow_factory.registry import import_dotted

if TYPE_CHECKING:
    from flow_factory.models.abc import BaseAdapter

AdapterT = TypeVar("AdapterT", bound="type[BaseAdapter[Any]]")

_REGISTERED: dict[str, type[Any]] = {}


def register_adapter(key: str, spec: ModelSpec) -> Callable[[AdapterT], AdapterT]:
    """Class decorator for adapters outside the package.

    Args:
        key: The value of `model.model_type` that selects the adapter.
        spec: Static facts about the model; `check`, `list` and `config schema` read nothing else. Its `key` and
            `adapter` are set here.
    """

    def decorate(cls: AdapterT) -> AdapterT:
        register_model_spec(replace(spec, key=key, adapter=f"{cls.__module__}.{cls.__qualname__}"))
        _REGISTERED[key.lower()] = cls
        return cls

    return decorate


def get_adapter_class(key: str) -> type[BaseAdapter[Any]]:
    """The adapter class for `model.model_type`: registered, named by a spec, or at a dotted path.

    Raises:
        InputError: If nothing answers to `key`.
    """
    from flow_factory.models.abc import BaseAdapter

    cls = _REGISTERED.get(key.lower())
    if cls is None:
        dotted = "." in key and key.lower() not in model_keys()
        found = import_dotted(key, "model adapter", "model.model_type") if dotted else get_model_spec(key)
        path = found.adapter if isinstance(found, ModelSpec) else key
        cls = import_dotted(path, "model adapter", "model.model_type")
    if not (isinstance(cls, type) and issubclass(cls, BaseAdapter)):
        raise InputError(f"model.model_type: {key!r} leads to {cls!r}, which is no subclass of BaseAdapter.")
    return cls
