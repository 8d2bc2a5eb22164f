"""Reports of runs that go on, were killed, or lost files: a page is made, and says what is missing."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from flow_factory.errors import InputError
from flow_factory.tracking.metrics import MetricsWriter
from flow_factory.tracking.report import write_report
from flow_factory.tracking.report.read import read_run
from flow_factory.tracking.run_folder import is_in_use, lock_run_folder, release_run_folder
from tests.tracking.report_runs import Page, make_run


def cut_last_line(run: Path) -> None:
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[:-20])


def without_line_end(run: Path) -> None:
    content = (run / "metrics.jsonl").read_bytes()
    (run / "metrics.jsonl").write_bytes(content[:-1])


def spoil_lines(run: Path) -> None:
    lines = (run / "metrics.jsonl").read_bytes().splitlines()
    lines[1], lines[3], lines[4] = b"\xff\xfe", b"[1, 2]", b'{"kind": "cycle", "cycle": "x", "step": 1}'
    (run / "metrics.jsonl").write_bytes(b"\n".join(lines) + b"\n")


def change(kind: str, **values: str) -> Callable[[Path], None]:
    """Writes other JSON for some values of the last row of a kind."""

    def damage(run: Path) -> None:
        lines = (run / "metrics.jsonl").read_text().splitlines()
        index = max(i for i, line in enumerate(lines) if json.loads(line)["kind"] == kind)
        row = {key: json.dumps(value) for key, value in json.loads(lines[index]).items()} | values
        lines[index] = "{" + ", ".join(f"{json.dumps(key)}: {value}" for key, value in row.items()) + "}"
        (run / "metrics.jsonl").write_text("\n".join(lines) + "\n")

    return damage


def append_largest_floats(run: Path) -> None:
    """Their sum is beyond any float."""
    with MetricsWriter(run / "metrics.jsonl") as writer:
        for cycle in (4, 5, 6):
            writer.log({"reward/total/mean": 1.7e308, "seconds/rollout": 1.7e308}, 6, "cycle", cycle)


def drop_evaluations(run: Path) -> None:
    """As a run that was resumed from its first cycle."""
    lines = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    kept = [line for line in lines if json.loads(line)["cycle"] <= 1]
    (run / "metrics.jsonl").write_text("".join(kept))


def empty_metrics(run: Path) -> None:
    (run / "metrics.jsonl").write_text("")


def truncate_picture(run: Path) -> None:
    path = run / "samples/toy/cycle-000002.png"
    path.write_bytes(path.read_bytes()[:200])


def not_a_picture(run: Path) -> None:
    (run / "samples/toy/cycle-000002.png").write_text("<svg/>")


def remove(*names: str) -> Callable[[Path], None]:
    def damage(run: Path) -> None:
        for name in names:
            path = run / name
            shutil.rmtree(path) if path.is_dir() else path.unlink()

    return damage


def write(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda run: (run / name).write_bytes(content) and None


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut_last_line, "the last line of metrics.jsonl is cut off (line 13) and is left out"),
        (without_line_end, None),
        (spoil_lines, "3 lines cannot be read in metrics.jsonl and are left out: 2, 4, 5"),
        (change("cycle", time='{"$float": "nan"}'), "1 line cannot be read in metrics.jsonl and is left out: 12"),
        (change("cycle", time="NaN"), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", time="1e300"), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", time="-1e300"), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", loss=str(10**400)), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", step=str(10**400)), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", loss="9" * 5000), "1 line cannot be read in metrics.jsonl"),
        (change("cycle", **{"seconds/rollout": '"2 s"', "time": "null"}), None),
        (change("cycle", samples="[]"), None),
        (append_largest_floats, None),
        (change("cycle", **{"\udc80": "1.5"}), None),
        (change("eval", **{"\udc80/strict": "1.5"}), "samples/? holds no picture"),
        (drop_evaluations, "samples/toy holds pictures after cycle 2, 3 of which metrics.jsonl knows no evaluation"),
        (empty_metrics, "metrics.jsonl holds no rows"),
        (remove("metrics.jsonl"), "metrics.jsonl cannot be read (it is missing)"),
        (remove("config.yaml"), "config.yaml cannot be read (it is missing)"),
        (write("config.yaml", b"a: [1"), "config.yaml cannot be read (ParserError"),
        (write("config.yaml", b"\xff\xfe\x00"), "config.yaml cannot be read (UnicodeDecodeError"),
        (write("config.yaml", b"- 1\n"), "config.yaml holds no mapping"),
        (write("config.yaml", b"train: 3\nmodel: [x]\nrewards: {a: 1}\n1: 2\n"), None),
        (write("config.yaml", b"train: {trainer_type: not.Ours}\nmodel: {model_type: nor.This}\n"), None),
        (write("config.yaml", b"train: {since: 2001-13-45}"), "config.yaml cannot be read (ValueError: month must"),
        (write("config.yaml", b"train: !!timestamp x"), "config.yaml cannot be read (AttributeError"),
        (write("config.yaml", b"train: !!int ''"), "config.yaml cannot be read ("),
        (write("config.yaml", b"a: " + b"[" * 3000 + b"]" * 3000), "config.yaml cannot be read (RecursionError"),
        (
            write("config.yaml", b"a: " + b"{a: " * 80 + b"1" + b"}" * 80),
            "config.yaml cannot be read (ValueError: nest",
        ),
        (write("config.yaml", b"a: &a [*a]"), "config.yaml cannot be read (ValueError: nested"),
        (write("config.yaml", b"a: 0x" + b"f" * 9000), "config.yaml cannot be read (ValueError: an integer of 36000"),
        (write("config.yaml", b'train: {trainer_type: "\\udc80", "\\udc81": "\\udc82"}\nmodel: {model_type: x}'), None),
        (
            write("environment.json", b'{"a": ' * 9000 + b"1" + b"}" * 9000),
            "environment.json cannot be read (Recursion",
        ),
        (write("environment.json", b'{"a": ' * 80 + b"1" + b"}" * 80), "environment.json cannot be read (ValueError"),
        (write("result.json", b'{"timings": {"total": 1' + b"0" * 400 + b'}, "counts": {"cycles": 3}}'), None),
        (remove("environment.json"), "environment.json cannot be read (it is missing)"),
        (write("environment.json", b'{"devices": 3, "world_size": null}'), None),
        (write("resolved.json", b'{"a": '), "resolved.json cannot be read (JSONDecodeError"),
        (write("overrides.json", b"[]"), "overrides.json holds no mapping"),
        (write("result.json", b"{}x"), "result.json cannot be read (JSONDecodeError"),
        (write("result.json", b'{"timings": 1, "counts": [], "ended": 9e9}'), None),
        (remove("samples"), "samples/toy holds no picture of the evaluation after cycle 0, 1, 2, 3"),
        (remove("samples/toy/cycle-000000.png"), "samples/toy holds no picture of the evaluation after cycle 0"),
        (truncate_picture, "samples/toy/cycle-000002.png is no whole picture and is left out"),
        (not_a_picture, "samples/toy/cycle-000002.png is no whole picture and is left out"),
        (remove("samples/toy/first.safetensors"), None),
        (write("samples/toy/first.safetensors", b"\xff" * 40), None),
    ],
    ids=lambda value: getattr(value, "__name__", None) or (str(value)[:40] if value else "nothing"),
)
def test_a_damaged_run_has_a_report_that_says_so(
    damage: Callable[[Path], None], said: str | None, tmp_path: Path
) -> None:
    run = make_run(tmp_path / "run")
    damage(run)
    report = write_report([run])
    page = Page(report.path.read_text(encoding="utf-8"))
    problems = [problem for _, problem in report.problems]
    if said is None:
        assert not problems
    else:
        assert any(problem.startswith(said) for problem in problems), problems
    for problem in problems:
        assert problem in page.text
    if page.data["charts"]:
        assert page.images() or "samples" in (said or "")
    other = make_run(tmp_path / "other")
    Page(write_report([run, other], tmp_path / "both.html").path.read_text(encoding="utf-8"))


def test_sheets_of_dropped_evaluations_are_not_shown(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    drop_evaluations(run)
    page = Page(write_report([run]).path.read_text())
    assert [content for _, content in page.images()] == [
        (run / f"samples/toy/cycle-{cycle:06d}.png").read_bytes() for cycle in (0, 1)
    ]
    empty_metrics(run)  # rows that tell nothing drop nothing
    assert len(Page(write_report([run]).path.read_text()).images()) == 4


def test_a_lost_line_loses_nothing_else(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    whole = Page(write_report([run]).path.read_text()).data["charts"]
    without_line_end(run)
    assert Page(write_report([run]).path.read_text()).data["charts"] == whole
    cut_last_line(run)
    cut = Page(write_report([run]).path.read_text())
    assert cut.chart("toy: strict")["lines"][0]["x"] == [0, 1, 2]
    assert cut.chart("Reward")["lines"][0]["x"] == [1, 2, 3]


def test_a_run_before_its_first_cycle(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", cycles=0, status=None)
    report = write_report([run])
    page = Page(report.path.read_text())
    assert any("no cycle has been finished yet" in problem for _, problem in report.problems)
    assert page.data["runs"] == [{"name": "run", "status": "unfinished", "cycles": 0}]
    assert len(page.images()) == 1 and not any(tag == "input" for tag, _ in page.tags), "one sheet needs no slider"


def test_a_run_that_failed_while_loading(tmp_path: Path) -> None:
    run = tmp_path / "run"
    run.mkdir()
    (run / "config.yaml").write_text("train: {max_epochs: 3}\n")
    (run / "environment.json").write_text("{}")
    page = Page(write_report([run]).path.read_text())
    assert "There are no curves." in page.text and "max_epochs" in page.text


@pytest.mark.parametrize("status", ["finished", "interrupted", "failed"])
def test_the_status_is_what_the_run_said_last(status: str, tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", status=status)
    page = Page(write_report([run]).path.read_text())
    assert page.data["runs"][0]["status"] == status and f"why it is {status}" in page.text


def test_a_run_that_was_gone_on_with_and_killed_is_not_finished(tmp_path: Path) -> None:
    """The result of its first end is still there."""
    run = make_run(tmp_path / "run")
    row = {"kind": "cycle", "cycle": 4, "step": 8, "time": 9e9, "loss": 1.0}
    with (run / "metrics.jsonl").open("a") as file:
        file.write(json.dumps(row) + "\n")
    assert read_run(run).status == "unfinished"


def test_a_run_in_another_process_is_running(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / ".lock").touch()
    assert not is_in_use(run) and read_run(run).status == "finished"
    code = (
        "import sys; from pathlib import Path; from flow_factory.tracking.run_folder import lock_run_folder;"
        "lock_run_folder(Path(sys.argv[1])); print('held', flush=True); sys.stdin.read()"
    )
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "text": True}
    with subprocess.Popen([sys.executable, "-c", code, str(run)], **pipes) as holder:  # type: ignore[call-overload]
        assert holder.stdout.readline() == "held\n"
        assert is_in_use(run) and read_run(run).status == "running"
        holder.stdin.close()
    assert not is_in_use(run)
    lock_run_folder(run)  # the check has let go of the lock
    assert not is_in_use(run), "a run makes its own report while it holds the folder"
    release_run_folder(run)


def test_what_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="there is no such folder"):
        write_report([tmp_path / "missing"])
    with pytest.raises(InputError, match=r"holds no run.*config\.yaml, metrics\.jsonl and samples/"):
        write_report([tmp_path])
    (tmp_path / "config.yaml").write_text("a: 1\n")
    with pytest.raises(InputError, match="holds no run"):
        write_report([tmp_path])
    run = make_run(tmp_path / "save" / "mine", cycles=1)
    with pytest.raises(InputError, match=r"It holds runs, though: .*mine"):
        write_report([tmp_path / "save"])
    with pytest.raises(InputError, match=r"is a file, not a run folder. Did you mean .*mine\?"):
        write_report([run / "config.yaml"])
    assert not list(tmp_path.rglob("*.html"))
