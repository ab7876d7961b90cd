"""The wheel, as `pip install` brings it into an environment that has nothing else."""

import re
import subprocess
import sys
from importlib.metadata import distribution, metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]
PIP = (sys.executable, "-m", "pip", "--python")


@pytest.fixture(scope="module")
def clean(tmp_path_factory):
    """The interpreter of a clean environment in which the built wheel is installed."""
    folder = tmp_path_factory.mktemp("clean")
    _run(sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", folder, ROOT)
    (wheel,) = folder.glob("dcp_tensorizer-*.whl")
    _run(sys.executable, "-m", "venv", "--without-pip", folder / "venv")
    python = folder / "venv" / "bin" / "python"
    _run(*PIP, python, "install", "--quiet", "--no-deps", wheel)
    packages = Path(_run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    for name in _required("dcp_tensorizer"):
        _link(name, packages)
    return python


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


def _link(name, packages):
    """Links to the files of a distribution that is installed here: what pip would unpack, gigabytes, is the same."""
    for file in distribution(name).files or ():
        if ".." not in file.parts and "__pycache__" not in file.parts:
            link = packages / file
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(file.locate())


def _run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_clean_environment_runs_the_readme_and_the_tutorial(clean):
    """Both save and load with what the wheel requires, and what it requires fits together."""
    done = _run(clean, "-I", ROOT / "tests" / "docs" / "use_wheel.py")
    assert "saved and loaded checkpoints/step-0, checkpoints/step-1, checkpoints/step-100," in done
    assert "No broken requirements" in _run(*PIP, clean, "check")


def test_the_licences_of_all_that_is_installed_are_listed():
    """The table of compatibility.md has each package that comes with this one, and no other."""
    table = (ROOT / "docs" / "compatibility.md").read_text().partition("| package | licence | required by |")[2]
    names = [row.split("|")[1] for row in table.partition("\n\n")[0].splitlines() if row.count("|") == 4][1:]
    assert {name.strip() for row in names for name in row.split(",")} == _required("dcp_tensorizer")


def test_the_page_of_a_package_index_has_no_relative_links(clean):
    """The README in the wheel leads to the repository, and so does its picture."""
    code = "from importlib.metadata import metadata; print(metadata('dcp_tensorizer').get_payload())"
    readme = _run(clean, "-c", code)
    targets = re.findall(r"\]\(([^)#][^)]*)\)", readme)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.search(r"!\[[^\]]*\]\(https://raw\.githubusercontent\.com/[^)]*/benchmarks/results/save\.png\)", readme)


def test_the_command_line_says_what_it_needs(clean, tmp_path):
    """Without its extra it names that; nothing else of the package needs it."""
    done = subprocess.run(
        [clean.with_name("dcp-tensorizer"), "ls", tmp_path], capture_output=True, text=True, timeout=600
    )
    assert done.returncode != 0
    assert "dcp_tensorizer[cli]" in done.stdout + done.stderr
