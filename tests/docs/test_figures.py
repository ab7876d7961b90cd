"""Pages of results, their pictures, and what the documentation quotes of them are what the committed results have."""

from __future__ import annotations

import functools
import re
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
from PIL import Image

from benchmarks import charts, quotes
from benchmarks.harness import RESULTS, stored

from .pages import ROOT, name_of, pages, without_quotes

_MEASURED = re.compile(r"(?<![\w.])(?:\d[\d,]*\.\d+ ?(?:%|(?:s|ms|GB/s|MB/s|times)\b)|\d+%)")
# What looks like a measurement, and is none: settings, sizes, limits and estimates.
NOT_MEASURED = {
    "docs/guides/command-line.md": ["3%"],
    "docs/guides/encryption.md": ["0.5 s"],
    "docs/guides/manager.md": ["2%", "14%"],  # of a simulation, asserted by tests/unit/job/test_interval.py
    "docs/guides/many-ranks.md": ["0.8 s"],
    "docs/guides/object-stores.md": ["5%", "5%"],
    "docs/guides/clusters.md": ["1.7 s", "4.4 s"],
}


MEASURED = sorted(path for path in RESULTS.glob("*.json") if "-" not in path.stem)  # neither quick ones nor drafts


@pytest.mark.parametrize("path", MEASURED, ids=name_of)
def test_a_page_is_of_its_results(path: Path) -> None:
    """No page is of another run than its file of results, or was written by older code."""
    page = path.with_suffix(".md").read_text(encoding="utf-8")
    named = re.search(r"`python -m (\S+) --redraw`", page)
    module = named[1] if named else f"benchmarks.{path.stem}"
    spec = find_spec(module)
    assert spec is not None, module
    benchmark = import_module(f"{module}.__main__" if spec.submodule_search_locations else module)
    assert page == benchmark.render(stored(path.stem)) + "\n"


_written = functools.cache(quotes.pages)


@pytest.mark.parametrize("path", [*pages(), RESULTS / "history.md"], ids=name_of)
def test_what_is_quoted_is_measured(path: Path) -> None:
    """Each figure and table with a mark is what the results have: `python -m benchmarks.quotes` writes them."""
    assert path.read_text(encoding="utf-8") == _written()[path]


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_no_measured_figure_is_typed_by_hand(page: Path) -> None:
    """Times, speeds and shares carry a mark, which names the results that they are from, or are listed above."""
    assert _MEASURED.findall(without_quotes(page)) == NOT_MEASURED.get(name_of(page), [])


@pytest.mark.parametrize("path", sorted(RESULTS.glob("*.png")), ids=name_of)
def test_a_picture_is_of_its_results(path: Path) -> None:
    """Its metadata has the commit and the digest of the results from which it was drawn."""
    with Image.open(path) as picture:
        assert charts.source(path.stem).items() <= picture.info.items()


def test_a_figure_of_another_run_is_seen() -> None:
    """A figure and a table typed by hand are written anew, and everything else stays."""
    page = "A table:\n\n<!-- measured: goals -->\n\n| old |\n\nIt had 7<!-- measured: soak: faults --> saves, of 8.\n"
    written = quotes.written(page)
    assert "| old |" not in written and "| page | figure | wanted | measured |" in written
    assert re.search(r"\|\n\nIt had [\d,]+<!-- measured: soak: faults --> saves, of 8\.\n$", written)
    assert "It had 7<" not in written
    assert quotes.written(written) == written
    with pytest.raises(KeyError, match="gone"):
        quotes.written("7<!-- measured: soak: gone -->")
    assert (ROOT / "README.md").read_text(encoding="utf-8").count("<!-- measured: ") >= 8
