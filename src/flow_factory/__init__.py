"""Flow-Factory: reinforcement learning, preference learning and distillation for diffusion and flow-matching models.

    from flow_factory import build_trainer, load_config
    result = build_trainer(load_config("run.yaml", ["train.max_epochs=2"])).start()

Names are imported on first use, so that `import flow_factory` loads nothing heavy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from flow_factory.hparams import load_config
    from flow_factory.trainers.build import build_trainer

    __version__: str

__all__ = ["__version__", "build_trainer", "load_config"]

_HOMES = {"load_config": "flow_factory.hparams", "build_trainer": "flow_factory.trainers.build"}


def __getattr__(name: str) -> Any:
    if name == "__version__":
        from importlib.metadata import version

        return version("flow-factory")
    if name in _HOMES:
        return getattr(importlib.import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
