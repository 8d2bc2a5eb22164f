"""The one root module: everything trainable hangs below it, and every differentiated forward goes through it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from flow_factory.errors import RunError


class ModelBundle(nn.Module):
    """Dispatches forwards to named components.

    A strategy wraps this module, so a forward with gradients that reached a component directly would bypass whatever
    the strategy does (gradient reduction, gathering of shards) and leave ranks different without an error. Each
    component therefore refuses such a call.

    Args:
        components: Component name ("transformer") to module. Parameter names are `name.<name in the component>`.

    Attributes:
        rows: Rows that went through a component so far: the unit in which the work of algorithms is compared.
        trained_rows: Those of them with gradients.
    """

    def __init__(self, components: Mapping[str, nn.Module]) -> None:
        super().__init__()
        self._depth = 0
        self.rows = self.trained_rows = 0
        self._names: list[str] = []
        self._guard = self._make_guard()
        for name, module in components.items():
            self.add_component(name, module)

    def add_component(self, name: str, module: nn.Module) -> None:
        """Hangs a component below the root (a live copy of a role, for instance)."""
        if name in self._names:
            raise ValueError(f"ModelBundle already has a component {name!r}; it holds {self._names}.")
        self.add_module(name, module)
        self._names.append(name)
        # A deep copy of a component brings the hook with it.
        if self._guard not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(self._guard)

    @property
    def component_names(self) -> tuple[str, ...]:
        """Names of the components, in order."""
        return tuple(self._names)

    def component(self, name: str) -> nn.Module:
        """The module of a component, for configuration and helpers; call networks through the root instead.

        Raises:
            KeyError: If there is no such component.
        """
        if name not in self._names:
            raise KeyError(f"no component {name!r} in the bundle; it holds {self._names}.")
        return self.get_submodule(name)

    def forward(self, component: str, /, *args: Any, **kwargs: Any) -> Any:
        """Runs one component."""
        rows = next((len(value) for value in (*args, *kwargs.values()) if isinstance(value, torch.Tensor)), 0)
        self.rows += rows
        self.trained_rows += rows if torch.is_grad_enabled() else 0
        self._depth += 1
        try:
            return self.get_submodule(component)(*args, **kwargs)
        finally:
            self._depth -= 1

    def _make_guard(self) -> Callable[[nn.Module, tuple[Any, ...]], None]:
        # A plain function, not a bound method: copying a component must not copy the bundle through its hook.
        def refuse_direct_forward(module: nn.Module, args: tuple[Any, ...]) -> None:
            if self._depth == 0 and torch.is_grad_enabled():
                name = next((n for n in self._names if self.get_submodule(n) is module), type(module).__name__)
                raise RunError(
                    f"a forward with gradients reached component {name!r} outside the prepared root; its gradients "
                    f"could escape reduction over ranks. Call it through adapter.network({name!r})."
                )

        return refuse_direct_forward


def has_gradient_checkpointing(module: nn.Module) -> bool:
    """Whether a network can; diffusers gives the method that turns it on to those as well that cannot."""
    return any(getattr(module, f"{private}supports_gradient_checkpointing", False) for private in ("_", ""))
