"""Which charts a page has: the quantities of one run, or of several on top of each other."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from flow_factory.checkpoints import values
from flow_factory.tracking.monitors import SMOOTHING
from flow_factory.tracking.report import charts
from flow_factory.tracking.report.catalog import COVERED_BY_UPDATES, KNOWN, NOT_CURVES, SECTIONS, Quantity, readable
from flow_factory.tracking.report.charts import Line
from flow_factory.tracking.report.read import RunRecord
from flow_factory.tracking.report.series import (
    Series,
    exponential_mean,
    extract,
    is_number,
    kept_points,
    running_mean,
    with_spread,
)
from flow_factory.tracking.report.settings import made_by

# "<dataset>/" stands before what belongs to one of several datasets.
_REWARD_MEAN = re.compile(r"^(?:(?P<source>.+?)/)?reward/(?P<name>.+)/mean$")
_REWARD_STATISTIC = re.compile(r"^(?:.+?/)?reward/.+/(mean|std|min|max)$")
# Points from which a smoothed course helps the eye: of rewards, which differ from cycle to cycle, and of anything.
_SMOOTH_REWARD_FROM, _SMOOTH_FROM = 12, 200
_MONITOR = "monitor/"
_SECONDS = "seconds/"


@dataclass(frozen=True)
class Figure:
    """A chart and what is said about it.

    Attributes:
        id: Unique on the page.
        section: Where it stands; see `catalog.SECTIONS`.
        title: What is shown.
        about: A sentence for readers who do not know it.
        x_label: "cycle" or "optimizer step".
        lines: The curves.
        limits: A range marked across it.
        marks: Places on the horizontal axis that stand out: cycles with an alarm.
    """

    id: str
    section: str
    title: str
    about: str
    x_label: str
    lines: tuple[Line, ...]
    limits: tuple[float, float] | None = None
    marks: tuple[int, ...] = ()

    @property
    def svg(self) -> str:
        """The drawing."""
        return charts.line_chart(self.id, self.title, self.lines, self.x_label, self.limits, self.marks)

    @property
    def legend(self) -> tuple[Line, ...]:
        """The curves that need to be told apart."""
        return self.lines if len(self.lines) > 1 else ()

    @property
    def note(self) -> str:
        """What was done to the points."""
        notes = []
        if window := max((line.window for line in self.lines), default=0):
            notes.append(f"The strong line is the mean over {window} points.")
        if thinned := [line.series for line in self.lines if line.series.thinned]:
            longest = max(thinned, key=lambda series: series.total)
            drawn = f"{len(longest):,} of {longest.total:,} points are drawn"
            notes.append(f"{drawn}; the highest and the lowest of each stretch are kept.")
        return " ".join(notes)

    def data(self) -> dict[str, Any]:
        """What is drawn, as numbers; NaN and infinities as in `metrics.jsonl`."""
        lines = []
        for line in self.lines:
            s = line.series
            entry: dict[str, Any] = {"name": line.name, "colour": line.colour, "x": list(s.x), "y": list(s.y)}
            if s.low:
                entry |= {"low": list(s.low), "high": list(s.high)}
            if s.thinned:
                entry["points"] = s.total
            lines.append(entry)
        mapping = {"title": self.title, "x_label": self.x_label, "lines": lines}
        mapping |= {"limits": list(self.limits)} if self.limits else {}
        mapping |= {"marks": list(self.marks)} if self.marks else {}
        encoded = values.encode(mapping)
        assert isinstance(encoded, dict)
        return encoded


def build_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """All charts of a page, in the order of the sections."""
    figures = [*_reward_figures(runs), *_evaluation_figures(runs), *_time_figures(runs)]
    figures += [*_known_figures(runs), *_monitor_figures(runs), *_other_figures(runs)]
    order = [section for section, _, _ in SECTIONS]
    figures = sorted((f for f in figures if f.lines), key=lambda figure: order.index(figure.section))
    return [replace(figure, id=f"chart-{number}") for number, figure in enumerate(figures, 1)]


def _figure(
    section: str,
    title: str,
    about: str,
    lines: Iterable[Line],
    axis: str = "cycle",
    limits: tuple[float, float] | None = None,
) -> Figure:
    drawn = tuple(_drawn(line) for line in lines if len(line.series))
    label = "cycle" if axis == "cycle" else "optimizer step"
    return Figure("", section, title, about, label, drawn, limits)


def _drawn(line: Line, since: int = _SMOOTH_FROM) -> Line:
    """A curve as it is drawn: thinned if it is long, with a smoothed course from `since` points on."""
    count, kept = len(line.series), kept_points(line.series)
    smooth, window = tuple(line.smooth[i] for i in kept if line.smooth), line.window
    if count >= since and not line.smooth:
        window = max(3, count // (12 if count < _SMOOTH_FROM else 40)) | 1
        smooth = running_mean(line.series.y, window, kept)
    return replace(line, series=line.series.take(kept), smooth=smooth, window=window)


def _per_run(runs: Sequence[RunRecord], make: Callable[[RunRecord], Series], name: str = "") -> list[Line]:
    """One line per run; a single run's line is called by the quantity."""
    return [
        Line(run.name if len(runs) > 1 or not name else name, make(run), colour=index) for index, run in enumerate(runs)
    ]


