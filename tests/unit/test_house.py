"""The house: what lies where. Who may import whom is in ``pyproject.toml``; ``make check`` looks at that."""

from __future__ import annotations

import json
import re

from .support import PACKAGE, run_python


def test_who_does_not_encrypt_does_not_pay_for_it() -> None:
    """Importing the package imports neither tensorizer nor libnacl, which take a second."""
    script = "import sys, dcp_tensorizer; print([name for name in ('tensorizer', 'libnacl') if name in sys.modules])"
    assert run_python(script).stdout.strip() == "[]"


def test_the_writer_process_does_without_torch() -> None:
    """It starts in a tenth of the time and a fifth of the memory, on every rank."""
    script = "import sys, dcp_tensorizer._writer_process.worker; print('torch' in sys.modules)"
    assert run_python(script).stdout.strip() == "False"


def test_only_public_modules_have_public_names() -> None:
    """What users may import lies at the top; the folders and modules beside it begin with an underscore."""
    names = {path.stem for path in PACKAGE.iterdir() if path.suffix == ".py" or (path / "__init__.py").is_file()}
    assert {name for name in names if not name.startswith("_")} == {"convert", "errors", "reader", "writer"}


def test_folders_import_nothing_by_themselves() -> None:
    """An ``__init__`` that imported something would bring torch into the writer process."""
    assert [str(path) for path in PACKAGE.rglob("__init__.py") if path.parent != PACKAGE and path.read_text()] == []


def test_no_module_is_longer_than_a_reader_can_hold_in_mind() -> None:
    """350 lines; what is longer is two things."""
    lengths = {str(path.relative_to(PACKAGE)): len(path.read_text().splitlines()) for path in PACKAGE.rglob("*.py")}
    assert {name: length for name, length in lengths.items() if length > 350} == {}


def test_torchs_private_names_are_in_one_place() -> None:
    """A new release of torch may move them: then one module changes."""
    private = re.compile(
        r"(?:from|import) torch[\w.]*\._|\btorch(?:\.\w+)*\._[a-z]|\._local_tensor\b|_checkpoint_offset"
    )
    found = {
        str(path.relative_to(PACKAGE)): private.findall(path.read_text())
        for path in PACKAGE.rglob("*.py")
        if path.name != "_torch_compat.py"
    }
    assert {name: uses for name, uses in found.items() if uses} == {}


def test_importing_changes_neither_the_environment_nor_the_root_logger() -> None:
    """An import of this package leaves process-wide state as torch's and fsspec's own imports leave it."""
    script = """
import json, logging, os, signal
import torch.distributed.checkpoint, fsspec, tensorizer
def state():
    root = logging.getLogger()
    own = logging.getLogger("dcp_tensorizer")
    return [dict(os.environ), root.level, len(root.handlers), root.disabled, logging.raiseExceptions,
            [signal.getsignal(n) is not None and str(signal.getsignal(n)) for n in (2, 15)], torch.get_num_threads(),
            own.level, len(own.handlers), own.propagate]
before = state()
import dcp_tensorizer
print(json.dumps([before, state()]))
"""
    before, after = json.loads(run_python(script).stdout)
    assert after == before
