"""Finding adapter classes."""

from __future__ import annotations

import pytest

from flow_factory.errors import InputError
from flow_factory.hparams import get_model_spec
from flow_factory.models import get_adapter_class, register_adapter
from flow_factory.models.sd3_5.adapter import SD3_5Adapter


def test_built_in_key_and_dotted_paths() -> None:
    assert get_adapter_class("sd3-5") is SD3_5Adapter
    assert get_adapter_class("SD3-5") is SD3_5Adapter
    assert get_adapter_class("flow_factory.models.sd3_5.adapter.SD3_5Adapter") is SD3_5Adapter


def test_an_adapter_outside_the_package_brings_its_spec() -> None:
    @register_adapter("outside-model", spec=get_model_spec("sd3-5"))
    class Outside(SD3_5Adapter):
        pass

    assert get_adapter_class("outside-model") is Outside
    assert get_model_spec("outside-model").key == "outside-model"
    with pytest.raises(InputError, match="already registered"):
        register_adapter("sd3-5", spec=get_model_spec("sd3-5"))(Outside)


def test_unknown_keys_are_refused() -> None:
    with pytest.raises(InputError, match="sd3-5"):
        get_adapter_class("sd35")
    with pytest.raises(InputError, match="no subclass"):
        get_adapter_class("flow_factory.models.guidance.GuidanceSpec")
