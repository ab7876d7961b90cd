"""Exceptions that this package raises on purpose.

    CheckpointError
    ├── StagingError              a state dict could not be copied into the staging buffer
    ├── WriteError                data or metadata could not be made durable
    │   └── WriterProcessDied     the process that writes went away in the middle of a save
    ├── ReadError                 stored bytes could not be brought back
    │   ├── ChecksumMismatch      stored bytes are not the ones that were saved
    │   └── DecryptionError       there is no key, or not the right one
    ├── MetadataError             a checkpoint's ``.metadata`` is unusable
    │   ├── NotCommitted          there is no committed checkpoint (also a ``FileNotFoundError``)
    │   ├── StateMismatch         the state is not of the checkpoint's keys or shapes, or takes no such values
    │   ├── UnsupportedFormat     it is of a format or version that this release does not read
    │   └── UntrustedObject       loading would run code that is not allowed
    └── ConversionError           a checkpoint cannot be brought into another format as asked

Each is built from one message, so that it survives pickling: DCP sends errors from rank to rank, wrapped in
``torch.distributed.checkpoint.api.CheckpointException``.
"""

from collections.abc import Mapping, Sequence

__all__ = [
    "CheckpointError",
    "ChecksumMismatch",
    "ConversionError",
    "DecryptionError",
    "MetadataError",
    "NotCommitted",
    "ReadError",
    "StagingError",
    "StateMismatch",
    "UnsupportedFormat",
    "UntrustedObject",
    "WriteError",
    "WriterProcessDied",
    "unwrap",
]

_KEYS_SHOWN = 5
_RANKS_SHOWN = 8


class CheckpointError(Exception):
    """Base of all errors of this package."""


class StagingError(CheckpointError):
    """A state dict could not be copied into the staging buffer; the message names the key."""


class WriteError(CheckpointError):
    """Data or metadata could not be made durable; the message names path, rank and, where known, key."""


class WriterProcessDied(WriteError):
    """The writer process ended in the middle of a save; the message carries its exit and the end of its output."""


class ReadError(CheckpointError):
    """Stored bytes could not be brought back; the message names file, key and offset."""


class ChecksumMismatch(ReadError):
    """Stored bytes differ from what was saved; the message names key, file and offset."""


class DecryptionError(ReadError):
    """A reader's key does not fit the checkpoint; no target has changed."""


class MetadataError(CheckpointError):
    """A checkpoint's ``.metadata`` is unusable: it is damaged, unless a subclass says otherwise."""


class NotCommitted(MetadataError, FileNotFoundError):
    """The path holds no committed checkpoint."""


class StateMismatch(MetadataError):
    """A checkpoint and the state that it is loaded into do not match; the message has the error that was raised."""


class UnsupportedFormat(MetadataError):
    """A checkpoint is of a format or version that this release does not read; it may be whole."""


class UntrustedObject(MetadataError):
    """A stored object would need code to run on load; the message names key and type, and how to allow it."""


class ConversionError(CheckpointError):
    """A checkpoint cannot be brought into another format as asked; the message names the key, and what to do."""


def unwrap(error: BaseException) -> BaseException:
    """Returns the error of the rank that failed, without the wrapper in which DCP raises it.

    DCP raises a ``CheckpointException``, which derives from ``BaseException``, so that ``except Exception`` does not
    catch it. It holds the error of each rank that failed. The one of the lowest rank is returned, with preference for
    errors of this package::

        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            raise dcp_tensorizer.unwrap(error) from None

    Args:
        error: What was raised. Anything but a ``CheckpointException`` is returned as it is.
    """
    failures: Mapping[int, tuple[BaseException, object]] | None = getattr(error, "failures", None)
    if not isinstance(failures, Mapping) or not failures:
        return error
    causes = [failures[rank][0] for rank in sorted(failures)]
    return next((cause for cause in causes if isinstance(cause, CheckpointError)), causes[0])


def describe(error: BaseException) -> str:
    """An error as a part of another one's message: this package's errors without their type, others with it."""
    return str(error) if isinstance(error, CheckpointError) else f"{type(error).__name__}: {error}"


def listed_ranks(ranks: Sequence[int]) -> str:
    """The first of some ranks, as a part of a message."""
    return ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (", ..." if len(ranks) > _RANKS_SHOWN else "")


def listed(keys: Sequence[object]) -> str:
    """The first of some keys, and how many more there are, as a part of a message."""
    more = len(keys) - _KEYS_SHOWN
    return ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (f", and {more} more" if more > 0 else "")
