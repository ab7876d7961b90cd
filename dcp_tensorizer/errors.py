"""The exceptions of this package's public interface.

    CheckpointError
    ├── StagingError
    ├── WriteError
    │   └── WriterProcessDied
    ├── ReadError
    │   ├── ChecksumMismatch
    │   └── DecryptionError
    ├── MetadataError
    │   ├── NotCommitted (also a FileNotFoundError)
    │   ├── StateMismatch
    │   ├── UnsupportedFormat
    │   └── UntrustedObject
    └── ConversionError

Each exception takes a message as its only argument, so that it can be pickled: DCP sends errors from rank to rank,
wrapped in ``torch.distributed.checkpoint.api.CheckpointException``.
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
    """The base class of all errors of this package."""


class StagingError(CheckpointError):
    """A state dict could not be collected, or copied into the staging buffer.

    If one key is the cause, the message names it.
    """


class WriteError(CheckpointError):
    """Data or metadata could not be made durable. The message names path, rank and key, where known."""


class WriterProcessDied(WriteError):
    """The writer process could not be started, ended during a request, or made no progress and was killed.

    The message has the exit code or the signal with which the process ended, and the end of its output, if known.
    """


class ReadError(CheckpointError):
    """Stored bytes could not be read. The message names the file and, where known, key and offset."""


class ChecksumMismatch(ReadError):
    """Stored bytes differ from those that were saved. The message names the file and, where known, key and offset."""


class DecryptionError(ReadError):
    """A reader's key is missing, wrong, or given for an unencrypted checkpoint. No target has changed.

    Also raised if the metadata of an encrypted checkpoint was changed without the key.
    """


class MetadataError(CheckpointError):
    """The contents of a checkpoint, of a model or of a folder of checkpoints cannot be used.

    For example, ``.metadata`` is damaged, or two directories of a folder hold the same step.
    """


class NotCommitted(MetadataError, FileNotFoundError):
    """The path holds no committed checkpoint."""


class StateMismatch(MetadataError):
    """A checkpoint, or a published version, does not match the state or the files that it is loaded into."""


class UnsupportedFormat(MetadataError):
    """A checkpoint has a format or version that this release does not read. The checkpoint may be undamaged."""


class UntrustedObject(MetadataError):
    """Loading a stored object would run code that is not allowed."""


class ConversionError(CheckpointError):
    """A checkpoint cannot be converted as requested. If one key is the cause, the message names it."""


def unwrap(error: BaseException) -> BaseException:
    """Returns the error of a failed rank, without the wrapper in which DCP raises it.

    DCP raises a ``CheckpointException``, which holds the error of each failed rank. ``CheckpointException`` derives
    from ``BaseException``, so ``except Exception`` does not catch it. Returns the error of the lowest rank that failed
    with an error of this package, or, if no rank did, the error of the lowest failed rank::

        try:
            dcp.load(state, storage_reader=reader)
        except CheckpointException as error:
            raise dcp_tensorizer.unwrap(error) from None

    Args:
        error: The raised exception. If it is not a ``CheckpointException``, the function returns it unchanged.
    """
    failures: Mapping[int, tuple[BaseException, object]] | None = getattr(error, "failures", None)
    if not isinstance(failures, Mapping) or not failures:
        return error
    causes = [failures[rank][0] for rank in sorted(failures)]
    return next((cause for cause in causes if isinstance(cause, CheckpointError)), causes[0])


def describe(error: BaseException) -> str:
    """Formats an error for the message of another error, with its type.

    Omits the type of a `CheckpointError`. For other types of this package, gives the base class that users know.
    """
    if isinstance(error, CheckpointError):
        return str(error)
    known = next(kind for kind in type(error).__mro__ if not kind.__module__.startswith(f"{__package__}."))
    return f"{known.__name__}: {error}"


def is_damage(error: CheckpointError) -> bool:
    """Returns whether an error shows that the checkpoint is damaged: not an error of a server, a key or permissions."""
    if isinstance(error, NotCommitted | StateMismatch | UntrustedObject):
        return False
    gone = isinstance(error, ReadError) and isinstance(error.__cause__, EOFError | FileNotFoundError)
    return gone or isinstance(error, ChecksumMismatch | MetadataError)


def listed_ranks(ranks: Sequence[int]) -> str:
    return ", ".join(map(str, ranks[:_RANKS_SHOWN])) + (", ..." if len(ranks) > _RANKS_SHOWN else "")


def listed(keys: Sequence[object]) -> str:
    """Formats the first keys of a list, and the number of the others, for a message."""
    more = len(keys) - _KEYS_SHOWN
    return ", ".join(map(repr, keys[:_KEYS_SHOWN])) + (f", and {more} more" if more > 0 else "")
