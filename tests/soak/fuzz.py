"""Mutated files of every format that is read: each case gives data or one of this package's errors, in bounded time.

    python -m tests.soak.fuzz --cases 100000 --seed 1

A case is a whole file, of which some bytes are flipped, cut out, moved, or replaced by numbers at the edge of what
fits. Where the format has a digest of everything, data must be what was saved. Some cases run in
``tests/integration/tools/test_fuzz.py``, with the same code.
"""

from __future__ import annotations

import argparse
import random
import resource
import shutil
import signal
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp
import xxhash
from isal.isal_zlib import crc32
from safetensors.torch import save_file

from dcp_tensorizer import CheckpointError
from dcp_tensorizer._index import container
from dcp_tensorizer._index.container import IndexFile, Part, pack, read_head
from dcp_tensorizer._index.schema import Section
from dcp_tensorizer._tensor_file.dtypes import host_bytes
from dcp_tensorizer._tensor_file.layout import lay_out
from dcp_tensorizer._writer_process.protocol import TensorSource
from dcp_tensorizer.tools import convert
from dcp_tensorizer.tools._formats.registry import open_checkpoint

__all__ = ["KINDS", "TARGETS", "Change", "Target", "changed", "run_case"]

_MAX_SECONDS = 20  # of a case; the slowest take tens of milliseconds
_EDGES = (0, 1, 0x7F, 0x80, 0xFF, 0xFFFF, 0x7FFFFFFF, 0xFFFFFFFF, 1 << 40, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)
KINDS = ("flip", "byte", "cut", "end", "copy", "repeat", "number")


class Change(NamedTuple):
    """One change of a file.

    Attributes:
        kind: One of `KINDS`.
        where: From 0 to 1: at which part of the file.
        value: What to put there, or where to copy it from.
        length: Of what is changed, in bytes.
    """

    kind: str
    where: float
    value: int
    length: int


def changed(data: bytes, changes: Sequence[Change]) -> bytes:
    """A file with some changes, one after the other."""
    content = bytearray(data)
    for kind, where, value, length in changes:
        if not content:
            break
        at = min(int(where * len(content)), len(content) - 1)
        if kind == "flip":
            content[at] ^= 1 << value % 8
        elif kind == "byte":
            content[at] = value % 256
        elif kind == "cut":
            del content[at : at + length]
        elif kind == "end":
            del content[at:]
        elif kind == "copy":
            start = value % len(content)
            content[at : at + length] = content[start : start + length]
        elif kind == "repeat":
            content[at:at] = bytes(content[at : at + length]) * (1 + value % 1000)
        else:
            width = 1 << value % 4
            order = "little" if value % 8 < 4 else "big"
            number = _EDGES[value // 8 % len(_EDGES)] % (1 << 8 * width)
            content[at : at + width] = number.to_bytes(width, order)  # type: ignore[arg-type]
    return bytes(content)


@dataclass(frozen=True)
class Target:
    """A kind of file that is read.

    Attributes:
        make: Makes a checkpoint in a folder.
        file: The file of it that is changed.
        path: What is opened.
        exact: Data must be what was saved, or there is an error.
        resign: Makes digests right again, so that what they protect is reached.
    """

    make: Callable[[Path], object]
    file: str
    path: str
    exact: bool = False
    resign: Callable[[bytes, Sequence[Change]], bytes] = changed


def _tensors() -> dict[str, torch.Tensor]:
    return {
        "a.b": torch.arange(6, dtype=torch.float32).view(2, 3),
        "n": torch.tensor(7),
        "half": torch.ones(5, dtype=torch.bfloat16),
    }


def _state() -> dict[str, Any]:
    a_b, n, half = _tensors().values()
    return {"a": {"b": a_b}, "l": [n, {"half": half}], "o": {"lr": 0.1, "betas": (0.9, 0.95), "name": "x"}}


def _make_dcp(folder: Path) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(_state(), checkpoint_id=folder, no_dist=True)


def _make_ours(folder: Path) -> None:
    _make_dcp(folder / "dcp")
    convert(folder / "dcp", folder / "ours", "dcp_tensorizer")


def _make_safetensors(folder: Path) -> None:
    save_file(_tensors(), folder / "m.safetensors")


def _make_tensorizer(folder: Path) -> None:
    """A file with a small index, so that changes do not all meet the room in it."""
    _make_safetensors(folder)
    convert(folder / "m.safetensors", folder / "m.tensors", "tensorizer")
    data = (folder / "m.tensors").read_bytes()
    tensors = _tensors()
    view = open_checkpoint(folder / "m.tensors", {})
    sources = [
        TensorSource(key, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), tensor.nbytes, "parameter")
        for key, tensor in ((key, tensors[key]) for key in view.tensors)
    ]
    large, small = lay_out(sources), lay_out(sources, capacity=512)
    content = bytearray(small.head)
    for old, new in zip(large.entries, small.entries, strict=True):
        body = data[old.offset : old.offset + old.length]
        header = new.with_hashes(crc32(body, crc32(new.header)), b"")
        content += header + body
    (folder / "m.tensors").write_bytes(bytes(content) + bytes(8))


