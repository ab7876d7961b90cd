"""Encodes DCP's ``Metadata`` as the index in ``.metadata``."""

from __future__ import annotations

import io
import itertools
import time
from collections.abc import Sequence
from typing import Any

import torch
from msgspec.msgpack import Ext
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta

from .._runtime.interpreter import collector_paused
from .._runtime.recent import Recent
from .._tensor_file.encryption import Cipher
from .._tensor_file.names import MAX_INLINE_BYTES
from .._trust.objects import load_object
from .._version import __version__
from ..errors import WriteError, describe
from .container import Part, pack
from .entries import StateRules, entries_section
from .locations import RankLocations, inline_rows
from .schema import DataFile, Head, KeyRecord, SaveRecord, encode_rows, to_text


@collector_paused()
def encode(
    metadata: Metadata,
    parts: Sequence[RankLocations],
    *,
    rank: int | None = None,
    cipher: Cipher | None = None,
    recent: Recent[bytes] | None = None,
    record: SaveRecord | None = None,
) -> bytes:
    """Returns the contents of ``.metadata``. Raises `WriteError` if no reader could read a key or the planner's data.

    If ``metadata`` has ``rules`` (`StateRules`), uses them, not its entries. ``parts`` are the ranks' reports. If
    several ranks wrote a chunk, the index refers to the last rank's copy. ``rank`` is set if each rank saves for
    itself. ``recent`` caches the sections of earlier saves, to reuse unchanged ones.
    """
    rules = getattr(metadata, "rules", None) or StateRules.of(metadata.state_dict_metadata)
    section = entries_section(rules, parts, recent)
    sections = [Part("entries", None, section), *_planner_part(metadata.planner_data)]
    items = [item for part in parts for item in part.inline]
    ends = itertools.accumulate(len(item.content) for item in items)
    if inline := [item for item, end in zip(items, ends, strict=True) if end <= MAX_INLINE_BYTES]:
        sections.append(Part("inline", None, encode_rows(inline_rows(inline))))
    sections += [
        Part("places", part.rank, part.section, tuple(DataFile(*file) for file in part.files)) for part in parts
    ]
    meta = metadata.storage_meta or StorageMeta()
    head = Head(
        release=__version__,
        torch=str(torch.__version__),
        saved_at=time.time_ns(),
        rank=rank,
        has_storage_meta=metadata.storage_meta is not None,
        save_id=_optional_text(meta.save_id),
        load_id=_optional_text(meta.load_id),
        checkpoint_id=_optional_text(meta.checkpoint_id),
        modules=[to_text(str(module)) for module in meta.modules],
        metadata_version=_optional_text(metadata.version),
        encryption=None if cipher is None else KeyRecord(cipher.check_value(), cipher.derivation),
        sections=[],
        record=record,
    )
    return pack(head, sections, None if cipher is None else cipher.sign)


def _optional_text(value: Any) -> str | Ext | None:
    return None if value is None else to_text(str(value))


def _planner_part(data: Any) -> list[Part]:
    """Packs a planner's data: the paths of keys as MessagePack, any other data with ``torch.save``.

    Raises `WriteError` if no reader would load the data.
    """
    if data is None:
        return []
    if _are_paths(data):
        try:
            return [Part("paths", None, encode_rows(data))]
        except (UnicodeEncodeError, OverflowError):
            pass  # MessagePack cannot represent some strings and numbers
    stream = io.BytesIO()
    try:
        torch.save(data, stream)
    except Exception as error:
        raise WriteError(f"the planner's data cannot be stored: {type(error).__name__}: {error}") from error
    try:
        load_object(stream.getvalue())
    except Exception as error:
        raise WriteError(
            f"the planner's data holds an object that no reader would load: {describe(error)}. Let the planner use "
            f"plain data, or pass the object's type to torch.serialization.add_safe_globals before the save and each "
            f"load."
        ) from error
    return [Part("planner", None, stream.getvalue())]


def _are_paths(data: Any) -> bool:
    """Returns whether data is that of torch's own planners: paths of strings and numbers, by key."""
    return type(data) is dict and all(
        type(key) is str and type(path) is tuple and all(type(part) in (str, int) for part in path)
        for key, path in data.items()
    )
