"""Videos and sounds on the page: inside it while they are small, linked beside it where not, damaged ones named."""

from __future__ import annotations

import base64
import io
import json
import re
import shutil
import wave
from pathlib import Path
from urllib.parse import unquote

import av
import pytest
import torch
from safetensors.torch import save_file

from flow_factory.tracking.players import encode_mp4, encode_wav
from flow_factory.tracking.previews import preview_of, save_previews
from flow_factory.tracking.report import players, write_report
from tests.tracking.media import clip, sounding_sample, tone
from tests.tracking.report_runs import CONFIG, PROMPTS, Page, make_run

VIDEOS = CONFIG.replace("sd3-5", "wan2_t2v")


def make_video_run(folder: Path, cycles: int = 3) -> Path:
    """A run whose evaluations left sheets of strips, and a video of each prompt."""
    run = make_run(folder, cycles, config=VIDEOS)
    shutil.rmtree(run / "samples")
    root = run / "samples" / "toy"
    for cycle in range(cycles + 1):
        made = [preview_of(sounding_sample(frames=clip(5, seed=10 * cycle + i)), frozenset({"mp4"})) for i in (0, 1)]
        save_previews([("", [p for p in made if p])], PROMPTS, root / f"cycle-{cycle:06d}.png")
        (root / f"cycle-{cycle:06d}").mkdir()
        for index, preview in enumerate(p for p in made if p):
            (root / f"cycle-{cycle:06d}" / f"{index:03d}.mp4").write_bytes(preview.files["mp4"])
    captions = {str(i): prompt for i, prompt in enumerate(PROMPTS)}
    save_file({"0": torch.zeros(1)}, root / "first.safetensors", {"captions": json.dumps(captions)})
    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_video_run(tmp_path_factory.mktemp("runs") / "videos")


def page_of(*folders: Path, output: Path | None = None) -> Page:
    return Page(write_report(folders, output).path.read_text(encoding="utf-8"))


def sources(page: Page, tag: str = "video") -> list[str]:
    return [attributes["src"] or "" for name, attributes in page.tags if name == tag]


def decoded(uri: str) -> bytes:
    head, _, payload = uri.partition(",")
    assert head in ("data:video/mp4;base64", "data:audio/wav;base64")
    return base64.b64decode(payload, validate=True)


def test_the_page_plays_the_videos_of_the_run_without_any_other_file(run: Path, tmp_path: Path) -> None:
    report = Path(shutil.copy(write_report([run]).path, tmp_path / "moved.html"))
    page = Page(report.read_text(encoding="utf-8"))
    found = sources(page)
    files = sorted((run / "samples/toy").glob("cycle-*/*.mp4"))
    assert len(files) == 8 and [decoded(uri) for uri in found] == [file.read_bytes() for file in files]
    assert not re.search(r'(?:src|href)="(?!data:)', page.html) and "media-src data:;" in page.html
    with av.open(io.BytesIO(decoded(found[0]))) as container:
        assert len(list(container.decode(video=0))) == 5 and container.streams.audio
    video = [attributes for name, attributes in page.tags if name == "video"]
    assert all("controls" in attributes for attributes in video)
    labels = [attributes["aria-label"] for attributes in video]
    assert labels[0] == f"video before training: {PROMPTS[0]}" and labels[-1] == f"video after cycle 3: {PROMPTS[1]}"
    assert "Videos per second" in page.words and "Images per second" not in page.words
    assert len(page.images()) == 4, "the sheets are there, too"
    alts = [attributes["alt"] or "" for name, attributes in page.tags if name == "img"]
    assert all(alt.startswith("Videos of the evaluation set toy") for alt in alts)
    assert "picture" not in page.words.lower()


