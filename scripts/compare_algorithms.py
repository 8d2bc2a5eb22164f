"""Every online algorithm on the embedded pipeline at one compute budget: held-out reward against samples and time.

    python scripts/compare_algorithms.py search --output guidance/data/algorithm_trials.jsonl
    python scripts/compare_algorithms.py final --trials guidance/data/algorithm_trials.jsonl \
        --output guidance/data/algorithm_comparison.jsonl
    python scripts/compare_algorithms.py show --output guidance/data/algorithm_comparison.jsonl

The budget is counted in rows that go through the transformer: a row without gradients costs 1, a row with gradients 3
(its backward costs about two forwards). Each algorithm gets as many whole cycles as fit. `search` tries the settings
listed in `algorithm_trials.json` on the examples' own test prompts with one seed and half of the budget; `final` runs
each algorithm's best trial (the highest last `strict`, then `graded`) with three other seeds, evaluated on
`shapes/panel.txt`, which no search sees; a trial that ends below its start with the first of them gives way to the next
best, and its record stays. A file of records is continued: what it holds is not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any

EXAMPLES = "examples/{name}/lora/sd3_5/tiny.yaml"
TRIALS = Path(__file__).with_name("algorithm_trials.json")
ALGORITHMS = ("grpo", "grpo-guard", "dppo", "nft", "awm", "dpo", "dgpo", "crd")
BUDGET = 24_000
SEARCH_BUDGET = 12_000
PANEL = ["data.datasets[0].eval.split=panel", "eval.seed=20261129"]
POINTS = 6
"""Evaluations of a run after the first."""

Record = dict[str, Any]


def cost(row: dict[str, Any]) -> float:
    """Row-forwards of a cycle: a backward counts as two forwards."""
    return row["network_rows"] + 2 * row["trained_rows"]


def train(name: str, values: list[str], folder: Path, label: str) -> list[dict[str, Any]]:
    """One run in a fresh process on one thread; its rows of metrics.jsonl.

    Raises:
        RuntimeError: If the run fails, with its last lines.
    """
    command = [
        str(Path(sys.executable).with_name("flow-factory")),
        "train",
        EXAMPLES.format(name=name.replace("-", "_")),
    ]
    command += [*values, f"log.save_dir={folder}", f"log.run_name={label}", "log.save_freq=0", "log.verbose=false"]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    if done.returncode != 0:
        raise RuntimeError("\n".join(done.stderr.strip().splitlines()[-5:]))
    return [json.loads(line) for line in (folder / label / "metrics.jsonl").read_text().splitlines()]


def cycles_for(name: str, changes: dict[str, str], budget: float, folder: Path) -> int:
    """Whole cycles that fit the budget, from what one cycle costs."""
    values = [f"{key}={value}" for key, value in changes.items()]
    rows = train(name, [*values, "train.max_epochs=1", "eval.eval_freq=0"], folder, f"pilot-{time.monotonic_ns()}")
    return max(1, int(budget // cost(next(row for row in rows if row["kind"] == "cycle"))))


def run(job: Record) -> Record:
    """One trial: the held-out scores over its course."""
    start = time.perf_counter()
    values = [f"{key}={value}" for key, value in job["changes"].items()] + [f"train.seed={job['seed']}"]
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        try:
            cycles = cycles_for(job["algorithm"], job["changes"], job["budget"], folder)
            every = max(1, cycles // POINTS)
            values += [f"train.max_epochs={cycles}", f"eval.eval_freq={every}", *job["panel"]]
            rows = train(job["algorithm"], values, folder, "run")
        except RuntimeError as error:  # a setting that breaks the run is a result too
            return {**job, "failed": str(error), "seconds": round(time.perf_counter() - start, 1)}
    return {**job, "cycles": cycles, "curve": curve(rows), "seconds": round(time.perf_counter() - start, 1)}


def curve(rows: list[dict[str, Any]]) -> list[dict[str, float]]:
    """Evaluations with what had been spent by then; the time is that of training, without evaluations and loading."""
    spent = {"cycle": 0.0, "samples": 0.0, "cost": 0.0, "train_seconds": 0.0}
    at: dict[int, dict[str, float]] = {0: dict(spent)}
    for row in rows:
        if row["kind"] == "cycle":
            spent["cycle"] = row["cycle"]
            spent["samples"] += row["samples"]
            spent["cost"] += cost(row)
            spent["train_seconds"] += sum(row[f"seconds/{phase}"] for phase in ("rollout", "feedback", "optimize"))
            at[row["cycle"]] = dict(spent)
    points = []
    for row in rows:
        if row["kind"] == "eval":
            scores = {name: round(row[f"shapes/{name}"], 4) for name in ("strict", "graded", "brightness")}
            points.append({**{k: round(v, 2) for k, v in at[row["cycle"]].items()}, **scores})
    return points


def identity(record: Record) -> str:
    return json.dumps([record[k] for k in ("algorithm", "changes", "seed", "budget", "panel")], sort_keys=True)


def read(path: Path) -> list[Record]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def work(jobs: list[Record], output: Path, workers: int) -> None:
    """Runs what the file does not hold yet and appends each record as it is done."""
    output.parent.mkdir(parents=True, exist_ok=True)
    known = {identity(record) for record in read(output)}
    missing = [job for job in jobs if identity(job) not in known]
    with ThreadPoolExecutor(workers) as pool, output.open("a") as file:
        for done in as_completed([pool.submit(run, job) for job in missing]):
            record = done.result()
            file.write(json.dumps(record) + "\n")
            file.flush()
            last = record.get("curve", [{}])[-1]
            shown = record.get("failed") or f"strict {record['curve'][0]['strict']} -> {last['strict']}"
            print(f"{record['algorithm']} {record['changes']} seed {record['seed']}: {shown}", flush=True)


def ranked_changes(trials: list[Record]) -> dict[str, list[dict[str, str]]]:
    """Algorithm to the changes of its trials, best first."""
    ended = [record for record in trials if "curve" in record]
    ended.sort(key=lambda r: (r["curve"][-1]["strict"], r["curve"][-1]["graded"]), reverse=True)
    names = dict.fromkeys(record["algorithm"] for record in ended)
    return {name: [r["changes"] for r in ended if r["algorithm"] == name] for name in names}


def fell(record: Record) -> bool:
    """Whether a run broke off, or ended below its start."""
    return "curve" not in record or gain(record) <= 0


def choose(trials: list[Record], done: list[Record], seed: int) -> dict[str, dict[str, str]]:
    """Algorithm to its best trial, without those that fell in a run with the whole budget and the first seed."""
    fallen = [(r["algorithm"], r["changes"]) for r in done if r["seed"] == seed and fell(r)]
    left = {name: [c for c in ranked if (name, c) not in fallen] for name, ranked in ranked_changes(trials).items()}
    return {name: changes[0] for name, changes in left.items() if changes}


def trials_table(records: list[Record]) -> str:
    """The search: every trial, the best last evaluation first for each algorithm."""
    lines = [
        "| algorithm | settings | cycles | strict | graded | brightness |",
        "|---|---|---|---|---|---|",
    ]
    for name in sorted({r["algorithm"] for r in records}, key=order):
        own = [r for r in records if r["algorithm"] == name]
        for r in sorted(own, key=lambda r: -r["curve"][-1]["strict"] if "curve" in r else 1):
            changes = ", ".join(f"`{k.split('.', 1)[1]}` {v}" for k, v in r["changes"].items()) or "nothing"
            if "curve" not in r:
                lines.append(f"| {name} | {changes} | failed | | | |")
                continue
            first, last = r["curve"][0], r["curve"][-1]
            cells = [f"{first[k]:.3f} -> {last[k]:.3f}" for k in ("strict", "graded", "brightness")]
            lines.append(f"| {name} | {changes} | {r['cycles']} | {' | '.join(cells)} |")
    return "\n".join(lines)


def final_table(records: list[Record]) -> str:
    """Mean and spread over seeds after the whole budget; what gave way after its first seed has a line of its own."""
    lines = [
        "| algorithm | learning rate | cycles | pictures | training, s | strict, by seed | mean gain (std) | graded "
        "| brightness |",
        "|---|---|---|---|---|---|---|---|---|",
    ]
    groups: dict[str, list[Record]] = {}
    for record in (r for r in records if "curve" in r):
        groups.setdefault(f"{record['algorithm']} {sorted(record['changes'].items())}", []).append(record)
    for own in sorted(groups.values(), key=lambda g: -statistics.mean(gain(r) for r in g)):
        last = [r["curve"][-1] for r in own]
        by_seed = ", ".join(f"{point['strict']:.3f}" for point in last)
        gains = [gain(r) for r in own]
        spread = f" ({statistics.stdev(gains):.3f})" if len(gains) > 1 else ""
        lines.append(
            f"| `{own[0]['algorithm']}` | {own[0]['changes'].get('train.learning_rate', 'of the example')} "
            f"| {own[0]['cycles']} | {last[0]['samples']:.0f} "
            f"| {statistics.mean(p['train_seconds'] for p in last):.0f} "
            f"| {by_seed} | {statistics.mean(gains):+.3f}{spread} "
            f"| {mean_change(own, 'graded')} | {mean_change(own, 'brightness')} |"
        )
    return "\n".join(lines)


def gain(record: Record) -> float:
    return record["curve"][-1]["strict"] - record["curve"][0]["strict"]


def mean_change(records: list[Record], name: str) -> str:
    before, after = (statistics.mean(r["curve"][i][name] for r in records) for i in (0, -1))
    return f"{before:.3f} -> {after:.3f}"


def order(name: str) -> int:
    return ALGORITHMS.index(name) if name in ALGORITHMS else len(ALGORITHMS)


def compare(trials: list[Record], arguments: argparse.Namespace) -> None:
    """The first seed for every algorithm, with the next trial where one falls; then the other seeds."""
    first, *others = arguments.seeds

    def jobs(seeds: list[int]) -> list[Record]:
        chosen = choose(trials, read(arguments.output), first)
        fixed = {"budget": BUDGET, "panel": PANEL}
        names = [name for name in arguments.algorithms if name in chosen]
        return [{"algorithm": n, "changes": chosen[n], "seed": seed, **fixed} for seed in seeds for n in names]

    before = None
    while (wanted := jobs([first])) != before:
        work(wanted, arguments.output, arguments.jobs)
        before = wanted
    work(jobs(others), arguments.output, arguments.jobs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("search", "final", "show"))
    parser.add_argument("--output", type=Path, required=True, help="JSON lines, one run each; continued if it exists.")
    parser.add_argument("--trials", type=Path, help="Records of the search; `final` takes the best of each algorithm.")
    parser.add_argument("--algorithms", nargs="+", default=list(ALGORITHMS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[42, 43, 44])
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1, help="Runs side by side, one thread each.")
    arguments = parser.parse_args()
    if arguments.what == "search":
        trials = json.loads(TRIALS.read_text())
        jobs = [
            {"algorithm": name, "changes": changes, "seed": 7, "budget": SEARCH_BUDGET, "panel": []}
            for name in arguments.algorithms
            for changes in trials[name]
        ]
        work(jobs, arguments.output, arguments.jobs)
    elif arguments.what == "final":
        if arguments.trials is None:
            parser.error("final needs --trials, the records of the search")
        compare(read(arguments.trials), arguments)
    records = read(arguments.output)
    searched = bool(records) and records[0]["budget"] == SEARCH_BUDGET
    print(trials_table(records) if searched else final_table(records))


if __name__ == "__main__":
    main()
