"""Line charts as inline SVG: series in, a string out.

The drawing carries no colours of its own: classes `s0`, `s1`, ... and `currentColor` take them from the page, so that
one chart serves light, dark and paper. It says what it shows in its title and description, and each point of a short
series has its value as a tooltip, without any script. `data-` attributes give the page's script the scale.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from html import escape

from flow_factory.tracking.report.series import Series

WIDTH, HEIGHT = 560, 250
_LEFT, _RIGHT, _TOP, _BOTTOM = 64, 22, 12, 38
COLOURS = 8
DASHES = 4
# Series up to this length show their points.
_MARKED = 64
_CHARACTER = 7.7  # width of a figure at the size of the axis labels, in the widest of usual fonts (DejaVu Sans)


@dataclass(frozen=True)
class Line:
    """A curve of a chart.

    Attributes:
        name: What the legend calls it.
        series: Its points.
        colour: Number of its colour.
        dash: Number of its dash pattern; 0 is a solid line.
        smooth: A smoothed course to draw over the points, one value per point; the points step back then.
        window: Points that a value of `smooth` is the mean of, if it is a running mean.
    """

    name: str
    series: Series
    colour: int = 0
    dash: int = 0
    smooth: tuple[float, ...] = ()
    window: int = 0


def nice_ticks(low: float, high: float, count: int = 5) -> list[float]:
    """Round numbers at equal distances that cover a range: multiples of 1, 2 or 5 times a power of ten.

    Args:
        low: Lower end.
        high: Upper end, above `low`.
        count: About how many distances are wanted.

    Returns:
        Ascending values; the first is at most `low`, the last at least `high`.
    """
    rough = (high - low) / count
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.floor(low / step + 1e-9), math.ceil(high / step - 1e-9)
    # Rounded to the step's digits, or 3 * 0.1 would be labelled 0.30000000000000004.
    digits = max(0, 1 - math.floor(math.log10(step)))
    return [round(i * step, digits) if digits < 300 else i * step for i in range(first, last + 1)]


def tick_labels(ticks: Sequence[float]) -> list[str]:
    """Labels with just the digits that tell neighbouring ticks apart; powers of ten for very large and small ones."""
    if len(ticks) < 2:
        return [f"{tick:.4g}" for tick in ticks]
    step = ticks[1] - ticks[0]
    largest = max(abs(tick) for tick in ticks)
    if largest >= 1e5 or largest < 1e-3:
        digits = max(0, math.floor(math.log10(largest)) - math.floor(math.log10(step) + 1e-9))
        return ["0" if tick == 0 else f"{tick:.{digits}e}".replace("e-0", "e-").replace("e+0", "e") for tick in ticks]
    decimals = max(0, -math.floor(math.log10(step) + 1e-9))
    return [f"{tick:.{decimals}f}" for tick in ticks]


def line_chart(
    chart_id: str,
    title: str,
    lines: Sequence[Line],
    x_label: str,
    limits: tuple[float, float] | None = None,
    marks: Sequence[int] = (),
) -> str:
    """A line chart.

    Args:
        chart_id: Unique on the page.
        title: What is shown, for the description.
        lines: The curves; empty series are left out.
        x_label: Name of the horizontal axis.
        limits: A range that is marked across the whole chart, such as the band of a monitor.
        marks: Places on the horizontal axis to mark, such as cycles with an alarm.

    Returns:
        An `<svg>` element.
    """
    lines = [line for line in lines if len(line.series)]
    if not lines:
        return f'<p class="empty">{escape(title)}: no numbers.</p>'
    x_low, x_high = _range(float(x) for line in lines for x in line.series.x)
    heights = [y for line in lines for y in (*line.series.y, *line.series.low, *line.series.high)]
    y_ticks = nice_ticks(*_range([*heights, *(limits or ())]))
    y_labels = tick_labels(y_ticks)
    left = max(_LEFT, math.ceil(max(map(len, y_labels)) * _CHARACTER) + 14)
    scale = _Scale(x_low, x_high, y_ticks[0], y_ticks[-1], left)
    text = describe(title, lines, x_label, marks)
    parts = [
        f'<svg class="chart" id="{escape(chart_id)}" viewBox="0 0 {WIDTH} {HEIGHT}" role="img" tabindex="0" '
        f'aria-labelledby="{escape(chart_id)}-t {escape(chart_id)}-d" {scale.attributes()}>',
        f'<title id="{escape(chart_id)}-t">{escape(title)}</title>',
        f'<desc id="{escape(chart_id)}-d">{escape(text)}</desc>',
        *_axes(scale, y_ticks, y_labels, x_label),
    ]
    if limits is not None:
        top, bottom = scale.y(limits[1]), scale.y(limits[0])
        parts.append(
            f'<rect class="limits" x="{left}" y="{top:.1f}" width="{WIDTH - _RIGHT - left}" '
            f'height="{bottom - top:.1f}"><title>band {limits[0]:.6g} to {limits[1]:.6g}</title></rect>'
        )
    for mark in marks:
        place = f'x1="{scale.x(mark):.1f}" x2="{scale.x(mark):.1f}" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}"'
        parts.append(f'<line class="mark" {place}><title>alarm at {escape(x_label)} {mark}</title></line>')
    parts += [_band(scale, line) for line in lines if line.series.low]
    for line in lines:
        parts += _curve(scale, line, x_label)
    parts.append(f'<line class="cursor" x1="0" x2="0" y1="{_TOP}" y2="{HEIGHT - _BOTTOM}" visibility="hidden"/>')
    parts.append("</svg>")
    return "".join(parts)


def describe(title: str, lines: Sequence[Line], x_label: str, marks: Sequence[int] = ()) -> str:
    """A chart in a sentence per curve, for those who cannot see it."""
    sentences = []
    for line in lines:
        s = line.series
        finite = s.finite()
        name = f"{line.name}: " if len(lines) > 1 else ""
        if not finite:
            sentences.append(f"{name}{len(s)} values, none of them a number.")
            continue
        course = f"{name}{s.y[0]:.4g} at {x_label} {s.x[0]}"
        if len(s) > 1:
            course += f", {s.y[-1]:.4g} at {x_label} {s.x[-1]}; lowest {min(finite):.4g}, highest {max(finite):.4g}"
        strange = len(s) - len(finite)
        sentences.append(course + (f"; {strange} values are not numbers" if strange else "") + ".")
    if marks:
        sentences.append(f"Alarms at {x_label} {', '.join(map(str, marks))}.")
    return f"{title}. " + " ".join(sentences)


@dataclass(frozen=True)
class _Scale:
    """Maps values to pixels."""

    x_low: float
    x_high: float
    y_low: float
    y_high: float
    left: int

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - _RIGHT - self.left)

    def y(self, value: float) -> float:
        height = HEIGHT - _BOTTOM - _TOP
        value = min(max(value, self.y_low), self.y_high)  # only what is beyond 1e300 is outside
        return HEIGHT - _BOTTOM - (value - self.y_low) / (self.y_high - self.y_low) * height

    def attributes(self) -> str:
        """What the page's script needs to find the values under the pointer."""
        return (
            f'data-x0="{self.x_low!r}" data-x1="{self.x_high!r}" data-left="{self.left}" data-right="{WIDTH - _RIGHT}"'
        )


