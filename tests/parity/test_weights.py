"""Weights, media and conditions that leave the adapter and come back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from flow_factory.contracts import Modality
from flow_factory.data_utils.condition_cache import ConditionCache
from flow_factory.data_utils.prompt_dataset import MediaFile, PromptRecord
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.models import images, videos
from flow_factory.models.comfyui import DiffusersNames
from flow_factory.samples import Audio, VideoWithSound
from tests.models.support import generators, stir
from tests.parity.bench import SEEDS, Bench
from tests.parity.test_sampling import assert_latents, named

KEYS = Path(__file__).parent / "lora_keys"


def test_exported_lora_is_the_same_in_plain_diffusers(bench: Bench, tmp_path: Path) -> None:
    """Pitfalls 24, 27, 54: an empty LoRA; names that nothing reads; alpha (here 2 r) lost on export."""
    file = bench.stirred.export_lora(tmp_path)
    setting = bench.case.settings[-1]
    pipeline = bench.load_pipeline()
    bench.case.load_lora(pipeline, file)
    after = bench.reference(setting, pipeline=pipeline)
    assert_latents(bench.stirred_latents, after, "with the exported LoRA")
    before = named(bench.reference(setting))
    assert max(float((named(after)[n] - before[n]).abs().max()) for n in before) > 1e-2, "the LoRA does nothing"


def test_names_of_exported_weights(bench: Bench, tmp_path: Path) -> None:
    """The committed list: `<component>.<module as diffusers names it>.lora_{A,B}.weight`, nothing else.

    This is the layout of diffusers' `load_lora_weights` (https://huggingface.co/docs/diffusers/api/loaders/lora).
    """
    state = load_file(bench.stirred.export_lora(tmp_path))
    committed = KEYS / f"{bench.case.name}.txt"
    assert committed.is_file(), f"python -m tests.parity.write_lora_keys {bench.case.name}"
    modules = committed.read_text().split()
    assert sorted(state) == sorted(f"{m}.lora_{side}.weight" for m in modules for side in "AB")
    assert all(t.dtype == torch.float32 and float(t.abs().max()) > 0 for t in state.values())


def test_lora_for_comfyui(bench: Bench, tmp_path: Path) -> None:
    """Committed keys, whose source the list's first line cites. In diffusers it does what diffusers' own file does."""
    adapter_class = type(bench.stirred)
    state = load_file(bench.stirred.export_lora(tmp_path))
    names = adapter_class.comfyui
    if names is None:
        with pytest.raises(InputError, match="Use --format diffusers"):
            adapter_class.comfyui_lora(state)
        return
    contents = adapter_class.comfyui_lora(state)
    committed = KEYS / f"{bench.case.name}.comfyui.txt"
    assert committed.is_file(), f"python -m tests.parity.write_lora_keys {bench.case.name}"
    assert committed.read_text().splitlines() == comfyui_list(names.source, contents)
    if isinstance(names, DiffusersNames):  # the very file that is loaded above
        assert contents[""].keys() == state.keys() and all(torch.equal(contents[""][key], state[key]) for key in state)
        return
    files = {model: tmp_path / f"comfyui_{model}.safetensors" for model in contents}
    for model, file in files.items():
        save_file(contents[model], file)
    pipeline = bench.load_pipeline()
    bench.case.load_comfyui(pipeline, files)
    after = bench.reference(bench.case.settings[-1], pipeline=pipeline)
    assert_latents(bench.stirred_latents, after, "with the LoRA for ComfyUI")


def comfyui_list(source: str, contents: Mapping[str, Mapping[str, Tensor]]) -> list[str]:
    """The lines of a committed list; the keys of several files have the model they are for in front."""
    keys = [f"{model}/{key}" if model else key for model, content in contents.items() for key in content]
    return [f"# {source}", *sorted(keys)]


def test_full_weights_are_saved_and_loaded(bench: Bench, tmp_path: Path) -> None:
    setting = bench.case.settings[0]
    trained = bench.adapter({"model.finetune_type": "full"})
    stir(trained, scale=0.01)
    trained.save_full(tmp_path)
    again = bench.adapter({"model.finetune_type": "full", "model.resume_path": str(tmp_path)})
    pairs = zip(trained.trainable_parameters().items(), again.trainable_parameters().items(), strict=True)
    assert all(a == b and torch.equal(x, y) for (a, x), (b, y) in pairs)

    pipeline = bench.load_pipeline()
    for name in trained.trained_components:
        cls: Any = type(trained.bundle.component(name))
        setattr(pipeline, name, cls.from_pretrained(str(tmp_path / name)))
    own = bench.latents(bench.roll(again, setting, solver="pipeline", decode=False))
    assert_latents(own, bench.reference(setting, pipeline=pipeline), "with the saved weights")


def test_media_are_encoded_and_decoded(bench: Bench) -> None:
    """Encoding is the inverse of decoding: scales and shifts cancel, and what is left is the VAE alone."""
    adapter, pipeline = bench.fresh, bench.pipeline
    if not adapter.supports_output_encoding:
        pytest.skip(f"{bench.case.key} has no encoder for its output media")
    height, width = bench.case.size
    to_bytes = videos.video_bytes if bench.makes_videos else images.to_bytes
    media = _random_media(bench)
    state = adapter.encode_output_state(media)
    # What a rollout's state has beside what is made is pinned.
    noise = adapter.prepare_latents(
        bench.condition(adapter, bench.case.settings[0], (0,)), generators([0]), height, width
    )
    assert all(name in state.components or not noise.masks[name].any() for name in noise)
    made = {name: x for name, x in noise.items() if name in state.components}
    assert {n: x.shape[1:] for n, x in state.items()} == {n: x.shape[1:] for n, x in made.items()}
    assert all(len(x) == len(SEEDS) and x.dtype == torch.float32 and not x.requires_grad for _, x in state.items())

    with torch.no_grad():
        decoded = bench.case.autoencode(pipeline, _pixels(pipeline, [_visible(medium) for medium in media]))
    expected = to_bytes(pipeline, decoded)
    got = adapter.decode_latents(state)
    assert float(torch.stack(expected).float().std()) > 2
    for own, plain in zip(got, expected, strict=True):
        assert (_visible(own).int() - plain.int()).abs().max() <= 1
    _assert_sounds(bench, media, got)

    sampled = adapter.encode_output_state(media, generators(list(SEEDS)))
    alone = adapter.encode_output_state(media[1:2], generators([SEEDS[1]]))
    for name, latents in sampled.items():
        assert torch.allclose(latents, state[name]) == (name in bench.case.deterministic_encoders)
        torch.testing.assert_close(latents[1:2], alone[name], rtol=0, atol=1e-5)


def _random_media(bench: Bench) -> list[Any]:
    """Pictures or videos of bytes, a seed's each; with sounds, if the model makes any."""
    frames = (bench.case.generation["num_frames"],) if bench.makes_videos else ()
    g = torch.Generator().manual_seed(0)
    visible = [torch.randint(0, 256, (*frames, 3, *bench.case.size), generator=g, dtype=torch.uint8) for _ in SEEDS]
    if bench.fresh.spec.sound is None:
        return visible
    sound = bench.fresh.spec.sound(bench.fresh.config.train_generation, bench.folder)
    waves = [torch.rand(2, sound.samples, generator=g) * 2 - 1 for _ in SEEDS]
    return [VideoWithSound(v, Audio(wave, sound.sample_rate)) for v, wave in zip(visible, waves, strict=True)]


