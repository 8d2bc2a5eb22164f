"""Generated examples, and the micro-batches stacked from them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from flow_factory.samples.media import Audio, ConditionInputs
from flow_factory.samples.noise import NoiseKey
from flow_factory.samples.trajectory import Trajectory

ConditionT = TypeVar("ConditionT", bound="Condition")


@dataclass(frozen=True)
class Condition:
    """Encoded inputs with a batch dimension. Adapters subclass it; trainers never look inside.

    Every dataclass field of a subclass is a tensor [B, ...] or None (None for the whole batch). Ragged inputs are the
    subclass's own business: it overrides `row`, `cat` and `tensors` / `from_tensors` together.
    """

    def tensors(self) -> dict[str, Tensor]:
        """Field name to tensor, without the fields that are None; what the condition cache stores."""
        return {f.name: value for f in fields(self) if (value := getattr(self, f.name)) is not None}

    @classmethod
    def from_tensors(cls: type[ConditionT], tensors: Mapping[str, Tensor]) -> ConditionT:
        """The inverse of `tensors`; absent fields become None."""
        return cls(**{f.name: tensors.get(f.name) for f in fields(cls)})

    @property
    def batch_size(self) -> int:
        """B, read off the first tensor."""
        return next(iter(self.tensors().values())).shape[0]

    def to(self: ConditionT, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> ConditionT:
        """Moves all tensors; only floating-point tensors change dtype."""
        moved = {
            name: t.to(device=device, dtype=dtype if t.is_floating_point() else None)
            for name, t in self.tensors().items()
        }
        return self.from_tensors(moved)

    def row(self: ConditionT, index: int) -> ConditionT:
        """Row `index`, keeping a batch dimension of 1."""
        return replace(self, **{name: t[index : index + 1] for name, t in self.tensors().items()})

    @classmethod
    def cat(cls: type[ConditionT], rows: Sequence[ConditionT]) -> ConditionT:
        """Concatenates conditions of equal padded lengths along B.

        Raises:
            ValueError: If some rows have a field that others lack (for example, negatives encoded for a part only).
        """
        names = [set(row.tensors()) for row in rows]
        if any(other != names[0] for other in names):
            raise ValueError(f"conditions with different fields cannot be joined: {[sorted(n) for n in names]}.")
        return cls.from_tensors({name: torch.cat([r.tensors()[name] for r in rows]) for name in sorted(names[0])})


@dataclass
class BaseSample:
    """One generated example.

    Attributes:
        prompt: The text the media was generated from, exactly as in the dataset.
        negative_prompt: The negative text, or None.
        source: Name of the dataset the prompt came from; `source_id` is its 64-bit-safe integer id.
        index: Row of the prompt in its dataset.
        group_id: 64-bit identity shared by all samples of a prompt (source, prompt, negative prompt, media).
        member: Index inside the group, 0..K-1.
        key: Identity of the sample's randomness.
        metadata: The dataset row's remaining columns, for rewards.
        condition: Encoded inputs, batch dimension 1; shared by the members of a group, do not modify.
        trajectory: What the rollout stored, as a row.
        rewards: Reward name to raw score; None where scoring failed. A reward not applicable to the source is absent.
        advantage: Set once feedback has been prepared.
        policy_version: Number of optimizer steps the sampling weights had seen.
    """

    prompt: str
    source: str
    source_id: int
    index: int
    group_id: int
    member: int
    key: NoiseKey
    condition: Condition
    trajectory: Trajectory
    negative_prompt: str | None = None
    metadata: dict[str, Any] = field(default_factory=dict)
    rewards: dict[str, float | None] = field(default_factory=dict)
    advantage: float | None = None
    policy_version: int = 0


@dataclass
class ImageSample(BaseSample):
    """An example whose output is one image: uint8 [C, H, W] on CPU, what a PNG would hold, so scores reproduce."""

    image: Tensor | None = None

    @property
    def frames(self) -> Tensor | None:
        """The image as a video of one frame, uint8 [1, C, H, W]."""
        return None if self.image is None else self.image[None]

    @property
    def pil(self) -> Any:
        """The image as a `PIL.Image.Image` in RGB."""
        from PIL import Image

        if self.image is None:
            raise ValueError(f"sample {self.index}/{self.member} of {self.source!r} has no decoded image.")
        return Image.fromarray(self.image.permute(1, 2, 0).contiguous().numpy(), "RGB")


@dataclass
class T2ISample(ImageSample):
    """Text to image."""


@dataclass
class I2ISample(ImageSample):
    """Image(s) and text to image. `condition_images` are uint8 [C, H, W]."""

    condition_images: list[Tensor] = field(default_factory=list)


@dataclass
class VideoSample(BaseSample):
    """An example whose output is a video, uint8 [F, C, H, W] on CPU, with its frame rate in Hz."""

    video: Tensor | None = None
    fps: float | None = None

    @property
    def frames(self) -> Tensor | None:
        """The video, for what looks at images and videos alike."""
        return self.video


@dataclass
class T2VSample(VideoSample):
    """Text to video."""


@dataclass
class I2VSample(VideoSample):
    """Image(s) and text to video. `condition_images` are uint8 [C, H, W]."""

    condition_images: list[Tensor] = field(default_factory=list)


@dataclass
class V2VSample(VideoSample):
    """Video and text to video. `condition_video` is uint8 [F, C, H, W]."""

    condition_video: Tensor | None = None


@dataclass
class T2AVSample(VideoSample):
    """Text to video with sound. `audio` is float32 [channels, samples] in [-1, 1] at `sample_rate` Hz."""

    audio: Tensor | None = None
    sample_rate: int | None = None


@dataclass
class I2AVSample(T2AVSample):
    """Image(s) and text to video with sound, and of models with references also videos [F, C, H, W] and sounds."""

    condition_images: list[Tensor] = field(default_factory=list)
    condition_videos: list[Tensor] = field(default_factory=list)
    condition_sounds: list[Audio] = field(default_factory=list)


def condition_fields(sample_class: type[BaseSample], inputs: ConditionInputs) -> dict[str, Any]:
    """The fields of a sample class that show what an example was generated from, of those that the class has."""
    videos = [video.frames for video in inputs.videos()]
    values = {
        "condition_images": inputs.images(),
        "condition_video": videos[0] if videos else None,
        "condition_videos": videos,
        "condition_sounds": inputs.audios(),
    }
    known = {f.name for f in fields(sample_class)}
    return {name: value for name, value in values.items() if name in known}


@dataclass(frozen=True)
class SampleBatch:
    """A micro-batch stacked from samples, on the training device.

    Attributes:
        samples: The samples, in row order.
        condition: Their conditions, collated, batch B.
        trajectory: Their trajectories, stacked, batch B.
        advantages: float32 [B]; zeros if feedback has not been prepared.
    """

    samples: Sequence[BaseSample]
    condition: Condition
    trajectory: Trajectory
    advantages: Tensor

    def __len__(self) -> int:
        return len(self.samples)

    def __iter__(self) -> Iterator[BaseSample]:
        return iter(self.samples)

    @property
    def group_ids(self) -> Tensor:
        """int64 [B]; group ids are unsigned 64-bit values reinterpreted as signed."""
        return torch.tensor([s.group_id for s in self.samples], dtype=torch.int64)
