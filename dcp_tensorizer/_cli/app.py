"""``dcp-tensorizer``: look at checkpoints, verify, compare, convert and collect them.

Each command reads its arguments, calls the module that does the work, and shows the result. Exit codes: 0, fine; 1,
damaged or different; 2, not done: a mistake in the command, nothing at the path, or no way to write. No command runs
code from a checkpoint.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Annotated, Any

import typer

from .._storage.open import open_storage
from .._storage.redact import redact
from .._tools import listing, retention
from .._tools.checkpoint_view import data_files, read_parts, unlock_parts, view_checkpoint
from .._tools.diff import diff as compare
from .._tools.formats.registry import FORMATS, open_two
from .._tools.inspect import inspect_checkpoint
from .._tools.verify import verify as verify_files
from ..convert import Options
from ..convert import convert as convert_checkpoint
from ..errors import CheckpointError, ChecksumMismatch, MetadataError, NotCommitted, ReadError, UntrustedObject
from .arguments import (
    Checkpoint,
    Json,
    KeyFile,
    PassphraseFile,
    StorageOptions,
    read_dtype,
    read_key,
    read_nbytes,
    read_options,
    read_seconds,
    read_split,
)
from .terminal import Screen, count, size
from .views import show_checkpoint, show_difference, show_listing, show_removals, show_verified

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at checkpoints of dcp_tensorizer, verify, compare, convert and collect them.",
    epilog="Exit codes: 0 fine, 1 damaged or different, 2 not done.",
)

_DAMAGED = _DIFFERENT = 1
_NOT_DONE = 2


def _command(damaged: int = _DAMAGED) -> Callable[[Callable[..., int]], None]:
    """A command that ends with the exit code it returns, and without a traceback for what users can fix.

    Args:
        damaged: The exit code where it fails because the checkpoint is damaged.
    """

    def add(function: Callable[..., int]) -> None:
        @app.command(name=function.__name__)
        @functools.wraps(function)
        def run(*args: Any, **kwargs: Any) -> None:
            try:
                code = function(*args, **kwargs)
            except CheckpointError as error:
                Screen(as_json=False).error(str(error))
                code = damaged if _is_damage(error) else _NOT_DONE
            raise typer.Exit(code)

    return add


def _is_damage(error: CheckpointError) -> bool:
    """Whether the checkpoint itself is the cause, and not a server, a key or permissions."""
    if isinstance(error, NotCommitted | UntrustedObject):
        return False
    gone = isinstance(error, ReadError) and isinstance(error.__cause__, EOFError | FileNotFoundError)
    return gone or isinstance(error, ChecksumMismatch | MetadataError)


@_command()
def ls(
    path: Annotated[str, typer.Argument(help="A directory with checkpoints below it: local path or URL.")],
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """List the checkpoints below a path, newest first."""
    screen = Screen(as_json=as_json)
    storage = open_storage(path, read_options(storage_option))
    show_listing(screen, listing.find(storage), storage)
    return 0


@_command()
def inspect(
    checkpoint: Checkpoint,
    pattern: Annotated[str, typer.Argument(help="Keys to show, as in a shell: 'model.*.weight'.")] = "*",
    chunks: Annotated[bool, typer.Option("--chunks", help="Show where each chunk of a tensor is.")] = False,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Show what is in a checkpoint: tensors, objects, totals."""
    screen = Screen(as_json=as_json)
    storage = open_storage(checkpoint, read_options(storage_option))
    parts = read_parts(storage)
    key = read_key(key_file, passphrase_file)
    ciphers = None if key is None else unlock_parts(storage, parts, key)
    view = view_checkpoint(storage, parts, ciphers)
    show_checkpoint(screen, inspect_checkpoint(view, data_files(parts), pattern), chunks)
    return 0


