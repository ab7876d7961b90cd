"""The detection of a save whose floating-point tensors all equal those of the previous save."""

from __future__ import annotations

import logging

import pytest

from dcp_tensorizer._index.schema import ItemKey
from dcp_tensorizer._saving.report import Freshness, warn_if_stale
from dcp_tensorizer._tensor_file.names import StoredItem


def item(digests: bytes, dtype: str = "float32", kind: str = "tensor", seal: bytes = b"") -> StoredItem:
    return StoredItem("file", "name", 0, 8, dtype, kind, digests, seal)


def places(**digests: int) -> dict[ItemKey, StoredItem]:
    return {(key, (0,)): item(value.to_bytes(8, "big")) for key, value in digests.items()}


def test_nothing_to_compare() -> None:
    """The first save, a repeated step, and a rank without floating-point tensors give no result."""
    freshness = Freshness()
    assert freshness.compare(1, places(a=1)) is None
    assert freshness.compare(1, places(a=1)) is None
    others = {("i", None): item(b"1" * 8, "int64"), ("o", None): item(b"1" * 8, "uint8", "object")}
    assert freshness.compare(2, others) is None
    assert freshness.compare(3, {("e", None): item(b"1" * 8, seal=b"nonce")}) is None


def test_each_save_is_compared_with_the_one_before() -> None:
    """One tensor that differs or is new makes a save count as changed."""
    freshness = Freshness()
    found = [freshness.compare(step, places(a=a, b=1, c=1, d=1)) for step, a in enumerate((1, 2, 2, 3, 3))]
    assert found == [None, (), ("a", "b", "c"), (), ("a", "b", "c")]
    assert freshness.compare(9, places(a=3, b=1, c=1, d=1, e=1)) == ()
    assert freshness.compare(10, places(a=3, b=1)) == ("a", "b")


def test_only_the_digest_of_the_whole_counts() -> None:
    """Only the last digest, of the whole tensor, is compared; those of blocks are not."""
    freshness = Freshness()
    freshness.compare(1, {("a", (0,)): item(b"x" * 8 + b"y" * 8)})
    assert freshness.compare(2, {("a", (0,)): item(b"z" * 8 + b"y" * 8)}) == ("a",)
    assert freshness.compare(3, {("a", (0,)): item(b"z" * 8 + b"w" * 8)}) == ()


def test_only_some_keys_count() -> None:
    """Only keys that match ``must_change`` are compared."""
    freshness = Freshness()
    freshness.must_change = ("model.*",)
    freshness.compare(1, {**places(lr=1), ("model.w", None): item(b"w" * 8)})
    assert freshness.compare(2, {**places(lr=2), ("model.w", None): item(b"w" * 8)}) == ("model.w",)
    assert freshness.compare(3, places(lr=2)) is None


@pytest.mark.parametrize(
    ("unchanged", "named"),
    [
        ([("a", "b"), None, ("a", "c")], "'a', 'b', 'c'"),
        ([tuple("abc"), tuple("def")], "'a', 'b', 'c', 'd', 'e', ..."),
        ([("a",), ()], None),
        ([None, None], None),
        ([], None),
    ],
)
def test_all_ranks_must_agree(
    unchanged: list[tuple[str, ...] | None], named: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    """The warning, with path, step and keys, is logged only if no rank has seen a change."""
    with caplog.at_level(logging.WARNING, "dcp_tensorizer"):
        warn_if_stale("/run/step-7", 7, unchanged)
    compared = f"in every floating-point tensor that was compared ({named}). Check that the saved state"
    expected = f"/run/step-7: step 7 holds the same values as the previous save, {compared}"
    assert [entry.getMessage()[: len(expected)] for entry in caplog.records] == ([] if named is None else [expected])
