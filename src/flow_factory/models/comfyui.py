"""LoRA files for ComfyUI: the names as data, and the pure functions that apply them.

ComfyUI holds a network in the layout in which its authors published it, and reads a LoRA (`model_lora_keys_unet` in
comfy/lora.py) under one of three kinds of keys, each a class here:

* `DiffusersNames`: diffusers' own names, for families of which it has a map to its own layout;
* `CheckpointNames`: the names of that layout, which it reads for every family, and which every version reads that knows
  the family (maps of diffusers' names came later, and grew: that of Z-Image had no refiners at first). Where the layout
  has q, k and v as one weight, their LoRAs become one of three times the rank (`fuse`), which adds the same matrix;
* `UnetNames`: diffusers' names with underscores, for UNets.

A key that it does not know is dropped with a line in its log. So a module without a known name is an error here.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from flow_factory.errors import InputError

LORA_KEYS = "https://github.com/comfyanonymous/ComfyUI/blob/master/comfy/lora.py (model_lora_keys_unet)"
"""Where ComfyUI says under which keys it reads a LoRA."""


def checkpoint_keys(converter: str) -> str:
    """Where the names of a published checkpoint are documented: its converter in diffusers (a function's name)."""
    path = "https://github.com/huggingface/diffusers/blob/main/src/diffusers/loaders/single_file_utils.py"
    return f"{LORA_KEYS}, with the names in {path} ({converter})"


class Factors(NamedTuple):
    """A LoRA's two matrices, with alpha folded in: it adds `up @ down` to the weight.

    Attributes:
        down: A, [r, in].
        up: B, [out, r].
    """

    down: Tensor
    up: Tensor


def fuse(parts: Sequence[Factors]) -> Factors:
    """The LoRA of one weight in which several lie one below the other: its rank is the sum of theirs.

    Exact: with B = diag(B_1 ... B_n) and A = [A_1; ...; A_n], the rows of B A are B_i A_i.

    Args:
        parts: From top to bottom, all with the same inputs.
    """
    return Factors(torch.cat([part.down for part in parts]), torch.block_diag(*(part.up for part in parts)))


@dataclass(frozen=True)
class Fusion:
    """Modules that are one module in ComfyUI.

    Attributes:
        parts: Their names in diffusers, in the order of the fused weight's rows.
        even: They have as many rows as each other, so one without a LoRA needs no further knowledge.
    """

    parts: tuple[str, ...]
    even: bool = True

    def apply(self, layers: Mapping[str, Factors], prefix: str) -> Factors:
        """The fused LoRA; a part without one gets zero rows.

        Args:
            layers: By the full name in diffusers.
            prefix: Of the parts' names in `layers`; at least one is there.

        Raises:
            InputError: If a part is missing, and the number of its rows cannot be known.
        """
        present = {name: layers[prefix + name] for name in self.parts if prefix + name in layers}
        missing = [prefix + name for name in self.parts if name not in present]
        if missing and not self.even:
            raise InputError(
                f"ComfyUI has {', '.join(self.parts)} as one weight, but this LoRA has nothing for "
                f"{', '.join(missing)}, and their sizes differ. Use --format diffusers, or name all of them in "
                "model.target_modules."
            )
        like = next(iter(present.values()))
        nothing = Factors(like.down.new_zeros(0, like.down.shape[1]), like.up.new_zeros(like.up.shape[0], 0))
        return fuse([present.get(name, nothing) for name in self.parts])


@dataclass(frozen=True)
class ComfyUINames(ABC):
    """How a family's LoRA is named in ComfyUI.

    Attributes:
        source: Where the names are documented.
        models: Of families with checkpoints of two networks, which are two models in ComfyUI: the model's name by the
            component's. A LoRA of the component "transformer" alone may be of a checkpoint of one.
    """

    source: str
    models: Mapping[str, str] = field(default_factory=dict, kw_only=True)

    @abstractmethod
    def write(self, component: str, layers: Mapping[str, Factors]) -> dict[str, Tensor]:
        """The file's content for one component.

        Raises:
            InputError: If a module has no known name.
        """

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, dict[str, Tensor]]:
        """A LoRA in ComfyUI's layout.

        Args:
            state: In diffusers' layout (`transformer.<module>.lora_A.weight`), alpha folded in.

        Returns:
            The contents of the files, by the model that they are for; "" for the only one.

        Raises:
            InputError: If a module has no known name.
        """
        components: dict[str, dict[str, Factors]] = {}
        for key, down in state.items():
            if key.endswith(".lora_A.weight"):
                name = key.removesuffix(".lora_A.weight")
                component, _, module = name.partition(".")
                components.setdefault(component, {})[module] = Factors(down, state[f"{name}.lora_B.weight"])
        models = self.models if list(components) != ["transformer"] else {}
        return {models.get(component, ""): self.write(component, layers) for component, layers in components.items()}


