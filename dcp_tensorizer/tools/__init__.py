"""The commands of ``dcp-tensorizer`` as Python functions.

``publish add`` and ``publish apply`` are in the package itself, as `dcp_tensorizer.publish` and
`dcp_tensorizer.apply_delta`.

A checkpoint is given as a local path, or as a URL that fsspec opens. No command runs code from a checkpoint, and none
needs a GPU or a process group. Commands read tensors in blocks. But `convert` may need memory for the largest tensor,
and a tensor that torch has not saved in C order is read as a whole.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._publish.apply import Applied as Applied
    from .._publish.apply import VersionsVerified as VersionsVerified
    from .._publish.apply import verify_versions as verify_versions
    from .._publish.publisher import PublishedVersion as PublishedVersion
    from .._publish.versions import VersionInfo as VersionInfo
    from .._publish.versions import collect_versions as collect_versions
    from .._publish.versions import list_versions as list_versions
    from ._convert import Converted as Converted
    from ._convert import convert as convert
    from ._diff import Change as Change
    from ._diff import Difference as Difference
    from ._diff import diff as diff
    from ._find import CheckpointInfo as CheckpointInfo
    from ._find import list_checkpoints as list_checkpoints
    from ._formats.common import ConvertOptions as ConvertOptions
    from ._gc import Collected as Collected
    from ._gc import collect as collect
    from ._inspect import ChunkInfo as ChunkInfo
    from ._inspect import DataFileInfo as DataFileInfo
    from ._inspect import Inspection as Inspection
    from ._inspect import ObjectInfo as ObjectInfo
    from ._inspect import TensorInfo as TensorInfo
    from ._inspect import Total as Total
    from ._inspect import inspect as inspect
    from ._report.build import Reported as Reported
    from ._report.build import report as report
    from ._trace import Traced as Traced
    from ._trace import trace as trace
    from ._verify import Damage as Damage
    from ._verify import Verified as Verified
    from ._verify import verify as verify

FORMATS = ("dcp_tensorizer", "tensorizer", "safetensors", "torch", "dcp")
"""The names of the formats that `convert` reads and writes."""

_MODULES = {
    name: module
    for module, names in {
        ".._publish.apply": "Applied VersionsVerified verify_versions",
        ".._publish.publisher": "PublishedVersion",
        ".._publish.versions": "VersionInfo collect_versions list_versions",
        "._convert": "Converted convert",
        "._diff": "Change Difference diff",
        "._find": "CheckpointInfo list_checkpoints",
        "._formats.common": "ConvertOptions",
        "._gc": "Collected collect",
        "._inspect": "ChunkInfo DataFileInfo Inspection ObjectInfo TensorInfo Total inspect",
        "._report.build": "Reported report",
        "._trace": "Traced trace",
        "._verify": "Damage Verified verify",
    }.items()
    for name in names.split()
}
__all__ = sorted([*_MODULES, "FORMATS"])

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports a command's module on first access, so that the help of the command line does not import torch."""
        if name in _MODULES:
            return getattr(import_module(_MODULES[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
