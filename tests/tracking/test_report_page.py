"""The page of a run: its numbers, its pictures, nothing from outside, and nothing of a user's text taken for HTML."""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
from pathlib import Path

import pytest
from PIL import Image

from flow_factory.errors import InputError
from flow_factory.tracking.metrics import MetricsWriter, read_metrics
from flow_factory.tracking.report import write_report
from flow_factory.tracking.report.page import embedded_json
from flow_factory.tracking.report.pictures import GRID_LIMIT, MAX_WIDTH
from flow_factory.tracking.report.series import POINT_LIMIT
from tests.tracking.report_runs import CONFIG, Page, make_run, reward, write_grid

NASTY = "</script><script>alert(1)</script><img src=x onerror=alert(2)> \"'&{{ 7 * 7 }}"


def page_of(*folders: Path, output: Path | None = None) -> Page:
    return Page(write_report(folders, output).path.read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "first")


def test_curves_hold_the_numbers_of_the_run(run: Path) -> None:
    page, rows = page_of(run), read_metrics(run)
    cycles = [row for row in rows if row["kind"] == "cycle"]
    (line,) = page.chart("Reward")["lines"]
    assert line["x"] == [1, 2, 3] and line["y"] == [row["reward/total/mean"] for row in cycles]
    assert line["y"] == [reward(cycle) for cycle in (1, 2, 3)], "to the last digit"
    assert line["low"] == [y - 0.25 for y in line["y"]] and line["high"] == [y + 0.25 for y in line["y"]]
    (line,) = page.chart("toy: strict")["lines"]
    assert line["x"] == [0, 1, 2, 3] and line["y"] == [0.25 + cycle / 9 for cycle in range(4)]
    (line,) = page.chart("Gradient norm")["lines"]
    assert line["x"] == [1, 2, 3, 4, 5, 6] and line["y"] == [step / 3 for step in range(1, 7)]
    assert page.chart("Gradient norm")["x_label"] == "optimizer step"
    (line,) = page.chart("Images per second")["lines"]
    assert line["y"] == [4.0, 4.0, 4.0]
    assert [line["name"] for line in page.chart("Seconds a cycle")["lines"]] == ["rollout", "optimize"]
    titles = [chart["title"] for chart in page.data["charts"].values()]
    assert "Red" not in titles, "a single reward of weight 1 is the total"
    for expected in ("Clip fraction", "Learning rate", "Spread within a group", "Loss per cycle"):
        assert expected in titles


def test_a_caption_speaks_of_a_band_only_where_there_is_one(tmp_path: Path, run: Path) -> None:
    assert "The band is one standard deviation" in page_of(run).text
    folder = make_run(tmp_path / "run")
    metrics = folder / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace("reward/group_std", "x").replace("reward/red/std", "y"))
    with MetricsWriter(metrics) as writer:
        writer.log({"reward/red/mean": 9.0}, 9, "cycle", 4)  # apart from the total: red has a chart of its own
    page = page_of(folder)
    assert page.chart("Red") and "he band is" not in page.text
    assert not any("band" in (attributes.get("class") or "") for _, attributes in page.tags)


def test_the_page_tells_no_path_of_the_machine(run: Path) -> None:
    page = page_of(run)
    assert str(run.parent) not in page.html and "from first." in page.words


def test_every_number_of_a_run_is_in_some_chart(tmp_path: Path) -> None:
    """What no catalogue knows is drawn too: metrics of other algorithms, of several roles and datasets."""
    folder = make_run(tmp_path / "run")
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.log({"fake/grad_norm": 8.125, "fake/odd_metric": 16.25, "default/nft_loss": 32.5}, 7, "update", 4)
        writer.log(
            {"mystery": 64.25, "animals/reward/ocr/mean": 0.625, "animals/reward/total/mean": 1.25}, 7, "cycle", 4
        )
        writer.log({"whatever/x": 128.5}, 7, "data", 4)
        writer.log({"toy/monitor/brightness": 0.375}, 7, "eval_monitor", 4)
    page = page_of(folder)
    values = [y for chart in page.data["charts"].values() for line in chart["lines"] for y in line["y"]]
    for expected in (8.125, 16.25, 32.5, 64.25, 0.625, 1.25, 128.5, 0.375):
        assert expected in values, expected
    assert [line["name"] for line in page.chart("Gradient norm")["lines"]] == ["default", "fake"]


