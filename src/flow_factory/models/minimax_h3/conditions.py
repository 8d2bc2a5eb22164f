"""What a sample is generated from: a text of any length, and what goes before the generated rows of its sequence."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from torch import Tensor

from flow_factory.samples import Condition

_LATENTS, _SOUND = "latents", "sound"


@dataclass(frozen=True, eq=False)
class Conditioning:
    """One picture, video or sound that the network reads beside the text.

    Attributes:
        kind: "first" or "last" for a frame of the video; "image", "video" or "audio" for a reference.
        latents: Standardised latents [1, C, f, h, w]; None for "audio".
        sound: Standardised rows [2 L, C'] of a stereo sound's latents, one channel after the other; None without.
    """

    kind: str
    latents: Tensor | None = None
    sound: Tensor | None = None

    @property
    def has_audio(self) -> bool:
        """Whether there is sound."""
        return self.sound is not None


@dataclass(frozen=True, eq=False)
class PackedText:
    """A text as the network reads it.

    Attributes:
        embeds: [1, L, C], vision tokens of pictures and videos included.
        tags: Modality of each token, int64 [L].
        conditioning: In the order of the sequence.
    """

    embeds: Tensor
    tags: Tensor
    conditioning: tuple[Conditioning, ...] = ()

    def tensors(self) -> dict[str, Tensor]:
        """By names that say what each is."""
        named = {"embeds": self.embeds, "tags": self.tags}
        for number, one in enumerate(self.conditioning):
            parts = {_LATENTS: one.latents, _SOUND: one.sound}
            named |= {f"{number}.{one.kind}.{part}": t for part, t in parts.items() if t is not None}
        return named

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PackedText:
        """The inverse of `tensors`."""
        found: dict[int, dict[str, Any]] = {}
        for name in tensors.keys() - {"embeds", "tags"}:
            number, kind, part = name.split(".")
            found.setdefault(int(number), {"kind": kind})[part] = tensors[name]
        return cls(tensors["embeds"], tensors["tags"], tuple(Conditioning(**found[i]) for i in sorted(found)))


@dataclass(frozen=True)
class PackedCondition(Condition):
    """Rows that have nothing in common but their number: each is a sequence of its own.

    Attributes:
        texts: One for each of B rows.
    """

    texts: tuple[PackedText, ...]

    @property
    def only(self) -> PackedText:
        """The single row.

        Raises:
            ValueError: If there are more.
        """
        if len(self.texts) != 1:
            raise ValueError(f"a forward takes one row; this condition has {len(self.texts)}.")
        return self.texts[0]

    @cached_property
    def layouts(self) -> dict[Any, Any]:
        """Layouts of the sequence by the shape of the state, remembered over the steps of a rollout."""
        return {}

    @property
    def batch_size(self) -> int:
        return len(self.texts)

    def tensors(self) -> dict[str, Tensor]:
        """`<row>.<name>` for each tensor of each row."""
        return {f"{row}.{name}": t for row, text in enumerate(self.texts) for name, t in text.tensors().items()}

    @classmethod
    def from_tensors(cls, tensors: Mapping[str, Tensor]) -> PackedCondition:
        rows: dict[int, dict[str, Tensor]] = {}
        for name, tensor in tensors.items():
            row, _, rest = name.partition(".")
            rows.setdefault(int(row), {})[rest] = tensor
        return cls(tuple(PackedText.from_tensors(rows[row]) for row in sorted(rows)))

    def row(self, index: int) -> PackedCondition:
        return PackedCondition((self.texts[index],))

    @classmethod
    def cat(cls, rows: Sequence[Any]) -> PackedCondition:
        return cls(tuple(text for row in rows for text in row.texts))
