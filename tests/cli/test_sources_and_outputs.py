"""What CONFIG|RUN, --checkpoint and --output mean, and what is said when they mean nothing. Loads no model."""

from __future__ import annotations

import dataclasses
import os
import re
from pathlib import Path

import pytest

from flow_factory.checkpoints.checkpointer import Checkpointer
from flow_factory.checkpoints.selection import select_weights
from flow_factory.cli.evaluate import _check_secrets, choose_datasets
from flow_factory.cli.outputs import choose_file, choose_folder, write_folder
from flow_factory.cli.sources import check_model, open_source
from flow_factory.data_utils.prompt_choice import choose_prompts
from flow_factory.errors import InputError
from flow_factory.hparams import save_config
from tests.hparams.test_models_and_builtins import make_folder
from tests.trainers.support import make_config


def make_run(folder: Path, steps: tuple[int, ...] = (1, 2), kinds: tuple[str, ...] = ("lora", "lora_ema")) -> Path:
    """A run folder whose checkpoints hold made-up weights."""
    run = folder / "save" / "run"
    run.mkdir(parents=True)
    save_config(make_config(make_folder(folder / "model"), folder), run / "config.yaml")

    def export(target: Path) -> None:
        for kind in kinds:
            (target / kind).mkdir()
            (target / kind / "pytorch_lora_weights.safetensors").write_bytes(kind.encode())

    for step in steps:
        Checkpointer(run / "checkpoints").save(step, {}, {"progress": {}}, export=export)  # as log.save_model_only
    return run


def test_the_newest_checkpoint_and_its_average_are_the_default(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    found = select_weights(run)
    assert found.folder == run / "checkpoints" / "checkpoint-000002" / "lora_ema"
    assert (found.kind, found.averaged, found.step) == ("lora", True, 2)
    assert found.label == "checkpoint-000002, averaged weights"
    assert select_weights(run, averaged=False).folder.name == "lora"
    first = run / "checkpoints" / "checkpoint-000001"
    for name in ("1", "000001", "checkpoint-000001", str(first)):
        assert select_weights(run, name).checkpoint == first
    assert select_weights(make_run(tmp_path / "live", kinds=("lora",))).averaged is False


def test_a_run_a_checkpoint_in_it_and_a_configuration(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    source = open_source(str(run), ["eval.guidance_scale=2.5"])
    assert source.name == "run" and source.trained == run / "checkpoints" / "checkpoint-000002" / "lora_ema"
    assert source.config.eval_args.guidance_scale == 2.5
    inside = open_source(str(run / "checkpoints" / "checkpoint-000001"), averaged=False)
    assert inside.run == run and inside.weights is not None and inside.weights.step == 1
    config = open_source(str(run / "config.yaml"))
    assert config.trained is None and config.name == "config"
    weights = str(source.trained)
    assert open_source(str(run / "config.yaml"), [f"model.resume_path={weights}"]).trained == Path(weights)


def test_what_is_sampled_is_checked_even_if_training_never_evaluates(tmp_path: Path) -> None:
    """`eval.eval_freq: 0` lets `eval:` alone in training, but `sample` makes pictures as it says."""
    run = make_run(tmp_path)
    never = ["eval.eval_freq=0", "eval.resolution=33"]
    check_model(open_source(str(run), never).config)
    for given in (run, run / "config.yaml"):
        with pytest.raises(InputError, match=r"eval\.resolution .*must be a multiple of"):
            check_model(open_source(str(given), never, evaluates=True).config)


def test_full_weights_beneath_a_lora_belong_to_the_base(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    (tmp_path / "full" / "transformer").mkdir(parents=True)
    assert open_source(str(run / "config.yaml"), [f"model.resume_path={tmp_path / 'full'}"]).trained is None


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"checkpoint": "7"}, "has no checkpoint 7; there are 1, 2"),
        ({"checkpoint": "²"}, "--checkpoint ²: neither a number nor a checkpoint's folder; there are 1, 2"),
        ({"checkpoint": "nowhere"}, "--checkpoint nowhere: neither a number nor a checkpoint's folder; there are 1, 2"),
        ({"overrides": ["eval.guidanse_scale=1"]}, "did you mean eval.guidance_scale"),
        ({"overrides": ["model.finetune_type=full"]}, "holds lora weights, but model.finetune_type"),
    ],
)
def test_what_a_run_does_not_have(tmp_path: Path, arguments: dict[str, object], message: str) -> None:
    run = make_run(tmp_path)
    with pytest.raises(InputError, match=message):
        open_source(str(run), **arguments)  # type: ignore[arg-type]


