"""Every code block of the documentation that can run is run, page by page, from top to bottom."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from .. import warm
from .pages import ROOT, Block, blocks_of, name_of, pages

RUN = {"python", "bash", "console", "toml"}
SHOWN = {"diff", "json", "text", "yaml"}
# Pages whose blocks are about the checkpoints that `make demo` leaves.
OF_THE_DEMO = {"docs/guides/command-line.md", "docs/guides/export.md"}
# Commands for whoever has a checkout, or has yet to install the package; the tests are themselves run by such a one.
OF_A_CHECKOUT = re.compile(r"^(make|pip install) ")
NOT_RUN = {
    "docs/guides/many-ranks.md": ["needs several ranks"],  # tests/e2e/test_exchange.py runs what it shows
    "docs/faq.md": ["an outline"],
    "docs/guides/clusters.md": ["needs Slurm"],
    "docs/guides/manager.md": ["a shell"],
    "docs/guides/metrics.md": ["needs opentelemetry"] * 2,  # tests/frameworks runs what the second one shows
    "docs/guides/resume.md": ["needs torchdata"],
    "docs/guides/command-line.md": [
        'the checkpoint "secret" is not there; the encryption guide runs these commands on one that is'
    ],
    "docs/guides/frameworks.md": [  # tests/frameworks runs what they show
        "needs a script to train",
        "needs Accelerate and several ranks",
        "needs Accelerate, and a checkpoint of a model",
        "needs transformers and several ranks",
        "needs transformers and several ranks",
        "needs transformers and several ranks",
        "needs Lightning and several ranks",
        "needs Lightning and several ranks",
        "needs torchtitan and a GPU",
        "needs torch_checkpointing",
        "needs torchft and several replicas",
        "an outline",
    ],
    "docs/guides/object-stores.md": [
        "needs a bucket and credentials",
        "needs a bucket and credentials",
        "needs a container and credentials",
        "needs a server",
    ],
    "docs/guides/tiers.md": ["needs a bucket"],
}


def _runs(block: Block) -> bool:
    lines = [line for line in block.code.splitlines() if line and not line.startswith("#")]
    of_a_checkout = block.language == "bash" and all(OF_A_CHECKOUT.match(line) for line in lines)
    return block.language in RUN and block.not_run is None and not of_a_checkout


RUNNABLE = {name_of(page): [b for b in blocks_of(page) if _runs(b)] for page in pages()}


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the checkpoints of `make demo`; to be copied, or linked to, and not changed."""
    folder = tmp_path_factory.mktemp("demo")
    _run(["-m", "tests.docs.demo_checkpoints", "demo-output/checkpoints"], folder)
    return folder / "demo-output"


@pytest.mark.parametrize("name", [name for name, blocks in RUNNABLE.items() if blocks])
def test_the_blocks_of_a_page_run(name: str, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    """Read from top to bottom, everything on a page does what it says, in one directory and one namespace."""
    if name in OF_THE_DEMO:
        (tmp_path / "demo-output").symlink_to(request.getfixturevalue("demo"))
    steps = [{"language": b.language, "code": b.code, "line": b.line} for b in RUNNABLE[name]]
    (tmp_path / "steps.json").write_text(json.dumps(steps))
    done = _run(["-m", "tests.docs.run_steps", str(ROOT / name), "steps.json"], tmp_path)
    assert done.splitlines()[-1] == f"{len(steps)} blocks of {name} ran"


def test_what_is_not_run_is_known() -> None:
    """No block is left out silently: these are the ones that cannot run, each with its reason."""
    found = {name_of(page): [b.not_run for b in blocks_of(page) if b.not_run is not None] for page in pages()}
    assert {name: reasons for name, reasons in found.items() if reasons} == NOT_RUN


@pytest.mark.parametrize("page", pages(), ids=name_of)
def test_each_block_says_its_language(page: Path) -> None:
    """A block is run, or it is of a language that is only shown."""
    assert {block.language for block in blocks_of(page)} <= RUN | SHOWN


def test_the_readme_saves_and_loads_in_few_lines() -> None:
    """The first Python block of the README is short, and it is one of those that run."""
    block = next(b for b in RUNNABLE["README.md"] if b.language == "python")
    lines = [line for line in block.code.splitlines() if line]
    assert len(lines) <= 8
    assert {"async_save", "load"} <= set(re.findall(r"dcp\.(\w+)\(", block.code))


def _run(arguments: list[str], folder: Path) -> str:
    environment = os.environ | {
        "PATH": f"{warm.bin_folder()}:{Path(sys.executable).parent}:{os.environ['PATH']}",
        "PYTHONPATH": str(ROOT),
        "PYTHONWARNINGS": "ignore",
        "COLUMNS": "100",
        "PYTEST_DEBUG_TEMPROOT": str(folder),  # a page may run pytest
    }
    command = [warm.python(), *arguments]
    done = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
    return done.stdout
