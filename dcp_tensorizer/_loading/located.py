"""Where the items of a load plan are stored: found before anything is read, and asked for again when it is."""

from __future__ import annotations

from collections.abc import Sequence

from torch.distributed.checkpoint.planner import ReadItem

from .._format.index_reader import Index, Piece
from .read_target import wanted_of

__all__ = ["Located"]


class Located:
    """The stored chunks of the items of a plan.

    Args:
        index: The checkpoint's.
        items: Those of the plan that a rank has made. Its final plan may have others, which are found when they are
            asked for.

    Raises:
        MetadataError: something is stored nowhere, or what says where is damaged.
        ReadError: that cannot be read.
    """

    def __init__(self, index: Index, items: Sequence[ReadItem]) -> None:
        self._index = index
        located = index.locate([wanted_of(item) for item in items])
        # By identity: to compare thousands of items takes longer than to find them. Each is kept, and so is its id.
        self._by_id = {id(item): (item, pieces) for item, pieces in zip(items, located, strict=True)}

    @property
    def files(self) -> set[str]:
        """The names of the files that the items are in."""
        return {piece.item.file for _, pieces in self._by_id.values() for piece in pieces}

    def pieces(self, item: ReadItem) -> list[Piece]:
        """The stored chunks that have elements of an item."""
        found = self._by_id.get(id(item))
        return self._index.pieces(*wanted_of(item)) if found is None else found[1]
