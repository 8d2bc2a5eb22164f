"""The code around a pipeline's call in a model card, where it cannot be made up from the model's inputs and outputs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ExampleCall:
    """What a model card writes around `pipeline(...)`.

    Attributes:
        imports: Import statements, beside that of the pipeline.
        arguments: Arguments that give condition media, as they are written in a call.
        result: Statements that save what was made. In them, `{call}` stands for the call, and the name of a
            model-specific field in braces for its value (`{frame_rate}`).
    """

    imports: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    result: tuple[str, ...] = ()
