"""The tracker: metrics always, experiment trackers when asked for, silence on other ranks."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from flow_factory.checkpoints.redaction import is_secret, redact
from flow_factory.errors import InputError
from flow_factory.tracking.backends import BACKENDS, require_backend
from flow_factory.tracking.grids import save_grid
from flow_factory.tracking.metrics import read_metrics
from flow_factory.tracking.run_folder import _locks, prepare_run_folder
from flow_factory.tracking.tracker import Tracker


class Result:
    def to_mapping(self):
        return {"rewards": [{"total": float("nan")}]}


def report(tracker: Tracker) -> None:
    """One cycle as the training loop reports it."""
    tracker.enter_phase("evaluate", 0, 2)
    tracker.log_evaluation(0, 0, {"default/r": 0.25})
    tracker.enter_phase("rollout", 0, 2)
    with tracker.progress("rollout", 4) as advance:
        advance(4)
    tracker.enter_phase("optimize", 0, 2)
    tracker.log({"default/loss": torch.tensor(0.5)}, 1, kind="update")
    tracker.log({"extra": 1}, 1)
    tracker.log_cycle(1, 1, {"loss": 0.5}, {"rollout": 1.0})


def test_rows_carry_cycle_and_step(make_config):
    config = make_config()
    folder = prepare_run_folder(config)
    tracker = Tracker(config, folder)
    report(tracker)
    tracker.finish(Result())
    tracker.close()
    tracker.close()
    rows = [(r["kind"], r["cycle"], r["step"]) for r in read_metrics(folder)]
    assert rows == [("eval", 0, 0), ("update", 1, 1), ("data", 1, 1), ("cycle", 1, 1)]
    assert read_metrics(folder, "cycle")[0]["seconds/rollout"] == 1.0
    result = json.loads((folder / "result.json").read_text())
    assert result.pop("ended") >= read_metrics(folder)[-1]["time"]
    assert result == {"rewards": [{"total": {"$float": "nan"}}], "status": "finished", "message": ""}
    assert (folder / "report.html").is_file()
    assert not _locks


def test_lines_on_standard_output(make_config, capsys):
    config = make_config(log={"verbose": True})
    tracker = Tracker(config, prepare_run_folder(config))
    report(tracker)
    tracker.finish(Result())
    tracker.close()
    lines = capsys.readouterr().out.splitlines()
    assert lines[0].startswith("cycle 0/2 | evaluate") and lines[1] == "evaluation after cycle 0 | default/r 0.2500"
    assert lines[2].startswith("cycle 1/2 | rollout  | 4 images | ")
    assert lines[4].startswith("cycle 1/2 | loss 0.5000 | ")
    assert lines[5].startswith("finished after cycle 1 in ")


def test_other_ranks_write_nothing(make_config, tmp_path, capsys):
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    tracker = Tracker(
        make_config(log={"verbose": True}), folder, SimpleNamespace(is_main_process=False, num_processes=2)
    )
    report(tracker)
    tracker.resume(1, 1, folder)
    tracker.log_images("x", folder / "absent.png", 1)
    tracker.finish(Result())
    tracker.close()
    assert not list(folder.iterdir()) and capsys.readouterr().out == ""


def test_resume_drops_rows_that_will_be_written_again(make_config):
    """Pitfall 22: no row of a cycle that is run again stays."""
    config = make_config()
    folder = prepare_run_folder(config)
    tracker = Tracker(config, folder)
    report(tracker)
    tracker.enter_phase("rollout", 1, 2)
    tracker.log({"x": 1}, 1)
    tracker.log({"default/loss": 0.4}, 2, kind="update")
    tracker.close()
    tracker = Tracker(config, folder)
    tracker.resume(1, 1, Path("checkpoint-000001"))
    tracker.close()
    assert [(r["kind"], r["cycle"]) for r in read_metrics(folder)] == [
        ("eval", 0),
        ("update", 1),
        ("data", 1),
        ("cycle", 1),
    ]


def test_environment_names_versions_but_no_host(make_config):
    import platform

    config = make_config()
    folder = prepare_run_folder(config)
    Tracker(config, folder, SimpleNamespace(is_main_process=True, num_processes=4)).close()
    text = (folder / "environment.json").read_text()
    environment = json.loads(text)
    assert environment["packages"]["torch"] == torch.__version__.split("+")[0]
    assert (environment["world_size"], environment["seed"]) == (4, 42)
    assert platform.node() not in text and str(Path.home()) + "/" not in text
    Tracker(config, folder).close()  # another world size: the former description is kept
    assert json.loads((folder / "environment.1.json").read_text())["world_size"] == 4


def test_tensorboard(make_config, tmp_path):
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    config = make_config(
        log={"logging_backend": "tensorboard"},
        rewards=[{"name": "r", "reward_model": "my.Judge", "params": {"api_key": "sk-12345"}}],
    )
    folder = prepare_run_folder(config)
    tracker = Tracker(config, folder)
    report(tracker)
    save_grid([torch.zeros(3, 64, 64, dtype=torch.uint8)], folder / "g.png")
    tracker.log_images("samples/default", folder / "g.png", 1)
    tracker.close()
    events = EventAccumulator(str(folder / "trackers" / "run")).Reload()
    assert set(events.Tags()["scalars"]) == {
        "eval/default/r",
        "update/default/loss",
        "data/extra",
        "cycle/loss",
        "cycle/seconds/rollout",
    }
    assert [(e.step, e.value) for e in events.Scalars("update/default/loss")] == [(1, 0.5)]
    assert events.Tags()["images"] == ["samples/default"]
    assert not any(b"sk-12345" in p.read_bytes() for p in folder.rglob("*") if p.is_file())


def test_a_tracker_that_fails_does_not_end_the_run(make_config, caplog):
    config = make_config()
    folder = prepare_run_folder(config)
    tracker = Tracker(config, folder)

    class Broken:
        name = "wandb"

        def log(self, values, step=None):
            raise ConnectionError("no network")

    tracker._backend = Broken()
    report(tracker)
    tracker.close()
    assert "no network" in caplog.text and len(read_metrics(folder)) == 4


@pytest.mark.parametrize("name", BACKENDS)
def test_a_missing_package_is_an_input_error_with_the_command(name, monkeypatch, make_config, tmp_path):
    monkeypatch.setitem(sys.modules, BACKENDS[name][0], None)
    monkeypatch.setattr("importlib.util.find_spec", lambda module: None)
    with pytest.raises(InputError) as caught:
        require_backend(name)
    assert BACKENDS[name][1] in str(caught.value) and "log.logging_backend" in str(caught.value)
    with pytest.raises(InputError, match="pip install"):
        prepare_run_folder(make_config(log={"logging_backend": name}))
    assert not (tmp_path / "save").exists()


def test_no_backend_needs_nothing():
    require_backend(None)
    require_backend("none")
    with pytest.raises(InputError, match="known: none, tensorboard"):
        require_backend("excel")


@pytest.mark.parametrize(
    ("key", "secret"),
    [
        ("api_key", True),
        ("openai-api-key", True),
        ("HF_TOKEN", True),
        ("password", True),
        ("Authorization", True),
        ("client_secret", True),
        ("max_tokens", False),
        ("tokenizer", False),
        ("token_ids", False),
        ("key", False),
        ("secretary", False),
    ],
)
def test_secret_names(key, secret):
    assert is_secret(key) is secret


def test_redaction_reaches_nested_values_and_leaves_numbers():
    assert redact({"a": [{"token": "x", "token_count": 3}], "b": ({"secret": ""}, {"api_key": None})}) == {
        "a": [{"token": "<redacted>", "token_count": 3}],
        "b": ({"secret": ""}, {"api_key": None}),
    }


def test_videos_go_to_trackers_that_play_files(make_config, tmp_path, monkeypatch, caplog):
    config = make_config()
    tracker = Tracker(config, prepare_run_folder(config))
    logged = []

    class Video:
        def __init__(self, path, caption, format):
            self.told = (path, caption, format)

    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace(Video=Video))
    videos = [(tmp_path / "000.mp4", "a dog"), (tmp_path / "001.mp4", "a cat")]
    tracker.log_videos("samples/toy", videos)  # no tracker
    for name in ("tensorboard", "wandb"):
        tracker._backend = SimpleNamespace(name=name, log=logged.append, finish=lambda: None)
        tracker.log_videos("samples/toy", videos)
        tracker.log_videos("samples/toy", [])
    assert [{name: video.told for name, video in row.items()} for row in logged] == [
        {
            "samples/toy/000": (str(tmp_path / "000.mp4"), "a dog", "mp4"),
            "samples/toy/001": (str(tmp_path / "001.mp4"), "a cat", "mp4"),
        }
    ]
    monkeypatch.setitem(sys.modules, "wandb", SimpleNamespace())  # a release without it: the tracker is left out
    tracker.log_videos("samples/toy", videos)
    assert tracker._backend is None and "left out from now on" in caplog.text
    tracker.close()