def _keys(runs: Sequence[RunRecord], kind: str) -> list[str]:
    """All metrics of a kind of rows, in the order of their first appearance."""
    return list(dict.fromkeys(key for run in runs for key in run.numbers_of(kind)))


# ------------------------------------------------------------------------------------------------------- sections
def _reward_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    keys = _keys(runs, "cycle")
    found = [(match["source"] or "", match["name"]) for key in keys if (match := _REWARD_MEAN.match(key))]
    figures = []
    for source in dict.fromkeys(source for source, _ in found):
        names = [name for place, name in found if place == source]
        others = [name for name in names if name != "total"]
        prefix, label = (f"{source}/", f"{source}: ") if source else ("", "")
        if "total" in names:
            figures.append(_total_figure(runs, prefix, label))
        for name in others:
            edges = _edges(keys, f"{prefix}reward/{name}")
            same = len(others) == 1 and all(_equal_columns(run, prefix, name, "total") for run in runs)
            if not same or edges:  # a single reward with weight 1 is the total
                figures.append(_one_reward_figure(runs, prefix, label, name, edges))
    return figures


def _total_figure(runs: Sequence[RunRecord], prefix: str, label: str) -> Figure:
    def total(run: RunRecord) -> Series:
        rows = run.of_kind("cycle")
        mean = extract(rows, f"{prefix}reward/total/mean", "cycle")
        return with_spread(mean, extract(rows, f"{prefix}reward/group_std", "cycle"))

    lines = _rewards(_per_run(runs, total, "reward"))
    about = "Weighted sum of the rewards, mean over the cycle's samples."
    if any(line.series.has_band for line in lines):
        about += " The band is one standard deviation within a group (the samples of one prompt) to each side."
    return _figure("reward", f"{label}reward" if label else "Reward", about, lines)


def _one_reward_figure(
    runs: Sequence[RunRecord], prefix: str, label: str, name: str, edges: tuple[str, str] | None
) -> Figure:
    key = f"{prefix}reward/{name}"

    def one(run: RunRecord) -> Series:
        rows = run.of_kind("cycle")
        if edges is not None:
            return extract(rows, f"{key}/mean", "cycle", *edges)
        return with_spread(extract(rows, f"{key}/mean", "cycle"), extract(rows, f"{key}/std", "cycle"))

    spread = "lowest to highest score" if edges else "one standard deviation over all samples to each side"
    lines = _rewards(_per_run(runs, one, name))
    about = "Mean score of the cycle's samples, before weighting"
    about += f"; the band is {spread}." if any(line.series.has_band for line in lines) else "."
    title = f"{label}{readable(name).lower()}" if label else readable(name)
    return _figure("reward", title, about, lines)


