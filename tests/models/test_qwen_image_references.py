"""References of Qwen-Image-Edit-Plus and Qwen-Image 2.1: sizes, forwards, grids and inputs that cannot be used."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers.pipelines.qwenimage import pipeline_qwenimage_edit_plus

from flow_factory.cli.static_checks import check_statically
from flow_factory.data_utils.prompt_files import read_prompts
from flow_factory.errors import InputError
from flow_factory.hparams import ConfigError, get_model_spec, load_config_from_mapping
from flow_factory.models.qwen_image.qwen_image_21 import over_white
from flow_factory.samples import Media
from flow_factory.trainers.model_card import _loading
from tests.models.support import generators
from tests.models.test_references import count_forwards, watch_forwards
from tests.parity.bench import SEEDS, Bench, set_path
from tests.parity.cases import qwen_image_21, qwen_image_edit_plus
from tests.parity.media import picture, pictures
from tests.parity.test_sampling import assert_latents


@pytest.fixture(scope="module")
def edit(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(qwen_image_edit_plus.CASES[0], tmp_path_factory.mktemp("edit"))


@pytest.fixture(scope="module")
def sequence(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bench]:
    yield Bench(qwen_image_21.CASES[1], tmp_path_factory.mktemp("sequence"))


def config_error(bench: Bench, **fields: Any) -> str:
    """What `check` says of a configuration with other fields of `train:`; no weights are loaded."""
    mapping = bench.mapping()
    for name, value in fields.items():
        set_path(mapping, f"train.{name}", value)
    with pytest.raises(ConfigError) as caught:
        check_statically(load_config_from_mapping(mapping))
    return str(caught.value)


def rows_error(key: str, folder: Path, row: str) -> str:
    """What reading a prompt file of one row says."""
    file = folder / "train.jsonl"
    file.write_text(row + "\n")
    with pytest.raises(InputError) as caught:
        read_prompts(file, get_model_spec(key).io)
    return str(caught.value)


# Qwen-Image-Edit-Plus ----------------------------------------------------------------------------------------------


def test_sizes_of_references_are_the_pipelines_unless_configured() -> None:
    fields = get_model_spec("qwen-image-edit-plus").generation_arguments()
    assert fields.condition_image_size == pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE
    assert fields.vae_image_size == pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE


def test_the_model_card_sets_sizes_that_the_pipeline_takes_as_constants(edit: Bench) -> None:
    config = load_config_from_mapping(edit.mapping() | {"eval": {"resolution": [32, 48], "vae_image_size": 96 * 96}})
    text = _loading(config, lora=True)
    before = text[: text.index("picture = ")]
    assert "image=load_image(" in text and "vae_image_size" not in text
    assert [line for line in before.splitlines() if line.startswith("pipeline_qwenimage_edit_plus.")] == [
        "pipeline_qwenimage_edit_plus.CONDITION_IMAGE_SIZE = 1600",
        "pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE = 9216",
    ]
    adapter, default = type(edit.fresh), get_model_spec("qwen-image-edit-plus").generation_arguments()
    assert adapter.call_setup(4.0, default, (32, 48)) == ()
    with qwen_image_edit_plus.calling():  # puts the constants back
        exec("\n".join(adapter.call_setup(4.0, config.eval_generation, (32, 48))), {})
        assert pipeline_qwenimage_edit_plus.VAE_IMAGE_SIZE == 9216


def test_each_configured_size_decides_its_own_part(edit: Bench) -> None:
    """The latents' size follows one field, the number of the language model's tokens the other."""
    adapter, setting = edit.fresh, edit.case.setting("unguided")
    fields = edit.generation(setting)
    tokens, shapes = [], []
    for seen, read in [(40 * 40, 48 * 48), (40 * 40, 96 * 96), (56 * 56, 48 * 48)]:
        some = type(fields)(condition_image_size=seen, vae_image_size=read)
        condition = adapter.encode_inputs(edit.inputs((0,)), False, some)
        tokens.append(int(condition.prompt_mask.sum()))
        shapes.append(tuple(condition.references[0][0].shape))
    # 24 x 33 pixels become 32 x 64, and 96 x 128 of 9,216; the VAE halves sides. The language model sees 28 x 56 pixels
    # or 56 x 56, a token for each 28 x 28.
    assert shapes == [(4, 16, 32), (4, 48, 64), (4, 16, 32)]
    assert tokens[0] == tokens[1] and tokens[2] == tokens[0] + 1


def test_edited_rows_whose_references_and_texts_agree_share_a_forward(
    edit: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen = count_forwards(edit.fresh, monkeypatch)
    setting = edit.case.setting("guided")
    edit.roll(edit.fresh, setting, steps=2, decode=False)
    assert seen == [1] * 12, "prompts of three lengths"
    seen.clear()
    edit.roll(edit.fresh, setting, steps=2, decode=False, inputs={"prompt": "a dog", "negative_prompt": "no"})
    assert seen == [2, 2, 1, 1] * 2, "rows 0 and 2 together, row 1 alone, with and without the prompt"


def test_edited_rows_are_neither_padded_nor_masked(edit: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, setting = edit.fresh, edit.case.setting("guided")
    condition = edit.condition(adapter, setting, (0, 1, 2))
    positive, negative = (
        [int(length) for length in mask.sum(dim=1)]  # type: ignore[union-attr]
        for mask in (condition.prompt_mask, condition.negative_prompt_mask)
    )
    assert len(set(positive)) == 3 and condition.prompt_embeds.shape[1] == max(positive), "collated rows are padded"
    expected = [length for pair in zip(positive, negative, strict=True) for length in pair]
    seen = watch_forwards(
        adapter,
        monkeypatch,
        lambda inputs: (inputs["encoder_hidden_states"].shape[1], inputs["encoder_hidden_states_mask"]),
    )
    edit.roll(adapter, setting, steps=2, decode=False)
    assert seen == [(length, None) for length in expected] * 2


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({}, "edits pictures, but none came with the prompt 'red dot'; give one or more as `image`"),
        (
            {"image": (picture(1, (1, 500)),)},
            r"a reference of 1 x 500 pixels .* is too narrow: .*1600 pixels \(condition_image_size\)",
        ),
        ({"image": (picture(1), picture(2, (900, 1)))}, "a reference of 900 x 1 pixels"),
    ],
)
def test_references_that_cannot_be_edited(edit: Bench, media: Media, message: str) -> None:
    with pytest.raises(InputError, match=message):
        edit.condition(edit.fresh, edit.case.settings[0], (0,), media=media)


def test_edits_are_checked_before_weights_load(edit: Bench, tmp_path: Path) -> None:
    assert "must be a multiple of 4 in height and width, e.g. [32, 48]" in config_error(edit, resolution=[30, 48])
    assert "vae_image_size" in config_error(edit, vae_image_size=100)
    assert "max_sequence_length" in config_error(edit, max_sequence_length=77), "a field of qwen-image"
    key = "qwen-image-edit-plus"
    assert "needs an image for 'image'" in rows_error(key, tmp_path, '{"prompt": "a"}')
    assert "takes no video" in rows_error(key, tmp_path, '{"prompt": "a", "image": "1.png", "video": "2.mp4"}')
    assert "takes no image" in rows_error("qwen-image", tmp_path, '{"prompt": "a", "image": "1.png"}')


# Qwen-Image 2.1 ----------------------------------------------------------------------------------------------------


def test_the_pipelines_cache_changes_nothing(sequence: Bench) -> None:
    """The adapter computes keys and values of text and references anew at every step."""
    setting = sequence.case.setting("guided")
    for row in range(3):
        own = sequence.latents(sequence.roll(sequence.fresh, setting, rows=(row,), decode=False))
        expected = sequence.pipeline(
            prompt=sequence.case.prompts[row],
            negative_prompt=sequence.case.negatives[row] or "",
            height=64,
            width=96,
            num_inference_steps=sequence.case.steps,
            generator=generators([SEEDS[row]]),
            output_type="latent",
            output_resolution=48,
            true_cfg_scale=setting.scale,
            **({"image": pictures(sequence.case.media[row])} if sequence.case.media[row] else {}),
        ).images
        assert_latents(own, expected, f"row {row}")


def test_rows_of_one_layout_share_a_forward(sequence: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lengths of prompts and sizes of references decide; negative prompts have lengths of their own."""
    seen = count_forwards(sequence.fresh, monkeypatch)
    setting = sequence.case.setting("guided")
    sequence.roll(sequence.fresh, setting, steps=1, decode=False)
    assert seen == [1] * 6
    seen.clear()
    same: dict[str, Any] = {"prompt": "a dog", "media": {"image": (picture(1, (24, 33)),)}, "negative_prompt": "no"}
    together = sequence.latents(sequence.roll(sequence.fresh, setting, steps=2, decode=False, inputs=same))
    assert seen == [3] * 4
    alone = sequence.latents(sequence.roll(sequence.fresh, setting, rows=(1,), steps=2, decode=False, inputs=same))
    torch.testing.assert_close(together["latent"][1:2], alone["latent"], rtol=0, atol=1e-5)


