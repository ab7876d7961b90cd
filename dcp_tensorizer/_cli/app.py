"""``dcp-tensorizer``: each command parses its arguments, calls one public function, and shows the result.

Modules that need torch are imported when a command runs, so help, the version and completion take a tenth of the time
that importing torch takes.
"""

from __future__ import annotations

import functools
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Annotated, Any, cast

import typer

from ..errors import CheckpointError, UnsupportedFormat, is_damage
from ..tools import FORMATS
from .arguments import (
    Checkpoint,
    Json,
    KeyFile,
    PassphraseFile,
    Published,
    StorageOptions,
    Version,
    read_dtype,
    read_key,
    read_nbytes,
    read_options,
    read_renaming,
    read_seconds,
    read_split,
)

# --- exit codes and errors --------------------------------------------------------------------------------------------
#
#   0    success; ``diff``: no difference
#   1    damaged; ``diff``: different
#   2    failed: for example a usage error, no checkpoint at the path, a wrong key, or a failed read or write
#   3    a format or version that this release cannot read; the checkpoint may be undamaged
# 130    interrupted by Ctrl-C; 129: ended by SIGHUP; 143: ended by SIGTERM
# 141    the reader of stdout has closed the pipe

OK = 0
DAMAGED = DIFFERENT = 1
NOT_DONE = 2
UNSUPPORTED = 3
INTERRUPTED = 130  # 128 + SIGINT, the convention of shells
CLOSED = 141  # 128 + SIGPIPE

usage_error = cast(type[typer.BadParameter], typer.BadParameter.__bases__[0])
"""The base class of all usage errors. Its module depends on the release of typer."""


def failed(error: BaseException, *, as_json: bool, damaged: int = DAMAGED) -> int:
    """Reports why a command failed; returns its exit code. For a damaged checkpoint, the code is ``damaged``."""
    from .terminal import print_error, print_json

    code, message, hint = NOT_DONE, str(error), ""
    if isinstance(error, KeyboardInterrupt):
        code, message = INTERRUPTED, "interrupted"
    elif isinstance(error, UnsupportedFormat):
        code = UNSUPPORTED
    elif isinstance(error, usage_error):
        command = error.ctx.command_path if error.ctx else "dcp-tensorizer"
        message, hint = error.format_message(), f"{command} --help shows its usage"
    elif isinstance(error, CheckpointError) and is_damage(error):
        code = damaged
    if as_json:
        print_json({"error": type(error).__name__, "message": message, "exit_code": code})
    else:
        print_error(message, hint)
    return code


def flushed(code: int) -> int:
    """Flushes stdout and returns ``code``. Raises `OSError` if stdout cannot be written to."""
    if sys.stdout is not None:  # None in a process that was started without a stdout
        sys.stdout.flush()
    return code


def unwritten(error: OSError) -> int:
    """Reports a failure of stdout or of a local file, unless the pipe of stdout is closed; returns the exit code."""
    # Send the rest of the buffer to /dev/null: at exit, the interpreter would fail to flush it.
    nowhere = os.open(os.devnull, os.O_WRONLY)
    with suppress(OSError, ValueError, AttributeError):  # stdout was replaced or is None
        os.dup2(nowhere, sys.stdout.fileno())
    os.close(nowhere)
    if isinstance(error, BrokenPipeError):
        return CLOSED
    with suppress(OSError, AttributeError):
        sys.stderr.write(f"error: reading a file or writing the output failed: {error}\n")
    return NOT_DONE


_app = typer.Typer(
    rich_markup_mode=None,  # rich's help tables would show a type for each switch
    pretty_exceptions_enable=False,
    help="List, inspect, verify, compare, convert and remove checkpoints of dcp_tensorizer.",
    epilog="Exit codes: 0 success, 1 damaged or different, 2 failed, 3 unsupported format or version, 130 interrupted, "
    "129 and 143 ended by a signal, 141 pipe closed.",
)


def run(arguments: Sequence[str]) -> int:
    as_json = "--json" in arguments
    try:
        code = _app(list(arguments) or ["--help"], prog_name="dcp-tensorizer", standalone_mode=False) or OK
        return flushed(int(code))
    except usage_error as error:
        return failed(error, as_json=as_json)
    except OSError as error:
        return unwritten(error)


_publish = typer.Typer(
    rich_markup_mode=None,
    help="Publish versions of a model, whole or as deltas, and update copies to them.",
)
_app.add_typer(_publish, name="publish")


