"""The section of an index that says what is in the state dict, how tensors are cut, and which rank has which chunk."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence

import numpy as np

from .chunk_layout import runs_of
from .index_rows import Entries, ObjectEntry, Run, TensorEntry, decode_places, encode_rows
from .keys import to_key
from .places import RankPlaces, hashes_of
from .state_rules import StateRules

__all__ = ["EntryWriter"]

_KEPT = 4  # a job may save its model and its optimizer in turn, each with something beside it


class EntryWriter:
    """Makes sections of entries. Those of the last saves are kept, and found by the contents that they are made of."""

    def __init__(self) -> None:
        self._kept: deque[tuple[tuple[bytes, ...], bytes]] = deque(maxlen=_KEPT)

    def section(self, rules: StateRules, parts: Sequence[RankPlaces]) -> bytes:
        """The section.

        Args:
            rules: The state dict.
            parts: What each rank has written. Of a chunk that several have written, the last one's is used.

        Raises:
            WriteError: a key cannot be stored; names it.
        """
        name = (rules.digest, *(part.table_digest for part in parts))
        section = next((section for known, section in tuple(self._kept) if known == name), None)
        if section is None:
            section = encode_rows(_Owners(parts).entries(rules))
            self._kept.append((name, section))
        return section


class _Owners:
    """Finds out who has which chunk."""

    def __init__(self, parts: Sequence[RankPlaces]) -> None:
        rows = [decode_places(part.places) for part in parts]
        hashes = [np.frombuffer(row.hashes, dtype="<u8") for row in rows]
        owners = np.repeat(np.arange(len(rows)), [len(of) for of in hashes])
        hashed = np.concatenate([*hashes, np.zeros(0, dtype="<u8")])
        order = np.argsort(hashed, kind="stable")  # of equal ones, the last rank's stays the last
        self._hashes, self._owners = hashed[order], owners[order]
        self._is_tensor = (
            np.concatenate([*(np.frombuffer(row.kinds, dtype="u1") for row in rows), _NO_KINDS])[order] == 0
        )
        self._runs: dict[bytes, tuple[int, list[Run]]] = {}

    def entries(self, rules: StateRules) -> Entries:
        """The state dict, with the owners of its chunks."""
        layouts = [rules.layouts[layout] if layout >= 0 else None for _, layout in rules.rows.tolist()]
        wanted: list[int] = []
        for packed_key, layout in zip(rules.packed_keys, layouts, strict=True):
            wanted += hashes_of(packed_key, _OF_OBJECT if layout is None else layout.packed_offsets)
        owners, are_tensors = self._find(np.array(wanted, dtype="<u8"))
        entries: list[TensorEntry | ObjectEntry] = []
        first = 0
        for key, layout, (properties, number) in zip(rules.keys, layouts, rules.rows.tolist(), strict=True):
            if layout is None:
                entries.append(ObjectEntry(to_key(key), int(owners[first])))
                first += 1
                continue
            chunks = slice(first, first + len(layout))
            is_whole = bool(are_tensors[chunks].all()) and layout.is_covered
            entries.append(TensorEntry(to_key(key), properties, number, self._run(owners[chunks]), is_whole))
            first = chunks.stop
        rows = [layout.to_row() for layout in rules.layouts]
        return Entries(rules.property_rows, rows, [runs for _, runs in self._runs.values()], entries)

    def _find(self, wanted: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Who has each item (-1: nobody), and whether that is stored as a tensor's elements."""
        if not len(self._hashes):
            return np.full(len(wanted), -1), np.zeros(len(wanted), dtype=bool)
        rows = np.maximum(np.searchsorted(self._hashes, wanted, side="right") - 1, 0)
        is_there = self._hashes[rows] == wanted
        return np.where(is_there, self._owners[rows], -1), is_there & self._is_tensor[rows]

    def _run(self, owners: np.ndarray) -> int:
        """The row of some owners, made if there is none."""
        name = owners.tobytes()
        if name not in self._runs:
            self._runs[name] = len(self._runs), runs_of(owners)
        return self._runs[name][0]


_NO_KINDS = np.zeros(0, dtype="u1")
_OF_OBJECT = (encode_rows(None),)
