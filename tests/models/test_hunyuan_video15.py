"""What is peculiar to HunyuanVideo 1.5: a guider, padding that nothing reads, MeanFlow; and inputs that do not fit."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from diffusers import ClassifierFreeGuidance, UniPCMultistepScheduler

from flow_factory.errors import InputError
from flow_factory.hparams import load_config_from_mapping
from flow_factory.hparams.local_model import check_pipeline_folder, inspect_local_model
from flow_factory.models.hunyuan_video15.guidance import guider_spec
from flow_factory.samples import ComponentTimes, ConditionInputs, Grid, Media, StepTimes
from flow_factory.trainers.model_card import _loading
from tests.models.benches import Open
from tests.models.support import generators
from tests.parity.bench import SEEDS, Bench, set_path
from tests.parity.media import picture, pictures
from tests.parity.test_sampling import assert_latents

TEXT, IMAGE, MEANFLOW = "hunyuanvideo-1.5", "hunyuanvideo-1.5-i2v", "hunyuanvideo-1.5-i2v-meanflow"


@pytest.fixture
def altered(bench: Open, tmp_path: Path) -> Callable[..., Path]:
    """The checkpoint from text with other values in its JSON files."""

    def copied(changes: Mapping[str, Mapping[str, Any]]) -> Path:
        folder = tmp_path / "altered"
        shutil.copytree(bench(TEXT).folder, folder)
        for file, values in changes.items():
            content = json.loads((folder / file).read_text())
            (folder / file).write_text(json.dumps({**content, **values}))
        return folder

    return copied


def problems(bench: Bench, changes: Mapping[str, Any], folder: Path | None = None) -> list[str]:
    """What `check` says of the case's configuration with dotted changes."""
    mapping = bench.mapping()
    for path, value in {"eval.eval_freq": 0, **changes}.items():
        set_path(mapping, path, value)
    if folder is not None:
        mapping["model"]["model_name_or_path"] = str(folder)
    config = load_config_from_mapping(mapping, origin="test")
    return [str(problem).replace(" (test)", "") for problem in inspect_local_model(config).problems]


# Guidance ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [1, 3, 7, 10])
@pytest.mark.parametrize("scale", [0.0, 0.4, 1.0, 6.0])
@pytest.mark.parametrize(
    "fields",
    [
        {},
        {"guidance_rescale": 0.7},
        {"use_original_formulation": True},
        {"start": 0.25, "stop": 0.7, "guidance_rescale": 0.3, "use_original_formulation": True},
    ],
)
def test_guidance_is_the_guiders(fields: dict[str, Any], scale: float, steps: int) -> None:
    """Both predictions combined by the guider itself, step by step; rows at different steps of the grid together."""
    positive, negative = torch.randn(2, steps, 3, 4, 5, generator=torch.Generator().manual_seed(steps)).double()
    guider = ClassifierFreeGuidance(guidance_scale=scale, **fields)
    expected, counts = [], []
    for step in range(steps):
        guider.set_state(step, steps, torch.tensor(0))
        counts.append(guider.num_conditions)
        row = slice(step, step + 1)
        expected.append(guider.forward(positive[row], negative[row] if counts[-1] == 2 else None).pred)

    spec = guider_spec(ClassifierFreeGuidance(guidance_scale=2.0, **fields), scale)
    grid = Grid.single(torch.linspace(1, 0, steps + 1), torch.linspace(1000, 1, steps))
    each = [grid.times(step, 1) for step in range(steps)]
    assert [1 + spec.active(times) for times in each] == counts
    assert spec.needs_negative() or 2 not in counts
    sigmas = torch.linspace(1, 0, steps + 1)
    together = ComponentTimes(
        {"latent": StepTimes(sigmas[:-1], sigmas[1:], 1000 * sigmas[:-1])}, torch.arange(steps), steps
    )
    combined = spec.combine(positive, negative, together) if spec.active(together) else positive
    torch.testing.assert_close(combined, torch.cat(expected))


def test_off_the_grid_every_row_is_guided() -> None:
    spec = guider_spec(ClassifierFreeGuidance(start=0.5, stop=0.6), 4.0)
    sigma = torch.tensor([0.9, 0.1])
    free = ComponentTimes({"latent": StepTimes(sigma, sigma, 1000 * sigma)})
    assert spec.rows(free) is None and spec.active(free)
    assert not spec.unguided().needs_negative()


