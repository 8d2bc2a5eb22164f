"""The page: what is said about the runs, put into the template together with its style and script.

The page opens from a folder, without a network: pictures and what plays are data URIs, charts are inline SVG, and a
content security policy allows this one style and this one script by their hashes and nothing else. Videos that are too
large are linked: the policy then also allows files that lie where the page does. Names, prompts and settings come from
users, so every text is escaped.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from importlib import resources
from pathlib import Path
from typing import Any

from flow_factory.tracking.formatting import flatten, format_duration, format_number
from flow_factory.tracking.report.catalog import SECTIONS, readable
from flow_factory.tracking.report.figures import Figure, build_figures, cycle_seconds
from flow_factory.tracking.report.pictures import GRID_LIMIT, Gallery, galleries
from flow_factory.tracking.report.read import RunRecord
from flow_factory.tracking.report.series import extract, is_number
from flow_factory.tracking.report.settings import compare_environments, compare_settings, made_by, settings_of

# In the head of every report, so that a report is written over and another file is not.
MARK = '<meta name="generator" content="flow-factory report">'

_AVERAGED_CYCLES = 5


@dataclass(frozen=True)
class Headline:
    """A number at the beginning and at the end of a run.

    Attributes:
        first: As text.
        last: As text.
        change: As text with its sign; empty for a single value.
        rose: Whether it is above the first; None if unchanged.
        when: Which cycles it is about.
    """

    first: str
    last: str
    change: str
    rose: bool | None
    when: str


def render_page(runs: Sequence[RunRecord], folder: Path, now: float | None = None) -> str:
    """The HTML of a report.

    Args:
        runs: One run, or several to compare.
        folder: Where the page will lie.
        now: Seconds since the epoch that the page says it was made at; the present.
    """
    import jinja2

    figures = build_figures(runs)
    shown = {figure.section for figure in figures} | ({"monitors"} if any(r.of_kind("alarm") for r in runs) else set())
    style, script = _asset("style.css"), _asset("report.js")
    several = len(runs) > 1
    shown_galleries = galleries(runs, folder, limit=1 if several else GRID_LIMIT)
    environment = jinja2.Environment(
        autoescape=True, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    template = environment.from_string(_asset("page.html.j2"))
    return template.render(
        mark=_safe(MARK),
        title=" and ".join(run.name for run in runs),
        several=several,
        noun=made_by(runs).replace("images", "pictures"),
        runs=runs,
        facts=_facts(runs),
        headlines=_headlines(runs),
        sections=[
            (key, title, about, [f for f in figures if f.section == key])
            for key, title, about in SECTIONS
            if key in shown
        ],
        safe=_safe,
        alarms=[(run.name, row) for run in runs for row in run.of_kind("alarm")],
        media_sources=_media_sources(shown_galleries),
        galleries=[] if several else shown_galleries[0],
        final_galleries=_final_galleries(runs, shown_galleries) if several else [],
        settings={} if several else settings_of(runs[0]),
        differences=compare_settings(runs) if several else [],
        environments=compare_environments(runs),
        resolved={} if several else flatten(runs[0].resolved),
        readable=readable,
        data=_safe(embedded_json(_data(runs, figures))),
        made=time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(now)),
        style=_safe(style),
        script=_safe(script),
        style_hash=_hash(style),
        script_hash=_hash(script),
    )


def embedded_json(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end that element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for character in "<>&\u2028\u2029":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return text


def _data(runs: Sequence[RunRecord], figures: Sequence[Figure]) -> dict[str, Any]:
    return {
        "runs": [{"name": run.name, "status": run.status, "cycles": run.cycles} for run in runs],
        "charts": {figure.id: figure.data() for figure in figures},
    }


def _asset(name: str) -> str:
    return (resources.files("flow_factory.tracking.report") / "assets" / name).read_text(encoding="utf-8")


def _hash(text: str) -> str:
    return "sha256-" + base64.b64encode(hashlib.sha256(text.encode("utf-8")).digest()).decode("ascii")


def _safe(html: str) -> Any:
    """Marks text of our own making as HTML."""
    from markupsafe import Markup

    return Markup(html)


# ------------------------------------------------------------------------------------------------------- the head
def _facts(runs: Sequence[RunRecord]) -> list[tuple[str, list[str]]]:
    """Rows of the table at the top: a name, and a value per run."""
    rows = [
        ("Cycles", [_cycles(run) for run in runs]),
        ("Optimizer steps", [f"{max((row['step'] for row in run.rows), default=0):,}" for run in runs]),
        ("Time", [_wall_time(run) for run in runs]),
        (f"{made_by(runs).capitalize()} per second", [_speed(run) for run in runs]),
        ("Trainer", [str(run.setting("train.trainer_type", "")) for run in runs]),
        ("Model", [_model(run) for run in runs]),
        ("Weights", [_weights(run) for run in runs]),
        ("Rewards", [_rewards(run) for run in runs]),
        ("Seed", [_seeds(run) for run in runs]),
        ("Devices", [_devices(run) for run in runs]),
        ("Checkpoint", [run.checkpoints[-1] if run.checkpoints else "none yet" for run in runs]),
        ("Started", [_started(run) for run in runs]),
    ]
    return [(name, values) for name, values in rows if any(values)]


def _cycles(run: RunRecord) -> str:
    planned = run.setting("train.max_epochs")
    return f"{run.cycles} of {planned}" if isinstance(planned, int) else str(run.cycles)


def _wall_time(run: RunRecord) -> str:
    times = [row["time"] for row in run.rows if is_number(row.get("time"))]
    cycles = [cycle_seconds(row) or 0.0 for row in run.of_kind("cycle")]
    parts = [f"{format_duration(sum(cycles))} in cycles"] if any(cycles) else []
    total = run.result.get("timings", {}).get("total") if isinstance(run.result.get("timings"), dict) else None
    counts = run.result.get("counts") if isinstance(run.result.get("counts"), dict) else {}
    in_one_go = isinstance(counts, dict) and counts.get("cycles") == run.cycles
    if is_number(total) and in_one_go and run.status != "running":
        parts.append(f"{format_duration(float(total))} in all")  # type: ignore[arg-type]
    elif len(times) > 1:
        parts.append(f"{format_duration(max(times) - min(times))} from the first entry to the last")
    return ", ".join(parts)


def _speed(run: RunRecord) -> str:
    rows = [row for row in run.of_kind("cycle") if is_number(row.get("samples"))]
    samples, seconds = sum(row["samples"] for row in rows), sum(cycle_seconds(row) or 0.0 for row in rows)
    rollout = sum(row["seconds/rollout"] for row in rows if is_number(row.get("seconds/rollout")))
    if not seconds or not samples:
        return ""
    text = f"{format_number(samples / seconds)} over the whole cycle"
    return f"{format_number(samples / rollout)} in rollouts, {text}" if rollout else text


def _model(run: RunRecord) -> str:
    parts = [run.setting("model.model_type"), run.setting("model.model_name_or_path")]
    return " · ".join(str(part) for part in parts if part)


def _weights(run: RunRecord) -> str:
    kind = run.setting("model.finetune_type")
    text = f"LoRA, rank {run.setting('model.lora_rank')}" if kind == "lora" else str(kind or "")
    trained, total = run.resolved.get("trained_parameters"), run.resolved.get("parameters_of_trained_components")
    if is_number(trained) and is_number(total):
        text += f"{', ' if text else ''}{trained:,} of {total:,} parameters"
    return text


def _rewards(run: RunRecord) -> str:
    entries = run.config.get("rewards")
    entries = entries if isinstance(entries, list) else []
    names = [str(entry.get("name", entry.get("reward_model"))) for entry in entries if isinstance(entry, dict)]
    return ", ".join(names)


def _seeds(run: RunRecord) -> str:
    seeds = {
        "training": run.setting("train.seed"),
        "evaluation": run.setting("eval.seed"),
        "stochastic steps": run.setting("scheduler.seed"),
    }
    return ", ".join(f"{seed} ({name})" for name, seed in seeds.items() if seed is not None)


def _devices(run: RunRecord) -> str:
    devices = run.environment.get("devices")
    names = sorted({str(device) for device in devices}) if isinstance(devices, list) else []
    processes = run.environment.get("world_size")
    text = ", ".join(names)
    return f"{processes} processes on {text}" if text and isinstance(processes, int) and processes > 1 else text


def _started(run: RunRecord) -> str:
    first = next((row["time"] for row in run.rows if is_number(row.get("time"))), None)
    return "" if first is None else time.strftime("%Y-%m-%d %H:%M", time.localtime(first))


# ------------------------------------------------------------------------------------------------------- headlines
def _headlines(runs: Sequence[RunRecord]) -> list[tuple[str, list[Headline | None]]]:
    """Each evaluation reward, and the training reward, at the beginning and at the end: a name and one per run."""
    keys = dict.fromkeys(key for run in runs for row in run.of_kind("eval") for key in row if "/" in key)
    rows = [(key.replace("/", " · "), [_evaluation_headline(run, key) for run in runs]) for key in keys]
    rows.append(("training reward", [_training_headline(run) for run in runs]))
    return [(name, values) for name, values in rows if any(values)]


def _evaluation_headline(run: RunRecord, key: str) -> Headline | None:
    series = extract(run.of_kind("eval"), key, "cycle")
    if not len(series):
        return None
    when = f"cycle {series.x[0]} to {series.x[-1]}" if len(series) > 1 else f"cycle {series.x[0]}"
    return _headline(series.y[0], series.y[-1] if len(series) > 1 else None, when)


def _training_headline(run: RunRecord) -> Headline | None:
    series = extract(run.of_kind("cycle"), "reward/total/mean", "cycle")
    y = series.finite()
    if not y:
        return None
    count = min(_AVERAGED_CYCLES, len(y) // 2)
    if not count:
        return _headline(y[0], None, "one cycle")
    when = f"mean of the first and last {count} cycles" if count > 1 else "first and last cycle"
    # Divided first: the sum of the largest floats is beyond them.
    first, last = (math.fsum(value / count for value in part) for part in (y[:count], y[-count:]))
    return _headline(first, last, when)


def _headline(first: float, last: float | None, when: str) -> Headline:
    if last is None:
        return Headline(format_number(first), "", "", None, when)
    change = last - first
    sign = "+" if change > 0 else "\N{MINUS SIGN}" if change < 0 else "±"
    rose = None if change == 0 or not math.isfinite(change) else change > 0
    return Headline(format_number(first), format_number(last), sign + format_number(abs(change)), rose, when)


def _final_galleries(
    runs: Sequence[RunRecord], found: Sequence[Sequence[Gallery]]
) -> list[tuple[str, list[tuple[RunRecord, Gallery | None]]]]:
    """The last sheets of several runs, by dataset."""
    named = [{gallery.dataset: gallery for gallery in of_run} for of_run in found]
    datasets = dict.fromkeys(name for by_name in named for name in by_name)
    return [(name, [(run, by_name.get(name)) for run, by_name in zip(runs, named, strict=True)]) for name in datasets]


def _media_sources(found: Sequence[Sequence[Gallery]]) -> str:
    """From where the page may play something."""
    players = [p for of_run in found for gallery in of_run for picture in gallery.pictures for p in picture.players]
    if not players:
        return "'none'"
    # Browsers differ in whether a file beside a page that was opened from a folder is of the page's own origin.
    return "data: 'self' file:" if any(player.linked for player in players) else "data:"
