"""The options of a writer, checked at construction."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

from .._runtime.threads import cores
from .._runtime.validation import check_choice, check_count, check_flags, check_timeout
from .._staging.device import expandable_segments
from .._tiers.target import FlushTarget
from .._writer_process.options import SaveLimits, WriteOptions
from .partners import ONE_COPY, CopyOptions

Staging = Literal["buffer", "shared", "device"]

MAX_UNFLUSHED = 3
"""Checkpoints that may be only in a local folder before training waits for the remote."""


@dataclass(frozen=True, slots=True, kw_only=True, repr=False)  # it contains secrets
class SaveOptions:
    """All options of a writer, under the names of its arguments: see `TensorizerStorageWriter`.

    ``write`` has those for writing files, and ``target`` the remote folder of ``local``, if there is one. Raises
    `TypeError` or `ValueError`.
    """

    cache_staged_state_dict: bool
    staging: Staging
    overlap_staging: bool
    overwrite: bool
    write: WriteOptions
    target: FlushTarget | None = None
    max_unflushed: int = MAX_UNFLUSHED
    survive: float = 0.0
    copies: CopyOptions = ONE_COPY

    def __post_init__(self) -> None:
        check_flags(self)
        check_choice("staging", self.staging, get_args(Staging))
        if self.staging == "device" and (setting := expandable_segments()) is not None:
            raise ValueError(
                f"staging='device' and expandable segments ({setting}) exclude each other: such memory is not safe to "
                f"hand to another process, which may be ended by it. Use staging='buffer', or turn them off"
            )
        if self.write.cipher is not None and self.staging == "shared":
            raise ValueError(
                "staging='shared' and encryption exclude each other: a tensor may be read twice, and if it changed in "
                "between, one key and nonce would encrypt two texts"
            )
        if self.target is not None and self.write.reuse_unchanged:
            raise ValueError(
                "reuse_unchanged and local exclude each other: local copies go when they have been flushed, and a "
                "flush sends whole files"
            )
        check_count("max_unflushed", self.max_unflushed)
        check_survival(self.survive, self.staging, cache_staged_state_dict=self.cache_staged_state_dict)
        if self.survive and self.target is not None:
            raise ValueError(
                "survive and local exclude each other in a writer: what is saved is on a local disk within moments. "
                "CheckpointManager has both"
            )

    @property
    def limits(self) -> SaveLimits:
        """The limits of a save."""
        return self.write.limits

    def arguments(self) -> dict[str, Any]:
        """The writer's arguments without secrets: of ``encryption`` only whether there is one."""
        return {
            "cache_staged_state_dict": self.cache_staged_state_dict,
            "staging": self.staging,
            "overlap_staging": self.overlap_staging,
            "overwrite": self.overwrite,
            "sync_files": self.write.sync_files,
            "thread_count": self.write.thread_count,
            "sha256": self.write.sha256,
            "reuse_unchanged": self.write.reuse_unchanged,
            "encryption": self.write.cipher is not None,
            "limits": self.limits,
            "survive": self.survive,
            "copies": self.copies.copies,
        } | ({} if self.target is None else {"local": self.target.local, "max_unflushed": self.max_unflushed})


def threads_of_save(thread_count: int | None) -> int:
    """The threads of a save: by default as many as there are cores, up to four. Raises `TypeError` or `ValueError`."""
    check_count("thread_count", thread_count, optional=True)
    return thread_count or min(4, cores())


def check_survival(seconds: object, staging: object, *, cache_staged_state_dict: bool) -> None:
    """Checks ``survive``; raises `TypeError` unless it is a number, and `ValueError` if it conflicts with other
    options.
    """
    check_timeout(seconds, least=0, name="survive")
    if seconds and staging == "shared":
        raise ValueError(
            "survive and staging='shared' exclude each other: what is not copied is gone with the process that has it"
        )
    if seconds and not cache_staged_state_dict:
        raise ValueError("survive and cache_staged_state_dict=False exclude each other: the buffers hold what is kept")
