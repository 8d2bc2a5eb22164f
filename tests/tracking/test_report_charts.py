"""Charts and series: round ticks that cover the data, points where they belong, outlines that survive thinning."""

from __future__ import annotations

import itertools
import math
import random
import re
from xml.etree import ElementTree

import pytest

from flow_factory.tracking.report.charts import HEIGHT, WIDTH, Line, line_chart, nice_ticks, tick_labels
from flow_factory.tracking.report.series import (
    Series,
    evenly,
    exponential_mean,
    extract,
    kept_points,
    running_mean,
    with_spread,
)


def series(*y: float, start: int = 1) -> Series:
    return Series(tuple(range(start, start + len(y))), y, total=len(y))


def drawn(svg: str) -> ElementTree.Element:
    """The chart as XML: it must be well-formed by the strictest reader."""
    return ElementTree.fromstring(svg.replace("&times;", "x"))


@pytest.mark.parametrize(
    ("low", "high", "ticks"),
    [
        (0.0, 1.0, [0.0, 0.2, 0.4, 0.6, 0.8, 1.0]),
        (0.31, 0.52, [0.3, 0.35, 0.4, 0.45, 0.5, 0.55]),
        (-3.0, 7.0, [-4.0, -2.0, 0.0, 2.0, 4.0, 6.0, 8.0]),
        (1.0, 40.0, [0.0, 10.0, 20.0, 30.0, 40.0]),
        (0.0, 2.5e-8, [0.0, 5e-9, 1e-8, 1.5e-8, 2e-8, 2.5e-8]),
    ],
)
def test_ticks_are_round(low: float, high: float, ticks: list[float]) -> None:
    assert nice_ticks(low, high) == pytest.approx(ticks, abs=1e-15)


def test_ticks_cover_any_range() -> None:
    generator = random.Random(0)
    for _ in range(2000):
        low = generator.uniform(-1, 1) * 10 ** generator.uniform(-12, 12)
        high = low + abs(low) * 10 ** generator.uniform(-6, 3) + 1e-13
        ticks = nice_ticks(low, high)
        step = ticks[1] - ticks[0]
        assert ticks[0] <= low + 1e-6 * step and ticks[-1] >= high - 1e-6 * step and 3 <= len(ticks) <= 12
        assert len(set(tick_labels(ticks))) == len(ticks), (low, high, tick_labels(ticks))


def test_labels_show_what_tells_ticks_apart() -> None:
    assert tick_labels([0.0, 0.5, 1.0]) == ["0.0", "0.5", "1.0"]
    assert tick_labels([0.99, 0.995, 1.0]) == ["0.990", "0.995", "1.000"]
    assert tick_labels([0.0, 1e-8, 2e-8]) == ["0", "1e-8", "2e-8"]
    assert tick_labels([0.0, 5e-9, 1e-8]) == ["0", "5.0e-9", "1.0e-8"]
    assert tick_labels([0.0, 100000.0, 200000.0]) == ["0", "1e5", "2e5"]


def test_long_labels_fit_left_of_the_axis() -> None:
    """Ratios near 1 need ten digits. A figure of DejaVu Sans is 0.636 of the font's size wide."""
    from importlib import resources

    style = (resources.files("flow_factory.tracking.report") / "assets" / "style.css").read_text()
    (size,) = re.findall(r"svg text \{ font-size: (\d+)px", style)
    svg = drawn(line_chart("c", "title", [Line("a", series(1.0000000018, 0.9999999973))], "cycle"))
    labels = [e for e in svg.iter("text") if e.get("class") == "tick end"]
    assert max(len(e.text or "") for e in labels) == 12
    for e in labels:
        assert float(e.get("x", "")) >= len(e.text or "") * 0.636 * float(size)


