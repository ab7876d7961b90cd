"""What the site shows of files outside docs/: the README, the changelog, and the benchmarks' results and pictures.

Pages link to them by their places in the repository, as readers of the repository need it. The hook takes those files
into the site, and turns the links to them. A link to any other file of the repository becomes plain text.
"""

from __future__ import annotations

import posixpath
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
# A link or a picture: its text, and its target if that is a path.
LINK = re.compile(r"(!?)\[([^\]]*)\]\((?![a-z]+:|#)([^)#\s]+)(#[^)\s]*)?\)")


def _taken() -> dict[str, str]:
    """Where the files that the site takes in have their place in it."""
    results = sorted(path for path in RESULTS.iterdir() if path.suffix in {".md", ".png"})
    texts = {"README.md": "index.md", "CHANGELOG.md": "changelog.md"}
    return texts | {f"benchmarks/results/{p.name}": f"figures/{p.name}" for p in results}


def on_files(files: Files, config: Any) -> Files:
    """Adds the files from outside."""
    for path, uri in _taken().items():
        if path.endswith(".md"):
            files.append(File.generated(config, uri, content=_with_title(ROOT / path)))
        else:
            files.append(File.generated(config, uri, abs_src_path=str(ROOT / path)))
    return files


def _with_title(path: Path) -> str:
    """A page needs one; the results of a benchmark may begin with a table."""
    text = path.read_text(encoding="utf-8")
    return text if text.startswith("# ") else f"# {path.stem.capitalize()}\n\n{text}"


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Turns the links to files outside docs/, and those that files from there have to pages."""
    taken, uri = _taken(), page.file.src_uri
    sources = {inside: path for path, inside in taken.items()}
    source = posixpath.dirname(sources.get(uri, f"docs/{uri}"))

    def turned(link: re.Match[str]) -> str:
        bang, text, target, anchor = link[1], link[2], link[3], link[4] or ""
        path = posixpath.normpath(posixpath.join(source, target))
        inside = taken.get(path) or (path.removeprefix("docs/") if path.startswith("docs/") else None)
        if inside is None:
            return text
        return f"{bang}[{text}]({posixpath.relpath(inside, posixpath.dirname(uri))}{anchor})"

    return LINK.sub(turned, markdown)


def on_page_content(html: str, **_: Any) -> str:
    """Ends the sentence before a literal block of a docstring as one reads it: with one colon."""
    return html.replace("::</p>", ":</p>")