def test_pictures_are_those_of_the_run(run: Path) -> None:
    images = page_of(run).images()
    files = [run / f"samples/toy/cycle-{cycle:06d}.png" for cycle in range(4)]
    assert [content for _, content in images] == [file.read_bytes() for file in files]
    assert len({content for _, content in images}) == 4, "before, during and after differ"
    assert images[0][0] == (
        "Pictures of the evaluation set toy before training, for the prompts: a red circle; two blue squares"
    )
    assert "after cycle 3" in images[-1][0]


def test_the_slider_has_a_stop_for_every_sheet(run: Path) -> None:
    page = page_of(run)
    (slider,) = [attributes for tag, attributes in page.tags if tag == "input"]
    assert (slider["type"], slider["min"], slider["max"], slider["value"]) == ("range", "1", "3", "3")
    assert any(tag == "label" and a.get("for") == slider["id"] for tag, a in page.tags)
    stops = [(a["data-cycle"], a.get("class")) for tag, a in page.tags if tag == "figure" and "data-cycle" in a]
    assert stops == [("1", "off"), ("2", "off"), ("3", None)]


def test_the_page_needs_nothing_but_itself(run: Path) -> None:
    page = page_of(run)
    for tag, attributes in page.tags:
        for name in ("src", "href", "srcset", "data", "action", "poster", "xlink:href"):
            assert (attributes.get(name) or "data:").startswith("data:"), f"<{tag} {name}={attributes[name]}>"
        assert "style" not in attributes and not any(name.startswith("on") for name in attributes)
        assert tag not in ("link", "iframe", "object", "embed", "base")
    (style,), code = page.styles, [text for a, text in page.scripts if a.get("type") != "application/json"]
    assert len(code) == 1 and "url(" not in style and "@import" not in style
    assert not re.search(r"\b(fetch|XMLHttpRequest|import|eval|innerHTML)\b", code[0])
    (policy,) = [a["content"] or "" for t, a in page.tags if t == "meta" and a.get("http-equiv")]
    assert "default-src 'none'" in policy and "unsafe" not in policy
    for kind, text in (("style", style), ("script", code[0])):
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert f"{kind}-src 'sha256-{digest}'" in policy, f"the page's own {kind} must be allowed by its policy"


def test_what_users_wrote_is_text(tmp_path: Path) -> None:
    config = CONFIG.replace("name: red", f"name: {json.dumps(NASTY)}")
    folder = make_run(tmp_path / "<b>run", prompts=(NASTY, "plain"), config=config, status=None)
    (folder / "result.json").write_text(json.dumps({"status": "failed", "message": NASTY, "ended": 9e9}))
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.log({f"reward/{NASTY}/mean": 1.0, NASTY: 2.0}, 9, "cycle", 4)
        writer.log({f"{NASTY}/strict": 1.0}, 9, "eval", 4)
        writer.log({"statistic": NASTY, "message": NASTY}, 9, "alarm", 4)
    for page in (
        page_of(folder),
        page_of(folder, make_run(tmp_path / NASTY.replace("/", "")), output=tmp_path / "c.html"),
    ):
        assert len(page.scripts) == 2 and "<script>alert" not in page.html
        assert not any(attributes.get("src") == "x" or "onerror" in attributes for _, attributes in page.tags)
        assert "<script>alert(1)</script>" in page.text, "it is shown as it was written"
        assert "{{ 7 * 7 }}" in page.text and "49}" not in page.text


def test_embedded_json_cannot_end_its_element() -> None:
    value = {"a": "</script><!--\u2028&", "b": [1.5, None]}
    text = embedded_json(value)
    assert not set("<>&\u2028") & set(text) and json.loads(text) == value


