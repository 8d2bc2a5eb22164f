"""Writes the committed names of exported LoRA weights: `python -m tests.parity.write_lora_keys CASE ...`."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

from safetensors.torch import load_file

from tests.parity.bench import Bench
from tests.parity.cases import all_cases
from tests.parity.test_weights import KEYS, comfyui_list


def main(names: list[str]) -> None:
    """One module per line; and one key per line of ComfyUI's names, after their source."""
    for case in all_cases():
        if case.name in names:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(case, Path(folder) / "pipeline")
                state = load_file(bench.stirred.export_lora(Path(folder) / "lora"))
                adapter_class = type(bench.stirred)
            modules = sorted({key.split(".lora_")[0] for key in state})
            KEYS.mkdir(exist_ok=True)
            (KEYS / f"{case.name}.txt").write_text("\n".join(modules) + "\n")
            if adapter_class.comfyui is not None:
                lines = comfyui_list(adapter_class.comfyui.source, adapter_class.comfyui_lora(state))
                (KEYS / f"{case.name}.comfyui.txt").write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main(sys.argv[1:])
