"""The wheel, as `make dist` installs it into an environment that has nothing else."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
CLEAN = ROOT / "build" / "clean" / "bin" / "python"


def _run(*command, cwd=None):
    done = subprocess.run([str(part) for part in command], cwd=cwd, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_clean_environment_runs_the_readme_and_the_tutorial():
    """Both save and load with what the wheel requires, and what it requires fits together."""
    done = _run(CLEAN, "-I", Path(__file__).with_name("newcomer.py"))
    assert "saved and loaded checkpoints/step-0, checkpoints/step-1, checkpoints/step-100," in done
    assert "No broken requirements" in _run(sys.executable, "-m", "pip", "--python", CLEAN, "check")


_TYPED = """
import torch
import dcp_tensorizer

def train(state: dict[str, object]) -> None:
    with SafetensorsStorageWriter("model") as writer:
        writer.wait_published()
    with CheckpointManager("run") as manager:
        manager.save(1, state, metrics={"loss": torch.ones(())})
    dcp_tensorizer.tools.verify("run")
"""


def test_type_checkers_see_every_public_name(tmp_path):
    """A program that imports all of them, and uses some, is checked strictly, against the installed package."""
    code = "import dcp_tensorizer as d; print('from dcp_tensorizer import', ', '.join(d.__all__))"
    (tmp_path / "names.py").write_text(_run(CLEAN, "-I", "-W", "error", "-c", code) + _TYPED)
    checker = [sys.executable, "-m", "mypy", "--strict", "--config-file=", f"--cache-dir={tmp_path / 'cache'}"]
    # Not in the checkout, where mypy would check its package instead of the installed one.
    assert "no issues found" in _run(*checker, "--python-executable", CLEAN, "names.py", cwd=tmp_path)


def test_the_page_of_a_package_index_has_no_relative_links():
    """The README in the wheel leads to the repository, and so does its picture."""
    code = "from importlib.metadata import metadata; print(metadata('dcp_tensorizer').get_payload())"
    readme = _run(CLEAN, "-I", "-c", code)
    targets = re.findall(r"\]\(([^)#][^)]*)\)", readme)
    assert len(targets) > 20
    assert [target for target in targets if not target.startswith("https://")] == []
    assert re.search(r"!\[[^\]]*\]\(https://raw\.githubusercontent\.com/[^)]*/benchmarks/results/save\.png\)", readme)


def test_the_command_line_says_what_it_needs(tmp_path):
    """Without its extra it names that; nothing else of the package needs it."""
    command = [CLEAN.with_name("dcp-tensorizer"), "ls", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    assert done.returncode != 0
    assert "dcp_tensorizer[cli]" in done.stdout + done.stderr