def test_the_order_of_references_matters(sequence: Bench) -> None:
    setting = sequence.case.setting("unguided")
    one, other = picture(1, (24, 33)), picture(2, (24, 33))
    results = [
        sequence.latents(
            sequence.roll(sequence.fresh, setting, rows=(0,), decode=False, inputs={"media": {"image": given}})
        )["latent"]
        for given in [(one, other), (other, one)]
    ]
    assert float((results[0] - results[1]).abs().max()) > 1e-3


def test_a_checkpoints_own_sigmas_are_walked(sequence: Bench) -> None:
    """`sample_sigmas`: the pipeline ignores the number of steps, which is refused here."""
    adapter, pipeline = sequence.adapter(), sequence.load_pipeline()
    for one in (adapter.pipeline, pipeline):
        one.register_to_config(sample_sigmas=[1.0, 0.7, 0.4])
    pipeline(prompt="star", height=64, width=96, num_inference_steps=8, output_type="latent", output_resolution=48)
    state = adapter.prepare_latents(None, generators([0]), 64, 96)
    assert torch.equal(adapter.sigma_grid(3, state, None).primary, pipeline.scheduler.sigmas)
    with pytest.raises(InputError, match=r"samples in 3 steps of its own .* num_inference_steps is 8; set it to 3"):
        adapter.sigma_grid(8, state, None)


