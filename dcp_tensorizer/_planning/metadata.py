"""torch's ``Metadata``, made of rules and sent from rank to rank as such.

DCP broadcasts the coordinator's at the end of each save, and most ranks never look at it. Its entries are made when
somebody looks.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import msgspec
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from .._format.chunk_layout import ChunkLayout
from .._format.index_rows import Layout, encode_rows
from .._format.state_rules import StateRules
from .._memory.garbage import collector_paused
from ..errors import WriteError
from .columns import Unsupported
from .paths import pack_paths, unpack_paths, with_keys
from .wire import pack, pack_integers, unpack, unpack_integers

__all__ = ["RuleMetadata"]

_FIELDS = [field.name for field in dataclasses.fields(Metadata)]
_UNDERSTOOD = _FIELDS == ["state_dict_metadata", "planner_data", "storage_data", "storage_meta", "version"]
_decode_layouts = msgspec.msgpack.Decoder(list[Layout]).decode


class RuleMetadata(Metadata):
    """torch's ``Metadata``, whose pickle is small. A storage writer that fills ``storage_data`` gets torch's pickle."""

    __hash__ = None  # type: ignore[assignment]

    @classmethod
    def of(cls, rules: StateRules, planner_data: Any) -> RuleMetadata:
        """Metadata whose entries are made when somebody looks at them."""
        metadata = cls.__new__(cls)
        metadata.__dict__.update(
            _rules=rules, planner_data=planner_data, storage_data=None, storage_meta=None, version=None
        )
        return metadata

    @property
    def rules(self) -> StateRules | None:
        """What the entries are made of; None when somebody has looked at them, and may have changed them."""
        return None if "state_dict_metadata" in self.__dict__ else self._rules

    @functools.cached_property
    def _rules(self) -> StateRules:
        return _unpack_rules(*unpack(self.__dict__["_content"][0]))

    @functools.cached_property
    def state_dict_metadata(self) -> dict[str, Any]:  # type: ignore[override]
        """As torch's; it is made when it is asked for."""
        with collector_paused():
            return self._rules.described()

    @functools.cached_property
    def planner_data(self) -> Any:
        """As torch's; where it was received it is decoded when it is asked for."""
        return unpack_paths(with_keys(unpack(self.__dict__["_content"][1]), self._rules.keys))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Metadata):
            return NotImplemented
        return all(getattr(self, name) == getattr(other, name) for name in _FIELDS)

    def __reduce__(self) -> tuple[Any, ...]:
        try:
            if self.storage_data is not None or not _UNDERSTOOD:
                raise Unsupported
            return self._received, (self._packed(), self.storage_meta, self.version)
        except Unsupported:  # also what lies in a checkpoint of torch's: it is read without this package
            return Metadata, tuple(getattr(self, name) for name in _FIELDS)

    @classmethod
    def _received(
        cls, content: tuple[bytes, bytes], storage_meta: StorageMeta | None, version: str | None
    ) -> RuleMetadata:
        metadata = cls.__new__(cls)
        metadata.__dict__.update(_content=content, storage_data=None, storage_meta=storage_meta, version=version)
        return metadata

    def _packed(self) -> tuple[bytes, bytes]:
        """Rules, and the planner's data."""
        untouched = not {"state_dict_metadata", "planner_data"} & self.__dict__.keys()
        if untouched:
            content: tuple[bytes, bytes] = self.__dict__["_content"]
            return content
        rules = self.rules or _rules_of(self.state_dict_metadata)
        return _pack_rules(rules), pack(pack_paths(self.planner_data, rules.keys))


def _rules_of(described: Any) -> StateRules:
    """The rules of entries; raises `Unsupported` where they are more than torch's own."""
    if not all(map(_is_torchs, described.values())):
        raise Unsupported
    try:
        return StateRules.of(described)
    except WriteError as error:
        raise Unsupported from error


def _is_torchs(entry: Any) -> bool:
    return type(entry) is BytesStorageMetadata or (
        type(entry) is TensorStorageMetadata
        and type(entry.properties) is TensorProperties
        and type(entry.chunks) is list
        and all(type(chunk) is ChunkStorageMetadata for chunk in entry.chunks)
    )


def _pack_rules(rules: StateRules) -> bytes:
    layouts = encode_rows([layout.to_row() for layout in rules.layouts])
    return pack((rules.keys, pack_integers(rules.rows), rules.properties, layouts))


def _unpack_rules(keys: list[Any], rows: Any, properties: list[TensorProperties], layouts: bytes) -> StateRules:
    made = [ChunkLayout.from_row(row) for row in _decode_layouts(layouts)]
    return StateRules(keys, unpack_integers(rows).reshape(-1, 2), properties, made)
