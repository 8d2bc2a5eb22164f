"""Which weights a forward sees, and for how long that may not change."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

from flow_factory.errors import RunError
from flow_factory.models.weights import FIRST_ROLE, Weights


class Variants:
    """The active variant: a role, a snapshot, or None for the base beneath all LoRA adapters.

    requires_grad never changes here. Everything but a role is frozen, so it is used without gradients.
    """

    def __init__(self, weights: Weights) -> None:
        self._weights = weights
        self._active: str | None = FIRST_ROLE
        self._pins = 0

    @property
    def active(self) -> str | None:
        """The variant that forwards see now."""
        return self._active

    @contextmanager
    def use(self, variant: str | None) -> Iterator[None]:
        """Switches to a variant and back on exit.

        Raises:
            InputError: If there is no such variant.
            RunError: If another variant is pinned: its backward has not run yet.
        """
        previous = self._active
        self._switch(variant)
        try:
            with nullcontext() if variant in self._weights.roles else torch.no_grad():
                yield
        finally:
            self._switch(previous, leaving=True)

    @contextmanager
    def pin(self, variant: str) -> Iterator[None]:
        """Holds a role from a forward that will be differentiated until its backward has run.

        Gradient checkpointing runs the forward again during the backward, with the weights that are active *then*;
        a switch in between would give wrong gradients without an error.
        """
        if variant not in self._weights.roles:
            raise RunError(f"only a role can be pinned for a backward, and {variant!r} is none; snapshots are frozen.")
        with self.use(variant):
            self._pins += 1
            try:
                yield
            finally:
                self._pins -= 1

    def _switch(self, variant: str | None, leaving: bool = False) -> None:
        if variant == self._active:
            return
        if self._pins and not leaving:
            raise RunError(
                f"variant {variant!r} was entered while {self._active!r} is pinned for a backward. Run forwards under "
                f"snapshots or other roles first, the trained forward last, and then its backward."
            )
        self._weights.activate(variant)
        self._active = variant
