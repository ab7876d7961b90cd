"""Checkpoints that training does not notice: a torch.distributed.checkpoint backend that writes tensorizer files."""

from importlib.metadata import version

from ._report import SaveReport
from .errors import (
    CheckpointError,
    ChecksumMismatch,
    ConversionError,
    DecryptionError,
    MetadataError,
    NotCommitted,
    ReadError,
    StagingError,
    UntrustedObject,
    WriteError,
    WriterProcessDied,
)
from .reader import TensorizerStorageReader
from .writer import TensorizerStorageWriter

__all__ = [
    "CheckpointError",
    "ChecksumMismatch",
    "ConversionError",
    "DecryptionError",
    "MetadataError",
    "NotCommitted",
    "ReadError",
    "SaveReport",
    "StagingError",
    "TensorizerStorageReader",
    "TensorizerStorageWriter",
    "UntrustedObject",
    "WriteError",
    "WriterProcessDied",
    "__version__",
]

__version__ = version("dcp_tensorizer")