def _edges(keys: Sequence[str], reward: str) -> tuple[str, str] | None:
    low, high = f"{reward}/min", f"{reward}/max"
    return (low, high) if low in keys and high in keys else None


def _rewards(lines: Iterable[Line]) -> list[Line]:
    return [_drawn(line, _SMOOTH_REWARD_FROM) for line in lines]


def _equal_columns(run: RunRecord, prefix: str, one: str, other: str) -> bool:
    keys = [f"{prefix}reward/{name}/mean" for name in (one, other)]
    return all(row.get(keys[0]) == row.get(keys[1]) for row in run.of_kind("cycle"))


def _evaluation_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    figures = []
    for key in _keys(runs, "eval"):
        dataset, _, reward = key.rpartition("/")
        about = f"Mean of {reward} over the evaluation set {dataset}." if dataset else ""
        title = f"{dataset}: {readable(reward).lower()}" if dataset else readable(key)
        lines = _per_run(runs, lambda run, key=key: extract(run.of_kind("eval"), key, "cycle"), reward)
        figures.append(_figure("evaluation", title, about, lines))
    return figures


def _known_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    return [_quantity_figure(runs, quantity) for quantity in KNOWN]


def _quantity_figure(runs: Sequence[RunRecord], quantity: Quantity) -> Figure:
    if quantity.kind == "cycle":
        lines = _per_run(runs, lambda run: extract(run.of_kind("cycle"), quantity.key, "cycle"), quantity.title.lower())
        if quantity.key == "reward/failed_ratio" and not any(any(line.series.y) for line in lines):
            lines = []  # nothing failed: nothing to look at
        return _figure(quantity.section, quantity.title, quantity.about, lines)
    return _figure(quantity.section, quantity.title, quantity.about, _role_lines(runs, quantity.key), "step")


def _role_lines(runs: Sequence[RunRecord], metric: str) -> list[Line]:
    """A metric of the update rows, where it is named "<role>/<metric>": a line per run and role."""
    roles = list(
        dict.fromkeys(key.partition("/")[0] for key in _keys(runs, "update") if key.partition("/")[2] == metric)
    )
    lines = []
    for index, run in enumerate(runs):
        for number, role in enumerate(roles):
            series = extract(run.of_kind("update"), f"{role}/{metric}", "step")
            parts = [run.name] if len(runs) > 1 else []
            parts += [role] if len(roles) > 1 else []
            colour = index if len(runs) > 1 else number
            name = ", ".join(parts) or readable(metric).lower()
            lines.append(Line(name, series, colour, dash=number if len(runs) > 1 else 0))
    return lines


def _monitor_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    figures = []
    for key in _keys(runs, "cycle"):
        if not key.startswith(_MONITOR):
            continue
        name = key[len(_MONITOR) :]
        lines = [
            replace(line, smooth=exponential_mean(line.series.y, SMOOTHING))
            for line in _per_run(runs, lambda run, key=key: extract(run.of_kind("cycle"), key, "cycle"), name)
        ]
        limits = _limits(runs[0], key) if len(runs) == 1 else None
        alarms = tuple(row["cycle"] for row in runs[0].of_kind("alarm") if row.get("statistic") == name)
        about = (
            f"Mean over the groups of each cycle (faint), and smoothed as it is watched ({SMOOTHING:g} to the newest)."
        )
        about += " The shaded range is the first cycle's band." if limits else ""
        figure = _figure("monitors", readable(name), about, lines, limits=limits)
        figures.append(replace(figure, marks=alarms if len(runs) == 1 else ()))
    for key in _keys(runs, "eval_monitor"):
        dataset, _, name = key.partition(f"/{_MONITOR}")
        title = f"{dataset}: {readable(name).lower()}"
        lines = _per_run(runs, lambda run, key=key: extract(run.of_kind("eval_monitor"), key, "cycle"), name)
        figures.append(_figure("monitors", title, f"Mean over the evaluation set {dataset}.", lines))
    return figures


