"""What an import of the package brings along, each looked at in a process of its own."""

from __future__ import annotations

import json

from ..lab.processes import run_python


def test_who_does_not_encrypt_does_not_pay_for_it() -> None:
    """Importing the package imports neither tensorizer nor libnacl, which take a second."""
    script = "import sys, dcp_tensorizer; print([name for name in ('tensorizer', 'libnacl') if name in sys.modules])"
    assert run_python(script, fresh=True).stdout.strip() == "[]"


def test_a_missing_library_is_named_with_how_to_install_it() -> None:
    """By each module that needs one, also if another program would ask for a ModuleNotFoundError."""
    script = """
import importlib, json, sys
sys.modules |= dict.fromkeys(("lightning", "torchtitan", "torch_checkpointing", "opentelemetry"))
from dcp_tensorizer.integrations.opentelemetry import OpenTelemetrySpans
errors = []
for make in (lambda: importlib.import_module("dcp_tensorizer.integrations.lightning"),
             lambda: importlib.import_module("dcp_tensorizer.integrations.torchtitan"),
             lambda: importlib.import_module("dcp_tensorizer.integrations.torch_checkpointing"), OpenTelemetrySpans):
    try:
        make()
    except ModuleNotFoundError as error:
        words = str(error)
        errors.append((error.name.partition(".")[0], words.partition(" cannot")[0], words.rpartition(": ")[2]))
print(json.dumps(errors))
"""
    assert json.loads(run_python(script, fresh=True).stdout) == [
        ["lightning", "dcp_tensorizer.integrations.lightning", "pip install 'lightning'"],
        ["torchtitan", "dcp_tensorizer.integrations.torchtitan", "pip install 'torchtitan'"],
        ["torch_checkpointing", "dcp_tensorizer.integrations.torch_checkpointing", "pip install 'torch_checkpointing'"],
        ["opentelemetry", "OpenTelemetrySpans", "pip install 'dcp_tensorizer[otel]'"],
    ]


def test_the_writer_process_does_without_torch() -> None:
    """It starts in a tenth of the time and a fifth of the memory, on every rank; nor has it what URLs alone need."""
    names = ["torch", "fsspec", "asyncio", "importlib.metadata"]
    script = f"import sys, dcp_tensorizer._writer_process.worker; print([n for n in {names} if n in sys.modules])"
    assert run_python(script, fresh=True).stdout.strip() == "[]"


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
    before, after = json.loads(run_python(script, fresh=True).stdout)
    assert after == before
