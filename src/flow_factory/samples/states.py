"""Latent states and the times they live at: ordered components, so that one code path serves one or many."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor


@dataclass(frozen=True)
class LatentState:
    """An ordered mapping of component name to latent tensor.

    Single-modality models use `{"latent": x}` with x of shape [B, ...]; joint models use one entry per component
    (`{"video": ..., "audio": ...}`). A row view (`state.row(i)`) drops the batch dimension.

    Attributes:
        components: Component name to tensor [B, ...]. All components share B.
        masks: Component name to a boolean tensor, broadcastable to the component, True where an element is *active*.
            Inactive elements (pinned first frames, conditioning rows) take no part in noise, log-prob or loss.
            A component without an entry is wholly active.
    """

    components: Mapping[str, Tensor]
    masks: Mapping[str, Tensor] = field(default_factory=dict)

    @classmethod
    def single(cls, latent: Tensor, mask: Tensor | None = None) -> LatentState:
        """The state of a model with one component, called "latent"."""
        return cls({"latent": latent}, {} if mask is None else {"latent": mask})

    def __getitem__(self, name: str) -> Tensor:
        return self.components[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self.components)

    def items(self) -> Iterator[tuple[str, Tensor]]:
        """Component names and tensors in order."""
        return iter(self.components.items())

    @property
    def only(self) -> Tensor:
        """The single component's tensor.

        Raises:
            ValueError: If the state has more than one component.
        """
        if len(self.components) != 1:
            raise ValueError(f"LatentState.only needs one component; this state has {list(self.components)}.")
        return next(iter(self.components.values()))

    @property
    def batch_size(self) -> int:
        """B, read off the first component."""
        return next(iter(self.components.values())).shape[0]

    def map(self, fn: Callable[[Tensor], Tensor]) -> LatentState:
        """Applies `fn` to every component and keeps the masks."""
        return LatentState({name: fn(x) for name, x in self.components.items()}, self.masks)

    def to(self, device: torch.device | str | None = None, dtype: torch.dtype | None = None) -> LatentState:
        """Moves components to `device` and `dtype`; masks move but stay boolean."""
        return LatentState(
            {name: x.to(device=device, dtype=dtype) for name, x in self.components.items()},
            {name: m.to(device=device) for name, m in self.masks.items()},
        )

    def detach(self) -> LatentState:
        """The same values without a graph."""
        return self.map(Tensor.detach)

    def row(self, index: int) -> LatentState:
        """Row `index` of the batch, as views without the batch dimension."""
        return LatentState(
            {name: x[index] for name, x in self.components.items()}, {n: m[index] for n, m in self.masks.items()}
        )

    def take(self, rows: Sequence[int]) -> LatentState:
        """Some rows of the batch, in the order given."""
        chosen = list(rows)
        return LatentState(
            {name: x[chosen] for name, x in self.components.items()}, {n: m[chosen] for n, m in self.masks.items()}
        )

    def rows(self) -> list[LatentState]:
        """All rows of the batch."""
        return [self.row(i) for i in range(self.batch_size)]

    @staticmethod
    def stack(rows: Sequence[LatentState]) -> LatentState:
        """Joins row states (without batch dimension) into one batch; the inverse of `rows()`."""
        first = rows[0]
        return LatentState(
            {name: torch.stack([row[name] for row in rows]) for name in first.components},
            {name: torch.stack([row.masks[name] for row in rows]) for name in first.masks},
        )

    @staticmethod
    def rejoin(parts: Sequence[LatentState], rows: Sequence[Sequence[int]]) -> LatentState:
        """The batch of which `parts[i]` holds the rows `rows[i]`: the inverse of several `take`s."""
        order = [row for taken in rows for row in taken]
        return LatentState.cat(parts).take([order.index(row) for row in range(len(order))])

    @staticmethod
    def cat(states: Sequence[LatentState]) -> LatentState:
        """Concatenates batched states along B."""
        first = states[0]
        return LatentState(
            {name: torch.cat([s[name] for s in states]) for name in first.components},
            {name: torch.cat([s.masks[name] for s in states]) for name in first.masks},
        )


@dataclass(frozen=True)
class StepTimes:
    """One component's times for one transition. All tensors have shape [B]; values may differ between rows.

    Attributes:
        sigma: Noise level before the step, in [0, 1], 1 = noise (float32).
        sigma_next: Noise level after the step, < sigma on a grid (float32). Equal to sigma when no step is taken.
        timestep: The network's own time input for `sigma` (a separate number: not always 1000 sigma).
    """

    sigma: Tensor
    sigma_next: Tensor
    timestep: Tensor

    def map(self, fn: Callable[[Tensor], Tensor]) -> StepTimes:
        """Applies `fn` to each tensor."""
        return StepTimes(fn(self.sigma), fn(self.sigma_next), fn(self.timestep))


@dataclass(frozen=True)
class ComponentTimes:
    """Times of one transition for every component.

    Attributes:
        components: Component name to its times.
        index: Grid index of each row, int64 [B]; None when sigma was drawn freely (off the grid).
        length: Number of steps T of the grid; None off the grid.
    """

    components: Mapping[str, StepTimes]
    index: Tensor | None = None
    length: int | None = None

    def __getitem__(self, name: str) -> StepTimes:
        return self.components[name]

    @property
    def only(self) -> StepTimes:
        """The single component's times.

        Raises:
            ValueError: If there is more than one component.
        """
        if len(self.components) != 1:
            raise ValueError(f"ComponentTimes.only needs one component; these times have {list(self.components)}.")
        return next(iter(self.components.values()))

    def take(self, rows: Sequence[int]) -> ComponentTimes:
        """The times of some rows, in the order given."""
        chosen = list(rows)
        return ComponentTimes(
            {name: times.map(lambda t: t[chosen]) for name, times in self.components.items()},
            None if self.index is None else self.index[chosen],
            self.length,
        )

    def to(self, device: torch.device | str) -> ComponentTimes:
        """Moves all tensors to `device`."""
        return ComponentTimes(
            {name: times.map(lambda t: t.to(device)) for name, times in self.components.items()},
            None if self.index is None else self.index.to(device),
            self.length,
        )
