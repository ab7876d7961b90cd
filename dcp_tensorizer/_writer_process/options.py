"""How files are written: the part of a writer's options that its writer process uses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from .._format.encoder import BUFFER_BYTES
from .._runtime.validation import check_count, check_flags, check_timeout, check_type
from .._storage.base import TIMEOUT

if TYPE_CHECKING:
    from .._format.encryption import Cipher


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Limits of a save: how long it may wait, how much memory it may take, and how many may fail.

    Attributes:
        timeout: Seconds after which a wait for the storage is given up, 600 by default: for a write that makes no
            progress, a disk or a mount that does not answer an asynchronous save, or another save's clean-up of the
            same directory. Requests to S3 and SFTP servers that stay silent for a tenth of that are tried again.
        buffer_bytes: Memory in the writer process for the parts of files that are being made or sent; 256 MiB by
            default. With less, fewer parts are on their way at once.
        max_consecutive_failures: After this many failed saves in a row of one process group, to paths that differ in
            numbers alone, the next one fails on all ranks, and ``async_save`` raises on the coordinator (with
            ``overlap_staging``, the next ``lock``). So a job that ignores its futures does not train on without
            checkpoints. None: never.
        max_reuses: With ``reuse_unchanged``: how many saves in a row may share a file. The next one writes its tensors
            anew, so that a file that is damaged does not spoil every later checkpoint.

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


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # it contains secrets
class WriteOptions:
    """Options of writing files, under their names in `TensorizerStorageWriter`.

    ``cipher`` encrypts everything. Raises `TypeError` for other limits, and `ValueError` if two options exclude each
    other.
    """

    storage_options: Mapping[str, Any] = field(default_factory=dict)
    sync_files: bool = True
    thread_count: int
    limits: SaveLimits = SaveLimits()
    cipher: Cipher | None = None
    sha256: bool = False
    reuse_unchanged: bool = False

    def __post_init__(self) -> None:
        check_flags(self)
        check_type("limits", self.limits, SaveLimits)
        if self.cipher is not None and self.sha256:
            raise ValueError(
                "sha256 and encryption exclude each other: encrypted tensors are authenticated, and a hash of their "
                "contents would tell what is in them"
            )
        if self.cipher is not None and self.reuse_unchanged:
            raise ValueError(
                "reuse_unchanged and encryption exclude each other: whether two encrypted tensors are equal cannot be "
                "seen, and must not be"
            )
