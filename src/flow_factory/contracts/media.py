"""What a pipeline takes and gives, declared without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal


class Modality(str, Enum):
    """A kind of media or text."""

    TEXT = "text"
    IMAGE = "image"
    VIDEO = "video"
    AUDIO = "audio"


@dataclass(frozen=True)
class MediaSlot:
    """One input of a pipeline.

    Attributes:
        modality: Kind of media the slot takes.
        name: The slot's name in datasets ("prompt", "image", "first_frame", ...).
        required: Whether every example must fill it.
        max_items: How many media the slot takes; None means any number.
    """

    modality: Modality
    name: str
    required: bool = True
    max_items: int | None = 1


@dataclass(frozen=True)
class SoundFormat:
    """The sound of stored videos, as a model is trained on it.

    Attributes:
        sample_rate: Hz.
        channels: 1 or 2.
        samples: Of each channel; as many as the model makes for the frames that are trained on.
        frame_rate: Frames per second of the videos.
    """

    sample_rate: int
    channels: Literal[1, 2]
    samples: int
    frame_rate: float

    @property
    def seconds(self) -> float:
        """How long the sound lasts."""
        return self.samples / self.sample_rate


@dataclass(frozen=True)
class PipelineIOContract:
    """Inputs and outputs of a pipeline.

    Attributes:
        inputs: The slots a dataset may fill. A slot that is not listed is an error in a dataset.
        outputs: The modalities of one generated example, in order.
        one_of: Names of slots of which each example must fill at least one; empty: none is needed.
    """

    inputs: tuple[MediaSlot, ...]
    outputs: tuple[Modality, ...]
    one_of: tuple[str, ...] = ()

    def slot(self, name: str) -> MediaSlot | None:
        """The input slot called `name`, or None if the pipeline has no such input."""
        return next((slot for slot in self.inputs if slot.name == name), None)

    def describe(self) -> str:
        """`prompt, image [0 or more] -> image`: what goes in, by the names of datasets, and what comes out."""
        slots = []
        for slot in self.inputs:
            least = 1 if slot.required else 0
            count = f" [{least} or more]" if slot.max_items is None else f" [up to {slot.max_items}]"
            if slot.max_items == 1:
                count = "" if slot.required else " [optional]"
            slots.append(slot.name + count)
        some = f" (at least one of {', '.join(self.one_of)})" if self.one_of else ""
        return f"{', '.join(slots)}{some} -> {' and '.join(modality.value for modality in self.outputs)}"

    @property
    def has_soundtrack(self) -> bool:
        """Whether a video and its sound are made, which are stored in one file."""
        return {Modality.VIDEO, Modality.AUDIO} <= set(self.outputs)

    @property
    def output_files(self) -> tuple[Modality, ...]:
        """Kinds of the files of a stored output, in order: the sound of a video is a track of its file."""
        return tuple(kind for kind in self.outputs if not (self.has_soundtrack and kind is Modality.AUDIO))

    @property
    def input_modalities(self) -> frozenset[Modality]:
        """All modalities that at least one input slot takes."""
        return frozenset(slot.modality for slot in self.inputs)
