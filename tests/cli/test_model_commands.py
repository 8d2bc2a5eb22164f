"""`sample`, `eval` and `export` on a run, as a user starts them; and everything that can be given wrong."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
from PIL import Image
from safetensors.torch import load_file

from flow_factory.rewards.abc import PointwiseRewardModel
from flow_factory.samples import BaseSample
from flow_factory.tracking.metrics import read_metrics
from tests.cli.invoke import Done, invoke
from tests.trainers.runs import ALPHA, RANK, train_run

Command = Callable[..., Done]


class Never(PointwiseRewardModel):
    """Fails for everything."""

    required_fields = ("image",)

    def score(self, samples: Any) -> list[float | None]:
        return [None for _ in samples]


class OnlyLong(PointwiseRewardModel):
    """Fails for prompts of one word, and gives the others 1."""

    required_fields = ("image",)

    def score(self, samples: list[BaseSample]) -> list[float | None]:
        return [1.0 if "two" in s.prompt or "star" in s.prompt else None for s in samples]


@pytest.fixture(scope="module")
def original(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_run(tiny_sd3_dir, tmp_path_factory.mktemp("commands"))[0]


@pytest.fixture(scope="module")
def full(tiny_sd3_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes = {"model.finetune_type": "full", "train.max_epochs": 1, "log.save_model_only": True}
    return train_run(tiny_sd3_dir, tmp_path_factory.mktemp("commands-full"), changes)[0]


@pytest.fixture
def run(original: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A copy of the run, in the present folder."""
    monkeypatch.chdir(tmp_path)
    return Path(shutil.copytree(original, tmp_path / "run"))


