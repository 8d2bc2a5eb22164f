"""`flow-factory data`: makes and checks datasets of stored examples."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.progress import counting
from flow_factory.cli.sources import Averaged, Checkpoint, Overrides, Source, SourcePath, check_model, open_source

if TYPE_CHECKING:
    from flow_factory.data_utils.offline_files import OfflineScan
    from flow_factory.data_utils.prompt_dataset import PromptRecord
    from flow_factory.hparams import Arguments, DatasetArguments

data_app = typer.Typer(
    help="Make and check datasets of stored examples (demonstrations and preferences).",
    no_args_is_help=True,
    rich_markup_mode=None,
)
Target = Annotated[Path, typer.Argument(metavar="OUTPUT", help="The dataset's folder, created.", show_default=False)]
Split = Annotated[str, typer.Option("--split", help="Name of the split.")]


@data_app.command("validate")
@guarded
def validate(
    source: Annotated[
        Path,
        typer.Argument(
            metavar="CONFIG|DATASET", help="A configuration, a dataset's folder, or its .jsonl.", show_default=False
        ),
    ],
    overrides: Overrides = None,
    split: Annotated[
        str | None, typer.Option("--split", help="Split to read from a folder; train.", show_default=False)
    ] = None,
    image_dir: Annotated[
        Path | None,
        typer.Option("--image-dir", help="Folder of the pictures; images beside the file.", show_default=False),
    ] = None,
    model_type: Annotated[
        str | None,
        typer.Option("--model-type", help="Also check against what this model takes and gives.", show_default=False),
    ] = None,
    debug: DebugOption = False,
) -> None:
    """Check every record of stored examples and decode every picture and video, inputs too; list all that are bad."""
    from collections import Counter

    from flow_factory.data_utils.offline_plan import unfit_examples
    from flow_factory.errors import InputError

    problems: list[str] = []
    for dataset, name, io, limit, config in _datasets_of(source, overrides or [], split, image_dir, model_type):
        scan = _scan(dataset, name, io, limit)
        unfit = [] if config is None else unfit_examples(config, scan)
        found = [*scan.problems, *unfit, *_undecodable(scan)]
        problems += found
        typer.echo(
            f"{scan.path}: {len(scan.examples)} good {scan.supervision or 'record'}s, {len(found)} problems"
            if found
            else f"{scan.path}: {len(scan.examples)} {scan.supervision}s, all good"
        )
        sizes = Counter(example.size for example in scan.examples if example.size is not None)
        shown = ", ".join(f"{h} x {w} ({count})" for (h, w), count in sizes.most_common(8))
        more = f" and {len(sizes) - 8} other sizes" if len(sizes) > 8 else ""
        if shown:
            typer.echo(f"  sizes (height x width): {shown}{more}")
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise InputError(f"{len(problems)} problems:\n{listed}")


@data_app.command("make-preferences")
@guarded
def make_preferences(
    source: SourcePath,
    overrides: Overrides = None,
    output: Annotated[Path, typer.Option("--output", metavar="DIR", help="The dataset's folder, created.")] = Path(
        "preferences"
    ),
    images_per_prompt: Annotated[
        int, typer.Option("--images-per-prompt", min=2, metavar="K", help="Pictures that are compared.")
    ] = 4,
    prompts: Annotated[
        str | None,
        typer.Option(
            "--prompts",
            metavar="FOLDER",
            help="Folder of prompts, or builtin/<name>; the training datasets.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="Split of the prompts; train, or each dataset's own.", show_default=False),
    ] = None,
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Only the first N prompts.", show_default=False)
    ] = None,
    min_margin: Annotated[
        float, typer.Option("--min-margin", min=0.0, help="The best must exceed the worst by more than this.")
    ] = 0.0,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed of the noise; train.seed.", show_default=False)
    ] = None,
    checkpoint: Checkpoint = None,
    ema: Averaged = None,
    debug: DebugOption = False,
) -> None:
    """Make K pictures per prompt, score them with the rewards, and store the best and the worst as a pair.

    `eval:` says how pictures are made. Work that was stopped goes on when the command is given again.
    """
    from flow_factory.data_utils.offline_writer import check_free

    opened = open_source(source, overrides, checkpoint, ema, evaluates=True)
    check_model(opened.config)
    check_free(output)
    records = _prompts_of(opened, prompts, split)[:limit]

    from flow_factory.trainers import setup
    from flow_factory.trainers.inference import build_inference_model
    from flow_factory.trainers.offline import preferences
    from flow_factory.trainers.sampling import check_makes_pictures

    config = opened.config
    check_makes_pictures(config)
    comm = setup.build_comm(setup.build_accelerator(config))
    names = [dataset.name for dataset in config.data_args.sources()]
    rewards = preferences.preference_rewards(config, comm, [*names, *{r.source for r in records}], images_per_prompt)
    variant = "base" if opened.trained is None else "trained"
    typer.echo(f"weights: {opened.describe([variant])}")
    model = build_inference_model(config, comm, opened.trained, [variant])
    settings = preferences.PreferenceSettings(
        images_per_prompt, config.training_args.seed if seed is None else seed, min_margin
    )
    try:
        with model.use(variant), counting("make", len(records) * images_per_prompt) as advance:
            counts = preferences.make_preferences(
                model, config, records, rewards, settings, output, identity=_identity(opened), advance=advance
            )
    finally:
        rewards.close()
    typer.echo(
        f"wrote {counts.pairs} pairs of {counts.prompts} prompts to {output} ({counts.ties} ties and {counts.failed} "
        f"with fewer than two scored pictures left out)"
    )


@data_app.command("from-folder")
@guarded
def from_folder(
    source: Annotated[
        Path, typer.Argument(metavar="FOLDER", help="Pictures with captions: a.png and a.txt.", show_default=False)
    ],
    output: Target,
    debug: DebugOption = False,
) -> None:
    """Make demonstrations of a folder of pictures with captions beside them."""
    from flow_factory.data_utils.offline_import import import_folder

    with counting("read", None) as advance:
        count = import_folder(source, output, lambda: advance(1))
    typer.echo(f"wrote {count} demonstrations to {output}")


@data_app.command("from-hf")
@guarded
def from_hf(
    source: Annotated[
        str,
        typer.Argument(
            metavar="SOURCE", help="A dataset of the Hub, a .parquet file or a folder of them.", show_default=False
        ),
    ],
    output: Target,
    split: Split = "train",
    limit: Annotated[
        int | None, typer.Option("--limit", min=1, metavar="N", help="Stop after N examples.", show_default=False)
    ] = None,
    prompt_column: Annotated[str, typer.Option("--prompt-column", help="Column of the text.")] = "caption",
    image_column: Annotated[
        list[str] | None,
        typer.Option("--image-column", help="Column of pictures; once or twice. jpg_0 and jpg_1.", show_default=False),
    ] = None,
    label_column: Annotated[
        str, typer.Option("--label-column", help="Column that is 1 where the first picture is better, 0 the second.")
    ] = "label_0",
    skip_unusable: Annotated[
        bool,
        typer.Option(
            "--skip-unusable", help="Leave out rows that cannot be used instead of stopping.", show_default=False
        ),
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Make demonstrations or preferences of a Hugging Face dataset, such as Pick-a-Pic. Ties are left out."""
    from flow_factory.data_utils.offline_import import find_layout, import_table, open_table
    from flow_factory.data_utils.offline_writer import check_free
    from flow_factory.errors import InputError

    check_free(output)
    table = open_table(source, split)
    columns = table.column_names
    if columns is None:
        raise InputError(f"dataset {source!r} does not tell its columns; download it and give its .parquet files.")
    layout = find_layout(columns, prompt_column, image_column or (), label_column)
    with counting("read", limit, "rows") as advance:
        counts = import_table(
            table, layout, output, limit=limit, skip_unusable=skip_unusable, on_row=lambda: advance(1)
        )
    kind = "preferences" if layout.label is not None else "demonstrations"
    left_out = [
        f"{count} {what}"
        for count, what in (
            (counts.ties, "ties"),
            (counts.unlabelled, "rows without a label"),
            (counts.unusable, "unusable rows"),
        )
        if count
    ]
    typer.echo(f"wrote {counts.written} {kind} to {output}" + (f"; left out: {', '.join(left_out)}" * bool(left_out)))


