"""What the tests of `flow-factory data` share: running it, and reading what it made."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
from PIL import Image
from typer.testing import CliRunner, Result

from flow_factory.cli.app import app
from flow_factory.data_utils.offline_files import OfflineExample, scan_offline_dataset
from flow_factory.hparams import DatasetArguments, get_model_spec

SD3 = get_model_spec("sd3-5").io


def flow_factory(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def examples(folder: Path) -> list[OfflineExample]:
    """The examples of a dataset that has nothing wrong with it."""
    scan = scan_offline_dataset(DatasetArguments(dataset_dir=str(folder)), "train", io=SD3)
    assert scan.problems == []
    return scan.examples


def encoded(shade: int, size: tuple[int, int] = (24, 24), kind: str = "PNG") -> bytes:
    buffer = io.BytesIO()
    Image.new("RGB", (size[1], size[0]), (shade, 0, 0)).save(buffer, kind)
    return buffer.getvalue()


def error_of(result: Result) -> str:
    assert result.exit_code == 2, result.output
    return " ".join(result.output.split())


def shade(example: OfflineExample, arm: str) -> int:
    return int(np.asarray(Image.open(example.arms[arm][0].path))[0, 0, 0])
