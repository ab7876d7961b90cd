"""The check that all ranks encrypt with the coordinator's key."""

from __future__ import annotations

import pytest

from dcp_tensorizer import WriteError
from dcp_tensorizer._index.locations import RankLocations
from dcp_tensorizer._saving.commit import agree_on_key
from dcp_tensorizer._tensor_file.encryption import Cipher

CIPHER = Cipher(bytes(range(32)))
OTHER = Cipher(bytes(32))


def part(rank: int, cipher: Cipher | None) -> RankLocations:
    """Returns the locations that a rank with an encryption key reports."""
    return RankLocations.of(rank, {}, {}, check=b"" if cipher is None else cipher.check_value())


def test_one_key_or_none_is_accepted() -> None:
    """A save is accepted if all ranks have the coordinator's key, or no rank has a key."""
    agree_on_key(CIPHER, [part(0, CIPHER), part(2, CIPHER)])
    agree_on_key(None, [part(0, None), part(1, None)])


@pytest.mark.parametrize(
    ("first", "second"), [(CIPHER, OTHER), (CIPHER, None), (None, CIPHER)], ids=["other", "missing", "superfluous"]
)
def test_another_key_fails_the_save(first: Cipher | None, second: Cipher | None) -> None:
    """A rank with another key fails the save, and the error names the rank."""
    with pytest.raises(WriteError, match=r"^the encryption key of rank 1 differs.*EncryptionParams\.from_string"):
        agree_on_key(first, [part(0, first), part(1, second)])