def test_a_disabled_guider_has_no_guidance(bench: Open, altered: Callable[..., Path]) -> None:
    folder = altered({"guider/guider_config.json": {"enabled": False}})
    (found,) = problems(bench(TEXT), {"train.guidance_scale": 6.0}, folder)
    assert re.search(r"train.guidance_scale: is 6.0, but .* is a hunyuanvideo-1.5 without guidance; use 1", found)
    assert problems(bench(TEXT), {"train.guidance_scale": 1.0}, folder) == []
    guider = ClassifierFreeGuidance(enabled=False)
    assert not guider_spec(guider, 1.0).needs_negative()
    with pytest.raises(InputError, match="guidance_scale is 3, but the checkpoint's guider is disabled"):
        guider_spec(guider, 3.0)


@pytest.mark.parametrize(
    ("guider", "config", "message"),
    [
        (
            "AdaptiveProjectedGuidance",
            {"adaptive_projected_guidance_momentum": -0.5},
            r"AdaptiveProjectedGuidance with momentum -0.5 carries state from step to step",
        ),
        (
            "TangentialClassifierFreeGuidance",
            {},
            "TangentialClassifierFreeGuidance combines predictions in a way",
        ),
    ],
)
def test_other_guiders_are_refused(
    bench: Open, altered: Callable[..., Path], guider: str, config: dict[str, Any], message: str
) -> None:
    """By `check`, and before a checkpoint is loaded that `check` could not see."""
    folder = altered({"guider/guider_config.json": config, "model_index.json": {"guider": ["diffusers", guider]}})
    (found,) = problems(bench(TEXT), {}, folder)
    assert re.search(message, found) and "Put a ClassifierFreeGuidance in its place" in found
    with pytest.raises(InputError, match=message):
        bench(TEXT).adapter(folder=folder)


# The pipeline's call ---------------------------------------------------------------------------------------------


def test_the_padding_that_is_left_out_is_not_read(bench: Open) -> None:
    """A call as a user makes it: 256 bytes of quoted text, 729 tokens of no picture, a thousand of the prompt."""
    own = bench(TEXT)
    setting = replace(own.case.setting("guided"), generation={"max_sequence_length": 1000})
    pipeline = own.load_pipeline()
    exec("\n".join(own.fresh.call_setup(setting.scale, own.generation(setting), own.case.size)), {"pipeline": pipeline})
    lengths = (pipeline.tokenizer_max_length, pipeline.tokenizer_2_max_length, pipeline.vision_num_semantic_tokens)
    assert lengths == (1000, 256, 729)
    assert own.condition(own.fresh, setting).prompt_mask.shape[1] == 64
    row = 1  # with quotes
    result = pipeline(
        prompt=own.case.prompts[row],
        negative_prompt=own.case.negatives[row],
        num_inference_steps=2,
        generator=generators([SEEDS[row]]),
        output_type="latent",
        **own.fresh.size_arguments(*own.case.size),
        **own.fresh.call_arguments(setting.scale, own.generation(setting)),
    ).frames
    out = own.roll(own.fresh, setting, rows=(row,), steps=2, solver="pipeline", decode=False)
    assert_latents(own.latents(out), result, "with all padding")


@pytest.mark.parametrize("size", [(32, 48), (48, 32)])
def test_the_statements_before_the_call_mean_guidance_and_size(bench: Open, size: tuple[int, int]) -> None:
    """Also a second time, after a guider that stopped early; and another size than that of the picture."""
    own = bench(MEANFLOW)
    setting = own.case.setting("guided")
    pipeline, generation = own.load_pipeline(), own.generation(setting)
    inputs = [replace(given, size=size) for given in own.inputs((0,))]
    out = own.fresh.inference(
        own.fresh.encode_inputs(inputs, True, generation),
        initial_generators=generators([SEEDS[0]]),
        num_inference_steps=4,
        guidance=own.guidance(setting),
        height=size[0],
        width=size[1],
        solver="pipeline",
        decode=False,
    )
    for _ in range(2):
        exec("\n".join(own.fresh.call_setup(setting.scale, generation, size)), {"pipeline": pipeline})
        result = pipeline(
            prompt=own.case.prompts[0],
            image=pictures(own.case.media[0])[0],
            num_inference_steps=4,
            generator=generators([SEEDS[0]]),
            output_type="latent",
            **own.fresh.call_arguments(setting.scale, generation),
        ).frames
        assert_latents(own.latents(out), result, str(size))


