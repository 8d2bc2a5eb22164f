"""Which experiment trackers exist and what to install for them. Needs no torch."""

from __future__ import annotations

import importlib.util

from flow_factory.errors import InputError

# log.logging_backend -> (module that must be importable, command that installs it)
BACKENDS: dict[str, tuple[str, str]] = {
    "tensorboard": ("tensorboard", "pip install tensorboard"),
    "wandb": ("wandb", 'pip install "flow-factory[wandb]"'),
    "swanlab": ("swanlab", 'pip install "flow-factory[swanlab]"'),
    "trackio": ("trackio", 'pip install "flow-factory[trackio]"'),
    "mlflow": ("mlflow", "pip install mlflow"),
}


def require_backend(name: str | None) -> None:
    """Checks that an experiment tracker is installed, without importing it.

    Args:
        name: The value of `log.logging_backend`; None and "none" need nothing.

    Raises:
        InputError: If the name is unknown, or its package is missing, with the command that installs it.
    """
    if name is None or name == "none":
        return
    if name not in BACKENDS:
        raise InputError(f"log.logging_backend is {name!r}; known: none, {', '.join(BACKENDS)}.")
    module, command = BACKENDS[name]
    if importlib.util.find_spec(module) is None:
        raise InputError(
            f"log.logging_backend is {name!r}, but package {module!r} is not installed. Install it with: {command}; "
            f"or set log.logging_backend=none (metrics.jsonl is always written)."
        )
