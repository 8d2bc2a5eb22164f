"""Prompts and media in, media out."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from diffusers import QwenImagePipeline, StableDiffusion3Pipeline
from PIL import Image
from safetensors.torch import load_file, save_file

from flow_factory.errors import InputError
from flow_factory.models.components import checkpoint_folder, load_pipeline_class
from flow_factory.models.sd3_5.adapter import SD3_5Adapter
from tests.models.support import PROMPTS, generators, make_adapter
from tests.models.tiny_pipelines import CLIP_TOKENS


@pytest.mark.parametrize("length", [4, 10])
def test_max_sequence_length_is_passed_on(tiny_sd3_dir: Path, pipeline: StableDiffusion3Pipeline, length: int) -> None:
    """Pitfall 58: max_sequence_length not passed on: 256 zero tokens, 3.5 x slower on a small model."""
    adapter = make_adapter(tiny_sd3_dir, {"train.max_sequence_length": length})
    condition = adapter.encode_prompt(["dot"])
    assert condition.prompt_embeds.shape == (1, CLIP_TOKENS + length, 40)
    fields = make_adapter(tiny_sd3_dir, {"eval.max_sequence_length": length}).config.eval_generation
    assert adapter.encode_prompt(["dot"], generation=fields).prompt_embeds.equal(condition.prompt_embeds)
    expected = pipeline.encode_prompt("dot", None, None, max_sequence_length=length)[0]  # type: ignore[arg-type]
    torch.testing.assert_close(condition.prompt_embeds, expected, rtol=0, atol=1e-5)


def test_negatives_are_encoded_when_asked_for(fresh: SD3_5Adapter) -> None:
    """Pitfall 35: None negatives crash."""
    assert fresh.encode_prompt(PROMPTS).negative_prompt_embeds is None
    missing = fresh.encode_prompt(PROMPTS, None, need_negative=True)
    mixed = fresh.encode_prompt(PROMPTS, [None, "blur", ""], need_negative=True)
    assert missing.negative_prompt_embeds is not None and mixed.negative_prompt_embeds is not None
    torch.testing.assert_close(missing.negative_prompt_embeds[0], mixed.negative_prompt_embeds[0], rtol=0, atol=1e-6)
    assert not torch.allclose(missing.negative_prompt_embeds[1], mixed.negative_prompt_embeds[1])
    assert not mixed.prompt_embeds.requires_grad


def test_conditions_of_a_group_join_without_change(fresh: SD3_5Adapter) -> None:
    condition = fresh.encode_prompt(PROMPTS, None, need_negative=True)
    joined = fresh.collate_conditions([condition.row(i) for i in range(len(PROMPTS))])
    assert all(torch.equal(joined.tensors()[name], tensor) for name, tensor in condition.tensors().items())
    assert joined.guided[0].shape[0] == 2 * len(PROMPTS) and joined.guided is joined.guided
    again = type(condition).from_tensors(condition.tensors())
    assert torch.equal(again.prompt_embeds, condition.prompt_embeds)


def test_bytes_are_scaled_before_the_vae(fresh: SD3_5Adapter) -> None:
    """Pitfall 16: uint8 frames reach the VAE unscaled."""
    g = torch.Generator().manual_seed(0)
    media = [torch.randint(0, 256, (3, 32, 24), generator=g, dtype=torch.uint8) for _ in range(2)]
    assert fresh.supports_output_encoding
    latents = fresh.encode_output_state(media).only
    vae = fresh.pipeline.vae
    pil = [Image.fromarray(np.ascontiguousarray(m.permute(1, 2, 0).numpy())) for m in media]
    pixels = fresh.pipeline.image_processor.preprocess(pil)
    assert -1 <= float(pixels.min()) < -0.9 and 0.9 < float(pixels.max()) <= 1
    with torch.no_grad():
        expected = (vae.encode(pixels).latent_dist.mode() - vae.config.shift_factor) * vae.config.scaling_factor
    torch.testing.assert_close(latents, expected, rtol=0, atol=1e-5)
    assert latents.shape == (2, 4, 16, 12) and not latents.requires_grad
    sampled = fresh.encode_output_state(media, generators([1, 2])).only
    alone = fresh.encode_output_state(media[1:], generators([2])).only
    assert not torch.allclose(sampled, latents)
    torch.testing.assert_close(sampled[1:], alone, rtol=0, atol=1e-5)


def test_encoder_identity_notices_what_changes_an_encoding(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """Pitfall 28: changed files, encoder, dtype or max length are not noticed."""
    copied = tmp_path / "copy"
    shutil.copytree(tiny_sd3_dir, copied)
    first = make_adapter(tiny_sd3_dir).encoder_identity()
    assert make_adapter(copied).encoder_identity() == first, "the folder's name is not the identity"
    assert make_adapter(copied, {"train.max_sequence_length": 4}).encoder_identity() != first
    short = make_adapter(copied, {"eval.max_sequence_length": 4})
    assert short.encoder_identity() == first != short.encoder_identity(short.config.eval_generation)
    assert make_adapter(copied, {"model.frozen_parameters_dtype": {"text_encoder": "bf16"}}).encoder_identity() != first
    weights = copied / "text_encoder_2" / "model.safetensors"
    raw = bytearray(weights.read_bytes())
    raw[-4:] = b"\0\0\0\0"
    weights.write_bytes(bytes(raw))
    assert make_adapter(copied).encoder_identity() != first


def test_checkpoints_that_do_not_fit_are_refused(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="no folder"):
        checkpoint_folder(str(tmp_path / "nothing"))
    with pytest.raises(InputError, match=r"model_index\.json"):
        load_pipeline_class(StableDiffusion3Pipeline, tmp_path)
    other = tmp_path / "other"
    shutil.copytree(tiny_sd3_dir, other)
    index = other / "model_index.json"
    index.write_text(index.read_text().replace("StableDiffusion3Pipeline", "FluxPipeline"))
    with pytest.raises(InputError, match="FluxPipeline"):
        load_pipeline_class(StableDiffusion3Pipeline, other)


@pytest.mark.parametrize("weights", ["transformer", "vae", "text_encoder"])
@pytest.mark.parametrize("size", [0, 20, -5])
def test_a_weights_file_that_is_cut_off_is_named(tiny_sd3_dir: Path, tmp_path: Path, weights: str, size: int) -> None:
    """diffusers and transformers each say this in their own way, and not always of which file."""
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_sd3_dir, folder)
    file = next((folder / weights).glob("*.safetensors"))
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(InputError, match=rf"could not be loaded: .*{weights}.*safetensors is damaged .*copy it again"):
        load_pipeline_class(StableDiffusion3Pipeline, folder)


@pytest.mark.parametrize(("component", "key"), [("vae", "layers_per_block"), ("text_encoder", "num_hidden_layers")])
def test_weights_that_a_file_lacks_are_not_drawn_at_random(
    tiny_sd3_dir: Path, tmp_path: Path, component: str, key: str
) -> None:
    """transformers draws them with no more than a warning; diffusers leaves them without numbers."""
    folder = tmp_path / "pipeline"
    shutil.copytree(tiny_sd3_dir, folder)
    file = folder / component / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, key: config[key] + 1}))
    with pytest.raises(InputError, match=rf"could not be loaded: the weights in .*{component} lack \d+ tensor.*Copy"):
        load_pipeline_class(StableDiffusion3Pipeline, folder)


def test_an_absent_third_encoder_is_no_error(tiny_sd3_dir: Path, tmp_path: Path) -> None:
    """`text_encoder_3: null` breaks a plain `from_pretrained`."""
    folder = tmp_path / "no-t5"
    shutil.copytree(tiny_sd3_dir, folder)
    index = folder / "model_index.json"
    text = index.read_text()
    for name, classes in (("text_encoder_3", '"T5EncoderModel"'), ("tokenizer_3", '"T5Tokenizer"')):
        start = text.index(f'"{name}"')
        end = text.index("]", start) + 1
        assert classes[:3] in text[start:end]
        text = text[:start] + f'"{name}": [null, null]' + text[end:]
        shutil.rmtree(folder / name)
    index.write_text(text)
    adapter = make_adapter(folder)
    embeds = adapter.encode_prompt(["dot"]).prompt_embeds
    assert embeds.shape == (1, CLIP_TOKENS + 10, 40) and not embeds[:, CLIP_TOKENS:].any()


def test_a_language_models_head_may_be_left_out(tmp_path: Path) -> None:
    """Pipelines read its hidden states; repositories without the head, which is a large matrix, are in use."""
    from tests.parity.cases.qwen_image import CASES

    CASES[0].build().save_pretrained(tmp_path)
    (file,) = (tmp_path / "text_encoder").glob("*.safetensors")
    state = load_file(file)
    assert state.pop("lm_head.weight").ndim == 2
    save_file(state, file, {"format": "pt"})
    assert load_pipeline_class(QwenImagePipeline, tmp_path).text_encoder is not None
    del state["model.norm.weight"]
    save_file(state, file, {"format": "pt"})
    with pytest.raises(InputError, match="lack 1 tensor"):
        load_pipeline_class(QwenImagePipeline, tmp_path)
