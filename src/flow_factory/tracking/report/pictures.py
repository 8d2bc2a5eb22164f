"""Contact sheets as data URIs: as they are where they are small, scaled and compressed where they are large."""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from flow_factory.tracking.report.players import Player, PlayFile, choose_embedded, make_players
from flow_factory.tracking.report.read import GridFile, RunRecord
from flow_factory.tracking.report.series import evenly
from flow_factory.tracking.report.settings import makes_videos

# Sheets of one dataset on a page.
GRID_LIMIT = 24
# A sheet of 16 pictures of 64 x 64 pixels is 100 kB; one of 16 pictures of 512 x 512 is 8 MB, and a page may hold many.
MAX_BYTES = 600_000
MAX_WIDTH = 1600
_QUALITY = 88
_NAMED_PROMPTS = 4


@dataclass(frozen=True)
class Picture:
    """A contact sheet on the page.

    Attributes:
        cycle: Finished cycles when it was made.
        uri: The picture itself.
        alt: What it shows, in words.
        size: Width and height in pixels, as embedded.
        scaled: Whether it is smaller or more compressed than the file.
        players: Videos and sounds that belong to it.
    """

    cycle: int
    uri: str
    alt: str
    size: tuple[int, int]
    scaled: bool
    players: tuple[Player, ...] = ()


@dataclass(frozen=True)
class Gallery:
    """The contact sheets of one dataset of one run.

    Attributes:
        dataset: Name of the evaluation set.
        pictures: Ascending by cycle; never empty.
        prompts: The prompts of the pictures.
        total: Sheets in the run folder.
        of_videos: Whether they are of videos.
    """

    dataset: str
    pictures: tuple[Picture, ...]
    prompts: tuple[str, ...]
    total: int
    of_videos: bool = False

    @property
    def first(self) -> Picture:
        """The sheet to compare the others with."""
        return self.pictures[0]

    @property
    def last(self) -> Picture:
        """The newest sheet."""
        return self.pictures[-1]

    @property
    def note(self) -> str:
        """What is not as in the folder."""
        notes = []
        if 1 < len(self.pictures) < self.total:
            notes.append(f"{len(self.pictures)} of {self.total} sheets are shown, evenly spaced.")
        if any(picture.scaled for picture in self.pictures):
            notes.append(
                f"Large sheets are shown scaled down or compressed; the originals are in samples/{self.dataset}/."
            )
        if any(player.linked for picture in self.pictures for player in picture.players):
            notes.append(
                "Videos of some sheets are too large to be inside the page: they play as long as it lies where it was "
                "made."
            )
        return " ".join(notes)


def galleries(runs: Sequence[RunRecord], page_folder: Path, limit: int = GRID_LIMIT) -> list[list[Gallery]]:
    """The contact sheets of each run by dataset, with what plays.

    Of all files that play, those of the last sheets come first into the page, then those of the first sheets.

    Args:
        runs: The runs of the page.
        page_folder: Where the page lies.
        limit: Sheets per dataset; beyond it evenly spaced ones are taken, the first and the last among them. With 1 it
            is the last.
    """
    chosen = [{dataset: _choose(grids, limit) for dataset, grids in run.grids.items()} for run in runs]
    embedded = choose_embedded(_by_rank([grids for of_run in chosen for grids in of_run.values()]))
    return [
        [
            Gallery(
                dataset,
                tuple(_picture(grid, dataset, noun, prompts, embedded, page_folder) for grid in grids),
                prompts,
                len(run.grids[dataset]),
                of_videos,
            )
            for dataset, grids in of_run.items()
            for prompts in [tuple(run.captions.get(dataset, ()))]
            for of_videos in [makes_videos(run) or any(f.path.suffix == ".mp4" for grid in grids for f in grid.players)]
            for noun in ["Videos" if of_videos else "Pictures"]
        ]
        for run, of_run in zip(runs, chosen, strict=True)
    ]


def _choose(grids: Sequence[GridFile], limit: int) -> list[GridFile]:
    return [grids[-1]] if limit == 1 else [grids[i] for i in evenly(len(grids), limit)]


def _by_rank(galleries: Sequence[Sequence[GridFile]]) -> list[PlayFile]:
    """Files of the last sheet of each gallery, of the first ones, and then of the others, newest first."""
    ranked = [[grids[-1], *grids[:1], *reversed(grids[1:-1])] for grids in galleries]
    longest = max(map(len, ranked), default=0)
    files = [file for rank in range(longest) for grids in ranked if rank < len(grids) for file in grids[rank].players]
    return list(dict.fromkeys(files))  # the last sheet may be the first one, too


def _picture(
    grid: GridFile, dataset: str, noun: str, prompts: tuple[str, ...], embedded: frozenset[Path], page_folder: Path
) -> Picture:
    content = grid.path.read_bytes()
    kind, size, scaled = "png", grid.size, False
    if len(content) > MAX_BYTES or grid.size[0] > MAX_WIDTH:
        content, size = _compressed(content)
        kind, scaled = "jpeg", True
    uri = f"data:image/{kind};base64,{base64.b64encode(content).decode('ascii')}"
    when = "before training" if grid.cycle == 0 else f"after cycle {grid.cycle}"
    alt = f"{noun} of the evaluation set {dataset} {when}"
    if prompts:
        more = ", ..." if len(prompts) > _NAMED_PROMPTS else ""
        alt += f", for the prompts: {'; '.join(prompts[:_NAMED_PROMPTS])}{more}"
    players = make_players(grid.players, prompts, when, embedded, page_folder)
    return Picture(grid.cycle, uri, alt, size, scaled, players)


def _compressed(content: bytes) -> tuple[bytes, tuple[int, int]]:
    from PIL import Image

    with Image.open(io.BytesIO(content)) as opened:
        picture = opened.convert("RGB")
    if picture.width > MAX_WIDTH:
        height = max(1, round(picture.height * MAX_WIDTH / picture.width))
        picture = picture.resize((MAX_WIDTH, height), Image.Resampling.LANCZOS)
    buffer = io.BytesIO()
    picture.save(buffer, format="JPEG", quality=_QUALITY, subsampling=0, optimize=True)
    return buffer.getvalue(), picture.size