@dataclass(frozen=True)
class DiffusersNames(ComfyUINames):
    """Diffusers' own keys, `transformer.<module>.lora_A.weight`.

    Attributes:
        unread: Beginnings of the names of modules that ComfyUI's map of the family leaves out.
    """

    unread: tuple[str, ...] = ()

    def write(self, component: str, layers: Mapping[str, Factors]) -> dict[str, Tensor]:
        _check_known([module for module in layers if module.startswith(self.unread)])
        return {
            key: value
            for module, (down, up) in layers.items()
            for key, value in _pair(f"{component}.{module}", down, up).items()
        }


@dataclass(frozen=True)
class Blocks:
    """The names in a list of blocks.

    Attributes:
        own: The list's full name in diffusers, `transformer_blocks`.
        theirs: Its name in ComfyUI.
        modules: The names of modules in a block, from diffusers' to ComfyUI's.
        fused: Names of modules in ComfyUI that diffusers has apart.
        swapped: Of `modules`, those whose two halves of rows are the other way round in ComfyUI.
    """

    own: str
    theirs: str
    modules: Mapping[str, str]
    fused: Mapping[str, Fusion] = field(default_factory=dict)
    swapped: tuple[str, ...] = ()


_NONE = Blocks("", "", {})


@dataclass(frozen=True)
class CheckpointNames(ComfyUINames):
    """The names of the published checkpoint, `diffusion_model.<module>.lora_A.weight`.

    Attributes:
        blocks: The lists of blocks whose modules have names here.
    """

    blocks: tuple[Blocks, ...]

    def write(self, component: str, layers: Mapping[str, Factors]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        unknown: list[str] = []
        for name, factors in layers.items():
            blocks = next((blocks for blocks in self.blocks if name.startswith(f"{blocks.own}.")), _NONE)
            number, _, module = name.removeprefix(f"{blocks.own}.").partition(".")
            fused = next((to for to, fusion in blocks.fused.items() if module in fusion.parts), None)
            block = f"diffusion_model.{blocks.theirs}.{number}."
            if module in blocks.modules:
                down, up = factors
                up = torch.cat(up.chunk(2)[::-1]) if module in blocks.swapped else up
                result |= _pair(block + blocks.modules[module], down, up)
            elif fused is None:
                unknown.append(name)
            elif f"{block}{fused}.lora_A.weight" not in result:  # the first of its parts writes all
                result |= _pair(block + fused, *blocks.fused[fused].apply(layers, f"{blocks.own}.{number}."))
        _check_known(unknown)
        return result


@dataclass(frozen=True)
class UnetNames(ComfyUINames):
    """`lora_unet_<diffusers' module with underscores>.lora_down.weight`, `.lora_up.weight` and `.alpha`."""

    def write(self, component: str, layers: Mapping[str, Factors]) -> dict[str, Tensor]:
        result: dict[str, Tensor] = {}
        for module, (down, up) in layers.items():
            name = f"lora_unet_{module.replace('.', '_')}"
            # The reader multiplies by alpha / r.
            alpha = torch.tensor(float(down.shape[0]))
            result |= {f"{name}.lora_down.weight": down, f"{name}.lora_up.weight": up, f"{name}.alpha": alpha}
        return result


def _pair(name: str, down: Tensor, up: Tensor) -> dict[str, Tensor]:
    return {f"{name}.lora_A.weight": down, f"{name}.lora_B.weight": up}


def _check_known(unknown: Sequence[str]) -> None:
    if unknown:
        shown = ", ".join(unknown[:3]) + (f" and {len(unknown) - 3} more" if len(unknown) > 3 else "")
        raise InputError(
            f"the names under which ComfyUI reads a LoRA of {shown} are not known here. Use --format diffusers, or "
            "leave these modules out of model.target_modules."
        )
