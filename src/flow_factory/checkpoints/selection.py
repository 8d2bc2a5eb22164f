"""Which weights of a run are meant: a checkpoint, and the averaged or the live ones in it. Needs no torch.

Every checkpoint holds its weights as other programs read them (`lora/`, `lora_ema/`, `full/`, `full_ema/`), also with
`log.save_model_only`. Sampling, evaluation and export all start from these files, so that they show the same model.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from flow_factory.checkpoints.manifest import find_damage, list_checkpoints, read_manifest
from flow_factory.errors import InputError

LORA, FULL = "lora", "full"
_AVERAGED = "_ema"


@dataclass(frozen=True)
class SavedWeights:
    """Trained weights in a checkpoint.

    Attributes:
        folder: Where they are: `<checkpoint>/lora_ema`, for instance.
        kind: "lora" or "full".
        averaged: Whether they are the moving average (`train.ema_decay`).
        checkpoint: The checkpoint's folder.
        step: Its number: finished cycles, or optimizer steps for trainers on stored examples.
    """

    folder: Path
    kind: Literal["lora", "full"]
    averaged: bool
    checkpoint: Path
    step: int

    @property
    def label(self) -> str:
        """`checkpoint-000012, averaged weights`."""
        return f"{self.checkpoint.name}, {'averaged' if self.averaged else 'live'} weights"

    @property
    def average_is_the_start(self) -> bool:
        """Whether these are averaged weights that the run had not updated yet; False if the checkpoint does not say."""
        state = self.checkpoint / "trainer.json"  # not written with log.save_model_only
        if not self.averaged or not state.is_file():
            return False
        return json.loads(state.read_text(encoding="utf-8"))["tree"].get("ema", {}).get("updates") == 0


def select_weights(run: Path, checkpoint: str | None = None, averaged: bool | None = None) -> SavedWeights:
    """Finds trained weights of a run and checks that they are whole.

    Args:
        run: The run folder.
        checkpoint: A checkpoint's number or its folder in this run; None is the newest.
        averaged: The moving average or the live weights; None prefers the average, which evaluations show.

    Raises:
        InputError: If this run has no such checkpoint, its weights are damaged, or it keeps no average and one is
            asked for.
    """
    folder = _checkpoint_folder(run, checkpoint)
    manifest = read_manifest(folder)
    held = {name.split("/")[0] for name in manifest["files"] if "/" in name}
    kind: Literal["lora", "full"] | None = "lora" if LORA in held else "full" if FULL in held else None
    if kind is None:
        raise InputError(
            f"{folder} holds no weights for other programs (no {LORA}/ and no {FULL}/ in its manifest): it was written "
            f"by something else than a run's own save. Go on with the run for a cycle; its next checkpoint has them."
        )
    has_average = kind + _AVERAGED in held
    if averaged and not has_average:
        raise InputError(
            f"{folder} keeps no averaged weights, since the run has train.ema_decay: 0. Leave out --ema for its live "
            f"weights."
        )
    use_average = has_average if averaged is None else averaged
    name = kind + _AVERAGED if use_average else kind
    _require_whole(folder, name)
    return SavedWeights(folder / name, kind, use_average, folder, int(manifest["step"]))


def _checkpoint_folder(run: Path, checkpoint: str | None) -> Path:
    found = dict(list_checkpoints(run / "checkpoints"))
    present = f"there are {_enumerate(found)}" if found else "the run has none yet"
    if checkpoint is None:
        if not found:
            raise InputError(
                f"{run} has no weights: it has saved no checkpoint yet. Checkpoints are written every log.save_freq "
                f"cycles, at the end, and when a run is stopped by a signal."
            )
        return found[max(found)]
    if checkpoint.isdecimal():  # isdigit also holds for '²', which int() does not read
        if int(checkpoint) not in found:
            raise InputError(f"{run} has no checkpoint {int(checkpoint)}; {present}.")
        return found[int(checkpoint)]
    path = Path(checkpoint).expanduser()
    path = path if path.is_dir() else run / "checkpoints" / checkpoint
    if not path.is_dir():
        raise InputError(f"--checkpoint {checkpoint}: neither a number nor a checkpoint's folder; {present}.")
    if path.resolve().parent != (run / "checkpoints").resolve():
        raise InputError(
            f"--checkpoint {checkpoint} is not in {run / 'checkpoints'}, and the weights would be shown under "
            f"this one's name and configuration. Give a checkpoint of this run ({present}), or the other run's folder."
        )
    return path


def _require_whole(checkpoint: Path, name: str) -> None:
    damage = find_damage(checkpoint, below=f"{name}/")
    if damage is None:
        return
    others = [step for step, path in list_checkpoints(checkpoint.parent) if path != checkpoint]
    whole = [
        step for step in others if find_damage(checkpoint.parent / f"checkpoint-{step:06d}", below=f"{name}/") is None
    ]
    remedy = f"Whole are {_enumerate(whole)}: --checkpoint {whole[-1]}." if whole else "No other checkpoint is whole."
    raise InputError(f"the weights of {checkpoint} are damaged: {damage} {remedy}")


def _enumerate(steps: Iterable[int]) -> str:
    numbers = [str(step) for step in sorted(steps)]
    if len(numbers) > 12:
        numbers = [*numbers[:5], "...", *numbers[-5:]]
    return ", ".join(numbers)
