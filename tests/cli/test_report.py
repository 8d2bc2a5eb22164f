"""`flow-factory report`, and the report that every run leaves behind."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest
from typer.testing import CliRunner

from flow_factory.cli.app import app
from flow_factory.errors import Interrupted
from flow_factory.tracking.metrics import read_metrics
from tests.tracking.report_runs import Page, make_run
from tests.trainers.support import make_trainer

EVALUATED = {
    "eval.eval_freq": 1,
    "eval.num_grid_images": 2,
    "eval_rewards": [{"name": "bright", "reward_model": "brightness"}],
}


def invoke(*arguments: str | Path) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, ["report", *map(str, arguments)])
    return result.exit_code, result.stdout, result.stderr


def test_a_report_of_one_run_and_of_two(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    make_run(Path("save/a"))
    make_run(Path("save/b"))
    code, out, err = invoke("save/a")
    assert (code, err) == (0, "") and out.startswith("wrote save/a/report.html (0.")
    code, out, err = invoke("save/a", "save/b")
    assert (code, err) == (0, "") and out.startswith("wrote comparison.html")
    assert len(Page(Path("comparison.html").read_text()).data["runs"]) == 2
    code, out, _ = invoke("save/a", "--output", "mine.html")
    assert code == 0 and Path("mine.html").is_file()


def test_what_is_missing_is_said_in_the_terminal(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run")
    (run / "environment.json").unlink()
    code, _, err = invoke(run)
    assert code == 0 and err == "note: run: environment.json cannot be read (it is missing)\n"


def test_what_is_no_run_is_wrong_input(tmp_path: Path) -> None:
    for arguments in ([tmp_path], [tmp_path / "missing"], [make_run(tmp_path / "run"), tmp_path]):
        code, out, err = invoke(*arguments)
        assert code == 2 and out == "" and "config.yaml, metrics.jsonl and samples/" in " ".join(err.split())
    assert invoke()[0] == 2


@pytest.fixture(scope="module")
def finished(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("finished")
    make_trainer(tiny_sd3_dir, folder, EVALUATED).start()
    return folder / "save" / "run"


def test_a_run_leaves_its_report(finished: Path) -> None:
    page = Page((finished / "report.html").read_text(encoding="utf-8"))
    assert page.data["runs"] == [{"name": "run", "status": "finished", "cycles": 2}]
    cycles = read_metrics(finished, "cycle")
    assert page.chart("Reward")["lines"][0]["y"] == [row["reward/total/mean"] for row in cycles]
    assert page.chart("toy: bright")["lines"][0]["y"] == [r["toy/bright"] for r in read_metrics(finished, "eval")]
    assert [row["samples"] for row in cycles] == [8.0, 8.0], "four prompts, two pictures each"
    assert [y > 0 for y in page.chart("Images per second")["lines"][0]["y"]] == [True, True]
    files = [finished / f"samples/toy/cycle-{cycle:06d}.png" for cycle in (0, 1, 2)]
    contents = [content for _, content in page.images()]
    assert contents == [file.read_bytes() for file in files] and len(set(contents)) == 3, (
        "training changed the pictures"
    )
    result = json.loads((finished / "result.json").read_text())
    assert result["status"] == "finished" and result["timings"]["total"] > 0


def test_a_report_made_again_is_the_same_but_for_the_time(finished: Path, tmp_path: Path) -> None:
    code, _, err = invoke(finished, "--output", tmp_path / "again.html")
    assert (code, err) == (0, "")
    own, again = (Page(p.read_text()).data for p in (finished / "report.html", tmp_path / "again.html"))
    assert own == again


def test_an_interrupted_run_leaves_its_report(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, EVALUATED)
    original = type(trainer).optimize

    def optimize(self, samples) -> None:  # type: ignore[no-untyped-def]
        original(self, samples)
        os.kill(os.getpid(), signal.SIGTERM)

    monkeypatch.setattr(type(trainer), "optimize", optimize)
    with pytest.raises(Interrupted):
        trainer.start()
    folder = tmp_path / "save" / "run"
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.data["runs"] == [{"name": "run", "status": "interrupted", "cycles": 1}]
    assert "stopped by a signal" in page.text and "config.yaml" in page.text
    monkeypatch.undo()
    make_trainer(tiny_sd3_dir, tmp_path, EVALUATED).start()
    page = Page((folder / "report.html").read_text(encoding="utf-8"))
    assert page.data["runs"] == [{"name": "run", "status": "finished", "cycles": 2}]


def test_a_failed_run_leaves_its_report_and_its_error(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer = make_trainer(tiny_sd3_dir, tmp_path, EVALUATED)

    def optimize(self, samples) -> None:  # type: ignore[no-untyped-def]
        raise FloatingPointError("no <good>")

    monkeypatch.setattr(type(trainer), "optimize", optimize)
    with pytest.raises(FloatingPointError, match="no <good>"):
        trainer.start()
    page = Page((tmp_path / "save/run/report.html").read_text(encoding="utf-8"))
    assert page.data["runs"][0]["status"] == "failed" and "FloatingPointError: no <good>" in page.text


def test_a_report_that_fails_does_not_end_the_run(
    tiny_sd3_dir: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(folders) -> None:  # type: ignore[no-untyped-def]
        raise OSError("disk full")

    monkeypatch.setattr("flow_factory.tracking.tracker.write_report", broken)
    result = make_trainer(tiny_sd3_dir, tmp_path, {"train.max_epochs": 1}).start()
    assert result.counts["cycles"] == 1
    assert "disk full" in caplog.text and "flow-factory report" in caplog.text
