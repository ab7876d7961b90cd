"""The results of the commands: tables for people, or one JSON document for scripts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any

from .._storage.base import Storage
from .._tools.diff import Difference
from .._tools.retention import Listed, Removal
from .._tools.verify import Verified
from . import terminal
from .terminal import Screen, count, size

__all__ = ["show_checkpoint", "show_difference", "show_listing", "show_removals", "show_verified"]


def show_listing(screen: Screen, checkpoints: Sequence[Listed], storage: Storage) -> None:
    """Checkpoints below a directory."""
    if screen.as_json:
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
                for listed in checkpoints
            ]
        )
        return
    screen.table(
        ["checkpoint", "state", "saved", ">size", ">ranks", ">tensors"],
        (
            [
                _below(listed, storage),
                listed.state,
                terminal.moment(listed.saved),
                size(listed.nbytes),
                "-" if listed.ranks is None else str(listed.ranks),
                "-" if listed.tensors is None else f"{listed.tensors:,}",
            ]
            for listed in checkpoints
        ),
    )
    if not checkpoints:
        screen.line(f"no checkpoints below {storage.path}")


def show_checkpoint(screen: Screen, described: dict[str, Any], chunks: bool) -> None:
    """What `inspect_checkpoint` gives; ``chunks``: a line for each chunk, and not for each tensor."""
    if screen.as_json:
        screen.json(described)
        return
    tensors, objects = described["tensors"], described["objects"]
    (_show_chunks if chunks else _show_tensors)(screen, tensors)
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
                for key, total in described[name].items()
            ),
            title=title,
        )
    screen.table(
        ["file", ">rank", ">size"],
        ([file["file"], str(file["rank"]), size(file["bytes"])] for file in described["files"]),
        title="Files",
    )
    total = sum(tensor["bytes"] for tensor in tensors)
    screen.line("")
    screen.line(
        f"{count(len(tensors), 'tensor')} of {size(total)} and {count(len(objects), 'object')}, "
        f"saved by {count(described['ranks'], 'rank')}"
    )


def _show_chunks(screen: Screen, tensors: Sequence[dict[str, Any]]) -> None:
    screen.table(
        ["tensor", "from", "shape", ">bytes", "file", ">at"],
        (
            [
                tensor["key"],
                terminal.shape(chunk["offset"]) if chunk["offset"] else "-",
                terminal.shape(chunk["shape"]),
                size(chunk["bytes"]),
                chunk["file"] or "-",
                "-" if chunk["file"] is None else f"{chunk['file_offset']:,}",
            ]
            for tensor in tensors
            for chunk in tensor["chunks"]
        ),
    )


def _show_tensors(screen: Screen, tensors: Sequence[dict[str, Any]]) -> None:
    screen.table(
        ["tensor", "shape", "dtype", ">size", ">chunks", "ranks"],
        (
            [
                tensor["key"],
                terminal.shape(tensor["shape"]),
                tensor["dtype"],
                size(tensor["bytes"]),
                str(len(tensor["chunks"])),
                terminal.ranks(chunk["rank"] for chunk in tensor["chunks"]),
            ]
            for tensor in tensors
        ),
    )


def show_verified(screen: Screen, verified: Verified, storage: Storage, full: bool) -> None:
    """What `verify` says of a checkpoint."""
    rate = verified.nbytes / 1e9 / max(verified.seconds, 1e-9)
    if screen.as_json:
        screen.json(
            {
                "path": storage.path,
                "ok": not verified.damages,
                "full": full,
                "files": verified.files,
                "items": verified.items,
                "bytes": verified.nbytes,
                "seconds": verified.seconds,
                "damages": [damage._asdict() for damage in verified.damages],
            }
        )
        return
    for name, damages in itertools.groupby(verified.damages, lambda damage: damage.file):
        rows = [["(the file)" if d.key is None else d.key, f"{d.offset:,}", d.what] for d in damages]
        screen.table(["damaged", ">at", "what"], rows, title=f"{storage.path}/{name}")
    if verified.damages:
        screen.line("")
    screen.line(
        f"{'DAMAGED' if verified.damages else 'ok'}: {count(verified.files, 'file')}, {count(verified.items, 'item')}, "
        f"{size(verified.nbytes)} in {verified.seconds:.1f} s ({rate:.2f} GB/s)"
        + (f", {count(len(verified.damages), 'damage')}" if verified.damages else ""),
        "bold red" if verified.damages else "bold green",
    )


def show_difference(screen: Screen, difference: Difference) -> None:
    """How two checkpoints differ."""
    if screen.as_json:
        screen.json(dataclasses.asdict(difference))
        return
    screen.table(
        ["changed", "what", ">elements", ">differing", ">largest", ">relative"],
        (
            [
                change.key,
                change.what if change.elements is not None else f"{change.what}: {change.before} -> {change.after}",
                terminal.number(change.elements),
                terminal.number(change.differing),
                terminal.number(change.largest),
                terminal.number(change.relative),
            ]
            for change in difference.changed
        ),
    )
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
        screen.json(
            {
                "dry_run": dry_run,
                "bytes": total,
                "removals": [
                    {
                        "path": removal.listed.path,
                        "whole": removal.whole,
                        "files": [file.name for file in removal.files],
                        "bytes": removal.nbytes,
                        "kept": removal.kept or None,
                        "failed": removal.failed,
                    }
                    for removal in removals
                ],
            }
        )
        return
    verb = "would be removed" if dry_run else "removed"
    screen.table(
        ["path", "what", ">size", ""],
        (
            [
                _below(r.listed, storage),
                "checkpoint" if r.whole else "leftovers",
                size(r.nbytes),
                r.kept and f"kept: {r.kept}",
            ]
            for r in removals
        ),
    )
    checkpoints = sum(removal.whole for removal in removed)
    others = len(removed) - checkpoints
    screen.line(
        f"{count(checkpoints, 'checkpoint')} and leftovers in {count(others, 'directory')} {verb}: {size(total)}"
    )


def _below(listed: Listed, storage: Storage) -> str:
    """A checkpoint as seen from the directory that was asked for."""
    return listed.path.removeprefix(storage.path).lstrip("/") or listed.path
