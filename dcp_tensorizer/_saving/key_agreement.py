"""The encryption keys of a save: every rank must have the same one, or nobody could load the checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

from .._format.encryption import Cipher, find_other_key
from .._format.places import RankPlaces
from .._storage.base import Storage
from ..errors import WriteError
from .commit import remove_with_records

__all__ = ["agree_on_key"]


def agree_on_key(cipher: Cipher | None, parts: Sequence[RankPlaces], storage: Storage) -> None:
    """Checks that all ranks have the same key, or none.

    Args:
        cipher: The coordinator's.
        parts: What each rank has written.
        storage: The checkpoint's directory.

    Raises:
        WriteError: a rank has another key. The save's files are removed.
    """
    other = find_other_key(cipher, ((part.rank, part.check) for part in parts))
    if other is None:
        return
    remove_with_records(storage, [name for part in parts for name, _ in part.files])
    raise WriteError(
        f"rank {other} has another encryption key than the coordinator, or only one of them has any: give every "
        f"rank's writer the same EncryptionParams, made on one rank and sent to the others, or made of one passphrase "
        f"and one salt: EncryptionParams.from_string(passphrase, salt=...)"
    )
