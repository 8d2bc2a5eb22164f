"""`flow-factory plan`: parameters, memory and forward passes of a run, before any weights are loaded."""

from __future__ import annotations

from collections import Counter
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from flow_factory.cli.errors import DebugOption, guarded
from flow_factory.cli.train import ConfigPath, Overrides, PluginOption

if TYPE_CHECKING:
    from rich.table import Table

    from flow_factory.trainers.planning.evaluations import Range
    from flow_factory.trainers.planning.report import CycleRows, MemoryPart, RunPlan

_WIDTH = 100  # of the tables where the output is no terminal
_ROWS_EXPLAINED = (
    "a row is one sample in one forward of the network, over all processes; a guided sample may take two or more.",
    "in forwards: a row with gradients counts three times, since its backward pass costs about two forwards.",
)
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB")


class Device(str, Enum):
    """Kinds of device that are planned for."""

    CPU = "cpu"
    CUDA = "cuda"


@guarded
def plan(
    config: ConfigPath,
    overrides: Overrides = None,
    plugin: PluginOption = None,
    device: Annotated[
        Device | None,
        typer.Option(help="Device that the run will have; it need not be here. Not given: that of this machine."),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print everything as JSON, sizes in bytes.", show_default=False)
    ] = False,
    debug: DebugOption = False,
) -> None:
    """Say what a run will need: parameters, memory by part, rows through the network per cycle. Loads no weights."""
    import json

    from flow_factory.cli.sources import check_model
    from flow_factory.hparams import load_config

    loaded = load_config(config, overrides or [], plugin or [])
    check_model(loaded)

    from flow_factory.trainers.planning import plan_run

    found = plan_run(loaded, device.value if device is not None else _present_device())
    if as_json:
        typer.echo(json.dumps(found.to_mapping(), indent=2))
        return
    _print(found)


def _present_device() -> str:
    import torch

    return "cuda" if torch.cuda.is_available() else "cpu"


def _print(plan: RunPlan) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    if not console.is_terminal:
        console = Console(highlight=False, width=_WIDTH)
    processes = "1 process" if plan.processes == 1 else f"{plan.processes} processes, each with all of it"
    typer.echo(
        f"{plan.trainer}, {plan.finetune}: {plan.model}, {plan.path}; {plan.device} in {plan.precision}, {processes}"
    )
    for table in (_components(plan), _memory(plan), _rows(plan)):
        console.print(table)
    for line in (*_ROWS_EXPLAINED, *_activation_lines(plan)):
        typer.echo(line)
    for note in plan.notes:
        typer.echo(f"note: {note}")


def _table(*columns: str) -> Table:
    from rich import box
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for number, column in enumerate(columns):
        text = number == 0 or column in ("class", "made of")
        # Where the terminal is narrow, texts are wrapped and numbers stay whole.
        table.add_column(column, justify="left" if text else "right", no_wrap=not text, overflow="fold")
    return table


def _components(plan: RunPlan) -> Table:
    table = _table("component", "class", "parameters", "trained", "dtype", "weights")
    for part in plan.components:
        trained = f"{part.trainable:,}" if part.trainable else "-"
        table.add_row(part.name, part.kind, f"{part.parameters:,}", trained, part.dtype, size_text(part.bytes))
    table.add_section()
    total = sum(part.bytes for part in plan.components)
    table.add_row("all", "", f"{plan.parameters:,}", f"{plan.trainable:,}", "", size_text(total))
    return table


def _memory(plan: RunPlan) -> Table:
    from flow_factory.trainers.planning.report import device_parts

    table = _table("memory of a process", "size", "made of")
    for part in device_parts(plan.memory, always=True):
        table.add_row(part.name, _size(part), part.note)
    table.add_row("held all the time", size_text(plan.held_bytes), end_section=True, style="bold")
    for part in sorted(device_parts(plan.memory, always=False), key=lambda part: -(part.bytes or 0)):
        table.add_row(part.name, _size(part), part.note)
    peak = "not known" if plan.peak_bytes is None else f"~ {size_text(plan.peak_bytes)}"
    table.add_row("peak", peak, "what is held, and the largest of these", end_section=True, style="bold")
    for part in plan.memory:
        if part.place != "device":
            table.add_row(part.name, _size(part), f"on the {part.place}: {part.note}")
    return table


