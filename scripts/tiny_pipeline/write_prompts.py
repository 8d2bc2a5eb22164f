"""Write the embedded prompt sets: `<output>/{shapes,singles,counts,numbers}/{train,test}.txt` and `shapes/panel.txt`.

python scripts/tiny_pipeline/write_prompts.py --output src/flow_factory/assets/prompts

Each side of the world's split goes to its own file, so no held-out combination is ever trained on. Sets that are larger
than wanted are thinned at random, from a fixed seed. `panel` holds further held-out combinations, none of them in
`shapes/test.txt`: figures are quoted on it, so that settings chosen on the test file cannot flatter them.

`<output>/edits/{train,test}.jsonl` is a set for models that edit: each row has a picture, which differs from what its
caption asks for in one thing, the colour, the shape or the background.
"""

from __future__ import annotations

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np

from flow_factory.rewards.shapes_world import (
    BACKGROUNDS,
    COLOURS,
    SHAPES,
    Kind,
    Scene,
    Split,
    format_caption,
    render,
    scenes,
    split_of,
)

SIZES: dict[str, dict[Split, dict[Kind, int]]] = {
    "shapes": {"train": {"single": 48, "count": 48, "number": 64}, "test": {"single": 20, "count": 20, "number": 24}},
    "singles": {"train": {"single": 96}, "test": {"single": 48}},
    "counts": {"train": {"count": 144}, "test": {"count": 48}},
    "numbers": {"train": {"number": 160}, "test": {"number": 64}},
}
EDITS: dict[Split, int] = {"train": 96, "test": 48}
PANEL: dict[Kind, int] = {"single": 28, "count": 32, "number": 36}


def choose(
    kind: Kind, split: Split, count: int, rng: np.random.Generator, without: frozenset[str] = frozenset()
) -> list[Scene]:
    """`count` different scenes of one side of the split; a quarter of the numbers have one digit, if there are any."""
    pool = [scene for scene in scenes(kind) if split_of(scene) == split and format_caption(scene) not in without]
    if kind == "number":
        short = [scene for scene in pool if len(scene.digits) == 1]
        long = [scene for scene in pool if len(scene.digits) == 2]
        few = min(count // 4, len(short))
        parts = [(short, few), (long, count - few)]
    else:
        parts = [(pool, count)]
    return [part[i] for part, size in parts for i in sorted(rng.choice(len(part), size, replace=False))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    for name, splits in SIZES.items():
        rng = np.random.default_rng(arguments.seed)
        for split, kinds in splits.items():
            chosen = [scene for kind, count in kinds.items() for scene in choose(kind, split, count, rng)]
            captions = [format_caption(chosen[i]) for i in rng.permutation(len(chosen))]
            write(arguments.output / name / f"{split}.txt", captions)
    tested = frozenset((arguments.output / "shapes" / "test.txt").read_text().splitlines())
    rng = np.random.default_rng(arguments.seed + 1)
    chosen = [scene for kind, count in PANEL.items() for scene in choose(kind, "test", count, rng, tested)]
    write(arguments.output / "shapes" / "panel.txt", [format_caption(chosen[i]) for i in rng.permutation(len(chosen))])
    write_edits(arguments.output / "edits", np.random.default_rng(arguments.seed + 2))


def write_edits(folder: Path, rng: np.random.Generator) -> None:
    """Captions of single shapes, each with a picture of a scene that differs from it in one thing."""
    (folder / "images").mkdir(parents=True, exist_ok=True)
    for split, count in EDITS.items():
        chosen = choose("single", split, count, rng)
        rows = []
        for number, i in enumerate(rng.permutation(len(chosen))):
            shown = changed(chosen[i], rng)
            name = f"{split}-{number:02d}.png"
            render(shown, rng).save(folder / "images" / name, optimize=True)
            row = {"prompt": format_caption(chosen[i]), "image": name, "shown": format_caption(shown)}
            rows.append(json.dumps(row))
        write(folder / f"{split}.jsonl", rows)


def changed(scene: Scene, rng: np.random.Generator) -> Scene:
    """The scene with another colour, shape or background."""
    words = {"colour": tuple(COLOURS), "shape": SHAPES, "background": tuple(BACKGROUNDS)}
    attribute = tuple(words)[rng.integers(len(words))]
    others = [word for word in words[attribute] if word != getattr(scene, attribute)]
    return replace(scene, **{attribute: others[rng.integers(len(others))]})


def write(path: Path, lines: list[str]) -> None:
    """One caption a line."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
