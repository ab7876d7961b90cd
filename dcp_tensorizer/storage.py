"""The contract of a storage, and base classes, for packages that add a storage.

A storage derives from `RemoteStorage`, and its sink from `Sink`. An entry point of the group
``dcp_tensorizer.storages`` registers the storage. `dcp_tensorizer.testing` has the tests that the storage must pass.
"""

from ._storage.base import FileInfo, RangeReader, ReadTuning, Refused, Sink, Storage
from ._storage.open import Opener, open_storage
from ._storage.redact import Scrubber
from ._storage.remote import Ranges, RemoteStorage

__all__ = [
    "FileInfo",
    "Opener",
    "RangeReader",
    "Ranges",
    "ReadTuning",
    "Refused",
    "RemoteStorage",
    "Scrubber",
    "Sink",
    "Storage",
    "open_storage",
]
