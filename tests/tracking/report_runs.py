"""Small run folders for report tests, written with what a run writes them with, and a strict reader of pages."""

from __future__ import annotations

import base64
import io
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from safetensors.torch import save_file

from flow_factory.checkpoints.values import dumps
from flow_factory.tracking.grids import save_grid
from flow_factory.tracking.metrics import MetricsWriter

PROMPTS = ("a red circle", "two blue squares")
CONFIG = """\
plugins: []
data: {datasets: [{name: toy, dataset_dir: data}]}
model: {model_type: sd3-5, model_name_or_path: model, finetune_type: lora, lora_rank: 4}
train: {trainer_type: grpo, max_epochs: 3, learning_rate: 0.001, seed: 7, resolution: [64, 64]}
eval: {resolution: [64, 64], eval_freq: 1}
rewards: [{name: red, reward_model: brightness}]
"""


def reward(cycle: int) -> float:
    """The reward of a cycle, with digits that only an exact copy has."""
    return 0.1 + cycle / 7


def make_run(
    folder: Path,
    cycles: int = 3,
    prompts: tuple[str, ...] = PROMPTS,
    config: str = CONFIG,
    status: str | None = "finished",
    scale: float = 1.0,
) -> Path:
    """A run folder of `cycles` cycles with two updates each, an evaluation and a contact sheet after every cycle."""
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(config)
    (folder / "environment.json").write_text(json.dumps({"python": "3.11.7", "world_size": 1, "devices": ["cpu"]}))
    (folder / "resolved.json").write_text(json.dumps({"trained_parameters": 128, "sigmas": [1.0, 0.5, 0.0]}))
    (folder / "overrides.json").write_text(json.dumps({"overridden": ["train.learning_rate"]}))
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for cycle in range(cycles + 1):
            if cycle:
                for step in (2 * cycle - 1, 2 * cycle):
                    row = {"default/grad_norm": step / 3, "default/clip_fraction": 0.0, "default/learning_rate": 1e-3}
                    writer.log(row, step, "update", cycle)
                spread = {"reward/group_std": 0.25, "reward/red/std": 0.3, "reward/total/std": 0.3}
                means = {f"reward/{name}/mean": scale * reward(cycle) for name in ("red", "total")}
                times = {"seconds/rollout": 2.0, "seconds/optimize": 1.0, "samples": 12.0}
                writer.log({**means, **spread, **times, "loss": 0.5 / cycle}, 2 * cycle, "cycle", cycle)
            writer.log({"toy/strict": scale * (0.25 + cycle / 9)}, 2 * cycle, "eval", cycle)
            write_grid(folder, cycle, prompts)
    captions = {str(i): prompt for i, prompt in enumerate(prompts)}
    save_file({"0": torch.zeros(1)}, folder / "samples/toy/first.safetensors", {"captions": json.dumps(captions)})
    if status is not None:
        ended = json.loads((folder / "metrics.jsonl").read_text().splitlines()[-1])["time"] + 1
        result = {"status": status, "message": f"why it is {status}", "ended": ended, "timings": {"total": 9.5}}
        (folder / "result.json").write_text(dumps({**result, "counts": {"cycles": cycles}}))
    return folder


def write_grid(folder: Path, cycle: int, prompts: tuple[str, ...] = PROMPTS, size: int = 8) -> Path:
    """A contact sheet whose pictures belong to this cycle alone."""
    generator = torch.Generator().manual_seed(cycle)
    images = [torch.randint(0, 256, (3, size, size), dtype=torch.uint8, generator=generator) for _ in prompts]
    path = folder / "samples" / "toy" / f"cycle-{cycle:06d}.png"
    save_grid(images, path, captions=prompts)
    return path


class Page(HTMLParser):
    """A page, taken apart; a tag that is closed by another, or not at all, is an error.

    Attributes:
        tags: All start tags with their attributes.
        text: The text outside scripts and style sheets.
        data: The numbers of the charts.
    """

    VOID = frozenset({"meta", "img", "input", "br", "link", "hr"})
    # Elements of inline SVG may close themselves.
    SHAPES = frozenset({"path", "line", "circle", "rect"})

    def __init__(self, html: str) -> None:
        super().__init__(convert_charrefs=True)
        self.html = html
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.scripts: list[tuple[dict[str, str | None], str]] = []
        self.styles: list[str] = []
        self.text = ""
        self._open: list[str] = []
        self.feed(html)
        self.close()
        assert not self._open, f"never closed: {self._open}"
        ids = [a["id"] for _, a in self.tags if "id" in a]
        assert len(ids) == len(set(ids)), "an id is used twice"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        self.text += " "
        if tag not in self.VOID:
            self._open.append(tag)
        if tag == "script":
            self.scripts.append((dict(attrs), ""))
        elif tag == "style":
            self.styles.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert tag in self.SHAPES, f"<{tag}/> means nothing in HTML"
        self.tags.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self._open and self._open[-1] == tag, f"</{tag}> closes {self._open[-3:]}"
        self._open.pop()

    def handle_data(self, data: str) -> None:
        if self._open and self._open[-1] == "script":
            attributes, text = self.scripts[-1]
            self.scripts[-1] = (attributes, text + data)
        elif self._open and self._open[-1] == "style":
            self.styles[-1] += data
        else:
            self.text += data

    @property
    def data(self) -> dict[str, Any]:
        found = [text for attributes, text in self.scripts if attributes.get("id") == "report-data"]
        assert len(found) == 1
        return json.loads(found[0])

    def chart(self, title: str) -> dict[str, Any]:
        """The one chart of a title."""
        found = [chart for chart in self.data["charts"].values() if chart["title"] == title]
        assert len(found) == 1, f"{title}: {len(found)} of {[c['title'] for c in self.data['charts'].values()]}"
        return found[0]

    @property
    def words(self) -> str:
        """The text with single spaces."""
        return re.sub(r"\s+", " ", self.text)

    def images(self) -> list[tuple[str, bytes]]:
        """Alternative text and content of each picture."""
        found = []
        for tag, attributes in self.tags:
            if tag == "img":
                head, _, payload = (attributes["src"] or "").partition(",")
                assert re.fullmatch(r"data:image/(png|jpeg);base64", head)
                content = base64.b64decode(payload, validate=True)
                with Image.open(io.BytesIO(content)) as picture:
                    picture.load()
                found.append((attributes["alt"] or "", content))
        return found
