"""Draws the comparison of algorithms: held-out reward against pictures made and against seconds of training.

    python scripts/plot_comparison.py guidance/data/algorithm_comparison.jsonl guidance/images/algorithm_comparison.svg

Curves are means over seeds, bands go from the lowest to the highest seed. One SVG file that carries its own colours.
"""

from __future__ import annotations

import argparse
import json
import statistics
from html import escape
from pathlib import Path
from typing import Any

from flow_factory.tracking.report.charts import HEIGHT, WIDTH, Line, line_chart
from flow_factory.tracking.report.series import Series

COLOURS = ("#0b62c4", "#c2410c", "#17803d", "#8b3fb5", "#9a6700", "#0e7c86", "#b4246a", "#555f6b")
_GAP, _TITLE, _LEGEND = 24, 34, 58
_STYLE = """
  text { font: 12px system-ui, sans-serif; fill: #1f2328; } text.tick { font-size: 11px; fill: #57606a; }
  .end { text-anchor: end; } .middle { text-anchor: middle; } .title { font-size: 14px; font-weight: 600; }
  .gridline { stroke: #e4e7eb; } .axis { stroke: #8b949e; } .cursor { display: none; }
  .line { fill: none; stroke: currentColor; stroke-width: 2; stroke-linejoin: round; }
  .dot { fill: currentColor; } .band { fill: currentColor; opacity: .10; }
"""


def curve(records: list[dict[str, Any]], axis: str, score: str) -> Series:
    """Mean over seeds of each evaluation, with the lowest and highest seed."""
    points = list(zip(*(record["curve"] for record in records), strict=True))
    values = [[point[score] for point in seeds] for seeds in points]
    x = [round(statistics.mean(point[axis] for point in seeds)) for seeds in points]
    means = [statistics.mean(v) for v in values]
    return Series(tuple(x), tuple(means), tuple(map(min, values)), tuple(map(max, values)), total=len(x))


def settled(records: list[dict[str, Any]]) -> dict[str, list[dict[str, Any]]]:
    """Algorithm to the runs of the settings that most of its runs have: those that gave way have one run."""
    groups: dict[str, dict[str, list[dict[str, Any]]]] = {}
    for record in (r for r in records if "curve" in r):
        settings = json.dumps(record["changes"], sort_keys=True)
        groups.setdefault(record["algorithm"], {}).setdefault(settings, []).append(record)
    return {name: max(reversed(found.values()), key=len) for name, found in groups.items()}


def draw(records: list[dict[str, Any]], score: str) -> str:
    """The whole picture."""
    own = settled(records)
    names = list(own)
    ranked = sorted(own, key=lambda name: -curve(own[name], "samples", score).y[-1])
    width, height = 2 * WIDTH + _GAP, _TITLE + HEIGHT + _LEGEND
    style = _STYLE + "".join(f"  .s{i} {{ color: {colour}; }}\n" for i, colour in enumerate(COLOURS))
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}">',
        f"<style>{style}</style>",
        f'<rect width="{width}" height="{height}" fill="#ffffff"/>',
    ]
    panels = (("samples", "pictures made"), ("train_seconds", "seconds of training"))
    for number, (axis, label) in enumerate(panels):
        lines = [Line(name, curve(own[name], axis, score), colour=names.index(name)) for name in ranked]
        left = number * (WIDTH + _GAP)
        title = f"held-out {score} against {label}"
        parts.append(f'<text class="title" x="{left + 8}" y="22">{title}</text>')
        chart = line_chart(f"c{number}", title, lines, label)
        place = f'<svg x="{left}" y="{_TITLE}" width="{WIDTH}" height="{HEIGHT}" '
        parts.append(chart.replace("<svg ", place, 1))
    for number, name in enumerate(ranked):
        x, y = 20 + number % 4 * (width - 40) / 4, _TITLE + HEIGHT + 22 + number // 4 * 22
        last = curve(own[name], "samples", score).y[-1]
        colour = COLOURS[names.index(name)]
        parts.append(f'<rect x="{x:.0f}" y="{y - 9}" width="18" height="4" fill="{colour}"/>')
        parts.append(f'<text x="{x + 26:.0f}" y="{y - 3}">{escape(name)}: {last:.3f} at the end</text>')
    return "\n".join([*parts, "</svg>", ""])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("records", type=Path, help="JSON lines of `compare_algorithms.py final`")
    parser.add_argument("target", type=Path, help="the SVG to write")
    parser.add_argument("--score", default="strict", choices=("strict", "graded", "brightness"))
    arguments = parser.parse_args()
    records = [json.loads(line) for line in arguments.records.read_text().splitlines()]
    arguments.target.write_text(draw(records, arguments.score), encoding="utf-8")


if __name__ == "__main__":
    main()
