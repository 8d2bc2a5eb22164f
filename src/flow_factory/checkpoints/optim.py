"""Optimizer state keyed by parameter names, so that it survives another order of parameters and is checked by name."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from flow_factory.errors import InputError

_SHOWN = 4


def optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str]) -> dict[str, Any]:
    """The whole state of an optimizer as a tree for `tree.save_tree`.

    Args:
        optimizer: Any torch optimizer with per-parameter state (AdamW, Muon, SGD ...).
        names: Name of every parameter that the optimizer holds.

    Returns:
        "optimizer" (class name), "shapes" by name, "groups" (options and "params", a list of names), "state" by name.
        Parameters that never got a gradient have no entry under "state". Tensors are the live ones, not copies.

    Raises:
        KeyError: If the optimizer holds a parameter without a name.
    """
    groups: list[dict[str, Any]] = []
    shapes: dict[str, list[int]] = {}
    state: dict[str, dict[str, Any]] = {}
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            if parameter not in names:
                raise KeyError(f"the optimizer holds a parameter of shape {tuple(parameter.shape)} without a name")
            name = names[parameter]
            shapes[name] = list(parameter.shape)
            if optimizer.state.get(parameter):
                state[name] = dict(optimizer.state[parameter])
        options = {key: value for key, value in group.items() if key != "params"}
        groups.append(options | {"params": [names[parameter] for parameter in group["params"]]})
    return {"optimizer": _class_name(optimizer), "shapes": shapes, "groups": groups, "state": state}


def load_optimizer_state(optimizer: Optimizer, names: Mapping[nn.Parameter, str], tree: Mapping[str, Any]) -> None:
    """Puts the state from `optimizer_state` into `optimizer`, after checking all of it.

    The optimizer ends in exactly the saved state: hyper-parameters of the groups too, and parameters without saved
    state have none (they never got a gradient). State keeps its dtype: nothing is cast to the parameter's.

    Args:
        optimizer: An optimizer over the same named parameters, in any order inside a group.
        names: Name of every parameter that the optimizer holds.
        tree: The saved tree.

    Raises:
        InputError: If class, groups, names or shapes differ, naming them. The optimizer is then unchanged.
    """
    if tree["optimizer"] != _class_name(optimizer):
        raise InputError(
            f"the checkpoint holds the state of {tree['optimizer']}, this run uses {_class_name(optimizer)} "
            f"(optimizers[].optimizer); resume with the optimizer that was saved."
        )
    held = {names[p]: p for group in optimizer.param_groups for p in group["params"]}
    saved_shapes: Mapping[str, list[int]] = tree["shapes"]
    problems: list[str] = []
    if unknown := [name for name in saved_shapes if name not in held]:
        problems.append(f"saved parameters that this model does not train: {_listed(unknown)}")
    if missing := [name for name in held if name not in saved_shapes]:
        problems.append(f"trained parameters that the checkpoint does not hold: {_listed(missing)}")
    for name, shape in saved_shapes.items():
        if name in held and list(held[name].shape) != list(shape):
            problems.append(f"{name} has shape {list(held[name].shape)}, saved {list(shape)}")
    if stray := [name for name in tree["state"] if name not in saved_shapes]:
        problems.append(f"state of parameters in no group: {_listed(stray)}")
    groups = tree["groups"]
    if not problems and len(groups) != len(optimizer.param_groups):
        problems.append(f"{len(optimizer.param_groups)} parameter groups, saved {len(groups)}")
    if not problems:
        for index, (group, saved) in enumerate(zip(optimizer.param_groups, groups, strict=True)):
            differing = {names[p] for p in group["params"]} ^ set(saved["params"])
            if differing:
                problems.append(f"group {index} holds other parameters than when saved: {_listed(sorted(differing))}")
    if problems:
        raise InputError(
            "the optimizer state in the checkpoint does not fit this model: " + "; ".join(problems) + ". "
            "Resume with the model and trainable parts that were saved (model.target_modules, model.lora_rank, "
            "model.target_components, optimizers)."
        )

    for group, saved in zip(optimizer.param_groups, groups, strict=True):
        group.update({key: value for key, value in saved.items() if key != "params"})
        for parameter in group["params"]:
            optimizer.state.pop(parameter, None)
            entry = tree["state"].get(names[parameter])
            if entry:
                optimizer.state[parameter] = {k: _placed(k, v, parameter, group) for k, v in entry.items()}


def _placed(key: str, value: Any, parameter: nn.Parameter, group: Mapping[str, Any]) -> Any:
    """A private copy of a state value where the optimizer expects it: step counters stay on the CPU unless fused."""
    if not isinstance(value, Tensor):
        return value
    if key == "step" and not (group.get("capturable") or group.get("fused")):
        return value.detach().cpu().clone()
    return value.detach().to(parameter.device, copy=True)


def _class_name(optimizer: Any) -> str:
    inner = getattr(optimizer, "optimizer", optimizer)  # accelerate wraps optimizers
    return type(inner).__name__


def _listed(found: Iterable[str]) -> str:
    found = list(found)
    more = f" and {len(found) - _SHOWN} more" if len(found) > _SHOWN else ""
    return ", ".join(found[:_SHOWN]) + more