def _range(values: Iterable[float]) -> tuple[float, float]:
    """The finite values' range, widened where it has no width."""
    finite = [min(max(v, -1e300), 1e300) for v in values if math.isfinite(v)]  # differences stay finite
    if not finite:
        return 0.0, 1.0
    low, high = min(finite), max(finite)
    scale = max(abs(low), abs(high))
    if scale < 1e-290:
        return 0.0, 1.0
    if high - low <= 1e-9 * scale:
        return low - 0.05 * scale, high + 0.05 * scale
    return low, high


def _axes(scale: _Scale, y_ticks: Sequence[float], y_labels: Sequence[str], x_label: str) -> list[str]:
    parts = []
    for tick, label in zip(y_ticks, y_labels, strict=True):
        y = scale.y(tick)
        parts.append(f'<line class="gridline" x1="{scale.left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
        parts.append(f'<text class="tick end" x="{scale.left - 8}" y="{y + 4:.1f}">{escape(label)}</text>')
    inside = [t for t in nice_ticks(scale.x_low, scale.x_high, 6) if scale.x_low <= t <= scale.x_high]
    whole = [t for t in inside if float(t).is_integer()]  # there is no cycle 2.5
    labels = [str(int(t)) for t in whole]
    bottom = HEIGHT - _BOTTOM
    for tick, label in zip(whole, labels, strict=True):
        x = scale.x(tick)
        parts.append(f'<line class="axis" x1="{x:.1f}" x2="{x:.1f}" y1="{bottom}" y2="{bottom + 4}"/>')
        parts.append(f'<text class="tick middle" x="{x:.1f}" y="{bottom + 17}">{label}</text>')
    parts.append(f'<line class="axis" x1="{scale.left}" x2="{WIDTH - _RIGHT}" y1="{bottom}" y2="{bottom}"/>')
    middle = (scale.left + WIDTH - _RIGHT) / 2
    parts.append(f'<text class="tick middle" x="{middle:.1f}" y="{HEIGHT - 5}">{escape(x_label)}</text>')
    return parts


def _stretches(xs: Sequence[float], ys: Sequence[float]) -> list[list[tuple[float, float]]]:
    """Points between gaps: a curve does not bridge what is not a number."""
    stretches: list[list[tuple[float, float]]] = [[]]
    for x, y in zip(xs, ys, strict=True):
        if math.isfinite(y):
            stretches[-1].append((x, y))
        elif stretches[-1]:
            stretches.append([])
    return [stretch for stretch in stretches if stretch]


def _path(scale: _Scale, points: Sequence[tuple[float, float]]) -> str:
    return "M" + "L".join(f"{scale.x(x):.1f} {scale.y(y):.1f}" for x, y in points)


def _band(scale: _Scale, line: Line) -> str:
    """The spread around a curve; parts of it that are not known are left open."""
    s = line.series
    pieces = []
    # The edges are walked together, so both must be numbers.
    both = [h if math.isfinite(low) else math.nan for low, h in zip(s.low, s.high, strict=True)]
    lows = dict(zip(s.x, s.low, strict=True))
    for upper in _stretches(s.x, both):
        lower = [(x, lows[int(x)]) for x, _ in reversed(upper)]
        pieces.append(_path(scale, upper) + "L" + _path(scale, lower)[1:] + "Z")
    return f'<path class="band s{line.colour % COLOURS}" d="{"".join(pieces)}"/>' if pieces else ""


def _curve(scale: _Scale, line: Line, x_label: str) -> list[str]:
    s, classes = line.series, f"s{line.colour % COLOURS} d{line.dash % DASHES}"
    parts = []
    main = "line faint" if line.smooth else "line"
    stretches = _stretches(s.x, s.y)
    if stretches:
        parts.append(f'<path class="{main} {classes}" d="{"".join(_path(scale, p) for p in stretches)}"/>')
    if line.smooth:
        course = "".join(_path(scale, p) for p in _stretches(s.x, line.smooth))
        parts.append(f'<path class="line {classes}" d="{course}"/>' if course else "")
    faint = " faint" if line.smooth else ""
    alone = {p[0] for p in stretches if len(p) == 1}  # a path of one point would not be seen
    for x, y in zip(s.x, s.y, strict=True):
        if not math.isfinite(y):
            place = f'x="{scale.x(x):.1f}" y="{_TOP + 9}"'
            parts.append(f'<text class="strange middle" {place}>&times;<title>{x_label} {x}: {y}</title></text>')
        elif len(s) <= _MARKED or (x, y) in alone:
            place = f'cx="{scale.x(x):.1f}" cy="{scale.y(y):.1f}"'
            label = f"{escape(line.name)}, {escape(x_label)} {x}: {y:.6g}"
            parts.append(f'<circle class="dot{faint} {classes}" {place} r="2.2"><title>{label}</title></circle>')
    return parts
