"""The licences that docs/compatibility.md lists."""

from importlib.metadata import metadata
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]


def _required(name):
    """The distributions that one requires, and those that they require: without extras, as no requirement has one."""
    found, looking = set(), [name]
    while looking:
        for words in metadata(looking.pop()).get_all("Requires-Dist") or ():
            requirement = Requirement(words)
            if requirement.marker is None or requirement.marker.evaluate({"extra": ""}):
                assert not requirement.extras, words
                if (required := canonicalize_name(requirement.name)) not in found:
                    found.add(required)
                    looking.append(required)
    return found


def test_the_licences_of_all_that_is_installed_are_listed():
    """The table of compatibility.md has each package that comes with this one, and no other."""
    table = (ROOT / "docs" / "compatibility.md").read_text().partition("| package | licence | required by |")[2]
    names = [row.split("|")[1] for row in table.partition("\n\n")[0].splitlines() if row.count("|") == 4][1:]
    assert {name.strip() for row in names for name in row.split(",")} == _required("dcp_tensorizer")
