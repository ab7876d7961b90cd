"""Checkpoints that training does not notice: a torch.distributed.checkpoint backend that writes tensorizer files."""

from importlib import import_module
from typing import TYPE_CHECKING

from ._version import __version__
from .errors import (
    CheckpointError,
    ChecksumMismatch,
    ConversionError,
    DecryptionError,
    MetadataError,
    NotCommitted,
    ReadError,
    StagingError,
    StateMismatch,
    UnsupportedFormat,
    UntrustedObject,
    WriteError,
    WriterProcessDied,
    unwrap,
)

if TYPE_CHECKING:
    from ._job.metrics import GoodputReport
    from ._loading.report import LoadReport
    from ._publish.apply import Applied, apply_delta
    from ._publish.publisher import Publish, PublishedVersion, publish
    from ._saving.report import SaveReport
    from ._writer_process.options import SaveLimits
    from .integrations.install import install, installed, uninstall
    from .manager import CheckpointManager
    from .models import Export, Parts, SafetensorsStorageWriter
    from .planner import LoadPlanner, SavePlanner
    from .reader import TensorizerStorageReader, open_reader
    from .writer import TensorizerStorageWriter

__all__ = [
    "Applied",
    "CheckpointError",
    "CheckpointManager",
    "ChecksumMismatch",
    "ConversionError",
    "DecryptionError",
    "Export",
    "GoodputReport",
    "LoadPlanner",
    "LoadReport",
    "MetadataError",
    "NotCommitted",
    "Parts",
    "Publish",
    "PublishedVersion",
    "ReadError",
    "SafetensorsStorageWriter",
    "SaveLimits",
    "SavePlanner",
    "SaveReport",
    "StagingError",
    "StateMismatch",
    "TensorizerStorageReader",
    "TensorizerStorageWriter",
    "UnsupportedFormat",
    "UntrustedObject",
    "WriteError",
    "WriterProcessDied",
    "__version__",
    "apply_delta",
    "install",
    "installed",
    "open_reader",
    "publish",
    "uninstall",
    "unwrap",
]

_ON_USE = {
    "Applied": "_publish.apply",
    "CheckpointManager": "manager",
    "Export": "models",
    "GoodputReport": "_job.metrics",
    "LoadPlanner": "planner",
    "LoadReport": "_loading.report",
    "Parts": "models",
    "Publish": "_publish.publisher",
    "PublishedVersion": "_publish.publisher",
    "SafetensorsStorageWriter": "models",
    "SaveLimits": "_writer_process.options",
    "SavePlanner": "planner",
    "SaveReport": "_saving.report",
    "TensorizerStorageReader": "reader",
    "TensorizerStorageWriter": "writer",
    "apply_delta": "_publish.apply",
    "install": "integrations.install",
    "installed": "integrations.install",
    "open_reader": "reader",
    "publish": "_publish.publisher",
    "uninstall": "integrations.install",
}
_MODULES = (
    "convert",
    "data_parallel",
    "manager",
    "models",
    "planner",
    "progress",
    "reader",
    "storage",
    "tools",
    "trace",
    "writer",
)

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports what takes time when it is first asked for: an import of the package takes none."""
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name in _ON_USE:
            return getattr(import_module(f".{_ON_USE[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
