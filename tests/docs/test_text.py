"""What the documentation looks like to a reader: short enough, in short sentences, with links that lead somewhere."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

import dcp_tensorizer

from .pages import DOCS, ROOT, name_of, pages, texts, without_blocks, without_quotes

README_WORDS = 1200
SENTENCE_WORDS = 40
RESULTS = ROOT / "benchmarks" / "results"

_LINK = re.compile(r"\[(?:[^\]]*)\]\((?!https?:|mailto:)([^)#\s]*)(?:#([^)\s]*))?\)")


def _sentences(page: Path) -> list[str]:
    """The sentences of a page, outside code, tables and headings; an item of a list ends one."""
    lines = [line for line in without_blocks(page).splitlines() if not re.match(r"\s*(\||#|!!!|:::|options:)", line)]
    paragraphs = re.split(r"\n\s*\n|\n\s*(?:[-*]|\d+\.)\s", "\n".join(lines))
    plain = (re.sub(r"\]\([^)]*\)", "]", " ".join(paragraph.split())) for paragraph in paragraphs)
    return [s for paragraph in plain for s in re.split(r"(?<=[.!?])[*\"')]*\s+(?=[A-Z`*\[\"(])", paragraph) if s]


def _slug(heading: str) -> str:
    words = re.sub(r"[^\w\s-]", "", re.sub(r"[`*]", "", heading).strip().lower())
    return re.sub(r"[\s]+", "-", words)


def _anchors(page: Path) -> set[str]:
    return {_slug(heading) for heading in re.findall(r"^#+ (.+)$", without_blocks(page), re.MULTILINE)}


def test_the_readme_is_one_screen() -> None:
    """The README stays short enough to be read: its words count, but for code and what it quotes of the results."""
    assert len(without_quotes(ROOT / "README.md").split()) <= README_WORDS


@pytest.mark.parametrize("page", texts(), ids=name_of)
def test_sentences_are_short(page: Path) -> None:
    """No sentence outside code and tables has more than 40 words."""
    assert [s for s in _sentences(page) if len(s.split()) > SENTENCE_WORDS] == []


@pytest.mark.parametrize("page", texts(), ids=name_of)
def test_links_lead_somewhere(page: Path) -> None:
    """Each relative link or picture is a file of the repository, and each anchor a heading in it."""
    for target, anchor in _LINK.findall(without_blocks(page)):
        path = (page.parent / target).resolve() if target else page
        assert path.exists(), f"{name_of(page)}: {target}"
        assert not anchor or anchor in _anchors(path), f"{name_of(page)}: {target}#{anchor}"


@pytest.mark.parametrize("page", texts(), ids=name_of)
def test_admonitions_have_indented_text(page: Path) -> None:
    """Text beside ``!!! note``, instead of indented below it, would be shown as a plain paragraph."""
    assert re.findall(r'^!!! \w+ [^"].*$', page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize("page", texts(), ids=name_of)
def test_no_merge_is_left_unfinished(page: Path) -> None:
    """No line marks a conflict between two versions of a page."""
    assert re.findall(r"^(?:<{7}|={7}|>{7})(?: .*)?$", page.read_text(encoding="utf-8"), re.MULTILINE) == []


@pytest.mark.parametrize(("target", "fails"), [("index.md", False), ("nowhere.md", True)])
def test_make_check_fails_on_a_broken_link(tmp_path: Path, target: str, fails: bool) -> None:
    """The command by which it builds the site counts warnings, and those of `mkdocs.yml` are on."""
    folder = Path(sys.executable).parent
    environment = {name: value for name, value in os.environ.items() if name not in ("MAKEFLAGS", "MAKELEVEL")}
    asked = subprocess.run(
        ["make", "--dry-run", "--no-print-directory", "check", f"BIN={folder}"],
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    (command,) = [line for line in asked.stdout.splitlines() if f"{folder}/mkdocs build" in line]
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    (validation,) = re.findall(r"^validation:\n(?:  .*\n)+", config, re.MULTILINE)
    (tmp_path / "mkdocs.yml").write_text(f"site_name: a\n{validation}")
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs" / "index.md").write_text(f"# A\n\n[b]({target})\n")
    done = subprocess.run(command, shell=True, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert (done.returncode != 0) is fails, done.stderr
    assert (f"'{target}'" in done.stderr) is fails


def test_the_commands_come_first_in_the_readme() -> None:
    """Whoever opens the README sees the two commands at once."""
    top = (ROOT / "README.md").read_text(encoding="utf-8").splitlines()[:12]
    assert [line.split()[:2] for line in top if line.startswith("make ")] == [["make", "demo"], ["make", "test"]]


def test_the_site_shows_every_page() -> None:
    """Each page is in the navigation once, and it names no others; the page of figures leads to all results."""
    named = re.findall(r"[\w/-]+\.md", (ROOT / "mkdocs.yml").read_text(encoding="utf-8").partition("\nnav:")[2])
    assert sorted(named) == sorted({"index.md", *(page.relative_to(DOCS).as_posix() for page in pages()[1:])})
    figures = without_quotes(DOCS / "figures" / "index.md")
    linked = re.findall(r"^\| \[[^]]+\]\(\.\./\.\./benchmarks/results/(\w+)\.md(?:#[\w-]+)?\)", figures, re.MULTILINE)
    assert sorted(set(linked)) == sorted(path.stem for path in RESULTS.glob("*.md") if "-" not in path.stem)


def test_the_reference_shows_every_public_name() -> None:
    """Everything that the package exports is in the reference: errors together, and modules by themselves."""
    reference = "\n".join(path.read_text(encoding="utf-8") for path in (DOCS / "reference").glob("*.md"))
    shown = set(re.findall(r"^::: dcp_tensorizer\.(\w+)", reference, re.MULTILINE))
    public = {name for name in dcp_tensorizer.__all__ if not name.startswith("__")}
    assert shown == (public - set(dcp_tensorizer.errors.__all__)) | {
        *("errors", "manager", "reader", "run", "storage", "testing", "tools", "writer")
    }