def test_what_is_too_much_for_a_page_is_linked_beside_it(
    run: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last and the first sheets come first; the files in between are found from where the page lies."""
    sizes = {path: path.stat().st_size for path in (run / "samples/toy").glob("cycle-*/*.mp4")}
    room = sum(size for path, size in sizes.items() if path.parent.name in ("cycle-000000", "cycle-000003"))
    monkeypatch.setattr("flow_factory.tracking.report.pictures.choose_embedded", _with_room(room))
    for place in (run / "report.html", tmp_path / "elsewhere" / "page.html"):
        place.parent.mkdir(exist_ok=True)
        page = page_of(run, output=place)
        found = sources(page)
        assert [uri.startswith("data:") for uri in found] == [True, True, False, False, False, False, True, True]
        for uri in found[2:6]:
            assert (place.parent / unquote(uri)).resolve() in sizes and not uri.startswith("/")
        assert "media-src data: 'self' file:;" in page.html and "too large to be inside the page" in page.words
        linked = [attributes["preload"] for name, attributes in page.tags if name == "video"]
        assert linked == ["metadata"] * 2 + ["none"] * 4 + ["metadata"] * 2
    assert "samples/toy/cycle-000001/000.mp4" in sources(page_of(run))


def _with_room(room: int):
    return lambda files: players.choose_embedded(files, room)


def test_single_files_of_many_bytes_are_linked(run: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(players, "FILE_BYTES", 10)
    assert not any(uri.startswith("data:") for uri in sources(page_of(run)))


def test_several_runs_play_their_last_videos(run: Path, tmp_path: Path) -> None:
    other = make_video_run(tmp_path / "other", cycles=1)
    page = page_of(run, other, output=tmp_path / "c.html")
    last = [run / "samples/toy/cycle-000003", other / "samples/toy/cycle-000001"]
    expected = [path.read_bytes() for folder in last for path in sorted(folder.iterdir())]
    assert [decoded(uri) for uri in sources(page)] == expected and "Final videos" in page.words
    pictures = make_run(tmp_path / "pictures")
    assert "Samples per second" in page_of(run, pictures, output=tmp_path / "c.html").words


def test_sounds_alone_have_players_of_their_own(tmp_path: Path) -> None:
    run = make_video_run(tmp_path / "run", cycles=1)
    for path in (run / "samples/toy").glob("cycle-*/*.mp4"):
        path.unlink()
        path.with_suffix(".wav").write_bytes(encode_wav(tone(0.1)))
    page = page_of(run)
    assert not sources(page)
    with wave.open(io.BytesIO(decoded(sources(page, "audio")[0]))) as file:
        assert file.getnframes() == 2400 and file.getframerate() == 24000
    assert len(sources(page, "audio")) == 4 and "audio before training: a red circle" in page.html


@pytest.mark.parametrize(
    "damage",
    [
        lambda content: b"",
        lambda content: content[:-10],
        lambda content: content[: len(content) // 2],
        lambda content: b"\x00" * len(content),
        lambda content: content + b"xx",
        lambda content: b"<html>no video</html>",
    ],
)
def test_damaged_videos_are_left_out_and_named(tmp_path: Path, damage) -> None:
    run = make_video_run(tmp_path / "run", cycles=1)
    path = run / "samples/toy/cycle-000001/001.mp4"
    path.write_bytes(damage(path.read_bytes()))
    (path.parent / "notes.txt").write_text("not ours")
    written = write_report([run])
    assert ("run", "samples/toy/cycle-000001/001.mp4 is no whole file and is left out") in written.problems
    assert len(sources(Page(written.path.read_text()))) == 3


def test_cut_off_sounds_are_damaged_too(tmp_path: Path) -> None:
    for name, content in (("000.wav", encode_wav(tone())), ("001.wav", encode_wav(tone())[:-100]), ("002.wav", b"x")):
        (tmp_path / name).write_bytes(content)
    (tmp_path / "003.mp4").write_bytes(encode_mp4(clip(), 8.0))
    found, damaged = players.read_players(tmp_path)
    assert [file.index for file in found] == [0, 3] and damaged == ("001.wav", "002.wav")
    assert players.read_players(tmp_path / "absent") == ((), ())


def test_pages_of_pictures_allow_nothing_to_be_played(tmp_path: Path) -> None:
    page = page_of(make_run(tmp_path / "run"))
    assert "media-src 'none';" in page.html and not sources(page) and "Images per second" in page.words
