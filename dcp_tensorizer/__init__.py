"""Checkpoints that training does not notice: a torch.distributed.checkpoint backend that writes tensorizer files."""

from importlib import import_module
from typing import TYPE_CHECKING

from . import errors
from ._version import __version__ as __version__
from .errors import *  # noqa: F403  # `errors.__all__` limits it to the public names

if TYPE_CHECKING:
    from . import data_parallel as data_parallel
    from . import manager as manager
    from . import models as models
    from . import planner as planner
    from . import progress as progress
    from . import reader as reader
    from . import storage as storage
    from . import tools as tools
    from . import trace as trace
    from . import writer as writer
    from ._memory.copies import CopyOptions as CopyOptions
    from ._publish.apply import apply_delta as apply_delta
    from ._publish.publisher import Publish as Publish
    from ._publish.publisher import publish as publish
    from ._writer_process.options import SaveLimits as SaveLimits
    from .integrations.install import install as install
    from .integrations.install import installed as installed
    from .integrations.install import uninstall as uninstall
    from .manager import CheckpointManager as CheckpointManager
    from .models import Export as Export
    from .models import Parts as Parts
    from .models import SafetensorsStorageWriter as SafetensorsStorageWriter
    from .planner import LoadPlanner as LoadPlanner
    from .planner import SavePlanner as SavePlanner
    from .reader import TensorizerStorageReader as TensorizerStorageReader
    from .reader import open_reader as open_reader
    from .writer import TensorizerStorageWriter as TensorizerStorageWriter

_NAMES = {
    name: module
    for module, names in {
        "_memory.copies": "CopyOptions",
        "_publish.apply": "apply_delta",
        "_publish.publisher": "Publish publish",
        "_writer_process.options": "SaveLimits",
        "integrations.install": "install installed uninstall",
        "manager": "CheckpointManager",
        "models": "Export Parts SafetensorsStorageWriter",
        "planner": "LoadPlanner SavePlanner",
        "reader": "TensorizerStorageReader open_reader",
        "writer": "TensorizerStorageWriter",
    }.items()
    for name in names.split()
}
_MODULES = {
    *("data_parallel", "manager", "models", "planner", "progress"),
    *("reader", "storage", "tools", "trace", "writer"),
}
__all__ = sorted(["__version__", *errors.__all__, *_NAMES])

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports torch and the public names on first access, so that importing the package is fast."""
        if name in _MODULES:
            return import_module(f".{name}", __name__)
        if name in _NAMES:
            return getattr(import_module(f".{_NAMES[name]}", __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
