"""The options of saves, checked when they are made.

Requests to the writer process contain them, so this module does not import torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any, Literal, get_args

from .._runtime.threads import cores
from .._runtime.validation import (
    check_choice,
    check_count,
    check_flags,
    check_storage_options,
    check_timeout,
    check_type,
    set_fields,
)
from .._storage.base import TIMEOUT
from .._tensor_file.encode import BUFFER_BYTES

if TYPE_CHECKING:
    from .._tensor_file.encryption import Cipher
    from .._tiers.target import FlushTarget

Staging = Literal["buffer", "shared", "device"]

MAX_UNFLUSHED = 3
"""The default of ``max_unflushed``: training waits when this many checkpoints are only in the local folder."""


@dataclass(frozen=True, slots=True)
class SaveLimits:
    """Limits of saves: waiting time, memory, failures in a row, and reuses of a file.

    Attributes:
        timeout: Seconds after which a wait for the storage times out; 600 by default. The timeout applies to a write
            or a flush that makes no progress, to a disk or a mount that does not respond to an asynchronous save, and
            to the wait for another save's clean-up of the same directory. If an S3 or SFTP server does not respond for
            a tenth of the timeout, the request is retried.
        buffer_bytes: Memory in the writer process for the parts of files that are being made or sent; 256 MiB by
            default. With less memory, fewer parts are sent at once.
        max_consecutive_failures: Once this many saves in a row have failed, on one process group and to paths that
            differ only in their numbers, the next save fails on all ranks, and ``async_save`` raises on the coordinator
            (with ``overlap_staging``, the next ``lock`` raises). So a job that ignores its futures does not continue to
            train without checkpoints. The save after that one is attempted; if it fails, the next one is refused. If
            None, there is no limit.
        max_reuses: With ``reuse_unchanged``: number of later saves that may reuse a file. The next save then writes the
            file's tensors again, so that a damaged file does not spoil every later checkpoint.

    Raises:
        TypeError: the timeout is not a number, or another limit is not an int.
        ValueError: a limit is not positive, or the timeout is longer than the system can wait.
    """

    timeout: float = TIMEOUT
    buffer_bytes: int = BUFFER_BYTES
    max_consecutive_failures: int | None = 3
    max_reuses: int = 10

    def __post_init__(self) -> None:
        failures = check_count("max_consecutive_failures", self.max_consecutive_failures, optional=True)
        set_fields(
            self,
            timeout=check_timeout(self.timeout),
            buffer_bytes=check_count("buffer_bytes", self.buffer_bytes),
            max_consecutive_failures=failures,
            max_reuses=check_count("max_reuses", self.max_reuses),
        )


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # it contains secrets
class SaveOptions:
    """The options of a writer under the names of its arguments: see `TensorizerStorageWriter`.

    ``cipher`` is made from the key, and ``target`` from the path and the local folder. Raises `TypeError` or
    `ValueError` if an option is invalid, or if two options cannot be combined.
    """

    cache_staged_state_dict: bool = True
    staging: Staging = "buffer"
    overlap_staging: bool = False
    overwrite: bool = True
    sync_files: bool = True
    thread_count: int = None  # type: ignore[assignment]  # None becomes the number of cores, up to four
    storage_options: Mapping[str, Any] = None  # type: ignore[assignment]  # becomes a copy
    sha256: bool = False
    reuse_unchanged: bool = False
    cipher: Cipher | None = None
    limits: SaveLimits = SaveLimits()
    target: FlushTarget | None = None
    max_unflushed: int = MAX_UNFLUSHED

    def __post_init__(self) -> None:
        check_flags(self)
        set_fields(
            self,
            staging=check_choice("staging", self.staging, get_args(Staging)),
            thread_count=check_count("thread_count", self.thread_count, optional=True) or min(4, cores()),
            storage_options=check_storage_options(self.storage_options),
            limits=check_type("limits", self.limits, SaveLimits),
            max_unflushed=check_count("max_unflushed", self.max_unflushed),
        )
        if self.cipher is not None and self.sha256:
            raise ValueError(
                "sha256 and encryption cannot be combined: encrypted tensors are authenticated, and a hash of their "
                "contents would reveal information about them. Omit sha256."
            )
        if self.cipher is not None and self.reuse_unchanged:
            raise ValueError(
                "reuse_unchanged and encryption cannot be combined: encryption must hide whether two tensors are "
                "equal. Omit reuse_unchanged."
            )
        if self.cipher is not None and self.staging == "shared":
            raise ValueError(
                "staging='shared' and encryption cannot be combined: a tensor may be read twice, and if it changed in "
                "between, one key and nonce would encrypt two plaintexts. Use staging='buffer'."
            )
        if self.target is not None and self.reuse_unchanged:
            raise ValueError(
                "reuse_unchanged and local cannot be combined: local copies are deleted after their flush, and a "
                "flush sends whole files. Omit reuse_unchanged."
            )

    def arguments(self) -> dict[str, Any]:
        """Returns the writer's arguments without secrets.

        Leaves out ``storage_options``, and replaces ``encryption`` with whether it is set.
        """
        hidden = {"storage_options", "target", "max_unflushed"}
        values = {option.name: getattr(self, option.name) for option in fields(self) if option.name not in hidden}
        values["cipher"] = self.cipher is not None
        shown = {"encryption" if name == "cipher" else name: value for name, value in values.items()}
        if self.target is not None:
            shown |= {"local": self.target.local, "max_unflushed": self.max_unflushed}
        return shown
