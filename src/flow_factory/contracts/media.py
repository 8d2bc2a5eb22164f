"""What a pipeline takes and gives, declared without loading it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum


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

    @property
    def input_modalities(self) -> frozenset[Modality]:
        """All modalities that at least one input slot takes."""
        return frozenset(slot.modality for slot in self.inputs)
