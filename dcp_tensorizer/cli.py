"""``dcp-tensorizer``: look at checkpoints, verify, compare, convert and collect them.

Each command reads its arguments, calls the module that does the work, and shows what came of it. Exit codes: 0, fine;
1, damaged or different; 2, not done: a mistake in the command, nothing at the path, or no way to write. No command runs
code from a checkpoint.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable
from typing import Annotated, Any

import typer

from . import _catalogue, _render
from ._contents import contents_of, read_parts
from ._destination import open_storage
from ._inspect import inspect_contents
from ._render import Screen, count, size
from ._verify import verify as verify_files
from .errors import CheckpointError, MetadataError, NotCommitted, ReadError

__all__ = ["app"]

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    help="Look at checkpoints of dcp_tensorizer, verify, compare, convert and collect them.",
    epilog="Exit codes: 0 fine, 1 damaged or different, 2 not done.",
)

_DAMAGED, _NOT_DONE = 1, 2

Checkpoint = Annotated[str, typer.Argument(metavar="CKPT", help="A checkpoint: local path, or URL that fsspec opens.")]
Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout, for scripts.")]
StorageOptions = Annotated[
    list[str] | None,
    typer.Option("--storage-option", metavar="KEY=VALUE", help="For the fsspec file system; VALUE may be JSON."),
]


def _command(function: Callable[..., int]) -> Callable[..., None]:
    """A command that ends with the exit code it returns, and without a traceback for what users can mend."""

    @app.command(name=function.__name__)
    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> None:
        try:
            code = function(*args, **kwargs)
        except CheckpointError as error:
            Screen(as_json=False).error(str(error))
            damaged = isinstance(error, ReadError | MetadataError) and not isinstance(error, NotCommitted)
            code = _DAMAGED if damaged else _NOT_DONE
        raise typer.Exit(code)

    return run


def _options(given: list[str] | None) -> dict[str, Any]:
    """``KEY=VALUE``s, each value JSON if it can be read so."""
    options = {}
    for option in given or []:
        key, equals, text = option.partition("=")
        if not key or not equals:
            raise typer.BadParameter(f"{key!r} is not of the form KEY=VALUE", param_hint="--storage-option")
        try:
            options[key] = json.loads(text)
        except ValueError:
            options[key] = text
    return options


@_command
def ls(
    path: Annotated[str, typer.Argument(help="A directory with checkpoints below it: local path or URL.")],
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """List the checkpoints below a path, newest first."""
    screen = Screen(as_json=as_json)
    storage = open_storage(path, _options(storage_option))
    found = _catalogue.find(storage)
    if as_json:
        screen.json(
            [
                {
                    "path": listed.path,
                    "step": listed.step,
                    "state": listed.state,
                    "saved": listed.saved,
                    "bytes": listed.nbytes,
                    "ranks": listed.ranks,
                    "tensors": listed.tensors,
                    "objects": listed.objects,
                    "leftover_bytes": sum(file.nbytes for file in listed.leftovers),
                }
                for listed in found
            ]
        )
        return 0
    screen.table(
        ["checkpoint", "state", "saved", ">size", ">ranks", ">tensors"],
        (
            [
                listed.path.removeprefix(storage.path).lstrip("/") or listed.path,
                listed.state,
                _render.moment(listed.saved),
                size(listed.nbytes),
                "-" if listed.ranks is None else str(listed.ranks),
                "-" if listed.tensors is None else f"{listed.tensors:,}",
            ]
            for listed in found
        ),
    )
    if not found:
        screen.line(f"no checkpoints below {path}")
    return 0


@_command
def inspect(
    checkpoint: Checkpoint,
    pattern: Annotated[str, typer.Argument(help="Keys to show, as in a shell: 'model.*.weight'.")] = "*",
    chunks: Annotated[bool, typer.Option("--chunks", help="Show where each chunk of a tensor is.")] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Show what is in a checkpoint: tensors, objects, totals."""
    screen = Screen(as_json=as_json)
    storage = open_storage(checkpoint, _options(storage_option))
    parts = read_parts(storage)
    files = {name: nbytes for part in parts.values() for name, nbytes in part.storage_data["files"].items()}
    found = inspect_contents(contents_of(storage, parts), files, pattern)
    if as_json:
        screen.json(found)
    else:
        _show_contents(screen, found, chunks)
    return 0


