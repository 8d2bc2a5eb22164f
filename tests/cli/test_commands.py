"""The command line through its real entry point: output, exit codes, speed, and what it must not import."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from flow_factory.cli import static_checks
from flow_factory.cli.static_checks import check_statically
from flow_factory.errors import InputError, Interrupted, RunError
from flow_factory.hparams import ConfigError, builtin_names, load_config
from flow_factory.tracking.backends import BACKENDS
from tests.hparams.helpers import load
from tests.hparams.test_imports_and_examples import HEAVY
from tests.hparams.test_models_and_builtins import make_folder


def run(
    *arguments: str, cwd: Path | None = None, env: dict[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    """Runs `flow-factory` in a process of its own."""
    environment = {**{k: v for k, v in os.environ.items() if k != "FLOW_FACTORY_DEBUG"}, **(env or {})}
    command = [sys.executable, "-m", "flow_factory.cli.app", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, env=environment, check=False)


@pytest.fixture
def project(tmp_path: Path) -> Path:
    """A folder with a model, 1,000 prompts and run.yaml."""
    make_folder(tmp_path / "model")
    (tmp_path / "data").mkdir()
    (tmp_path / "data" / "train.txt").write_text("".join(f"a picture of number {i}\n" for i in range(1000)))
    (tmp_path / "data" / "test.jsonl").write_text('{"prompt": "x", "negative_prompt": "y", "answer": 3}\n')
    (tmp_path / "run.yaml").write_text(
        "model: {model_type: sd3-5, model_name_or_path: model}\n"
        "data:\n  dataset_dir: data\n"
        "train: {resolution: 64, per_device_batch_size: 8, max_epochs: 2, ema_update_interval: 2}\n"
        "rewards: {reward_model: jpeg_compressibility}\n"
    )
    return tmp_path


def in_project(project: Path, monkeypatch: pytest.MonkeyPatch, *overrides: str) -> static_checks.StaticReport:
    monkeypatch.chdir(project)
    return check_statically(load_config("run.yaml", overrides))


def test_the_config_of_a_copied_run_does_not_go_on_with_the_original(
    project: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Pitfall: `cp -r save/a copy; train copy/config.yaml` would train the original, which nobody meant."""
    original, copied = project / "save" / "first", project / "copy"
    for folder in (original, copied):
        folder.mkdir(parents=True)
        text = (project / "run.yaml").read_text() + f"log: {{save_dir: {project / 'save'}, run_name: first}}\n"
        (folder / "config.yaml").write_text(text)
        (folder / "metrics.jsonl").write_text("{}\n")
    monkeypatch.chdir(project)
    check_statically(load_config("save/first/config.yaml"))
    with pytest.raises(ConfigError, match=r"would go on with the run in .*first.*log\.run_name=copy"):
        check_statically(load_config("copy/config.yaml"))
    check_statically(load_config("copy/config.yaml", [f"log.save_dir={project}", "log.run_name=copy"]))
    check_statically(load_config("copy/config.yaml", ["log.run_name=another"]))


def test_check_prints_what_a_run_would_do(project: Path) -> None:
    done = run("check", "run.yaml", cwd=project)
    assert done.returncode == 0, done.stderr
    for words in (
        "trainer: grpo, lora",
        "model: sd3-5, model (model)",
        "train prompts: 1000 from data (train)",
        "eval prompts: 1 from data (test)",
        "rewards: default = jpeg_compressibility, weight 1.0",
        "cycle: 8 prompts x 8 samples = 64 samples",
        "1 stochastic per cycle",
        "ok",
    ):
        assert words in done.stdout
    assert done.stderr == ""


_IMPORTED = """
import sys
from flow_factory.cli.app import main
sys.argv = {argv!r}
try:
    main()
except SystemExit as stop:
    assert not stop.code, stop.code
print("HEAVY", sorted(set({heavy!r}) & set(sys.modules)))
"""


