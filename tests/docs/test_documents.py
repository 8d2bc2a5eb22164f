"""Every command and snippet of the README and of guidance/ is run, in order, as a reader would run it.

Commands run in this process through the same entry point as `flow-factory`; long runs are shortened by overrides, which
change how long they take and nothing else. Links and pictures must exist.
"""

from __future__ import annotations

import importlib
import os
import re
import shlex
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
DOCUMENTS = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "guidance").glob("*.md"))]
DOCUMENTS = [path for path in DOCUMENTS if path.exists()]
_FENCE = re.compile(r"^```(\w+)\n(.*?)^```", re.MULTILINE | re.DOTALL)

# Run by .ci/run itself, before and beside this test.
_DONE_BY_CI = ("pip install", "pytest", "bash .ci/run", "ruff ", "pyright", "lint-imports", "git clone", "cd ")
_SHORT = {
    "train": [
        "train.max_epochs=1",
        "train.unique_sample_num_per_epoch=2",
        "train.gradient_step_per_epoch=1",
        "eval.num_inference_steps=1",
        "data.datasets[0].eval.max_dataset_size=4",
    ],
    "train on stored examples": ["train.max_steps=2", "train.per_device_batch_size=1", "eval.eval_freq=0"],
    "data make-preferences": ["--limit=8"],
}


@dataclass(frozen=True)
class Snippet:
    """One fenced block.

    Attributes:
        document: The file it is in.
        line: Line of its fence.
        language: What follows the fence.
        text: Its content.
    """

    document: Path
    line: int
    language: str
    text: str

    @property
    def place(self) -> str:
        """`README.md:12`."""
        return f"{self.document.relative_to(ROOT)}:{self.line}"


def snippets(document: Path) -> list[Snippet]:
    text = document.read_text()
    return [
        Snippet(document, text[: match.start()].count("\n") + 1, match[1], match[2]) for match in _FENCE.finditer(text)
    ]


def commands(snippet: Snippet) -> list[str]:
    joined = snippet.text.replace("\\\n", " ")
    lines = [line.split(" #")[0].strip() for line in joined.splitlines()]
    return [line for line in lines if line and not line.startswith("#")]