def test_the_model_card_sets_the_guider_and_loads_into_the_network(bench: Open) -> None:
    config = load_config_from_mapping(
        bench(IMAGE).mapping() | {"eval": {"resolution": [32, 48], "guidance_scale": 4.5}}
    )
    lines = _loading(config, lora=True).splitlines()
    assert [line for line in lines if line.startswith("pipeline.")] == [
        'pipeline.transformer.load_lora_adapter(".", weight_name="pytorch_lora_weights.safetensors", '
        'prefix="transformer")',
        "pipeline.guider = pipeline.guider.new(guidance_scale=4.5)",
        "pipeline.tokenizer_max_length = 24",
        "pipeline.video_processor.calculate_default_height_width = lambda **_: (32, 48)",
    ]
    assert not any("guidance_scale" in line or "height=" in line for line in lines if "frames = " in line)


def test_timesteps_may_be_integers(bench: Open) -> None:
    """Of a scheduler whose grid is of whole timesteps; the network casts its embedding of time to the time's dtype."""
    own = bench(TEXT)
    setting = own.case.setting("guided")
    scheduler = UniPCMultistepScheduler(prediction_type="flow_prediction", use_flow_sigmas=True, flow_shift=3.0)
    with own.scheduled(scheduler):
        result = own.reference(setting, rows=(1,))
        assert not own.pipeline.scheduler.timesteps.is_floating_point()
        out = own.roll(own.fresh, setting, rows=(1,), solver="pipeline", decode=False)
        assert_latents(own.latents(out), result, "with UniPC")


# Conditions and the network --------------------------------------------------------------------------------------


def test_quoted_text_is_read_by_its_own_encoder(bench: Open) -> None:
    """With the prompts' encodings left as they are, only a row with quotes depends on it."""
    own = bench(TEXT)
    adapter, setting = own.fresh, own.case.setting("unguided")
    condition = own.condition(adapter, setting)
    assert condition.glyph_mask.any(dim=1).tolist() == [False, True, False]
    state = adapter.prepare_latents(condition, generators(list(SEEDS)), *own.case.size)
    times = adapter.sigma_grid(4, state, condition).times(1, 3)
    changed = replace(condition, glyph_embeds=condition.glyph_embeds.flip(1) + 1)
    before, after = (adapter.predict(state, times, c, own.guidance(setting)).only for c in (condition, changed))
    moved = (after - before).abs().amax(dim=(1, 2, 3, 4))
    assert moved[1] > 1e-3 and moved[0] == moved[2] == 0