def _show_contents(screen: Screen, found: dict[str, Any], chunks: bool) -> None:
    tensors, objects = found["tensors"], found["objects"]
    if chunks:
        screen.table(
            ["tensor", "from", "shape", ">bytes", "file", ">at"],
            (
                [
                    tensor["key"],
                    _render.shape(chunk["offset"]) if chunk["offset"] else "-",
                    _render.shape(chunk["shape"]),
                    size(chunk["bytes"]),
                    chunk["file"] or "-",
                    "-" if chunk["file"] is None else f"{chunk['file_offset']:,}",
                ]
                for tensor in tensors
                for chunk in tensor["chunks"]
            ),
        )
    else:
        screen.table(
            ["tensor", "shape", "dtype", ">size", ">chunks", "ranks"],
            (
                [
                    tensor["key"],
                    _render.shape(tensor["shape"]),
                    tensor["dtype"],
                    size(tensor["bytes"]),
                    str(len(tensor["chunks"])),
                    _render.ranks(chunk["rank"] for chunk in tensor["chunks"]),
                ]
                for tensor in tensors
            ),
        )
    screen.table(
        ["object", "type", "value", ">size"],
        ([o["key"], o["type"], o["value"], size(o["bytes"])] for o in objects),
        title="Objects",
    )
    for title, name in (("By dtype", "by_dtype"), ("By key", "by_key")):
        screen.table(
            [name.removeprefix("by_"), ">tensors", ">elements", ">size"],
            (
                [key, f"{total['tensors']:,}", f"{total['elements']:,}", size(total["bytes"])]
                for key, total in found[name].items()
            ),
            title=title,
        )
    screen.table(
        ["file", ">rank", ">size"],
        ([file["file"], str(file["rank"]), size(file["bytes"])] for file in found["files"]),
        title="Files",
    )
    total = sum(tensor["bytes"] for tensor in tensors)
    screen.line(
        f"\n{count(len(tensors), 'tensor')} of {size(total)} and {count(len(objects), 'object')}, "
        f"saved by {count(found['ranks'], 'rank')}"
    )


@_command
def verify(
    checkpoint: Checkpoint,
    full: Annotated[
        bool, typer.Option("--full", help="Every byte of the files, and tensorizer's own CRC-32 and SHA-256.")
    ] = False,
    storage_option: StorageOptions = None,
    as_json: Json = False,
) -> int:
    """Compare a checkpoint's files with what was saved; exit code 1 if any is damaged."""
    screen = Screen(as_json=as_json)
    storage = open_storage(checkpoint, _options(storage_option))
    with screen.progress("verifying") as progress:
        found = verify_files(storage, read_parts(storage), full=full, progress=progress)
    rate = found.nbytes / 1e9 / max(found.seconds, 1e-9)
    if as_json:
        screen.json(
            {
                "path": storage.path,
                "ok": not found.damages,
                "full": full,
                "files": found.files,
                "items": found.items,
                "bytes": found.nbytes,
                "seconds": found.seconds,
                "damages": [damage._asdict() for damage in found.damages],
            }
        )
        return _DAMAGED if found.damages else 0
    screen.table(
        ["damaged", "file", ">at", "what"],
        ([d.key or "the file", d.file, f"{d.offset:,}", d.what] for d in found.damages),
    )
    screen.line(
        f"{'DAMAGED' if found.damages else 'ok'}: {count(found.files, 'file')}, {count(found.items, 'item')}, "
        f"{size(found.nbytes)} in {found.seconds:.1f} s ({rate:.2f} GB/s)"
        + (f", {count(len(found.damages), 'damage')}" if found.damages else ""),
        "bold red" if found.damages else "bold green",
    )
    return _DAMAGED if found.damages else 0