@pytest.fixture
def command(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> Command:
    return lambda *arguments: invoke(capsys, monkeypatch, *arguments)


def test_sample_writes_each_picture_a_sheet_and_how_to_make_them_again(run: Path, command: Command) -> None:
    done = command("sample", run, "--compare", "--num", 4)
    assert done.code == 0, done.err
    assert "checkpoint-000002, averaged weights" in done.out and "wrote 8 pictures" in done.out
    folder = Path("samples-run")
    record = json.loads((folder / "samples.json").read_text())
    assert [(p["row"], p["member"], p["weights"]) for p in record["samples"]] == [
        *[(row, member, "base") for row, member in ((0, 0), (0, 1), (1, 0), (2, 0))],
        *[(row, member, "trained") for row, member in ((0, 0), (0, 1), (1, 0), (2, 0))],
    ]
    pictures = [numpy.asarray(Image.open(folder / p["file"])) for p in record["samples"]]
    assert all(p.shape == (32, 32, 3) for p in pictures)
    assert len({p["torch_seed"] for p in record["samples"]}) == 4
    for before, after in zip(pictures[:4], pictures[4:], strict=True):
        assert not numpy.array_equal(before, after)
    sheet = numpy.asarray(Image.open(folder / "grid.png"))
    # Both rows of the sheet hold the pictures, enlarged by a whole factor of four.
    enlarged = pictures[0].repeat(4, 0).repeat(4, 1)
    windows = numpy.lib.stride_tricks.sliding_window_view(sheet, enlarged.shape)[:40, :120, 0]
    assert (windows == enlarged).all(axis=(-1, -2, -3)).any()

    again = command("sample", run, "--compare", "--num", 4)
    assert "samples-run-2" in again.out
    for entry in record["samples"]:
        assert (Path("samples-run-2") / entry["file"]).read_bytes() == (folder / entry["file"]).read_bytes()


def test_sample_without_the_lora_is_the_base_model(run: Path, command: Command) -> None:
    assert command("sample", run, "--without-lora", "--output", "a", "--prompt", "sky", "--seed", 5).code == 0
    assert command("sample", run / "config.yaml", "--output", "b", "--prompt", "sky", "--seed", 5).code == 0
    assert command("sample", run, "--output", "c", "--prompt", "sky", "--seed", 5).code == 0
    assert command("sample", run, "--output", "d", "--prompt", "sky", "--seed", 5, "--checkpoint", 1).code == 0
    found = [(Path(folder) / "000-sky.png").read_bytes() for folder in "abcd"]
    assert found[0] == found[1] and len(set(found)) == 3


def test_eval_gives_the_numbers_of_training_with_intervals(run: Path, command: Command) -> None:
    done = command("eval", run)
    assert done.code == 0, done.err
    record = json.loads(Path("eval-run.json").read_text())
    toy = record["datasets"]["toy"]
    logged = read_metrics(run, kind="eval")[-1]["toy/red"]
    assert toy["trained"]["red"]["mean"] == pytest.approx(logged, abs=1e-5)
    assert toy["prompts"] == 3 and toy["trained"]["red"]["units"] == 3 and len(toy["samples"]) == 3
    low, high = toy["trained"]["red"]["low"], toy["trained"]["red"]["high"]
    scores = [s["trained"]["red"] for s in toy["samples"]]
    assert min(scores) <= low <= toy["trained"]["red"]["mean"] <= high <= max(scores)
    assert "bootstrap over prompts" in record["intervals"] and "picture/diversity" not in toy["trained"]
    assert f"{toy['trained']['red']['mean']:.4f} [{low:.3f}, {high:.3f}]" in done.out


def test_eval_compares_with_the_base_from_the_same_noise(run: Path, command: Command) -> None:
    done = command("eval", run, "--compare", "--samples-per-prompt", 2, "--split", "train", "--output", "r.json")
    assert done.code == 0, done.err
    toy = json.loads(Path("r.json").read_text())["datasets"]["toy"]
    assert toy["split"] == "train" and toy["prompts"] == 8 and len(toy["samples"]) == 16
    assert toy["trained"]["red"]["values"] == 16 and toy["trained"]["red"]["units"] == 8
    for name in ("red", "picture/brightness", "picture/diversity"):
        differences = [s["trained"][name] - s["base"][name] for s in toy["samples"]]
        mean = sum(differences) / 16
        assert toy["difference"][name]["mean"] == pytest.approx(mean, abs=1e-12)
        assert toy["difference"][name]["mean"] == pytest.approx(
            toy["trained"][name]["mean"] - toy["base"][name]["mean"], abs=1e-12
        )
    # Paired: narrower than either mean, because the weights moved little and the noise is the same.
    width = {key: toy[key]["red"]["high"] - toy[key]["red"]["low"] for key in ("base", "difference")}
    assert 0 < width["difference"] < width["base"]
    # Member 0 is what one sample per prompt gives.
    single = command("eval", run, "--split", "train", "--output", "one.json")
    assert single.code == 0
    alone = json.loads(Path("one.json").read_text())["datasets"]["toy"]["samples"]
    assert [s["trained"]["red"] for s in toy["samples"] if s["member"] == 0] == [s["trained"]["red"] for s in alone]
    assert done.out.count("difference") >= 1 and "picture/" not in done.out


def test_a_configuration_is_evaluated_as_the_base(run: Path, command: Command) -> None:
    assert command("eval", run / "config.yaml", "--output", "base.json").code == 0
    assert command("eval", run, "--compare", "--output", "both.json").code == 0
    base, both = (json.loads(Path(f"{n}.json").read_text())["datasets"]["toy"] for n in ("base", "both"))
    assert base["base"]["red"] == both["base"]["red"]
    first = read_metrics(run, kind="eval")[0]["toy/red"]  # before the first update
    assert base["base"]["red"]["mean"] == pytest.approx(first, abs=1e-6)


def test_the_three_layouts(run: Path, command: Command) -> None:
    """Pitfalls 27, 54: no `.default`, no PEFT prefix, alpha folded; ComfyUI reads SD3 under diffusers' own names."""
    for layout in ("diffusers", "comfyui", "merged"):
        done = command("export", run, "--format", layout, "--live")
        assert done.code == 0 and f"run-{layout}" in done.out, done.err
        card = (Path(f"run-{layout}") / "README.md").read_text()
        assert "fine-tuned with grpo" in card and "2 cycles" in card and "| toy/red |" in card
        assert "made with the averaged weights, not with the live ones of this export" in card
        assert str(run.parent) not in card and "/tmp" not in card  # names no folder of this machine
    lora = load_file("run-diffusers/pytorch_lora_weights.safetensors")
    saved = run / "checkpoints" / "checkpoint-000002"
    raw = load_file(saved / "weights.safetensors")
    for key, value in lora.items():
        assert re.fullmatch(
            r"transformer\.transformer_blocks\.\d+\.(attn2?|ff(_context)?)\.[a-z0-9_.]+\.lora_[AB]\.weight", key
        )
        module, matrix = key.removesuffix(".weight").rsplit(".", 1)
        own = next(v for k, v in raw.items() if k.startswith("roles") and f"{module}.{matrix}.style.weight" in k)
        assert torch.equal(value, own * (ALPHA / RANK) if matrix == "lora_B" else own)
    comfy = load_file("run-comfyui/run.safetensors")
    assert comfy.keys() == lora.keys() and all(torch.equal(comfy[k], lora[k]) for k in lora)
    # Every module of the committed list of an SD3.5 transformer with dual attention, and no other.
    listed = (Path(__file__).parents[1] / "parity" / "lora_keys" / "sd3-5.txt").read_text().split()
    assert {re.sub(r"\.\d+\.", ".N.", key.split(".lora_")[0], count=1) for key in comfy} == {
        re.sub(r"\.\d+\.", ".N.", key, count=1) for key in listed
    }
    assert command("export", run, "--live", "--output", "run-diffusers", "--force").code == 0


def test_the_card_of_a_lora_tells_how_to_load_it(run: Path, tiny_sd3_dir: Path, command: Command) -> None:
    """Its snippet is run, from the folder itself."""
    assert command("export", run, "--output", "lora").code == 0
    card = Path("lora/README.md").read_text()
    assert "live ones" not in card
    code = re.findall(r"```python\n(.*?)```", card, re.DOTALL)[0]
    assert f"path/to/{tiny_sd3_dir.name}" in code
    code = code.replace(f"path/to/{tiny_sd3_dir.name}", str(tiny_sd3_dir)).replace('"."', '"lora"')
    exec(compile(code, "README.md", "exec"), {})
    assert Image.open("picture.png").size == (32, 32)


def test_dtype_of_a_merged_pipeline(run: Path, command: Command) -> None:
    assert command("export", run, "--format", "merged", "--dtype", "bf16", "--output", "half").code == 0
    assert command("export", run, "--format", "merged", "--output", "same").code == 0
    half, same = (load_file(f"{n}/transformer/diffusion_pytorch_model.safetensors") for n in ("half", "same"))
    assert {v.dtype for v in half.values()} == {torch.bfloat16} and {v.dtype for v in same.values()} == {torch.float32}
    assert all(torch.equal(half[k], same[k].bfloat16()) for k in same)  # rounded once, after the merge


def test_weights_alone_are_enough(full: Path, tmp_path: Path, command: Command) -> None:
    """log.save_model_only: no state to resume from, but the weights of every checkpoint."""
    assert not (full / "checkpoints" / "checkpoint-000001" / "weights.safetensors").exists()
    done = command("export", full, "--output", tmp_path / "pipeline")
    assert done.code == 0, done.err
    assert (tmp_path / "pipeline" / "model_index.json").is_file()
    ours = load_file(tmp_path / "pipeline" / "transformer" / "diffusion_pytorch_model.safetensors")
    saved = load_file(
        full / "checkpoints" / "checkpoint-000001" / "full_ema" / "transformer" / "diffusion_pytorch_model.safetensors"
    )
    assert ours.keys() == saved.keys() and all(torch.equal(ours[k], saved[k]) for k in ours)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("export", "{run}", "--checkpoint", "9"), "no checkpoint 9; there are 1, 2"),
        (("export", "{run}/config.yaml"), "is a file; give the folder of a run"),
        (("export", "{run}/checkpoints"), "is not the folder of a run"),
        (("export", "{run}", "--dtype", "bf16"), "--dtype is for whole pipelines"),
        (("export", "{run}", "--format", "merged", "--dtype", "int8"), "'int8' is not one of 'fp32', 'bf16', 'fp16'"),
        (("export", "{run}", "--format", "gguf"), "gguf"),
        (("export", "{run}", "--output", "{run}"), "exists and is not written over"),
        (("export", "{run}", "--output", "{run}", "--force"), "is no result of this command"),
        (("export", "{full}", "--format", "comfyui"), "this run trained all weights"),
        (("sample", "{run}", "--prompt", ""), "--prompt '' is empty"),
        (("sample", "{run}", "--prompts", "none.txt"), "none.txt"),
        (("sample", "{run}", "--num", "0"), "'--num'"),
        (("sample", "{run}/config.yaml", "--compare"), "has no trained weights to compare with"),
        (("sample", "{run}", "--compare", "--without-lora"), "--compare shows both"),
        (("sample", "{run}", "eval.resolution=33"), "eval.resolution"),
        (("sample", "{run}", "eval.eval_freq=0", "eval.resolution=33"), "eval.resolution"),
        (("eval", "{run}", "eval.eval_freq=0", "eval.resolution=33"), "eval.resolution"),
        (("sample", "gone"), "does not exist"),
        (("eval", "{run}", "--dataset", "other"), "--dataset 'other': the datasets are toy"),
        (("eval", "{run}", "--split", "validation"), "validation"),
        (("eval", "{run}/config.yaml", "--compare"), "has no trained weights to compare with"),
        (("eval", "{run}", "data.datasets[0].eval.enabled=false"), "there is no dataset to evaluate"),
        (("eval", "{run}", "model.model_name_or_path=./gone"), "'./gone' does not exist"),
        (("eval", "{run}", "--output", "."), "is a folder"),
    ],
)
def test_wrong_input_exits_with_2_and_changes_nothing(
    run: Path, full: Path, command: Command, arguments: tuple[str, ...], message: str
) -> None:
    before = sorted(Path.cwd().rglob("*"))
    done = command(*(a.format(run=run, full=full) for a in arguments))
    assert done.code == 2, (done.out, done.err)
    assert message in " ".join(done.err.split()), done.err
    assert sorted(Path.cwd().rglob("*")) == before