def test_texts_of_different_lengths_share_a_forward(bench: Open) -> None:
    """Rows that were encoded alone, of which one is longer than a multiple of the padding."""
    own = bench(TEXT)
    adapter = own.fresh
    setting = replace(own.case.setting("guided"), generation={"max_sequence_length": 200})
    prompts = ["a dot", "a long story " * 6 + '"' + "of words " * 5 + '"', "a bar"]
    rows = [
        adapter.encode_inputs([ConditionInputs(p, own.case.size, 'not "this"')], True, own.generation(setting))
        for p in prompts
    ]
    joined = adapter.collate_conditions(rows)
    assert [row.prompt_embeds.shape[1] for row in rows] == [64, 128, 64]
    assert joined.prompt_embeds.shape[:2] == (3, 128) and joined.glyph_embeds.shape[:2] == (3, 64)
    state = adapter.prepare_latents(joined, generators(list(SEEDS)), *own.case.size)
    grid = adapter.sigma_grid(4, state, joined)
    together = adapter.predict(state, grid.times(1, 3), joined, own.guidance(setting)).only
    for number, row in enumerate(rows):
        alone = adapter.predict(state.take([number]), grid.times(1, 1), row, own.guidance(setting)).only
        torch.testing.assert_close(together[number : number + 1], alone, rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", [TEXT, MEANFLOW])
@pytest.mark.parametrize("frozen", [None, "fp32", {"text_encoder_2": "fp32", "text_encoder": "fp16"}])
def test_half_precision(bench: Open, name: str, frozen: Any) -> None:
    """Encoders and network in any dtypes: near the result in float32, and differentiable."""
    own = bench(name)
    setting = own.case.setting("guided")
    adapter = own.adapter({"mixed_precision": "bf16", "model.frozen_parameters_dtype": frozen})
    size, guidance = own.case.size, own.guidance(setting)
    state = adapter.prepare_latents(None, generators(list(SEEDS)), *size)
    times = adapter.sigma_grid(4, state, None).times(1, 3)
    with adapter.pin():
        velocity = adapter.predict(state, times, own.condition(adapter, setting), guidance).only
        velocity.square().mean().backward()
    full = own.fresh.predict(state, times, own.condition(own.fresh, setting), guidance).only.detach()
    half = velocity.detach()
    assert half.dtype == torch.float32
    assert 0 < float((half - full).std()) < 0.1 * float(full.std())
    gradients = [p.grad for p in adapter.trainable_parameters().values() if p.grad is not None]
    assert gradients and all(g.isfinite().all() for g in gradients)


def test_meanflow_reads_where_the_step_ends(bench: Open) -> None:
    """On the grid the next point; at a freely drawn time that time, where the mean velocity is the velocity."""
    own = bench(MEANFLOW)
    adapter: Any = own.fresh
    condition = own.condition(adapter, own.case.setting("unguided"))
    state = adapter.prepare_latents(condition, generators(list(SEEDS)), *own.case.size)
    grid = adapter.sigma_grid(4, state, condition)
    ends = [float(adapter.network_extras(grid.times(i, 3), condition)["timestep_r"][0]) for i in range(4)]
    assert ends == pytest.approx([*grid.timesteps["latent"][1:].tolist(), 0.0])
    sigma = torch.tensor([0.3, 0.95, 0.5])
    free = ComponentTimes({"latent": StepTimes(sigma, sigma, 1000 * sigma)})
    assert torch.equal(adapter.network_extras(free, condition)["timestep_r"], 1000 * sigma)
    assert "timestep_r" not in bench(IMAGE).fresh.network_extras(free, condition)  # type: ignore[attr-defined]


def test_meanflow_from_text_is_refused(bench: Open, altered: Callable[..., Path]) -> None:
    folder = altered({"transformer/config.json": {"use_meanflow": True}})
    with pytest.raises(InputError, match="reads the time at which a step ends"):
        bench(TEXT).adapter(folder=folder)


# Inputs that do not fit --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [TEXT, IMAGE])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"train.num_frames": 6}, "train.num_frames: is 6, but .* multiple of 4 frames; use 5 or 9"),
        ({"eval.num_frames": 120, "eval.eval_freq": 1}, "eval.num_frames: is 120, .* use 117 or 121"),
        ({"train.resolution": [32, 44]}, r"\[32, 44\] of hunyuanvideo-1.5.* must be a multiple of 8"),
    ],
)
def test_fields_that_do_not_fit_the_checkpoint(bench: Open, name: str, changes: dict[str, Any], message: str) -> None:
    found = problems(bench(name), changes)
    assert len(found) == 1 and re.search(message, found[0]), found
    assert problems(bench(name), {}) == []


@pytest.mark.parametrize("name", [TEXT, IMAGE])
def test_the_published_checkpoints_have_sixteen_pixels_to_a_latent(bench: Open, name: str) -> None:
    assert bench(name).fresh.spec.size_multiple(None) == 16


def test_a_broken_guider_is_named(bench: Open, altered: Callable[..., Path]) -> None:
    folder = altered({})
    (folder / "guider/guider_config.json").write_text("{")
    (found,) = problems(bench(TEXT), {}, folder)
    assert re.search(r"guider_config.json is not valid JSON .*; download the checkpoint again", found)


@pytest.mark.parametrize("absent", ["guider", "text_encoder_2", "image_encoder"])
def test_parts_that_a_checkpoint_needs(bench: Open, tmp_path: Path, absent: str) -> None:
    own = bench(IMAGE)
    for path in own.folder.iterdir():
        if path.name != absent:
            (tmp_path / path.name).symlink_to(path)
    with pytest.raises(InputError, match=f"lacks {absent}"):
        check_pipeline_folder(tmp_path, own.fresh.spec)


@pytest.mark.parametrize(
    ("media", "message"),
    [
        ({}, "takes one first_frame, but 0 came with the prompt 'a dot'"),
        ({"first_frame": (picture(0), picture(1))}, "takes one first_frame, but 2 came"),
    ],
)
def test_media_that_do_not_fit(bench: Open, media: Media, message: str) -> None:
    own = bench(IMAGE)
    with pytest.raises(InputError, match=message):
        own.fresh.encode_inputs([ConditionInputs("a dot", own.case.size, None, media)])


def test_checkpoints_of_the_other_task_are_named(bench: Open) -> None:
    with pytest.raises(InputError, match=r"holds a HunyuanVideo15Pipeline, .* use model_type hunyuanvideo-1\.5"):
        check_pipeline_folder(bench(TEXT).folder, bench(IMAGE).fresh.spec)
