"""The plan for a quarter of an hour with a GPU: two calls, each with a few steps, the most valuable first.

Starting a machine takes two minutes, and sending files to it half a minute for each call. This module does not import
torch, so that a machine without torch can read the plan.
"""

from __future__ import annotations

from dataclasses import dataclass

SMALL_SAVERS = (
    "dcp_tensorizer, overlap",
    "dcp_tensorizer, overlap, SavePlanner",
    "torch DefaultStager",
    "torch_checkpointing, background",
)
TRAINERS = (
    "no saves",
    "dcp_tensorizer",
    "dcp_tensorizer, overlap",
    "torch DefaultStager",
    "torch_checkpointing, background",
)
LOADS = (
    "bare reads, 8 threads | 4 GB",
    "dcp_tensorizer | 4 GB",
    "dcp_tensorizer, 8 MiB | 4 GB",
    "dcp_tensorizer, 16 MiB | 4 GB",
    "dcp_tensorizer, 16 threads | 4 GB",
    "dcp_tensorizer, not verified | 4 GB",
    "dcp_tensorizer | 5,000 small",
    "dcp_tensorizer, one by one | 5,000 small",
    "dcp_tensorizer | 16 GB",
)
PEERS = ("Run:ai streamer | 4 GB", "torch FileSystemReader | 4 GB")
BATCHES = tuple(f"5,000 of {size} kB{way}" for size in (215, 16, 2) for way in ("", ", gathered"))


@dataclass(frozen=True)
class Step:
    """A part of a call, with its own results.

    Attributes:
        seconds: The timeout. A case that has no result by then has an error.
        what: The kind of the cases; "tests" runs tests.
        names: The names of the cases, or the paths of the tests, which run at the same time.
    """

    name: str
    seconds: int
    what: str
    names: tuple[str, ...]


SECONDS = (330, 300)  # of each call

CALLS: tuple[tuple[Step, ...], ...] = (
    (
        Step("tests", 75, "tests", ("tests/gpu/test_staging.py", "tests/gpu/test_loads.py")),
        Step("bus", 30, "pinned copy", ("device to host", "host to device")),
        Step("loads", 90, "load", LOADS),
        Step("staging", 50, "staging", ("300 large", *BATCHES)),
        Step("buffer", 50, "buffer", ("4 threads", "8 threads", "16 threads", "16 threads, huge pages")),
        Step("overlap", 30, "overlap", ("300 tensors",)),
    ),
    (
        Step("training", 95, "training", TRAINERS),
        Step("saving-small", 75, "saving", tuple(f"{name} | 5,000 small" for name in SMALL_SAVERS)),
        Step("registration", 25, "registration", ("in chunks",)),
        Step("loads-peers", 40, "load", PEERS),
        Step("saving-20", 55, "saving", ("dcp_tensorizer, overlap | 20 GB",)),
    ),
)
