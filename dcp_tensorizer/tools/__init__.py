"""The commands of ``dcp-tensorizer``, from Python. Each returns plain, frozen records.

    from dcp_tensorizer.tools import list_checkpoints, verify

    newest = next(found for found in list_checkpoints("run") if found.state == "committed")
    assert not verify(newest.path).damages

Checkpoints are local paths or URLs that fsspec opens. No command runs code from a checkpoint. None needs a GPU, a
process group, or memory for more than a few blocks of tensors.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from .._publish.apply import VersionsVerified, verify_versions
    from .._publish.versions import VersionInfo, collect_versions, list_versions
    from ._diff import Change, Difference, diff
    from ._find import CheckpointInfo, list_checkpoints
    from ._gc import Collected, collect
    from ._inspect import ChunkInfo, DataFileInfo, Inspection, ObjectInfo, TensorInfo, Total, inspect
    from ._report.build import Reported, report
    from ._trace import Traced, trace
    from ._verify import Damage, Verified, verify

__all__ = [
    "Change",
    "CheckpointInfo",
    "ChunkInfo",
    "Collected",
    "Damage",
    "DataFileInfo",
    "Difference",
    "Inspection",
    "ObjectInfo",
    "Reported",
    "TensorInfo",
    "Total",
    "Traced",
    "Verified",
    "VersionInfo",
    "VersionsVerified",
    "collect",
    "collect_versions",
    "diff",
    "inspect",
    "list_checkpoints",
    "list_versions",
    "report",
    "trace",
    "verify",
    "verify_versions",
]

_ON_USE = {
    "Change": "._diff",
    "CheckpointInfo": "._find",
    "ChunkInfo": "._inspect",
    "Collected": "._gc",
    "Damage": "._verify",
    "DataFileInfo": "._inspect",
    "Difference": "._diff",
    "Inspection": "._inspect",
    "ObjectInfo": "._inspect",
    "Reported": "._report.build",
    "TensorInfo": "._inspect",
    "Total": "._inspect",
    "Traced": "._trace",
    "Verified": "._verify",
    "VersionInfo": ".._publish.versions",
    "VersionsVerified": ".._publish.apply",
    "collect": "._gc",
    "collect_versions": ".._publish.versions",
    "diff": "._diff",
    "inspect": "._inspect",
    "list_checkpoints": "._find",
    "list_versions": ".._publish.versions",
    "report": "._report.build",
    "trace": "._trace",
    "verify": "._verify",
    "verify_versions": ".._publish.apply",
}

if not TYPE_CHECKING:

    def __getattr__(name: str) -> object:
        """Imports torch when a command is first asked for: the command line's help takes none of that time."""
        if name in _ON_USE:
            return getattr(import_module(_ON_USE[name], __name__), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return __all__
