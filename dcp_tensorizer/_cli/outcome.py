"""How a command ends: its exit code, and how a failure is told.

0    fine; of ``diff``, the same
1    damaged; of ``diff``, different
2    not done: a mistake in the command, nothing at the path, or no way to read or write
3    of a format or version that this release does not read; it may be whole
130  interrupted by Ctrl-C; 129 and 143: ended by SIGHUP, by SIGTERM
141  the reader of the output has closed it
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import cast

import typer

from ..errors import (
    CheckpointError,
    ChecksumMismatch,
    MetadataError,
    NotCommitted,
    ReadError,
    UnsupportedFormat,
    UntrustedObject,
)

__all__ = ["DAMAGED", "DIFFERENT", "NOT_DONE", "OK", "failed", "flushed", "unwritten", "usage_error"]

OK = 0
DAMAGED = DIFFERENT = 1
NOT_DONE = 2
UNSUPPORTED = 3
INTERRUPTED = 130  # 128 and the number of SIGINT, as shells have it
CLOSED = 141  # 128 and the number of SIGPIPE

usage_error = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""A mistake in the command, of any kind. Releases of typer have it in different places."""


def failed(error: BaseException, *, as_json: bool, damaged: int = DAMAGED) -> int:
    """Tells why a command was not done, in one style; returns its exit code.

    Args:
        error: The reason.
        as_json: As a JSON document on stdout, and not as a line on stderr.
        damaged: The exit code where the checkpoint is damaged.
    """
    from .terminal import print_error, print_json

    code = _exit_code(error, damaged)
    message, hint = _message(error)
    if as_json:
        print_json({"error": type(error).__name__, "message": message, "exit_code": code})
    else:
        print_error(message, hint)
    return code


def flushed(code: int) -> int:
    """An exit code, when all output has been written; raises `OSError` if it cannot be."""
    if sys.stdout is not None:  # a daemon has closed it
        sys.stdout.flush()
    return code


def unwritten(error: OSError) -> int:
    """Tells that the output could not be written, unless nobody wants it; returns the exit code."""
    # What is left in the buffer goes nowhere: else the interpreter fails with it at its end.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):  # somebody has replaced the stream, or there is none
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return CLOSED
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"error: the output cannot be written: {error}\n")
    return NOT_DONE


def _exit_code(error: BaseException, damaged: int) -> int:
    if isinstance(error, KeyboardInterrupt):
        return INTERRUPTED
    if isinstance(error, UnsupportedFormat):
        return UNSUPPORTED
    return damaged if isinstance(error, CheckpointError) and _is_damage(error) else NOT_DONE


def _is_damage(error: CheckpointError) -> bool:
    """Whether the checkpoint itself is the cause, and not a server, a key or permissions."""
    if isinstance(error, NotCommitted | UntrustedObject):
        return False
    gone = isinstance(error, ReadError) and isinstance(error.__cause__, EOFError | FileNotFoundError)
    return gone or isinstance(error, ChecksumMismatch | MetadataError)


def _message(error: BaseException) -> tuple[str, str]:
    """What went wrong, and where help is."""
    if isinstance(error, KeyboardInterrupt):
        return "interrupted", ""
    if isinstance(error, usage_error):
        command = error.ctx.command_path if error.ctx else "dcp-tensorizer"
        return error.format_message(), f"{command} --help shows how it is used"
    return str(error), ""
