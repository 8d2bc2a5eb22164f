"""MiniMax-H3 on stored videos with sound: latents, what cannot be encoded, and the noise of what is given."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.encoders import MiniMaxH3Ref2VAReferenceEncoderStep, encode_vae_condition

from flow_factory.errors import InputError
from flow_factory.hparams import get_model_spec
from flow_factory.hparams.models.minimax_h3 import MiniMaxH3GenerationArguments
from flow_factory.models.minimax_h3.layout import pack_audio
from flow_factory.models.modular import run_blocks
from flow_factory.samples import Audio, NoiseKey, Purpose, VideosWithSound, VideoWithSound
from flow_factory.trainers.build import build_trainer
from flow_factory.trainers.offline.noised_arms import noised_arms
from tests.models.support import generators
from tests.parity.bench import Bench
from tests.parity.cases import all_cases
from tests.parity.cycles import cycle_config
from tests.parity.media import clip
from tests.parity.minimax_h3 import HOP, SAMPLE_RATE

Open = Callable[[str], Bench]
TEXT, FRAMES, REFERENCES = "minimax-h3-t2va", "minimax-h3-fl2va", "minimax-h3-ref2va"
SAMPLES = 207 * HOP
"""Of a sound with 124 frames: 5 1/6 seconds of 40 latents, rounded."""


@pytest.fixture(scope="module")
def bench(tmp_path_factory: pytest.TempPathFactory) -> Open:
    """The bench of a key, made once."""
    benches: dict[str, Bench] = {}

    def opened(key: str) -> Bench:
        if key not in benches:
            case = next(case for case in all_cases() if case.key == key)
            benches[key] = Bench(case, tmp_path_factory.mktemp(key))
        return benches[key]

    return opened


def stored(seed: int = 0, frames: int = 124, channels: int = 2, samples: int = SAMPLES, rate: int = SAMPLE_RATE) -> Any:
    """A video of smooth frames with a sound of noise."""
    wave = torch.rand(channels, samples, generator=torch.Generator().manual_seed(seed)) * 2 - 1
    return VideoWithSound(clip(seed, frames, (16, 32)).frames, Audio(wave, rate))


def test_latents_are_those_of_the_pipelines_own_encoders(bench: Open) -> None:
    """Which round what they encode to float16, and sample videos by a seed of their own; sounds bit for bit."""
    own, video = bench(REFERENCES), stored(3)
    reference = SimpleNamespace(
        kind="video", frames=video.frames.permute(0, 2, 3, 1).numpy(), has_audio=True, audio=video.sound.waveform
    )
    out = run_blocks(own.pipeline, MiniMaxH3Ref2VAReferenceEncoderStep(), normalized_references=[reference])
    state = own.fresh.encode_output_state([video], generators([own.pipeline.keyframe_encode_seed]))
    torch.testing.assert_close(state["video"], out["condition_latents"][0], rtol=1e-3, atol=1e-3)
    assert torch.equal(pack_audio(state["audio"]), out["audio_condition_latents"][0])

    modes = own.fresh.encode_output_state([video, stored(4)])
    samples = [
        encode_vae_condition(
            own.pipeline.vae,
            video.frames.transpose(0, 1)[None],
            own.pipeline.pixel_mean,
            own.pipeline.pixel_std,
            encode_seed=seed,
        )
        for seed in range(48)
    ]
    spread = torch.cat(samples).std(dim=0, keepdim=True)
    assert float(((torch.cat(samples).mean(dim=0) - modes["video"][0]) / spread).abs().mean()) < 2 / 48**0.5
    assert not torch.equal(modes["video"][0], state["video"][0]) and torch.equal(modes["audio"][:1], state["audio"])


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"frames": 120}, r"120 frames .*5 more than a multiple of 17 frames; use 107 or 124"),
        ({"frames": 3}, r"3 frames .*; use 5\.$"),
        ({"rate": 16000}, rf"16000 Hz .*makes {SAMPLE_RATE} Hz; resample it"),
        ({"channels": 1}, r"1 channel\(s\) .*makes 2; .*of mono take the one channel twice"),
        ({"samples": SAMPLES + 1}, rf"{SAMPLES + 1} samples .*124 frames, .*makes {SAMPLES} \(5\.175 seconds\)"),
        ({"samples": SAMPLES - HOP}, rf"{SAMPLES - HOP} samples .*fill it up with silence"),
    ],
)
def test_media_that_the_model_does_not_make(bench: Open, given: dict[str, int], message: str) -> None:
    with pytest.raises(InputError, match=message):
        bench(TEXT).fresh.encode_output_state([stored(**given)])


@pytest.mark.parametrize("frames", [124, 141, 158])
def test_sounds_are_planned_as_long_as_they_are_made(bench: Open, frames: int) -> None:
    own, fields = bench(TEXT), MiniMaxH3GenerationArguments(num_frames=frames)
    planned = get_model_spec(TEXT).sound
    assert planned is not None
    made = own.fresh.prepare_latents(None, generators([0]), *own.case.size, fields)
    sound = planned(fields, own.folder)
    assert (sound.samples, sound.sample_rate) == (made["audio"].shape[-1] * HOP, SAMPLE_RATE)
    assert (sound.channels, sound.frame_rate) == (made["audio"].shape[1], own.fresh.frame_rate(fields))
    published = planned(fields, None)
    assert (published.samples, published.sample_rate) == (made["audio"].shape[-1] * 800, 32000)


@pytest.mark.parametrize("key", [FRAMES, REFERENCES])
def test_the_noise_of_what_is_given_is_a_rollouts(bench: Open, key: str, tmp_path: Path) -> None:
    """It is drawn for each visit as a rollout draws it, and stays as it is at all training times; it has no loss."""
    config: Any = cycle_config(bench(key), "sft", tmp_path)
    trainer: Any = build_trainer(config)
    batch = trainer.dataloader.batch([0])
    sampling = replace(trainer.training_args.time_sampling, count=2)
    assert isinstance(batch.media["target"], VideosWithSound)
    seen = {}
    for epoch in (0, 1):
        times = [a["target"] for a in noised_arms(trainer.adapter, batch, sampling, seed=7, data_epoch=epoch)]
        initial = NoiseKey(7, epoch, batch.entries[0].example.example_id, 0).generator(Purpose.INITIAL)
        expected = trainer.adapter.prepare_latents(batch.condition, [initial], *config.training_args.resolution)
        for noised in times:
            assert torch.equal(noised.state["given"], expected["given"]) and noised.target["given"].abs().max() == 0
            assert not noised.state.masks["given"].any() and list(noised.state) == list(expected)
        assert not torch.equal(times[0].state["video"], times[1].state["video"])
        seen[epoch] = expected["given"]
    assert not torch.equal(seen[0], seen[1])


def test_workers_hand_over_videos_with_sound(bench: Open, tmp_path: Path) -> None:
    config: Any = cycle_config(bench(TEXT), "sft", tmp_path)
    config.data_args.dataloader_num_workers = 1
    trainer: Any = build_trainer(config)
    trainer.dataloader.sampler.set_epoch(0)
    for batch in trainer.dataloader:
        (medium,) = batch.media["target"].unbind()
        here = trainer.dataloader.batch([batch.entries[0].example.record.index]).media["target"]
        assert torch.equal(medium.frames, here.frames[0]) and torch.equal(medium.sound.waveform, here.waveforms[0])
        assert medium.sound.waveform.shape == (2, SAMPLES) and medium.sound.waveform.any()
    trainer.dataloader.close()
