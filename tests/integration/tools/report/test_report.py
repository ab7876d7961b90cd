"""The HTML report: its contents, its reads, and that names in checkpoints cannot escape from it."""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch

from dcp_tensorizer import tools
from dcp_tensorizer._tensor_file.regions import Region
from dcp_tensorizer.errors import NotCommitted, ReadError
from dcp_tensorizer.tools import convert
from dcp_tensorizer.tools._report import measure

from ....lab.checkpoints import make_checkpoint
from ....lab.states import filled

FIELDS = ("elements", "zeros", "nans", "infinities", "smallest", "largest", "mean", "deviation", "norm", "distance")


class Page(HTMLParser):
    """A parsed page: its tags with their attributes, and the contents of scripts and styles."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.raw: list[tuple[str, dict[str, str | None], str]] = []
        self.text = path.read_text(encoding="utf-8")
        self.feed(self.text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))

    def handle_data(self, data: str) -> None:
        if self.tags and self.tags[-1][0] in ("script", "style") and data.strip():
            self.raw.append((*self.tags[-1], data))

    @property
    def data(self) -> dict[str, Any]:
        (content,) = [content for tag, attributes, content in self.raw if attributes.get("id") == "data"]
        return json.loads(content)

    def values(self, key: str) -> list[dict[str, Any] | None]:
        """Returns the statistics of a tensor in each checkpoint."""
        (rows,) = [tensor[4] for tensor in self.data["tensors"] if tensor[0] == key]
        return [row and dict(zip(FIELDS, row, strict=False)) for row in rows]


@pytest.fixture
def steps(tmp_path: Path) -> list[Path]:
    """Makes three steps of a tensor that moves, one that stays, one that grows, and one that comes later."""
    made = []
    for number, step in enumerate((9, 10, 11)):
        tensors = {
            "moves": torch.full((4, 4), float(number)),
            "stays": filled(torch.bfloat16, (50, 4)),
            "grows": torch.ones(2 + (number > 1), 3),
        }
        if number:
            tensors["later"] = torch.tensor([1.0, math.nan, math.inf])
        made.append(make_checkpoint(tmp_path / f"step-{step}", tensors, {"lr": 0.5}))
    return made


def test_what_it_says_of_several_steps(steps: list[Path], tmp_path: Path) -> None:
    """The page has the steps in order, with each tensor's norm and its distance from the previous step."""
    done = tools.report([steps[1], steps[2], steps[0]], tmp_path / "report.html")
    assert (done.path, done.tensors, done.nbytes) == (
        str(tmp_path / "report.html"),
        4,
        (tmp_path / "report.html").stat().st_size,
    )
    page = Page(tmp_path / "report.html")
    assert [(c["step"], c["name"], c["objects"]) for c in page.data["checkpoints"]] == [
        (9, "step-9", 1),
        (10, "step-10", 1),
        (11, "step-11", 1),
    ]
    assert all(c["saved"].endswith("+00:00") for c in page.data["checkpoints"])
    assert [(v["norm"], v["distance"]) for v in page.values("moves") if v] == [(0.0, None), (4.0, 4.0), (8.0, 4.0)]
    assert [v and v["distance"] for v in page.values("stays")] == [None, 0.0, 0.0]
    assert [v and v["distance"] for v in page.values("grows")] == [None, 0.0, None]
    later = page.values("later")
    assert later[0] is None
    assert [(v["nans"], v["infinities"], v["norm"]) for v in later[1:] if v] == [(1, 1, 1.0), (1, 1, 1.0)]


def test_what_did_not_change_is_read_once(steps: list[Path], tmp_path: Path) -> None:
    """A tensor with unchanged digests is read once for all checkpoints."""
    totals: list[tuple[int, int]] = []
    tools.report(steps, tmp_path / "report.html", on_progress=lambda done, total: totals.append((done, total)))
    moves, stays, grows, later = 3 * 64, 400, 24 + 36, 12
    assert totals[-1] == (moves + stays + grows + later, moves + stays + grows + later)


@pytest.mark.parametrize("block", [16, 1 << 20])
def test_blocks_add_up(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, block: int) -> None:
    """Statistics do not depend on chunks or on the size of the blocks that are read."""
    monkeypatch.setattr(measure, "_BLOCK", block)
    values = torch.randn(7, 5, generator=torch.Generator().manual_seed(0))
    chunks = {"x": [Region((0, 0), (7, 2)), Region((0, 2), (7, 3))]}
    make_checkpoint(tmp_path / "a", {"x": values}, None, chunks)
    make_checkpoint(tmp_path / "b", {"x": values * 3})
    tools.report([tmp_path / "a", tmp_path / "b"], tmp_path / "report.html")
    a, b = Page(tmp_path / "report.html").values("x")
    assert a is not None and b is not None
    assert (a["elements"], b["norm"]) == (35, pytest.approx(3 * values.norm().item(), rel=1e-4))
    assert b["distance"] == pytest.approx(2 * values.norm().item(), rel=1e-4)
    assert (b["smallest"], b["largest"]) == tuple(pytest.approx(3 * v.item(), rel=1e-4) for v in values.aminmax())


