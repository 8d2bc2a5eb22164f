"""Reference pictures: conditions of different numbers and sizes, and forwards over rows that agree."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from diffusers.pipelines.flux import pipeline_flux_kontext
from torch import Tensor

from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError
from flow_factory.models.conditions import PromptCondition
from flow_factory.models.references import ReferenceCondition, predict_by_shape
from flow_factory.samples import ComponentTimes, LatentState, StepTimes
from tests.parity.bench import Bench, set_path
from tests.parity.cases import flux1_kontext
from tests.parity.media import picture, pictures
from tests.parity.test_sampling import assert_latents

T = TypeVar("T")


def latents(seed: int, *shape: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def condition(shapes: Sequence[Sequence[tuple[int, ...]]], negatives: bool = False) -> ReferenceCondition:
    """Rows with references of the given shapes."""
    texts = PromptCondition(latents(1, len(shapes), 3, 2), negative_prompt_embeds=latents(2, len(shapes), 3, 2))
    texts = texts if negatives else replace(texts, negative_prompt_embeds=None)
    return ReferenceCondition.with_references(
        texts, [[latents(10 * row + i, *shape) for i, shape in enumerate(given)] for row, given in enumerate(shapes)]
    )


def same(a: ReferenceCondition, b: ReferenceCondition) -> bool:
    one, other = a.tensors(), b.tensors()
    return one.keys() == other.keys() and all(torch.equal(one[name], other[name]) for name in one)


RAGGED = [[(4, 2, 2)], [], [(4, 2, 2)], [(4, 2, 3), (4, 1, 1)], []]


def test_rows_of_any_number_of_references_join_and_part() -> None:
    """Pitfall 36: ragged reference images."""
    whole = condition(RAGGED, negatives=True)
    rows = [whole.row(i) for i in range(5)]
    assert [len(row.references[0]) for row in rows] == [1, 0, 1, 2, 0]
    assert all(row.batch_size == 1 for row in rows)
    assert same(ReferenceCondition.cat(rows), whole)
    assert same(ReferenceCondition.from_tensors(whole.tensors()), whole)
    assert same(ReferenceCondition.from_tensors(rows[3].tensors()), rows[3])
    halved = whole.to(dtype=torch.bfloat16)
    assert halved.references[3][1].dtype == halved.prompt_embeds.dtype == torch.bfloat16
    assert [[r.shape for r in given] for given in halved.references] == [[torch.Size(s) for s in g] for g in RAGGED]
    many = condition([[(1, 1, 1)] * 12] * 11)
    assert same(ReferenceCondition.from_tensors(dict(sorted(many.tensors().items()))), many), "order is not by name"
    with pytest.raises(ValueError, match="different fields"):
        ReferenceCondition.cat([whole, condition(RAGGED)])


def test_rows_are_grouped_by_the_shapes_of_their_references() -> None:
    groups = condition(RAGGED).groups
    assert [rows for rows, _ in groups] == [(0, 2), (1, 4), (3,)]
    assert [tuple(s.shape for s in some.stacked) for _, some in groups] == [
        ((2, 4, 2, 2),),
        (),
        ((1, 4, 2, 3), (1, 4, 1, 1)),
    ]
    alike = condition([[(4, 2, 2)]] * 3)
    assert alike.groups[0][1] is alike, "nothing is copied where all rows agree"


def test_predictions_by_shape_come_back_in_the_order_of_the_rows() -> None:
    whole = condition(RAGGED)
    state = LatentState.single(torch.arange(5.0).view(5, 1).requires_grad_())
    sigma = torch.arange(5.0)
    times = ComponentTimes({"latent": StepTimes(sigma, sigma - 1, 1000 * sigma)}, torch.arange(5), 9)
    calls = []

    def predict(state: LatentState, times: ComponentTimes, some: ReferenceCondition) -> LatentState:
        assert times.index is not None and times.length == 9
        assert torch.equal(times.only.timestep, 1000 * state.only[:, 0]) and torch.equal(times.index, times.only.sigma)
        calls.append(len(state.only))
        return state.map(lambda x: 2 * x + sum(float(r.sum()) for r in some.stacked))

    result = predict_by_shape(state, times, whole, predict).only
    assert calls == [2, 2, 1]
    sums = [sum(float(r.sum()) for _, part in whole.groups if row in _ for r in part.stacked) for row in range(5)]
    torch.testing.assert_close(result[:, 0], 2 * sigma + torch.tensor(sums))
    result.sum().backward()
    assert torch.equal(state.only.grad, torch.full((5, 1), 2.0))  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def kontext(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(flux1_kontext.CASES[0], tmp_path_factory.mktemp("kontext"))


def watch_forwards(adapter: Any, monkeypatch: pytest.MonkeyPatch, look: Callable[[dict[str, Any]], T]) -> list[T]:
    """A list that what `look` sees in the inputs of each forward is added to."""
    seen: list[T] = []
    network = adapter.network

    def watched(name: str) -> Any:
        def call(**inputs: Any) -> Any:
            seen.append(look(inputs))
            return network(name)(**inputs)

        return call

    monkeypatch.setattr(adapter, "network", watched)
    return seen


def count_forwards(adapter: Any, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """A list that the number of rows of each forward is added to."""
    return watch_forwards(adapter, monkeypatch, lambda inputs: len(inputs["hidden_states"]))


def test_one_forward_for_references_of_one_size(kontext: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    seen = count_forwards(kontext.fresh, monkeypatch)
    setting = kontext.case.setting("embedded")
    kontext.roll(kontext.fresh, setting, steps=1, decode=False)
    assert seen == [2, 1], "rows 0 and 2 together, row 1 alone"
    seen.clear()
    media = {"image": (picture(7, (24, 32)),)}
    kontext.roll(kontext.fresh, setting, steps=1, decode=False, inputs={"media": media})
    assert seen == [3]


@pytest.mark.parametrize("size", [(32, 32), (24, 40), (64, 20)])
def test_kontexts_own_sizes_are_the_pipelines(
    kontext: Bench, monkeypatch: pytest.MonkeyPatch, size: tuple[int, int]
) -> None:
    """`auto_resize`, with sizes that a CPU can bear in the place of those of about one megapixel."""
    small = [(w // 24, h // 24) for w, h in pipeline_flux_kontext.PREFERRED_KONTEXT_RESOLUTIONS]
    monkeypatch.setattr(pipeline_flux_kontext, "PREFERRED_KONTEXT_RESOLUTIONS", small)
    setting = kontext.case.setting("embedded")
    fields = replace(kontext.generation(setting), auto_resize=True)
    monkeypatch.setattr(kontext, "generation", lambda setting: fields)
    given = picture(1, size)
    condition = kontext.condition(kontext.fresh, setting, (0,), media={"image": (given,)})
    height, width = (2 * side for side in condition.references[0][0].shape[1:])
    assert any(width == w // 4 * 4 and height == h // 4 * 4 for w, h in small)
    assert (height > width) == (size[0] > size[1])
    own = kontext.roll(kontext.fresh, setting, rows=(0,), inputs={"media": {"image": (given,)}}, decode=False)
    expected = kontext.pipeline(
        image=pictures({"image": (given,)})[0],
        prompt=kontext.case.prompts[0],
        num_inference_steps=kontext.case.steps,
        generator=torch.Generator().manual_seed(3),
        output_type="latent",
        **kontext.fresh.size_arguments(*kontext.case.size),
        **kontext.fresh.call_arguments(setting.scale, fields),
    ).images
    assert_latents(kontext.latents(own), expected, str(size))


def test_kontext_needs_one_picture_of_a_token_at_least(kontext: Bench) -> None:
    setting = kontext.case.settings[0]
    for media, message in [
        ({}, "0 came with the prompt 'red dot'"),
        ({"image": (picture(1), picture(2))}, "2 came with"),
        ({"image": (picture(1, (3, 40)),)}, "a reference of 3 x 40 pixels is smaller than one token"),
    ]:
        with pytest.raises(InputError, match=message):
            kontext.condition(kontext.fresh, setting, (0,), media=media)


def test_kontexts_size_is_checked_before_weights_load(kontext: Bench) -> None:
    from flow_factory.cli.static_checks import check_statically
    from flow_factory.hparams import load_config_from_mapping

    mapping = kontext.mapping()
    set_path(mapping, "train.resolution", [30, 48])
    with pytest.raises(ConfigError, match="must be a multiple of 4 in height and width"):
        check_statically(load_config_from_mapping(mapping))


def test_kontexts_prompts_need_a_picture_each(tmp_path: Path) -> None:
    from flow_factory.data_utils.prompt_files import read_prompts
    from flow_factory.hparams import get_model_spec

    io = get_model_spec("flux1-kontext").io
    for text, message in [
        ('{"prompt": "a"}', "needs an image for 'image'"),
        ('{"prompt": "a", "images": ["1.png", "2.png"]}', "has 2 files; the model takes at most 1"),
        ('{"prompt": "a", "image": "1.png", "video": "2.mp4"}', "takes no video"),
    ]:
        file = tmp_path / "train.jsonl"
        file.write_text(text + "\n")
        with pytest.raises(InputError, match=message):
            read_prompts(file, io)


def test_kontexts_model_card_gives_a_picture_and_the_area(kontext: Bench) -> None:
    """Of height and width alone the pipeline would take the proportions and make a megapixel."""
    from flow_factory.hparams import load_config_from_mapping
    from flow_factory.trainers.model_card import _loading

    text = _loading(load_config_from_mapping(kontext.mapping()), lora=True)
    (call,) = [
        line.removeprefix("picture = ").removesuffix(".images[0]") for line in text.split("\n") if "prompt=" in line
    ]
    given = {keyword.arg: ast.unparse(keyword.value) for keyword in ast.parse(call, mode="eval").body.keywords}  # type: ignore[attr-defined]
    assert given["image"] == "load_image('input.png')" and "from diffusers.utils import load_image" in text
    assert (given["height"], given["width"], given["max_area"]) == ("32", "48", str(32 * 48))
    assert given["_auto_resize"] == "False" and given["prompt"] == "'a prompt'"
    assert given.keys() <= inspect.signature(pipeline_flux_kontext.FluxKontextPipeline.__call__).parameters.keys()
