"""Nothing heavy is imported for a configuration, and every shipped example loads."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from flow_factory.contracts import MediaSlot, Modality
from flow_factory.hparams import load_config
from tests.parity.media import clip, picture, save

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
    """A dataset of prompts that fills the slots."""
    rows = [
        {slot.name: f"{slot.modality.value} {number}" for slot in slots} | {"prompt": f"prompt {number}"}
        for number in range(64)
    ]
    for split in ("train", "test"):
        (folder / f"{split}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    for slot in slots:
        kind = folder / f"{slot.modality.value}s"
        one = save(picture(0) if slot.modality is Modality.IMAGE else clip(0), kind / "one")
        for row in rows:
            (kind / row[slot.name]).hardlink_to(one)


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