def test_points_stand_where_their_values_are() -> None:
    """Read back from the pixels by the axis labels, as an eye does."""
    y = (0.0, 0.25, 1.0, 0.5)
    svg = drawn(line_chart("c", "title", [Line("a", series(*y))], "cycle"))
    labels = [e for e in svg.iter("text") if e.get("class") == "tick end"]
    (y0, p0), (y1, p1) = [(float(e.text or ""), float(e.get("y", "")) - 4) for e in (labels[0], labels[-1])]
    columns = [e for e in svg.iter("text") if e.get("class") == "tick middle" and (e.text or "").isdigit()]
    (x0, q0), (x1, q1) = [(int(e.text or ""), float(e.get("x", ""))) for e in (columns[0], columns[-1])]
    dots = [(float(e.get("cx", "")), float(e.get("cy", ""))) for e in svg.iter("circle")]
    read = [(x0 + (cx - q0) / (q1 - q0) * (x1 - x0), y0 + (cy - p0) / (p1 - p0) * (y1 - y0)) for cx, cy in dots]
    assert [x for x, _ in read] == pytest.approx([1, 2, 3, 4], abs=2e-3)
    assert [value for _, value in read] == pytest.approx(y, abs=2e-3)
    titles = [e.findtext("title") for e in svg.iter("circle")]
    assert titles == ["a, cycle 1: 0", "a, cycle 2: 0.25", "a, cycle 3: 1", "a, cycle 4: 0.5"]


def test_a_band_encloses_its_curve() -> None:
    mean, spread = series(1.0, 2.0, 3.0), series(0.5, 0.25, 0.75)
    banded = with_spread(mean, spread)
    assert banded.low == (0.5, 1.75, 2.25) and banded.high == (1.5, 2.25, 3.75)
    svg = drawn(line_chart("c", "t", [Line("a", banded)], "cycle"))
    (band,) = [e for e in svg.iter("path") if (e.get("class") or "").startswith("band")]
    (curve,) = [e for e in svg.iter("path") if (e.get("class") or "").startswith("line")]
    outline = [float(p.split()[1]) for p in re.findall(r"[\d.]+ [\d.]+", band.get("d", ""))]
    heights = [float(p.split()[1]) for p in re.findall(r"[\d.]+ [\d.]+", curve.get("d", ""))]
    upper, lower = outline[:3], outline[3:][::-1]
    assert all(u < y < low for u, y, low in zip(upper, heights, lower, strict=True))


def test_gaps_are_not_bridged_and_strange_values_are_marked() -> None:
    y = (1.0, 2.0, math.nan, 3.0, math.inf, 4.0, 5.0)
    svg = drawn(line_chart("c", "t", [Line("a", series(*y))], "cycle"))
    (curve,) = [e for e in svg.iter("path") if e.get("class") == "line s0 d0"]
    assert (curve.get("d") or "").count("M") == 3, "three stretches"
    marks = [e.findtext("title") for e in svg.iter("text") if (e.get("class") or "").startswith("strange")]
    assert marks == ["cycle 3: nan", "cycle 5: inf"]
    assert "2 values are not numbers" in (svg.findtext("desc") or "")


@pytest.mark.parametrize(
    "y",
    [
        (0.0,),
        (5.0,),
        (0.0, 0.0, 0.0),
        (0.7, 0.7),
        (math.nan, math.nan),
        (-1.7e308, 1.7e308),
        (1e-320, 3e-320),
        (1.0, 1.0 + 2**-52),
        (math.inf, -math.inf, 0.0),
        (12345678.0, 12345679.0),
    ],
)
def test_any_values_make_a_chart_inside_its_frame(y: tuple[float, ...]) -> None:
    banded = with_spread(series(*y), series(*(0.0 for _ in y)))
    svg = drawn(line_chart("c", "t", [Line("a", banded)], "cycle", limits=(-1.0, 1.0), marks=[1]))
    for dot in svg.iter("circle"):
        assert 0 <= float(dot.get("cx", "")) <= WIDTH and 0 <= float(dot.get("cy", "")) <= HEIGHT
    assert "nan" not in "".join(e.get("d", "") for e in svg.iter("path"))


def test_a_chart_says_what_it_shows() -> None:
    lines = [Line("<b>", series(1.0, 4.0, 2.5)), Line("empty", series()), Line("other", series(0.5))]
    svg = drawn(line_chart("c", "R & D", lines, "cycle", marks=[2]))
    assert svg.findtext("title") == "R & D" and svg.get("role") == "img"
    assert svg.get("aria-labelledby") == "c-t c-d"
    assert svg.findtext("desc") == (
        "R & D. <b>: 1 at cycle 1, 2.5 at cycle 3; lowest 1, highest 4. other: 0.5 at cycle 1. Alarms at cycle 2."
    )
    assert "no numbers" in line_chart("c", "t", [], "cycle")