def _command(damaged: int = DAMAGED, *, of: typer.Typer = _app) -> Callable[[Callable[..., int]], None]:
    """Registers a command whose function returns the exit code.

    ``damaged`` is the exit code for a damaged checkpoint. ``of`` is the group of the command. The last word of the
    function's name is the name of the command.
    """

    def add(function: Callable[..., int]) -> None:
        @of.command(name=function.__name__.rpartition("_")[2])
        @functools.wraps(function)
        def command(*args: Any, **kwargs: Any) -> int:
            try:
                try:
                    code = function(*args, **kwargs)
                except (CheckpointError, KeyboardInterrupt) as error:
                    code = failed(error, as_json=kwargs["as_json"], damaged=damaged)
                return flushed(code)
            except OSError as error:  # from stdout or a local file; checkpoints raise CheckpointError
                return unwritten(error)

    return add


def emit(result: object, show: Callable[[], None], *, as_json: bool) -> int:
    from .terminal import print_json

    if as_json:
        print_json(result)
    else:
        show()
    return OK


@_app.callback()
def _all_commands(version: Version = False, as_json: Json = False) -> None:
    """Declares the options that may come before the name of a command."""


@_command()
def ls(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A directory with checkpoints below it: local path or URL.")
    ],
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """List the checkpoints in and below a path, the highest step first."""
    from .. import tools
    from .views import show_listing

    found = tools.list_checkpoints(path, storage_options=read_options(storage_option, path))
    return emit(found, lambda: show_listing(found, path), as_json=as_json)