def test_a_reference_that_the_processor_resizes_is_refused(sequence: Bench) -> None:
    setting = sequence.case.settings[0]
    fields = type(sequence.generation(setting))(output_resolution=192)  # the tiny processor keeps up to 128 x 128
    with pytest.raises(InputError, match="its processor resized what output_resolution 192 gave"):
        sequence.fresh.encode_inputs(sequence.inputs((0,)), False, fields)
    with pytest.raises(InputError, match=r"a reference of 1 x 500 pixels .*2304 pixels \(output_resolution squared\)"):
        sequence.condition(sequence.fresh, setting, (0,), media={"image": (picture(1, (1, 500)),)})


def test_sequences_are_checked_before_weights_load(sequence: Bench, tmp_path: Path) -> None:
    assert "must be a multiple of 32 in height and width" in config_error(sequence, resolution=[64, 80])
    assert "output_resolution" in config_error(sequence, output_resolution=16)
    assert "takes no video" in rows_error("qwen-image-2.1", tmp_path, '{"prompt": "a", "video": "2.mp4"}')


def test_transparency_is_shown_on_white() -> None:
    picture = torch.tensor([[200, 200, 0], [100, 100, 0], [0, 0, 0], [255, 0, 51]], dtype=torch.uint8).view(4, 1, 3)
    expected = torch.tensor([[200, 255, 204], [100, 255, 204], [0, 255, 204]], dtype=torch.uint8).view(3, 1, 3)
    assert torch.equal(over_white(picture), expected)