def test_a_checkpoint_of_another_run_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its weights would be sampled with this run's configuration and called this run's."""
    run, other = make_run(tmp_path / "a"), make_run(tmp_path / "b")
    for name in (other / "checkpoints" / "checkpoint-000001", other, run, "../../../../b/save/run/checkpoints"):
        with pytest.raises(InputError, match=r"is not in .*Give a checkpoint of this run \(there are 1, 2\)"):
            select_weights(run, str(name))
    link = tmp_path / "link"  # the same run by another path is no other run
    link.symlink_to(run)
    assert select_weights(link, str(run / "checkpoints" / "checkpoint-000001")).step == 1
    monkeypatch.chdir(run / "checkpoints")
    assert select_weights(run, "./checkpoint-000001").step == 1


def test_an_average_that_the_run_does_not_keep(tmp_path: Path) -> None:
    run = make_run(tmp_path, kinds=("lora",))
    with pytest.raises(InputError, match=r"keeps no averaged weights.*Leave out --ema"):
        open_source(str(run), averaged=True)


def test_a_run_without_weights(tmp_path: Path) -> None:
    with pytest.raises(InputError, match="has saved no checkpoint yet"):
        open_source(str(make_run(tmp_path / "a", steps=())))
    with pytest.raises(InputError, match="no weights for other programs"):
        open_source(str(make_run(tmp_path / "b", kinds=())))


def test_damaged_weights_name_the_file_and_a_whole_checkpoint(tmp_path: Path) -> None:
    run = make_run(tmp_path)
    file = run / "checkpoints" / "checkpoint-000002" / "lora_ema" / "pytorch_lora_weights.safetensors"
    file.write_bytes(b"lorx_ema")
    with pytest.raises(InputError, match=r"pytorch_lora_weights.safetensors is corrupted.*--checkpoint 1"):
        open_source(str(run))
    assert open_source(str(run), averaged=False).weights is not None  # the live ones are whole
    file.unlink()
    with pytest.raises(InputError, match="is missing"):
        open_source(str(run))


def test_what_is_no_run(tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    (tmp_path / "file.yaml").write_text("x: 1\n")
    with pytest.raises(InputError, match=r"has no config\.yaml"):
        open_source(str(tmp_path / "empty"))
    with pytest.raises(InputError, match="does not exist; give a configuration file or the folder of a run"):
        open_source(str(tmp_path / "gone"))
    with pytest.raises(InputError, match="is a file; give the folder of a run"):
        open_source(str(tmp_path / "file.yaml"), need_run=True)
    run = make_run(tmp_path)
    with pytest.raises(InputError, match="choose among the weights of a run"):
        open_source(str(run / "config.yaml"), checkpoint="1")


def test_nothing_is_written_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert choose_folder(None, "samples-run", "samples.json", False) == Path("samples-run")
    Path("samples-run").mkdir()
    Path("samples-run-2").mkdir()
    assert choose_folder(None, "samples-run", "samples.json", False) == Path("samples-run-3")
    Path("eval-run.json").touch()
    assert choose_file(None, "eval-run.json", "f", False) == Path("eval-run-2.json")

    there = tmp_path.resolve() / "samples-run"
    assert choose_folder(Path("samples-run"), "", "samples.json", False) == there  # it is empty
    Path("samples-run/letter.txt").write_text("dear ...")
    with pytest.raises(InputError, match="is not written over"):
        choose_folder(Path("samples-run"), "", "samples.json", False)
    with pytest.raises(InputError, match=r"no result of this command .*--force does not replace it"):
        choose_folder(Path("samples-run"), "", "samples.json", True)
    Path("samples-run/samples.json").touch()
    assert choose_folder(Path("samples-run"), "", "samples.json", True) == there
    with pytest.raises(InputError, match="a file of that name"):
        choose_folder(Path("eval-run.json"), "", "samples.json", True)
    with pytest.raises(InputError, match="is not written over"):
        choose_file(Path("eval-run.json"), "", "f", False)
    for text in ("", "dear ...", "[]", '{"format": "g"}', '{"a": 1}'):
        Path("eval-run.json").write_text(text)
        with pytest.raises(InputError, match=r"no result of this command .*--force does not replace it"):
            choose_file(Path("eval-run.json"), "", "f", True)
    Path("eval-run.json").write_text('{"format": "f"}')
    assert choose_file(Path("eval-run.json"), "", "f", True) == Path("eval-run.json")
    with pytest.raises(InputError, match="is a folder"):
        choose_file(Path("samples-run"), "", "f", True)
    with pytest.raises(InputError, match="is not a folder"):
        choose_file(Path("eval-run.json/x.json"), "", "f", False)


def fill(folder: Path) -> None:
    (folder / "samples.json").write_text("new")


def test_what_came_while_the_result_was_made_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the look at a place and the writing there, a model is loaded and pictures are made."""
    monkeypatch.chdir(tmp_path)
    target = choose_folder(None, "samples-run", "samples.json", False)
    for other in ("samples-run", "samples-run-2"):
        Path(other).mkdir()
        Path(other, "samples.json").write_text("of another")
    for force in (False, True):
        written = write_folder(target, fill, None, "samples.json", force)
        assert written == Path("samples-run-4" if force else "samples-run-3")
        assert (written / "samples.json").read_text() == "new"
    assert Path("samples-run/samples.json").read_text() == Path("samples-run-2/samples.json").read_text()

    output = Path("mine")
    for force in (False, True):
        target = choose_folder(output, "", "samples.json", force)
        output.mkdir()
        (output / "letter.txt").write_text("dear ...")
        with pytest.raises(InputError, match="put there in the meantime"):
            write_folder(target, fill, output, "samples.json", force)
        assert [p.name for p in output.iterdir()] == ["letter.txt"]
        (output / "letter.txt").unlink()
        output.rmdir()
    assert not [p for p in tmp_path.iterdir() if p.name.startswith(".")]  # nor is anything left over


