"""LoRA layers: which modules are wrapped, how they start, and which adapter is active.

PEFT builds the layers; everything afterwards is done here, because its set_adapter, disable_adapters, enable_adapters
and add_adapter change requires_grad, which this toolkit sets once.
"""

from __future__ import annotations

import hashlib
import math
import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import cast

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora import LoraLayer
from torch import Tensor, nn

from flow_factory.errors import InputError
from flow_factory.models.bundle import ModelBundle
from flow_factory.models.snapshots import load_strict


@dataclass(frozen=True)
class LoraSettings:
    """What all adapters of a run share.

    Attributes:
        rank: r.
        alpha: The layer adds alpha / r B A x.
        init: "gaussian" (A ~ N(0, 1/r^2)) or "default" (A Kaiming-uniform); B is zero either way.
        seed: The run's seed; each layer draws from a generator of its own, seeded by this and its name.
        dtype: Dtype of the weights.
    """

    rank: int
    alpha: float
    init: str = "gaussian"
    seed: int = 42
    dtype: torch.dtype = torch.float32


def select_targets(module: nn.Module, targets: str | Sequence[str], dead: Sequence[str] = ()) -> list[str]:
    """Full names of the linear layers to wrap.

    Args:
        module: A component.
        targets: Names, the last parts of names ("to_q", "attn.to_q"), or patterns of whole names with `*`
            ("single_blocks.*.proj_out").
        dead: Regular expressions of modules that can never get a gradient, matched against the whole name; `{last}`
            stands for the index of the last block of the module's first list of blocks. They are left out.

    Raises:
        InputError: If a target matches nothing, naming what would have.
    """
    linear = [name for name, child in module.named_modules() if isinstance(child, nn.Linear)]
    patterns = [re.compile(pattern) for pattern in expand_dead(module, dead)]
    alive = [name for name in linear if not any(p.fullmatch(name) for p in patterns)]
    wanted = [targets] if isinstance(targets, str) else list(targets)
    chosen: dict[str, None] = {}
    for target in wanted:
        found = [name for name in alive if fnmatchcase(name, target) or name.endswith(f".{target}")]
        if not found:
            endings = sorted({re.sub(r"^.*?\d+\.", "", name) for name in linear})
            raise InputError(
                f"model.target_modules: no trainable linear layer of {type(module).__name__} is called {target!r}. "
                f"Layers end in: {', '.join(endings)}."
            )
        chosen.update(dict.fromkeys(found))
    return [name for name in alive if name in chosen]


def expand_dead(module: nn.Module, dead: Sequence[str]) -> list[str]:
    """The patterns of `dead` with `{last}` filled in for this module."""
    blocks = next((child for child in module.children() if isinstance(child, nn.ModuleList)), None)
    last = str(len(blocks) - 1) if blocks is not None and len(blocks) else ""
    return [pattern.replace("{last}", last) for pattern in dead]


