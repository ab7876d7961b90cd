"""Tables and lines that show the results of the commands in a terminal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from .._storage.redact import redact
from ..progress import size
from ..tools._atomic_output import shown_path
from .terminal import count, moment, print_line, print_table, ranks, shape

if TYPE_CHECKING:
    from .._publish.apply import Applied, VersionsVerified
    from .._publish.publisher import PublishedVersion
    from .._publish.versions import VersionInfo
    from ..tools import CheckpointInfo, Collected, Reported
    from ..tools._convert import Converted
    from ..tools._diff import Difference
    from ..tools._inspect import Inspection, TensorInfo
    from ..tools._trace import Traced
    from ..tools._verify import Verified


_TORCHS = (
    "torch: written by torch's own FileSystemWriter; inspect, verify, diff, convert and report read it, and gc does "
    "not change it"
)
_NO_DIGESTS = "Where the format has no digests, verify checked only the sizes, and that all values can be read"


def show_listing(checkpoints: Sequence[CheckpointInfo], path: str) -> None:
    some_shared, some_measured = any(c.shared_nbytes for c in checkpoints), any(c.metrics for c in checkpoints)
    rows = (
        [
            _below(c.path, path),
            c.state,
            moment(c.saved),
            size(c.nbytes),
            *([size(c.shared_nbytes)] if some_shared else []),
            c.ranks and str(c.ranks),
            c.tensors,
            *([_metrics(c.metrics, c.best)] if some_measured else []),
        ]
        for c in checkpoints
    )
    shared = [">shared"] if some_shared else []
    metrics = ["metrics"] if some_measured else []
    print_table(["checkpoint", "state", "saved", ">size", *shared, ">ranks", ">tensors", *metrics], rows)
    if not checkpoints:
        print_line(f"no checkpoints in or below {redact(path)}")
    states = {c.state for c in checkpoints}
    if "torch" in states:
        print_line(_TORCHS, "dim")
    if broken := sorted(states & {"incomplete", "unreadable"}):
        print_line(f"{', '.join(broken)}: verify reports why", "dim")


def _metrics(metrics: Mapping[str, float], best: str | None) -> str:
    shown = (f"{name} {value:.4g}{' (best)' if name == best else ''}" for name, value in sorted(metrics.items()))
    return ", ".join(shown)


def show_checkpoint(inspected: Inspection, chunks: bool) -> None:
    (_show_chunks if chunks else _show_tensors)(inspected.tensors)
    objects = ([o.key, o.type, o.text, size(o.nbytes)] for o in inspected.objects)
    print_table(["object", "type", "value", ">size"], objects, "Objects")
    for title, column, totals in (
        ("By dtype", "dtype", inspected.by_dtype),
        ("By key", "key", inspected.by_key),
    ):
        sums = ([name, total.tensors, total.elements, size(total.nbytes)] for name, total in totals.items())
        print_table([column, ">tensors", ">elements", ">size"], sums, title)
    files = ([file.file, "-" if file.rank is None else str(file.rank), size(file.nbytes)] for file in inspected.files)
    print_table(["file", ">rank", ">size"], files, "Files")
    total = sum(tensor.nbytes for tensor in inspected.tensors)
    print_line("")
    if inspected.step is not None:
        metrics = f": {_metrics(inspected.metrics, inspected.best)}" if inspected.metrics else ""
        print_line(f"step {inspected.step}{metrics}")
    print_line(
        f"{count(len(inspected.tensors), 'tensor')} of {size(total)} and {count(len(inspected.objects), 'object')}"
        + ("" if inspected.ranks is None else f", saved by {count(inspected.ranks, 'rank')}")
    )


def _show_chunks(tensors: Sequence[TensorInfo]) -> None:
    rows = (
        [
            tensor.key,
            shape(chunk.offset) if chunk.offset else None,
            shape(chunk.shape),
            size(chunk.nbytes),
            chunk.file,
            chunk.file_offset,
        ]
        for tensor in tensors
        for chunk in tensor.chunks
    )
    print_table(["tensor", "offset", "shape", ">size", "file", ">file offset"], rows)


def _show_tensors(tensors: Sequence[TensorInfo]) -> None:
    rows = (
        [
            tensor.key,
            shape(tensor.shape),
            tensor.dtype,
            size(tensor.nbytes),
            str(len(tensor.chunks)),
            ranks(chunk.rank for chunk in tensor.chunks),
        ]
        for tensor in tensors
    )
    print_table(["tensor", "shape", "dtype", ">size", ">chunks", "ranks"], rows)


def show_verified(verified: Verified) -> None:
    for damage in verified.damages:
        print_line(f"{damage.file}: {'' if damage.key is None else f'{damage.key!r}: '}{damage.what}")
    rate = verified.nbytes / 1e9 / max(verified.seconds, 1e-9)
    print_line(
        f"{'DAMAGED' if verified.damages else 'ok'}: "
        + (f"{count(verified.checkpoints, 'checkpoint')}, " if verified.checkpoints != 1 else "")
        + f"{count(verified.files, 'file')}, {count(verified.items, 'item')}, "
        f"{size(verified.nbytes)} in {verified.seconds:.1f} s ({rate:.2f} GB/s)"
        + (f", {count(len(verified.damages), 'problem')}" if verified.damages else "")
        + ("" if verified.digests else f". {_NO_DIGESTS}"),
        "bold red" if verified.damages else "bold green",
    )


def show_difference(difference: Difference) -> None:
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
    print_table(["changed", "what", ">elements", ">differing", ">largest", ">relative"], rows)
    print_table(["only in A"], ([key] for key in difference.removed))
    print_table(["only in B"], ([key] for key in difference.added))
    keys = f"{count(difference.same, 'key')} the same, {len(difference.changed):,} changed"
    only = f"{len(difference.removed):,} only in A, {len(difference.added):,} only in B"
    print_line(
        f"{'different' if difference else 'the same'}: {keys}, {only} ({size(difference.nbytes)} read)",
        "bold yellow" if difference else "bold green",
    )


def show_converted(converted: Converted, target: str, to: str) -> None:
    objects = f" and {count(converted.objects, 'object')}" if converted.objects else ""
    print_line(
        f"{redact(target)}: {count(converted.tensors, 'tensor')}{objects}, {size(converted.nbytes)}, "
        f"from {converted.source_format} to {to} in {converted.seconds:.1f} s"
    )


def show_report(reported: Reported) -> None:
    print_line(
        f"{reported.path} ({size(reported.nbytes)}): {count(reported.tensors, 'tensor')} of "
        f"{count(len(reported.checkpoints), 'checkpoint')}, in {reported.seconds:.1f} s"
    )


def show_trace(traced: Traced) -> None:
    what = [count(number, noun) for number, noun in ((traced.saves, "save"), (traced.loads, "load")) if number]
    where = f"{count(traced.ranks, 'rank')} on {count(traced.hosts, 'host')}"
    print_line(
        f"{traced.path}: {' and '.join(what)} of {where}, {count(traced.spans, 'span')} in {traced.seconds:.1f} s. "
        f"Open it at https://ui.perfetto.dev"
    )


def show_removals(removals: Sequence[Collected], path: str, dry_run: bool) -> None:
    removed = [removal for removal in removals if not removal.kept]
    total = sum(removal.nbytes for removal in removed)
    rows = (
        [
            _below(removal.path, path),
            "checkpoint" if removal.whole else "leftovers",
            size(removal.nbytes),
            f"kept: {removal.kept}" if removal.kept else "",
        ]
        for removal in removals
    )
    print_table(["path", "what", ">size", ""], rows)
    checkpoints = sum(removal.whole for removal in removed)
    others = len(removed) - checkpoints
    verb = "would be removed" if dry_run else "removed"
    what = [count(checkpoints, "checkpoint")] if checkpoints else []
    what += [f"leftovers in {count(others, 'directory')}"] if others else []
    print_line(f"{' and '.join(what)} {verb}: {size(total)}" if what else f"nothing {verb}")


def show_published(version: PublishedVersion) -> None:
    part = f" ({100 * version.nbytes / max(1, version.model_nbytes):.2f}%)" if version.is_delta else ""
    print_line(
        f"version {version.version}: {'a delta' if version.is_delta else 'whole'}, "
        f"{count(version.tensors, 'tensor')}, {size(version.nbytes)} of {size(version.model_nbytes)}{part}"
    )
    if version.why_whole:
        print_line(f"whole, because {version.why_whole}", "dim")
    if version.removed:
        print_line(f"{count(len(version.removed), 'old version')} removed", "dim")


def show_versions(versions: Sequence[VersionInfo]) -> None:
    rows = (
        [
            str(info.version),
            f"delta from {info.version - 1}" if info.is_delta else "whole",
            moment(info.published),
            None if info.step is None else str(info.step),
            size(info.nbytes),
            f"{100 * info.nbytes / max(1, info.model_nbytes):.2f}%",
            info.tensors,
        ]
        for info in versions
    )
    print_table(["version", "what", "published", ">step", ">size", ">of the model", ">tensors"], rows)


def show_applied(applied: Applied, copy: str) -> None:
    if not applied.nbytes:
        print_line(f"{redact(copy)} already has version {applied.version}")
        return
    how = ([f"a whole version of {size(applied.nbytes)}"] if applied.is_whole else []) + (
        [count(applied.deltas, "delta")] if applied.deltas else []
    )
    before = "" if applied.before is None else f" from version {applied.before}"
    print_line(
        f"{redact(copy)}: updated{before} to version {applied.version} with {' and '.join(how)}, "
        f"in {applied.seconds:.1f} s"
    )


def show_versions_verified(verified: VersionsVerified) -> None:
    for damage in verified.damages:
        print_line(damage)
    versions = ", ".join(map(str, verified.versions))
    rate = verified.nbytes / 1e9 / max(verified.seconds, 1e-9)
    print_line(
        f"{'DAMAGED' if verified.damages else 'ok'}: {'version' if len(verified.versions) == 1 else 'versions'} "
        f"{versions}: {count(verified.files, 'file')}, "
        f"{size(verified.nbytes)} in {verified.seconds:.1f} s ({rate:.2f} GB/s)",
        "bold red" if verified.damages else "bold green",
    )


def show_versions_removed(removed: Sequence[VersionInfo], dry_run: bool) -> None:
    total = sum(info.nbytes for info in removed)
    for info in removed:
        print_line(f"version {info.version}: {'a delta' if info.is_delta else 'whole'}, {size(info.nbytes)}")
    verb = "would be removed" if dry_run else "removed"
    print_line(f"{count(len(removed), 'version')} {verb}: {size(total)}" if removed else f"nothing {verb}")


def _below(found: str, path: str) -> str:
    """Returns a path relative to the directory given to the command; for that directory, its whole path."""
    above = shown_path(path).rstrip("/") + "/"
    return found.removeprefix(above).lstrip("/") if found.startswith(above) else found