def test_wrong_input_is_found_before_anything_heavy_loads(run: Path, full: Path) -> None:
    """One process for all: had one of them imported torch, the last line would say so."""
    code = """
import sys
from flow_factory.cli.app import main
for arguments in {commands!r}:
    sys.argv = ["flow-factory", *arguments]
    try:
        main()
    except SystemExit as stop:
        assert stop.code == 2, (arguments, stop.code)
print("HEAVY", sorted({{"torch", "diffusers", "transformers", "numpy"}} & set(sys.modules)))
"""
    (run / "checkpoints" / "checkpoint-000002" / "lora_ema" / "pytorch_lora_weights.safetensors").write_bytes(b"x")
    commands = [
        ["export", str(run)],
        ["export", str(run), "--checkpoint", "5"],
        ["export", str(run), "--live", "--output", str(run)],
        ["export", str(full), "--format", "comfyui"],
        ["sample", str(run), "--live", "--prompt", ""],
        ["sample", str(run), "--live", "model.model_name_or_path=./gone"],
        ["eval", str(run), "--live", "--dataset", "x"],
        ["eval", str(run)],
    ]
    done = subprocess.run([sys.executable, "-c", code.format(commands=commands)], capture_output=True, text=True)
    assert done.stdout.strip().split("\n")[-1] == "HEAVY []", (done.stdout, done.stderr)


