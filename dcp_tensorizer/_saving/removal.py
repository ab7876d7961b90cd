"""How a checkpoint's files are removed: in an order after which nobody finds half of one, however far it has come."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

from .._format.layout import is_data_file_name, is_metadata_file_name, save_id_in
from .._storage.base import Storage
from .commit import put_records, remove_records

__all__ = ["remove_files", "withdraw"]


def withdraw(storage: Storage, names: Sequence[str]) -> None:
    """Removes the metadata: from now on there is no checkpoint. What is left is known as of a dead save.

    Args:
        storage: The directory.
        names: Of all files in it.

    Raises:
        OSError: it cannot be removed.
    """
    put_records(storage, map(save_id_in, filter(is_data_file_name, names)))
    storage.remove(*filter(is_metadata_file_name, names))
    storage.sync_directory()  # after a crash there may be data without metadata, but not the other way


def remove_files(storage: Storage, names: Sequence[str]) -> None:
    """Removes all but the metadata, and the directory if it is empty then; raises `OSError`."""
    storage.remove(*itertools.filterfalse(is_metadata_file_name, names))
    remove_records(storage, map(save_id_in, filter(is_data_file_name, names)))
    storage.remove_directory()
