"""Checkpoints that training does not notice: a torch.distributed.checkpoint backend that writes tensorizer files."""

from importlib import import_module
from importlib.metadata import version
from typing import TYPE_CHECKING

from ._loading.report import LoadReport
from ._saving.report import SaveReport
from .errors import (
    CheckpointError,
    ChecksumMismatch,
    ConversionError,
    DecryptionError,
    MetadataError,
    NotCommitted,
    ReadError,
    StagingError,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
    WriterProcessDied,
)

if TYPE_CHECKING:
    from ._saving.options import SaveLimits
    from .planner import SavePlanner
    from .reader import TensorizerStorageReader
    from .writer import TensorizerStorageWriter

__all__ = [
    "CheckpointError",
    "ChecksumMismatch",
    "ConversionError",
    "DecryptionError",
    "LoadReport",
    "MetadataError",
    "NotCommitted",
    "ReadError",
    "SaveLimits",
    "SavePlanner",
    "SaveReport",
    "StagingError",
    "TensorizerStorageReader",
    "TensorizerStorageWriter",
    "UnsupportedFormat",
    "UntrustedObject",
    "WriteError",
    "WriterProcessDied",
    "__version__",
]

__version__ = version("dcp_tensorizer")

_ON_USE = {
    "SaveLimits": "_saving.options",
    "SavePlanner": "planner",
    "TensorizerStorageReader": "reader",
    "TensorizerStorageWriter": "writer",
}
_MODULES = ("convert", "planner", "reader", "tools", "writer")

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports what needs torch or numpy when it is first asked for: an import of the package takes no time."""
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name in _ON_USE:
            return getattr(import_module(f".{_ON_USE[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