def _rows(plan: RunPlan) -> Table:
    """Rows of the first cycle, the spread over all, evaluations, and the run."""
    from flow_factory.trainers.planning.report import counted

    unit = plan.unit
    table = _table("rows through the network", "rows", "with gradients", "in forwards")
    if plan.cycles:
        first = plan.cycles[0]
        varies = any(cycle != first for cycle in plan.cycles)
        label = f"{unit} 1" if varies else f"each {unit}"
        if unit == "cycle":
            table.add_row(f"{label}: rollout", f"{first.rollout:,}", "-", f"{first.rollout:,}")
        table.add_row(f"{label}: optimisation", *_optimisation(first))
        table.add_row(f"{label}: all", *_all(first))
        spread = plan.spread("network_rows")
        if varies and spread is not None:
            found, mean = spread
            table.add_row(f"over {len(plan.cycles)} {unit}s", f"{_range(found)}, mean {mean:,.1f}", "", "")
    for evaluation in plan.evaluations:
        often = "" if plan.evaluation_count is None else f", {plan.evaluation_count} times"
        label = f"evaluation of {evaluation.dataset} ({evaluation.prompts} prompts{often})"
        table.add_row(label, f"{evaluation.rows:,}", "-", f"{evaluation.rows:,}")
    if plan.whole_run is not None:
        rows, trained = plan.whole_run
        label = f"the run: {counted(plan.total_cycles or 0, plan.unit)}"
        if plan.evaluations:
            label += f", {counted(plan.evaluation_count or 0, 'evaluation')}"
        table.add_row(label, _range(rows), _range(trained), _range(rows + trained * 2), style="bold")
    return table


def _optimisation(cycle: CycleRows) -> tuple[str, str, str]:
    if cycle.frozen is None or cycle.trained is None:
        return "not known", "not known", "not known"
    rows = cycle.frozen + cycle.trained
    return _range(rows), _range(cycle.trained), _range(rows + cycle.trained * 2)


def _all(cycle: CycleRows) -> tuple[str, str, str]:
    rows = cycle.network_rows
    if rows is None or cycle.trained is None:
        return "not known", "not known", "not known"
    return _range(rows), _range(cycle.trained), _range(rows + cycle.trained * 2)


def _activation_lines(plan: RunPlan) -> list[str]:
    found = plan.activations
    if found.plain is None:
        return []
    from flow_factory.trainers.planning.report import counted

    lines = [f"activations of {counted(found.rows, 'row')}, by block (an estimate, without gradient checkpointing):"]
    for block, forwards in Counter(found.blocks).items():
        often = "" if forwards == 1 else f" in each of {forwards} forwards"
        lines.append(
            f"  {block.count} x {block.kind} ({block.name}){often}, {counted(block.rows, 'row')} x "
            f"{block.tokens:,} tokens x {block.width:,} channels: {size_text(block.held)} each"
        )
    if found.checkpointed is not None:
        lines.append(
            f"  with train.enable_gradient_checkpointing: ~ {size_text(found.checkpointed)} in place of "
            f"~ {size_text(found.plain)}"
        )
    return lines


def _range(value: Range) -> str:
    return f"{value.low:,}" if value.exact else f"{value.low:,} to {value.high:,}"


def _size(part: MemoryPart) -> str:
    if part.bytes is None:
        return "not known"
    return f"~ {size_text(part.bytes)}" if part.estimate else size_text(part.bytes)


def size_text(size: int) -> str:
    """A number of bytes with three digits, in binary units."""
    value, unit = float(size), 0
    while value >= 1024 and unit < len(_UNITS) - 1:
        value, unit = value / 1024, unit + 1
    digits = 0 if unit == 0 or value >= 100 else 1 if value >= 10 else 2
    return f"{value:.{digits}f} {_UNITS[unit]}"
