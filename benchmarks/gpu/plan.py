"""The plan for a machine with a GPU: calls of at most nine minutes, each a few steps, the most valuable first.

It knows of no torch, so that it can be read where there is none.
"""

from __future__ import annotations

from dataclasses import dataclass

CALL_SECONDS = 540

SAVERS = (
    "dcp_tensorizer",
    "dcp_tensorizer, overlap",
    "torch DefaultStager",
    "torch DefaultStager, PROCESS",
    "torch_checkpointing, blocking",
    "torch_checkpointing, background",
)
OURS_ALONE = ("dcp_tensorizer, cold", "dcp_tensorizer, device")
TRAINERS = (
    "no saves",
    "dcp_tensorizer",
    "dcp_tensorizer, overlap",
    "torch DefaultStager",
    "torch DefaultStager, PROCESS",
    "torch_checkpointing, background",
)
LOADERS = (
    "dcp_tensorizer | page cache",
    "bare reads, 8 threads | page cache",
    "safetensors | page cache",
    "fastsafetensors | page cache",
    "InstantTensor | page cache",
    "Run:ai streamer | page cache",
    "torch FileSystemReader | page cache",
    "dcp_tensorizer, not verified | page cache",
    "dcp_tensorizer | tmpfs",
    "dcp_tensorizer | disk",
    "torch FileSystemReader | disk",
    "tensorizer | page cache",
    "dcp_tensorizer, 16 threads | page cache",
)


@dataclass(frozen=True)
class Step:
    """A part of a call, with a file of results of its own.

    Attributes:
        name: In the results.
        seconds: That it may take; what has not been measured by then is an error in the results.
        what: The kind of its cases; "tests" runs tests.
        names: Of its cases, or the paths of its tests, which run beside each other.
    """

    name: str
    seconds: int
    what: str
    names: tuple[str, ...]


CALLS: tuple[tuple[Step, ...], ...] = (
    (
        Step(
            "tests",
            200,
            "tests",
            tuple(f"tests/gpu/test_{name}.py" for name in ("staging", "saves", "loads", "scenarios")),
        ),
        Step("tests-memory", 60, "tests", ("tests/gpu/test_memory.py",)),
        Step("pinned-copy", 30, "pinned copy", ("device to host", "host to device")),
        Step("disk", 60, "disk", ("",)),
        Step("buffer", 30, "buffer", ("",)),
        Step("staging", 60, "staging", ("300 large", "5,000 small")),
    ),
    (
        Step("loading", 160, "load", LOADERS),
        Step("saving-small", 140, "saving", tuple(f"{name} | 5,000 small" for name in (*SAVERS, *OURS_ALONE))),
        Step("training", 100, "training", TRAINERS),
        Step("overlap", 60, "overlap", ("buffer, 300 tensors", "buffer, 2,200 tensors", "device, 300 tensors")),
        Step("pieces", 40, "pieces", ("",)),
    ),
    (
        Step("saving-4", 240, "saving", tuple(f"{name} | 4 GB" for name in (*SAVERS, *OURS_ALONE))),
        Step(
            "registration",
            140,
            "registration",
            tuple(f"{pages}, {way}" for pages in ("small pages", "huge pages") for way in ("in chunks", "whole")),
        ),
    ),
    (
        Step(
            "saving-20",
            280,
            "saving",
            tuple(f"{name} | 20 GB" for name in ("dcp_tensorizer", "dcp_tensorizer, overlap", "torch DefaultStager")),
        ),
    ),
)
