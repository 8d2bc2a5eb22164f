"""Optimizers and learning-rate schedules of one role, from its entry in `optimizers:`."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping

import torch
from torch import nn

from flow_factory.errors import InputError
from flow_factory.hparams import OptimizerArguments


def build_optimizers(
    arguments: OptimizerArguments, parameters: Mapping[str, nn.Parameter]
) -> dict[str, torch.optim.Optimizer]:
    """Torch optimizers over `parameters`.

    AdamW takes everything. Muon takes the matrices (2-D parameters, including the LoRA factors) and an AdamW called
    "fallback" takes what is left, since Muon's orthogonalised update is defined for matrices only.

    Args:
        arguments: The role's entry.
        parameters: Parameter name to parameter.
    """
    eps = arguments.eps
    assert eps is not None, "settled by OptimizerArguments"
    if arguments.optimizer == "adamw":
        return {
            "adamw": torch.optim.AdamW(
                list(parameters.values()),
                lr=arguments.learning_rate,
                betas=arguments.betas,
                eps=eps,
                weight_decay=arguments.weight_decay,
            )
        }
    matrices = [p for p in parameters.values() if p.ndim == 2]
    rest = [p for p in parameters.values() if p.ndim != 2]
    if not matrices:
        raise InputError(
            f"optimizers[{arguments.name}].optimizer: 'muon' needs 2-D parameters, and this role has none; use 'adamw'."
        )
    optimizers: dict[str, torch.optim.Optimizer] = {
        "muon": torch.optim.Muon(
            matrices,
            lr=arguments.learning_rate,
            weight_decay=arguments.weight_decay,
            momentum=arguments.momentum,
            nesterov=arguments.nesterov,
            ns_coefficients=arguments.ns_coefficients,
            eps=eps,
            ns_steps=arguments.ns_steps,
            adjust_lr_fn=arguments.adjust_lr_fn,
        )
    }
    if rest:
        optimizers["fallback"] = torch.optim.AdamW(
            rest,
            lr=arguments.learning_rate,
            betas=arguments.fallback_betas,
            eps=arguments.fallback_eps,
            weight_decay=arguments.weight_decay,
        )
    return optimizers


def learning_rate_schedule(name: str, warmup_steps: int, total_steps: int | None) -> Callable[[int], float]:
    """The learning-rate factor as a pure function of the role's optimizer step (counted from 0).

    The factor rises linearly over `warmup_steps` (step 0 has 1 / warmup_steps), then stays at 1 ("constant") or decays
    to 0 at `total_steps` ("linear", or "cosine": half a period).

    Raises:
        InputError: If a decay is asked for and the run has no known end.
    """
    if name != "constant" and total_steps is None:
        raise InputError(
            f"train.lr_scheduler: {name!r} decays to the end of the run, but the run has none; set train.max_epochs or "
            f"train.max_steps, or use lr_scheduler: constant."
        )

    def factor(step: int) -> float:
        if step < warmup_steps:
            return (step + 1) / warmup_steps
        if name == "constant" or total_steps is None:
            return 1.0
        fraction = min(1.0, (step - warmup_steps) / max(1, total_steps - warmup_steps))
        return 1.0 - fraction if name == "linear" else 0.5 * (1.0 + math.cos(math.pi * fraction))

    return factor