def test_an_empty_folder_and_a_former_result_are_replaced(tmp_path: Path) -> None:
    output = tmp_path / "out"
    output.mkdir()
    for force in (False, True):
        target = choose_folder(output, "", "samples.json", force)
        assert write_folder(target, fill, output, "samples.json", force) == target
        assert [p.name for p in output.iterdir()] == ["samples.json"]
        (output / "of-before.png").touch()


def test_the_present_folder_and_a_link_to_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    here = tmp_path / "here"
    here.mkdir()
    monkeypatch.chdir(here)
    for output in (Path("."), Path(".."), here, Path("../here")):
        with pytest.raises(InputError, match="is the present folder or above it"):
            choose_folder(output, "", "samples.json", True)
    (tmp_path / "real").mkdir()
    link = tmp_path / "link"
    link.symlink_to("real")
    write_folder(choose_folder(link, "", "samples.json", False), fill, link, "samples.json", False)
    assert link.is_symlink() and (tmp_path / "real" / "samples.json").read_text() == "new"


@pytest.mark.skipif(os.name == "nt" or os.geteuid() == 0, reason="root may write anywhere")
def test_a_place_that_cannot_be_written(tmp_path: Path) -> None:
    tmp_path.chmod(0o500)
    with pytest.raises(InputError, match="nothing can be written"):
        choose_folder(tmp_path / "new", "", "samples.json", False)