class LoraLayers:
    """The LoRA layers of all trained components, cached by their bundle names.

    Args:
        bundle: Holds the components.
        targets: Component name to the full names of the modules to wrap.
        settings: Rank, alpha and initialisation.
    """

    def __init__(self, bundle: ModelBundle, targets: Mapping[str, list[str]], settings: LoraSettings) -> None:
        self._bundle = bundle
        self._targets = targets
        self.settings = settings
        self._layers: dict[str, LoraLayer] = {}

    def __len__(self) -> int:
        return len(self._layers)

    def add(self, adapter: str, dtype: torch.dtype | None = None) -> None:
        """Creates a named adapter on every target. Only before the optimizer exists.

        Raises:
            InputError: If the name cannot be used as a module name.
        """
        if not adapter or "." in adapter:
            raise InputError(f"model.lora_adapter_name: {adapter!r} cannot name an adapter; use letters without dots.")
        if any(adapter in layer.lora_A for layer in self._layers.values()):
            raise InputError(
                f"model.lora_adapter_name: {adapter!r} is also the name of a role or snapshot; choose another."
            )
        for component, names in self._targets.items():
            config = LoraConfig(r=self.settings.rank, lora_alpha=self.settings.alpha, target_modules=names)  # type: ignore[arg-type]
            # PEFT draws its own initial values; they are replaced below, and the global generator must not notice.
            with torch.random.fork_rng(devices=[]), warnings.catch_warnings():
                warnings.filterwarnings("ignore", message="Already found a `peft_config`")  # several are meant
                inject_adapter_in_model(config, self._bundle.component(component), adapter)
        if not self._layers:
            for component in self._targets:
                for name, module in self._bundle.component(component).named_modules():
                    if isinstance(module, LoraLayer):
                        self._layers[f"{component}.{name}"] = module
        for name, layer in self._layers.items():
            self._initialise(name, layer, adapter, dtype or self.settings.dtype)

    @torch.no_grad()
    def _initialise(self, name: str, layer: LoraLayer, adapter: str, dtype: torch.dtype) -> None:
        """Own initial values, in float32 on CPU: they depend on the seed and the layer's name, not on rank or order."""
        down, up = _pair(layer, adapter)
        digest = hashlib.blake2b(f"{self.settings.seed}/{name}".encode(), digest_size=8).digest()
        generator = torch.Generator("cpu").manual_seed(int.from_bytes(digest, "little") >> 1)
        values = torch.empty(down.shape, dtype=torch.float32)
        if self.settings.init == "gaussian":
            values.normal_(0.0, 1.0 / self.settings.rank, generator=generator)
        else:
            nn.init.kaiming_uniform_(values, a=math.sqrt(5), generator=generator)
        down.data = values.to(device=down.device, dtype=dtype)
        up.data = torch.zeros_like(up, dtype=dtype)

    def parameters(self, adapter: str) -> dict[str, nn.Parameter]:
        """An adapter's parameters by their names in the bundle, in layer order, A before B."""
        found: dict[str, nn.Parameter] = {}
        for name, layer in self._layers.items():
            down, up = _pair(layer, adapter)
            found[f"{name}.lora_A.{adapter}.weight"] = down
            found[f"{name}.lora_B.{adapter}.weight"] = up
        return found

    def activate(self, adapters: Sequence[str]) -> None:
        """Sets the active adapters on every layer; an empty list leaves the base. requires_grad is not touched."""
        names = list(adapters)
        for layer in self._layers.values():
            layer._active_adapter = names

    @torch.no_grad()
    def folded(self, adapter: str) -> dict[str, dict[str, Tensor]]:
        """Per component, weights under plain keys (`<module>.lora_A.weight`), float32, alpha / r folded into B.

        So that a reader that knows no alpha computes the same function. The fold is exact when alpha / r is a power of
        two; otherwise each weight of B is rounded once, a relative difference of at most 2^-24.
        """
        result: dict[str, dict[str, Tensor]] = {component: {} for component in self._targets}
        for full_name, layer in self._layers.items():
            component, _, name = full_name.partition(".")
            down, up = (weight.detach().to("cpu", torch.float32) for weight in _pair(layer, adapter))
            result[component][f"{name}.lora_A.weight"] = down.clone()
            result[component][f"{name}.lora_B.weight"] = up * layer.scaling[adapter]
        return result

    @torch.no_grad()
    def load_folded(self, adapter: str, component: str, state: Mapping[str, Tensor], origin: str) -> None:
        """The inverse of `folded` for one component.

        Raises:
            InputError: If the file's modules or rank differ from the configuration's.
        """
        target: dict[str, Tensor] = {}
        unfolded: dict[str, Tensor] = {}
        for full_name, layer in self._layers.items():
            owner, _, name = full_name.partition(".")
            if owner != component:
                continue
            target[f"{name}.lora_A.weight"], target[f"{name}.lora_B.weight"] = _pair(layer, adapter)
        scale = self.settings.alpha / self.settings.rank
        for name, value in state.items():
            unfolded[name] = value / scale if name.endswith("lora_B.weight") else value
        load_strict(target, unfolded, f"LoRA {origin!r} ({component})")


def _pair(layer: LoraLayer, adapter: str) -> tuple[nn.Parameter, nn.Parameter]:
    """A and B of one adapter."""
    return cast(nn.Parameter, layer.lora_A[adapter].weight), cast(nn.Parameter, layer.lora_B[adapter].weight)
