"""`flow-factory export`: a run's weights for diffusers and ComfyUI."""

from __future__ import annotations

from enum import Enum
from pathlib import Path
from typing import Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.outputs import Force, choose_folder, write_folder
from flow_factory.cli.sources import Averaged, Checkpoint, RunPath, check_model, open_source


class Layout(str, Enum):
    """Where the export is going."""

    DIFFUSERS = "diffusers"
    COMFYUI = "comfyui"
    MERGED = "merged"


class DType(str, Enum):
    """What weights can be written in."""

    FP32 = "fp32"
    BF16 = "bf16"
    FP16 = "fp16"


@guarded
def export(
    run: RunPath,
    layout: Annotated[
        Layout,
        typer.Option(
            "--format",
            help="diffusers: a LoRA folder for load_lora_weights (the pipeline, if all weights were trained); comfyui: "
            "a LoRA file; merged: the pipeline with the LoRA in its weights.",
        ),
    ] = Layout.DIFFUSERS,
    checkpoint: Checkpoint = None,
    ema: Averaged = None,
    dtype: Annotated[
        DType | None,
        typer.Option("--dtype", help="Of the trained parts of a pipeline; as it is.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option("--output", metavar="DIR", help="Folder to create; <run>-<format>.", show_default=False),
    ] = None,
    force: Force = False,
    debug: DebugOption = False,
) -> None:
    """Write a run's trained weights as other programs read them, with a model card. Safetensors only."""
    from flow_factory.trainers.export_request import ExportRequest, check_export

    opened = open_source(run, (), checkpoint, ema, need_run=True)
    assert opened.run is not None and opened.weights is not None
    request = ExportRequest(opened.config, opened.run, opened.weights, layout.value, dtype.value if dtype else None)
    check_export(request)
    target = choose_folder(output, f"{opened.name}-{layout.value}", "export.json", force)
    if request.is_pipeline:
        check_model(opened.config)

    from flow_factory.trainers.exporting import RECORD, export_weights

    target = write_folder(target, lambda folder: export_weights(request, folder), output, RECORD, force)
    files = [path for path in target.rglob("*") if path.is_file()]
    typer.echo(f"weights: {opened.describe(['trained'])}")
    size = sum(file.stat().st_size for file in files)
    typer.echo(f"wrote {len(files)} files ({size / 1e6:.1f} MB) to {target}; README.md there says how to load them")