def test_a_dataset_that_no_reward_judges_is_refused_before_anything_is_sampled(tmp_path: Path) -> None:
    config = make_config(make_folder(tmp_path / "model"), tmp_path)
    (toy,) = config.data_args.sources()
    config.data_args.datasets = [toy, dataclasses.replace(toy, name="other", source_id=1)]
    config.reward_args.reward_configs[0].applicable_datasets = ["toy"]
    assert [d.name for d in choose_datasets(config, "toy", None)] == ["toy"]
    for name in (None, "other"):
        with pytest.raises(InputError, match=r"no reward applies to the dataset 'other'.* rewards\[i\]\.applicable"):
            choose_datasets(config, name, None)
    config.reward_args.reward_configs[0].applicable_datasets = None
    assert len(choose_datasets(config, None, None)) == 2
    config.reward_args.reward_configs[0].weight = {"toy": 1.0}
    with pytest.raises(InputError, match="no reward applies to the dataset 'other'"):
        choose_datasets(config, None, None)


@pytest.mark.parametrize(
    ("params", "place"),
    [
        ({"api_key": "<redacted>"}, "api_key"),
        ({"headers": {"Authorization": "<redacted>"}}, "headers.Authorization"),
        ({"servers": [{"url": "x"}, {"auth": {"token": "<redacted>"}}]}, "servers[1].auth.token"),
    ],
)
def test_a_secret_is_asked_for_wherever_it_was(tmp_path: Path, params: dict[str, object], place: str) -> None:
    config = make_config(make_folder(tmp_path / "model"), tmp_path)
    config.reward_args.reward_configs[0].params = {"timeout": 3, "names": ["a"]}
    _check_secrets(config)
    config.reward_args.reward_configs[0].params = params
    with pytest.raises(InputError, match=re.escape(f"give it again: rewards[0].params.{place}=...")):
        _check_secrets(config)


def test_pictures_are_dealt_evenly_to_the_prompts(tmp_path: Path) -> None:
    config = make_config(make_folder(tmp_path / "model"), tmp_path)
    three = choose_prompts(config)
    assert [(c.prompt, c.index, c.source) for c in three[:1]] == [("a red circle", 0, "toy")] and len(three) == 3
    assert [c.prompt for c in choose_prompts(config, count=2)] == ["a red circle", "two blue squares"]
    assert [(c.index, c.member) for c in choose_prompts(config, count=5)] == [(0, 0), (0, 1), (1, 0), (1, 1), (2, 0)]
    assert [(c.index, c.member) for c in choose_prompts(config, ["x"], None, 3)] == [(0, 0), (0, 1), (0, 2)]
    (tmp_path / "p.jsonl").write_text('{"prompt": "x", "negative_prompt": "blurry"}\n')
    assert choose_prompts(config, file=tmp_path / "p.jsonl")[0].negative_prompt == "blurry"


@pytest.mark.parametrize("text", ["", "  "])
def test_prompts_that_are_none(tmp_path: Path, text: str) -> None:
    config = make_config(make_folder(tmp_path / "model"), tmp_path)
    with pytest.raises(InputError, match="is empty; give a text"):
        choose_prompts(config, ["a", text])
    with pytest.raises(InputError, match="is no UTF-8"):
        choose_prompts(config, ["a\udcff"])
    with pytest.raises(InputError, match="both given"):
        choose_prompts(config, ["a"], tmp_path / "p.txt")
    with pytest.raises(InputError, match=r"p\.txt"):
        choose_prompts(config, file=tmp_path / "p.txt")
    (tmp_path / "data" / "test.txt").unlink()
    other = make_config(tmp_path / "model", tmp_path)
    (tmp_path / "data" / "test.txt").unlink()
    with pytest.raises(InputError, match="test"):
        choose_prompts(other)