def _resigned(data: bytes, changes: Sequence[Change]) -> bytes:
    """An index of which one section, or the head, is changed, with digests that fit."""
    head = read_head(data, "fuzz")
    number = changes[0].value % (len(head.sections) + 1)
    if number < len(head.sections):
        contents = [bytes(IndexFile("fuzz", head, data).section(section)) for section in head.sections]
        contents[number] = changed(contents[number], changes)
        sections: list[Section] = list(head.sections)
        head.sections = []
        return pack(head, [Part(s.kind, s.rank, c, tuple(s.files)) for s, c in zip(sections, contents, strict=True)])
    start = container._START
    head_nbytes = int.from_bytes(data[16:24], "little")
    packed = changed(data[start : start + head_nbytes], changes)
    rest = data[start + head_nbytes :]
    fixed = data[:16] + len(packed).to_bytes(8, "little") + (start + len(packed) + len(rest)).to_bytes(8, "little")
    digest = xxhash.xxh3_128_digest(fixed + bytes(32) + packed)
    return fixed + digest + bytes(32) + packed + rest


TARGETS = {
    "index": Target(_make_ours, "ours/.metadata", "ours", exact=True),
    "index, signed again": Target(_make_ours, "ours/.metadata", "ours", resign=_resigned),
    "torch": Target(lambda folder: torch.save(_state(), folder / "m.pt"), "m.pt", "m.pt"),
    "safetensors": Target(_make_safetensors, "m.safetensors", "m.safetensors"),
    "tensorizer": Target(_make_tensorizer, "m.tensors", "m.tensors"),
    "dcp": Target(_make_dcp, ".metadata", "."),
    "dcp data": Target(_make_dcp, "__0_0.distcp", "."),
}


class _TooLong(BaseException):
    pass


@contextmanager
def _limited() -> Iterator[None]:
    """Ends what takes too long."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise _TooLong

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, _MAX_SECONDS)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def _read(path: Path) -> dict[str, bytes]:
    """Everything in a checkpoint, by key."""
    view = open_checkpoint(path, {})
    tensors = {
        key: repr((tensor.dtype, tensor.shape)).encode() + bytes(host_bytes(tensor.read_all()))
        for key, tensor in view.tensors.items()
    }
    return tensors | {key: stored.read() for key, stored in view.objects.items()}


def run_case(folder: Path, target: Target, original: bytes, changes: Sequence[Change]) -> str:
    """Reads a changed file.

    Args:
        folder: With the checkpoint.
        target: What it is.
        original: The file that is changed, as it was.
        changes: The changes.

    Returns:
        What came of it: the name of an error, or ``read``.

    Raises:
        AssertionError: another error than this package's, other data, or too long a time.
    """
    data = target.resign(original, changes)
    (folder / target.file).write_bytes(data)
    try:
        with _limited(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            read = _read(folder / target.path)
    except CheckpointError as error:
        return type(error).__name__
    except _TooLong:
        raise AssertionError(f"more than {_MAX_SECONDS} s: {changes}") from None
    except Exception as error:
        raise AssertionError(f"a raw {type(error).__name__}: {changes}") from error
    finally:
        (folder / target.file).write_bytes(original)
    assert not target.exact or read == _read(folder / target.path), f"other data: {changes}"
    return "read"


def random_changes(chance: random.Random) -> list[Change]:
    return [
        Change(chance.choice(KINDS), chance.random(), chance.getrandbits(64), 1 << chance.randrange(8))
        for _ in range(chance.choice((1, 1, 2, 4)))
    ]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.soak.fuzz", description=__doc__.split("\n")[0])
    parser.add_argument("--cases", type=int, default=100_000, help="in all")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--target", choices=list(TARGETS), action="append")
    arguments = parser.parse_args()
    failures = 0
    names = arguments.target or list(TARGETS)
    for name in names:
        failures += _run(name, arguments.cases // len(names), arguments.seed)
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
    print(f"{failures} failures; at most {peak:,.0f} MiB of memory")
    sys.exit(1 if failures else 0)


def _run(name: str, cases: int, seed: int) -> int:
    target = TARGETS[name]
    folder = Path(tempfile.mkdtemp(prefix="dcp_tensorizer-fuzz-"))
    results: Counter[str] = Counter()
    slowest, failures = 0.0, 0
    try:
        target.make(folder)
        original = (folder / target.file).read_bytes()
        for number in range(cases):
            changes = random_changes(random.Random(f"{seed} {name} {number}"))
            started = time.perf_counter()
            try:
                results[run_case(folder, target, original, changes)] += 1
            except AssertionError as error:
                failures += 1
                print(f"{name}, seed {seed}, case {number}: {error} {error.__cause__!r}", flush=True)
            slowest = max(slowest, time.perf_counter() - started)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    counts = ", ".join(f"{count:,} {result}" for result, count in results.most_common())
    print(f"{name}: {cases:,} cases, {failures} failures, slowest {slowest:.2f} s: {counts}", flush=True)
    return failures


if __name__ == "__main__":
    main()