@pytest.mark.parametrize(
    "arguments",
    [
        *[["--help"], ["check", "--help"], ["check", "run.yaml"], ["list", "trainers"]],
        *[[command, "--help"] for command in ("sample", "eval", "export", "doctor")],
    ],
)
def test_light_commands_import_nothing_heavy(project: Path, arguments: list[str]) -> None:
    """What keeps them fast; scripts/measure_cli.py has the seconds."""
    code = _IMPORTED.format(argv=["flow-factory", *arguments], heavy=HEAVY)
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=project, check=True)
    assert done.stdout.strip().split("\n")[-1] == "HEAVY []"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["check", "nope.yaml"], ["error: configuration 'nope.yaml' does not exist"]),
        (
            ["check", "run.yaml", "train.gruop_size=4"],
            ["override 'train.gruop_size=4'", "did you mean train.group_size?"],
        ),
        (["check", "run.yaml", "scheduler.dynamics_type=ODE"], ["'ODE' has no transition density", "Flow-SDE"]),
        (["check", "run.yaml", "train.group_size=1"], ["at least 2"]),
        (["check", "run.yaml", "train.unique_sample_num_per_epoch=7"], ["M=7", "These would:"]),
        (["check", "run.yaml", "rewards.reward_model=jpeg"], ["no reward model 'jpeg'", "jpeg_compressibility"]),
        (["check", "run.yaml", "model.model_name_or_path=./gone"], ["'./gone' does not exist"]),
        (["check", "run.yaml", "data.dataset_dir=gone"], ["dataset folder 'gone'", "does not exist"]),
        (["check", "run.yaml", "data.dataset_dir=builtin/gone"], ["no built-in prompt set 'builtin/gone'"]),
        (["train", "run.yaml", "train.seed=x"], ["train.seed", "'x' is not a whole number"]),
        (["train", "run.yaml", "model.model_name_or_path=./gone"], ["'./gone' does not exist"]),
        (["config", "show", "run.yaml", "nothing"], ["key=value"]),
        (["config", "schema", "--trainer-type", "gpro"], ["Did you mean 'grpo'"]),
        (["config", "init", "run.yaml"], ["run.yaml exists and is not written over"]),
        (["bogus"], ["No such command 'bogus'"]),
        (["list", "foo"], ["foo", "trainers"]),
        (["train"], ["Missing argument"]),
        (["check", "run.yaml", "--frobnicate"], ["--frobnicate"]),
    ],
)
def test_wrong_input_exits_with_2_and_one_message(project: Path, arguments: list[str], words: list[str]) -> None:
    before = {path: path.read_bytes() for path in project.rglob("*") if path.is_file()}
    done = run(*arguments, cwd=project)
    assert done.returncode == 2, (done.stdout, done.stderr)
    for word in words:
        assert word in done.stderr
    assert "Traceback" not in done.stderr
    assert {path: path.read_bytes() for path in project.rglob("*") if path.is_file()} == before


def test_debug_shows_the_traceback(project: Path) -> None:
    done = run("check", "nope.yaml", "--debug", cwd=project)
    assert done.returncode == 2 and "Traceback" in done.stderr and "error: configuration" in done.stderr
    done = run("--debug", "check", "nope.yaml", cwd=project)
    assert done.returncode == 2 and "Traceback" in done.stderr


@pytest.mark.parametrize(
    ("error", "code", "words"),
    [
        (InputError("bad input"), 2, ["error: bad input"]),
        (RunError("it failed [red]"), 1, ["error: it failed [red]"]),
        (Interrupted("saved", 15), 143, ["saved"]),
        (KeyboardInterrupt(), 130, ["interrupted"]),
        (ValueError("odd"), 1, ["error: ValueError: odd", "--debug"]),
    ],
)
def test_exceptions_become_exit_codes(
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    error: BaseException,
    code: int,
    words: list[str],
) -> None:
    from flow_factory.cli.errors import guarded

    monkeypatch.delenv("FLOW_FACTORY_DEBUG", raising=False)

    @guarded
    def command() -> None:
        raise error

    with pytest.raises(SystemExit) as caught:
        command()
    assert caught.value.code == code
    captured = capsys.readouterr()
    assert captured.out == "" and "Traceback" not in captured.err
    for word in words:
        assert word in captured.err