@_command()
def inspect(
    checkpoint: Checkpoint,
    pattern: Annotated[
        str, typer.Argument(metavar="PATTERN", help="A shell-style pattern of keys: 'model.*.weight'.")
    ] = "*",
    chunks: Annotated[bool, typer.Option("--chunks", help="Show the location of each chunk of a tensor.")] = False,
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Show the contents of a checkpoint: tensors, objects, totals."""
    from .. import tools
    from .views import show_checkpoint

    options, key = read_options(storage_option, checkpoint), read_key(key_file, passphrase_file)
    inspected = tools.inspect(checkpoint, pattern, storage_options=options, encryption=key)
    return emit(inspected, lambda: show_checkpoint(inspected, chunks), as_json=as_json)


@_command()
def verify(
    checkpoint: Checkpoint,
    full: Annotated[bool, typer.Option("--full", help="Check every byte, and tensorizer's own hashes.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Compare the files of a checkpoint, or of a folder of checkpoints, with what was saved.

    The exit code is 1 if a file is damaged.
    """
    from .. import tools
    from ..tools._atomic_output import shown_path
    from .terminal import fields, progress
    from .views import show_verified

    options = read_options(storage_option, checkpoint)
    with progress("verifying", hidden=as_json) as on_progress:
        verified = tools.verify(checkpoint, full=full, storage_options=options, on_progress=on_progress)
    result = {"path": shown_path(checkpoint), "ok": not verified.damages, "full": full} | fields(verified)
    emit(result, lambda: show_verified(verified), as_json=as_json)
    return DAMAGED if verified.damages else OK


@_command(damaged=NOT_DONE)
def diff(
    before: Annotated[str, typer.Argument(metavar="A", help="A checkpoint of any format that convert reads.")],
    after: Annotated[str, typer.Argument(metavar="B", help="The checkpoint to compare with A.")],
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Show how two checkpoints differ. The exit code is 1 if they do."""
    from .. import tools
    from .terminal import progress
    from .views import show_difference

    options, key = read_options(storage_option, before, after), read_key(key_file, passphrase_file)
    with progress("comparing", hidden=as_json) as on_progress:
        difference = tools.diff(before, after, storage_options=options, encryption=key, on_progress=on_progress)
    emit(difference, lambda: show_difference(difference), as_json=as_json)
    return DIFFERENT if difference else OK


@_command()
def convert(
    source: Annotated[str, typer.Argument(metavar="SRC", help="A checkpoint: local path or URL.")],
    target: Annotated[str, typer.Argument(metavar="DST", help="An empty or new destination: local path or URL.")],
    to: Annotated[
        str,
        typer.Option(
            "--to", metavar="FORMAT", help=f"One of {', '.join(FORMATS)}.", autocompletion=lambda: list(FORMATS)
        ),
    ],
    source_format: Annotated[
        str | None,
        typer.Option(
            "--from",
            metavar="FORMAT",
            help="The format of SRC; recognised by default.",
            autocompletion=lambda: list(FORMATS),
        ),
    ] = None,
    include: Annotated[
        list[str] | None, typer.Option("--include", metavar="PATTERN", help="Only keys that match; repeatable.")
    ] = None,
    exclude: Annotated[
        list[str] | None, typer.Option("--exclude", metavar="PATTERN", help="Leave out keys that match; repeatable.")
    ] = None,
    strip_prefix: Annotated[str, typer.Option(metavar="PREFIX", help="Remove this from the beginning of keys.")] = "",
    rename: Annotated[
        str | None,
        typer.Option(metavar="FILE", help="JSON, {pattern: new key}; each * stands for the same text in both."),
    ] = None,
    add_prefix: Annotated[
        str, typer.Option(metavar="PREFIX", help="Prepend this to all keys, after all other changes.")
    ] = "",
    dtype: Annotated[str | None, typer.Option(metavar="DTYPE", help="The new dtype of floating-point tensors.")] = None,
    shard_size: Annotated[str, typer.Option(metavar="SIZE", help="safetensors: the maximum size of a file.")] = "5GB",
    tensor_parallel: Annotated[
        int, typer.Option(min=1, metavar="N", help="tensorizer: split into one file per rank.")
    ] = 1,
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
    """Convert a checkpoint to another format. This may need memory for the largest tensor."""
    from .. import tools
    from ..tools._atomic_output import shown_path
    from .terminal import fields, progress
    from .views import show_converted

    if split is not None and tensor_parallel == 1:
        raise typer.BadParameter("needs --tensor-parallel N, the number of files.", param_hint="--split")
    conversion = tools.ConvertOptions(
        include=include or (),
        exclude=exclude or (),
        strip_prefix=strip_prefix,
        rename=read_renaming(rename),
        add_prefix=add_prefix,
        dtype=read_dtype(dtype),
        source_format=source_format,
        shard_bytes=read_nbytes(shard_size),
        tensor_parallel=tensor_parallel,
        split=read_split(split),
        buffers=(*tools.ConvertOptions.buffers, *(buffer or ())),
    )
    with progress("converting", hidden=as_json) as on_progress:
        converted = tools.convert(
            source,
            target,
            to,
            options=conversion,
            storage_options=read_options(storage_option, source, target),
            encryption=read_key(key_file, passphrase_file),
            on_progress=on_progress,
        )
    result = {"path": shown_path(target), "format": to} | fields(converted)
    return emit(result, lambda: show_converted(converted, target, to), as_json=as_json)


@_command()
def report(
    checkpoints: Annotated[
        list[str], typer.Argument(metavar="CKPT", help="Checkpoints of any format that convert reads.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The page to write.")] = "report.html",
    key_file: KeyFile = None,
    passphrase_file: PassphraseFile = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Write an HTML page about checkpoints: sizes, norms and histograms, and how they change from step to step."""
    from .. import tools
    from .terminal import progress
    from .views import show_report

    with progress("reading", hidden=as_json) as on_progress:
        reported = tools.report(
            checkpoints,
            output,
            storage_options=read_options(storage_option, *checkpoints, output),
            encryption=read_key(key_file, passphrase_file),
            on_progress=on_progress,
        )
    return emit(reported, lambda: show_report(reported), as_json=as_json)


@_command()
def trace(
    sources: Annotated[
        list[str], typer.Argument(metavar="FOLDER", help="Folders with the files of TraceFile, or such files.")
    ],
    output: Annotated[str, typer.Option("--output", "-o", metavar="FILE", help="The trace to write.")] = "trace.json",
    as_json: Json = False,
) -> int:
    """Merge the recorded spans of saves and loads into a trace for Perfetto."""
    from .. import tools
    from .views import show_trace

    traced = tools.trace(sources, output)
    return emit(traced, lambda: show_trace(traced), as_json=as_json)


@_command()
def gc(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A directory with checkpoints below it: local path or URL.")
    ],
    keep_latest: Annotated[
        int | None, typer.Option(min=1, metavar="N", help="Remove old committed checkpoints, but not the N newest.")
    ] = None,
    older_than: Annotated[
        str | None,
        typer.Option(
            metavar="AGE",
            help="Remove only what is older: 90s, 30m, 12h, 7d, 2w. Leftovers of a save known to be dead are removed "
            "at any age.",
        ),
    ] = None,
    only_data: Annotated[
        bool, typer.Option("--only-data", help="Retain files that this package did not write.")
    ] = False,
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Remove old checkpoints and the leftovers of dead saves. The newest committed checkpoint always stays."""
    from .. import tools
    from .views import show_removals

    removals = tools.collect(
        path,
        keep_latest=keep_latest,
        older_than=None if older_than is None else read_seconds(older_than),
        only_data=only_data,
        dry_run=dry_run,
        storage_options=read_options(storage_option, path),
    )
    removed, kept = [one for one in removals if not one.kept], [one for one in removals if one.kept]
    total = sum(one.nbytes for one in removed)
    result = {"dry_run": dry_run, "bytes": total, "removals": removed, "kept": kept}
    emit(result, lambda: show_removals(removals, path, dry_run), as_json=as_json)
    return NOT_DONE if any(removal.failed for removal in removals) else OK


# --- published versions of a model ------------------------------------------------------------------------------------


@_command(of=_publish)
def publish_add(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A model in Hugging Face's layout: local path or URL.")],
    published: Published,
    previous: Annotated[
        str | None, typer.Option(metavar="MODEL", help="The model at the previous version, to compare with.")
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(min=0, max=2**63 - 1, metavar="N", help="The step of training, recorded in the version."),
    ] = None,
    max_deltas: Annotated[
        int, typer.Option(min=1, metavar="N", help="The number of deltas that may follow a whole version.")
    ] = 20,
    keep_latest: Annotated[
        int | None,
        typer.Option(
            min=1, metavar="N", help="Remove all versions except the N newest and the versions that these need."
        ),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Publish a model as the next version, whole or as a delta."""
    from .._publish.publisher import publish
    from .terminal import progress
    from .views import show_published

    with progress("publishing", hidden=as_json) as on_progress:
        version = publish(
            model,
            published,
            previous=previous,
            step=step,
            max_deltas=max_deltas,
            keep_latest=keep_latest,
            storage_options=read_options(storage_option, model, published, previous),
            on_progress=on_progress,
        )
    return emit(version, lambda: show_published(version), as_json=as_json)


@_command(of=_publish)
def publish_ls(published: Published, storage_option: StorageOptions = None, as_json: Json = False) -> int:
    """List the versions, the newest first."""
    from .._publish.versions import list_versions
    from .views import show_versions

    versions = list_versions(published, storage_options=read_options(storage_option, published))
    return emit(versions, lambda: show_versions(versions), as_json=as_json)


@_command(of=_publish)
def publish_apply(
    published: Published,
    copy: Annotated[
        str, typer.Argument(metavar="COPY", help="A local directory with a copy of the model, or a new one.")
    ],
    version: Annotated[
        int | None, typer.Option("--to", min=1, metavar="N", help="The version to update to; the newest by default.")
    ] = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Update a copy of the model to a version. The exit code is 1 if the version or the copy is damaged."""
    from .._publish.apply import apply_delta
    from ..tools._atomic_output import shown_path
    from .terminal import fields, progress
    from .views import show_applied

    options = read_options(storage_option, published)
    with progress("applying", hidden=as_json) as on_progress:
        applied = apply_delta(copy, published, version=version, storage_options=options, on_progress=on_progress)
    result = {"path": shown_path(copy)} | fields(applied)
    return emit(result, lambda: show_applied(applied, copy), as_json=as_json)


@_command(of=_publish)
def publish_verify(
    path: Annotated[
        str, typer.Argument(metavar="PATH", help="A directory of versions, one of its versions, or a copy.")
    ],
    version: Annotated[
        int | None,
        typer.Option(
            "--version",
            min=1,
            metavar="N",
            help="The version to verify; by default, for each whole version, the last one that builds on it.",
        ),
    ] = None,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Compare the SHA-256 of the files with what was published. The exit code is 1 if a file is damaged."""
    from .._publish.apply import verify_versions
    from .terminal import fields, progress
    from .views import show_versions_verified

    options = read_options(storage_option, path)
    with progress("verifying", hidden=as_json) as on_progress:
        verified = verify_versions(path, version=version, storage_options=options, on_progress=on_progress)
    result = {"ok": not verified.damages} | fields(verified)
    emit(result, lambda: show_versions_verified(verified), as_json=as_json)
    return DAMAGED if verified.damages else OK


@_command(of=_publish)
def publish_gc(
    published: Published,
    keep_latest: Annotated[
        int, typer.Option(min=1, metavar="N", help="Retain the N newest versions and the versions that these need.")
    ],
    dry_run: Annotated[bool, typer.Option("--dry-run", help="Only show what would be removed.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Remove old versions that no retained version needs."""
    from .._publish.versions import collect_versions
    from .views import show_versions_removed

    options = read_options(storage_option, published)
    removed = collect_versions(published, keep_latest=keep_latest, dry_run=dry_run, storage_options=options)
    result = {"dry_run": dry_run, "bytes": sum(info.nbytes for info in removed), "removals": removed}
    return emit(result, lambda: show_versions_removed(removed, dry_run), as_json=as_json)
