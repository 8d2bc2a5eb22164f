"""Frozen weights of some moment: the reference, an average, an old policy, a teacher."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from flow_factory.errors import InputError, RunError


class Snapshot:
    """Float32 values of one role's trainable parameters at some time.

    With LoRA the values *are* a frozen named adapter, so using them costs nothing. With full fine-tuning they are
    tensors of their own, exchanged with the live storage while the snapshot is in use.

    Args:
        name: The variant's name ("reference", "ema", ...).
        role: The role it was taken from.
        source: The role's live parameters, by name.
        values: Float32 tensors by the same names.
    """

    def __init__(self, name: str, role: str, source: Mapping[str, Tensor], values: Mapping[str, Tensor]) -> None:
        self.name = name
        self.role = role
        self._source = dict(source)
        self.values = dict(values)
        self.in_use = False

    @torch.no_grad()
    def copy_from_role(self) -> None:
        """Takes the role's present weights."""
        self._refuse_in_use("copied to")
        for name, value in self.values.items():
            value.copy_(self._source[name])

    @torch.no_grad()
    def copy_to_role(self) -> None:
        """Puts these weights into the role, rounding to its dtype."""
        self._refuse_in_use("copied from")
        for name, value in self.values.items():
            self._source[name].copy_(value)

    @torch.no_grad()
    def update(self, decay: float) -> None:
        """Moves towards the role: values <- decay values + (1 - decay) weights, in float32.

        A decay of 0 copies the weights bit for bit, and 1 leaves the values as they are.
        """
        self._refuse_in_use("updated")
        if decay == 0.0:
            self.copy_from_role()
            return
        for name, value in self.values.items():
            value.lerp_(self._source[name].to(device=value.device, dtype=value.dtype), 1.0 - decay)

    def state_dict(self) -> dict[str, Tensor]:
        """The values by the role's parameter names (not copies)."""
        self._refuse_in_use("saved")
        return {name: value.detach() for name, value in self.values.items()}

    @torch.no_grad()
    def load_state_dict(self, state: Mapping[str, Tensor]) -> None:
        """Restores saved values.

        Raises:
            InputError: If names or shapes differ.
        """
        self._refuse_in_use("loaded")
        load_strict(self.values, state, f"snapshot {self.name!r}")

    def _refuse_in_use(self, verb: str) -> None:
        if self.in_use:
            raise RunError(f"snapshot {self.name!r} cannot be {verb} while its weights are in use; leave its context.")


@torch.no_grad()
def load_strict(target: Mapping[str, Tensor], state: Mapping[str, Tensor], what: str) -> None:
    """Copies `state` into `target`.

    Raises:
        InputError: Unless both have the same names and shapes; the first difference is named.
    """
    missing = [name for name in target if name not in state]
    unknown = [name for name in state if name not in target]
    if missing or unknown:
        raise InputError(
            f"{what}: the saved weights do not fit the model: {len(missing)} missing"
            f"{f' (first: {missing[0]!r})' if missing else ''}, {len(unknown)} unknown"
            f"{f' (first: {unknown[0]!r})' if unknown else ''}. Use the configuration they were saved with."
        )
    for name, tensor in target.items():
        if tensor.shape != state[name].shape:
            raise InputError(
                f"{what}: {name!r} has shape {tuple(state[name].shape)} in the file and {tuple(tensor.shape)} in the "
                f"model. Use the configuration it was saved with (LoRA rank, target modules)."
            )
    for name, tensor in target.items():
        tensor.copy_(state[name])