def test_train_checks_files_and_then_launches(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from flow_factory import launch as launch_module
    from flow_factory.cli.train import train

    monkeypatch.chdir(project)
    calls: list[object] = []
    monkeypatch.setattr(launch_module, "launch", lambda *arguments: calls.append(arguments))
    train("run.yaml", ["train.seed=3"], debug=False)
    assert calls == [("run.yaml", ["train.seed=3"], False)]


def test_static_checks_report_everything_at_once(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "data" / "train.txt").write_text("\n \n")
    (project / "data" / "test.jsonl").write_text('{"prompt": "x"}\n{"prompt": \n')
    with pytest.raises(ConfigError) as caught:
        in_project(
            project,
            monkeypatch,
            "model.model_name_or_path=./gone",
            "rewards.reward_model=brightnes",
            "train.resume=atuo",
            "train.advantage_aggregation=no_such_module.f",
        )
    text = str(caught.value)
    for words in (
        "data.dataset_dir (run.yaml:3): prompt file data/train.txt holds no prompts",
        "data/test.jsonl:2",
        "'./gone' does not exist",
        "Did you mean 'brightness'?",
        "Did you mean auto?",
        "no module 'no_such_module'",
    ):
        assert words in text
    assert len(caught.value.problems) == 6


def test_what_a_run_would_write_is_checked_too(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The run's name, its folders, its tracker and an estimator that is no function, without creating anything."""
    (project / "file").write_text("")
    (project / "estimators.py").write_text("VALUE = 3\n")
    monkeypatch.syspath_prepend(project)
    monkeypatch.setitem(BACKENDS, "wandb", ("no_such_package_here", "pip install it"))
    with pytest.raises(ConfigError) as caught:
        in_project(
            project,
            monkeypatch,
            "log.run_name=a/b",
            "log.save_dir=file/runs",
            "data.cache_dir=file",
            "log.logging_backend=wandb",
            "train.advantage_aggregation=estimators.VALUE",
        )
    text = str(caught.value)
    for words in ("'a/b'", "log.save_dir", "data.cache_dir", "'no_such_package_here'", "is 3, not a function"):
        assert words in text
    assert len(caught.value.problems) == 5
    in_project(project, monkeypatch, "log.save_dir=new/runs", "data.cache_dir=new/cache")
    assert not (project / "new").exists()


def test_a_cycle_cannot_draw_more_prompts_than_there_are(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "data" / "train.txt").write_text("a\nb\nc\na\nd\n")
    with pytest.raises(ConfigError, match="draws 8 distinct prompts per cycle from dataset 'default', which has 4"):
        in_project(project, monkeypatch)
    report = in_project(project, monkeypatch, "train.unique_sample_num_per_epoch=4")
    assert "train prompts: 4 from data (train) (1 exact duplicates left out)" in report.lines
    with pytest.raises(ConfigError, match="which has 2"):
        in_project(project, monkeypatch, "train.unique_sample_num_per_epoch=4", "data.max_dataset_size=2")


def test_evaluation_without_a_split_is_a_warning(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "data" / "test.jsonl").unlink()
    assert "nothing is evaluated" in in_project(project, monkeypatch).warnings[0]
    assert in_project(project, monkeypatch, "eval.eval_freq=0").warnings == []
    with pytest.raises(ConfigError, match=r"data\.datasets\[0\]\.dataset_dir.*has no val\.txt"):
        in_project(project, monkeypatch, "data={datasets: {name: a, dataset_dir: data, eval: {split: val}}}")


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        (["train.ema_update_interval=5"], ["takes 4 optimizer steps in all", "train.ema_update_interval (5)"]),
        (["train.ema_update_interval=4"], []),
        (["train.ema_update_interval=5", "train.ema_decay=0"], []),
        (
            ["train.ema_update_interval=5", "train.max_epochs=null", "eval.eval_freq=2"],
            ["takes 4 optimizer steps before the first evaluation after the start"],
        ),
        (["train.ema_update_interval=5", "train.max_epochs=null", "eval.eval_freq=3"], []),
    ],
)
def test_an_average_that_stays_at_the_start_is_a_warning(
    project: Path, monkeypatch: pytest.MonkeyPatch, changes: list[str], words: list[str]
) -> None:
    """Evaluations of a short run would show the starting weights, and nobody would see why nothing changes."""
    warnings = in_project(project, monkeypatch, *changes).warnings
    assert len(warnings) == bool(words)
    assert all(word in warnings[0] for word in words)


