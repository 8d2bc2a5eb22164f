"""What evaluations leave to look at: contact sheets over time, files that play, and the comparison with the first time.

samples/<dataset>/
  cycle-000004.png        the sheet: pictures, or strips of frames
  cycle-000004/000.mp4    the video of prompt 0, with its sound; a sound alone (.wav) where PyAV is missing
  first.safetensors       what the sheet of cycle 0 shows, by prompt
  before_after.png        the last sheet's beneath those of cycle 0
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load, load_file, save, save_file
from torch import Tensor

from flow_factory.checkpoints.atomic import atomic_write_bytes
from flow_factory.distributed import Comm
from flow_factory.errors import InputError
from flow_factory.samples import BaseSample, VideoSample
from flow_factory.tracking.grids import to_pil
from flow_factory.tracking.players import require_video_encoder
from flow_factory.tracking.previews import Preview, preview_of, save_previews
from flow_factory.tracking.tracker import Tracker

logger = logging.getLogger(__name__)

Shown = Mapping[int, tuple[str, Preview]]
"""Row of a prompt in its dataset to the prompt and what was made of it, ascending."""


class SampleSheets:
    """Writes sheets and files into the run folder; each rank previews its own samples, and the main one saves them.

    Args:
        run_dir: The run folder.
        comm: Process group.
        tracker: Is shown the sheets, and the videos.
        limit: Prompts per sheet (`eval.num_grid_images`); 0 saves nothing.
    """

    def __init__(self, run_dir: Path, comm: Comm, tracker: Tracker, limit: int) -> None:
        self._run_dir = run_dir
        self._comm = comm
        self._tracker = tracker
        self._limit = limit
        self._warned = False

    def preview(self, samples: Sequence[BaseSample]) -> dict[int, tuple[str, Preview]]:
        """What will be shown of some of this rank's samples: an entry of `Shown` for each of the first prompts.

        Args:
            samples: With decoded media, which are not needed afterwards; those without pictures are left out.
        """
        samples = [sample for sample in samples if sample.index < self._limit]
        suffix = "mp4" if any(isinstance(sample, VideoSample) for sample in samples) else ""
        try:
            if suffix:
                require_video_encoder()
        except InputError as error:
            suffix = "wav"
            if not self._warned:
                self._warned = True
                logger.warning("evaluations save sheets of frames, but no videos: %s", error)
        found = ((sample, preview_of(sample, frozenset({suffix}))) for sample in samples)
        return {sample.index: (sample.prompt, preview) for sample, preview in found if preview is not None}

    def save(self, name: str, own: Shown, epoch: int) -> None:
        """Saves what the first prompts of a dataset have become. Called by all ranks.

        Args:
            name: The dataset.
            own: What `preview` made of this rank's samples.
            epoch: Finished cycles.
        """
        shown = self._gather(own)
        if not shown or not self._comm.is_main:
            return
        folder = self._run_dir / "samples" / name
        captions = [prompt for prompt, _ in shown.values()]
        sheet = folder / f"cycle-{epoch:06d}.png"
        save_previews([("", [preview for _, preview in shown.values()])], captions, sheet)
        self._tracker.log_images(f"samples/{name}", sheet, epoch)
        self._tracker.log_videos(f"samples/{name}", _write_files(folder / sheet.stem, shown))
        first = folder / "first.safetensors"
        if epoch == 0:
            _save_pictures(shown, first)
        elif first.exists():
            _save_comparison(shown, _load_pictures(first), epoch, folder / "before_after.png")

    def _gather(self, own: Shown) -> Shown:
        """The previews of all ranks, on every rank."""
        facts = self._comm.gather_objects([[index, prompt, p.is_strip] for index, (prompt, p) in own.items()])
        entries = [entry for rank in facts for entry in rank]
        if not entries:
            return {}
        packed = self._comm.gather_bytes([_pack(preview) for _, preview in own.values()])
        shown = {
            index: (prompt, _unpack(content, is_strip))
            for (index, prompt, is_strip), content in zip(entries, packed, strict=True)
        }
        return dict(sorted(shown.items()))


def _write_files(folder: Path, shown: Shown) -> list[tuple[Path, str]]:
    """Writes the files that play; returns the videos with their prompts."""
    files = {
        f"{index:03d}.{suffix}": (content, prompt)
        for index, (prompt, preview) in shown.items()
        for suffix, content in preview.files.items()
    }
    if not files:
        return []
    folder.mkdir(parents=True, exist_ok=True)
    for former in folder.iterdir():  # of this cycle, before the run was resumed
        if former.name not in files:
            former.unlink()
    for file, (content, _) in files.items():
        atomic_write_bytes(folder / file, content)
    return [(folder / file, prompt) for file, (_, prompt) in files.items() if file.endswith(".mp4")]


def _save_comparison(shown: Shown, before: Mapping[int, tuple[str, Image.Image]], epoch: int, path: Path) -> None:
    # `eval:` may change when a run is resumed: only what was shown then can be compared.
    both = [(i, prompt, p) for i, (prompt, p) in shown.items() if i in before and before[i][0] == prompt]
    if both:
        former = [Preview(before[i][1], preview.is_strip, preview.given) for i, _, preview in both]
        rows = [("cycle 0", former), (f"cycle {epoch}", [preview for _, _, preview in both])]
        save_previews(rows, [prompt for _, prompt, _ in both], path)


def _save_pictures(shown: Shown, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    captions = {str(index): prompt for index, (prompt, _) in shown.items()}
    pictures = {str(index): _pixels(preview.picture) for index, (_, preview) in shown.items()}
    save_file(pictures, path, {"captions": json.dumps(captions)})


def _load_pictures(path: Path) -> dict[int, tuple[str, Image.Image]]:
    """Prompt and picture by the prompt's row."""
    with safe_open(path, framework="pt") as file:
        captions = json.loads((file.metadata() or {})["captions"])
    return {int(index): (captions[index], to_pil(pixels)) for index, pixels in load_file(path).items()}


def _pixels(picture: Image.Image) -> Tensor:
    return torch.from_numpy(np.array(picture)).permute(2, 0, 1).contiguous()


def _pack(preview: Preview) -> bytes:
    """A preview without its `is_strip`; nothing is pickled."""
    tensors = {suffix: torch.frombuffer(bytearray(file), dtype=torch.uint8) for suffix, file in preview.files.items()}
    pictures = {"picture": preview.picture, "given": preview.given}
    tensors |= {name: _pixels(picture) for name, picture in pictures.items() if picture is not None}
    return save(tensors)


def _unpack(content: bytes, is_strip: bool) -> Preview:
    tensors = load(content)
    picture, given = tensors.pop("picture"), tensors.pop("given", None)
    files = {suffix: bytes(tensor.numpy()) for suffix, tensor in tensors.items()}
    return Preview(to_pil(picture), is_strip, None if given is None else to_pil(given), files)
