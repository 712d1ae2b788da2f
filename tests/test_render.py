"""Pages stand alone: nothing fetched, nothing run, and they say where their numbers are from."""

from __future__ import annotations

import base64
import json
import re
from pathlib import Path

import nbformat
import pytest
from nbformat import v4

from flashgap import reproduce
from flashgap.render import RenderError, render_all, watermark
from flashgap.study import Study

PIXEL = base64.b64encode(b"\x89PNG\r\n\x1a\nnot really").decode()
MARK = {
    "profile": "smoke",
    "replay": False,
    "executed_utc": "2026-12-01T05:00:00+00:00",
    "machine": "this machine",
    "measured_on": ["a <fast> machine"],
}


def executed(path: Path, title: str, data: dict | None = None, **mark: object) -> None:
    """An executed notebook with one rich output."""
    shown = v4.new_output("display_data", data=data or {"image/png": PIXEL, "text/plain": "picture"})
    cells = [
        v4.new_markdown_cell(f"# {title} & more\n\nWhy? [source](https://example.org)\n\n## Part"),
        v4.new_code_cell("secret_code = 1", outputs=[shown], execution_count=1),
    ]
    path.parent.mkdir(parents=True, exist_ok=True)
    nbformat.write(v4.new_notebook(cells=cells, metadata={"flashgap": {**MARK, **mark}}), path)


@pytest.fixture
def study():
    return Study.load("smoke")


def test_one_self_contained_file(study, tmp_path):
    """If this fails, the report attached to a review misses pictures or calls home."""
    executed(tmp_path / "00_a.ipynb", "First")
    executed(tmp_path / "01_b.ipynb", "Second")
    text = render_all(study, tmp_path, ["00_a", "01_b", "02_c"]).read_text()
    assert f"data:image/png;base64,{PIXEL}" in text
    assert not re.search(r"<(script|link|iframe)\b", text)
    assert not re.search(r"src=[\"']?http", text)
    assert "First &amp; more" in text
    assert "Second &amp; more" in text
    assert "Not run yet: 02_c." in text
    assert "a &lt;fast&gt; machine" in text
    assert "2026-12-01T05:00:00+00:00" in text


def test_contents_point_at_headings(study, tmp_path):
    """If this fails, the contents of the merged page lead nowhere or to the wrong notebook."""
    executed(tmp_path / "00_a.ipynb", "First")
    executed(tmp_path / "01_b.ipynb", "Second")
    text = render_all(study, tmp_path, ["00_a", "01_b"]).read_text()
    ids = re.findall(r'\bid="([^"]+)"', text)
    assert len(ids) == len(set(ids))
    targets = re.findall(r'href="#([^"]+)"', text)
    assert len(targets) == 4
    assert set(targets) <= set(ids)


@pytest.mark.parametrize(
    "outside",
    [
        "<script>alert(1)</script>",
        '<img src="https://x.org/a.png">',
        "<style>@import 'x'</style>",
        "<link rel=x>",
    ],
)
def test_outside_resources_are_refused(study, tmp_path, outside):
    """If this fails, a page fetches or runs something on a reviewer's machine."""
    executed(tmp_path / "00_a.ipynb", "First", {"text/html": outside, "text/plain": ""})
    with pytest.raises(RenderError, match="00_a"):
        render_all(study, tmp_path, ["00_a"])


def test_replay_and_random_weights_are_said_on_every_page(study, tmp_path):
    """If this fails, a replayed or meaningless number passes for a measured one."""
    executed(tmp_path / "00_a.ipynb", "First", replay=True)
    render_all(study, tmp_path, ["00_a"])
    for name in ("00_a.html", "index.html"):
        text = (tmp_path / name).read_text()
        assert "Replayed from the reference records measured on a &lt;fast&gt; machine" in text
        assert "random weights: not evidence" in text
        assert "<dt>rendered on</dt><dd>this machine</dd>" in text


def test_watermark_follows_the_model():
    """If this fails, real results are called no evidence, or random ones are not marked."""
    assert watermark(Study.load("cpu")) == ""
    assert watermark(Study.load("smoke")) == "random weights: not evidence"
    assert watermark(Study.load("h200")) == "random weights: speed only"


def test_pages_are_rewritten_only_on_change(study, tmp_path):
    """If this fails, an unchanged run pays for nbconvert or touches files."""
    executed(tmp_path / "00_a.ipynb", "First")
    index = render_all(study, tmp_path, ["00_a"])
    before = index.stat().st_mtime_ns
    assert render_all(study, tmp_path, ["00_a"]).stat().st_mtime_ns == before
    executed(tmp_path / "00_a.ipynb", "Changed")
    assert "Changed" in render_all(study, tmp_path, ["00_a"]).read_text()
    (tmp_path / "00_a.html").unlink()
    render_all(study, tmp_path, ["00_a"])
    assert (tmp_path / "00_a.html").exists()


def test_nothing_to_render(study, tmp_path):
    """If this fails, an empty report is written as if it were one."""
    with pytest.raises(RenderError, match="make reproduce"):
        render_all(study, tmp_path, ["00_a"])


def test_executed_notebook_says_where_it_is_from(study, tmp_path):
    """If this fails, a page cannot name its machines, or names this machine's folders."""
    path = tmp_path / "00_a.ipynb"
    cell = v4.new_code_cell("f()", execution_count=1)
    cell["outputs"] = [
        v4.new_output("stream", name="stderr", text=f"{tmp_path}/site.py:1: UserWarning"),
        v4.new_output("display_data", {"text/html": f"<b>{tmp_path}</b>", "image/png": "aGk="}),
    ]
    nbformat.write(v4.new_notebook(cells=[cell], metadata={"papermill": {"input_path": str(tmp_path)}}), path)
    reproduce.mark(
        path,
        study,
        True,
        {"fingerprint": {"cpu": "A CPU", "cores": 2, "gpus": ["H200, 1 MiB, 5", "H200, 1 MiB, 5"]}},
    )
    metadata = json.loads(path.read_text())["metadata"]
    assert "papermill" not in metadata
    assert metadata["flashgap"]["machine"] == "A CPU, 2 cores, 2 x H200"
    assert metadata["flashgap"]["replay"] is True
    assert str(tmp_path) not in path.read_text()
