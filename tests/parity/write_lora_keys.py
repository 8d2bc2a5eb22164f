"""Writes the committed names of exported LoRA weights: `python -m tests.parity.write_lora_keys CASE ...`."""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from safetensors.torch import load_file

from tests.parity.bench import Bench
from tests.parity.cases import all_cases
from tests.parity.test_weights import KEYS, comfyui_list


def main(names: list[str]) -> None:
    """One module per line; and one key per line of ComfyUI's names, after their source."""
    cases = all_cases()
    known = [case.name for case in cases]
    if not names or set(names) - set(known):
        unknown = " ".join(sorted(set(names) - set(known)))
        sys.exit(f"{unknown or 'Nothing'} is not the name of a case; there are {', '.join(known)}.")
    for case in cases:
        if case.name in names:
            with tempfile.TemporaryDirectory() as folder:
                bench = Bench(case, Path(folder) / "pipeline")
                state = load_file(bench.stirred.export_lora(Path(folder) / "lora"))
                adapter_class = type(bench.stirred)
            modules = sorted({key.split(".lora_")[0] for key in state})
            KEYS.mkdir(exist_ok=True)
            write(KEYS / f"{case.name}.txt", modules)
            if adapter_class.comfyui is not None:
                lines = comfyui_list(adapter_class.comfyui.source, adapter_class.comfyui_lora(state))
                write(KEYS / f"{case.name}.comfyui.txt", lines)


def write(file: Path, lines: Sequence[str]) -> None:
    file.write_text("\n".join(lines) + "\n")
    print(f"{file.relative_to(KEYS.parent)}: {len(lines)} lines, the first is {lines[0]}")


if __name__ == "__main__":
    main(sys.argv[1:])
