"""The kinds of values that fields take, and the base of all configuration sections."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, ConfigDict, Field

DType = Literal["fp32", "bf16", "fp16", "float32", "bfloat16", "float16"]
StorageDType = Literal["fp32", "bf16", "fp16"]
Device = Literal["auto", "cpu", "cuda"]
DynamicsName = Literal["Flow-SDE", "Dance-SDE", "CPS", "ODE", "DDIM-eta"]
LRScheduler = Literal["constant", "linear", "cosine"]

PositiveInt = Annotated[int, Field(ge=1)]
NonNegativeInt = Annotated[int, Field(ge=0)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
Fraction = Annotated[float, Field(ge=0, le=1)]
Port = Annotated[int, Field(ge=0, le=65535)]

STRICT = ConfigDict(extra="forbid", allow_inf_nan=False, validate_default=True)


class Section:
    """Base of the configuration dataclasses: unknown keys, NaN and infinity are refused, defaults are validated."""

    __pydantic_config__: ClassVar[ConfigDict] = STRICT


def option(default: Any = dataclasses.MISSING, help: str = "", *, factory: Callable[[], Any] | None = None) -> Any:
    """A dataclass field with a help text; without `default` and `factory` the field is required."""
    metadata = {"help": help}
    if factory is not None:
        return dataclasses.field(default_factory=factory, metadata=metadata)
    if default is dataclasses.MISSING:
        return dataclasses.field(metadata=metadata)
    return dataclasses.field(default=default, metadata=metadata)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _symmetric(value: Any) -> Any:
    return (-abs(value), abs(value)) if _is_number(value) else value


def _from_zero(value: Any) -> Any:
    return (0.0, value) if _is_number(value) else value


def _square(value: Any) -> Any:
    return (value, value) if _is_number(value) else value


_Pair = tuple[float, float]
# A scalar c stands for the pair (-c, c).
SymmetricRange = Annotated[_Pair, BeforeValidator(_symmetric, json_schema_input_type=float | _Pair)]
# A scalar hi stands for the pair (0, hi).
TimestepRange = Annotated[_Pair, BeforeValidator(_from_zero, json_schema_input_type=float | _Pair)]
# A scalar s stands for height s and width s.
Resolution = Annotated[
    tuple[PositiveInt, PositiveInt],
    BeforeValidator(_square, json_schema_input_type=PositiveInt | tuple[PositiveInt, PositiveInt]),
]


def resolve_dtype(name: str) -> Literal["fp32", "bf16", "fp16"]:
    """The short name of a dtype given by its short or long name."""
    short = {"float32": "fp32", "bfloat16": "bf16", "float16": "fp16"}.get(name, name)
    if short not in ("fp32", "bf16", "fp16"):
        raise ValueError(f"dtype {name!r} is not one of fp32, bf16, fp16, float32, bfloat16, float16.")
    return short  # type: ignore[return-value]