def _limits(run: RunRecord, key: str) -> tuple[float, float] | None:
    """The band that a monitor is watched against, which its first cycle has set."""
    for row in reversed(run.of_kind("monitor_band")):
        low, high = row.get(f"{key}/low"), row.get(f"{key}/high")
        if is_number(low) and is_number(high) and math.isfinite(low) and math.isfinite(high):  # type: ignore[arg-type]
            return float(low), float(high)  # type: ignore[arg-type]
    return None


def _time_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    phases = [key for key in _keys(runs, "cycle") if key.startswith(_SECONDS)]
    if len(runs) > 1:
        about = "Seconds of rollout, feedback and optimisation of a cycle."
        lines = _per_run(runs, lambda run: _derived(run, cycle_seconds))
    else:
        about = "Seconds of each phase of a cycle."
        series = [(key[len(_SECONDS) :], extract(runs[0].of_kind("cycle"), key, "cycle")) for key in phases]
        shown = [(name, s) for name, s in series if any(s.y)]  # evaluations happen between cycles
        lines = [Line(name, s, colour=index) for index, (name, s) in enumerate(shown)]
    unit = made_by(runs)
    speed = _per_run(runs, lambda run: _derived(run, _samples_per_second), f"{unit} per second")
    return [
        _figure("time", "Seconds a cycle", about, lines),
        _figure("time", f"{unit.capitalize()} per second", "The cycle's samples over its whole time.", speed),
    ]


def cycle_seconds(row: dict[str, Any]) -> float | None:
    """Seconds of all phases of a cycle row, or None if it does not know them."""
    found = [v for k, v in row.items() if k.startswith(_SECONDS) and is_number(v)]
    return float(sum(found)) if found else None


def _samples_per_second(row: dict[str, Any]) -> float | None:
    """Samples of a cycle row over its seconds, or None if it does not know them."""
    seconds, samples = cycle_seconds(row), row.get("samples")
    return samples / seconds if seconds and is_number(samples) else None  # type: ignore[operator]


def _derived(run: RunRecord, make: Callable[[dict[str, Any]], float | None]) -> Series:
    rows = [{"cycle": row["cycle"], "value": make(row)} for row in run.of_kind("cycle")]
    return extract(rows, "value", "cycle")


def _other_figures(runs: Sequence[RunRecord]) -> list[Figure]:
    """Whatever is not known here: numbers of other algorithms, of `log_data`, of other kinds of rows."""
    update_metrics = {key.partition("/")[2] for key in _keys(runs, "update")}
    known_cycle = {q.key for q in KNOWN if q.kind == "cycle"} | {"samples"}
    known_cycle |= {key for key, metric in COVERED_BY_UPDATES.items() if metric in update_metrics}
    figures = []
    for key in _keys(runs, "cycle"):
        shown = key in known_cycle or key.startswith((_MONITOR, _SECONDS)) or _REWARD_STATISTIC.match(key)
        if not shown:
            lines = _per_run(runs, lambda run, key=key: extract(run.of_kind("cycle"), key, "cycle"), key)
            figures.append(_figure("other", readable(key), "", lines))
    known_update = {q.key for q in KNOWN if q.kind == "update"} | {"param_change_norm"}
    for metric in sorted(update_metrics - known_update - {""}):
        figures.append(_figure("other", readable(metric), "", _role_lines(runs, metric), "step"))
    kinds = dict.fromkeys(row["kind"] for run in runs for row in run.rows)
    for kind in [k for k in kinds if k not in ("cycle", "update", "eval", *NOT_CURVES)]:
        axis = "cycle" if kind.startswith("eval") else "step"
        for key in _keys(runs, kind):
            lines = _per_run(
                runs, lambda run, key=key, kind=kind, axis=axis: extract(run.of_kind(kind), key, axis), key
            )
            figures.append(_figure("other", readable(key), f'Rows of kind "{kind}".', lines, axis))
    return figures
