"""The module table of the design, held against what the modules import."""

from __future__ import annotations

import ast
import json
from pathlib import Path

import pytest

from .support import PACKAGE, run_python

LAYERS = {
    0: ["errors", "_layout", "_report", "_garbage", "_pool"],
    1: [
        "_crypt",
        "_protocol",
        "_arena",
        "_tensors",
        "_device",
        "_shared",
        "_tensorfile",
        "_storage",
        "_page_cache",
        "_direct_io",
        "_local_file",
        "_local",
        "_retry",
        "_stream",
        "_sftp_client",
        "_sftp",
        "_s3_client",
        "_s3",
        "_remote",
        "_destination",
    ],
    2: [
        "_destination",
        "_plan",
        "_batches",
        "_items",
        "_twins",
        "_copying",
        "_ring",
        "_lease",
        "staging",
        "_metadata",
        "_commit",
        "_parts",
        "_encoder",
        "_outcomes",
    ],
    3: ["_ipc", "_job", "_worker", "_process", "_handover", "_fetch"],
    4: ["writer", "reader", "_boxes", "_contents", "_spans", "_verify", "_output"],
    5: ["_catalogue", "_inspect", "_safetensors", "_tensorindex", "_torchfile", "_dcpfile"],
    6: ["_diff", "_sources", "_targets"],
    7: ["convert"],
    8: ["cli", "_arguments", "_render", "_show"],
}
LAYER = {module: layer for layer, modules in LAYERS.items() for module in modules}
PUBLIC = {"errors", "staging", "writer", "reader", "convert", "cli"}
MODULES = sorted(path.stem for path in PACKAGE.glob("*.py") if path.stem not in ("__init__", "__main__"))


def imports(path: Path) -> tuple[set[str], set[str]]:
    """The modules of this package, and the top-level names of all others, that a file imports anywhere in it."""
    own: set[str] = set()
    foreign: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            module = node.module or ""
            if node.level:
                own |= {module.split(".")[0]} if module else {alias.name for alias in node.names}
                continue
            names = [module]
        else:
            continue
        for name in names:
            if name.split(".")[0] == "dcp_tensorizer":
                own.add([*name.split("."), "__init__"][1])
            else:
                foreign.add(name.split(".")[0])
    return own, foreign


OWN = {module: imports(PACKAGE / f"{module}.py")[0] for module in MODULES}
FOREIGN = {module: imports(PACKAGE / f"{module}.py")[1] for module in MODULES}


def test_every_module_has_a_layer() -> None:
    """A new module must be put into the table above, and into the design."""
    assert sorted(set(MODULES) - LAYER.keys()) == []


@pytest.mark.parametrize("module", MODULES)
def test_no_module_imports_a_higher_layer(module: str) -> None:
    """Lower layers know nothing of higher ones, and no module imports the package's root."""
    assert {name: LAYER.get(name) for name in OWN[module] if LAYER.get(name, 99) > LAYER[module]} == {}


def test_there_are_no_import_cycles() -> None:
    """The modules can be put in an order in which each imports only those before it."""
    remaining = {module: OWN[module] & set(MODULES) for module in MODULES}
    while remaining:
        free = {module for module, needed in remaining.items() if not needed & remaining.keys()}
        assert free, f"these import each other in a circle: {sorted(remaining)}"
        remaining = {module: needed for module, needed in remaining.items() if module not in free}


def test_writer_and_reader_do_not_know_each_other() -> None:
    """Saving and loading share nothing but the layers below them."""
    assert "reader" not in OWN["writer"]
    assert "writer" not in OWN["reader"]


@pytest.mark.parametrize(
    ("library", "modules"),
    [
        ("tensorizer", ["_crypt"]),
        ("libnacl", ["_crypt"]),
        ("fsspec", ["_remote"]),
        ("botocore", ["_s3_client"]),
        ("paramiko", ["_sftp_client"]),
        ("safetensors", []),
        ("rich", ["_render"]),
        ("typer", ["_arguments", "cli"]),
    ],
)
def test_a_foreign_library_is_imported_in_one_place(library: str, modules: list[str]) -> None:
    """It is known to the module that translates its errors; other formats' files are made without their libraries."""
    assert [name for name in MODULES if library in FOREIGN[name]] == modules


def test_who_does_not_encrypt_does_not_pay_for_it() -> None:
    """Importing the package imports neither tensorizer nor libnacl, which take a second."""
    script = "import sys, dcp_tensorizer; print([name for name in ('tensorizer', 'libnacl') if name in sys.modules])"
    assert run_python(script).stdout.strip() == "[]"


def test_the_writer_process_does_without_torch() -> None:
    """It starts in a tenth of the time and a fifth of the memory, on every rank."""
    script = "import sys, dcp_tensorizer._worker; print('torch' in sys.modules)"
    assert run_python(script).stdout.strip() == "False"


def test_private_modules_begin_with_an_underscore() -> None:
    """Only the modules that users may import have public names."""
    assert {module for module in MODULES if not module.startswith("_")} <= PUBLIC


def test_the_root_only_re_exports() -> None:
    """``__init__`` holds imports, names and ``__getattr__``, by which the reader and the writer are imported on use."""
    body = ast.parse((PACKAGE / "__init__.py").read_text()).body
    assigned = {node.targets[0].id for node in body if isinstance(node, ast.Assign) and hasattr(node.targets[0], "id")}
    functions = {node.name for part in body for node in ast.walk(part) if isinstance(node, ast.FunctionDef)}
    own, foreign = imports(PACKAGE / "__init__.py")
    assert (assigned, functions) == ({"__all__", "__version__", "_MODULES", "_ON_USE"}, {"__getattr__", "__dir__"})
    assert own <= set(MODULES)
    assert foreign <= {"importlib", "typing"}


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
