"""The results of the commands: tables for people, or one JSON document for scripts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from .._storage.base import Storage
from .._tools.diff import Difference
from .._tools.listing import Listed
from .._tools.retention import Removal
from .._tools.verify import Verified
from . import terminal
from .terminal import Screen, count, size

__all__ = ["show_checkpoint", "show_difference", "show_listing", "show_removals", "show_verified"]


def show_listing(screen: Screen, checkpoints: Sequence[Listed], storage: Storage) -> None:
    """Checkpoints below a directory."""
    if screen.as_json:
        names = ("path", "step", "state", "saved", "nbytes", "ranks", "tensors", "objects")
        leftovers = [{"leftover_bytes": sum(file.nbytes for file in listed.leftovers)} for listed in checkpoints]
        screen.json([_fields(listed, *names) | left for listed, left in zip(checkpoints, leftovers, strict=True)])
        return
    rows = (
        [
            _below(c.path, storage),
            c.state,
            terminal.moment(c.saved),
            size(c.nbytes),
            c.ranks and str(c.ranks),
            c.tensors,
        ]
        for c in checkpoints
    )
    screen.table(["checkpoint", "state", "saved", ">size", ">ranks", ">tensors"], rows)
    if not checkpoints:
        screen.line(f"no checkpoints below {storage.path}")


def show_checkpoint(screen: Screen, described: dict[str, Any], chunks: bool) -> None:
    """What `inspect_checkpoint` gives; ``chunks``: a line for each chunk, and not for each tensor."""
    if screen.as_json:
        screen.json(described)
        return
    tensors, objects = described["tensors"], described["objects"]
    (_show_chunks if chunks else _show_tensors)(screen, tensors)
    rows = ([o["key"], o["type"], o["value"], size(o["bytes"])] for o in objects)
    screen.table(["object", "type", "value", ">size"], rows, title="Objects")
    for title, column in (("By dtype", "dtype"), ("By key", "key")):
        totals = described[f"by_{column}"].items()
        rows = ([name, total["tensors"], total["elements"], size(total["bytes"])] for name, total in totals)
        screen.table([column, ">tensors", ">elements", ">size"], rows, title=title)
    rows = ([file["file"], str(file["rank"]), size(file["bytes"])] for file in described["files"])
    screen.table(["file", ">rank", ">size"], rows, title="Files")
    total = sum(tensor["bytes"] for tensor in tensors)
    screen.line("")
    screen.line(
        f"{count(len(tensors), 'tensor')} of {size(total)} and {count(len(objects), 'object')}, "
        f"saved by {count(described['ranks'], 'rank')}"
    )


def _show_chunks(screen: Screen, tensors: Sequence[dict[str, Any]]) -> None:
    rows = (
        [
            tensor["key"],
            terminal.shape(chunk["offset"]) if chunk["offset"] else None,
            terminal.shape(chunk["shape"]),
            size(chunk["bytes"]),
            chunk["file"],
            chunk["file_offset"],
        ]
        for tensor in tensors
        for chunk in tensor["chunks"]
    )
    screen.table(["tensor", "from", "shape", ">bytes", "file", ">at"], rows)


def _show_tensors(screen: Screen, tensors: Sequence[dict[str, Any]]) -> None:
    rows = (
        [
            tensor["key"],
            terminal.shape(tensor["shape"]),
            tensor["dtype"],
            size(tensor["bytes"]),
            str(len(tensor["chunks"])),
            terminal.ranks(chunk["rank"] for chunk in tensor["chunks"]),
        ]
        for tensor in tensors
    )
    screen.table(["tensor", "shape", "dtype", ">size", ">chunks", "ranks"], rows)


def show_verified(screen: Screen, verified: Verified, storage: Storage, full: bool) -> None:
    """What `verify` says of a checkpoint."""
    damages = verified.damages
    if screen.as_json:
        result = {"path": storage.path, "ok": not damages, "full": full}
        result |= _fields(verified, "files", "items", "nbytes", "seconds")
        screen.json(result | {"damages": [damage._asdict() for damage in damages]})
        return
    for name, in_file in itertools.groupby(damages, lambda damage: damage.file):
        rows = (["(the file)" if d.key is None else d.key, d.offset, d.what] for d in in_file)
        screen.table(["damaged", ">at", "what"], rows, title=f"{storage.path}/{name}")
    if damages:
        screen.line("")
    rate = verified.nbytes / 1e9 / max(verified.seconds, 1e-9)
    screen.line(
        f"{'DAMAGED' if damages else 'ok'}: {count(verified.files, 'file')}, {count(verified.items, 'item')}, "
        f"{size(verified.nbytes)} in {verified.seconds:.1f} s ({rate:.2f} GB/s)"
        + (f", {count(len(damages), 'damage')}" if damages else ""),
        "bold red" if damages else "bold green",
    )


def show_difference(screen: Screen, difference: Difference) -> None:
    """How two checkpoints differ."""
    if screen.as_json:
        screen.json(dataclasses.asdict(difference))
        return
    rows = (
        [
            change.key,
            change.what if change.elements is not None else f"{change.what}: {change.before} -> {change.after}",
            change.elements,
            change.differing,
            change.largest,
            change.relative,
        ]
        for change in difference.changed
    )
    screen.table(["changed", "what", ">elements", ">differing", ">largest", ">relative"], rows)
    screen.table(["only in A"], ([key] for key in difference.removed))
    screen.table(["only in B"], ([key] for key in difference.added))
    keys = f"{difference.same:,} keys the same, {len(difference.changed):,} changed"
    only = f"{len(difference.removed):,} only in A, {len(difference.added):,} only in B"
    screen.line(
        f"{'different' if difference else 'the same'}: {keys}, {only} ({size(difference.nbytes)} read)",
        "bold yellow" if difference else "bold green",
    )


def show_removals(screen: Screen, removals: Sequence[Removal], storage: Storage, dry_run: bool) -> None:
    """What was removed below a directory, or would be."""
    removed = [removal for removal in removals if not removal.kept]
    total = sum(removal.nbytes for removal in removed)
    if screen.as_json:
        described = [
            {"path": removal.path, "files": [file.name for file in removal.files], "kept": removal.kept or None}
            | _fields(removal, "whole", "nbytes", "failed")
            for removal in removals
        ]
        screen.json({"dry_run": dry_run, "bytes": total, "removals": described})
        return
    rows = (
        [
            _below(removal.path, storage),
            "checkpoint" if removal.whole else "leftovers",
            size(removal.nbytes),
            removal.kept and f"kept: {removal.kept}",
        ]
        for removal in removals
    )
    screen.table(["path", "what", ">size", ""], rows)
    checkpoints = sum(removal.whole for removal in removed)
    others = len(removed) - checkpoints
    verb = "would be removed" if dry_run else "removed"
    screen.line(
        f"{count(checkpoints, 'checkpoint')} and leftovers in {count(others, 'directory')} {verb}: {size(total)}"
    )


def _fields(record: Any, *names: str) -> dict[str, Any]:
    """Attributes for a JSON document, in which ``nbytes`` is called ``bytes``."""
    return {"bytes" if name == "nbytes" else name: getattr(record, name) for name in names}


def _below(path: str, storage: Storage) -> str:
    """A checkpoint as seen from the directory that was asked for."""
    return path.removeprefix(storage.path).lstrip("/") or path
