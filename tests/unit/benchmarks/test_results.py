"""The pages of results are what their benchmarks make of the stored results."""

from __future__ import annotations

import re
from importlib import import_module
from importlib.util import find_spec

import pytest

from benchmarks.harness import RESULTS, stored


@pytest.mark.parametrize("name", sorted(path.stem for path in RESULTS.glob("*.json")))
def test_a_page_is_of_its_results(name: str) -> None:
    """No page is of another run than its file of results, or was written by older code."""
    page = (RESULTS / f"{name}.md").read_text(encoding="utf-8")
    named = re.search(r"`python -m (\S+) --redraw`", page)
    module = named[1] if named else f"benchmarks.{name}"
    spec = find_spec(module)
    assert spec is not None, module
    benchmark = import_module(f"{module}.__main__" if spec.submodule_search_locations else module)
    assert page == benchmark.render(stored(name)) + "\n"
