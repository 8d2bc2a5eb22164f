"""MiniMax-H3 from pictures, videos and sounds to a video with its sound (`minimax-h3-ref2va`)."""

from __future__ import annotations

from importlib.util import find_spec
from typing import Any

from diffusers.modular_pipelines.minimax_h3.before_encoder import MiniMaxH3Ref2VASetupStep
from diffusers.modular_pipelines.minimax_h3.encoders import (
    MiniMaxH3Ref2VAReferenceEncoderStep,
    MiniMaxH3Ref2VATextEncoderStep,
)
from diffusers.modular_pipelines.minimax_h3.references import (
    MiniMaxH3AudioReference,
    MiniMaxH3ImageReference,
    MiniMaxH3Reference,
    MiniMaxH3VideoReference,
)

from flow_factory.errors import InputError
from flow_factory.models.audio_video import AUDIO, VIDEO
from flow_factory.models.example_call import ExampleCall
from flow_factory.models.images import to_pil
from flow_factory.models.minimax_h3.base import GIVEN, SAVE_VIDEO, MiniMaxH3Adapter
from flow_factory.models.minimax_h3.conditions import Conditioning, PackedText
from flow_factory.models.minimax_h3.layout import Built, reference_layout
from flow_factory.models.modular import run_blocks
from flow_factory.samples import Audio, ConditionInputs, I2AVSample, Video


class MiniMaxH3ReferencesAdapter(MiniMaxH3Adapter):
    """The workflow `ref2va`, which has a network of its own.

    The order of references matters: they are numbered in the text and laid out in time. It is pictures, videos, sounds,
    each in the order of the data; a video's own sound (`soundtrack`) goes with it. Pictures and videos keep their own
    shapes; a video is brought to 24 frames a second, and cut to the length of what is made, as sounds are. The text
    encoder sees pictures and videos, and reads no sound.
    """

    sample_class = I2AVSample
    network_name = "transformer_ref"
    components = (VIDEO, AUDIO, GIVEN)
    example_call = ExampleCall(
        (
            "from diffusers.modular_pipelines.minimax_h3 import MiniMaxH3ImageReference, MiniMaxH3VideoReference",
            "from diffusers.utils import encode_video",
        ),
        (
            'references=[MiniMaxH3ImageReference.from_file("subject.png"), '
            'MiniMaxH3VideoReference.from_file("motion.mp4")]',
        ),
        SAVE_VIDEO,
    )

    def encode_row(self, given: ConditionInputs, generation: Any) -> PackedText:
        height, width = given.size
        try:
            out = run_blocks(
                self.pipeline,
                MiniMaxH3Ref2VASetupStep(),
                MiniMaxH3Ref2VATextEncoderStep(),
                MiniMaxH3Ref2VAReferenceEncoderStep(),
                prompt=given.prompt,
                references=self._references(given),
                height=height,
                width=width,
                num_frames=generation.num_frames,
            )
        except ValueError as error:  # too few frames, too narrow a picture, sounds alone: the pipeline says which
            raise InputError(f"the references of the prompt {given.prompt!r} do not fit: {error}") from error
        latents, sounds = iter(out["condition_latents"]), iter(out["audio_condition_latents"])
        conditioning = tuple(
            Conditioning(
                one.kind,
                None if one.kind == "audio" else next(latents),
                next(sounds) if one.has_audio else None,
            )
            for one in out["normalized_references"]
        )
        return PackedText(out["prompt_embeds"], out["text_token_tags"], conditioning)

    def build_layout(self, text: PackedText, shape: tuple[int, int, int, int]) -> Built:
        return reference_layout(self.pipeline, text, shape)

    def _references(self, given: ConditionInputs) -> list[MiniMaxH3Reference]:
        """References as the pipeline takes them.

        Raises:
            InputError: If there are none, sounds without their videos, or sounds that cannot be brought to the rate.
        """
        videos, tracks, sounds = (_items(given, slot) for slot in ("video", "soundtrack", "audio"))
        if not given.images("image") and not videos:
            raise InputError(
                f"{self.spec.key} takes at least one reference picture (`image`) or video (`video`), but none came "
                f"with the prompt {given.prompt!r}; without references, use minimax-h3-t2va."
            )
        if len(tracks) not in (0, len(videos)):
            raise InputError(
                f"{len(tracks)} soundtracks came with {len(videos)} videos and the prompt {given.prompt!r}; give each "
                f"video its own, or none; sounds by themselves belong into `audio`."
            )
        for sound in (*tracks, *sounds):
            self._check_sound(sound, given.prompt)
        pairs = zip(videos, tracks or [None] * len(videos), strict=True)
        return [
            *(MiniMaxH3ImageReference(to_pil(image)) for image in given.images("image")),
            *(_video_reference(video, track) for video, track in pairs),
            *(MiniMaxH3AudioReference(sound.waveform, sound.sample_rate) for sound in sounds),
        ]

    def _check_sound(self, sound: Audio, prompt: str) -> None:
        rate = self.pipeline.audio_sampling_rate
        if sound.sample_rate != rate and find_spec("torchaudio") is None:
            raise InputError(
                f"a sound of {sound.sample_rate} Hz came with the prompt {prompt!r}, but {self.spec.key} hears {rate} "
                f"Hz: pip install torchaudio, with which the pipeline brings it to that rate, or do so beforehand."
            )


def _items(given: ConditionInputs, slot: str) -> list[Any]:
    return list(given.media.get(slot, ()))


def _video_reference(video: Video, track: Audio | None) -> MiniMaxH3VideoReference:
    sound = {} if track is None else {"audio": track.waveform, "sample_rate": track.sample_rate}
    return MiniMaxH3VideoReference(video.frames, video.fps, **sound)