def test_every_format_that_convert_reads(steps: list[Path], tmp_path: Path) -> None:
    """The statistics are the same for every format."""
    paths = [steps[2]]
    for to in ("torch", "dcp"):
        convert(steps[2], tmp_path / to, to)
        paths.append(tmp_path / to)
    tools.report(paths, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert [c["format"] for c in page.data["checkpoints"]] == ["dcp_tensorizer", "torch", "dcp"]
    for key in ("moves", "stays", "later"):
        ours, *others = page.values(key)
        assert ours is not None
        assert [other and other | {"distance": None} for other in others] == [ours, ours]


def test_names_cannot_escape(tmp_path: Path) -> None:
    """Keys and paths with HTML in them are data: the page has only its own scripts and styles."""
    key = "</script><script>alert(1)</script><!--\u2028&amp;'\"{{DATA}}"
    make_checkpoint(tmp_path / "<img src=x>", {key: torch.ones(2)})
    tools.report([tmp_path / "<img src=x>"], tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert page.data["tensors"][0][0] == key
    assert page.data["checkpoints"][0]["name"] == "<img src=x>"
    assert [tag for tag, _, _ in page.raw] == ["style", "script", "script"]
    assert "img" not in {tag for tag, _ in page.tags}


def test_the_page_asks_for_nothing(steps: list[Path], tmp_path: Path) -> None:
    """The page makes no request, and its policy allows only its own style and script."""
    tools.report(steps, tmp_path / "report.html")
    page = Page(tmp_path / "report.html")
    assert [name for _, attributes in page.tags for name in attributes if name in ("src", "href", "style")] == []
    assert re.findall(r"@import|url\(|\bfetch\(|XMLHttp|WebSocket|import\(", page.text) == []
    (policy,) = [a["content"] for _, a in page.tags if a.get("http-equiv") == "Content-Security-Policy"]
    style, script = (
        base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        for tag, attributes, content in page.raw
        if attributes.get("id") != "data"
    )
    assert policy == f"default-src 'none'; style-src 'sha256-{style}'; script-src 'sha256-{script}'"


def test_what_has_no_values(tmp_path: Path) -> None:
    """Tensors without elements or arithmetic, and checkpoints without tensors, are shown."""
    strange = filled(torch.float4_e2m1fn_x2, (4, 2))
    make_checkpoint(tmp_path / "a", {"none": torch.empty(0, 3), "strange": strange, "scalar": torch.tensor(2)})
    make_checkpoint(tmp_path / "b", {}, {"lr": 1})
    tools.report([tmp_path / "a"], tmp_path / "a.html")
    page = Page(tmp_path / "a.html")
    assert page.values("strange") == [None]
    assert [value and value["elements"] for key in ("none", "scalar") for value in page.values(key)] == [0, 1]
    tools.report([tmp_path / "b"], tmp_path / "b.html")
    assert Page(tmp_path / "b.html").data["tensors"] == []


@pytest.mark.parametrize(
    ("paths", "error", "words"),
    [
        ([], ValueError, "checkpoints is empty"),
        (["nowhere"], NotCommitted, "nowhere"),
        (["."], NotCommitted, "checkpoints below it: step-11, step-10, step-9"),
    ],
)
def test_there_must_be_checkpoints(
    steps: list[Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    paths: list[str],
    error: type[Exception],
    words: str,
) -> None:
    """Without a checkpoint at each path, no page is written."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(error, match=words):
        tools.report(paths, "report.html")
    assert not (tmp_path / "report.html").exists()


def test_damage_is_an_error_and_the_old_page_stays(steps: list[Path], tmp_path: Path) -> None:
    """If a checkpoint is damaged, the old page stays."""
    (tmp_path / "report.html").write_text("old")
    (data,) = steps[0].glob("*.tensors")
    content = data.read_bytes()
    data.write_bytes(content[: len(content) // 2])
    with pytest.raises(ReadError, match=data.name):
        tools.report(steps, tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text() == "old"
    tools.report(steps[1:], tmp_path / "report.html")
    assert (tmp_path / "report.html").read_text().startswith("<!doctype html>")


def test_to_a_url(steps: list[Path]) -> None:
    """The page may be written to a URL."""
    done = tools.report(steps[:1], "memory://reports/a.html")
    try:
        assert len(fsspec.filesystem("memory").cat("/reports/a.html")) == done.nbytes
    finally:
        fsspec.filesystem("memory").rm("/reports", recursive=True)


def test_checkpoints_of_one_name_are_told_apart(tmp_path: Path) -> None:
    """Checkpoints of equal names are shown by their paths, in the given order."""
    for run in ("b", "a"):
        make_checkpoint(tmp_path / run / "step-1", {"x": torch.ones(1)})
    tools.report([tmp_path / "b" / "step-1", tmp_path / "a" / "step-1"], tmp_path / "report.html")
    names = [c["name"] for c in Page(tmp_path / "report.html").data["checkpoints"]]
    assert names == [str(tmp_path / run / "step-1") for run in ("b", "a")]