@data_app.command("draw")
@guarded
def draw(
    output: Target,
    number: Annotated[int, typer.Option("--number", min=1, metavar="N", help="Pictures to draw.")] = 256,
    seed: Annotated[int, typer.Option("--seed", help="Seed of what is drawn and where.")] = 0,
    debug: DebugOption = False,
) -> None:
    """Draw demonstrations in a style that the embedded pipeline does not know: single shapes as outlines.

    The combinations are those of the training prompts; `test.txt` holds the others.
    """
    import numpy as np

    from flow_factory.data_utils.offline_writer import check_free, example_line, new_dataset, write_prompts
    from flow_factory.rewards.shapes_styles import render_outlined
    from flow_factory.rewards.shapes_world import format_caption, sample_scene, scenes, split_of

    check_free(output)
    rng = np.random.default_rng(seed)
    with new_dataset(output) as writer:
        for index in range(number):
            scene = sample_scene(rng, "single", "train")
            name = writer.save_image(render_outlined(scene, rng), f"{index:06d}")
            writer.add(example_line("demonstration", format_caption(scene), {"target": name}))
        held_out = [format_caption(scene) for scene in scenes("single") if split_of(scene) == "test"]
        write_prompts(writer.folder / "test.txt", held_out)
    typer.echo(f"wrote {number} demonstrations and {len(held_out)} held-out prompts to {output}")


