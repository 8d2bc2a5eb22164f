"""Building rewards: the registry, strict params, and the three built in that need no judge."""

from __future__ import annotations

import io
import subprocess
import sys

import numpy as np
import pytest
import torch
from PIL import Image

from flow_factory.errors import InputError, RunError
from flow_factory.hparams.reward_args import MultiRewardArguments
from flow_factory.rewards.abc import BaseRewardModel, PointwiseRewardModel
from flow_factory.rewards.build import build_reward_model, build_reward_models, check_rewards
from flow_factory.rewards.registry import get_reward_class, register_reward_model, reward_keys
from flow_factory.rewards.smoke import smoke_reward
from tests.rewards.helpers import PixelReward, WithParams, config, make_sample, make_video


def test_dotted_path_and_keys() -> None:
    """Built-in keys in any case, and a user's class by its dotted path."""
    assert {"jpeg_compressibility", "jpeg_incompressibility", "brightness", "prompt_match"} <= set(reward_keys())
    assert get_reward_class("Brightness").__name__ == "Brightness"
    assert isinstance(build_reward_model(config()), PixelReward)


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("brightnes", "Did you mean 'brightness'"),
        ("tests.rewards.helpers.PixelRewrd", "has no 'PixelRewrd'. Did you mean PixelReward"),
        ("tests.no_such_module.Reward", "there is no module 'tests.no_such_module'"),
        ("tests.rewards.helpers.make_sample", "not a reward class; subclass"),
        ("tests..helpers.PixelReward", "is not a dotted path"),
        (".PixelReward", "is not a dotted path"),
    ],
)
def test_reward_class_that_does_not_exist(key: str, said: str) -> None:
    """Names the value, the field and the remedy."""
    with pytest.raises(InputError) as caught:
        build_reward_model(config(reward_model=key))
    assert said in str(caught.value) and key in str(caught.value)


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("x = 1\ndef (\n", ":2 raised SyntaxError"),
        ("x = 1\n\nraise RuntimeError('boom')\n", ":3 raised RuntimeError: boom"),
        ("import sys\nsys.exit(5)\n", ":2 raised SystemExit: 5"),
        ("import no_such_package_here\n", "install 'no_such_package_here' or put its folder on PYTHONPATH"),
    ],
)
def test_a_module_that_fails_is_named_with_its_line(tmp_path, monkeypatch, text: str, said: str) -> None:
    """Nothing that a reward's own module does while it is imported ends in a traceback or in silence."""
    (tmp_path / "failing_rewards.py").write_text(text)
    monkeypatch.syspath_prepend(tmp_path)
    with pytest.raises(InputError) as caught:
        get_reward_class("failing_rewards.Mine")
    assert said in str(caught.value) and "failing_rewards" in str(caught.value)
    assert "failing_rewards.py" in str(caught.value)


def test_base_class_itself_is_refused() -> None:
    """A reward must say whether it scores samples one by one or by group."""

    @register_reward_model("neither-kind")
    class Neither(BaseRewardModel):
        def score(self, samples):
            return []

    with pytest.raises(InputError, match="PointwiseRewardModel"):
        get_reward_class("neither-kind")


def test_register() -> None:
    """A class outside the package gets a key."""

    @register_reward_model("always-one")
    class One(PointwiseRewardModel):
        def score(self, samples):
            return [1.0] * len(samples)

    assert smoke_reward(build_reward_model(config(reward_model="ALWAYS-ONE"))) == [1.0, 1.0]


def test_params_are_typed() -> None:
    """Values are read by the rules of the configuration: 1e-4 as text is a number."""
    params = WithParams(config(params={"scale": "1e-4", "names": ["x"]})).params
    assert params.scale == 1e-4 and params.level == 1 and params.names == ["x"]


@pytest.mark.parametrize(
    ("params", "said"),
    [
        ({"scale": 1.0, "levl": 2}, "levl"),
        ({"scale": 1.0, "levl": 2}, "level"),
        ({}, "scale"),
        ({"scale": "much"}, "much"),
        ({"scale": True}, "True"),
        ({"scale": 1.0, "level": 1.5}, "1.5"),
        ({"scale": float("nan")}, "nan"),
        ({"scale": 1.0, "flag": "perhaps"}, "perhaps"),
    ],
)
def test_wrong_params(params: dict, said: str) -> None:
    """Unknown (with the nearest), missing and wrong settings name the reward and the key."""
    with pytest.raises(InputError) as caught:
        check_rewards(
            MultiRewardArguments([config("mine", reward_model="tests.rewards.helpers.WithParams", params=params)])
        )
    assert said in str(caught.value) and "mine" in str(caught.value)


def test_params_of_a_reward_without_any() -> None:
    """A reward that takes no settings says so."""
    with pytest.raises(InputError, match=r"rewards\[r\]\.params: this reward takes none; remove 'scale'"):
        build_reward_model(config(params={"scale": 1}))


