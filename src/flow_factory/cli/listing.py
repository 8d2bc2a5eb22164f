"""`flow-factory list`: the names that a configuration can use."""

from __future__ import annotations

from enum import Enum
from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded


class Kind(str, Enum):
    """What can be listed."""

    TRAINERS = "trainers"
    MODELS = "models"
    REWARDS = "rewards"
    ADVANTAGES = "advantages"
    LOSSES = "losses"
    DYNAMICS = "dynamics"
    PROMPTS = "prompts"
    BUILTINS = "builtins"


@guarded
def list_names(
    kind: Annotated[Kind, typer.Argument(help="What to list.", show_default=False)], debug: DebugOption = False
) -> None:
    """List the names that a configuration can use."""
    rows = _ROWS[kind]()
    width = max((len(name) for name, _ in rows), default=0)
    for name, about in rows:
        typer.echo(f"{name:<{width}}  {about}".rstrip())


def _trainers() -> list[tuple[str, str]]:
    from flow_factory.hparams import get_training_args_class, training_args_keys

    return [(key, _first_line(get_training_args_class(key))) for key in training_args_keys()]


def _models() -> list[tuple[str, str]]:
    from flow_factory.hparams import get_model_spec, model_keys

    specs = [get_model_spec(key) for key in model_keys()]
    width = max(len(spec.pipeline_class) for spec in specs)
    return [(spec.key, f"{spec.pipeline_class:<{width}}  {spec.io.describe()}") for spec in specs]


def _rewards() -> list[tuple[str, str]]:
    from flow_factory.rewards.registry import get_reward_class, reward_keys

    return [(key, _first_line(get_reward_class(key))) for key in reward_keys()]


def _advantages() -> list[tuple[str, str]]:
    from flow_factory.advantage.registry import list_adv_estimators

    return [(key, "") for key in list_adv_estimators()]


def _losses() -> list[tuple[str, str]]:
    from flow_factory.objectives.registry import list_policy_losses

    return [(key, "") for key in list_policy_losses()]


def _dynamics() -> list[tuple[str, str]]:
    from flow_factory.scheduler.names import Dynamics

    return [(entry.value, "stochastic" if entry.stochastic else "deterministic") for entry in Dynamics]


def _prompts() -> list[tuple[str, str]]:
    from flow_factory.hparams.builtin import PREFIX, builtin_names, resolve_builtin

    rows = []
    for name in builtin_names("prompts"):
        folder = resolve_builtin(PREFIX + name, "prompts")
        rows.append((PREFIX + name, _splits(folder)))
    return rows


def _builtins() -> list[tuple[str, str]]:
    from flow_factory.hparams.builtin import PREFIX, builtin_names

    return [(PREFIX + name, "model") for name in builtin_names("model")] + [
        (name, f"prompts: {about}") for name, about in _prompts()
    ]


def _splits(folder: str) -> str:
    from pathlib import Path

    files = sorted(path for path in Path(folder).iterdir() if path.suffix in (".txt", ".jsonl"))
    counts = []
    for path in files:
        lines = [line for line in path.read_text(encoding="utf-8").split("\n") if line.strip()]
        counts.append(f"{path.stem} {len(lines)}")
    return ", ".join(counts)


def _first_line(obj: object) -> str:
    return (obj.__doc__ or "").strip().split("\n")[0]


_ROWS = {
    Kind.TRAINERS: _trainers,
    Kind.MODELS: _models,
    Kind.REWARDS: _rewards,
    Kind.ADVANTAGES: _advantages,
    Kind.LOSSES: _losses,
    Kind.DYNAMICS: _dynamics,
    Kind.PROMPTS: _prompts,
    Kind.BUILTINS: _builtins,
}
