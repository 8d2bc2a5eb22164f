"""Reading prompts: what is accepted, and that every mistake names file, line and remedy."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from flow_factory.contracts import MediaSlot, Modality, PipelineIOContract
from flow_factory.data_utils.prompt_files import MediaRef, find_prompt_file, read_prompts
from flow_factory.errors import InputError
from tests.data_utils.helpers import TEXT_ONLY, write_jsonl, write_txt

IMAGE_MODEL = PipelineIOContract(
    (MediaSlot(Modality.TEXT, "prompt"), MediaSlot(Modality.IMAGE, "image", required=True, max_items=2)),
    (Modality.IMAGE,),
)
FRAMES_MODEL = PipelineIOContract(
    (
        MediaSlot(Modality.IMAGE, "first_frame", required=True),
        MediaSlot(Modality.IMAGE, "last_frame", required=False),
    ),
    (Modality.VIDEO,),
)


def test_text(tmp_path: Path) -> None:
    """A prompt a line; blank lines, a BOM and Windows line ends do not become prompts; U+2028 stays inside one."""
    path = tmp_path / "train.txt"
    path.write_bytes("\ufeffa cat\r\n\r\n  a dog\u2028on two lines \nzwölf Äpfel".encode())
    rows = read_prompts(path)
    assert [(r.prompt, r.line) for r in rows] == [("a cat", 1), ("a dog\u2028on two lines", 3), ("zwölf Äpfel", 4)]
    assert all(r.negative_prompt is None and r.media == () and r.metadata == {} for r in rows)


def test_jsonl(tmp_path: Path) -> None:
    """Negative prompts ("" is one), media in both spellings, and everything else as metadata."""
    rows = read_prompts(
        write_jsonl(
            tmp_path,
            "train",
            [
                {"prompt": "a", "negative_prompt": "", "count": 3, "tag": ["x"]},
                "",
                {"prompt": "b", "images": ["1.png", "2.png"], "video": "v.mp4", "audio": None},
            ],
        )
    )
    assert rows[0].negative_prompt == "" and rows[0].metadata == {"count": 3, "tag": ["x"]}
    assert rows[1].line == 3 and rows[1].negative_prompt is None and rows[1].metadata == {}
    assert rows[1].media == (
        MediaRef("image", Modality.IMAGE, "1.png"),
        MediaRef("image", Modality.IMAGE, "2.png"),
        MediaRef("video", Modality.VIDEO, "v.mp4"),
    )


@pytest.mark.parametrize(
    ("line", "said"),
    [
        ('{"prompt": "a"', "malformed JSON"),
        ('["a"]', "a list instead of an object"),
        ('{"promt": "a"}', "Did you mean 'promt' to be it?"),
        ('{"prompt": 3}', '"prompt" is a number (3), not a string'),
        ('{"prompt": null}', '"prompt" is a null'),
        ('{"prompt": "  "}', '"prompt" is empty'),
        ('{"prompt": "a", "negative_prompt": ["b"]}', '"negative_prompt" is a list'),
        ('{"prompt": "a", "prompt": "b"}', '"prompt" is given twice'),
        ('{"prompt": "a", "score": NaN}', "NaN is not JSON"),
        ('{"prompt": "a\\ud800"}', "half of a surrogate pair"),
        ('{"prompt": "a", "deep": ' + "[" * 100_000 + "]" * 100_000 + "}", "nested too deeply"),
        ('{"prompt": "a", "big": ' + "9" * 5000 + "}", "a number has too many digits"),
        ('{"prompt": "a", "image": 3}', '"image" must be a path or a list of paths, not 3'),
        ('{"prompt": "a", "image": "x", "images": ["y"]}', "fills the slot 'image' a second time"),
    ],
)
def test_bad_line_names_file_and_line(tmp_path: Path, line: str, said: str) -> None:
    """Malformed JSON, a prompt that is not text, duplicate keys: file:line and what to write."""
    path = write_jsonl(tmp_path, "train", [{"prompt": "good"}, line])
    with pytest.raises(InputError) as caught:
        read_prompts(path)
    assert str(caught.value).startswith(f"{path}:2: ") and said in str(caught.value)


def test_bytes_that_are_not_utf8(tmp_path: Path) -> None:
    """An old encoding is named by line, not as a traceback."""
    path = tmp_path / "train.txt"
    path.write_bytes(b"good\ncaf\xe9\n")
    with pytest.raises(InputError, match=r"train\.txt:2: not UTF-8"):
        read_prompts(path)


def test_lines_that_end_with_a_carriage_return_alone(tmp_path: Path) -> None:
    """A file with the line ends of old systems is not taken for one long prompt."""
    path = tmp_path / "train.txt"
    path.write_bytes(b"one\rtwo\rthree\r")
    with pytest.raises(InputError, match=r"train\.txt:1: a carriage return inside a line"):
        read_prompts(path)


@pytest.mark.parametrize("content", [b"", b"\n  \n"])
@pytest.mark.parametrize("name", ["train.txt", "train.jsonl"])
def test_empty_file(tmp_path: Path, name: str, content: bytes) -> None:
    """A file without prompts is an error that names it."""
    (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError, match=rf"{name} holds no prompts"):
        read_prompts(find_prompt_file(tmp_path, "train"))


def test_unknown_media_slot(tmp_path: Path) -> None:
    """Pitfall 37: a media column that the model does not take is an error naming what it takes."""
    path = write_jsonl(tmp_path, "train", [{"prompt": "a", "image": "x.png"}])
    with pytest.raises(InputError, match=r'train\.jsonl:1: the model takes no image \("image"\); it takes prompt'):
        read_prompts(path, TEXT_ONLY)


def test_a_negative_prompt_for_a_model_that_takes_none(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path, "train", [{"prompt": "a", "negative_prompt": "b"}])
    assert read_prompts(path)[0].negative_prompt == "b"
    with pytest.raises(InputError, match=r'train\.jsonl:1: the model takes no "negative_prompt"; remove the column'):
        read_prompts(path, TEXT_ONLY)


def test_required_media_slot(tmp_path: Path) -> None:
    """Pitfall 37: a row, or a whole .txt file, without the image that the model needs."""
    for path in (write_txt(tmp_path / "t", "train", ["a"]), write_jsonl(tmp_path / "j", "train", [{"prompt": "a"}])):
        with pytest.raises(InputError, match=r":1: the model needs an image for 'image'"):
            read_prompts(path, IMAGE_MODEL)


def test_slots_by_name(tmp_path: Path) -> None:
    """A generic column fills the only slot of its kind; with several, columns carry the slots' names."""
    path = write_jsonl(tmp_path / "1", "train", [{"prompt": "a", "images": ["1", "2"], "first": "kept"}])
    (row,) = read_prompts(path, IMAGE_MODEL)
    assert [m.slot for m in row.media] == ["image", "image"] and row.metadata == {"first": "kept"}
    path = write_jsonl(tmp_path / "2", "train", [{"prompt": "a", "images": ["1", "2", "3"]}])
    with pytest.raises(InputError, match="has 3 files; the model takes at most 2"):
        read_prompts(path, IMAGE_MODEL)
    path = write_jsonl(tmp_path / "3", "train", [{"prompt": "a", "last_frame": "2", "first_frame": "1"}])
    (row,) = read_prompts(path, FRAMES_MODEL)
    assert {m.slot: m.path for m in row.media} == {"first_frame": "1", "last_frame": "2"}
    path = write_jsonl(tmp_path / "4", "train", [{"prompt": "a", "image": "1"}])
    with pytest.raises(InputError, match="could fill 'first_frame', 'last_frame'; name the column after the slot"):
        read_prompts(path, FRAMES_MODEL)