class Broken(PointwiseRewardModel):
    """Cannot be built."""

    def __init__(self, config) -> None:
        raise OSError("no weights here")

    def score(self, samples):
        return []


class Leaves(Broken):
    """Ends the process."""

    def __init__(self, config) -> None:
        sys.exit(7)


class Forgets(Broken):
    """Does not call the base class's constructor."""

    def __init__(self, config) -> None:
        pass


@pytest.mark.parametrize(
    ("name", "said"), [("Leaves", "could not be built: SystemExit: 7"), ("Forgets", r"super\(\).__init__\(config\)")]
)
def test_constructors_that_go_wrong_in_other_ways(name: str, said: str) -> None:
    """A constructor that exits, or leaves the reward without its name, is an error that says so."""
    with pytest.raises(RunError, match=rf"reward 'r' \(.*{name}\) .*{said}"):
        build_reward_model(config(reward_model=f"{__name__}.{name}"))


def test_broken_constructor_is_named() -> None:
    """A constructor's error says which reward it was."""
    with pytest.raises(RunError, match=r"reward 'r' \(.*Broken\) could not be built: OSError: no weights here"):
        build_reward_model(config(reward_model=f"{__name__}.Broken"))


@pytest.mark.parametrize(
    ("wanted", "rank_device", "found"),
    [("auto", "cuda:1", "cuda:1"), ("cuda", "cuda:1", "cuda:1"), ("cpu", "cuda:1", "cpu"), ("auto", "cpu", "cpu")],
)
def test_device_and_dtype(wanted: str, rank_device: str, found: str) -> None:
    """`auto` and `cuda` mean this rank's device; dtypes are strings, short or long."""
    model = build_reward_model(config(device=wanted, dtype="bf16"), rank_device)
    assert model.device == found and model.dtype is torch.bfloat16


def test_jpeg_size_is_ddpos() -> None:
    """Kilobytes (1000 bytes) of a JPEG of quality 95 (arXiv 2305.13301), negative for compressibility."""
    generator = torch.Generator().manual_seed(1)
    flat, noisy = make_sample(value=90), make_sample()
    noisy.image = torch.randint(0, 256, (3, 40, 24), dtype=torch.uint8, generator=generator)
    buffer = io.BytesIO()
    Image.fromarray(np.ascontiguousarray(noisy.image.numpy().transpose(1, 2, 0))).save(buffer, "JPEG", quality=95)
    models = build_reward_models(
        MultiRewardArguments(
            [config(key, reward_model=key) for key in ("jpeg_incompressibility", "jpeg_compressibility")]
        )
    )
    more, less = (model.score([flat, noisy]) for model in models)
    assert more[1] == len(buffer.getvalue()) / 1000
    assert list(less) == [-value for value in more]
    assert more[0] < more[1]


def test_brightness() -> None:
    """Mean luminance by BT.709, or minus the distance from a target between 0 and 1."""
    black, white, red = make_sample(value=0), make_sample(value=255), make_sample()
    red.image = torch.zeros(3, 8, 8, dtype=torch.uint8)
    red.image[0] = 255
    plain = build_reward_model(config(reward_model="brightness"))
    assert plain.score([black, white, red]) == pytest.approx([0.0, 1.0, 0.2126])
    frames = torch.stack([torch.full((3, 8, 8), value, dtype=torch.uint8) for value in (0, 51, 255)])
    assert plain.score([make_video(frames)]) == pytest.approx([0.4])
    noise = torch.randint(0, 256, (3, 3, 8, 12), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))
    weights = torch.tensor([0.2126, 0.7152, 0.0722], dtype=torch.float64)
    assert plain.score([make_video(noise)]) == pytest.approx(
        [(noise.double().mean(dim=(0, 2, 3)) @ weights).item() / 255]
    )
    aimed = build_reward_model(config(reward_model="brightness", params={"target": 0.25}))
    assert aimed.score([black, white]) == pytest.approx([-0.25, -0.75])
    with pytest.raises(InputError, match=r"1\.5"):
        build_reward_model(config(reward_model="brightness", params={"target": 1.5}))
    with pytest.raises(InputError, match="target"):
        build_reward_model(config(reward_model="brightness", params={"targt": 0.5}))


def test_registry_and_light_rewards_import_no_torch() -> None:
    """`check` validates entries of built-in rewards without torch, numpy or PIL."""
    code = (
        "import sys\n"
        "from flow_factory.hparams.reward_args import MultiRewardArguments, RewardArguments\n"
        "from flow_factory.rewards import get_reward_class\n"
        "from flow_factory.rewards.build import check_rewards\n"
        "for key in ('brightness', 'jpeg_compressibility'):\n"
        "    check_rewards(MultiRewardArguments([RewardArguments(name='r', reward_model=key)]))\n"
        "print([m for m in ('torch', 'numpy', 'PIL', 'datasets', 'transformers', 'diffusers') if m in sys.modules])\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