@_command()
def verify(
    checkpoint: Checkpoint,
    full: Annotated[bool, typer.Option("--full", help="Every byte of the files, and tensorizer's own hashes.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Compare a checkpoint's files with what was saved; exit code 1 if any is damaged."""
    screen = Screen(as_json=as_json)
    storage = open_storage(checkpoint, read_options(storage_option))
    with screen.progress("verifying") as progress:
        verified = verify_files(storage, read_parts(storage), full=full, progress=progress)
    show_verified(screen, verified, storage, full)
    return _DAMAGED if verified.damages else 0


@_command(damaged=_NOT_DONE)
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format that convert reads.")],
    after: Annotated[str, typer.Argument(metavar="B", help="Another one.")],
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Show how two checkpoints differ; exit code 1 if they do."""
    screen = Screen(as_json=as_json)
    options, key = read_options(storage_option), read_key(key_file, passphrase_file)
    with screen.progress("comparing") as progress:
        difference = compare(*open_two((before, after), options, key), progress)
    show_difference(screen, difference)
    return _DIFFERENT if difference else 0


@_command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: local path or URL.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="Where there is nothing yet: local path or URL.")],
    to: Annotated[str, typer.Option("--to", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.")],
    source_format: Annotated[
        str | None, typer.Option("--from", metavar="FORMAT", help="What SRC must be; looked up by default.")
    ] = None,
    select: Annotated[
        list[str] | None, typer.Option("--select", metavar="PATTERN", help="Only keys that match; repeatable.")
    ] = None,
    strip_prefix: Annotated[str, typer.Option(help="Cut this from the beginning of keys.")] = "",
    dtype: Annotated[str | None, typer.Option(help="For floating-point tensors: bfloat16, float32, ...")] = None,
    shard_size: Annotated[str, typer.Option(help="safetensors: the most in a file.")] = "5GB",
    tensor_parallel: Annotated[int, typer.Option(min=1, help="tensorizer: split into a file for each rank.")] = 1,
    split: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="tensorizer: JSON, {pattern: dimension} of the tensors to split."),
    ] = None,
    buffer: Annotated[
        list[str] | None, typer.Option(metavar="PATTERN", help="tensorizer: keys of buffers; repeatable.")
    ] = None,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Bring a checkpoint into another format: whole tensors, in the memory of the largest one."""
    screen = Screen(as_json=as_json)
    if split is not None and tensor_parallel == 1:
        raise typer.BadParameter("is for --tensor-parallel N, into how many files to split", param_hint="--split")
    conversion = Options(
        select=select or (),
        strip_prefix=strip_prefix,
        dtype=read_dtype(dtype),
        source_format=source_format,
        shard_bytes=read_nbytes(shard_size),
        tensor_parallel=tensor_parallel,
        split=read_split(split),
        buffers=(*Options.buffers, *(buffer or ())),
    )
    with screen.progress("converting") as progress:
        converted = convert_checkpoint(
            source,
            target,
            to,
            options=conversion,
            storage_options=read_options(storage_option),
            encryption=read_key(key_file, passphrase_file),
            on_progress=progress,
        )
    if as_json:
        screen.json(dataclasses.asdict(converted))
    else:
        objects = f" and {count(converted.objects, 'object')}" if converted.objects else ""
        screen.line(
            f"{redact(target)}: {count(converted.tensors, 'tensor')}{objects}, {size(converted.nbytes)}, "
            f"from {converted.source_format} to {to} in {converted.seconds:.1f} s"
        )
    return 0


@_command()
def gc(
    path: Annotated[str, typer.Argument(help="A directory with checkpoints below it: local path or URL.")],
    keep: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Remove committed checkpoints but the N newest.")
    ] = None,
    older_than: Annotated[
        str | None, typer.Option(metavar="AGE", help="Only what is older: 90s, 30m, 12h, 7d, 2w.")
    ] = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Remove nothing, and show what would be.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Remove old checkpoints, and what dead saves have left; never the newest committed one."""
    screen = Screen(as_json=as_json)
    storage = open_storage(path, read_options(storage_option))
    seconds = None if older_than is None else read_seconds(older_than)
    planned = retention.plan_collection(storage, keep, seconds)
    removals = planned if dry_run else [retention.collect(removal) for removal in planned]
    show_removals(screen, removals, storage, dry_run)
    return _NOT_DONE if any(removal.failed for removal in removals) else 0