def test_eval_with_nothing_to_score_with(run: Path, tiny_sd3_dir: Path, tmp_path: Path, command: Command) -> None:
    text = (run / "config.yaml").read_text()
    cut = re.sub(r"(?ms)^rewards:.*?^(?=\w)", "", text)
    assert cut != text
    (run / "config.yaml").write_text(
        re.sub(r"(?ms)^train:.*?^(?=\w)", "train: {trainer_type: sft, max_epochs: 1, resolution: 32}\n", cut)
    )
    done = command("eval", run)
    assert done.code == 2 and "reward" in done.err, (done.out, done.err)


def test_a_secret_that_the_run_does_not_keep(run: Path, command: Command) -> None:
    text = (run / "config.yaml").read_text()
    assert "params: {}" in text
    (run / "config.yaml").write_text(text.replace("params: {}", 'params: {api_key: "<redacted>"}'))
    done = command("eval", run)
    assert done.code == 2 and "rewards[0].params.api_key is not kept" in done.err, done.err


def test_a_reward_that_fails_for_everything(run: Path, command: Command) -> None:
    done = command("eval", run, f"rewards[0].reward_model={__name__}.Never", "--output", "x.json")
    assert done.code == 1 and "reward 'red' failed on all 3 samples" in done.err and not Path("x.json").exists()