def _visible(medium: Any) -> Tensor:
    return medium.frames if isinstance(medium, VideoWithSound) else medium


def _assert_sounds(bench: Bench, media: Sequence[Any], got: Sequence[Any]) -> None:
    """Sounds as the audio VAE alone gives them back."""
    if bench.case.autoencode_sound is None:
        assert not any(isinstance(medium, VideoWithSound) for medium in got)
        return
    with torch.no_grad():
        waves = torch.stack([medium.sound.waveform for medium in media])
        expected = bench.case.autoencode_sound(bench.pipeline, waves).clamp(-1, 1)
    assert float(expected.std()) > 1e-3
    for own, plain in zip(got, expected, strict=True):
        torch.testing.assert_close(own.sound.waveform, plain, rtol=0, atol=1e-5)


def _pixels(pipeline: Any, media: Sequence[Tensor]) -> Tensor:
    """Pixels as a user gets them: by the pipeline's own processor, from what `PIL.Image` holds (pitfall 16)."""
    if media[0].ndim == 4:
        return pipeline.video_processor.preprocess_video([videos.to_pil_frames(frames) for frames in media])
    return pipeline.image_processor.preprocess([images.to_pil(picture) for picture in media])


def test_conditions_pass_through_the_cache(bench: Bench, tmp_path: Path) -> None:
    adapter, setting = bench.fresh, bench.case.settings[-1]
    records = [
        PromptRecord(
            prompt=prompt,
            source="toy",
            source_id=0,
            index=i,
            group_id=i,
            negative_prompt=bench.case.negatives[i],
            media=tuple(
                MediaFile(slot, Modality.IMAGE, Path(), f"{i} {number}")
                for slot, items in bench.case.media[i].items()
                for number in range(len(items))
            ),
        )
        for i, prompt in enumerate(bench.case.prompts)
    ]
    need = bench.guidance(setting).needs_negative()
    cache = ConditionCache(
        tmp_path,
        {"encoder": adapter.encoder_identity()},
        condition_class=adapter.condition_class,
        encode=lambda some: bench.condition(adapter, setting, [r.index for r in some]),
        need_negative=need,
        batch_size=len(records),
    )
    cache.prepare(records, Comm.single(), share=(0, 1), force=False)
    rows = [cache.row(record) for record in records]
    direct = bench.condition(adapter, setting)
    joined = adapter.collate_conditions(rows)
    assert isinstance(joined, adapter.condition_class) and joined.batch_size == len(records)
    assert joined.tensors().keys() == direct.tensors().keys()
    assert all(torch.equal(joined.tensors()[name], value) for name, value in direct.tensors().items())