def test_process_counts_under_a_launcher(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 42, static part."""
    monkeypatch.setenv("WORLD_SIZE", "8")
    assert in_project(project, monkeypatch)  # not under a launcher: some shells export WORLD_SIZE
    monkeypatch.setenv("RANK", "0")
    with pytest.raises(ConfigError, match=r"num_processes is 1 .* the launcher started 8"):
        in_project(project, monkeypatch)


def test_a_reward_by_dotted_path_is_imported(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (project / "my_rewards_for_check.py").write_text(
        "from flow_factory.rewards import PointwiseRewardModel\n"
        "class Mine(PointwiseRewardModel):\n"
        "    def score(self, samples):\n"
        "        return [0.0] * len(samples)\n"
        "class Other:\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(project))
    assert in_project(project, monkeypatch, "rewards.reward_model=my_rewards_for_check.Mine")
    with pytest.raises(ConfigError, match=r"has no 'Mime'.*Did you mean Mine"):
        in_project(project, monkeypatch, "rewards.reward_model=my_rewards_for_check.Mime")
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.reward_model.*not a reward class"):
        in_project(project, monkeypatch, "rewards.reward_model=my_rewards_for_check.Other")


def test_params_of_a_reward_are_checked_without_building_it(project: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Pitfall 40, for what is specific to one reward."""
    text = (project / "run.yaml").read_text().replace("rewards: {", "rewards:\n  {params: {nothing_such: 1}, ")
    (project / "run.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"rewards\[0\].*run\.yaml:6.*"):
        in_project(project, monkeypatch)
    with pytest.raises(ConfigError, match=r"rewards\[0\]\.params\.strct \(override.*params\.strict"):
        in_project(project, monkeypatch, "rewards={reward_model: prompt_match, params: {strct: true}}")


def test_config_show_is_a_configuration(project: Path) -> None:
    done = run("config", "show", "run.yaml", "train.seed=9", cwd=project)
    assert done.returncode == 0
    (project / "shown.yaml").write_text(done.stdout)
    assert load_config(project / "shown.yaml") == load_config(project / "run.yaml", ["train.seed=9"])


def test_config_schema_is_json() -> None:
    done = run("config", "schema")
    assert json.loads(done.stdout)["properties"]["train"]["properties"]["clip_range"]["description"]


def test_config_init_writes_once(tmp_path: Path) -> None:
    done = run("config", "init", "start.yaml", cwd=tmp_path)
    assert done.returncode == 0 and "flow-factory check start.yaml" in done.stdout
    assert load_config(tmp_path / "start.yaml").trainer_key == "grpo"
    assert yaml.safe_load(run("config", "init").stdout)["model"]["model_type"] == "sd3-5"
    assert run("config", "init", "no/such/folder.yaml", cwd=tmp_path).returncode == 2


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("trainers", "grpo"),
        (
            "models",
            "sd3-5                 StableDiffusion3Pipeline            prompt, negative_prompt [optional] -> image",
        ),
        (
            "models",
            "minimax-h3-ref2va     MiniMaxH3ModularPipeline            prompt, image [up to 9], video [up to 3]",
        ),
        ("rewards", "jpeg_compressibility"),
        ("advantages", "gdpo"),
        ("dynamics", "Flow-SDE"),
        ("prompts", "builtin/"),
        ("builtins", "builtin/"),
    ],
)
def test_lists(kind: str, name: str) -> None:
    done = run("list", kind)
    assert done.returncode == 0 and any(line.startswith(name) for line in done.stdout.split("\n"))


def test_version() -> None:
    from flow_factory import __version__

    assert run("--version").stdout.strip() == __version__


def test_base_configuration_of_these_tests_loads() -> None:
    assert load().trainer_key == "grpo"


@pytest.mark.skipif(not builtin_names("model"), reason="no embedded model in this checkout")
def test_the_starter_passes_the_check(tmp_path: Path) -> None:
    assert run("config", "init", "start.yaml", cwd=tmp_path).returncode == 0
    done = run("check", "start.yaml", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


def test_a_reward_beside_the_yaml_is_found(project: Path) -> None:
    """As the README says; the script itself, since `python -m` searches the present folder anyway."""
    (project / "my_rewards.py").write_text(
        "from flow_factory.rewards.abc import PointwiseRewardModel\n\n\n"
        "class Redness(PointwiseRewardModel):\n"
        "    def score(self, samples):\n"
        "        return [0.0 for _ in samples]\n"
    )
    script = Path(sys.executable).with_name("flow-factory")
    command = [str(script), "check", "run.yaml", "rewards.reward_model=my_rewards.Redness"]
    done = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert done.returncode == 0, done.stderr
    command[-1] = "rewards.reward_model=my_rewards.Blueness"
    done = subprocess.run(command, capture_output=True, text=True, cwd=project)
    assert done.returncode == 2 and "Blueness" in done.stderr and "Redness" in done.stderr


def test_ok_says_what_it_did_not_look_at(project: Path) -> None:
    done = run("check", "run.yaml", "model.model_name_or_path=org/model", cwd=project)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1].startswith("ok, but not looked at: the model, which is on the Hub: ")
    done = run("plan", "run.yaml", "model.model_name_or_path=org/model", cwd=project, env={"HF_HUB_OFFLINE": "1"})
    assert done.returncode == 2 and "hf download org/model --include '*.json'" in done.stderr
