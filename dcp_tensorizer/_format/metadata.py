"""DCP's ``Metadata`` and the index that ``.metadata`` holds of it: one is made of the other."""

from .index_reader import decode
from .index_writer import encode
from .keys import ItemKey, item_key

__all__ = ["ItemKey", "decode", "encode", "item_key"]
