"""The options of a writer, checked when they are given."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, get_args

from .._format.encoder import BUFFER_BYTES
from .._format.encryption import encryption_cipher
from .._runtime.threads import cores
from .._runtime.validation import (
    check_choice,
    check_count,
    check_storage_options,
    check_thread_count,
    check_timeout,
    check_type,
)
from .._staging.device import expandable_segments
from .._storage.base import TIMEOUT
from .._storage.redact import check_writable
from .._tiers.target import FlushTarget, target_of
from .._writer_process.protocol import WriteOptions

if TYPE_CHECKING:
    from .._format.encryption import EncryptionParams


Staging = Literal["buffer", "shared", "device"]

MAX_UNFLUSHED = 3
"""Checkpoints that may lie in a local folder, and not on the remote, before training waits for one of them."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Limits of a save: how long it may wait, how much memory it may take, and how many may fail.

    Attributes:
        timeout: Seconds after which a wait for the storage is given up, 600 by default: a write that makes no
            progress, a disk or a mount that does not answer an asynchronous save, or another save's clean-up of the
            same directory. Requests to S3 and SFTP servers that stay
            silent for a tenth of that are tried again.
        buffer_bytes: Memory, in the writer process, for the parts of a file that are being made or sent; 256 MiB by
            default. With less of it, fewer parts are in flight.
        max_consecutive_failures: From that many failed saves in a row on, ``async_save`` raises on the coordinator, so
            that a job that looks at no future does not train on without checkpoints. None for never.
        max_reuses: With ``reuse_unchanged``: how many saves in a row may share a file with the one that wrote it. The
            next one writes its tensors anew, so that a file that goes bad does not spoil every later checkpoint.

    Raises:
        TypeError: one of them is not a number.
        ValueError: one of them is not positive, or the timeout is not finite.
    """

    timeout: float = TIMEOUT
    buffer_bytes: int = BUFFER_BYTES
    max_consecutive_failures: int | None = 3
    max_reuses: int = 10

    def __post_init__(self) -> None:
        check_timeout(self.timeout)
        check_count("buffer_bytes", self.buffer_bytes)
        check_count("max_consecutive_failures", self.max_consecutive_failures, optional=True)
        check_count("max_reuses", self.max_reuses)


@dataclass(frozen=True, slots=True, repr=False)  # it holds secrets
class SaveOptions:
    """All options of a writer: see `TensorizerStorageWriter`."""

    cache: bool
    staging: Staging
    overlap_staging: bool
    overwrite: bool
    write: WriteOptions
    limits: SaveLimits
    target: FlushTarget | None = None
    max_unflushed: int = MAX_UNFLUSHED
    survive: float = 0.0

    def arguments(self) -> dict[str, Any]:
        """The arguments as they were given to the writer, but for secrets: of encryption whether there is one."""
        return {
            "cache_staged_state_dict": self.cache,
            "staging": self.staging,
            "overlap_staging": self.overlap_staging,
            "overwrite": self.overwrite,
            "sync_files": self.write.sync,
            "thread_count": self.write.threads,
            "sha256": self.write.sha256,
            "reuse_unchanged": self.write.reuse,
            "encryption": self.write.cipher is not None,
            "limits": self.limits,
            "survive": self.survive,
        } | ({} if self.target is None else {"local": self.target.local, "max_unflushed": self.max_unflushed})


def check_options(
    *,
    cache: bool,
    staging: Staging,
    overlap_staging: bool,
    overwrite: bool,
    sync_files: bool,
    thread_count: int | None,
    storage_options: Mapping[str, Any] | None,
    sha256: bool,
    reuse_unchanged: bool,
    encryption: EncryptionParams | None,
    limits: SaveLimits,
    path: str | os.PathLike[str] | None = None,
    local: str | os.PathLike[str] | None = None,
    max_unflushed: int = MAX_UNFLUSHED,
    survive: float = 0.0,
) -> SaveOptions:
    """The options of a writer, from its arguments.

    Raises:
        TypeError: an argument is of a wrong type.
        ValueError: an argument has a value that is not allowed, or two of them exclude each other.
        WriteError: there is a key, and no libsodium; or nothing can be written to the path.
    """
    if path is not None:
        check_writable(os.fspath(path))
    check_choice("staging", staging, get_args(Staging))
    check_thread_count(thread_count)
    check_storage_options(storage_options)
    check_type("limits", limits, SaveLimits)
    if staging == "device" and (setting := expandable_segments()) is not None:
        raise ValueError(
            f"staging='device' and expandable segments ({setting}) exclude each other: such memory is not safe to hand "
            f"to another process, which may be ended by it. Use staging='buffer', or turn them off"
        )
    if encryption is not None and staging == "shared":
        raise ValueError(
            "staging='shared' and encryption exclude each other: what is encrypted can be read twice, and if it "
            "changed in between, its key would be spent on two texts"
        )
    if encryption is not None and sha256:
        raise ValueError(
            "sha256 and encryption exclude each other: encrypted tensors are authenticated, and a hash of their "
            "contents would tell what is in them"
        )
    if encryption is not None and reuse_unchanged:
        raise ValueError(
            "reuse_unchanged and encryption exclude each other: whether two encrypted tensors are equal cannot be "
            "seen, and must not be"
        )
    if local is not None and reuse_unchanged:
        raise ValueError(
            "reuse_unchanged and local exclude each other: local copies go when they have been flushed, and a flush "
            "sends whole files"
        )
    write = WriteOptions(
        storage_options=dict(storage_options or {}),
        sync=sync_files,
        threads=thread_count or min(4, cores()),
        buffer_bytes=limits.buffer_bytes,
        timeout=limits.timeout,
        cipher=None if encryption is None else encryption_cipher(encryption),
        sha256=sha256,
        reuse=reuse_unchanged,
    )
    check_count("max_unflushed", max_unflushed)
    check_survival(survive, staging, cache=cache)
    if survive and local is not None:
        raise ValueError(
            "survive and local exclude each other in a writer: what is saved is on a local disk within moments. "
            "CheckpointManager has both"
        )
    target = None if local is None else target_of(path, local, write.storage_options, limits.timeout)
    return SaveOptions(cache, staging, overlap_staging, overwrite, write, limits, target, max_unflushed, survive)


def check_survival(seconds: object, staging: object, *, cache: bool) -> None:
    """Checks how long states are to be kept in memory when their process is gone.

    Raises:
        TypeError: that is no number.
        ValueError: it makes no sense, or not together with the other options.
    """
    check_timeout(seconds, least=0, name="survive")
    if seconds and staging == "shared":
        raise ValueError(
            "survive and staging='shared' exclude each other: what is not copied is gone with the process that has it"
        )
    if seconds and not cache:
        raise ValueError("survive and cache_staged_state_dict=False exclude each other: the buffers hold what is kept")
