"""Where the weights of variants live: named LoRA adapters on a shared base, or full copies."""

from __future__ import annotations

import copy
from abc import ABC, abstractmethod
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from flow_factory.errors import InputError
from flow_factory.models.bundle import ModelBundle
from flow_factory.models.lora import LoraLayers, LoraSettings
from flow_factory.models.snapshots import Snapshot

FIRST_ROLE = "default"


class Weights(ABC):
    """Live roles and frozen snapshots of the trained components.

    Attributes:
        roles: Role name to its trainable parameters, by stable names, in order.
        snapshots: Snapshot name to its values.
    """

    def __init__(self) -> None:
        self.roles: dict[str, dict[str, nn.Parameter]] = {}
        self.snapshots: dict[str, Snapshot] = {}

    @abstractmethod
    def add_role(self, name: str) -> None:
        """A live trainable copy with its own optimizer entry; it starts with the first role's weights."""

    @abstractmethod
    def add_snapshot(self, name: str, role: str, device: torch.device | None) -> Snapshot:
        """Frozen float32 values that start as a copy of the role's weights."""

    @abstractmethod
    def activate(self, variant: str | None) -> None:
        """Makes forwards see a role, a snapshot, or the base under all LoRA adapters (None)."""

    @abstractmethod
    def route(self, component: str) -> str:
        """The bundle's name of `component` for the active variant."""

    def freeze_choices(self) -> None:
        """Sets requires_grad once and for all: roles True, snapshots False."""
        for parameters in self.roles.values():
            for parameter in parameters.values():
                parameter.requires_grad_(True)
        for snapshot in self.snapshots.values():
            for value in snapshot.values.values():
                value.requires_grad_(False)

    def _check_new(self, name: str, kind: str) -> None:
        if name in self.roles or name in self.snapshots:
            raise ValueError(f"{kind} {name!r}: there is already a role or snapshot of that name.")

    def unknown(self, variant: str | None) -> InputError:
        """The error for a variant that does not exist."""
        known = [*self.roles, *self.snapshots]
        return InputError(f"no variant {variant!r}; known: {', '.join(map(repr, known))}.")


class LoraWeights(Weights):
    """Variants are named adapters; switching sets the active name on the cached layers.

    Args:
        bundle: Holds the components, already frozen.
        targets: Component name to the full names of the modules to wrap.
        settings: Rank, alpha and initialisation.
        adapter_name: PEFT name of the first role's adapter; other variants carry their own names.
    """

    def __init__(
        self, bundle: ModelBundle, targets: dict[str, list[str]], settings: LoraSettings, adapter_name: str
    ) -> None:
        super().__init__()
        self._first_adapter = adapter_name
        self.layers = LoraLayers(bundle, targets, settings)
        self.add_role(FIRST_ROLE)

    def adapter_name(self, variant: str) -> str:
        """PEFT's name of a variant's adapter."""
        return self._first_adapter if variant == FIRST_ROLE else variant

    def add_role(self, name: str) -> None:
        self._check_new(name, "role")
        self.layers.add(self.adapter_name(name))
        self.roles[name] = self.layers.parameters(self.adapter_name(name))
        if name != FIRST_ROLE:
            self._copy(FIRST_ROLE, self.roles[name])
        self.activate(FIRST_ROLE)

    def add_snapshot(self, name: str, role: str, device: torch.device | None) -> Snapshot:
        self._check_new(name, "snapshot")
        self.layers.add(name, torch.float32)
        source = self.roles[role]
        values = dict(zip(source, self.layers.parameters(name).values(), strict=True))
        for value in values.values():
            value.requires_grad_(False)
        snapshot = Snapshot(name, role, source, values)
        snapshot.copy_from_role()
        self.snapshots[name] = snapshot
        self.activate(FIRST_ROLE)
        return snapshot

    def activate(self, variant: str | None) -> None:
        if variant is not None and variant not in self.roles and variant not in self.snapshots:
            raise self.unknown(variant)
        for name, snapshot in self.snapshots.items():
            snapshot.in_use = name == variant
        self.layers.activate([] if variant is None else [self.adapter_name(variant)])

    def route(self, component: str) -> str:
        return component

    @torch.no_grad()
    def _copy(self, role: str, target: dict[str, nn.Parameter]) -> None:
        for source, destination in zip(self.roles[role].values(), target.values(), strict=True):
            destination.copy_(source)


class FullWeights(Weights):
    """The first role trains the components themselves; other roles are copies; snapshots exchange storage.

    Args:
        bundle: Holds the components.
        components: Which of them are trained.
    """

    def __init__(self, bundle: ModelBundle, components: Sequence[str]) -> None:
        super().__init__()
        self._bundle = bundle
        self._components = list(components)
        self._active_role = FIRST_ROLE
        self._exchanged: Snapshot | None = None
        self._aside: dict[str, Tensor] = {}
        self.roles[FIRST_ROLE] = self._parameters(FIRST_ROLE)

    def add_role(self, name: str) -> None:
        self._check_new(name, "role")
        for component in self._components:
            twin = copy.deepcopy(self._bundle.component(component))
            self._bundle.add_component(_twin_name(component, name), twin)
        self.roles[name] = self._parameters(name)

    def add_snapshot(self, name: str, role: str, device: torch.device | None) -> Snapshot:
        self._check_new(name, "snapshot")
        source = self.roles[role]
        values = {
            n: torch.empty_like(p, dtype=torch.float32, device=device or p.device, requires_grad=False)
            for n, p in source.items()
        }
        snapshot = Snapshot(name, role, source, values)
        snapshot.copy_from_role()
        self.snapshots[name] = snapshot
        return snapshot

    def activate(self, variant: str | None) -> None:
        if variant is None:
            raise InputError(
                "full fine-tuning has no base beneath its weights; declare a reference snapshot "
                "(adapter.add_reference()) and use that."
            )
        if variant not in self.roles and variant not in self.snapshots:
            raise self.unknown(variant)
        if self._exchanged is not None:
            self._restore(self._exchanged)
        snapshot = self.snapshots.get(variant)
        if snapshot is not None:
            self._exchange(snapshot)
        self._active_role = snapshot.role if snapshot is not None else variant

    def route(self, component: str) -> str:
        if self._active_role == FIRST_ROLE or component not in self._components:
            return component
        return _twin_name(component, self._active_role)

    def _exchange(self, snapshot: Snapshot) -> None:
        for name, parameter in self.roles[snapshot.role].items():
            self._aside[name] = parameter.data
            # The same storage where device and dtype agree; otherwise one copy in, and nothing is copied back.
            parameter.data = snapshot.values[name].to(device=parameter.device, dtype=parameter.dtype)
        snapshot.in_use = True
        self._exchanged = snapshot

    def _restore(self, snapshot: Snapshot) -> None:
        for name, parameter in self.roles[snapshot.role].items():
            parameter.data = self._aside[name]
        self._aside.clear()
        snapshot.in_use = False
        self._exchanged = None

    def _parameters(self, role: str) -> dict[str, nn.Parameter]:
        found: dict[str, nn.Parameter] = {}
        for component in self._components:
            bundle_name = component if role == FIRST_ROLE else _twin_name(component, role)
            for name, parameter in self._bundle.component(bundle_name).named_parameters():
                found[f"{bundle_name}.{name}"] = parameter
        return found


def _twin_name(component: str, role: str) -> str:
    return f"{component}__{role}"