def _datasets_of(
    source: Path, overrides: Sequence[str], split: str | None, image_dir: Path | None, model_type: str | None
) -> list[tuple[DatasetArguments | Path, str, Any, int | None, Arguments | None]]:
    """Datasets (or a file), their split, what the model takes and gives, how many records count, and for which run."""
    from flow_factory.errors import InputError
    from flow_factory.hparams import DatasetArguments, DatasetTrainSpec, get_model_spec, load_config

    if source.suffix in (".yaml", ".yml"):
        if split is not None or image_dir is not None or model_type is not None:
            raise InputError("--split, --image-dir and --model-type belong to a dataset; a configuration has its own.")
        config = load_config(source, list(overrides))
        if config.training_args.execution_contract.generates:
            raise InputError(
                f"{source}: trainer {config.trainer_key!r} reads prompts, not stored examples; `flow-factory check` "
                f"checks them."
            )
        specs = [(data, data.train or DatasetTrainSpec()) for data in config.data_args.train_sources()]
        return [(data, spec.split, config.spec.io, spec.max_dataset_size, config) for data, spec in specs]
    if overrides:
        raise InputError(f"{overrides[0]!r} overrides a configuration, but {source} is a dataset; leave it out.")
    if source.suffix == ".jsonl" and split is not None:
        raise InputError(f"--split {split} chooses a file of a folder, and {source} is a file; leave it out.")
    io = None if model_type is None else get_model_spec(model_type).io
    folder, name = (source.parent, source.stem) if source.suffix == ".jsonl" else (source, split or "train")
    images = None if image_dir is None else str(image_dir)
    return [(DatasetArguments(dataset_dir=str(folder), image_dir=images), name, io, None, None)]


def _scan(dataset: Any, split: str, io: Any, limit: int | None) -> OfflineScan:
    from flow_factory.data_utils.offline_files import scan_offline_dataset

    with counting("read", None, "records") as advance:
        return scan_offline_dataset(dataset, split, io=io, max_size=limit, on_record=lambda: advance(1))


def _undecodable(scan: OfflineScan) -> list[str]:
    """Messages about the media of good records that cannot be decoded to their end; their records leave the scan."""
    from flow_factory.contracts import Modality
    from flow_factory.data_utils.media_files import read_media
    from flow_factory.data_utils.offline_media import read_image
    from flow_factory.data_utils.video_files import decode_to_end
    from flow_factory.errors import InputError

    found, good = [], []
    with counting("decode", len(scan.examples), "records") as advance:
        for example in scan.examples:
            before = len(found)
            for file in example.record.media:
                try:
                    read_media(file.path, file.modality)
                except InputError as error:
                    found.append(f"{example.place}: {error}")
            for files in example.arms.values():
                for file in files:
                    try:
                        decode = decode_to_end if file.modality is Modality.VIDEO else read_image
                        decode(file.path, example.place)
                    except InputError as error:
                        found.append(str(error))
            good += [example] if len(found) == before else []
            advance(1)
    scan.examples[:] = good
    return found


def _prompts_of(opened: Source, prompts: str | None, split: str | None) -> list[PromptRecord]:
    from flow_factory.data_utils.prompt_dataset import load_prompt_dataset
    from flow_factory.errors import InputError
    from flow_factory.hparams import DatasetArguments, DatasetTrainSpec

    config = opened.config
    if prompts is not None:
        datasets = [DatasetArguments(name=Path(prompts).name, dataset_dir=prompts)]
    elif not config.training_args.execution_contract.generates:
        raise InputError(
            f"trainer {config.trainer_key!r} has no prompts of its own; name some with --prompts FOLDER, such as "
            f"--prompts builtin/shapes."
        )
    else:
        datasets = config.data_args.train_sources()
    records: list[PromptRecord] = []
    for dataset in datasets:
        own = dataset.train or DatasetTrainSpec()
        # The limit is on the split that is trained on; of another one all prompts count.
        limit = own.max_dataset_size if split is None else None
        records += load_prompt_dataset(dataset, split or own.split, io=config.spec.io, max_size=limit)
    return records


def _identity(opened: Source) -> dict[str, Any]:
    """What pictures and scores depend on beside prompts and settings."""
    from flow_factory.tracking.inputs import describe_inputs, digest

    mapping = opened.config.to_mapping()
    weights = {}
    if opened.trained is not None:
        root = opened.trained
        files = [root] if root.is_file() else sorted(path for path in root.rglob("*") if path.is_file())
        weights = {path.name if path == root else path.relative_to(root).as_posix(): digest(path) for path in files}
    inputs = {name: value for name, value in describe_inputs(opened.config).items() if name.startswith("model")}
    sections = ("model", "eval", "rewards", "eval_rewards", "mixed_precision")
    return {"config": {name: mapping.get(name) for name in sections}, "inputs": inputs, "weights": weights}
