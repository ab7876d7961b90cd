"""The keys that a conversion gives: without a prefix, under new names, behind another prefix, in this order."""

from __future__ import annotations

import re
from collections.abc import Mapping

from ...errors import ConversionError
from ..checkpoint_view import Path
from .common import Options

__all__ = ["key_of", "new_paths"]


def key_of(path: Path) -> str:
    """The key of the value at a place in the nested state dict."""
    return ".".join(map(str, path))


def new_paths(paths: Mapping[str, Path], options: Options, source: str) -> dict[str, Path]:
    """Where each value is to be in the new nested state dict, by its old key.

    Args:
        paths: Where they are.
        options: The prefixes and the new names.
        source: The checkpoint, for messages.

    Raises:
        ConversionError: two keys would be the same, nothing would be left of one, or a prefix or a pattern is of none.
    """
    stripped = {key: _stripped(path, options.strip_prefix) for key, path in paths.items()}
    if options.strip_prefix and all(stripped[key] is paths[key] for key in paths):
        raise ConversionError(f"no key of {source} that is to be converted begins with {options.strip_prefix!r}")
    renamed = _renamed(stripped, options.rename, source)
    new = {key: _prefixed(path, options.add_prefix) for key, path in renamed.items()}
    first: dict[str, str] = {}
    for key, path in new.items():
        if first.setdefault(key_of(path), key) != key:
            raise ConversionError(f"{first[key_of(path)]!r} and {key!r} of {source} would both be {key_of(path)!r}")
    return new


def _stripped(path: Path, prefix: str) -> Path:
    """What is left of a path whose key begins with ``prefix``; it begins with a key of a dict."""
    whole = path
    if not prefix or not key_of(path).startswith(prefix):
        return whole
    rest = prefix
    while path and rest.startswith(f"{path[0]}."):
        rest = rest.removeprefix(f"{path[0]}.")
        path = path[1:]
    if path and (rest or not isinstance(path[0], str)):
        path = (str(path[0]).removeprefix(rest), *path[1:])
    if not key_of(path):
        raise ConversionError(f"nothing is left of the key {key_of(whole)!r} without the prefix {prefix!r}")
    return path


def _renamed(paths: Mapping[str, Path], rules: Mapping[str, str], source: str) -> dict[str, Path]:
    """Paths with the new names of keys; fails for a rule that is of no key."""
    patterns = {rule: _pattern(rule, new) for rule, new in rules.items()}
    unused = set(rules)
    renamed = {}
    for old, path in paths.items():
        key = key_of(path)
        renamed[old] = path
        for rule, pattern in patterns.items():
            if match := pattern.fullmatch(key):
                unused.discard(rule)
                parts = iter(match.groups())
                new = re.sub(r"\*", lambda _, parts=parts: next(parts), rules[rule])  # type: ignore[misc]
                renamed[old] = _moved(path, new)
                break
    for rule in rules:
        if rule in unused:
            raise ConversionError(
                f"no key of {source} that is to be converted matches {rule!r}, which is to be renamed"
            )
    return renamed


def _pattern(rule: str, new: str) -> re.Pattern[str]:
    if not new or new.count("*") > rule.count("*"):
        raise ConversionError(f"{rule!r} cannot become {new!r}: that is empty, or has a * more")
    return re.compile("(.*)".join(map(re.escape, rule.split("*"))), re.DOTALL)


def _moved(path: Path, key: str) -> Path:
    """The path of a new key: in the same nested dicts as before, as far as it begins with their keys."""
    kept: list[str | int] = []
    for part in path[:-1]:
        if not key.startswith(f"{part}.") or key == f"{part}.":
            break
        kept.append(part)
        key = key.removeprefix(f"{part}.")
    return (*kept, key)


def _prefixed(path: Path, prefix: str) -> Path:
    if not prefix:
        return path
    *around, begin = prefix.split(".")
    return (*around, f"{begin}{path[0]}", *path[1:]) if begin else (*around, *path)