def test_scores_that_failed_are_left_out_and_counted(run: Path, command: Command) -> None:
    done = command("eval", run, f"rewards[0].reward_model={__name__}.OnlyLong", "--output", "x.json")
    assert done.code == 0 and "scoring failed on 1 samples" in done.err, done.err
    red = json.loads(Path("x.json").read_text())["datasets"]["toy"]["trained"]["red"]
    assert (red["mean"], red["failed"], red["values"], red["units"]) == (1.0, 1, 2, 2)


def test_in_one_process_what_was_trained_with_several(run: Path, command: Command) -> None:
    done = command("eval", run, "num_processes=2", "--output", "x.json")
    assert done.code == 0 and "in one process" in done.out, done.err


def test_two_processes_give_the_scores_of_one(run: Path, command: Command) -> None:
    """Pitfall 19: three prompts on two processes are three scores, not four."""
    started = ["-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2"]
    arguments = ["-m", "flow_factory", "eval", str(run), "--samples-per-prompt", "2", "--output", "two.json"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(Path(__file__).resolve().parents[2])}
    done = subprocess.run(
        [sys.executable, *started, *arguments], env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("wrote two.json") == 1
    assert command("eval", run, "--samples-per-prompt", 2, "--output", "one.json").code == 0
    one, two = (json.loads(Path(f"{n}.json").read_text())["datasets"]["toy"] for n in ("one", "two"))
    assert len(two["samples"]) == 6 and two["trained"]["red"]["values"] == 6
    for mine, theirs in zip(one["samples"], two["samples"], strict=True):
        assert (mine["row"], mine["member"], mine["prompt"]) == (theirs["row"], theirs["member"], theirs["prompt"])
        assert mine["trained"] == pytest.approx(theirs["trained"], abs=1e-4)


def test_an_average_that_was_not_updated_is_said(run: Path, command: Command) -> None:
    """Otherwise the pictures are those of the base model, and nobody sees why."""
    said = "was not updated yet"
    assert said not in command("sample", run, "--num", 1, "--output", "one").err
    state = run / "checkpoints" / "checkpoint-000002" / "trainer.json"
    held = json.loads(state.read_text())
    assert held["tree"]["ema"]["updates"] > 0
    held["tree"]["ema"]["updates"] = 0
    state.write_text(json.dumps(held))
    assert said in command("sample", run, "--num", 1, "--output", "two").err
    assert said not in command("sample", run, "--num", 1, "--live", "--output", "three").err
