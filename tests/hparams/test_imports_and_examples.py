"""Nothing heavy is imported for a configuration, and every shipped example loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flow_factory.contracts import MediaSlot, Modality
from flow_factory.hparams import load_config

HEAVY = ("torch", "numpy", "datasets", "transformers", "diffusers", "accelerate", "peft")
ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("**/*.yaml"))


@pytest.mark.parametrize(
    "code",
    [
        "import flow_factory; flow_factory.__version__",
        "import flow_factory.hparams",
        "from flow_factory import load_config",
        "import flow_factory.hparams.schema as s; s.config_schema()",
        "import flow_factory.hparams.starter as s; s.starter_config()",
        "from flow_factory.hparams.local_model import inspect_local_model",
    ],
)
def test_configuration_imports_nothing_heavy(code: str) -> None:
    check = f"{code}\nimport sys\nprint(sorted(set({HEAVY!r}) & set(sys.modules)))"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


def test_lazy_names_exist() -> None:
    import flow_factory

    assert flow_factory.load_config is load_config
    assert {"load_config", "build_trainer", "__version__"} <= set(dir(flow_factory))
    with pytest.raises(AttributeError, match="has no attribute 'nothing'"):
        _ = flow_factory.nothing


@pytest.mark.parametrize("path", EXAMPLES, ids=[str(path.relative_to(ROOT)) for path in EXAMPLES])
def test_every_example_loads(path: Path) -> None:
    """Pitfall 47: shipped examples that do not parse."""
    config = load_config(path)
    assert load_config(path, ["train.seed=1"]).training_args.seed == 1
    assert config.log_args.save_dir


def write_prompts(folder: Path, slots: list[MediaSlot]) -> None:
    """A dataset of prompts that fills the slots, all with the same media."""
    from tests.parity.media import clip, picture, save

    made = {Modality.IMAGE: picture(0), Modality.VIDEO: clip(0)}
    files = {
        slot.name: save(made[slot.modality], folder / f"{slot.modality.value}s" / "any").name
        for slot in slots
        if slot.modality is not Modality.TEXT
    }
    rows = [files | {"prompt": f"prompt {number}"} for number in range(64)]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


GENERATED = [path for path in EXAMPLES if not {"sft", "offline_dpo"} & set(path.parts)]


@pytest.mark.parametrize("path", GENERATED, ids=[str(path.relative_to(ROOT)) for path in GENERATED])
def test_every_example_with_prompts_passes_check(path: Path, tmp_path: Path) -> None:
    """What `flow-factory check` does, apart from reading the command line; stored examples are the user's own."""
    from flow_factory.cli.static_checks import check_statically

    config = load_config(path)
    (source,) = config.data_args.sources()
    if not source.dataset_dir.startswith("builtin/"):
        # Prompts with media that nothing here has: as the example's header says, a row names what the model needs.
        io = config.spec.io
        write_prompts(tmp_path, [slot for slot in io.inputs if slot.required or slot.name in io.one_of[:1]])
        config = load_config(path, [f"data.datasets.0.dataset_dir={tmp_path}"])
    report = check_statically(config)
    assert any(line.startswith("train prompts") for line in report.lines)


OWN_DATA = [path for path in GENERATED if "dataset_dir: builtin/" not in path.read_text()]


@pytest.mark.parametrize("path", OWN_DATA, ids=[str(path.relative_to(ROOT)) for path in OWN_DATA])
def test_examples_that_need_data_say_which(path: Path, tmp_path: Path) -> None:
    """The header names the folder of the configuration, and its row is one that the model takes."""
    from flow_factory.data_utils.prompt_files import read_prompts

    config, header = load_config(path), path.read_text().split("\n\n")[0]
    (source,) = config.data_args.sources()
    assert f"Needs data of your own: {source.dataset_dir} with train.jsonl and test.jsonl" in header
    (line,) = (line.removeprefix("#").strip() for line in header.splitlines() if line.startswith("#   {"))
    (tmp_path / "train.jsonl").write_text(line + "\n")
    (row,) = read_prompts(tmp_path / "train.jsonl", config.spec.io)
    assert row.media and not row.metadata


def test_a_missing_folder_is_reported_once_under_the_key_in_use() -> None:
    """It would hold two splits; and the example gives it in `data.datasets`."""
    from flow_factory.cli.static_checks import check_statically
    from flow_factory.hparams import ConfigError

    with pytest.raises(ConfigError) as caught:
        check_statically(load_config(OWN_DATA[0]))
    (problem,) = caught.value.problems
    assert problem.path == ("data", "datasets", 0, "dataset_dir")
    assert "does not exist" in problem.message and "data.dataset_dir" not in problem.message
