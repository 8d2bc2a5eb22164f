"""`flow-factory sample`: pictures or videos of a model or a run."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.outputs import Force, choose_folder, write_folder
from flow_factory.cli.sources import Averaged, Checkpoint, Overrides, Source, SourcePath, check_model, open_source

if TYPE_CHECKING:
    from flow_factory.data_utils.prompt_choice import PromptChoice
    from flow_factory.trainers.inference import Variant


_MARKER = "samples.json"


@guarded
def sample(
    source: SourcePath,
    overrides: Overrides = None,
    prompt: Annotated[
        list[str] | None,
        typer.Option("--prompt", metavar="TEXT", help="A prompt; may be given several times.", show_default=False),
    ] = None,
    prompts: Annotated[
        Path | None,
        typer.Option("--prompts", metavar="FILE", help="Prompts, one a line, or .jsonl.", show_default=False),
    ] = None,
    num: Annotated[
        int | None,
        typer.Option(
            "--num",
            min=1,
            metavar="N",
            help="Pictures or videos in all, dealt evenly to the prompts; one each.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the noise; that of evaluations.", show_default=False)
    ] = None,
    checkpoint: Checkpoint = None,
    ema: Averaged = None,
    without_lora: Annotated[
        bool,
        typer.Option("--without-lora", help="The base model, without what the run trained.", show_default=False),
    ] = False,
    compare: Annotated[
        bool,
        typer.Option("--compare", help="The base model too, from the same noise, side by side.", show_default=False),
    ] = False,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder to create; samples-<name>.", show_default=False),
    ] = None,
    force: Force = False,
    debug: DebugOption = False,
) -> None:
    """Make pictures or videos with a run's trained weights, or with the base model of a configuration.

    Without --prompt and --prompts the first prompts of the evaluation set are taken, with the noise that evaluations
    give them. `eval:` says how they are made: eval.num_inference_steps=20, eval.guidance_scale=4.
    """
    from flow_factory.contracts import Modality
    from flow_factory.data_utils.prompt_choice import choose_prompts
    from flow_factory.errors import InputError

    opened = open_source(source, overrides, checkpoint, ema, evaluates=True)
    if (compare or without_lora) and opened.trained is None:
        raise InputError(
            f"{source!r} has no trained weights to compare with or to leave out; give the folder of a run, or "
            f"model.resume_path=PATH."
        )
    if compare and without_lora:
        raise InputError("--compare shows both; leave out --without-lora.")
    check_model(opened.config)
    makes_videos = Modality.VIDEO in opened.config.spec.io.outputs
    if makes_videos:
        from flow_factory.tracking.players import require_video_encoder

        require_video_encoder()
    choices = choose_prompts(opened.config, prompt or (), prompts, num)
    target = choose_folder(output, f"samples-{opened.name}", _MARKER, force)
    variants: list[Variant] = (
        ["base", "trained"] if compare else ["base" if without_lora or opened.trained is None else "trained"]
    )
    seed = opened.config.eval_seed if seed is None else seed
    unit = "videos" if makes_videos else "pictures"
    fill = _make(opened, choices, variants, seed, unit)
    written = write_folder(target, fill, output, _MARKER, force)
    from flow_factory.trainers.sampling import GRID

    typer.echo(f"wrote {len(choices) * len(variants)} {unit} and {GRID} to {written}")


def _make(
    opened: Source, choices: list[PromptChoice], variants: list[Variant], seed: int, unit: str
) -> Callable[[Path], None]:
    """Makes pictures or videos; what is returned writes them into a folder."""
    typer.echo(f"weights: {opened.describe(variants)}")  # at once: what follows imports torch and loads a model
    from flow_factory.cli.progress import counting
    from flow_factory.trainers import setup
    from flow_factory.trainers.inference import build_inference_model
    from flow_factory.trainers.sampling import make_samples, write_samples

    config = opened.config
    comm = setup.build_comm(setup.build_accelerator(config))
    model = build_inference_model(config, comm, opened.trained, variants)
    with counting("sample", len(choices) * len(variants), unit) as advance:
        made = make_samples(model, config, choices, variants, seed, advance)
    return lambda folder: write_samples(folder, made, _facts(opened, seed))


def _facts(opened: Source, seed: int) -> dict[str, Any]:
    workflow = opened.config.spec.workflow  # of a modular pipeline, which is loaded with it
    return {
        "model": opened.config.model_args.model_name_or_path,
        **({} if workflow is None else {"workflow": workflow}),
        "trained_weights": None if opened.trained is None else str(opened.trained),
        "seed": seed,
        "solver": opened.config.eval_args.solver,
    }
