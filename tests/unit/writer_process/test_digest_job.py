"""Digests of tensors, in the order of the request."""

from __future__ import annotations

import random

import xxhash

from dcp_tensorizer._writer_process.jobs import take_digests
from dcp_tensorizer._writer_process.protocol import TensorSource


def test_digests_are_those_of_the_whole_tensors() -> None:
    """The digests are those of the whole tensors, for any sizes and number of threads."""
    chance = random.Random(0)
    contents = {str(n): chance.randbytes(size) for n, size in enumerate([0, 5, 40 << 20, 100_000, 16 << 20])}
    sources = [TensorSource(name, "uint8", (len(content),), len(content)) for name, content in contents.items()]
    done: list[int] = []
    digests = take_digests(sources, lambda source: memoryview(contents[source.name]), 2, done)
    assert digests == tuple(xxhash.xxh3_128_digest(content) for content in contents.values())
    assert sum(done) == sum(map(len, contents.values()))