@pytest.mark.parametrize("column", ["first_frame", "last_frame", "soundtrack"])
def test_a_column_called_as_another_models_slot_is_no_metadata(tmp_path: Path, column: str) -> None:
    """It would have no effect: a picture to start from, given to a model of text alone."""
    path = write_jsonl(tmp_path, "train", [{"prompt": "a", "image": "1", column: "2"}])
    with pytest.raises(InputError, match=rf'train\.jsonl:1: the model takes no "{column}"; it takes image, .*rename'):
        read_prompts(path, IMAGE_MODEL)
    assert read_prompts(path)[0].metadata == {column: "2"}, "without a model, nothing is known of its slots"


def test_finding_the_file(tmp_path: Path) -> None:
    """Missing folder, missing split (with the nearest), and two files for one split."""
    with pytest.raises(InputError, match=r"dataset folder '.*nowhere' does not exist"):
        find_prompt_file(tmp_path / "nowhere", "train")
    write_txt(tmp_path, "training", ["a"])
    with pytest.raises(InputError, match=r"it has training\.txt\. Did you mean split 'training'"):
        find_prompt_file(tmp_path, "train")
    write_txt(tmp_path, "train", ["a"])
    assert find_prompt_file(tmp_path, "train").name == "train.txt"
    write_jsonl(tmp_path, "train", [{"prompt": "a"}])
    with pytest.raises(InputError, match=r"both .* exist; keep one"):
        find_prompt_file(tmp_path, "train")
    with pytest.raises(InputError, match="is a file, not a folder"):
        find_prompt_file(tmp_path / "train.txt", "train")


def test_unknown_builtin_lists_the_known() -> None:
    """`builtin/<name>` that does not exist."""
    with pytest.raises(InputError, match="no-such-prompts"):
        find_prompt_file("builtin/no-such-prompts", "train")


def test_reading_imports_no_torch(tmp_path: Path) -> None:
    """`check` reads prompts without torch, numpy or datasets."""
    write_txt(tmp_path, "train", ["a"])
    code = (
        "import sys\nfrom flow_factory.data_utils import find_prompt_file, read_prompts, load_prompt_dataset\n"
        f"assert len(read_prompts(find_prompt_file({str(tmp_path)!r}, 'train'))) == 1\n"
        "print([m for m in ('torch', 'numpy', 'datasets', 'transformers', 'diffusers', 'PIL') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