def test_not_numbers_are_kept_and_said(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.log({"loss": float("nan")}, 8, "cycle", 4)
        writer.log({"loss": float("-inf")}, 10, "cycle", 5)
    page = page_of(folder)
    assert page.chart("Loss per cycle")["lines"][0]["y"][3:] == [{"$float": "nan"}, {"$float": "-inf"}]
    assert "2 values are not numbers" in page.text


def test_long_runs_are_thinned_and_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        for step in range(7, 10_007):
            writer.log({"default/grad_norm": 1000.0 if step == 5000 else (step % 97) / 97}, step, "update", 4)
        for cycle in range(4, 60):
            writer.log({"toy/strict": 0.5}, 10_007, "eval", cycle)
    for cycle in range(4, 60):
        write_grid(folder, cycle)
    report = write_report([folder])
    page = Page(report.path.read_text())
    (line,) = page.chart("Gradient norm")["lines"]
    assert len(line["x"]) <= POINT_LIMIT and line["points"] == 10_006
    assert line["y"][line["x"].index(5000)] == 1000.0, "a single spike is not lost"
    assert "of 10,006 points are drawn" in page.words and "The strong line is the mean over 251 points" in page.words
    images = page.images()
    assert len(images) == GRID_LIMIT and f"{GRID_LIMIT} of 60 sheets are shown" in page.words
    assert images[0][1] == (folder / "samples/toy/cycle-000000.png").read_bytes()
    assert images[-1][1] == (folder / "samples/toy/cycle-000059.png").read_bytes()


def test_large_sheets_are_scaled_and_say_so(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run", cycles=1)
    path = folder / "samples/toy/cycle-000001.png"
    Image.linear_gradient("L").resize((3000, 1500)).convert("RGB").save(path)
    page = page_of(folder)
    with Image.open(io.BytesIO(page.images()[-1][1])) as shown:
        assert shown.format == "JPEG" and shown.size == (MAX_WIDTH, 800)
        top, middle, bottom = (shown.convert("L").getpixel((800, y)) for y in (0, 400, 799))
    assert top <= 3 and abs(int(middle) - 127) <= 3 and bottom >= 252  # type: ignore[arg-type]
    assert "the originals are in samples/toy/" in page.words


def test_headlines_and_facts(run: Path) -> None:
    words = page_of(run).words
    assert "toy · strict 0.2500 → 0.5833 +0.3333 cycle 0 to 3" in words
    assert "training reward 0.2429 → 0.5286 +0.2857 first and last cycle" in words
    assert "Cycles 3 of 3" in words and "9.0s in cycles, 9.5s in all" in words
    assert "6 in rollouts, 4 over the whole cycle" in words
    assert "7 (training)" in words and "sd3-5 · model" in words and "first finished" in words


def test_settings_are_marked_where_they_differ_from_the_defaults_or_were_given(run: Path) -> None:
    html = re.sub(r"\s+", " ", page_of(run).html)

    def row(name: str) -> str:
        found = re.findall(rf'<tr[^>]*><th scope="row">{re.escape(name)}</th>.*?</tr>', html)
        assert len(found) == 1, name
        return found[0]

    assert 'class="changed"' in row("train.learning_rate") and "command line" in row("train.learning_rate")
    assert 'class="changed"' in row("model.lora_rank") and "command line" not in row("model.lora_rank")
    assert 'class="changed"' not in row("model.finetune_type")
    assert 'class="changed"' in row("train.resolution") and "[64, 64]" in row("train.resolution")
    assert 'class="changed"' not in row("eval.resolution"), "eval takes train's where it is not given"
    assert 'class="changed"' in row("rewards[0].name")
    assert 'class="changed"' not in row("plugins"), "an empty list that is made anew each time is a default"


def test_monitors_with_band_and_alarm(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert "Monitors for reward hacking" not in page_of(folder).text
    message = "brightness 0.3 is below the first cycle's band"
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.log({"monitor/brightness": 0.5, "monitor/diversity": 0.2}, 6, "cycle", 4)
        band = {"monitor/brightness/low": 0.375, "monitor/brightness/high": 0.625}
        writer.log(
            band | {"monitor/diversity/low": float("-inf"), "monitor/diversity/high": float("inf")},
            6,
            "monitor_band",
            4,
        )
        writer.log({"monitor/brightness": 0.25, "monitor/diversity": 0.2}, 8, "cycle", 5)
        writer.log({"statistic": "brightness", "value": 0.3, "message": message}, 8, "alarm", 5)
    page = page_of(folder)
    chart = page.chart("Brightness")
    assert chart["lines"][0]["y"] == [0.5, 0.25] and chart["limits"] == [0.375, 0.625] and chart["marks"] == [5]
    assert "limits" not in page.chart("Diversity")
    assert message in page.text and "Alarms at cycle 5" in page.text


# ------------------------------------------------------------------------------------------------------- comparison
def test_comparison(tmp_path: Path, run: Path) -> None:
    changed = CONFIG.replace("learning_rate: 0.001", "learning_rate: 0.002").replace(
        "rewards: [", "rewards: [{name: z, reward_model: jpeg}, "
    )
    other = make_run(tmp_path / "second", cycles=2, config=changed, scale=2.0)
    page = page_of(run, other, output=tmp_path / "both.html")
    assert [r["name"] for r in page.data["runs"]] == ["first", "second"]
    lines = page.chart("Reward")["lines"]
    assert [line["name"] for line in lines] == ["first", "second"]
    assert lines[0]["y"] == [reward(c) for c in (1, 2, 3)] and lines[1]["y"] == [2.0 * reward(c) for c in (1, 2)]
    assert lines[0]["colour"] != lines[1]["colour"]
    html = re.sub(r"\s+", " ", page.html)
    rows = dict(re.findall(r'<tr><th scope="row">([\w.\[\]-]+)</th>(<td><code>.*?)</tr>', html))
    assert rows["train.learning_rate"] == "<td><code>0.001</code></td><td><code>0.002</code></td>"
    assert rows["rewards.z.reward_model"] == "<td><code>not set</code></td><td><code>jpeg</code></td>"
    assert "rewards.red.reward_model" not in rows, "a reward is compared with the one of its name"
    assert "train.seed" not in rows, "equal settings are not listed"
    finals = [(run / "samples/toy/cycle-000003.png"), (other / "samples/toy/cycle-000002.png")]
    assert [content for _, content in page.images()] == [path.read_bytes() for path in finals]
    assert "0.2500 → 0.5833 +0.3333" in page.words and "0.5000 → 0.9444 +0.4444" in page.words


def test_runs_of_the_same_name_are_told_apart(tmp_path: Path) -> None:
    folders = [make_run(tmp_path / part / "run", cycles=1) for part in ("a", "b", "c")]
    page = page_of(*folders, output=tmp_path / "c.html")
    assert [r["name"] for r in page.data["runs"]] == ["a/run", "b/run", "c/run"]


def test_runs_with_nothing_in_common(tmp_path: Path, run: Path) -> None:
    empty = tmp_path / "empty"
    empty.mkdir()
    (empty / "metrics.jsonl").write_text("")
    page = page_of(run, empty, output=tmp_path / "c.html")
    assert [line["name"] for line in page.chart("Reward")["lines"]] == ["first"]
    assert "no pictures of toy" in page.words and "holds no rows" in page.words


# ------------------------------------------------------------------------------------------------------- where it goes
def test_a_report_is_written_over_and_nothing_else_is(tmp_path: Path) -> None:
    folder = make_run(tmp_path / "run")
    assert write_report([folder]).path == folder / "report.html"
    with MetricsWriter(folder / "metrics.jsonl") as writer:
        writer.log({"loss": 4.5}, 8, "cycle", 4)
    assert page_of(folder).chart("Loss per cycle")["lines"][0]["y"][-1] == 4.5
    notes = tmp_path / "notes.txt"
    notes.write_text("mine")
    with pytest.raises(InputError, match=r"notes\.txt exists and is no report"):
        write_report([folder], notes)
    assert notes.read_text() == "mine"
    assert write_report([folder], tmp_path).path == tmp_path / "report.html"
    with pytest.raises(InputError, match="there is no folder"):
        write_report([folder], tmp_path / "no" / "r.html")
    with pytest.raises(InputError, match="given twice"):
        write_report([folder, tmp_path / "run" / ".." / "run"])
