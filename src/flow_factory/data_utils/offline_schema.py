"""The schema of stored examples: demonstrations and preferences, one JSON object a line, strict.

    {"schema_version": 2,
     "input": {"prompt": "a red circle", "negative_prompt": null, "media": []},
     "supervision": {"type": "demonstration", "target": {"media": [{"type": "image", "path": "0.png"}]}},
     "metadata": {}}

A preference has `"type": "preference"` with `chosen` and `rejected` in the place of `target`. Needs pydantic only, so
that `check` can read a dataset without a model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from flow_factory.contracts import Modality
from flow_factory.data_utils.json_lines import has_lone_surrogate, kind_of, parse_object
from flow_factory.errors import InputError
from flow_factory.hparams.errors import nearest, show_path

SCHEMA_VERSION = 2
Supervision = Literal["demonstration", "preference"]
ARMS: dict[str, tuple[str, ...]] = {"demonstration": ("target",), "preference": ("chosen", "rejected")}
"""Supervision type to the names of its media."""

_EXAMPLE = '{"schema_version": 2, "input": {"prompt": "..."}, "supervision": {...}}'


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Media(_Strict):
    """One media file.

    Attributes:
        type: Its kind: image, video or audio.
        path: Its path, relative to the folder of its kind.
        slot: The input of the model that it fills; may be left out where only one takes this kind.
        fps: Frames per second, of a video.
        sample_rate: Samples per second, of audio.
    """

    type: Literal["image", "video", "audio"]
    path: Annotated[str, Field(min_length=1)]
    slot: str | None = None
    fps: Annotated[float, Field(gt=0, allow_inf_nan=False)] | None = None
    sample_rate: Annotated[int, Field(gt=0)] | None = None

    @property
    def modality(self) -> Modality:
        """Its kind, as contracts name it."""
        return Modality(self.type)

    @model_validator(mode="after")
    def _rates_fit_the_kind(self) -> Media:
        if self.fps is not None and self.type != "video":
            raise ValueError(f"fps belongs to a video, not to an {self.type}")
        if self.sample_rate is not None and self.type != "audio":
            raise ValueError(f"sample_rate belongs to audio, not to a {self.type}")
        return self


class MediaList(_Strict):
    """The media of one output."""

    media: Annotated[list[Media], Field(min_length=1)]


class ExampleInput(_Strict):
    """What the model is given."""

    prompt: str
    negative_prompt: str | None = None
    media: list[Media] = []

    @field_validator("prompt", "negative_prompt")
    @classmethod
    def _text(cls, value: str | None, info: Any) -> str | None:
        if value is None:
            return None
        if has_lone_surrogate(value):
            raise ValueError("half of a surrogate pair (\\ud800 to \\udfff) is no character; remove or complete it")
        if info.field_name == "prompt":
            value = value.strip()
            if not value:
                raise ValueError("is empty")
        return value


class Demonstration(_Strict):
    """A medium to imitate."""

    type: Literal["demonstration"]
    target: MediaList

    @property
    def arms(self) -> dict[str, list[Media]]:
        """Media by the name of their arm."""
        return {"target": self.target.media}


class Preference(_Strict):
    """Two media of the same input, of which one is better."""

    type: Literal["preference"]
    chosen: MediaList
    rejected: MediaList

    @property
    def arms(self) -> dict[str, list[Media]]:
        """Media by the name of their arm."""
        return {"chosen": self.chosen.media, "rejected": self.rejected.media}


class StoredExample(_Strict):
    """One record of a file."""

    schema_version: Literal[2]
    input: ExampleInput
    supervision: Annotated[Demonstration | Preference, Field(discriminator="type")]
    metadata: dict[str, Any] = {}


def parse_example(text: str, place: str) -> StoredExample:
    """The record that a line holds.

    Args:
        text: The line.
        place: `file:line`, for messages.

    Raises:
        InputError: With one line for every field that is wrong.
    """
    row = parse_object(text, place, _EXAMPLE)
    try:
        return StoredExample.model_validate(row)
    except ValidationError as error:
        said = [f"{place}: {_explain(problem, row)}" for problem in error.errors(include_url=False)]
        raise InputError("\n".join(said)) from error


def _explain(problem: Any, row: Mapping[str, Any]) -> str:
    """One pydantic problem as field, value and remedy."""
    # The tag of the supervision's union is part of pydantic's path and not of the file's.
    location = tuple(
        part for i, part in enumerate(problem["loc"]) if not (i == 1 and problem["loc"][0] == "supervision")
    )
    field, kind, context = show_path(location) or "the record", problem["type"], problem.get("ctx", {})
    if kind == "extra_forbidden":
        known = _known_at(problem["loc"])
        close = nearest(str(location[-1]), known)
        hint = f"did you mean {close!r}?" if close else f"known here: {', '.join(known)}."
        return f"{field}: unknown key; {hint}"
    if kind == "missing":
        if location == ("schema_version",):
            return f"{field}: is missing; write {SCHEMA_VERSION}."
        return f"{field}: is missing."
    if kind == "literal_error" and location == ("schema_version",):
        return f"{field}: is {problem['input']!r}; this version reads {SCHEMA_VERSION}."
    if kind == "union_tag_not_found":
        return f"{field}.type: is missing; write 'demonstration' or 'preference'."
    if kind == "union_tag_invalid":
        close = nearest(str(context.get("tag")), ARMS, cutoff=0.4)
        hint = f" Did you mean {close!r}?" if close else ""
        return f"{field}.type: {context.get('tag')!r} is neither 'demonstration' nor 'preference'.{hint}"
    if kind == "value_error":
        return f"{field}: {context['error']}."
    if kind == "too_short":
        return f"{field}: is an empty list; name at least one file."
    if kind == "string_too_short":
        return f"{field}: is empty."
    if kind in ("model_type", "model_attributes_type", "dict_type"):
        return f"{field}: is a {kind_of(problem['input'])}; write an object."
    shown = repr(problem["input"])
    shown = shown if len(shown) <= 60 else shown[:57] + "..."
    return f"{field}: {shown}: {problem['msg'][0].lower()}{problem['msg'][1:]}."


def _known_at(location: tuple[str | int, ...]) -> list[str]:
    """The keys that are known where an unknown one was found."""
    model: type[BaseModel] = StoredExample
    by_name: dict[str, type[BaseModel]] = {
        "input": ExampleInput, "demonstration": Demonstration, "preference": Preference,
        "target": MediaList, "chosen": MediaList, "rejected": MediaList, "media": Media,
    }  # fmt: skip
    for part in location[:-1]:
        model = by_name.get(str(part), model)
    return list(model.model_fields)