@pytest.fixture
def reader(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder like a clone: the examples are there, and what is written stays here."""
    for name in ("examples", "scripts", "guidance"):
        if (ROOT / name).exists():
            (tmp_path / name).symlink_to(ROOT / name)
    _write_own_data(tmp_path)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("COLUMNS", "120")
    return tmp_path


def _write_own_data(folder: Path) -> None:
    """What a reader of guidance/datasets.md has: captioned pictures, and a table of pairs."""
    import io

    import pyarrow
    import pyarrow.parquet
    from PIL import Image

    (folder / "my_pictures").mkdir()
    pictures = []
    for shade in (0, 120, 240):
        Image.new("RGB", (64, 64), (shade, 40, 40)).save(folder / "my_pictures" / f"{shade}.png")
        (folder / "my_pictures" / f"{shade}.txt").write_text(f"a shade of red, {shade}")
        buffer = io.BytesIO()
        Image.new("RGB", (64, 64), (shade, 0, 0)).save(buffer, "JPEG")
        pictures.append(buffer.getvalue())
    table = {"caption": ["red", "dark red", "a tie"], "jpg_0": pictures, "jpg_1": pictures[::-1]}
    pyarrow.parquet.write_table(pyarrow.table({**table, "label_0": [0.0, 1.0, 0.5]}), folder / "pairs.parquet")


def run_command(command: str, place: str) -> None:
    from flow_factory.cli.app import main

    if command.startswith(_DONE_BY_CI):
        return
    words = shlex.split(command)
    assert words[0] == "flow-factory", f"{place}: no test knows how to run {command!r}"
    arguments = words[1:]
    if arguments[0] == "train":
        stored = any(f"/{name}/" in arguments[1] for name in ("sft", "offline_dpo"))
        arguments += _SHORT["train on stored examples" if stored else "train"]
    arguments += _SHORT.get(" ".join(arguments[:2]), [])
    old, sys.argv = sys.argv, ["flow-factory", *arguments]
    try:
        code = main()
    except SystemExit as stop:
        code = stop.code
    finally:
        sys.argv = old
    assert code in (0, None), f"{place}: {command!r} ended with exit code {code}"


def run_python(snippet: Snippet, folder: Path) -> None:
    first = snippet.text.splitlines()[0]
    if named := re.match(r"# (\w+)\.py\b", first):
        (folder / f"{named[1]}.py").write_text(snippet.text)
        sys.modules.pop(named[1], None)
        importlib.import_module(named[1])
        return
    # The runs above were shortened to one cycle.
    text = re.sub(r"checkpoint-\d{6}", "checkpoint-000001", snippet.text)
    exec(compile(text, snippet.place, "exec"), {"__name__": "__document__"})


def check_yaml(snippet: Snippet, folder: Path) -> None:
    """A named file is written for the commands after it; a fragment loads on top of the tiny example."""
    from omegaconf import OmegaConf

    from flow_factory.hparams import load_config_from_mapping

    if named := re.match(r"# (\w+\.yaml)$", snippet.text.splitlines()[0]):
        (folder / named[1]).write_text(snippet.text)
        return
    given = OmegaConf.create(snippet.text)
    whole = OmegaConf.load(folder / "examples/grpo/lora/sd3_5/tiny.yaml")
    if "trainer_type" in given.get("train", {}):
        # Fields of the example's own trainer do not belong to another.
        whole.train = {k: v for k, v in whole.train.items() if k in ("resolution", "max_sequence_length")}
        whole.train.update(max_epochs=1, group_size=2, per_device_batch_size=4, unique_sample_num_per_epoch=4)
        whole.eval.eval_freq = 0
    mapping = OmegaConf.to_container(OmegaConf.merge(whole, given), resolve=True)
    config = load_config_from_mapping(mapping, origin=snippet.place)  # type: ignore[arg-type]
    if "trainer_type" in given.get("train", {}):
        from flow_factory import build_trainer

        assert build_trainer(config).start().counts["cycles"] == 1


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_snippets_run_in_order(document: Path, reader: Path) -> None:
    for snippet in snippets(document):
        if snippet.language == "bash":
            for command in commands(snippet):
                run_command(command, snippet.place)
        elif snippet.language == "python":
            run_python(snippet, reader)
        elif snippet.language == "yaml":
            check_yaml(snippet, reader)
        else:
            assert snippet.language in ("text", "json"), f"{snippet.place}: unknown language {snippet.language!r}"


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda p: p.name)
def test_links_and_pictures_exist(document: Path) -> None:
    text = document.read_text()
    for target in re.findall(r"\]\(([^)#\s]+)\)", text):
        if not target.startswith(("http://", "https://")):
            assert (document.parent / target).exists(), f"{document.name}: {target} does not exist"


def test_documents_name_no_machine(document_names: tuple[str, ...] = ("/root", "/home/", "/work/", "/tmp/")) -> None:
    for document in DOCUMENTS:
        text = document.read_text()
        for name in document_names:
            assert name not in text, f"{document.name} names {name}"


def test_readme_is_the_front_door() -> None:
    first_screen = "\n".join((ROOT / "README.md").read_text().splitlines()[:24])
    assert "images/report.png" in first_screen and "pip install -e" in first_screen
    assert "flow-factory train" in first_screen
    text = (ROOT / "README.md").read_text()
    for command in ("report", "sample", "eval", "export", "doctor", "check", "config init"):
        assert f"flow-factory {command}" in text, command
    assert os.access(ROOT / ".ci" / "run", os.X_OK)


@pytest.mark.parametrize("script", ["write_configuration.py", "write_models.py"])
def test_generated_tables_are_up_to_date(script: str) -> None:
    import subprocess

    command = [sys.executable, str(ROOT / "scripts" / script), "--check"]
    assert subprocess.run(command).returncode == 0, f"run: python scripts/{script}"