def test_extracting_keeps_the_later_of_two_rows_and_the_order() -> None:
    rows = [
        {"cycle": 2, "a": 1.0, "low": 0.0, "high": 2.0},
        {"cycle": 1, "a": 3, "low": 1.0, "high": 4.0},
        {"cycle": 2, "a": 5.0},
        {"cycle": 3, "a": True},
        {"cycle": 4, "a": "x"},
        {"cycle": 5},
    ]
    found = extract(rows, "a", "cycle", "low", "high")
    assert (found.x, found.y, found.total) == ((1, 2), (3.0, 5.0), 2)
    assert found.low[0] == 1.0 and math.isnan(found.low[1])


def test_where_the_spread_is_unknown_there_is_no_band() -> None:
    banded = with_spread(series(1.0, 2.0, 3.0), Series((2,), (0.5,), total=1))
    assert banded.low[1] == 1.5 and banded.high[1] == 2.5 and banded.has_band
    assert all(math.isnan(edge) for i in (0, 2) for edge in (banded.low[i], banded.high[i]))
    unknown = with_spread(series(1.0, 2.0), Series((), ()))
    assert not unknown.has_band and not series(1.0).has_band
    assert 'class="band' not in line_chart("c", "t", [Line("a", unknown)], "cycle")


def test_thinning_keeps_the_outline() -> None:
    generator = random.Random(1)
    y = [generator.gauss(0, 1) for _ in range(10_000)]
    y[1234], y[7000], y[4321] = 99.0, -99.0, math.nan
    whole = Series(tuple(range(10_000)), tuple(y), tuple(v - 1 for v in y), tuple(v + 1 for v in y), total=10_000)
    thinned = whole.take(kept_points(whole, 500))
    assert len(thinned) <= 503 and thinned.thinned and thinned.total == 10_000
    assert thinned.x[0] == 0 and thinned.x[-1] == 9_999 and list(thinned.x) == sorted(set(thinned.x))
    assert {1234, 4321, 7000} <= set(thinned.x)
    for x, value, low in zip(thinned.x, thinned.y, thinned.low, strict=True):
        assert value == y[x] or (math.isnan(value) and math.isnan(y[x]))
        assert math.isnan(low) or low == y[x] - 1
    # In every stretch the extremes are the true ones.
    for start in range(0, 10_000, 1000):
        inside = [v for x, v in zip(thinned.x, thinned.y, strict=True) if start <= x < start + 1000 and v == v]
        true = [v for v in y[start : start + 1000] if v == v]
        assert max(inside) == max(true) and min(inside) == min(true)
    short = series(1.0, 2.0)
    assert kept_points(short, 500) == [0, 1] and not short.take([0, 1]).thinned
    nothing = Series(tuple(range(2000)), (math.nan,) * 2000, total=2000)
    assert len(kept_points(nothing, 500)) <= 500


def test_means() -> None:
    assert running_mean([1.0, 2.0, 6.0, math.nan], 3, [0, 1, 2, 3]) == (1.5, 3.0, 4.0, 6.0)
    assert running_mean([1e20, 0.5, 1.5, 2.5], 3, [3, 0]) == (2.0, 5e19), "a spike spoils nothing beyond its window"
    assert running_mean([1.5e308, 1.5e308], 3, [0]) == (1.5e308,)
    assert exponential_mean([1.0, 2.0, math.nan, 2.0], 0.5) == (1.0, 1.5, 1.5, 1.75)


def test_evenly_spaced() -> None:
    assert evenly(5, 24) == [0, 1, 2, 3, 4]
    chosen = evenly(1000, 24)
    assert len(chosen) == len(set(chosen)) == 24 and chosen[0] == 0 and chosen[-1] == 999
    assert max(b - a for a, b in itertools.pairwise(chosen)) <= 44
