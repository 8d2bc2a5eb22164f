"""FLUX.2 and FLUX.2 klein: sizes of references, forwards of a batch, and what is refused."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

from flow_factory.cli.static_checks import check_statically
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, get_model_spec, load_config_from_mapping
from flow_factory.hparams.models.flux2 import check_layers
from tests.models.test_references import count_forwards
from tests.parity.bench import Bench, set_path
from tests.parity.case import Case
from tests.parity.cases import flux2
from tests.parity.media import picture, pictures


def case(name: str) -> Case:
    return next(case for case in flux2.CASES if case.name == name)


@pytest.fixture(scope="module")
def dev(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(case("flux2-references"), tmp_path_factory.mktemp("flux2"))


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(case("flux2-klein-base"), tmp_path_factory.mktemp("base"))


@pytest.fixture(scope="module")
def distilled(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(case("flux2-klein-distilled"), tmp_path_factory.mktemp("distilled"))


def config_error(bench: Bench, fields: dict[str, Any]) -> str:
    """What the checks that load no weights say of dotted changes."""
    mapping = bench.mapping()
    for path, value in fields.items():
        set_path(mapping, path, value)
    with pytest.raises(ConfigError) as caught:
        check_statically(load_config_from_mapping(mapping))
    return str(caught.value)


class Seen(Exception):
    """Ends a call of the pipeline that has come far enough."""


@pytest.mark.parametrize("size", [(1100, 1000), (512, 64), (90, 70), (700, 2000)])
def test_references_are_read_as_by_the_pipeline(
    dev: Bench, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """Cut to multiples of the network's pixels, and first scaled to a megapixel if larger."""
    given = {"image": (picture(1, size),)}
    theirs: list[Tensor] = []

    def note(images: list[Tensor], **others: Any) -> None:
        theirs.extend(images)
        raise Seen

    monkeypatch.setattr(dev.pipeline, "prepare_image_latents", note)
    with pytest.raises(Seen):
        dev.pipeline(image=pictures(given), prompt="red dot", height=32, width=48, **dev.case.call)
    own: list[Tensor] = []

    def keep(image: Tensor, generator: None) -> Tensor:
        own.append(image)
        return torch.zeros(1, 16, 1, 1)

    monkeypatch.setattr(dev.fresh.pipeline, "_encode_vae_image", keep)
    dev.condition(dev.fresh, dev.case.settings[0], (0,), media=given)
    (ours,), (expected,) = own, theirs
    assert torch.equal(ours, expected)
    assert all(side % 8 == 0 for side in ours.shape[-2:]) and ours.shape[-2:].numel() <= 1024 * 1024


def test_rows_whose_references_agree_share_a_forward(dev: Bench, base: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """No loop over samples; with guidance, one more forward for each kind of row."""
    seen = count_forwards(dev.fresh, monkeypatch)
    dev.roll(dev.fresh, dev.case.settings[0], steps=1, decode=False)
    assert seen == [2, 1], "rows 0 and 1 together, row 2 alone"
    seen.clear()
    dev.roll(dev.fresh, dev.case.settings[0], steps=1, decode=False, inputs={"media": dev.case.media[0]})
    dev.roll(dev.fresh, dev.case.settings[0], steps=1, decode=False, inputs={"media": {}})
    assert seen == [3, 3]
    seen = count_forwards(base.fresh, monkeypatch)
    base.roll(base.fresh, base.case.setting("guided"), steps=1, decode=False)
    assert seen == [2, 2, 1, 1]
    seen.clear()
    base.roll(base.fresh, base.case.setting("unguided"), steps=1, decode=False)
    assert seen == [2, 1]


def test_the_order_of_references_matters(dev: Bench) -> None:
    one, two = picture(1, (64, 64)), picture(2, (64, 64))
    setting = dev.case.settings[0]
    results = [
        dev.latents(dev.roll(dev.fresh, setting, rows=(0,), steps=2, decode=False, inputs={"media": {"image": given}}))
        for given in ((one, two), (two, one))
    ]
    assert float((results[0]["latent"] - results[1]["latent"]).abs().max()) > 1e-3


@pytest.mark.parametrize(
    ("size", "message"),
    [((64, 63), r"flux2 cannot be used: Image too small: 63.64.* Give another `image`"), ((64, 600), "too extreme")],
)
def test_references_that_the_pipeline_refuses(dev: Bench, size: tuple[int, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        dev.condition(dev.fresh, dev.case.settings[0], (0,), media={"image": (picture(1, size),)})


def test_a_distilled_checkpoint_has_no_guidance(base: Bench, distilled: Bench) -> None:
    """Said before weights load where the checkpoint is local, and else once they are."""
    fields = {"train.guidance_scale": 3.0, "eval.guidance_scale": 2.0, "eval.eval_freq": 1}
    message = config_error(distilled, fields)
    assert f"is 3.0, but {distilled.folder} is a flux2-klein without guidance; use 1." in message
    assert message.count("without guidance") == 2 and "eval.guidance_scale" in message
    assert "without guidance" not in config_error(
        distilled, {**fields, "train.guidance_scale": 1.0, "eval.eval_freq": 0}
    )
    assert "without guidance" not in config_error(base, fields)
    with pytest.raises(InputError, match=r"guidance_scale is 3.5, but .* step-distilled FLUX.2 klein.*use 1"):
        distilled.fresh.guidance(3.5)
    assert distilled.fresh.guidance(1.0) == base.fresh.guidance(1.0)
    assert base.fresh.guidance(3.5).needs_negative()
    assert get_model_spec("flux2-klein").guidance_kind(None) == "cfg", "nothing is known of one on the Hub"


@pytest.mark.parametrize(
    ("layers", "message"),
    [
        ([1, 3], "is [1, 3], but the text encoder has 2 layers"),
        ([1], "is [1]: 1 x 16 channels, but the transformer reads 32; name 2."),
        ([], "[] must be a list of length at least 1"),
        ([-1, 2], "-1 must be at least 0"),
    ],
)
def test_layers_of_the_text_encoder_must_fit(dev: Bench, base: Bench, layers: list[int], message: str) -> None:
    for bench in (dev, base):
        assert message in config_error(bench, {"train.text_encoder_out_layers": layers}), bench.case.name
        if layers and min(layers) > 0:
            fields = type(bench.generation(bench.case.settings[0]))(10, layers)
            with pytest.raises(InputError, match="text_encoder_out_layers: is "):
                bench.fresh.encode_inputs(bench.inputs(), generation=fields)
            check_layers(fields, None)


def test_sizes_must_be_multiples(dev: Bench) -> None:
    assert "must be a multiple of 8 in height and width" in config_error(dev, {"train.resolution": [36, 48]})
