"""Reference pictures that a prompt comes with: any number of them, of any size.

References are part of the condition. Rows whose references agree in number and size go through the network together;
`predict_by_shape` runs one forward for each kind of row in a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping, Sequence
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, TypeVar

import torch
from torch import Tensor

from flow_factory.models.conditions import PromptCondition
from flow_factory.samples import ComponentTimes, LatentState

Self = TypeVar("Self", bound="ReferenceCondition")

_PREFIX = "reference"


@dataclass(frozen=True)
class ReferenceCondition(PromptCondition):
    """Prompts with reference pictures.

    Attributes:
        references: For each of B rows, its references in order, encoded: [C, h, w], or however a model keeps one.
    """

    references: tuple[tuple[Tensor, ...], ...] = ()

    @classmethod
    def with_references(cls: type[Self], texts: PromptCondition, references: Sequence[Sequence[Tensor]]) -> Self:
        """The condition of encoded texts and, for each row, encoded references."""
        return cls(**_texts(texts), references=tuple(tuple(row) for row in references))

    def layout(self, row: int) -> Hashable:
        """What rows must have in common to share a forward: the number and shapes of their references."""
        return tuple(reference.shape for reference in self.references[row])

    @cached_property
    def groups(self: Self) -> tuple[tuple[tuple[int, ...], Self], ...]:
        """Rows that agree in `layout`, and their condition; in order of first appearance."""
        found: dict[Hashable, list[int]] = {}
        for row in range(self.batch_size):
            found.setdefault(self.layout(row), []).append(row)
        return tuple((tuple(rows), self.together(rows)) for rows in found.values())

    def together(self: Self, rows: Sequence[int]) -> Self:
        """The condition of rows that agree in `layout`, in this order."""
        return self if len(rows) == self.batch_size else self.cat([self.row(row) for row in rows])

    @cached_property
    def stacked(self) -> tuple[Tensor, ...]:
        """The references of rows that agree, one tensor [B, ...] for each; see `groups`."""
        return tuple(torch.stack(number) for number in zip(*self.references, strict=True))

    def tensors(self) -> dict[str, Tensor]:
        """Also `reference.<row>.<number>` for each reference."""
        named = {
            f"{_PREFIX}.{row}.{number}": reference
            for row, given in enumerate(self.references)
            for number, reference in enumerate(given)
        }
        return _texts(self) | named

    @classmethod
    def from_tensors(cls: type[Self], tensors: Mapping[str, Tensor]) -> Self:
        texts = {name: tensor for name, tensor in tensors.items() if not name.startswith(f"{_PREFIX}.")}
        rows: list[dict[int, Tensor]] = [{} for _ in range(len(texts["prompt_embeds"]))]
        for name in tensors.keys() - texts.keys():
            _, row, number = name.split(".")
            rows[int(row)][int(number)] = tensors[name]
        return cls(**texts, references=tuple(tuple(given[i] for i in sorted(given)) for given in rows))

    def row(self: Self, index: int) -> Self:
        texts = {name: tensor[index : index + 1] for name, tensor in _texts(self).items()}
        return type(self)(**texts, references=self.references[index : index + 1])

    @classmethod
    def cat(cls: type[Self], rows: Sequence[Any]) -> Self:
        texts = PromptCondition.cat([PromptCondition(**_texts(row)) for row in rows])
        return cls.with_references(texts, [given for row in rows for given in row.references])


def _texts(condition: PromptCondition) -> dict[str, Any]:
    """The fields of a condition that are of prompts, without those that are None."""
    values = {f.name: getattr(condition, f.name) for f in fields(PromptCondition)}
    return {name: value for name, value in values.items() if value is not None}


def predict_by_shape(
    state: LatentState,
    times: ComponentTimes,
    condition: ReferenceCondition,
    predict: Callable[[LatentState, ComponentTimes, Any], LatentState],
) -> LatentState:
    """A prediction for rows of any references: one call for all rows whose references agree in number and shapes.

    Args:
        state: Batch B.
        times: Batch B.
        condition: Batch B.
        predict: Takes some rows of the three, with references that agree, and gives their prediction.
    """
    groups = condition.groups
    if len(groups) == 1:
        return predict(state, times, groups[0][1])
    parts = [predict(state.take(rows), times.take(rows), some) for rows, some in groups]
    return LatentState.rejoin(parts, [rows for rows, _ in groups])
