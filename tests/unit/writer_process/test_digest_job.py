"""Digests of tensors, in the order in which they were asked for."""

from __future__ import annotations

import random

import xxhash

from dcp_tensorizer._writer_process.jobs import DigestJob
from dcp_tensorizer._writer_process.protocol import TensorSource


def test_digests_are_those_of_the_whole_tensors() -> None:
    """Whatever their sizes are, and whichever thread takes which."""
    chance = random.Random(0)
    contents = {str(n): chance.randbytes(size) for n, size in enumerate([0, 5, 40 << 20, 100_000, 16 << 20])}
    sources = [TensorSource(name, "uint8", (len(content),), len(content)) for name, content in contents.items()]
    job = DigestJob(sources, lambda source: memoryview(contents[source.name]), thread_count=2)
    assert job.run().digests == tuple(xxhash.xxh3_128_digest(content) for content in contents.values())
    assert job.bytes_written == sum(map(len, contents.values()))
